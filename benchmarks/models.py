"""The train steps that several benchmarks share: each a function → (train step, its arguments).

Arguments are ShapeDtypeStructs, so that nothing here needs a device; `random_arguments` makes arrays of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar
from examples.gpt import model


def gpt(
    *,
    layers: int,
    scan: bool = False,
    remat: bool = False,
    hidden: int = 1024,
    heads: int = 16,
    seq: int = 1024,
    vocab: int = 51200,
    batch: int = 64,
    dtype: str = "bfloat16",
    weight_decay: float = 0.0,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The GPT of the planning table: d = 1024, 16 heads, bfloat16 compute, float32 parameters, tied embedding; Adam,
    or AdamW with ``weight_decay``."""
    config = model.GPTConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        seq=seq,
        vocab=vocab,
        dtype=dtype,
        scan=scan,
        remat=remat,
        weight_decay=weight_decay,
    )
    return model.make_train_step(config), model.train_step_args(config, batch)


def small_gpt(*, layers: int = 4) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A GPT whose step is short and whose state has many leaves: 13 a layer, three times (parameters, two moments)."""
    return gpt(layers=layers, hidden=16, heads=8, seq=8, vocab=64, batch=16, dtype="float32")


def mlp(*, width: int = 16, batch: int = 16) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Two layers, plain gradient descent: as short as a train step gets. State: dict of float32[width, width]."""
    optimizer = optax.sgd(0.1)

    def loss_fn(params: dict[str, Any], x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - x) ** 2)

    def train_step(state: tuple[Any, Any], x: Any) -> tuple[tuple[Any, Any], Any]:
        params, opt_state = state
        loss, grads = autopar.value_and_grad(loss_fn)(params, x)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    params = {name: jax.ShapeDtypeStruct((width, width), jnp.float32) for name in ("up", "down")}
    state = (params, jax.eval_shape(optimizer.init, params))
    return train_step, (state, jax.ShapeDtypeStruct((batch, width), jnp.float32))


def chain_loss(params: Sequence[Any], x: Any) -> Any:
    """Mean square of a chain of products, a tanh after each."""
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def chain_step(params: Sequence[Any], x: Any) -> tuple[Any, Any]:
    """Plain gradient descent on `chain_loss`: (new parameters, loss)."""
    value, grads = autopar.value_and_grad(chain_loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


CLIPPED_ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def clipped_chain_step(state: tuple[Any, Any], x: Any) -> tuple[Any, Any]:
    """`CLIPPED_ADAM` on `chain_loss`: ((new parameters, new moments), loss)."""
    params, moments = state
    value, grads = autopar.value_and_grad(chain_loss)(params, x)
    updates, moments = CLIPPED_ADAM.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), value


def random_arguments(args: Any, *, seed: int = 0) -> Any:
    """NumPy arrays of the shapes and dtypes of ``args``: floats uniform in [0, 0.1), integers 0 or 1."""
    random = np.random.default_rng(seed)

    def array(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return (0.1 * random.random(leaf.shape)).astype(leaf.dtype)
        return random.integers(0, 2, leaf.shape).astype(leaf.dtype)

    return jax.tree.map(array, args)
