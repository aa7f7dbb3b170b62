"""A mixture of experts and a U-Transformer at the sizes of Alpa's suites (Zheng et al., OSDI 2022), by shapes alone.

Each function gives (train step, its arguments as ShapeDtypeStructs): nothing here makes an array. Defaults are the
suites' entries for 8 devices, with the examples of one microbatch.

Letters in einsums: b batch, g groups of tokens, s and t positions, d hidden, h heads, k head size, e experts,
c places of an expert, f feed-forward size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import autopar

Shapes = Any
Step = tuple[Callable[..., Any], tuple[Any, ...]]
NORM_EPSILON = 1e-5
NORM_GROUPS = 32
TEXT_LENGTH, TEXT_HIDDEN = 77, 1024
"""What the U-Transformer attends to: an encoded text."""


def moe(
    *,
    layers: int = 16,
    hidden: int = 1024,
    heads: int = 16,
    experts: int = 16,
    mlp_factor: int = 8,
    group: int = 2048,
    seq: int = 1024,
    vocab: int = 32000,
    batch: int = 32,
) -> Step:
    """A decoder whose every second layer has top-2 experts (GShard: Lepikhin et al., ICLR 2021), bfloat16, Adafactor.

    Tokens are cut into groups of ``group``; in each an expert takes twice its fair share at most.
    """
    inner = mlp_factor * hidden
    capacity = 2 * group // experts

    def layer_shapes(sparse: bool) -> Shapes:
        wide = (experts,) if sparse else ()
        return {
            "norm1": _norm_shapes(hidden),
            "attention": _attention_shapes(hidden, hidden),
            "norm2": _norm_shapes(hidden),
            "up": _shape(*wide, hidden, inner),
            "down": _shape(*wide, inner, hidden),
            **({"gate": _shape(hidden, experts)} if sparse else {}),
        }

    params = {
        "embed": _shape(vocab, hidden),
        "position": _shape(seq, hidden),
        "layers": [layer_shapes(i % 2 == 1) for i in range(layers)],
        "norm": _norm_shapes(hidden),
    }

    def loss_fn(params: Any, batch: Any) -> Any:
        x = (params["embed"][batch["inputs"]] + params["position"]).astype(jnp.bfloat16)
        mask = jnp.tril(jnp.ones((seq, seq), bool))
        for p in params["layers"]:
            h = _layer_norm(p["norm1"], x)
            x = x + _attention(p["attention"], h, h, heads, mask)
            h = _layer_norm(p["norm2"], x)
            if "gate" in p:
                x = x + _experts(p, h.reshape(-1, group, hidden), capacity).reshape(x.shape)
            else:
                x = x + jax.nn.gelu(h @ p["up"].astype(x.dtype)) @ p["down"].astype(x.dtype)
        x = _layer_norm(params["norm"], x)
        embed = params["embed"].astype(x.dtype)
        logits = jnp.einsum("bsd,vd->bsv", x, embed, preferred_element_type=jnp.float32)
        picked = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    return _train_step(loss_fn, params, {"inputs": tokens, "targets": tokens}, optax.adafactor(1e-3))


def u_transformer(
    *,
    channels: int = 672,
    multipliers: tuple[int, ...] = (1, 2, 4, 4),
    layers_per_block: int = 1,
    heads: int = 8,
    image: int = 32,
    batch: int = 64,
) -> Step:
    """A U-Net for diffusion with a transformer after every residual block, float32, plain gradient descent; blocks are
    rematerialised."""
    widths = [m * channels for m in multipliers]
    time_width = 4 * channels

    def block_shapes(width_in: int, width: int) -> Shapes:
        return {
            "norm1": _norm_shapes(width_in),
            "conv1": _shape(3, 3, width_in, width),
            "time": _shape(time_width, width),
            "norm2": _norm_shapes(width),
            "conv2": _shape(3, 3, width, width),
            **({} if width_in == width else {"skip": _shape(1, 1, width_in, width)}),
            "norm3": _norm_shapes(width),
            "self": _attention_shapes(width, width),
            "norm4": _norm_shapes(width),
            "cross": _attention_shapes(width, TEXT_HIDDEN),
            "norm5": _norm_shapes(width),
            "up": _shape(width, 4 * width),
            "down": _shape(4 * width, width),
        }

    down: list[Shapes] = []
    skips = [channels]
    width_in = channels
    for level, width in enumerate(widths):
        blocks = [block_shapes(width_in if i == 0 else width, width) for i in range(layers_per_block)]
        last = level == len(widths) - 1
        down.append({"blocks": blocks, **({} if last else {"smaller": _shape(3, 3, width, width)})})
        skips += [width] * (layers_per_block + (not last))
        width_in = width
    middle = block_shapes(width_in, width_in)
    up: list[Shapes] = []
    for level, width in reversed(list(enumerate(widths))):
        blocks = []
        for _ in range(layers_per_block + 1):
            blocks.append(block_shapes(width_in + skips.pop(), width))
            width_in = width
        up.append({"blocks": blocks, **({"larger": _shape(3, 3, width, width)} if level else {})})
    params = {
        "enter": _shape(3, 3, 4, channels),
        "time": [_shape(channels, time_width), _shape(time_width, time_width)],
        "down": down,
        "middle": middle,
        "up": up,
        "norm": _norm_shapes(widths[0]),
        "leave": _shape(3, 3, widths[0], 4),
    }

    @jax.checkpoint
    def block(p: Any, x: Any, time: Any, text: Any) -> Any:
        h = _conv(jax.nn.silu(_group_norm(p["norm1"], x)), p["conv1"])
        h = h + (time @ p["time"])[:, None, None, :]
        h = _conv(jax.nn.silu(_group_norm(p["norm2"], h)), p["conv2"])
        x = h + (_conv(x, p["skip"]) if "skip" in p else x)
        shape = x.shape
        x = x.reshape(shape[0], -1, shape[-1])
        h = _layer_norm(p["norm3"], x)
        x = x + _attention(p["self"], h, h, heads, None)
        x = x + _attention(p["cross"], _layer_norm(p["norm4"], x), text, heads, None)
        x = x + jax.nn.gelu(_layer_norm(p["norm5"], x) @ p["up"]) @ p["down"]
        return x.reshape(shape)

    def loss_fn(params: Any, batch: Any) -> Any:
        angles = batch["time"][:, None] * jnp.exp(-jnp.linspace(0.0, 9.0, channels // 2))
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        time = jax.nn.silu(jax.nn.silu(time @ params["time"][0]) @ params["time"][1])
        x = _conv(batch["noisy"], params["enter"])
        skips = [x]
        for p in params["down"]:
            for q in p["blocks"]:
                x = block(q, x, time, batch["text"])
                skips.append(x)
            if "smaller" in p:
                x = _conv(x, p["smaller"], 2)
                skips.append(x)
        x = block(params["middle"], x, time, batch["text"])
        for p in params["up"]:
            for q in p["blocks"]:
                x = block(q, jnp.concatenate([x, skips.pop()], axis=-1), time, batch["text"])
            if "larger" in p:
                x = _conv(_twice_as_large(x), p["larger"])
        x = _conv(jax.nn.silu(_group_norm(params["norm"], x)), params["leave"])
        return jnp.mean(jnp.square(x - batch["noise"]))

    picture = _shape(batch, image, image, 4)
    data = {"noisy": picture, "noise": picture, "time": _shape(batch), "text": _shape(batch, TEXT_LENGTH, TEXT_HIDDEN)}
    return _train_step(loss_fn, params, data, optax.sgd(1e-2))


def _train_step(loss_fn: Callable[..., Any], params: Shapes, data: Shapes, optimizer: Any) -> Step:
    def train_step(state: tuple[Any, Any], batch: Any) -> tuple[tuple[Any, Any], Any]:
        params, opt_state = state
        loss, grads = autopar.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return train_step, ((params, jax.eval_shape(optimizer.init, params)), data)


def _shape(*shape: int) -> Shapes:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _norm_shapes(width: int) -> Shapes:
    return {"scale": _shape(width), "bias": _shape(width)}


def _attention_shapes(width: int, context: int) -> Shapes:
    square, from_context = _shape(width, width), _shape(context, width)
    return {"q": square, "k": from_context, "v": from_context, "out": square}


def _layer_norm(p: Any, x: Any) -> Any:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return (centred * lax.rsqrt(variance + NORM_EPSILON) * p["scale"] + p["bias"]).astype(x.dtype)


def _group_norm(p: Any, x: Any) -> Any:
    parts = x.reshape(*x.shape[:-1], NORM_GROUPS, -1)
    centred = parts - parts.mean((1, 2, 4), keepdims=True)
    variance = jnp.square(centred).mean((1, 2, 4), keepdims=True)
    return (centred * lax.rsqrt(variance + NORM_EPSILON)).reshape(x.shape) * p["scale"] + p["bias"]


def _attention(p: Any, x: Any, context: Any, heads: int, mask: Any) -> Any:
    """[b, s, d] attending to [b, t, …] → [b, s, d]; ``mask`` bool[s, t] or None."""

    def project(y: Any, w: Any) -> Any:
        return (y @ w.astype(y.dtype)).reshape(*y.shape[:2], heads, -1)

    q, k, v = project(x, p["q"]), project(context, p["k"]), project(context, p["v"])
    scores = jnp.einsum("bshk,bthk->bhst", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    out = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores).astype(x.dtype), v)
    return out.reshape(x.shape) @ p["out"].astype(x.dtype)


def _experts(p: Any, x: Any, capacity: int) -> Any:
    """[g, s, d] → [g, s, d], each token through its two best experts as far as those have room."""
    gates = jax.nn.softmax(jnp.einsum("gsd,de->gse", x.astype(jnp.float32), p["gate"]))
    experts = gates.shape[-1]
    first = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
    second = jax.nn.one_hot(jnp.argmax(gates * (1 - first), -1), experts)
    place_first = (jnp.cumsum(first, 1) - first) * first
    place_second = (jnp.cumsum(second, 1) - second + first.sum(1, keepdims=True)) * second
    combine = jnp.zeros((), jnp.float32)
    for chosen, place in ((first, place_first), (second, place_second)):
        slot = jax.nn.one_hot(place.sum(-1).astype(jnp.int32), capacity)  # past the capacity: all zero
        combine = combine + jnp.einsum("gs,gse,gsc->gsec", (gates * chosen).sum(-1), chosen, slot)
    dispatch = (combine > 0).astype(x.dtype)
    h = jnp.einsum("gsec,gsd->egcd", dispatch, x)
    h = jax.nn.gelu(jnp.einsum("egcd,edf->egcf", h, p["up"].astype(x.dtype)))
    h = jnp.einsum("egcf,efd->egcd", h, p["down"].astype(x.dtype))
    return jnp.einsum("gsec,egcd->gsd", combine.astype(x.dtype), h)


def _conv(x: Any, w: Any, stride: int = 1) -> Any:
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _twice_as_large(x: Any) -> Any:
    b, height, width, d = x.shape
    x = jnp.broadcast_to(x[:, :, None, :, None, :], (b, height, 2, width, 2, d))
    return x.reshape(b, 2 * height, 2 * width, d)
