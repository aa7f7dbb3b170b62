"""Attention as people call it, kernels in their interpreter: ``ATTENTION`` gives q, k and v (batch, heads, rows, size)
to each. Grouped queries have fewer heads of k and v."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas.ops.tpu.flash_attention as flash_module
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # from jax 0.12 on
    from jax.experimental.pallas.ops.gpu.attention import mha

Array = Any


def flash(q: Array, k: Array, v: Array) -> Array:
    """The TPU's flash attention, causal. It has no option to be interpreted: see `interpreted_flash`."""
    return flash_module.flash_attention(q, *repeated(q, k, v), causal=True, sm_scale=q.shape[-1] ** -0.5)


def interpreted_flash(patch: pytest.MonkeyPatch) -> None:
    """Has `flash` run in the interpreter."""
    names = {name: getattr(pl, name) for name in dir(pl)}
    patch.setattr(
        flash_module, "pl", SimpleNamespace(**{**names, "pallas_call": partial(pl.pallas_call, interpret=True)})
    )


def splash(q: Array, k: Array, v: Array, *, interpret: bool = True) -> Array:
    """The TPU's splash attention, causal, a vmap over the batch."""
    heads, rows = q.shape[1:3]
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((rows, rows))] * heads)
    with jax.ensure_compile_time_eval():
        kernel = splash_attention_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1, interpret=interpret)
    return jax.vmap(kernel)(q * q.shape[-1] ** -0.5, k, v)


def gpu(q: Array, k: Array, v: Array, *, interpret: bool = True) -> Array:
    """Pallas' own attention for GPUs, causal; heads of k and v repeated."""
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, *repeated(q, k, v)))
    scale = q.shape[-1] ** -0.5
    return jnp.swapaxes(mha(q, k, v, segment_ids=None, causal=True, sm_scale=scale, interpret=interpret), 1, 2)


def xla(q: Array, k: Array, v: Array, implementation: str = "xla") -> Array:
    """`jax.nn.dot_product_attention`, causal."""
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    return jnp.swapaxes(jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation), 1, 2)


def repeated(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """k and v with a head for each of q's."""
    return tuple(jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))


ATTENTION: dict[str, Callable[..., Array]] = {"flash": flash, "splash": splash, "gpu": gpu, "xla": xla}
