"""One local Ray for all tests of a session, on ports that nobody else has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.ports import free_ports

HEADS = 20_000, 25_600
"""Their ports: below those of a Ray that a user may have, 26379 (chosen)."""


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Ray that was started here. It is shut down by the last test, or here."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'autopar[ray]'")
    import autopar

    cache = tmp_path_factory.mktemp("compiled")
    with autopar.init(ports=free_ports(*HEADS), spec="cpu:4", compilation_cache=cache) as cluster:
        yield cluster


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process runs them all, where there are several (`make test-all`)."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("ray"))


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Numbers of 64 bits."""
    with jax.enable_x64(True):
        yield
