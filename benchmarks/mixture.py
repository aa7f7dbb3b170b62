"""Mixtures of experts at today's shapes, by shapes alone: Mixtral (Jiang et al., 2024) and DeepSeek-V3 (2024); and the
dense transformers of a trillion parameters of Megatron-LM (Narayanan et al., 2021) and GSPMD (Xu et al., 2021), which
have no experts in any layer.

Llama's blocks (`benchmarks.llama`) with experts in place of the gated feed-forward part: each token goes through its
``top`` best of ``experts``, and, where there is one, through a shared expert. Two ways to bring tokens to experts:

``capacity``  in groups of ``group`` tokens an expert takes ``CAPACITY`` times its fair share at most, picked by
              products with one-hot masks (GShard: Lepikhin et al., ICLR 2021)
``dropless``  tokens sorted by expert, products over ragged groups (MegaBlocks: Gale et al., 2023; `lax.ragged_dot`)

DeepSeek-V3's latent attention is left out: its widths are those of plain attention with as many heads of its size for
queries and keys, which computes more and has no latent caches to shard. Letters in einsums, beside Llama's: e expert,
c place in an expert, f inner width of an expert.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.layers import Shapes, Step, f32
from benchmarks.llama import (
    attend,
    attended,
    attention_shapes,
    gated,
    gated_shapes,
    language_model,
    rms_norm,
    rotary,
    token_loss,
)

CAPACITY = 1.25
Routing: TypeAlias = Literal["capacity", "dropless"]

MIXTRAL: dict[str, int] = {
    "layers": 56, "hidden": 6144, "heads": 48, "groups": 8, "size": 128, "experts": 8, "top": 2, "expert_inner": 16384,
    "vocab": 32768,
}  # fmt: skip
"""Mixtral-8x22B."""
DEEPSEEK_V3: dict[str, int] = {
    "layers": 61, "dense_layers": 3, "hidden": 7168, "heads": 128, "groups": 128, "size": 128, "inner": 18432,
    "experts": 256, "top": 8, "expert_inner": 2048, "shared_inner": 2048, "vocab": 129_280,
}  # fmt: skip
QWEN3_30B: dict[str, Any] = {
    "layers": 48, "hidden": 2048, "heads": 32, "groups": 4, "size": 128, "experts": 128, "top": 8, "expert_inner": 768,
    "vocab": 151_936, "routing": "dropless",
}  # fmt: skip
"""Qwen3-30B-A3B (Qwen Team, 2025)."""
_DENSE: dict[str, int] = {
    "layers": 128,
    "dense_layers": 128,
    "dense_gate": False,
    "experts": 0,
    "top": 0,
    "expert_inner": 0,
}
MEGATRON_1T: dict[str, int] = _DENSE | {
    "hidden": 25_600, "heads": 160, "groups": 160, "size": 160, "inner": 102_400, "vocab": 51_200, "seq": 2048,
}  # fmt: skip
GSPMD_1T: dict[str, int] = _DENSE | {
    "hidden": 16_384, "heads": 256, "groups": 256, "size": 256, "inner": 131_072, "vocab": 32_000, "seq": 1024,
}  # fmt: skip


def mixture(
    *,
    layers: int,
    hidden: int,
    heads: int,
    groups: int,
    size: int,
    experts: int,
    top: int,
    expert_inner: int,
    vocab: int,
    dense_layers: int = 0,
    inner: int = 0,
    dense_gate: bool = True,
    shared_inner: int = 0,
    group: int = 1024,
    seq: int = 4096,
    batch: int = 8,
    routing: Routing = "capacity",
    dtype: str = "bfloat16",
    optimizer: Any = None,
) -> Step:
    """The first ``dense_layers`` have no experts, but an inner width of ``inner``, gated or by GELU (``dense_gate``);
    ``shared_inner`` is that of the shared expert, 0 for none. ``group`` divides ``seq``."""
    if seq % group:
        raise ValueError(f"mixture: groups of {group} tokens do not divide sequences of {seq}")

    def block_shapes(dense: bool) -> Shapes:
        attention = attention_shapes(hidden, heads, groups, size)
        if dense:
            mlp = gated_shapes(hidden, inner)
            return attention | {"mlp": {name: mlp[name] for name in mlp if dense_gate or name != "gate"}}
        shared = {"shared": gated_shapes(hidden, shared_inner)} if shared_inner else {}
        routed = {"router": f32(hidden, experts), "experts": gated_shapes(hidden, expert_inner, experts)}
        return attention | routed | shared

    params = {
        "embed": f32(vocab, hidden),
        "blocks": [block_shapes(i < dense_layers) for i in range(layers)],
        "norm": f32(hidden),
        "head": f32(hidden, vocab),
    }
    routed = functools.partial(by_capacity, group) if routing == "capacity" else _dropless

    @jax.checkpoint
    def block(p: Any, x: Any, cos: Any, sin: Any, mask: Any) -> Any:
        x = attended(p, x, cos, sin, functools.partial(attend, mask))
        h = rms_norm(p["norm_mlp"], x)
        if "mlp" in p:
            return x + (gated(p["mlp"], h) if dense_gate else _by_gelu(p["mlp"], h))
        gates, chosen = lax.top_k(jax.nn.softmax(jnp.einsum("bsd,de->bse", h.astype(jnp.float32), p["router"])), top)
        gates = gates / gates.sum(-1, keepdims=True)
        out = routed(p["experts"], h, gates, chosen)
        return x + out + (gated(p["shared"], h) if "shared" in p else 0)

    def loss_fn(params: Any, batch: Any) -> Any:
        x = params["embed"][batch["inputs"]].astype(dtype)
        cos, sin = rotary(seq, size)
        mask = jnp.tril(jnp.ones((seq, seq), bool))
        for i, p in enumerate(params["blocks"]):
            with jax.named_scope(f"block_{i}"):
                x = block(p, x, cos, sin, mask)
        return token_loss(params, x, batch["targets"])

    return language_model(loss_fn, params, batch, seq, optimizer)


def _by_gelu(p: Any, x: Any) -> Any:
    return jax.nn.gelu(x @ p["up"].astype(x.dtype)) @ p["down"].astype(x.dtype)


def by_capacity(group: int, p: Any, x: Any, gates: Any, chosen: Any, room: float = CAPACITY) -> Any:
    """x [b, s, d], gates float32[b, s, top] and experts chosen int32[b, s, top] → [b, s, d]; tokens for which an expert
    has no more room, ``room`` times its fair share, are left out there."""
    shape, (experts, *_) = x.shape, p["gate"].shape
    x, gates, chosen = (a.reshape(-1, group, a.shape[-1]) for a in (x, gates, chosen))
    top = chosen.shape[-1]
    capacity = max(1, int(room * top * group / experts))
    which = jax.nn.one_hot(chosen, experts, dtype=jnp.float32)  # [b, s, top, e]
    in_order = which.swapaxes(1, 2).reshape(-1, top * group, experts)  # all first choices before all second ones
    place = (jnp.cumsum(in_order, 1) - in_order).reshape(-1, top, group, experts).swapaxes(1, 2)
    slot = jax.nn.one_hot((place * which).sum(-1).astype(jnp.int32), capacity)  # past the capacity: all zero
    combine = jnp.einsum("bsk,bske,bskc->bsec", gates, which, slot)
    dispatch = (combine > 0).astype(x.dtype)
    gate, up, down = (p[name].astype(x.dtype) for name in ("gate", "up", "down"))
    h = jnp.einsum("bsec,bsd->ebcd", dispatch, x)
    h = jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", h, gate)) * jnp.einsum("ebcd,edf->ebcf", h, up)
    h = jnp.einsum("ebcf,efd->ebcd", h, down)
    return jnp.einsum("bsec,ebcd->bsd", combine.astype(x.dtype), h).reshape(shape)


def _dropless(p: Any, x: Any, gates: Any, chosen: Any) -> Any:
    """As `by_capacity`, with room for all tokens: sorted by expert."""
    shape, (experts, *_) = x.shape, p["gate"].shape
    x, gates, chosen = x.reshape(-1, shape[-1]), gates.reshape(-1), chosen.reshape(-1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=experts)
    token = order // (chosen.size // len(x))
    gate, up, down = (p[name].astype(x.dtype) for name in ("gate", "up", "down"))
    h = x[token]
    h = jax.nn.silu(lax.ragged_dot(h, gate, sizes)) * lax.ragged_dot(h, up, sizes)
    h = lax.ragged_dot(h, down, sizes) * gates[order, None].astype(x.dtype)
    return jnp.zeros_like(x).at[token].add(h).reshape(shape)
