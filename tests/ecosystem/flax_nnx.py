"""Flax nnx: modules with mutable state, split into arrays and a graph definition around the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.ecosystem.data import ints, normal
from tests.ecosystem.step import Made, steps


def _made(model: nnx.Module, loss_fn: Callable[..., Any], *batch: Any, optimizer: Any = None) -> Made:
    """The functional form of nnx training: `nnx.split` outside, `nnx.merge` inside."""
    wrapped = nnx.Optimizer(model, optimizer or optax.adam(1e-3), wrt=nnx.Param)
    graphdef, state = nnx.split((model, wrapped))

    def step(state: Any, *batch: Any) -> Any:
        model, optimizer = nnx.merge(graphdef, state)
        loss, grads = nnx.value_and_grad(loss_fn)(model, *batch)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return Made(step=step, state=state, rest=batch)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def _entropy(model: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()


def mlp_batchnorm_dropout() -> Made:
    return _made(Net(nnx.Rngs(0)), _entropy, normal(16, 16), ints(8, 16))


def cnn() -> Made:
    class CNN(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.one = nnx.Conv(3, 8, (3, 3), rngs=rngs)
            self.two = nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs)
            self.norm = nnx.GroupNorm(16, num_groups=4, rngs=rngs)
            self.out = nnx.Linear(16, 10, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.max_pool(nnx.relu(self.one(x)), (2, 2), strides=(2, 2))
            return self.out(nnx.relu(self.norm(self.two(x))).mean((1, 2)))

    return _made(CNN(nnx.Rngs(0)), _entropy, normal(8, 16, 16, 3), ints(10, 8))


def rnn() -> Made:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.rnn = nnx.RNN(nnx.GRUCell(8, 16, rngs=rngs))
            self.out = nnx.Linear(16, 10, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.out(self.rnn(x)[:, -1])

    return _made(Net(nnx.Rngs(0)), _entropy, normal(8, 12, 8), ints(10, 8), optimizer=optax.sgd(0.1))


def transformer() -> Made:
    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.attention = nnx.MultiHeadAttention(4, 32, decode=False, use_bias=False, rngs=rngs)
            self.one = nnx.RMSNorm(32, rngs=rngs)
            self.two = nnx.LayerNorm(32, rngs=rngs)
            self.up = nnx.Linear(32, 64, rngs=rngs)
            self.down = nnx.Linear(64, 32, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + self.attention(self.one(x), mask=nnx.make_causal_mask(jnp.ones(x.shape[:2])))
            return x + self.down(nnx.gelu(self.up(self.two(x))))

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(64, 32, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.embed.attend(x)

    return _made(Net(nnx.Rngs(0)), _entropy, ints(64, 8, 12), ints(64, 8, 12, seed=1), optimizer=optax.sgd(0.1))


def scanned_layers() -> Made:
    """Layers made by `nnx.vmap`, run by `nnx.scan`, each under `nnx.remat`."""

    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + nnx.tanh(self.linear(x))

    @nnx.split_rngs(splits=4)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def create(rngs: nnx.Rngs) -> Layer:
        return Layer(rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def forward(x: jax.Array, layer: Layer) -> jax.Array:
        return layer(x)

    def loss(layers: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((forward(x, layers) - y) ** 2)

    return _made(create(nnx.Rngs(0)), loss, normal(16, 16), normal(16, 16, seed=1))


def lora() -> Made:
    """Gradients of the adapters only; the base is frozen."""
    model = nnx.LoRA(16, 4, 8, base_module=nnx.Linear(16, 8, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    tx = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
    graphdef, state = nnx.split((model, tx))

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        model, optimizer = nnx.merge(graphdef, state)
        loss_fn = lambda m, x, y: jnp.mean((m(x) - y) ** 2)
        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, x, y)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return Made(step=step, state=state, rest=(normal(16, 16), normal(16, 8, seed=1)))


def metrics() -> Made:
    """`nnx.MultiMetric` carried from step to step."""
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    tx = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    seen = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    graphdef, state = nnx.split((model, tx, seen))

    def step(state: Any, x: jax.Array, labels: jax.Array) -> Any:
        model, optimizer, seen = nnx.merge(graphdef, state)

        def loss_fn(model: Any) -> Any:
            logits = model(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        seen.update(loss=loss, logits=logits, labels=labels)
        return nnx.state((model, optimizer, seen)), seen.compute()

    return Made(step=step, state=state, rest=(normal(16, 16), ints(8, 16)))


STEPS = [
    *steps("flax", "optax")(rnn, metrics, transformer),
    *steps("flax", "optax", float64=True)(mlp_batchnorm_dropout, cnn, scanned_layers, lora),
]
