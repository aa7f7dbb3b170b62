"""Local lowerings of the random primitives: each device draws exactly its part of the unsharded bits.

Threefry's bits are a hash of (key, 64-bit flat position), so a shard hashes its own global positions:
bit-equal to the unsharded draw at a shard's cost. Positions are kept as two uint32 words, for
64-bit integers may be switched off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.jax_compat import bind, threefry2x32_p, threefry_is_partitionable
from autopar.runtime.one_program.local.context import LocalContext, LocalRule

_U16 = np.uint32(0xFFFF)


def _random_bits(ctx: LocalContext, eqn: Any, keys: Any) -> list[Any]:
    dims = ctx.result_specs[0].dims
    if not any(dims):
        return bind(eqn, keys)
    local_shape = ctx.result_shape(0)
    offsets = [ctx.offset(axes, n) for axes, n in zip(dims, local_shape, strict=True)]
    if not threefry_is_partitionable():
        return [_block(bind(eqn, keys)[0], offsets, local_shape)]
    shape, rank = eqn.params["shape"], keys.ndim
    words = _local_key_data(keys, offsets[:rank], local_shape[:rank])
    hi, lo = flat_positions(shape, local_shape[rank:], offsets[rank:])
    extra = (1,) * (len(local_shape) - rank)
    first, second = (words[..., i].reshape(*local_shape[:rank], *extra) for i in (0, 1))
    first, second, hi, lo = (jnp.broadcast_to(x, local_shape) for x in (first, second, hi, lo))
    bits_hi, bits_lo = threefry2x32_p.bind(first, second, hi, lo)
    width = eqn.params["bit_width"]
    if width == 64:
        return [(bits_hi.astype(jnp.uint64) << np.uint64(32)) | bits_lo.astype(jnp.uint64)]
    return [(bits_hi ^ bits_lo).astype(f"uint{width}")]


def _block(x: Any, offsets: Sequence[Any], shape: Sequence[int]) -> Any:
    """The block of ``x`` of ``shape`` at ``offsets``."""
    return lax.dynamic_slice(x, [jnp.asarray(o, jnp.int32) for o in offsets], shape)


def _local_key_data(keys: Any, offsets: Sequence[Any], local_shape: Sequence[int]) -> Any:
    """uint32 words of this shard's keys."""
    data = jax.random.key_data(keys)
    rest = data.shape[len(local_shape) :]
    return _block(data, [*offsets, *(0 for _ in rest)], (*local_shape, *rest))


def flat_positions(shape: Sequence[int], local_shape: Sequence[int], offsets: Sequence[Any]) -> tuple[Any, Any]:
    """High and low words of the flat positions, in an array of ``shape``, of the block of ``local_shape`` at
    ``offsets``: uint32[local_shape] each. ``offsets``: an integer or integer scalar per dimension."""
    lo, hi = jnp.zeros(local_shape, jnp.uint32), jnp.zeros(local_shape, jnp.uint32)
    wide = math.prod(shape) > 2**32
    for d, offset in enumerate(offsets):
        stride = math.prod(shape[d + 1 :])
        index = lax.broadcasted_iota(jnp.uint32, local_shape, d) + jnp.asarray(offset, jnp.uint32)
        part = index * np.uint32(stride & 0xFFFFFFFF)
        total = lo + part
        if wide:
            carry = (total < lo).astype(jnp.uint32)
            hi = hi + _high_word(index, stride & 0xFFFFFFFF) + index * np.uint32((stride >> 32) & 0xFFFFFFFF) + carry
        lo = total
    return hi, lo


def _high_word(x: Any, y: int) -> Any:
    """Upper 32 bits of the 64-bit product of a uint32 array and a number below 2**32."""
    x_hi, x_lo = x >> np.uint32(16), x & _U16
    y_hi, y_lo = np.uint32(y >> 16), np.uint32(y & 0xFFFF)
    low, cross1, cross2 = x_lo * y_lo, x_hi * y_lo, x_lo * y_hi
    middle = (low >> np.uint32(16)) + (cross1 & _U16) + (cross2 & _U16)
    return x_hi * y_hi + (cross1 >> np.uint32(16)) + (cross2 >> np.uint32(16)) + (middle >> np.uint32(16))


def _random_gamma(ctx: LocalContext, eqn: Any, keys: Any, alpha: Any) -> list[Any]:
    dims = ctx.result_specs[0].dims[: keys.ndim]
    if not any(dims):
        return bind(eqn, keys, alpha)
    local_shape = ctx.result_shape(0)[: keys.ndim]
    offsets = [ctx.offset(axes, n) for axes, n in zip(dims, local_shape, strict=True)]
    words = _local_key_data(keys, offsets, local_shape)
    return bind(eqn, jax.random.wrap_key_data(words, impl=jax.random.key_impl(keys)), alpha)


LOCAL: dict[str, LocalRule] = {
    "random_bits": _random_bits,
    "random_gamma": _random_gamma,
}
