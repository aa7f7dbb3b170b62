"""Benchmarks are checked by no types: what they import has to be there."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import benchmarks


@pytest.mark.slow
def test_all_can_be_imported() -> None:
    names = [found.name for found in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]
    assert "benchmarks.ray_cut" in names
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
