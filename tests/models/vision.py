"""Convolution nets in plain JAX with optax. In: a float dtype. Out: a `Model` that compiles in a second or two."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tests.models.base import Init, Model, Tree, train_model
from tests.models.plain import cross_entropy


def _conv(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _max_pool(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def conv_net(
    dtype: str,
    *,
    batch: int = 8,
    size: int = 16,
    channels: int = 16,
    classes: int = 8,
    name: str = "conv_net",
    microbatches: tuple[int, ...] = (1, 4),
) -> Model:
    """Convolutions with max pooling (NHWC), then a dense layer."""
    init = Init(dtype)
    params = {
        "conv1": init.normal(3, 3, 3, channels),
        "conv2": init.normal(3, 3, channels, channels),
        "conv3": init.normal(3, 3, channels, 2 * channels),
        "bias": init.zeros(channels),
        "head": init.normal((size // 4) ** 2 * 2 * channels, classes),
    }

    def loss(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        x = _max_pool(jax.nn.relu(_conv(batch["image"], params["conv1"]) + params["bias"]))
        x = _max_pool(jax.nn.relu(_conv(x, params["conv2"])))
        x = jax.nn.relu(_conv(x, params["conv3"]))
        logits = x.reshape(x.shape[0], -1) @ params["head"]
        correct = (jnp.argmax(logits, -1) == batch["label"]).sum()
        return cross_entropy(logits, batch["label"]).mean(), {"correct": correct}

    data = {"image": init.normal(batch, size, size, 3, scale=1.0), "label": init.ints(classes, batch)}
    return train_model(name, loss, params, data, has_aux=True, microbatches=microbatches)


def _group_norm(p: Tree, x: jax.Array, groups: int) -> jax.Array:
    g = x.reshape(*x.shape[:-1], groups, -1)
    mean = g.mean((1, 2, 4), keepdims=True)
    var = g.var((1, 2, 4), keepdims=True)
    return ((g - mean) * lax.rsqrt(var + 1e-5)).reshape(x.shape) * p["scale"] + p["bias"]


def resnet(
    dtype: str,
    *,
    batch: int = 8,
    size: int = 16,
    channels: int = 16,
    name: str = "resnet",
    microbatches: tuple[int, ...] = (1, 4),
) -> Model:
    """Residual blocks with group norm, one strided, and global average pooling."""
    init = Init(dtype)

    def block_params(i: int, o: int) -> Tree:
        return {
            "conv1": init.normal(3, 3, i, o),
            "conv2": init.normal(3, 3, o, o),
            "norm1": {"scale": init.ones(i), "bias": init.zeros(i)},
            "norm2": {"scale": init.ones(o), "bias": init.zeros(o)},
        } | ({"proj": init.normal(1, 1, i, o)} if i != o else {})

    params = {
        "stem": init.normal(3, 3, 3, channels),
        "block1": block_params(channels, channels),
        "block2": block_params(channels, 2 * channels),
        "head": init.normal(2 * channels, 8),
    }

    def block(p: Tree, x: jax.Array, stride: int) -> jax.Array:
        h = _conv(jax.nn.relu(_group_norm(p["norm1"], x, 8)), p["conv1"], stride)
        h = _conv(jax.nn.relu(_group_norm(p["norm2"], h, 8)), p["conv2"])
        return h + (_conv(x, p["proj"], stride) if "proj" in p else x)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = _conv(batch["image"], params["stem"])
        x = block(params["block1"], x, 1)
        x = block(params["block2"], x, 2)
        logits = jax.nn.relu(x).mean((1, 2)) @ params["head"]
        return cross_entropy(logits, batch["label"]).mean()

    data = {"image": init.normal(batch, size, size, 3, scale=1.0), "label": init.ints(8, batch)}
    momentum = optax.sgd(1e-2, momentum=0.9)
    return train_model(name, loss, params, data, tx=momentum, microbatches=microbatches)


def unet(dtype: str, *, batch: int = 8, size: int = 16, channels: int = 8) -> Model:
    """Down by strided convolution, up by transposed convolution, the skip concatenated."""
    init = Init(dtype)
    params = {
        "enter": init.normal(3, 3, 3, channels),
        "down": init.normal(3, 3, channels, 2 * channels),
        "middle": init.normal(3, 3, 2 * channels, 2 * channels),
        "up": init.normal(2, 2, 2 * channels, channels),
        "leave": init.normal(3, 3, 2 * channels, 3),
    }

    def loss(params: Tree, batch: Tree) -> jax.Array:
        skip = jax.nn.silu(_conv(batch["noisy"], params["enter"]))
        x = jax.nn.silu(_conv(skip, params["down"], 2))
        x = jax.nn.silu(_conv(x, params["middle"]))
        x = lax.conv_transpose(x, params["up"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = _conv(jnp.concatenate([x, skip], -1), params["leave"])
        return jnp.square(x - batch["clean"]).mean()

    data = {k: init.normal(batch, size, size, 3, scale=1.0) for k in ("noisy", "clean")}
    return train_model("unet", loss, params, data)


MODELS = {"conv_net": conv_net, "resnet": resnet, "unet": unet}

LARGE = {
    "conv_net": functools.partial(conv_net, batch=32, size=32, channels=64),
    "resnet": functools.partial(resnet, batch=32, size=32, channels=64),
    "unet": functools.partial(unet, batch=32, size=32, channels=64),
}
"""The same with more of everything, for memory."""

UNEVEN = {
    "conv_net_uneven": functools.partial(
        conv_net, batch=6, size=12, channels=10, classes=7, name="conv_net_uneven", microbatches=(1, 3)
    ),
}
