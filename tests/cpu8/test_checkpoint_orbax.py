"""Orbax reads what autopar wrote, and the other way round."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from autopar import checkpoint
from tests.checkpoints import assert_same
from tests.orbax_state import texts, training_state


def mesh(*sizes: int) -> Mesh:
    count = int(np.prod(sizes))
    return Mesh(np.array(jax.devices()[:count]).reshape(sizes), tuple("abc"[: len(sizes)]))


def run_orbax(python: str, *args: str) -> str:
    script = Path(__file__).parents[1] / "orbax_reader.py"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(
        [python, str(script), *args], cwd="/", env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_orbax_reads(python: str, root: Path) -> None:
    state = training_state(NamedSharding(mesh(4, 2), PartitionSpec("a", "b")))
    autopar.save(root, state, step=7).wait(60)
    got = json.loads(run_orbax(python, str(root), "7").splitlines()[-1])
    assert got["steps"] == [7] and got["sharded"]
    assert got["target"] == texts(state)
    for name in ("pytree", "standard", "manager"):
        assert sorted(got[name]) == sorted(texts(state, keys=False)), name


def test_orbax_reads_what_autopar_wrote(tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    assert_orbax_reads(sys.executable, tmp_path / "saves")


@pytest.mark.full
def test_orbax_of_the_package_index_reads_it_where_autopar_is_not_installed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    done = subprocess.run(
        [python, "-I", "-m", "pip", "install", "--quiet", "orbax-checkpoint", "optax"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"orbax-checkpoint cannot be installed here: {done.stderr.strip().splitlines()[-1:]}")
    assert (
        subprocess.run([python, "-I", "-c", "import autopar"], cwd="/", capture_output=True, check=False).returncode
        == 1
    )
    assert_orbax_reads(python, tmp_path / "saves")


def test_autopar_reads_what_orbax_wrote(tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    root = tmp_path / "saves"
    run_orbax(sys.executable, "--write", str(root))
    state = training_state(NamedSharding(mesh(4, 2), PartitionSpec("a", "b")))
    assert checkpoint.steps(root) == (1, 2, 3, 4, 5)
    for step in range(1, 6):
        assert_same(autopar.restore(root, state, step=step), state)
    assert_same(autopar.restore(tmp_path / "saves-bare", state), state)
