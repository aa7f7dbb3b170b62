"""Which versions of the packages whose private parts are used autopar is made for and tested with."""

from __future__ import annotations

import os
import re
from importlib.metadata import version

from autopar.ir.errors import VersionError
from autopar.ir.warned import warn

SUPPORTED = {"jax": ((0, 10), (0, 13)), "jaxlib": ((0, 10), (0, 13)), "ray": ((2, 60), (2, 61))}
"""Name → (from, below), as in pyproject.toml."""
ANYWAY = "AUTOPAR_UNTESTED_VERSIONS"
"""The environment variable that makes the error a warning."""


def check_version(name: str, found: str | None = None) -> None:
    """Raises VersionError where package ``name`` is of a version that `SUPPORTED` leaves out, or warns where `ANYWAY`
    is set. ``found``: its version; None: as its installation says (importlib.metadata.PackageNotFoundError where there
    is none)."""
    least, below = SUPPORTED[name]
    found = version(name) if found is None else found
    parts = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if least <= parts < below:
        return
    wanted = f"{name}>={'.'.join(map(str, least))},<{'.'.join(map(str, below))}"
    text = f"autopar is made for {wanted}, whose private parts it uses, and {name} {found} is installed"
    if os.environ.get(ANYWAY):
        warn(f"{text}; {ANYWAY} is set")
        return
    raise VersionError(f"{text}: pip install '{wanted}', another autopar, or try it all the same ({ANYWAY}=1)")
