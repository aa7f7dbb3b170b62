"""Equinox: models are pytrees; what is no array is partitioned away before the step."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from tests.ecosystem.data import ints, normal
from tests.ecosystem.step import Made, steps, trained

KEY = jax.random.key(0)


def _entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def mlp() -> Made:
    params, static = eqx.partition(eqx.nn.MLP(16, 8, 32, 2, key=KEY), eqx.is_inexact_array)

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        return _entropy(jax.vmap(eqx.combine(params, static))(x), labels)

    return trained(loss, params, normal(16, 16), ints(8, 16))


def filter_jit() -> Made:
    """A step under `eqx.filter_jit`, within which all is written with `eqx.filter_*`."""
    model = eqx.nn.MLP(16, 8, 32, 2, activation=jax.nn.gelu, key=KEY)
    arrays, static = eqx.partition(model, eqx.is_array)
    tx = optax.adam(1e-2)

    @eqx.filter_jit
    def make_step(model: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - y) ** 2))(model)
        updates, opt_state = tx.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        arrays, opt_state = state
        model, opt_state, loss = make_step(eqx.combine(arrays, static), opt_state, x, y)
        return (eqx.filter(model, eqx.is_array), opt_state), loss

    state = arrays, tx.init(eqx.filter(model, eqx.is_inexact_array))
    return Made(step=step, state=state, rest=(normal(16, 16), normal(16, 8, seed=1)))


def cnn() -> Made:
    keys = jax.random.split(KEY, 3)
    net = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 8, 3, padding=1, key=keys[0]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.Conv2d(8, 16, 3, stride=2, padding=1, key=keys[1]),
            eqx.nn.GroupNorm(4, 16),
            eqx.nn.AdaptiveAvgPool2d(1),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(16, 10, key=keys[2]),
        ]
    )
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        return _entropy(jax.vmap(eqx.combine(params, static))(x), labels)

    return trained(loss, params, normal(8, 3, 16, 16), ints(10, 8))


def batchnorm_state() -> Made:
    """`eqx.nn.BatchNorm` with `eqx.nn.State` through the step."""
    one, two = jax.random.split(KEY)

    class Net(eqx.Module):
        first: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        last: eqx.nn.Linear

        def __call__(self, x: jax.Array, state: Any) -> Any:
            x, state = self.norm(self.first(x), state)
            return self.last(jax.nn.relu(x)), state

    def build() -> Net:
        norm = eqx.nn.BatchNorm(32, "batch", mode="batch")
        return Net(eqx.nn.Linear(16, 32, key=one), norm, eqx.nn.Linear(32, 8, key=two))

    model, state = eqx.nn.make_with_state(build)()
    params, static = eqx.partition(model, eqx.is_inexact_array)
    tx = optax.adam(1e-2)

    def step(carried: Any, x: jax.Array, labels: jax.Array) -> Any:
        params, state, opt_state = carried

        def loss_fn(params: Any) -> Any:
            run = jax.vmap(eqx.combine(params, static), axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            logits, new = run(x, state)
            return _entropy(logits, labels), new

        (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state)
        return (eqx.apply_updates(params, updates), state, opt_state), loss

    return Made(step=step, state=(params, state, tx.init(params)), rest=(normal(16, 16), ints(8, 16)))


def ensemble() -> Made:
    """Models made and run under `eqx.filter_vmap`."""
    models = eqx.filter_vmap(lambda key: eqx.nn.MLP(8, 1, 16, 2, key=key))(jax.random.split(KEY, 8))
    params, static = eqx.partition(models, eqx.is_inexact_array)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        run = eqx.filter_vmap(lambda m, x: jax.vmap(m)(x), in_axes=(eqx.if_array(0), None))
        return jnp.mean((run(eqx.combine(params, static), x)[..., 0] - y) ** 2)

    return trained(loss, params, normal(16, 8), normal(16, seed=1))


def rnn() -> Made:
    class Net(eqx.Module):
        cell: eqx.nn.LSTMCell
        out: eqx.nn.Linear

        def __call__(self, xs: jax.Array) -> jax.Array:
            start = jnp.zeros(16, xs.dtype), jnp.zeros(16, xs.dtype)
            (h, _), _ = jax.lax.scan(lambda s, x: (self.cell(x, s), None), start, xs)
            return self.out(h)[0]

    one, two = jax.random.split(KEY)
    params, static = eqx.partition(
        Net(eqx.nn.LSTMCell(4, 16, key=one), eqx.nn.Linear(16, 1, key=two)), eqx.is_inexact_array
    )

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = jax.vmap(eqx.combine(params, static))(x)
        return optax.sigmoid_binary_cross_entropy(logits, y).mean()

    return trained(loss, params, normal(16, 12, 4), ints(2, 16))


def transformer() -> Made:
    """`eqx.nn.MultiheadAttention` with rotary embeddings, dropout by keys, and `eqx.filter_checkpoint`."""

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        rope: eqx.nn.RotaryPositionalEmbedding
        norm: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP
        dropout: eqx.nn.Dropout

        def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
            rotate = lambda q, k, v: (jax.vmap(self.rope, 1, 1)(q), jax.vmap(self.rope, 1, 1)(k), v)
            h = jax.vmap(self.norm)(x)
            x = x + self.dropout(self.attention(h, h, h, process_heads=rotate), key=key)
            return x + jax.vmap(self.mlp)(x)

    def block(key: jax.Array) -> Block:
        one, two = jax.random.split(key)
        return Block(
            eqx.nn.MultiheadAttention(4, 32, key=one),
            eqx.nn.RotaryPositionalEmbedding(8),
            eqx.nn.LayerNorm(32),
            eqx.nn.MLP(32, 32, 64, 1, activation=jax.nn.gelu, key=two),
            eqx.nn.Dropout(0.1),
        )

    blocks = [block(key) for key in jax.random.split(KEY)]
    params, static = eqx.partition(blocks, eqx.is_inexact_array)

    def loss(params: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
        def one(x: jax.Array, key: jax.Array) -> jax.Array:
            for b in eqx.combine(params, static):
                x = eqx.filter_checkpoint(b)(x, key)
            return x

        return jnp.mean((jax.vmap(one)(x, jax.random.split(key, len(x))) - y) ** 2)

    return trained(loss, params, normal(8, 12, 32), normal(8, 12, 32, seed=1), jax.random.key(3))


def shared_weights() -> Made:
    """`eqx.nn.Shared`: an embedding that is also the last layer."""

    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self, key: jax.Array) -> None:
            one, two = jax.random.split(key)
            embed, last = eqx.nn.Embedding(64, 16, key=one), eqx.nn.Linear(16, 64, use_bias=False, key=two)
            self.shared = eqx.nn.Shared((embed, last), lambda p: p[1].weight, lambda p: p[0].weight)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            embed, last = self.shared()
            return jax.vmap(last)(jax.nn.tanh(jax.vmap(embed)(tokens)))

    params, static = eqx.partition(Tied(KEY), eqx.is_inexact_array)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return _entropy(jax.vmap(eqx.combine(params, static))(tokens)[:, :-1], tokens[:, 1:])

    return trained(loss, params, ints(64, 8, 12))


def bounded_while() -> Made:
    """A fixed point by `eqx.internal.while_loop`, differentiated through its checkpoints."""
    weights = 0.1 * normal(16, 16)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        settle = lambda s: (s[0] + 1, jnp.tanh(s[1] @ w + x))
        out = eqx.internal.while_loop(
            lambda s: s[0] < 6, settle, (0, jnp.zeros_like(x)), max_steps=16, kind="checkpointed", checkpoints=4
        )
        return jnp.mean(out[1] ** 2)

    return trained(loss, weights, normal(16, 16), optimizer=optax.sgd(0.1))


def error_if() -> Made:
    """`eqx.error_if` in the loss: a check on the host where values are wrong."""
    params, static = eqx.partition(eqx.nn.MLP(8, 1, 16, 1, key=KEY), eqx.is_inexact_array)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        out = jax.vmap(eqx.combine(params, static))(x)[:, 0]
        out = eqx.error_if(out, jnp.isnan(out).any(), "the network gave NaNs")
        return jnp.mean((out - y) ** 2)

    return trained(loss, params, normal(16, 8), normal(16, seed=1), optimizer=optax.sgd(0.1))


STEPS = [
    *steps("equinox", "optax")(bounded_while, error_if),
    *steps("equinox", "optax", float64=True)(
        mlp, filter_jit, cnn, batchnorm_state, ensemble, rnn, transformer, shared_weights
    ),
]
