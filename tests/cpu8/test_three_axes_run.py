"""Stages on meshes of three axes give the numbers of one device: on 16 devices, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import autopar
from benchmarks.models import gpt, random_arguments
from tests.compare import assert_close

ROOT = Path(__file__).parents[2]


def stages_on_three_axes(schedule: str) -> None:
    """One step of two stages, 2 x 2 x 2 devices each, beside that of one device."""
    make, args = gpt(layers=4, hidden=64, heads=8, seq=16, vocab=128, batch=32, dtype="float32")
    step = autopar.parallelize(
        make, cluster="cpu:16", stages=2, submeshes=["1x8"], num_microbatches=4, schedule=schedule, mesh_axes=3,
    )  # fmt: skip
    plan = step.plan(*args).data
    assert [mesh.shape for mesh in plan.meshes] == [(2, 2, 2), (2, 2, 2)], plan.meshes
    got = step(*random_arguments(args))
    assert_close(jax.tree.map(np.asarray, got), jax.jit(make)(*random_arguments(args)), 2e-4)


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb_h1", marks=pytest.mark.full)])
def test_stages_on_three_axes(schedule: str) -> None:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "16", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.cpu8.test_three_axes_run", schedule]
    subprocess.run(command, env=env, cwd=ROOT, check=True, timeout=300)


if __name__ == "__main__":
    stages_on_three_axes(sys.argv[1])
