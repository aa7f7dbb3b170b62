"""Complex numbers between the workers of a pipeline, in pieces that are too large for messages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.runtime.transports import SMALL_BYTES
from tests.compare import assert_close

ROWS, WIDTH, MICROBATCHES = 1024, 16, 2


def loss(weights: Any, x: Any) -> Any:
    x = x @ weights[0]
    z = autopar.layer_boundary(jax.lax.complex(jnp.sin(x), jnp.cos(x)))
    return jnp.mean(jnp.tanh((jnp.abs(z + 1) * jnp.imag(z * z)) @ weights[1]) ** 2)


def step(weights: Any, x: Any) -> Any:
    value, grads = autopar.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


@pytest.mark.full  # `test_device_bytes` has their bytes
def test_complex_numbers_cross(ray_cluster: Any) -> None:
    """Forward, and their cotangents backward."""
    assert 16 * WIDTH * ROWS // MICROBATCHES > SMALL_BYTES
    args = [np.random.default_rng(k).normal(size=(WIDTH, WIDTH)) for k in range(2)], np.ones((ROWS, WIDTH)) / WIDTH
    far = autopar.parallelize(
        step, cluster=ray_cluster, num_microbatches=MICROBATCHES, stages=2, submeshes=["1x1"], schedule="1f1b",
        workers=1,
    )  # fmt: skip
    plan = far.plan(*args)
    crossing = [{v.type.dtype for v in cut.values} for cut in plan.stages.cuts]
    assert crossing == [{"complex128"}, {"complex128"}]
    out, near = far(*args), autopar.parallelize(step, plan=plan)(*args)
    jax.tree.map(np.testing.assert_array_equal, *(jax.tree.map(np.asarray, tree) for tree in (out, near)))
    assert_close(jax.tree.map(np.asarray, out), jax.jit(step)(*args), 1e-9)
    far.close()
