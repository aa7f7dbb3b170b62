"""Warnings that point at the user's line: `warn`."""

from __future__ import annotations

import inspect
import warnings

from autopar.ir.errors import AutoparWarning

_OWN = ("autopar", "contextlib", "functools", "importlib")
"""Packages whose frames are between a user's line and a warning."""


def warn(text: str) -> None:
    """An AutoparWarning of the innermost line that is not autopar's; its own where all are.

    `warnings.warn` has skip_file_prefixes for that from Python 3.12 on.
    """
    frame = at = inspect.currentframe()
    assert at is not None  # CPython has frames
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OWN:
        frame = frame.f_back
    at = frame or at
    module, seen = at.f_globals.get("__name__"), at.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, AutoparWarning, at.f_code.co_filename, at.f_lineno, module, seen)
