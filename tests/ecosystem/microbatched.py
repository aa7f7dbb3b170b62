"""Steps that accumulate gradients over two microbatches, and pipelines of two stages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import keras
import optax
import transformers as hf
from flax import linen as nn
from flax import nnx

from tests.ecosystem.data import ints, normal
from tests.ecosystem.flax_linen import Block
from tests.ecosystem.step import Made, steps, trained

KEY = jax.random.key(0)


def _entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Decoder(nn.Module):
    layers: int = 2

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(64, 32)(tokens)
        for _ in range(self.layers):
            x = Block()(x)
        return nn.Dense(64)(nn.LayerNorm()(x))


def linen_transformer() -> Made:
    net, tokens = Decoder(), ints(64, 8, 16)
    loss = lambda params, x, y: _entropy(net.apply(params, x), y)
    return trained(loss, net.init(KEY, tokens), tokens, ints(64, 8, 16, seed=1))


def linen_deep() -> Made:
    net, tokens = Decoder(4), ints(64, 8, 16)
    loss = lambda params, x, y: _entropy(net.apply(params, x), y)
    return trained(loss, net.init(KEY, tokens), tokens, ints(64, 8, 16, seed=1))


def linen_lstm() -> Made:
    net = nn.Sequential([nn.RNN(nn.OptimizedLSTMCell(16)), nn.Dense(4)])
    x, y = normal(8, 10, 8), normal(8, 10, 4, seed=1)
    loss = lambda params, x, y: jnp.mean((net.apply(params, x) - y) ** 2)
    return trained(loss, net.init(KEY, x), x, y, optimizer=optax.sgd(0.1))


def linen_batchnorm() -> Made:
    """Statistics of a whole batch: what cannot be split exactly."""
    net = nn.Sequential([nn.Dense(32), nn.BatchNorm(use_running_average=False), nn.relu, nn.Dense(8)])
    x, labels = normal(16, 16), ints(8, 16)
    variables = net.init(KEY, x)

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        logits, _ = net.apply({"params": params, "batch_stats": variables["batch_stats"]}, x, mutable=["batch_stats"])
        return _entropy(logits, labels)

    return trained(loss, variables["params"], x, labels)


def nnx_mlp() -> Made:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(4)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers:
                x = x + nnx.gelu(layer(x))
            return x

    graphdef, params = nnx.split(Net(nnx.Rngs(0)))
    loss = lambda params, x, labels: _entropy(nnx.merge(graphdef, params)(x), labels)
    return trained(loss, params, normal(16, 16), ints(16, 16))


def equinox_transformer() -> Made:
    def block(key: jax.Array) -> Any:
        one, two = jax.random.split(key)
        return eqx.nn.MultiheadAttention(4, 32, key=one), eqx.nn.MLP(32, 32, 64, 1, jax.nn.gelu, key=two)

    params, static = eqx.partition([block(k) for k in jax.random.split(KEY)], eqx.is_inexact_array)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def one(x: jax.Array) -> jax.Array:
            for attention, mlp in eqx.combine(params, static):
                x = x + attention(x, x, x)
                x = x + jax.vmap(mlp)(x)
            return x

        return jnp.mean((jax.vmap(one)(x) - y) ** 2)

    return trained(loss, params, normal(8, 12, 32), normal(8, 12, 32, seed=1))


def haiku_mlp() -> Made:
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([32, 32, 32, 8])(x)))
    x, labels = normal(16, 16), ints(8, 16)
    return trained(lambda p, x, y: _entropy(net.apply(p, x), y), net.init(KEY, x), x, labels)


def keras_cnn() -> Made:
    """Trained by optax on Keras's variables."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(16, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )
    params = [v.value for v in model.trainable_variables]

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        return _entropy(model.stateless_call(params, [], x)[0], labels)

    return trained(loss, params, normal(8, 16, 16, 3).astype("float32"), ints(10, 8), optimizer=optax.sgd(0.1))


def _hugging_face(model: Any) -> Made:
    def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        return _entropy(model(tokens, params=params, train=False).logits, labels)

    return trained(loss, model.params, ints(64, 8, 12), ints(64, 8, 12, seed=1), optimizer=optax.sgd(0.1))


def gpt2() -> Made:
    config = hf.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    return _hugging_face(hf.FlaxGPT2LMHeadModel(config))


def llama() -> Made:
    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return _hugging_face(hf.FlaxLlamaForCausalLM(config))


SPLIT = {"num_microbatches": 2, "batch_argnums": (1, 2)}
PIPELINE = {"stages": 2, "schedule": "1f1b", **SPLIT}


def _renamed(make: Callable[[], Made]) -> Callable[[], Made]:
    named = functools.partial(make)
    named.__name__ = f"{make.__name__}_pipeline"  # type: ignore[attr-defined]
    return named


STEPS = [
    *steps("flax", "optax", float64=True, **SPLIT)(linen_transformer, nnx_mlp),
    *steps("flax", "optax", **SPLIT)(linen_lstm),
    *steps("flax", "optax", refused="as batch normalisation does", **SPLIT)(linen_batchnorm),
    *steps("equinox", "optax", float64=True, **SPLIT)(equinox_transformer),
    *steps("dm-haiku", "optax", float64=True, **SPLIT)(haiku_mlp),
    *steps("keras", "optax", **SPLIT)(keras_cnn),
    *steps("transformers", "flax", **SPLIT)(gpt2, llama),
    *steps("flax", "optax", float64=True, **PIPELINE)(_renamed(linen_deep), _renamed(nnx_mlp)),
    *steps("equinox", "optax", float64=True, **PIPELINE)(_renamed(equinox_transformer)),
    *steps("dm-haiku", "optax", float64=True, **PIPELINE)(_renamed(haiku_mlp)),
    *steps("transformers", "flax", **PIPELINE)(_renamed(gpt2), _renamed(llama)),
]
