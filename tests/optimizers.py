"""A small step of unrolled layers for any of optax's transformations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import autopar

WIDTH, VOCABULARY, BATCH = 16, 32, (8, 4)


def _init(key: jax.Array, layers: int, dtype: Any) -> Any:
    keys = jax.random.split(key, 2 * layers + 2)
    blocks = [
        {
            "in": jax.random.normal(keys[2 * i], (WIDTH, 2 * WIDTH), dtype) / 4,
            "out": jax.random.normal(keys[2 * i + 1], (2 * WIDTH, WIDTH), dtype) / 4,
            "scale": jnp.ones(WIDTH, dtype),
        }
        for i in range(layers)
    ]
    embedding = jax.random.normal(keys[-2], (VOCABULARY, WIDTH), dtype)
    return {"embedding": embedding, "blocks": blocks, "head": jax.random.normal(keys[-1], (WIDTH, VOCABULARY), dtype)}


def _loss(params: Any, tokens: Any) -> Any:
    x = params["embedding"][tokens]
    for block in params["blocks"]:
        x = x + jnp.tanh((x * block["scale"]) @ block["in"]) @ block["out"]
    log_p = jax.nn.log_softmax(x @ params["head"])
    return -jnp.mean(jnp.take_along_axis(log_p, tokens[..., None], -1))


def train_step(optimizer: Any, layers: int, dtype: Any = jnp.float32) -> tuple[Any, Any, Any]:
    """A step (state, tokens) → (state, {loss, norm of the gradients, that all are finite}), and its arguments'
    shapes."""

    def step(state: Any, tokens: Any) -> Any:
        loss, grads = autopar.value_and_grad(_loss)(state["params"], tokens)
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        said = {"loss": loss, "norm": optax.tree.norm(grads), "finite": finite}
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer_state}, said

    state = jax.eval_shape(lambda: fresh(optimizer, layers, dtype))
    return step, state, jax.ShapeDtypeStruct(BATCH, jnp.int32)


def fresh(optimizer: Any, layers: int, dtype: Any = jnp.float32) -> Any:
    """A state of it."""
    params = _init(jax.random.key(0), layers, dtype)
    return {"params": params, "optimizer": optimizer.init(params)}


def batch() -> Any:
    """Tokens."""
    return jax.random.randint(jax.random.key(1), BATCH, 0, VOCABULARY)
