"""The train step of a published run, by shapes alone: a `Case`'s model and optimizer in plain JAX.

Llama-like where the feed-forward part is gated (root-mean-square norms, rotary positions), else GPT-like (layer norms
with biases, learned positions, GELU); either with grouped queries, a tied embedding, experts with equal shares of the
tokens. Products are in the compute dtype, those of weights in float8 with `case.compute` ``float8``. Values that a
layout says something of have names, for constraints.

Blocks and the update of a leaf are under `jax.jit`, so that equal ones are traced once. Letters in einsums as in
`benchmarks.llama`: b batch, s and t positions, d hidden, g groups, h heads of a group, k head size, f inner, v
vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import autopar
from benchmarks.layers import Shapes, Step, f32, layer_norm
from benchmarks.llama import rms_norm, rotary, rotate
from benchmarks.mixture import by_capacity
from benchmarks.published_rows import Case, Model

RESIDUAL, NORMED, QUERIES, KEYS, INNER, LOGITS = "residual", "normed", "queries", "keys", "inner", "logits"
"""Names of values: what goes from block to block [b, s, d]; the same behind a norm, as products read it; queries and
what attention makes of them [b, s, g, h, k]; keys and values [b, s, g, k]; inner values of the feed-forward part
[b, s, f]; scores of words [b, s, v]."""
WEIGHT, WEIGHT_AGAIN = "weight_", "again_"
"""What a weight's name begins with, as the forward and as the backward pass reads it."""
ROUTED = 256
"""Tokens of a group, of which each expert takes its fair share: runs are measured with balanced routing. So few that
the masks, which runs have none of, cost little."""
B1, B2, EPSILON, RATE, DECAY = 0.9, 0.95, 1e-8, 3e-4, 0.1
"""Of AdamW; no figure of a plan follows from them."""
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2

Product = Callable[[str, str, Any, Any], Any]
"""Of a weight's name, letters of an einsum, activations and the weight."""


def step_of(case: Case) -> Step:
    """The train step and its arguments, as `benchmarks.layers.train_step`."""
    model, compute = case.model, "bfloat16" if case.compute == "float8" else case.compute
    product = product_of(case)
    stored = shapes(model)
    if case.masters_apart:
        stored = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, compute) if p.ndim > 1 else p, stored)
    words = product_of(replace(case, compute=compute))  # never in float8
    attend = attention_of(case)

    @jax.jit
    def block(p: Any, x: Any) -> Any:
        return _block(model, product, attend, p, x)

    def loss_fn(params: Any, batch: Any) -> Any:
        with jax.named_scope("embedding"):
            x = checkpoint_name(params["embed"].astype(compute), WEIGHT + "table")[batch["inputs"]]
            if "positions" in params:
                x = x + params["positions"].astype(compute)
            x = checkpoint_name(x, RESIDUAL)
        for i, p in enumerate(params["blocks"]):
            with jax.named_scope(f"block_{i}"):
                x = block(p, x)
        with jax.named_scope("words"):
            x = _norm(params["norm"], x)
            if model.tied:
                logits = words("embed", "bsd,vd->bsv", x, params["embed"].astype(compute))
            else:
                logits = words("head", "bsd,dv->bsv", x, params["head"].astype(compute))
            logits = checkpoint_name(logits, LOGITS).astype(jnp.float32)
            picked = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
            return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

    init, update = _adafactor() if case.adafactor else adamw(case.masters_apart)

    def train_step(state: tuple[Any, Any], batch: Any) -> tuple[tuple[Any, Any], Any]:
        params, moments = state
        loss, grads = autopar.value_and_grad(loss_fn)(params, batch)
        return update(grads, moments, params), loss

    tokens = jax.ShapeDtypeStruct((case.batch, model.seq), jnp.int32)
    return train_step, ((stored, jax.eval_shape(init, stored)), {"inputs": tokens, "targets": tokens})


def shapes(model: Model) -> Shapes:
    """The parameters in float32."""
    return {
        "embed": f32(model.vocab, model.hidden),
        "blocks": [_block_shapes(model) for _ in range(model.layers)],
        "norm": _norm_shapes(model),
        **({} if model.tied else {"head": f32(model.hidden, model.vocab)}),
        **({} if model.gated else {"positions": f32(model.seq, model.hidden)}),
    }


def _norm_shapes(model: Model) -> Shapes:
    d = model.hidden
    return {"scale": f32(d)} if model.gated else {"scale": f32(d), "bias": f32(d)}


