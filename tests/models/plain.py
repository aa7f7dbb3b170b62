"""Models in plain JAX with optax: MLP, GPT in its variants, encoder–decoder, mixture of experts, DLRM and an
LSTM. In: a float dtype. Out: a `Model` that compiles in a second or two on CPU.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.models.base import Init, Model, Tree, adamw, train_model


def layer_norm(p: Tree, x: jax.Array) -> jax.Array:
    """Over the last dimension, with scale and bias."""
    mean = x.mean(-1, keepdims=True)
    var = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5) * p["scale"] + p["bias"]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Per-position loss: logits [..., V], labels int[...] → [...]."""
    logp = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logp, labels[..., None], axis=-1)[..., 0]


def mlp(
    dtype: str, *, batch: int = 16, sizes: tuple[int, ...] = (16, 64, 64, 8), microbatches: tuple[int, ...] = (1, 4)
) -> Model:
    """Dense layers with relu, mean squared error, Adam."""
    init = Init(dtype)
    params = [{"w": init.normal(i, o), "b": init.zeros(o)} for i, o in itertools.pairwise(sizes)]

    def loss(params: Tree, batch: Tree) -> jax.Array:
        h = batch["x"]
        for layer in params[:-1]:
            h = jax.nn.relu(h @ layer["w"] + layer["b"])
        out = h @ params[-1]["w"] + params[-1]["b"]
        return jnp.mean(jnp.square(out - batch["y"]))

    data = {"x": init.normal(batch, sizes[0], scale=1.0), "y": init.normal(batch, sizes[-1], scale=1.0)}
    return train_model("mlp", loss, params, data, microbatches=microbatches)


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes and options of `gpt`."""

    vocab: int = 64
    dim: int = 32
    heads: int = 8
    layers: int = 2
    seq: int = 16
    batch: int = 8
    scan: bool = False
    remat: bool = False
    tied: bool = False
    dropout: float = 0.0
    clip: bool = True


def _block_params(init: Init, dim: int, layers: tuple[int, ...], cross: bool = False) -> Tree:
    n = layers

    def norm() -> Tree:
        return {"scale": init.ones(*n, dim), "bias": init.zeros(*n, dim)}

    def attention() -> Tree:
        return {
            "qkv": init.normal(*n, dim, 3 * dim, scale=dim**-0.5),
            "qkv_b": init.zeros(*n, 3 * dim),
            "out": init.normal(*n, dim, dim, scale=dim**-0.5),
            "out_b": init.zeros(*n, dim),
        }

    p = {
        "ln1": norm(),
        "attn": attention(),
        "ln2": norm(),
        "up": init.normal(*n, dim, 4 * dim, scale=dim**-0.5),
        "up_b": init.zeros(*n, 4 * dim),
        "down": init.normal(*n, 4 * dim, dim, scale=(4 * dim) ** -0.5),
        "down_b": init.zeros(*n, dim),
    }
    if cross:
        p |= {
            "ln_cross": norm(),
            "cross_q": init.normal(*n, dim, dim, scale=dim**-0.5),
            "cross_kv": init.normal(*n, dim, 2 * dim, scale=dim**-0.5),
            "cross_out": init.normal(*n, dim, dim, scale=dim**-0.5),
        }
    return p


def attend(q: jax.Array, k: jax.Array, v: jax.Array, heads: int, mask: jax.Array | None) -> jax.Array:
    """[B, S, D] each → [B, S, D]; mask broadcasts to [B, H, Sq, Sk]."""

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], heads, -1)

    q, k, v = split(q), split(k), split(v)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return out.reshape(*out.shape[:2], -1)


def _dropout(x: jax.Array, key: jax.Array | None, rate: float) -> jax.Array:
    if key is None or rate == 0.0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def _self_attention(p: Tree, x: jax.Array, heads: int, mask: jax.Array | None) -> jax.Array:
    q, k, v = jnp.split(x @ p["qkv"] + p["qkv_b"], 3, axis=-1)
    return attend(q, k, v, heads, mask) @ p["out"] + p["out_b"]


def _feed_forward(p: Tree, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ p["up"] + p["up_b"]) @ p["down"] + p["down_b"]


def gpt(
    dtype: str, config: GPTConfig = GPTConfig(), *, name: str = "gpt", microbatches: tuple[int, ...] = (1, 4)
) -> Model:
    """Decoder-only transformer with pre-norm blocks and learned positions; next-token cross entropy."""
    c = config
    init = Init(dtype)
    params: Tree = {
        "embed": init.normal(c.vocab, c.dim, scale=0.1),
        "pos": init.normal(c.seq, c.dim, scale=0.1),
        "ln": {"scale": init.ones(c.dim), "bias": init.zeros(c.dim)},
    }
    if c.scan:
        params["blocks"] = _block_params(init, c.dim, (c.layers,))
    else:
        params["blocks"] = [_block_params(init, c.dim, ()) for _ in range(c.layers)]
    if not c.tied:
        params["head"] = init.normal(c.dim, c.vocab)

    def block(p: Tree, x: jax.Array, key: jax.Array | None) -> jax.Array:
        keys = (None, None) if key is None else jax.random.split(key)
        mask = jnp.tril(jnp.ones((c.seq, c.seq), bool))
        x = x + _dropout(_self_attention(p["attn"], layer_norm(p["ln1"], x), c.heads, mask), keys[0], c.dropout)
        return x + _dropout(_feed_forward(p, layer_norm(p["ln2"], x)), keys[1], c.dropout)

    def loss(params: Tree, batch: Tree, key: jax.Array | None = None) -> jax.Array:
        run = jax.checkpoint(block) if c.remat else block
        x = params["embed"][batch["tokens"]] + params["pos"]
        keys = None if key is None else jax.random.split(key, c.layers)
        if c.scan:

            def body(x: jax.Array, xs: Tree) -> tuple[jax.Array, None]:
                return run(xs[0], x, xs[1]), None

            x, _ = lax.scan(body, x, (params["blocks"], keys))
        else:
            for i, p in enumerate(params["blocks"]):
                x = run(p, x, None if keys is None else keys[i])
        x = layer_norm(params["ln"], x)
        logits = x @ (params["embed"].T if c.tied else params["head"])
        return cross_entropy(logits, batch["labels"]).mean()

    data = {"tokens": init.ints(c.vocab, c.batch, c.seq), "labels": init.ints(c.vocab, c.batch, c.seq)}
    inputs = (data, jax.random.key(7)) if c.dropout else (data,)
    return train_model(name, loss, params, *inputs, tx=adamw() if c.clip else None, microbatches=microbatches)


def encoder_decoder(
    dtype: str,
    *,
    batch: int = 8,
    seq: int = 8,
    dim: int = 32,
    heads: int = 8,
    vocab: int = 64,
    name: str = "encoder_decoder",
    microbatches: tuple[int, ...] = (1, 4),
) -> Model:
    """One encoder and one decoder block with cross attention; padded targets, so the loss is a masked mean."""
    init = Init(dtype)
    params = {
        "embed": init.normal(vocab, dim, scale=0.3),
        "encoder": _block_params(init, dim, ()),
        "decoder": _block_params(init, dim, (), cross=True),
        "ln": {"scale": init.ones(dim), "bias": init.zeros(dim)},
        "head": init.normal(dim, vocab),
    }

    def loss(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        e, d = params["encoder"], params["decoder"]
        source_mask = (batch["source"] != 0)[:, None, None, :]
        x = params["embed"][batch["source"]]
        x = x + _self_attention(e["attn"], layer_norm(e["ln1"], x), heads, source_mask)
        x = x + _feed_forward(e, layer_norm(e["ln2"], x))
        causal = jnp.arange(seq)[:, None] >= jnp.arange(seq)[None, :]
        y = params["embed"][batch["target"]]
        y = y + _self_attention(d["attn"], layer_norm(d["ln1"], y), heads, causal)
        k, v = jnp.split(x @ d["cross_kv"], 2, axis=-1)
        q = layer_norm(d["ln_cross"], y) @ d["cross_q"]
        y = y + attend(q, k, v, heads, source_mask) @ d["cross_out"]
        y = y + _feed_forward(d, layer_norm(d["ln2"], y))
        logits = layer_norm(params["ln"], y) @ params["head"]
        weight = (batch["labels"] != 0).astype(logits.dtype)
        tokens = weight.sum()
        value = (cross_entropy(logits, batch["labels"]) * weight).sum() / tokens
        return value, {"tokens": tokens}

    data = {k: init.ints(vocab, batch, seq) for k in ("source", "target", "labels")}
    data["labels"][: batch // 2, seq // 2 :] = 0
    data["source"][: batch // 2, seq - 2 :] = 0
    return train_model(name, loss, params, data, tx=adamw(), has_aux=True, microbatches=microbatches)


def moe(
    dtype: str,
    *,
    batch: int = 8,
    seq: int = 8,
    dim: int = 32,
    hidden: int = 64,
    experts: int = 8,
    capacity: int = 4,
    name: str = "moe",
    microbatches: tuple[int, ...] = (1, 4),
) -> Model:
    """Two top-2 mixture-of-experts layers with a load-balancing loss. Each example is a group with its own capacity per
    expert (dispatch and combine by einsum, as GShard has it), so examples stay independent."""
    init = Init(dtype)
    params = {
        "embed": init.normal(dim, dim),
        "layers": [
            {
                "gate": init.normal(dim, experts),
                "up": init.normal(experts, dim, hidden, scale=dim**-0.5),
                "down": init.normal(experts, hidden, dim, scale=hidden**-0.5),
                "ln": {"scale": init.ones(dim), "bias": init.zeros(dim)},
            }
            for _ in range(2)
        ],
        "head": init.normal(dim, 8),
    }

    def layer(p: Tree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        gates = jax.nn.softmax(x @ p["gate"])  # [g, s, e]
        weights, chosen = lax.top_k(gates, 2)  # [g, s, 2]
        weights = weights / weights.sum(-1, keepdims=True)
        one_hot = jax.nn.one_hot(chosen, experts, dtype=x.dtype)  # [g, s, 2, e]
        first, second = one_hot[:, :, 0], one_hot[:, :, 1]
        place_first = jnp.cumsum(first, axis=1) - first
        place_second = jnp.cumsum(second, axis=1) - second + first.sum(1, keepdims=True)
        place = jnp.stack([(place_first * first).sum(-1), (place_second * second).sum(-1)], axis=2)  # [g, s, 2]
        slot = jax.nn.one_hot(place.astype(jnp.int32), capacity, dtype=x.dtype)  # past the capacity: all zero
        combine = jnp.einsum("gsk,gske,gskc->gsec", weights, one_hot, slot)
        dispatch = (combine > 0).astype(x.dtype)
        h = jax.nn.relu(jnp.einsum("egcd,edf->egcf", jnp.einsum("gsec,gsd->egcd", dispatch, x), p["up"]))
        out = jnp.einsum("egcd,gsec->gsd", jnp.einsum("egcf,efd->egcd", h, p["down"]), combine)
        balance = (gates.mean(1) * first.mean(1)).sum(-1).mean() * experts
        return out, balance

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = batch["x"] @ params["embed"]
        balance = jnp.zeros((), x.dtype)
        for p in params["layers"]:
            y, b = layer(p, layer_norm(p["ln"], x))
            x, balance = x + y, balance + b
        return jnp.mean(jnp.square(x @ params["head"] - batch["y"])) + 0.01 * balance

    data = {"x": init.normal(batch, seq, dim, scale=1.0), "y": init.normal(batch, seq, 8, scale=1.0)}
    return train_model(name, loss, params, data, microbatches=microbatches)


def dlrm(
    dtype: str,
    *,
    batch: int = 16,
    rows: tuple[int, ...] = (4096, 2048, 1024),
    dim: int = 16,
    dense: int = 16,
    name: str = "dlrm",
    microbatches: tuple[int, ...] = (1, 4),
) -> Model:
    """Embedding tables, a bottom MLP for dense features, pairwise dots, a top MLP; sum of the logistic losses."""
    init = Init(dtype)
    num = len(rows) + 1
    pairs = np.triu_indices(num, 1)
    params = {
        "tables": [init.normal(r, dim, scale=0.1) for r in rows],
        "bottom": [init.normal(dense, 32), init.normal(32, dim)],
        "top": [init.normal(dim + len(pairs[0]), 32), init.normal(32, 1)],
    }

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = jax.nn.relu(batch["dense"] @ params["bottom"][0]) @ params["bottom"][1]
        looked_up = [jnp.take(t, batch["ids"][:, i], axis=0) for i, t in enumerate(params["tables"])]
        features = jnp.stack([x, *looked_up], axis=1)
        dots = jnp.einsum("bid,bjd->bij", features, features)[:, pairs[0], pairs[1]]
        h = jax.nn.relu(jnp.concatenate([x, dots], -1) @ params["top"][0])
        logit = (h @ params["top"][1])[:, 0]
        return optax.sigmoid_binary_cross_entropy(logit, batch["click"]).sum()

    data = {
        "dense": init.normal(batch, dense, scale=1.0),
        "ids": np.stack([init.ints(r, batch) for r in rows], 1),
        "click": (init.ints(2, batch)).astype(dtype),
    }
    return train_model(name, loss, params, data, microbatches=microbatches)


def lstm(
    dtype: str,
    *,
    batch: int = 8,
    seq: int = 8,
    dim: int = 16,
    hidden: int = 32,
    name: str = "lstm",
    microbatches: tuple[int, ...] = (1, 4),
) -> Model:
    """A scan over time."""
    init = Init(dtype)
    params = {
        "x": init.normal(dim, 4 * hidden),
        "h": init.normal(hidden, 4 * hidden),
        "b": init.zeros(4 * hidden),
        "head": init.normal(hidden, dim),
    }

    def loss(params: Tree, batch: Tree) -> jax.Array:
        def cell(carry: Tree, x: jax.Array) -> tuple[Tree, jax.Array]:
            h, c = carry
            i, f, g, o = jnp.split(x @ params["x"] + h @ params["h"] + params["b"], 4, axis=-1)
            c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((batch["x"].shape[0], hidden), dtype)
        _, hs = lax.scan(cell, (zero, zero), jnp.swapaxes(batch["x"], 0, 1))
        return jnp.square(jnp.swapaxes(hs, 0, 1) @ params["head"] - batch["y"]).mean()

    data = {k: init.normal(batch, seq, dim, scale=1.0) for k in ("x", "y")}
    return train_model(name, loss, params, data, microbatches=microbatches)


def _gpt_variant(name: str, **options: Any) -> Any:
    return functools.partial(gpt, config=GPTConfig(**options), name=name)


GPT_VARIANTS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "gpt_scan": {"scan": True},
    "gpt_remat": {"remat": True},
    "gpt_scan_remat": {"scan": True, "remat": True},
    "gpt_dropout": {"dropout": 0.2},
    "gpt_scan_dropout": {"scan": True, "remat": True, "dropout": 0.2},
    "gpt_tied": {"tied": True, "clip": False},
}

OTHERS = {
    "encoder_decoder": encoder_decoder,
    "moe": moe,
    "dlrm": dlrm,
    "lstm": lstm,
}

MODELS = {"mlp": mlp} | {name: _gpt_variant(name, **options) for name, options in GPT_VARIANTS.items()} | OTHERS

LARGE = {
    "mlp": functools.partial(mlp, batch=256, sizes=(256, 1024, 1024, 64)),
    **{
        name: _gpt_variant(name, vocab=256, dim=128, layers=3, seq=64, batch=32, **options)
        for name, options in GPT_VARIANTS.items()
    },
    "encoder_decoder": functools.partial(encoder_decoder, batch=32, seq=64, dim=128, vocab=256),
    "moe": functools.partial(moe, batch=32, seq=32, dim=128, hidden=256, capacity=16),
    "dlrm": functools.partial(dlrm, batch=256, rows=(65536, 32768, 8192), dim=32),
    "lstm": functools.partial(lstm, batch=64, seq=32, dim=64, hidden=128),
}
"""The same with more of everything, for memory."""

_THIRDS = (1, 3)
UNEVEN = {
    "mlp_uneven": functools.partial(mlp, batch=6, sizes=(10, 30, 30, 7), microbatches=_THIRDS),
    "gpt_uneven": functools.partial(
        gpt, config=GPTConfig(vocab=53, dim=30, heads=3, seq=10, batch=6), name="gpt_uneven", microbatches=_THIRDS
    ),
    "gpt_scan_uneven": functools.partial(
        gpt,
        config=GPTConfig(vocab=53, dim=30, heads=3, seq=10, batch=6, layers=3, scan=True, remat=True, tied=True),
        name="gpt_scan_uneven",
        microbatches=_THIRDS,
    ),
    "encoder_decoder_uneven": functools.partial(
        encoder_decoder, batch=6, seq=7, dim=30, heads=3, vocab=53, name="encoder_decoder_uneven", microbatches=_THIRDS
    ),
    "moe_uneven": functools.partial(
        moe, batch=6, seq=9, dim=30, hidden=42, experts=6, capacity=5, name="moe_uneven", microbatches=_THIRDS
    ),
    "dlrm_uneven": functools.partial(
        dlrm, batch=6, rows=(1001, 530, 53), dim=10, dense=13, name="dlrm_uneven", microbatches=_THIRDS
    ),
    "lstm_uneven": functools.partial(lstm, batch=6, seq=7, dim=10, hidden=30, name="lstm_uneven", microbatches=_THIRDS),
}
