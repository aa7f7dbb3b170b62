"""Llama 3 (Grattafiori et al., "The Llama 3 Herd of Models", 2024), by shapes alone: bfloat16 compute, float32
parameters, AdamW.

Root-mean-square normalisation, rotary positions, grouped-query attention, a gated feed-forward part (SwiGLU), an output
matrix of its own. Defaults are the 8B model.

Letters in einsums: b batch, s and t positions, d hidden, g groups of heads that share keys and values, h heads of a
group, k head size, v vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benchmarks.layers import Shapes, Step, f32, train_step

NORM_EPSILON = 1e-5
ROTARY_BASE = 500_000.0

Attention: TypeAlias = "Callable[[Any, Any, Any], Any]"
"""Of queries, keys and values."""


def llama(
    *,
    layers: int = 32,
    hidden: int = 4096,
    heads: int = 32,
    groups: int = 8,
    inner: int = 14336,
    vocab: int = 128_256,
    seq: int = 8192,
    batch: int = 8,
    dtype: str = "bfloat16",
    scan: bool = False,
    remat: bool = True,
    attention: Attention | None = None,
    optimizer: Any = None,
) -> Step:
    """``groups`` divides ``heads``. ``scan``: one traced block over stacked parameters, instead of one per layer.
    ``attention``: causal, of q [b, heads, s, k] and of k and v [b, groups, s, k], in place of plain operators.
    ``optimizer``: optax's; None for AdamW."""
    if heads % groups or hidden % heads:
        raise ValueError(f"llama: {groups} groups must divide {heads} heads, and those a hidden size of {hidden}")
    size = hidden // heads

    def block_shapes(*stack: int) -> Shapes:
        return attention_shapes(hidden, heads, groups, size, *stack) | gated_shapes(hidden, inner, *stack)

    params = {
        "embed": f32(vocab, hidden),
        "blocks": block_shapes(layers) if scan else [block_shapes() for _ in range(layers)],
        "norm": f32(hidden),
        "head": f32(hidden, vocab),
    }
    block = jax.checkpoint(_block, static_argnums=4) if remat else _block

    def loss_fn(params: Any, batch: Any) -> Any:
        x = params["embed"][batch["inputs"]].astype(dtype)
        cos, sin = rotary(seq, size)
        mask = jnp.tril(jnp.ones((seq, seq), bool))
        attending = functools.partial(attend, mask) if attention is None else functools.partial(_by_heads, attention)
        if scan:
            with jax.named_scope("blocks"):
                x, _ = lax.scan(lambda x, p: (block(p, x, cos, sin, attending), None), x, params["blocks"])
        else:
            for i, p in enumerate(params["blocks"]):
                with jax.named_scope(f"block_{i}"):
                    x = block(p, x, cos, sin, attending)
        return token_loss(params, x, batch["targets"])

    return language_model(loss_fn, params, batch, seq, optimizer)


def attention_shapes(hidden: int, heads: int, groups: int, size: int, *stack: int) -> Shapes:
    """What `attended` reads, and the scale of the norm after it."""
    return {
        "norm_attention": f32(*stack, hidden),
        "query": f32(*stack, hidden, groups, heads // groups, size),
        "key": f32(*stack, hidden, groups, size),
        "value": f32(*stack, hidden, groups, size),
        "project": f32(*stack, groups, heads // groups, size, hidden),
        "norm_mlp": f32(*stack, hidden),
    }


def gated_shapes(hidden: int, inner: int, *stack: int) -> Shapes:
    """What `gated` reads."""
    wide = {"gate": f32(*stack, hidden, inner), "up": f32(*stack, hidden, inner)}
    return wide | {"down": f32(*stack, inner, hidden)}


def language_model(loss_fn: Callable[[Any, Any], Any], params: Shapes, batch: int, seq: int, optimizer: Any) -> Step:
    """A step of ``loss_fn`` on int32 ``inputs`` and ``targets`` [batch, seq]; None for AdamW."""
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    optimizer = optimizer or optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
    return train_step(loss_fn, params, {"inputs": tokens, "targets": tokens}, optimizer)


def _block(p: Any, x: Any, cos: Any, sin: Any, attending: Attention) -> Any:
    x = attended(p, x, cos, sin, attending)
    return x + gated(p, rms_norm(p["norm_mlp"], x))


def attended(p: Any, x: Any, cos: Any, sin: Any, attending: Attention) -> Any:
    """x: [b, s, d] → the same, with what attention adds; cos, sin: float32[s, k / 2]; ``attending`` as `attend`."""
    query, key, value, project = (p[name].astype(x.dtype) for name in ("query", "key", "value", "project"))
    h = rms_norm(p["norm_attention"], x)
    query = rotate(jnp.einsum("bsd,dghk->bsghk", h, query), cos[:, None, None], sin[:, None, None])
    key = rotate(jnp.einsum("btd,dgk->btgk", h, key), cos[:, None], sin[:, None])
    out = attending(query, key, jnp.einsum("btd,dgk->btgk", h, value))
    return x + jnp.einsum("bsghk,ghkd->bsd", out, project)


def gated(p: Any, x: Any) -> Any:
    """SwiGLU (Shazeer, 2020)."""
    gate, up, down = (p[name].astype(x.dtype) for name in ("gate", "up", "down"))
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def token_loss(params: Any, x: Any, targets: Any) -> Any:
    """x: [b, s, d], targets: int32[b, s] → the mean cross-entropy, in float32."""
    x = rms_norm(params["norm"], x)
    head = params["head"].astype(x.dtype)
    logits = jnp.einsum("bsd,dv->bsv", x, head, preferred_element_type=jnp.float32)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def attend(mask: Any, query: Any, key: Any, value: Any) -> Any:
    """[b, s, g, h, k] over [b, t, g, k] → [b, s, g, h, k]; mask: bool[s, t]."""
    scores = jnp.einsum("bsghk,btgk->bghst", query, key, preferred_element_type=jnp.float32)
    scores = jnp.where(mask, scores * query.shape[-1] ** -0.5, jnp.finfo(jnp.float32).min)
    return jnp.einsum("bghst,btgk->bsghk", jax.nn.softmax(scores).astype(value.dtype), value)


def _by_heads(attention: Attention, query: Any, key: Any, value: Any) -> Any:
    """As `attend`, by an attention of [b, heads, s, k]."""
    heads = query.reshape(*query.shape[:2], -1, query.shape[-1])
    out = attention(*(jnp.swapaxes(x, 1, 2) for x in (heads, key, value)))
    return jnp.swapaxes(out, 1, 2).reshape(query.shape)


def rms_norm(scale: Any, x: Any) -> Any:
    """Computed in float32 over the last dimension; the result has x's dtype."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + NORM_EPSILON) * scale).astype(x.dtype)


def rotary(seq: int, size: int) -> tuple[Any, Any]:
    """Cosines and sines of every position's angles: float32[seq, size / 2] each."""
    frequencies = ROTARY_BASE ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    angles = jnp.arange(seq, dtype=jnp.float32)[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    """[b, s, …, k] with the first half of k turned against the second (RoFormer: Su et al., 2021)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
