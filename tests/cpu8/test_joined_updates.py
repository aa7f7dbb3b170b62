"""Updates that join layers, run as stages: the numbers of the step without them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from benchmarks.optimizers import OPTIMIZERS
from tests.compare import assert_close
from tests.optimizers import batch, fresh, train_step

LAYERS, STEPS = 4, 3
QUICK = ("clip_by_global_norm",)
REST = ("noisy_sgd", "apply_if_finite", "multi_steps", "multi_transform", "lamb", "novograd", "skip_large_updates")


def arrays(tree: Any) -> Any:
    """Numpy's; keys as what they hold."""
    keys = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if keys(x) else x), tree)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.full) for n in REST)])
def test_numbers(name: str) -> None:
    """Of the state, the loss, the norm of all gradients and whether all are finite, which stages put together."""
    with jax.enable_x64(True):
        step, _, _ = train_step(OPTIMIZERS[name], LAYERS, jnp.float64)
        state, tokens = fresh(OPTIMIZERS[name], LAYERS, jnp.float64), batch()
        planned = autopar.parallelize(
            step, cluster="cpu:4", num_microbatches=2, stages=2, layers=LAYERS, workers=1,
        )  # fmt: skip
        serial = jax.jit(autopar.serial(step, 2))
        planned.plan(state, tokens)
        got = want = (state, None)
        for _ in range(STEPS):
            got, want = planned(got[0], tokens), serial(want[0], tokens)
        assert_close(arrays(got), arrays(want), 1e-9)
        assert float(got[1]["norm"]) > 0 and bool(got[1]["finite"])
