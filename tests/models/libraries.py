"""Models written with flax linen, flax nnx, equinox and haiku, each with optax. In: a float dtype. Out: a `Model`.

Attention has no biases: a key's bias has no gradient but rounding noise, which Adam would blow up.
"""

from __future__ import annotations

import functools

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

from tests.models.base import Init, Model, Tree, adamw, train_model


def _as(dtype: str, tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def _token_data(dtype: str, vocab: int, batch: int, seq: int) -> Tree:
    init = Init(dtype)
    return {"tokens": init.ints(vocab, batch, seq), "labels": init.ints(vocab, batch, seq)}


def flax_linen(dtype: str, *, batch: int = 8, seq: int = 8, dim: int = 32) -> Model:
    """Two transformer blocks of linen modules with dropout."""

    class Block(linen.Module):
        dim: int
        heads: int

        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            h = linen.LayerNorm(param_dtype=dtype)(x)
            h = linen.MultiHeadDotProductAttention(self.heads, param_dtype=dtype, use_bias=False)(h, h)
            x = x + linen.Dropout(0.1, deterministic=False)(h)
            h = linen.Dense(4 * self.dim, param_dtype=dtype)(linen.LayerNorm(param_dtype=dtype)(x))
            return x + linen.Dense(self.dim, param_dtype=dtype)(linen.gelu(h))

    class Net(linen.Module):
        @linen.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = linen.Embed(64, dim, param_dtype=dtype)(tokens)
            for _ in range(2):
                x = Block(dim, 8)(x)
            return linen.Dense(64, param_dtype=dtype)(x)

    net = Net()
    data = _token_data(dtype, 64, batch, seq)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = _as(dtype, jax.jit(net.init)(rngs, data["tokens"])["params"])

    def loss(params: Tree, batch: Tree, key: jax.Array) -> jax.Array:
        logits = net.apply({"params": params}, batch["tokens"], rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    return train_model("flax_linen", loss, params, data, jax.random.key(2), tx=adamw())


def flax_nnx(dtype: str, *, batch: int = 8, size: int = 16, channels: int = 16) -> Model:
    """A convolution net of nnx modules, used functionally by split and merge."""

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.conv1 = nnx.Conv(3, channels, (3, 3), param_dtype=jnp.dtype(dtype), rngs=rngs)
            self.norm = nnx.LayerNorm(channels, param_dtype=jnp.dtype(dtype), rngs=rngs)
            self.conv2 = nnx.Conv(channels, channels, (3, 3), strides=(2, 2), param_dtype=jnp.dtype(dtype), rngs=rngs)
            self.dense = nnx.Linear((size // 4) ** 2 * channels, 64, param_dtype=jnp.dtype(dtype), rngs=rngs)
            self.head = nnx.Linear(64, 8, param_dtype=jnp.dtype(dtype), rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.relu(self.norm(self.conv1(x)))
            x = nnx.avg_pool(nnx.relu(self.conv2(x)), (2, 2), (2, 2))
            return self.head(nnx.relu(self.dense(x.reshape(x.shape[0], -1))))

    graphdef, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)
    params = _as(dtype, params)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        logits = nnx.merge(graphdef, params)(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    init = Init(dtype)
    data = {"image": init.normal(batch, size, size, 3, scale=1.0), "label": init.ints(8, batch)}
    return train_model("flax_nnx", loss, params, data)


class Mixer(eqx.Module):
    """One mixing layer over 4×4 patches of images [3, 16, 16]."""

    patch: eqx.nn.Conv2d
    tokens: eqx.nn.MLP
    channels: eqx.nn.MLP
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, dim: int, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        self.patch = eqx.nn.Conv2d(3, dim, 4, stride=4, key=keys[0])
        self.tokens = eqx.nn.MLP(16, 16, 64, 1, key=keys[1])
        self.channels = eqx.nn.MLP(dim, dim, 2 * dim, 1, key=keys[2])
        self.norm = eqx.nn.LayerNorm((dim, 16))
        self.head = eqx.nn.Linear(dim, 8, key=keys[3])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.patch(x).reshape(-1, 16)
        x = x + jax.vmap(self.tokens)(self.norm(x))
        x = x + jax.vmap(self.channels, in_axes=1, out_axes=1)(self.norm(x))
        return self.head(x.mean(-1))


def equinox_mlp_mixer(dtype: str, *, batch: int = 8, dim: int = 32) -> Model:
    """An equinox module, vmapped over the batch; its static part is closed over."""

    params, static = eqx.partition(Mixer(dim, jax.random.key(0)), eqx.is_inexact_array)
    params = _as(dtype, params)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        net = eqx.combine(params, static)
        logits = jax.vmap(net)(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    init = Init(dtype)
    data = {"image": init.normal(batch, 3, 16, 16, scale=1.0), "label": init.ints(8, batch)}
    return train_model("equinox", loss, params, data, tx=adamw())


def haiku_transformer(dtype: str, *, batch: int = 8, seq: int = 8, dim: int = 32) -> Model:
    """Haiku attention and a GRU unrolled over time."""

    def forward(tokens: jax.Array) -> jax.Array:
        x = hk.Embed(64, dim)(tokens)
        h = hk.LayerNorm(-1, True, True)(x)
        attention = hk.MultiHeadAttention(
            8, dim // 8, w_init=hk.initializers.VarianceScaling(1.0), with_bias=False, model_size=dim
        )
        x = x + attention(h, h, h)
        core = hk.GRU(dim)
        y, _ = hk.dynamic_unroll(core, x, core.initial_state(tokens.shape[0]), time_major=False)
        return hk.Linear(64)(x + y)

    net = hk.without_apply_rng(hk.transform(forward))
    data = _token_data(dtype, 64, batch, seq)
    params = _as(dtype, jax.jit(net.init)(jax.random.key(0), data["tokens"]))

    def loss(params: Tree, batch: Tree) -> jax.Array:
        logits = net.apply(params, batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    return train_model("haiku", loss, params, data, tx=adamw())


MODELS = {
    "flax_linen": flax_linen,
    "flax_nnx": flax_nnx,
    "equinox": equinox_mlp_mixer,
    "haiku": haiku_transformer,
}

LARGE = {
    "flax_linen": functools.partial(flax_linen, batch=32, seq=64, dim=128),
    "flax_nnx": functools.partial(flax_nnx, batch=32, size=32, channels=64),
    "equinox": functools.partial(equinox_mlp_mixer, batch=256, dim=256),
    "haiku": functools.partial(haiku_transformer, batch=32, seq=32, dim=128),
}
"""The same with more of everything, for memory."""
