"""Steps, batches and comparisons that tests of microbatches share; in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from autopar.frontend.gradient import value_and_grad
from autopar.frontend.microbatch import serial

BATCH, TIME, WIDTH, CLASSES = 8, 6, 8, 5


def params() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"a": (WIDTH, WIDTH), "b": (WIDTH,), "out": (WIDTH, CLASSES), "layers": (3, WIDTH, WIDTH)}
    return {k: jnp.asarray(rng.normal(size=s) * 0.4) for k, s in shapes.items()}


def batch() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {
        "x": jnp.asarray(rng.normal(size=(BATCH, TIME, WIDTH))),
        "y": jnp.asarray(rng.integers(0, CLASSES, (BATCH, TIME))),
        "mask": jnp.asarray(rng.random((BATCH, TIME)) > 0.3),
        "row": jnp.asarray(rng.integers(0, CLASSES, BATCH)),
    }


def step_of(loss: Callable[..., Any], has_aux: bool = False, optimizer: Any = None) -> Callable[..., Any]:
    """A train step on (params, optimizer state)."""
    update = (optimizer or optax.sgd(1e-1)).update

    def step(state: Any, data: Any, *rest: Any) -> Any:
        weights, opt = state
        value, grads = value_and_grad(loss, has_aux=has_aux)(weights, data, *rest)
        updates, opt = update(grads, opt, weights)
        return (optax.apply_updates(weights, updates), opt), value, grads

    return step


def state_of(weights: Any, optimizer: Any = None) -> Any:
    return weights, (optimizer or optax.sgd(1e-1)).init(weights)


def close(found: Any, wanted: Any, tolerance: float = 2e-13, single: float = 1e-6) -> None:
    """Equal trees of arrays, but for ``tolerance``, relative to the largest entry; ``single``: of float32 at least."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for path, x in jax.tree_util.tree_flatten_with_path(found)[0]:
        y = dict(jax.tree_util.tree_flatten_with_path(wanted)[0])[path]
        assert x.shape == y.shape and x.dtype == y.dtype, path
        tolerance = max(tolerance, single if x.dtype == jnp.float32 else 0)
        scale = max(1.0, float(np.abs(np.asarray(y, np.float64)).max(initial=0)))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path))


def exact(
    loss: Callable[..., Any], *rest: Any, aux: bool = False, weights: Any = None, optimizer: Any = None, ns: Any = (2,)
) -> None:
    """Three steps with n microbatches equal three steps with the full batch."""
    step = step_of(loss, aux, optimizer)
    data = batch()
    reference, serials = jax.jit(step), {n: jax.jit(serial(step, n)) for n in ns}
    start = state_of(params() if weights is None else weights, optimizer)
    wanted = start
    found = dict.fromkeys(ns, start)
    for _ in range(3):
        wanted, *values = reference(wanted, data, *rest)
        for n in ns:
            found[n], *others = serials[n](found[n], data, *rest)
            close(others, values)
    for n in ns:
        close(found[n], wanted, 2e-13 if optimizer is None else 1e-9)  # Adam divides by tiny second moments
