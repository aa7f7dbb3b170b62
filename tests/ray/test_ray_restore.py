"""A restore on Ray that fails on one worker harms nobody: neither that worker nor what the others have read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.ir.errors import CheckpointError
from tests.ray.steps import train

WIDTH, LAYERS = 32, 2
"""8 KiB a weight: what is smaller than 1 KiB lies in the index, which all read."""
X = np.random.default_rng(9).normal(size=(8, WIDTH))


def init(key: Any) -> list[Any]:
    """Float64 (WIDTH, WIDTH) each, a stage's each."""
    return [jax.random.normal(k, (WIDTH, WIDTH), "float64") * WIDTH**-0.5 for k in jax.random.split(key, LAYERS)]


@pytest.mark.full
def test_a_slice_that_one_worker_cannot_read(ray_cluster: Any, tmp_path: Path) -> None:
    far = autopar.parallelize(
        train, cluster=ray_cluster, num_microbatches=2, layers=2, stages=2, submeshes=["1x1"], schedule="1f1b",
        workers=1,
    )  # fmt: skip
    far.plan(jax.eval_shape(init, jax.random.key(0)), X)
    state = far.init(init, jax.random.key(0))
    assert [[p.worker for p in w.pieces] for w in state] == [[0], [1]]
    item = autopar.save(tmp_path, state, step=1).wait(60) / "default"
    value = float(far(state, X)[1])
    workers: Any = far.compiled()
    before = [x.arrays for x in workers.live()]
    (written,) = item.glob("ocdbt.process_*_1")
    (numbers,) = [f for f in written.rglob("*") if f.is_file() and f.stat().st_size > 8 * WIDTH**2]
    whole = numbers.read_bytes()
    damaged = bytearray(whole)
    damaged[len(damaged) // 2] ^= 1
    numbers.write_bytes(damaged)
    for target in (far.abstract(init, jax.random.key(0)), state):
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"worker 1: .*\[1\]"):
                autopar.restore(tmp_path, target)
    assert float(far(state, X)[1]) == value  # they live, and let go with this step of what was read
    assert [x.arrays for x in workers.live()] == before
    numbers.write_bytes(whole)
    back = autopar.restore(tmp_path, far.abstract(init, jax.random.key(0)))
    jax.tree.map(np.testing.assert_array_equal, *(jax.tree.map(np.asarray, tree) for tree in (back, state)))
    assert float(far(back, X)[1]) == value
    far.close()