def _block_shapes(model: Model) -> Shapes:
    d, g, k = model.hidden, model.kv_heads, model.head_dim
    f, each = (model.expert_ffn, (model.experts,)) if model.experts else (model.ffn, ())
    mlp = {"up": f32(*each, d, f), "down": f32(*each, f, d)} | ({"gate": f32(*each, d, f)} if model.gated else {})
    return {
        "norm_attention": _norm_shapes(model),
        "query": f32(d, g, model.heads // g, k),
        "key": f32(d, g, k),
        "value": f32(d, g, k),
        "project": f32(g, model.heads // g, k, d),
        "norm_mlp": _norm_shapes(model),
        "mlp": mlp,
        **({"router": f32(d, model.experts)} if model.experts else {}),
    }


def _norm(p: Any, x: Any) -> Any:
    return checkpoint_name(layer_norm(p, x) if "bias" in p else rms_norm(p["scale"], x), NORMED)


def _block(model: Model, product: Product, attend: Callable[[Any, Any, Any], Any], p: Any, x: Any) -> Any:
    """One block: x [b, s, d] → the same."""
    h = _norm(p["norm_attention"], x)
    query = checkpoint_name(product("query", "bsd,dghk->bsghk", h, p["query"].astype(x.dtype)), QUERIES)
    key = checkpoint_name(product("key", "bsd,dgk->bsgk", h, p["key"].astype(x.dtype)), KEYS)
    value = checkpoint_name(product("value", "bsd,dgk->bsgk", h, p["value"].astype(x.dtype)), KEYS)
    if model.gated:
        cos, sin = rotary(model.seq, model.head_dim)
        query = rotate(query, cos[:, None, None], sin[:, None, None])
        key = rotate(key, cos[:, None], sin[:, None])
    out = checkpoint_name(attend(query, key, value), QUERIES)
    x = checkpoint_name(x + product("project", "bsghk,ghkd->bsd", out, p["project"].astype(x.dtype)), RESIDUAL)
    return checkpoint_name(x + _mlp(model, product, p, _norm(p["norm_mlp"], x)), RESIDUAL)


def _mlp(model: Model, product: Product, p: Any, h: Any) -> Any:
    if model.experts:
        scores = jax.nn.softmax(jnp.einsum("bsd,de->bse", h.astype(jnp.float32), p["router"].astype(jnp.float32)))
        gates, chosen = lax.top_k(scores, model.topk)
        return by_capacity(ROUTED, p["mlp"], h, gates / gates.sum(-1, keepdims=True), chosen, room=1.0)
    up = checkpoint_name(product("up", "bsd,df->bsf", h, p["mlp"]["up"].astype(h.dtype)), INNER)
    if model.gated:
        gate = checkpoint_name(product("gate", "bsd,df->bsf", h, p["mlp"]["gate"].astype(h.dtype)), INNER)
        inner = jax.nn.silu(gate) * up
    else:
        inner = jax.nn.gelu(up)
    return product("down", "bsf,fd->bsd", inner, p["mlp"]["down"].astype(h.dtype))


def attention_of(case: Case) -> Callable[[Any, Any, Any], Any]:
    """Causal attention of q [b, s, g, h, k] and of k and v [b, t, g, k]: the platform's kernel, or operators."""
    if not case.fused_attention:
        return plain_attention
    if case.platform == "tpu":
        from tests.attention import splash

        return functools.partial(_by_heads, functools.partial(splash, interpret=False))
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    from tests.attention import xla

    cudnn.cuda_versions = SimpleNamespace(cudnn_get_version=lambda: 91000)  # tracing asks: there need be none here
    cudnn.check_compute_capability = lambda capability: capability == "9.0"  # whose heads are up to 256 wide
    return functools.partial(_by_heads, functools.partial(xla, implementation="cudnn"))


def _by_heads(attention: Callable[[Any, Any, Any], Any], query: Any, key: Any, value: Any) -> Any:
    """By an attention of [b, heads, s, k]."""
    heads = query.reshape(*query.shape[:2], -1, query.shape[-1])
    out = attention(*(jnp.swapaxes(x, 1, 2) for x in (heads, key, value)))
    return jnp.swapaxes(out, 1, 2).reshape(query.shape)


def plain_attention(query: Any, key: Any, value: Any) -> Any:
    """By operators; scores in the dtype of the operands, as Megatron-LM's fused softmax reads and writes them."""
    seq = query.shape[1]
    mask = lax.broadcasted_iota(jnp.int32, (seq, seq), 0) >= lax.broadcasted_iota(jnp.int32, (seq, seq), 1)
    scores = jnp.einsum("bsghk,btgk->bghst", query, key).astype(jnp.float32) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min)).astype(value.dtype)
    return jnp.einsum("bghst,btgk->bsghk", weights, value)


