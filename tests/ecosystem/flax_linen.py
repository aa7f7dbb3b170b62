"""Flax linen: modules, collections of variables, lifted transformations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state
from flax.training.dynamic_scale import DynamicScale

from tests.ecosystem.data import ints, normal
from tests.ecosystem.step import Made, steps, trained

KEY = jax.random.key(0)


def mlp() -> Made:
    """A `TrainState`."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for width in (64, 64):
                x = nn.relu(nn.Dense(width)(x))
            return nn.Dense(8)(x)

    x, labels = normal(32, 16), ints(8, 32)
    net = Net()
    state = train_state.TrainState.create(
        apply_fn=net.apply, params=net.init(KEY, x)["params"], tx=optax.sgd(0.1, momentum=0.9)
    )

    def step(state: Any, x: jax.Array, labels: jax.Array) -> Any:
        def loss_fn(params: Any) -> Any:
            logits = state.apply_fn({"params": params}, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "right": (logits.argmax(-1) == labels).mean()}

    return Made(step=step, state=state, rest=(x, labels))


def cnn_batchnorm() -> Made:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
            for width in (8, 16):
                x = nn.Conv(width, (3, 3), use_bias=False)(x)
                x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
                x = nn.avg_pool(x, (2, 2), strides=(2, 2))
            return nn.Dense(10)(x.mean((1, 2)))

    x, labels = normal(16, 16, 16, 3), ints(10, 16)
    net, tx = Net(), optax.adam(1e-3)
    variables = net.init(KEY, x)

    def step(state: Any, x: jax.Array, labels: jax.Array) -> Any:
        params, stats, opt_state = state

        def loss_fn(params: Any) -> Any:
            logits, new = net.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new["batch_stats"]

        (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(params, updates), new, opt_state), loss

    state = (variables["params"], variables["batch_stats"], tx.init(variables["params"]))
    return Made(step=step, state=state, rest=(x, labels))


class Block(nn.Module):
    heads: int = 4
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        h = nn.SelfAttention(self.heads, use_bias=False)(nn.LayerNorm()(x), mask=mask)
        x = x + nn.Dropout(self.dropout, deterministic=not self.dropout)(h)
        h = nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(h))


def transformer() -> Made:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            embed = nn.Embed(64, 32)
            x = embed(tokens) + self.param("positions", nn.initializers.normal(0.02), (16, 32))
            for _ in range(2):
                x = Block()(x)
            return embed.attend(nn.LayerNorm()(x))

    tokens = ints(64, 8, 16)
    net = Net()

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = net.apply(params, tokens)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return trained(loss, net.init(KEY, tokens), tokens)


def scanned_transformer() -> Made:
    """`nn.scan` over layers, each under `nn.remat`, with dropout."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return Block(dropout=0.1)(x), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            layers = nn.scan(
                nn.remat(Layer, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=3,
            )
            return nn.Dense(8)(layers()(x, None)[0])

    x, y = normal(8, 16, 32), normal(8, 16, 8, seed=1)
    net = Net()

    def loss(params: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.mean((net.apply(params, x, rngs={"dropout": key}) - y) ** 2)

    return trained(loss, net.init({"params": KEY, "dropout": KEY}, x), x, y, jax.random.key(1))


def lstm() -> Made:
    """`nn.RNN` with lengths, both ways."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, lengths: jax.Array) -> jax.Array:
            rnn = nn.Bidirectional(nn.RNN(nn.OptimizedLSTMCell(16)), nn.RNN(nn.GRUCell(16)))
            return nn.Dense(1)(rnn(x, seq_lengths=lengths))[..., 0]

    x, lengths = normal(16, 12, 8), 1 + ints(12, 16)
    net = Net()

    def loss(params: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
        mask = jnp.arange(12) < lengths[:, None]
        return optax.squared_error(net.apply(params, x, lengths), x.sum(-1)).mean(where=mask)

    return trained(loss, net.init(KEY, x, lengths), x, lengths, optimizer=optax.sgd(0.1))


def dropout_ensemble() -> Made:
    """`nn.vmap` over four members with their own parameters and dropout."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Dropout(0.5, deterministic=False)(nn.tanh(nn.Dense(32)(x)))
            return nn.Dense(4)(x)

    ensemble = nn.vmap(
        Net, in_axes=None, axis_size=4, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}
    )()
    x, y = normal(16, 8), normal(16, 4, seed=1)

    def loss(params: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.mean((ensemble.apply(params, x, rngs={"dropout": key}) - y) ** 2)

    return trained(loss, ensemble.init({"params": KEY, "dropout": KEY}, x), x, y, jax.random.key(1))


def loss_scaling() -> Made:
    """float16 gradients with `DynamicScale`."""
    net = nn.Sequential([nn.Dense(32, dtype=jnp.float16), nn.relu, nn.Dense(4, dtype=jnp.float16)])
    x, y = normal(16, 8), normal(16, 4, seed=1)
    tx = optax.sgd(0.1)
    params = net.init(KEY, x)

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        params, opt_state, scale = state
        loss_fn = lambda p: jnp.mean((net.apply(p, x).astype(jnp.float32) - y) ** 2)
        scale, finite, loss, grads = scale.value_and_grad(loss_fn)(params)
        updates, new_opt = tx.update(grads, opt_state)
        select = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        new = optax.apply_updates(params, updates)
        return (select(new, params), select(new_opt, opt_state), scale), loss

    return Made(step=step, state=(params, tx.init(params), DynamicScale()), rest=(x, y))


def convolutional_autoencoder() -> Made:
    """Strided and transposed convolutions, group and spectral norm."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            h = nn.silu(nn.GroupNorm(4)(nn.Conv(16, (3, 3), strides=(2, 2))(x)))
            h = nn.silu(nn.Conv(32, (3, 3), strides=(2, 2), feature_group_count=4)(h))
            h = nn.silu(nn.ConvTranspose(16, (3, 3), strides=(2, 2))(h))
            return nn.ConvTranspose(3, (4, 4), strides=(2, 2))(h)

    x = normal(8, 16, 16, 3)
    net = Net()
    return trained(lambda params, x: jnp.mean((net.apply(params, x) - x) ** 2), net.init(KEY, x), x)


STEPS = [
    *steps("flax", "optax")(mlp, lstm),
    # float16 sums of 16 examples, in another order in two stages (8.9e-4; the same step in float32: 1.4e-7)
    *steps("flax", "optax", rounding=2**-10)(loss_scaling),
    *steps("flax", "optax", float64=True)(
        cnn_batchnorm, transformer, scanned_transformer, dropout_ensemble, convolutional_autoencoder
    ),
]
