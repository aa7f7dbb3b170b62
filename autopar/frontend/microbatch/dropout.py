"""Random bits of a microbatch's rows, bit for bit those that the full batch would draw.

Partitionable threefry (jax's default) makes element i of an array from the key and i alone
(`jax._src.random.threefry2x32`: the two words of the counter are i's high and low 32 bits; the two words of
the result are xored, or joined for 64 bits). So a microbatch draws its strided slice at its own cost. Other
generators draw the whole batch once, before the loop (`analyse`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.jax_compat import threefry2x32_p
from autopar.primitives.kinds import Rows

WORDS = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}


def sliced_bits(keys: Any, bit_width: int, shape: tuple[int, ...], rows: Rows, index: Any, n: int) -> Any:
    """``random_bits(keys, shape)`` restricted to microbatch ``index`` of ``n``.

    Args:
        keys: key array of any shape; ``shape`` is drawn for each.
        shape: the full batch's shape, below 2**32 elements, with the batch in dimension ``rows.dim - keys.ndim``.
        index: int32 scalar.

    Returns:
        unsigned integers of shape ``keys.shape`` + the microbatch's shape.
    """
    data = jax.random.key_data(keys)
    dim = rows.dim - (data.ndim - 1)
    position = _positions(shape, dim, rows, index, n)
    first, second = (data[..., w].reshape(data.shape[:-1] + (1,) * len(shape)) for w in (0, 1))
    out_shape = data.shape[:-1] + position.shape
    first, second, low = (jnp.broadcast_to(x, out_shape) for x in (first, second, position))
    a, b = threefry2x32_p.bind(first, second, jnp.zeros(out_shape, jnp.uint32), low)
    word = WORDS[bit_width]
    if bit_width == 64:
        return lax.shift_left(a.astype(word), jnp.asarray(32, word)) | b.astype(word)
    return (a ^ b).astype(word)


def _positions(shape: tuple[int, ...], dim: int, rows: Rows, index: Any, n: int) -> Any:
    """uint32: each element's flat position in ``shape``."""
    m = shape[dim] // (rows.pre * rows.post)
    b = m // n
    small = tuple(rows.pre * b * rows.post if d == dim else size for d, size in enumerate(shape))
    flat = jnp.zeros((), jnp.uint32)
    stride = 1
    for d in reversed(range(len(shape))):
        at = lax.iota(jnp.uint32, small[d])
        if d == dim:
            at = _full_position(at, rows, b, m, index.astype(jnp.uint32), n)
        at = at * jnp.uint32(stride)
        flat = flat + at.reshape([-1] + [1] * (len(shape) - d - 1))
        stride *= shape[d]
    return flat


def _full_position(at: Any, rows: Rows, b: int, m: int, index: Any, n: int) -> Any:
    """Where entry ``at`` of the microbatch's dimension (pre·b·post) lies in the full one (pre·m·post)."""
    if rows.pre == rows.post == 1:
        return at * jnp.uint32(n) + index
    post, block = jnp.uint32(rows.post), lax.div(at, jnp.uint32(rows.post))
    example = lax.rem(block, jnp.uint32(b)) * jnp.uint32(n) + index
    return (lax.div(block, jnp.uint32(b)) * jnp.uint32(m) + example) * post + lax.rem(at, post)
