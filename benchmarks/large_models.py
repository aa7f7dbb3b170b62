"""A mixture of experts and a U-Transformer of about the sizes of Alpa's suites (Zheng et al., OSDI 2022).

Each function gives (train step, its arguments as ShapeDtypeStructs): nothing here makes an array. Defaults are the
suites' entries for 8 devices, with the examples of one microbatch.

Letters in einsums: b batch, g groups of tokens, s and t positions, d hidden, h heads, k head size, e experts,
c places of an expert, f feed-forward size.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.layers import (
    Shapes,
    Step,
    attention,
    attention_shapes,
    conv,
    f32,
    group_norm,
    layer_norm,
    norm_shapes,
    train_step,
    twice_as_large,
)

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
    dtype: str = "bfloat16",
    remat: bool = False,
) -> Step:
    """A decoder whose every second layer has top-2 experts (GShard: Lepikhin et al., ICLR 2021), Adafactor.

    Tokens are cut into groups of ``group``; in each an expert takes twice its fair share at most. Activations and
    products are ``dtype``, parameters float32; ``remat`` keeps only each layer's input for the backward pass.
    """
    if batch * seq % group:
        raise ValueError(
            f"{batch} sequences of {seq} tokens do not fill groups of {group}; take another batch or group"
        )
    inner = mlp_factor * hidden
    capacity = 2 * group // experts

    def layer_shapes(sparse: bool) -> Shapes:
        wide = (experts,) if sparse else ()
        return {
            "norm1": norm_shapes(hidden),
            "attention": attention_shapes(hidden, hidden),
            "norm2": norm_shapes(hidden),
            "up": f32(*wide, hidden, inner),
            "down": f32(*wide, inner, hidden),
            **({"gate": f32(hidden, experts)} if sparse else {}),
        }

    params = {
        "embed": f32(vocab, hidden),
        "position": f32(seq, hidden),
        "layers": [layer_shapes(i % 2 == 1) for i in range(layers)],
        "norm": norm_shapes(hidden),
    }

    def block(p: Any, x: Any, mask: Any) -> Any:
        h = layer_norm(p["norm1"], x)
        x = x + attention(p["attention"], h, h, heads, mask)
        h = layer_norm(p["norm2"], x)
        if "gate" in p:
            return x + _experts(p, h.reshape(-1, group, hidden), capacity).reshape(x.shape)
        return x + jax.nn.gelu(h @ p["up"].astype(x.dtype)) @ p["down"].astype(x.dtype)

    run = jax.checkpoint(block) if remat else block

    def loss_fn(params: Any, batch: Any) -> Any:
        x = (params["embed"][batch["inputs"]] + params["position"]).astype(dtype)
        mask = jnp.tril(jnp.ones((seq, seq), bool))
        for i, p in enumerate(params["layers"]):
            with jax.named_scope(f"block_{i}"):
                x = run(p, x, mask)
        x = layer_norm(params["norm"], x)
        embed = params["embed"].astype(x.dtype)
        logits = jnp.einsum("bsd,vd->bsv", x, embed, preferred_element_type=jnp.float32)
        picked = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    return train_step(loss_fn, params, {"inputs": tokens, "targets": tokens}, optax.adafactor(1e-3))


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
            "norm1": norm_shapes(width_in),
            "conv1": f32(3, 3, width_in, width),
            "time": f32(time_width, width),
            "norm2": norm_shapes(width),
            "conv2": f32(3, 3, width, width),
            **({} if width_in == width else {"skip": f32(1, 1, width_in, width)}),
            "norm3": norm_shapes(width),
            "self": attention_shapes(width, width),
            "norm4": norm_shapes(width),
            "cross": attention_shapes(width, TEXT_HIDDEN),
            "norm5": norm_shapes(width),
            "up": f32(width, 4 * width),
            "down": f32(4 * width, width),
        }

    down: list[Shapes] = []
    skips = [channels]
    width_in = channels
    for level, width in enumerate(widths):
        blocks = [block_shapes(width_in if i == 0 else width, width) for i in range(layers_per_block)]
        last = level == len(widths) - 1
        down.append({"blocks": blocks, **({} if last else {"smaller": f32(3, 3, width, width)})})
        skips += [width] * (layers_per_block + (not last))
        width_in = width
    middle = block_shapes(width_in, width_in)
    up: list[Shapes] = []
    for level, width in reversed(list(enumerate(widths))):
        blocks = []
        for _ in range(layers_per_block + 1):
            blocks.append(block_shapes(width_in + skips.pop(), width))
            width_in = width
        up.append({"blocks": blocks, **({"larger": f32(3, 3, width, width)} if level else {})})
    params = {
        "enter": f32(3, 3, 4, channels),
        "time": [f32(channels, time_width), f32(time_width, time_width)],
        "down": down,
        "middle": middle,
        "up": up,
        "norm": norm_shapes(widths[0]),
        "leave": f32(3, 3, widths[0], 4),
    }

    @jax.checkpoint
    def block(p: Any, x: Any, time: Any, text: Any) -> Any:
        h = conv(jax.nn.silu(group_norm(p["norm1"], x)), p["conv1"])
        h = h + (time @ p["time"])[:, None, None, :]
        h = conv(jax.nn.silu(group_norm(p["norm2"], h)), p["conv2"])
        x = h + (conv(x, p["skip"]) if "skip" in p else x)
        shape = x.shape
        x = x.reshape(shape[0], -1, shape[-1])
        h = layer_norm(p["norm3"], x)
        x = x + attention(p["self"], h, h, heads, None)
        x = x + attention(p["cross"], layer_norm(p["norm4"], x), text, heads, None)
        x = x + jax.nn.gelu(layer_norm(p["norm5"], x) @ p["up"]) @ p["down"]
        return x.reshape(shape)

    def loss_fn(params: Any, batch: Any) -> Any:
        angles = batch["time"][:, None] * jnp.exp(-jnp.linspace(0.0, 9.0, channels // 2))
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        time = jax.nn.silu(jax.nn.silu(time @ params["time"][0]) @ params["time"][1])
        x = conv(batch["noisy"], params["enter"])
        skips = [x]
        for p in params["down"]:
            for q in p["blocks"]:
                x = block(q, x, time, batch["text"])
                skips.append(x)
            if "smaller" in p:
                x = conv(x, p["smaller"], 2)
                skips.append(x)
        x = block(params["middle"], x, time, batch["text"])
        for p in params["up"]:
            for q in p["blocks"]:
                x = block(q, jnp.concatenate([x, skips.pop()], axis=-1), time, batch["text"])
            if "larger" in p:
                x = conv(twice_as_large(x), p["larger"])
        x = conv(jax.nn.silu(group_norm(params["norm"], x)), params["leave"])
        return jnp.mean(jnp.square(x - batch["noise"]))

    picture = f32(batch, image, image, 4)
    data = {"noisy": picture, "noise": picture, "time": f32(batch), "text": f32(batch, TEXT_LENGTH, TEXT_HIDDEN)}
    return train_step(loss_fn, params, data, optax.sgd(1e-2))


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
