"""Haiku: `hk.transform` and `hk.transform_with_state`."""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from tests.ecosystem.data import ints, normal
from tests.ecosystem.step import Made, steps, trained

KEY = jax.random.key(0)


def _entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def transformer() -> Made:
    def net(tokens: jax.Array) -> jax.Array:
        init = hk.initializers.VarianceScaling(0.5)
        x = hk.Embed(64, 32)(tokens) + hk.get_parameter(
            "positions", [12, 32], init=hk.initializers.TruncatedNormal(0.02)
        )
        mask = jnp.tril(jnp.ones((1, 1, 12, 12)))
        for _ in range(2):
            h = hk.LayerNorm(-1, True, True)(x)
            h = hk.MultiHeadAttention(4, key_size=8, model_size=32, w_init=init, with_bias=False)(h, h, h, mask=mask)
            x = x + hk.dropout(hk.next_rng_key(), 0.1, h)
            x = x + hk.Sequential([hk.LayerNorm(-1, True, True), hk.Linear(64), jax.nn.gelu, hk.Linear(32)])(x)
        return hk.Linear(64)(x)

    model = hk.transform(net)
    tokens = ints(64, 8, 12)

    def loss(params: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        return _entropy(model.apply(params, key, tokens)[:, :-1], tokens[:, 1:])

    return trained(loss, model.init(KEY, tokens), tokens, jax.random.PRNGKey(1))


def lstm() -> Made:
    """`hk.dynamic_unroll` of a `hk.DeepRNN`."""

    def net(x: jax.Array) -> jax.Array:
        core = hk.DeepRNN([hk.LSTM(16), jax.nn.relu, hk.GRU(8)])
        out, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
        return hk.BatchApply(hk.Linear(4))(out)

    model = hk.without_apply_rng(hk.transform(net))
    x = normal(10, 8, 4)
    loss = lambda params, x: jnp.mean((model.apply(params, x)[:-1] - x[1:]) ** 2)
    return trained(loss, model.init(KEY, x), x, optimizer=optax.sgd(0.1))


def batchnorm_state() -> Made:
    def net(x: jax.Array) -> jax.Array:
        x = hk.Conv2D(8, 3)(x)
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training=True))
        return hk.Linear(10)(hk.Flatten()(hk.MaxPool(2, 2, "SAME")(x)))

    model = hk.without_apply_rng(hk.transform_with_state(net))
    x, labels = normal(8, 8, 8, 3), ints(10, 8)
    params, state = model.init(KEY, x)
    tx = optax.adam(1e-3)

    def step(carried: Any, x: jax.Array, labels: jax.Array) -> Any:
        params, state, opt_state = carried

        def loss_fn(params: Any) -> Any:
            logits, new = model.apply(params, state, x)
            return _entropy(logits, labels), new

        (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(params, updates), state, opt_state), loss

    return Made(step=step, state=(params, state, tx.init(params)), rest=(x, labels))


def resnet() -> Made:
    """`hk.nets.ResNet` on small images."""

    def net(x: jax.Array) -> jax.Array:
        blocks = {"blocks_per_group": (1, 1, 1, 1), "channels_per_group": (8, 8, 16, 16), "bottleneck": False}
        return hk.nets.ResNet(num_classes=10, use_projection=(True,) * 4, **blocks)(x, is_training=True)

    model = hk.without_apply_rng(hk.transform_with_state(net))
    x, labels = normal(8, 32, 32, 3), ints(10, 8)
    params, state = model.init(KEY, x)

    def step(carried: Any, x: jax.Array, labels: jax.Array) -> Any:
        params, state = carried

        def loss_fn(params: Any) -> Any:
            logits, new = model.apply(params, state, x)
            return _entropy(logits, labels), new

        (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state), loss

    return Made(step=step, state=(params, state), rest=(x, labels))


def layer_stack() -> Made:
    """`hk.experimental.layer_stack`, a scan over layers, under `hk.remat`."""

    def net(x: jax.Array) -> jax.Array:
        layer = lambda x: x + hk.nets.MLP([32, 16])(hk.LayerNorm(-1, True, True)(x))
        return hk.experimental.layer_stack(3)(hk.remat(layer))(x)

    model = hk.without_apply_rng(hk.transform(net))
    x, y = normal(16, 16), normal(16, 16, seed=1)
    loss = lambda params, x, y: jnp.mean((model.apply(params, x) - y) ** 2)
    return trained(loss, model.init(KEY, x), x, y)


def vqvae() -> Made:
    """`hk.nets.VectorQuantizerEMA`: nearest codes, straight-through gradients, moving averages as state."""

    def net(x: jax.Array) -> Any:
        z = hk.nets.MLP([32, 8])(x)
        quantised = hk.nets.VectorQuantizerEMA(8, 16, 0.25, 0.9)(z, is_training=True)
        return hk.nets.MLP([32, 16])(quantised["quantize"]), quantised["loss"]

    model = hk.without_apply_rng(hk.transform_with_state(net))
    x = normal(16, 16)
    params, state = model.init(KEY, x)

    def step(carried: Any, x: jax.Array) -> Any:
        params, state = carried

        def loss_fn(params: Any) -> Any:
            (out, extra), new = model.apply(params, state, x)
            return jnp.mean((out - x) ** 2) + extra, new

        (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state), loss

    return Made(step=step, state=(params, state), rest=(x,))


STEPS = [
    *steps("dm-haiku", "optax")(lstm),
    *steps("dm-haiku", "optax", float64=True)(transformer, batchnorm_state, resnet, layer_stack, vqvae),
]
