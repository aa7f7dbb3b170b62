"""What a type checker makes of a parallelized step: the step's own signature and result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import autopar

STEPS = """
import jax
from typing import assert_type

import autopar


@autopar.parallelize
def bare(x: jax.Array, n: int = 1) -> tuple[jax.Array, str]:
    return x, ""


@autopar.parallelize(mesh=(2, 4), num_microbatches=2)
def given(x: jax.Array, n: int = 1) -> tuple[jax.Array, str]:
    return x, ""


x = jax.numpy.ones(3)
assert_type(bare(x, 1), tuple[jax.Array, str])
assert_type(given(x, n=1), tuple[jax.Array, str])
assert_type(given.with_options(mesh=8)(x), tuple[jax.Array, str])
assert_type(autopar.parallelize(bare, mesh=8)(x), tuple[jax.Array, str])
bare("text")  # wrong
given(x, m=1)  # wrong
autopar.parallelize(bare, num_stages=2)  # wrong
"""


@pytest.mark.slow
def test_a_parallelized_step_has_the_types_of_the_step(tmp_path: Path) -> None:
    assert Path(autopar.__file__).with_name("py.typed").exists()
    (tmp_path / "steps.py").write_text(STEPS, encoding="utf-8")
    package = Path(autopar.__file__).parents[1]  # installed to be edited, it is found at run time alone
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(package)]}), encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "-p", "."]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False).stdout
    wrong = [n for n, line in enumerate(STEPS.splitlines(), 1) if line.endswith("# wrong")]
    assert [int(line.split(":")[1]) for line in told.splitlines() if " - error: " in line] == wrong, told
