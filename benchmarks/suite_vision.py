"""The vision models of the suite, by shapes alone: Alpa's Wide-ResNet and U-Transformer (Zheng et al., OSDI 2022), and
a Vision Transformer (Dosovitskiy et al., ICLR 2021).

The Wide-ResNet is not Alpa's in one thing. That normalises over the batch, so that an example's result hangs on all
others and a step over microbatches is another function than the step over the whole batch, which
`autopar.parallelize` refuses. Here each position is normalised over its channels, as in `benchmarks.vision`: the
same arrays are read and written, no sums cross examples, and there are no running averages. What is published of
Alpa's stages is of the model with batch normalisation.

The U-Transformer normalises over groups of channels of one example, as Alpa's does.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benchmarks.layers import (
    Shapes,
    Step,
    attention,
    attention_shapes,
    bottleneck,
    channel_norm,
    conv,
    f32,
    group_norm,
    layer_norm,
    norm_shapes,
    train_step,
    twice_as_large,
)

STAGES = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
"""Layers → blocks of each stage (He et al., CVPR 2016)."""


def wide_resnet(
    *,
    layers: int = 50,
    channels: int = 160,
    width: int = 2,
    image: int = 224,
    classes: int = 1024,
    batch: int = 64,
    remat: bool = True,
    blocks: tuple[int, ...] | None = None,
    optimizer: Any = None,
) -> Step:
    """float32, gradient descent with momentum 0.9 unless it is another of optax's. In stage i, f = ``channels``·2^i; a
    block has convolutions 1×1 to f, 3×3 to ``width``·f and 1×1 to 4f. ``blocks`` replaces the stages of ``layers``."""
    stages = STAGES[layers] if blocks is None else blocks
    run = jax.checkpoint(bottleneck, static_argnums=2) if remat else bottleneck
    params: dict[str, Any] = {"enter": f32(7, 7, 3, channels), "scale": f32(channels), "blocks": []}
    strides: list[int] = []
    have = channels
    for stage, count in enumerate(stages):
        f = channels * 2**stage
        for b in range(count):
            strides.append(2 if stage and not b else 1)
            params["blocks"].append(
                {
                    "in": f32(1, 1, have, f),
                    "mid": f32(3, 3, f, width * f),
                    "out": f32(1, 1, width * f, 4 * f),
                    "scale_in": f32(f),
                    "scale_mid": f32(width * f),
                    "scale_out": f32(4 * f),
                    **({} if have == 4 * f else {"skip": f32(1, 1, have, 4 * f)}),
                }
            )
            have = 4 * f
    params["head"] = f32(have, classes)
    params["bias"] = f32(classes)

    def loss_fn(params: Any, batch: Any) -> Any:
        x = jax.nn.relu(channel_norm(conv(batch["images"], params["enter"], 2), params["scale"]))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for i, (p, stride) in enumerate(zip(params["blocks"], strides, strict=True)):
            with jax.named_scope(f"block_{i}"):
                x = run(p, x, stride)
        return _cross_entropy(x.mean((1, 2)) @ params["head"] + params["bias"], batch["labels"])

    data = {"images": f32(batch, image, image, 3), "labels": jax.ShapeDtypeStruct((batch,), jnp.int32)}
    return train_step(loss_fn, params, data, optimizer or optax.sgd(0.1, momentum=0.9))


def u_transformer(
    *,
    channels: int = 320,
    multipliers: tuple[int, ...] = (1, 2, 4, 4),
    layers_per_block: int = 1,
    heads: int = 8,
    image: int = 32,
    batch: int = 64,
    remat: bool = True,
) -> Step:
    """A U-Net for diffusion that attends to a condition, float32, plain gradient descent.

    On the way down each level has ``layers_per_block`` residual blocks, followed by transformers in all but the last
    level; then one residual block, a transformer and another residual block; on the way up each level has as many
    blocks with transformers, and the last one more, without. A block on the way up also reads what its level left on
    the way down. The condition has a vector of the widest level for each position of the smallest image.
    """
    widths = [m * channels for m in multipliers]
    levels = len(widths)
    time_width = 4 * channels
    context = widths[-1]
    residual = jax.checkpoint(_residual) if remat else _residual
    transformer = jax.checkpoint(_transformer, static_argnums=3) if remat else _transformer

    def residual_shapes(width_in: int, width: int) -> Shapes:
        return {
            "norm1": norm_shapes(width_in),
            "conv1": f32(3, 3, width_in, width),
            "time": f32(time_width, width),
            "norm2": norm_shapes(width),
            "conv2": f32(3, 3, width, width),
            **({} if width_in == width else {"skip": f32(1, 1, width_in, width)}),
        }

    def transformer_shapes(width: int) -> Shapes:
        return {
            "norm": norm_shapes(width),
            "enter": f32(width, width),
            "norm1": norm_shapes(width),
            "self": attention_shapes(width, width),
            "norm2": norm_shapes(width),
            "cross": attention_shapes(width, context),
            "norm3": norm_shapes(width),
            "gate": f32(width, 4 * width),
            "up": f32(width, 4 * width),
            "down": f32(4 * width, width),
            "leave": f32(width, width),
        }

    down: list[Shapes] = []
    skips: list[list[int]] = [[channels]]  # what each level of the way up may read
    width_in = channels
    for level, width in enumerate(widths):
        blocks: list[Shapes] = []
        for _ in range(layers_per_block):
            blocks.append({"residual": residual_shapes(width_in, width)})
            if level < levels - 1:
                blocks[-1]["transformer"] = transformer_shapes(width)
            width_in = width
            skips[-1].append(width)
        down.append({"blocks": blocks})
        if level < levels - 1:
            down[-1]["smaller"] = f32(3, 3, width, width)
            skips.append([width])
    middle = {
        "residual1": residual_shapes(width_in, width_in),
        "transformer": transformer_shapes(width_in),
        "residual2": residual_shapes(width_in, width_in),
    }
    up: list[Shapes] = []
    for level, width in enumerate(reversed(widths)):
        last = level == levels - 1
        readable = skips.pop()
        blocks = []
        for _ in range(layers_per_block + last):
            blocks.append({"residual": residual_shapes(width_in + readable.pop(), width)})
            if not last:
                blocks[-1]["transformer"] = transformer_shapes(width)
            width_in = width
        up.append({"blocks": blocks, **({} if last else {"larger": f32(3, 3, width, width)})})
    params = {
        "enter": f32(3, 3, 4, channels),
        "time": [f32(channels, time_width), f32(time_width, time_width)],
        "down": down,
        "middle": middle,
        "up": up,
        "norm": norm_shapes(width_in),
        "leave": f32(3, 3, width_in, 4),
    }

    def block(p: Any, x: Any, time: Any, text: Any) -> Any:
        x = residual(p["residual"], x, time)
        return transformer(p["transformer"], x, text, heads) if "transformer" in p else x

    def loss_fn(params: Any, batch: Any) -> Any:
        text = batch["text"]
        angles = batch["time"][:, None] * jnp.exp(-jnp.linspace(0.0, 9.0, channels // 2))
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        time = jax.nn.silu(time @ params["time"][0]) @ params["time"][1]
        x = conv(batch["noisy"], params["enter"])
        skips = [[x]]
        for i, p in enumerate(params["down"]):
            with jax.named_scope(f"down_{i}"):
                for q in p["blocks"]:
                    x = block(q, x, time, text)
                    skips[-1].append(x)
                if "smaller" in p:
                    x = conv(x, p["smaller"], 2)
                    skips.append([x])
        with jax.named_scope("middle"):
            p = params["middle"]
            x = residual(p["residual1"], x, time)
            x = transformer(p["transformer"], x, text, heads)
            x = residual(p["residual2"], x, time)
        for i, p in enumerate(params["up"]):
            with jax.named_scope(f"up_{i}"):
                readable = skips.pop()
                for q in p["blocks"]:
                    x = block(q, jnp.concatenate([x, readable.pop()], axis=-1), time, text)
                if "larger" in p:
                    x = conv(twice_as_large(x), p["larger"])
        x = conv(jax.nn.silu(group_norm(params["norm"], x)), params["leave"])
        return jnp.mean(jnp.square(x - batch["noise"]))

    picture = f32(batch, image, image, 4)
    positions = (image >> (levels - 1)) ** 2
    data = {"noisy": picture, "noise": picture, "time": f32(batch), "text": f32(batch, positions, context)}
    return train_step(loss_fn, params, data, optax.sgd(1e-2))


def vit(
    *,
    layers: int = 32,
    hidden: int = 1280,
    heads: int = 16,
    patch: int = 14,
    image: int = 224,
    classes: int = 1000,
    batch: int = 256,
    dtype: str = "bfloat16",
    remat: bool = True,
    optimizer: Any = None,
) -> Step:
    """A Vision Transformer with a class token, float32 parameters, AdamW unless it is another of optax's. Defaults:
    ViT-H/14."""
    params = {
        "enter": f32(patch, patch, 3, hidden),
        "enter_bias": f32(hidden),
        "class": f32(hidden),
        "position": f32((image // patch) ** 2 + 1, hidden),
        "blocks": [
            {
                "norm1": norm_shapes(hidden),
                "attention": attention_shapes(hidden, hidden),
                "norm2": norm_shapes(hidden),
                "up": f32(hidden, 4 * hidden),
                "up_bias": f32(4 * hidden),
                "down": f32(4 * hidden, hidden),
                "down_bias": f32(hidden),
            }
            for _ in range(layers)
        ],
        "norm": norm_shapes(hidden),
        "head": f32(hidden, classes),
        "bias": f32(classes),
    }

    def block(p: Any, x: Any) -> Any:
        h = layer_norm(p["norm1"], x)
        x = x + attention(p["attention"], h, h, heads, None)
        h = layer_norm(p["norm2"], x)
        h = jax.nn.gelu(h @ p["up"].astype(x.dtype) + p["up_bias"].astype(x.dtype))
        return x + h @ p["down"].astype(x.dtype) + p["down_bias"].astype(x.dtype)

    run = jax.checkpoint(block) if remat else block

    def loss_fn(params: Any, batch: Any) -> Any:
        x = conv(batch["images"].astype(dtype), params["enter"].astype(dtype), patch) + params["enter_bias"].astype(
            dtype
        )
        x = x.reshape(x.shape[0], -1, hidden)
        token = jnp.broadcast_to(params["class"].astype(dtype), (x.shape[0], 1, hidden))
        x = jnp.concatenate([token, x], axis=1) + params["position"].astype(dtype)
        for i, p in enumerate(params["blocks"]):
            with jax.named_scope(f"block_{i}"):
                x = run(p, x)
        x = layer_norm(params["norm"], x[:, 0]).astype(jnp.float32)
        return _cross_entropy(x @ params["head"] + params["bias"], batch["labels"])

    data = {"images": f32(batch, image, image, 3), "labels": jax.ShapeDtypeStruct((batch,), jnp.int32)}
    return train_step(loss_fn, params, data, optimizer or optax.adamw(1e-3, weight_decay=0.1))


def _residual(p: Any, x: Any, time: Any) -> Any:
    """[b, height, width, c] → [b, height, width, d], with time: [b, t] added in between."""
    h = conv(jax.nn.silu(group_norm(p["norm1"], x)), p["conv1"])
    h = h + (jax.nn.silu(time) @ p["time"])[:, None, None, :]
    h = conv(jax.nn.silu(group_norm(p["norm2"], h)), p["conv2"])
    return h + (conv(x, p["skip"]) if "skip" in p else x)


def _transformer(p: Any, x: Any, text: Any, heads: int) -> Any:
    """[b, height, width, d] → the same: attention among positions, then to ``text``: [b, t, c]; then a gated part."""
    shape = x.shape
    y = group_norm(p["norm"], x).reshape(shape[0], -1, shape[-1]) @ p["enter"]
    h = layer_norm(p["norm1"], y)
    y = y + attention(p["self"], h, h, heads, None)
    y = y + attention(p["cross"], layer_norm(p["norm2"], y), text, heads, None)
    h = layer_norm(p["norm3"], y)
    y = y + (jax.nn.gelu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    return x + (y @ p["leave"]).reshape(shape)


def _cross_entropy(logits: Any, labels: Any) -> Any:
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)
