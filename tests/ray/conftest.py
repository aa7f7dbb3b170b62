"""One local Ray for all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A Ray that was started here. It is shut down by the last test, or here."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'autopar[ray]'")
    from autopar.runtime.on_ray.cluster import init

    with init() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Numbers of 64 bits."""
    with jax.enable_x64(True):
        yield
