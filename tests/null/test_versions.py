"""Versions that autopar was not made for are refused before anything of theirs breaks; those of the tests' own tools
work together."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import autopar
from autopar import versions
from autopar.ir.errors import AutoparWarning, ClusterError, VersionError

ROOT = Path(__file__).parents[2]


def test_the_package_asks_for_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {
        *project["dependencies"],
        *project["optional-dependencies"]["ray"],
        *project["optional-dependencies"]["test"],
    }
    for name, bounds in versions.SUPPORTED.items():
        least, below = (".".join(map(str, bound)) for bound in bounds)
        assert f"{name}>={least},<{below}" in asked
        versions.check_version(name)


@pytest.mark.parametrize("found", ["0.9.2", "0.13.0", "1.0.0.dev3"])
def test_others_are_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(versions, "version", lambda _: found)
    with pytest.raises(VersionError, match=rf"made for jax>=0.10,<0.13, .* jax {found} is installed: pip install"):
        versions.check_version("jax")
    monkeypatch.setenv(versions.ANYWAY, "1")
    with pytest.warns(AutoparWarning, match=f"jax {found} is installed"):
        versions.check_version("jax")


@pytest.mark.slow
def test_they_are_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import jax; jax.__version__ = '0.99.0'\n"
        "import autopar\n"
        "try: autopar.parallelize\n"
        "except ImportError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert said.startswith("autopar is made for jax>=0.10,<0.13")
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'autopar[ray]'")
    monkeypatch.setattr(versions, "version", lambda _: "2.99.0")
    with pytest.raises(VersionError, match=r"ray>=2.60,<2.61, .* ray 2.99.0 is installed"):
        autopar.init()
    assert not issubclass(VersionError, ClusterError)


@pytest.mark.xdist_group("of its own")
def test_processes_that_run_tests_see_their_groups(request: pytest.FixtureRequest) -> None:
    """Tests on Ray share one, those of a model what it takes to compare with."""
    grouped = getattr(request.config.option, "loadgroup", False)
    assert request.node.nodeid.endswith("@of its own") == grouped
