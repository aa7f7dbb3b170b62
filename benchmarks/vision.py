"""A U-Transformer and a Wide-ResNet, unrolled, with rematerialisation of every block or of none.

As in Alpa's suites in kind (residual bottlenecks four times as wide as usual; a U-Net with attention at its lower
levels), normalised over channels instead of batches, so that a step has no state but parameters. float32, Adam.
Arguments are ShapeDtypeStructs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import autopar
from benchmarks.layers import Step, bottleneck, channel_norm, conv

Shapes = dict[str, tuple[int, ...]]


def _train_step(loss: Callable[..., Any], params: Any, batch: Any) -> Step:
    optimizer = optax.adam(1e-3)

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        value, grads = autopar.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(grads, moments)
        return (optax.apply_updates(params, updates), moments), value

    shaped = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), params, is_leaf=lambda s: isinstance(s, tuple)
    )
    return step, ((shaped, jax.eval_shape(optimizer.init, shaped)), batch)


def wide_resnet(
    *, blocks: Sequence[int] = (3, 4, 6, 3), channels: int = 160, width: int = 2, size: int = 224, batch: int = 64,
    classes: int = 1024, remat: bool = False,
) -> Step:  # fmt: skip
    """Bottleneck blocks in four stages: input float32[batch, size, size, 3]."""
    run = jax.checkpoint(bottleneck, static_argnums=2) if remat else bottleneck
    params: dict[str, Any] = {"enter": (7, 7, 3, channels)}
    strides: list[int] = []
    have = channels
    for stage, count in enumerate(blocks):
        inner, outer = channels * width * 2**stage // 2, channels * 2**stage
        for b in range(count):
            block: Shapes = {
                "in": (1, 1, have, inner), "mid": (3, 3, inner, inner), "out": (1, 1, inner, outer),
                "scale_in": (inner,), "scale_mid": (inner,), "scale_out": (outer,),
            }  # fmt: skip
            strides.append(2 if stage and not b else 1)
            if have != outer or strides[-1] > 1:
                block["skip"] = (1, 1, have, outer)
            params[f"block{len(strides) - 1}"] = block
            have = outer
    params["head"] = (have, classes)

    def loss(params: Any, batch: Any) -> Any:
        images, labels = batch
        x = conv(_conv_in(images), params["enter"], 2)
        for i, stride in enumerate(strides):
            x = run(params[f"block{i}"], x, stride)
        logits = jax.nn.log_softmax(x.mean((1, 2)) @ params["head"])
        return -jnp.take_along_axis(logits, labels[:, None], 1).mean()

    images = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
    return _train_step(loss, params, (images, jax.ShapeDtypeStruct((batch,), jnp.int32)))


def _conv_in(images: Any) -> Any:
    return images / 255.0


def _mixer(params: Any, x: Any, heads: int) -> Any:
    """A residual block and, where the level has one, attention over positions."""
    y = conv(jax.nn.silu(channel_norm(x, params["scale1"])), params["conv1"])
    x = x + conv(jax.nn.silu(channel_norm(y, params["scale2"])), params["conv2"])
    if "qkv" not in params:
        return x
    b, h, w, c = x.shape
    q, k, v = jnp.split(channel_norm(x, params["scale3"]).reshape(b, h * w, c) @ params["qkv"], 3, -1)
    q, k, v = (t.reshape(b, h * w, heads, c // heads) for t in (q, k, v))
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * (c // heads) ** -0.5)
    return x + (jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(b, h * w, c) @ params["proj"]).reshape(x.shape)


def u_transformer(
    *, channels: int = 128, levels: int = 3, blocks: int = 2, heads: int = 4, size: int = 64, batch: int = 64,
    remat: bool = False,
) -> Step:  # fmt: skip
    """Down by strides, up by repetition, with skips added; attention from the second level on. Predicts the noise."""
    run = jax.checkpoint(_mixer, static_argnums=2) if remat else _mixer
    params: dict[str, Any] = {"enter": (3, 3, 3, channels), "leave": (3, 3, channels, 3)}
    for level in range(levels):
        c = channels * 2**level
        for b in range(blocks):
            for side in ("down", "up"):
                block: Shapes = {
                    "scale1": (c,), "scale2": (c,), "conv1": (3, 3, c, c), "conv2": (3, 3, c, c)
                }  # fmt: skip
                if level:
                    block |= {"scale3": (c,), "qkv": (c, 3 * c), "proj": (c, c)}
                params[f"{side}{level}.{b}"] = block
        if level + 1 < levels:
            params[f"wider{level}"], params[f"narrower{level}"] = (3, 3, c, 2 * c), (1, 1, 2 * c, c)

    def loss(params: Any, batch: Any) -> Any:
        noisy, noise = batch
        x = conv(noisy, params["enter"])
        skips: list[Any] = []
        for level in range(levels):
            for b in range(blocks):
                x = run(params[f"down{level}.{b}"], x, heads)
            skips.append(x)
            if level + 1 < levels:
                x = conv(x, params[f"wider{level}"], 2)
        for level in reversed(range(levels)):
            if level + 1 < levels:
                x = conv(x, params[f"narrower{level}"])
                x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2) + skips[level]
            for b in range(blocks):
                x = run(params[f"up{level}.{b}"], x, heads)
        return jnp.mean((conv(x, params["leave"]) - noise) ** 2)

    image = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
    return _train_step(loss, params, (image, image))