def gathers_again(case: Case) -> bool:
    """True where the backward pass gathers weights that the forward pass had, and it alone."""
    return case.zero == 3 and case.recompute == "none"


def product_of(case: Case) -> Product:
    """The products of a case's layers. With float8 their operands are cast to it, in the backward pass the cotangent
    to e5m2 (Micikevicius et al., "FP8 formats for deep learning", 2022); scales are left out. Under ``zero`` 3 weights
    have names (`WEIGHT`), so that they can be said to be gathered in each pass, as FSDP does; where the backward pass
    computes the forward one again, that gathers for both."""
    if case.compute != "float8" and case.zero < 3:
        return lambda _, spec, x, w: jnp.einsum(spec, x, w)
    anew = gathers_again(case)
    if case.compute != "float8" and not anew:
        return lambda name, spec, x, w: jnp.einsum(spec, x, checkpoint_name(w, WEIGHT + name))

    def low(x: Any, dtype: Any) -> Any:
        return x.astype(dtype) if case.compute == "float8" else x

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
    def product(name: str, spec: str, x: Any, w: Any) -> Any:
        return forward(name, spec, x, w)[0]

    def forward(name: str, spec: str, x: Any, w: Any) -> tuple[Any, tuple[Any, Any]]:
        few, held = low(x, E4M3), low(w, E4M3)
        read = checkpoint_name(held, WEIGHT + name)
        return jnp.einsum(spec, few, read, preferred_element_type=x.dtype), (few, held if anew else read)

    def backward(name: str, spec: str, held: tuple[Any, Any], out: Any) -> tuple[Any, Any]:
        (x, w), (operands, result) = held, spec.split("->")
        of_x, of_w = operands.split(",")
        given, read = low(out, E5M2), checkpoint_name(w, WEIGHT_AGAIN + name) if anew else w
        return (
            jnp.einsum(f"{result},{of_w}->{of_x}", given, read, preferred_element_type=out.dtype),
            jnp.einsum(f"{of_x},{result}->{of_w}", x, given, preferred_element_type=out.dtype),
        )

    product.defvjp(forward, backward)
    return product


@jax.jit
def _square_sum(x: Any) -> Any:
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


@jax.jit
def _leaf(p: Any, g: Any, m: Any, v: Any, scale: Any, corrections: Any) -> tuple[Any, Any, Any]:
    g = g.astype(jnp.float32) * scale
    m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * jnp.square(g)
    step = (m / corrections[0]) / (jnp.sqrt(v / corrections[1]) + EPSILON) + DECAY * p
    return p - RATE * step, m, v


def adamw(masters_apart: bool) -> tuple[Callable[[Any], Any], Callable[[Any, Any, Any], tuple[Any, Any]]]:
    """AdamW (Loshchilov and Hutter, 2019) behind a clip by the global norm: of parameters the state; of gradients,
    state and parameters new parameters and state. ``masters_apart``: float32 copies are part of the state."""

    def init(params: Any) -> Any:
        wide = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        moments = {"count": jnp.zeros((), jnp.int32), "mean": wide, "square": wide}
        return moments | ({"master": wide} if masters_apart else {})

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        norm = jnp.sqrt(sum(map(_square_sum, jax.tree.leaves(grads))))
        scale, count = jnp.minimum(1.0, 1.0 / (norm + EPSILON)), state["count"] + 1
        corrections = 1 - B1**count, 1 - B2**count
        old = state["master"] if masters_apart else params
        found = jax.tree.map(lambda *of: _leaf(*of, scale, corrections), old, grads, state["mean"], state["square"])
        tree = jax.tree.structure(params)
        new, mean, square = jax.tree.transpose(tree, jax.tree.structure((0, 0, 0)), found)
        moments = {"count": count, "mean": mean, "square": square}
        if not masters_apart:
            return new, moments
        return jax.tree.map(lambda p, x: x.astype(p.dtype), params, new), moments | {"master": new}

    return init, update


def _adafactor() -> tuple[Callable[[Any], Any], Callable[[Any, Any, Any], tuple[Any, Any]]]:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(RATE))

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return optimizer.init, update
