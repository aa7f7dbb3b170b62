"""What the benchmarks' models are built of: layers in plain JAX, their parameters' shapes, and a train step.

A layer is a function of a dictionary of parameters and of activations; a function ``…_shapes`` gives such a dictionary
as float32 ShapeDtypeStructs. Products are in the dtype of the activations: parameters are cast where they are used.

Letters in einsums: b batch, s and t positions, d hidden, h heads, k head size.
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
"""A train step, and its arguments as ShapeDtypeStructs."""

NORM_EPSILON = 1e-5
NORM_GROUPS = 32


def train_step(loss_fn: Callable[..., Any], params: Shapes, data: Shapes, optimizer: Any) -> Step:
    """``((params, moments), batch) -> ((params, moments), loss)`` of a ``loss_fn(params, batch)``; its arguments."""

    def train_step(state: tuple[Any, Any], batch: Any) -> tuple[tuple[Any, Any], Any]:
        params, opt_state = state
        loss, grads = autopar.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return train_step, ((params, jax.eval_shape(optimizer.init, params)), data)


def f32(*shape: int) -> Shapes:
    """A float32 parameter or input of this shape."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def norm_shapes(width: int) -> Shapes:
    return {"scale": f32(width), "bias": f32(width)}


def attention_shapes(width: int, context: int) -> Shapes:
    """Of `attention` over ``width`` with keys and values from something ``context`` wide."""
    square, from_context = f32(width, width), f32(context, width)
    return {"q": square, "k": from_context, "v": from_context, "out": square}


def layer_norm(p: Any, x: Any) -> Any:
    """Over the last dimension, in float32; the result has x's dtype."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return (centred * lax.rsqrt(variance + NORM_EPSILON) * p["scale"] + p["bias"]).astype(x.dtype)


def group_norm(p: Any, x: Any) -> Any:
    """[b, height, width, c] over positions and each of `NORM_GROUPS` groups of channels of an example."""
    parts = x.reshape(*x.shape[:-1], NORM_GROUPS, -1)
    centred = parts - parts.mean((1, 2, 4), keepdims=True)
    variance = jnp.square(centred).mean((1, 2, 4), keepdims=True)
    return (centred * lax.rsqrt(variance + NORM_EPSILON)).reshape(x.shape) * p["scale"] + p["bias"]


def attention(p: Any, x: Any, context: Any, heads: int, mask: Any) -> Any:
    """[b, s, d] attending to [b, t, …] → [b, s, d]; ``mask`` bool[s, t] or None."""

    def project(y: Any, w: Any) -> Any:
        return (y @ w.astype(y.dtype)).reshape(*y.shape[:2], heads, -1)

    q, k, v = project(x, p["q"]), project(context, p["k"]), project(context, p["v"])
    scores = jnp.einsum("bshk,bthk->bhst", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    out = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores).astype(x.dtype), v)
    return out.reshape(x.shape) @ p["out"].astype(x.dtype)


def channel_norm(x: Any, scale: Any) -> Any:
    """Over the last dimension; couples no examples, as batch normalisation would."""
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + NORM_EPSILON) * scale


def conv(x: Any, w: Any, stride: int = 1) -> Any:
    """[b, height, width, c] and [kernel height, kernel width, c, d] → [b, height / stride, width / stride, d]."""
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def twice_as_large(x: Any) -> Any:
    """Each position of [b, height, width, d] four times."""
    b, height, width, d = x.shape
    x = jnp.broadcast_to(x[:, :, None, :, None, :], (b, height, 2, width, 2, d))
    return x.reshape(b, 2 * height, 2 * width, d)


def bottleneck(p: Any, x: Any, stride: int) -> Any:
    """A residual block of three convolutions, the second with ``stride``: float32[b, height, width, channels]."""
    y = jax.nn.relu(channel_norm(conv(x, p["in"]), p["scale_in"]))
    y = jax.nn.relu(channel_norm(conv(y, p["mid"], stride), p["scale_mid"]))
    y = channel_norm(conv(y, p["out"]), p["scale_out"])
    return jax.nn.relu(y + (conv(x, p["skip"], stride) if "skip" in p else x))
