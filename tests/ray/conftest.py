"""One local Ray for all tests of a session, on ports that nobody else has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

FIRST_BASE, LAST_BASE = 20_000, 25_600
"""Heads' ports: below those of a Ray that a user may have, 26379 (chosen)."""


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Ray that was started here. It is shut down by the last test, or here."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'autopar[ray]'")
    import autopar

    cache = tmp_path_factory.mktemp("compiled")
    with autopar.init(ports=free_ports(), spec="cpu:4", compilation_cache=cache) as cluster:
        yield cluster


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process runs them all, where there are several (`make test-all`)."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("ray"))


def free_ports() -> Any:
    """Ports of a head that nothing listens on; runs at the same time try others first."""
    from autopar.runtime.on_ray.ports import SPAN, is_free, ports_from

    bases = list(range(FIRST_BASE, LAST_BASE, SPAN))
    first = os.getpid() % len(bases)
    for base in bases[first:] + bases[:first]:
        ports = ports_from(base)
        if all(is_free(port) for _, port in ports.daemons()):
            return ports
    raise AssertionError(f"no {SPAN} ports are free from {FIRST_BASE} to {LAST_BASE}")


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Numbers of 64 bits."""
    with jax.enable_x64(True):
        yield
