"""Arrays as their bytes and back, on the device that they are on: what the transfer library carries is uint8.

What comes back is the same bit for bit, NaNs and signs of zeros too: only integers are rearranged. Complex numbers are
their real and imaginary parts in turn, numbers of less than a byte take one each, keys are their data: the bytes are
those that NumPy has of the same array.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.ir.graph import itemsize_bits

_NARROW = {2: jnp.uint2, 4: jnp.uint4}
"""Bits of numbers of less than a byte → the integers of so many."""


@jax.jit
def bytes_of(x: jax.Array) -> jax.Array:
    """(bytes,), uint8, in memory of its own."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts = [lax.bitcast_convert_type(part(x), jnp.uint8) for part in (lax.real, lax.imag)]
        return jnp.stack(parts, -2).reshape(-1)
    bits = itemsize_bits(str(x.dtype))
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    elif bits in _NARROW:
        x = lax.bitcast_convert_type(x, _NARROW[bits]).astype(jnp.uint8)
    else:
        x = lax.bitcast_convert_type(x, jnp.uint8)
    return jnp.copy(x.reshape(-1))


def _value(x: jax.Array, shape: tuple[int, ...], dtype: str, implementation: str | None) -> jax.Array:
    of = jnp.dtype(dtype)
    if of == jnp.bool_:
        return x.reshape(shape).astype(of)
    if jnp.issubdtype(of, jnp.complexfloating):
        half = jnp.finfo(of).dtype
        parts = lax.bitcast_convert_type(x.reshape(*shape, 2, half.itemsize), half)
        return lax.complex(parts[..., 0], parts[..., 1])
    bits = itemsize_bits(dtype)
    if bits in _NARROW:
        return lax.bitcast_convert_type(x.reshape(shape).astype(_NARROW[bits]), of)
    wide = () if of.itemsize == 1 else (of.itemsize,)
    x = lax.bitcast_convert_type(x.reshape(*shape, *wide), of)
    return x if implementation is None else jax.random.wrap_key_data(x, impl=implementation)


value_of: Any = jax.jit(_value, static_argnums=(1, 2, 3))
"""(bytes, shape, dtype, implementation of keys): what `bytes_of` made the bytes of."""
