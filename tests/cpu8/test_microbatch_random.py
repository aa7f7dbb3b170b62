"""`serial` draws the random numbers of the full batch, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar.frontend.microbatch import serial
from tests.microbatches import TIME, WIDTH, batch, exact, params, state_of, step_of
from tests.shares import each

pytestmark = pytest.mark.usefixtures("float64")


def _dropped(key_of: Callable[[Any], Any], shape_of: Callable[[Any], Any], dtype: Any = jnp.float32) -> Any:
    def loss(p: Any, d: Any, key: Any) -> Any:
        noise = jax.random.uniform(key_of(key), shape_of(d["x"]), dtype)
        h = jnp.tanh(d["x"] @ p["a"]).reshape(noise.shape)
        return (h * noise).mean(), noise

    return loss


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("dtype", each(2, [jnp.bfloat16, jnp.float32, jnp.float64]))
def test_random_numbers_are_bit_equal(impl: str, dtype: Any) -> None:
    loss = _dropped(lambda k: jax.random.fold_in(k, 3), lambda x: x.shape, dtype)
    step, key = step_of(loss, has_aux=True), jax.random.key(7, impl=impl)
    wanted = jax.jit(step)(state_of(params()), batch(), key)[1][1]
    for n in (2, 4):
        found = jax.jit(serial(step, n))(state_of(params()), batch(), key)[1][1]
        np.testing.assert_array_equal(np.asarray(found, np.float64), np.asarray(wanted, np.float64))


SHAPES: dict[str, Callable[..., Any]] = {
    "flattened": lambda p, d, k: (jax.random.bits(k, (d["x"].shape[0] * TIME,), jnp.uint8), d["x"].reshape(-1, WIDTH)),
    "batch last": lambda p, d, k: (jax.random.bits(k, (3, d["x"].shape[0]), jnp.uint16), d["x"]),
    "vmapped": lambda p, d, k: (
        jax.vmap(lambda kk: jax.random.bits(kk, (4,), jnp.uint32))(jax.random.split(k, d["x"].shape[0])), d["x"]
    ),
    "keys": lambda p, d, k: (
        jax.vmap(lambda kk: jax.random.bits(kk, (d["x"].shape[0],), jnp.uint64))(jax.random.split(k, 3)), d["x"]
    ),
    "permutation of features": lambda p, d, k: (jax.random.permutation(k, WIDTH), d["x"]),
    "categorical": lambda p, d, k: (jax.random.categorical(k, d["x"]), d["x"]),
    "normal": lambda p, d, k: (jax.random.normal(k, d["x"].shape), d["x"]),
}  # fmt: skip


def test_random_numbers_of_many_shapes() -> None:
    def loss(p: Any, d: Any, key: Any) -> Any:
        drawn = {name: draw(p, d, key) for name, draw in SHAPES.items()}
        total = sum(jnp.mean(jnp.sin(x @ p["a"])) for _, x in drawn.values())
        return total, {name: noise for name, (noise, _) in drawn.items()}

    step = step_of(loss, has_aux=True)
    arguments = state_of(params()), batch(), jax.random.key(3)
    wanted = jax.jit(step)(*arguments)[1][1]
    found = jax.jit(serial(step, 4))(*arguments)[1][1]
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_dropout_in_flattened_tokens_follows_their_order() -> None:
    loss = _dropped(lambda k: k, lambda x: (x.shape[0] * x.shape[1], x.shape[2]), jnp.float64)
    exact(lambda p, d, k: loss(p, d, k)[0], jax.random.key(0))


def _gpt(p: Any, d: Any, key: Any) -> Any:
    def layer(h: Any, xs: Any) -> Any:
        w, k = xs

        @jax.checkpoint
        def block(h: Any, w: Any, k: Any) -> Any:
            keep = jax.random.bernoulli(k, 0.8, h.shape)
            scores = jnp.einsum("btd,bsd->bts", h @ w, h)
            scores = jnp.where(jnp.tril(jnp.ones((TIME, TIME), bool)), scores, -1e9)
            return h + jnp.where(keep, jax.nn.softmax(scores) @ jax.nn.gelu(h @ w), 0) / 0.8

        return block(h, w, k), None

    h = p["out"].T[d["y"]] + d["x"]
    h, _ = jax.lax.scan(layer, h, (p["layers"], jax.random.split(key, 3)))
    logits = h @ p["out"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, d["y"])
    return (loss * d["mask"]).sum() / d["mask"].sum(), (logits.argmax(-1) == d["y"]).sum()


def test_gpt_with_scan_remat_dropout_and_tied_embedding() -> None:
    exact(_gpt, jax.random.key(5), aux=True, optimizer=optax.adamw(1e-2), ns=(4,))


def test_gpt_with_a_generator_that_draws_the_whole_batch() -> None:
    exact(_gpt, jax.random.key(5, impl="rbg"), aux=True)
