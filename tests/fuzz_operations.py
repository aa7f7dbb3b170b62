"""What a fuzzed step does to its values: name → ``(x, y, ids, c)`` → one array.

``x`` and ``y`` are arrays of any dtype and shape, sizes 0 and 1 among them, ``ids`` integers, ``c`` a small integer
that chooses among variants. Floats stay of order 1. ``wide`` is the dtype that stands for another in the float64 twin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = Any
DTYPES = ("float32", "bfloat16", "float64", "int32", "int8", "bool", "complex64", "uint8", "float16")
_WIDE = {"float32": "float64", "bfloat16": "float64", "float16": "float64", "complex64": "complex128"}


def wide(dtype: str) -> str:
    return _WIDE.get(dtype, dtype)


def is_inexact(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def is_complex(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def is_bool(x: Array) -> bool:
    return x.dtype == jnp.bool_


def cast(x: Array, dtype: Any) -> Array:
    """Never what a dtype cannot hold: the result of that is undefined."""
    dtype = jnp.dtype(dtype)
    if x.dtype == dtype:
        return x
    if is_complex(x) and not jnp.issubdtype(dtype, jnp.complexfloating):
        x = x.real
    if dtype == jnp.bool_:
        return x > (0.1234 if is_inexact(x) else 0)
    if is_inexact(x) and not jnp.issubdtype(dtype, jnp.inexact):
        x = jnp.floor(jnp.abs(4 * jnp.tanh(x)) + 0.1234)
    return x.astype(dtype)


def in_shape(y: Array, shape: tuple[int, ...]) -> Array:
    """``y``, or a sum of it that broadcasts, in ``shape``."""
    if y.shape == shape:
        return y
    if y.size == np.prod(shape, dtype=int):
        return y.reshape(shape)
    try:
        if np.broadcast_shapes(y.shape, shape) == shape:
            return jnp.broadcast_to(y, shape)
    except ValueError:
        pass
    for axis in range(y.ndim):
        if shape and y.shape[axis] == shape[-1]:
            return jnp.broadcast_to(total(y, tuple(d for d in range(y.ndim) if d != axis)), shape)
    return jnp.broadcast_to(total(y, tuple(range(y.ndim))), shape)


def like(y: Array, x: Array) -> Array:
    """``y`` in shape and dtype of ``x``."""
    return cast(in_shape(y, x.shape), x.dtype)


def total(x: Array, axes: Any) -> Array:
    """The mean of floats, the sum of integers, whether any boolean holds; in the dtype of ``x``."""
    if is_bool(x):
        return x.any(axes)
    summed = x.sum(axes, dtype=x.dtype)
    if not is_inexact(x):
        return summed
    return summed / max(1, x.size // max(1, summed.size))


def at_least(x: Array, rank: int) -> Array:
    return x.reshape((1,) * (rank - x.ndim) + x.shape) if x.ndim < rank else x


def as_float(x: Array) -> Array:
    return x if is_inexact(x) else jnp.tanh(x.astype(jnp.result_type(float)))


def as_real(x: Array) -> Array:
    return x.real if is_complex(x) else x


def _axis(x: Array, c: int) -> int:
    return c % x.ndim


def _unary(x: Array, y: Array, ids: Array, c: int) -> Array:
    if is_bool(x):
        return ~x
    if not is_inexact(x):
        return (lambda x: x + 1, lambda x: -x, lambda x: x ^ 5, lambda x: 3 * x, lax.population_count)[c % 5](x)
    if is_complex(x):
        return (jnp.conj, lambda x: x / (1 + jnp.abs(x)), lambda x: jnp.exp(1j * x.real) * 0.5, jnp.negative)[c % 4](x)
    functions = (
        jnp.tanh,
        jnp.sin,
        lambda x: lax.rsqrt(1 + x * x),
        jax.nn.sigmoid,
        jax.nn.gelu,
        jax.nn.softplus,
        lambda x: 0.5 * x,
    )
    return functions[c % len(functions)](x)


def _binary(x: Array, y: Array, ids: Array, c: int) -> Array:
    y = in_shape(y, x.shape) if c // 4 % 2 else _broadcastable(y, x.shape)
    if is_bool(x) and is_bool(y):
        return (jnp.logical_and, jnp.logical_or, jnp.logical_xor, jnp.equal)[c % 4](x, y)
    if is_inexact(x) or is_inexact(y):
        maximum = (lambda x, y: x - y) if is_complex(x) or is_complex(y) else jnp.maximum
        return (lambda x, y: (x + y) * 0.5, lambda x, y: x - y, lambda x, y: x * y / (1 + jnp.abs(y)), maximum)[c % 4](
            x, y
        )
    return (jnp.add, jnp.multiply, jnp.minimum, lambda x, y: x // jnp.where(y == 0, 3, y))[c % 4](x, y)


def _broadcastable(y: Array, shape: tuple[int, ...]) -> Array:
    """``y`` in a shape of sizes 1 that broadcasts to ``shape``, where it can be made so by a sum."""
    for axis in range(y.ndim):
        if shape and y.shape[axis] == shape[0]:
            kept = total(y, tuple(d for d in range(y.ndim) if d != axis))
            return kept.reshape(-1, *(1,) * (len(shape) - 1))
    return in_shape(y, shape)


def _scalar(x: Array, y: Array, ids: Array, c: int) -> Array:
    """With a Python number: weak types."""
    if is_bool(x):
        return jnp.where(x, 1.5, 0.5)
    return (x * 2 + 1, 1 - x, jnp.full(x.shape, 0.25) + x, jnp.where(x == x, 2, 3) - x)[c % 4]


def _constant(x: Array, y: Array, ids: Array, c: int) -> Array:
    """Weakly typed, of no argument."""
    return (jnp.full(x.shape, 0.5), jnp.full(x.shape, 2), jnp.full((), 0.25), jnp.zeros(x.shape, x.dtype))[c % 4]


def _cast(x: Array, y: Array, ids: Array, c: int) -> Array:
    dtypes = ("float32", "bfloat16", "int32", "int8", "bool", "complex64", "uint8", "float16")
    return cast(x, _in_width(dtypes[c % len(dtypes)], x))


def _in_width(dtype: str, x: Array) -> str:
    """In the twin all floats are of 64 bits, and stay so."""
    return wide(dtype) if is_inexact(x) and jnp.finfo(x.dtype).bits == 64 else dtype


def _compare(x: Array, y: Array, ids: Array, c: int) -> Array:
    x, y = as_real(x), as_real(in_shape(y, x.shape))
    if is_inexact(x) or is_inexact(y):
        return x > y + 0.1234
    return (jnp.equal, jnp.less, jnp.greater_equal)[c % 3](x, y)


def _select(x: Array, y: Array, ids: Array, c: int) -> Array:
    return jnp.where(cast(in_shape(y, x.shape), "bool"), x, (total(x, None), jnp.zeros((), x.dtype), 1)[c % 3])


def _matmul(x: Array, y: Array, ids: Array, c: int) -> Array:
    dtype = jnp.promote_types(x.dtype, y.dtype)
    x, y = at_least(x, 2).astype(dtype), at_least(y, 2).astype(dtype)
    for dim in range(y.ndim):
        if y.shape[dim] == x.shape[-1]:
            out = jnp.tensordot(x, y, (x.ndim - 1, dim))
            return out / max(1, x.shape[-1]) if is_inexact(out) else out
    return _batch_matmul(x, y, ids, c)


def _batch_matmul(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = at_least(x, 2)
    out = jnp.einsum(
        ("...ij,...kj->...ik", "...ij,...ik->...jk", "ij...,ik...->jk")[c % 3 if x.ndim == 2 else c % 2], x, x
    )
    return out / max(1, x.shape[-1] + x.shape[-2]) if is_inexact(out) else out


def _reduce(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = at_least(x, 1)
    axis = _axis(x, c // 4)
    if x.shape[axis] == 0 or is_complex(x) or c % 4 == 0:
        return total(x, axis)
    if c % 4 == 3:
        return jnp.prod(jnp.tanh(x) if is_inexact(x) else x, axis)
    return (jnp.max, jnp.min)[c % 2](x, axis, keepdims=bool(c // 8 % 2))


def _argmax(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = at_least(as_real(x), 1)
    axis = _axis(x, c)
    if x.shape[axis] == 0:
        return jnp.zeros(x.shape[:axis] + x.shape[axis + 1 :], jnp.int32)
    return (jnp.argmax, jnp.argmin)[c // 3 % 2](x, axis)


def _sort(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = at_least(as_real(x), 1)
    if c % 3 == 0 and x.shape[-1] and not is_bool(x):
        return lax.top_k(x, -(-x.shape[-1] // 2))[0]
    return (jnp.argsort if c % 3 == 1 else jnp.sort)(x, _axis(x, c // 3))


def _cumulative(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = at_least(as_float(x), 1)
    axis = _axis(x, c // 3)
    if c % 3 == 0 or is_complex(x):
        return jnp.cumsum(x, axis) / max(1, x.shape[axis])
    return (lax.cummax if c % 3 == 1 else lax.cumlogsumexp)(x, axis, reverse=bool(c // 6 % 2))


def _softmax(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = at_least(as_real(as_float(x)), 1)
    axis = _axis(x, c)
    if x.shape[axis] == 0:
        return x
    return jax.nn.logsumexp(x, axis) if c // 3 % 2 else jax.nn.softmax(x, axis)


def _take(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = at_least(x, 1)
    axis = _axis(x, c)
    if x.shape[axis] == 0:
        return x
    return jnp.take(x, at_least(ids, 1 if c % 2 else 0) % x.shape[axis], axis=axis)


def _take_along(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = at_least(x, 2)
    if x.size == 0:
        return x
    index = (jnp.arange(x.shape[0], dtype=ids.dtype) * 3 + ids.sum()) % x.shape[-1]
    return jnp.take_along_axis(x, index.reshape((-1,) + (1,) * (x.ndim - 1)), axis=-1)


def _scatter(x: Array, y: Array, ids: Array, c: int) -> Array:
    x, ids = at_least(x, 1), at_least(ids, 1).reshape(-1)
    if x.shape[0] == 0 or ids.size == 0:
        return x
    update = like(y, jnp.zeros((ids.size, *x.shape[1:]), x.dtype))
    at = x.at[ids % x.shape[0]]
    if is_bool(x):
        return at.max(update)
    if is_inexact(x):
        update = update / ids.size
    if is_complex(x) or c % 3 == 0:
        return at.add(update)
    return at.max(update) if c % 3 == 1 else x.at[ids[:1] % x.shape[0]].set(update[:1])


def _dynamic_slice(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = at_least(x, 1)
    axis = _axis(x, c)
    start, size = ids.sum() % max(1, x.shape[axis]), -(-x.shape[axis] // 2)
    piece = lax.dynamic_slice_in_dim(x, start, size, axis)
    return lax.dynamic_update_slice_in_dim(x, like(y, piece), start, axis) if c // 3 % 2 else piece


def _concatenate(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = at_least(x, 1)
    return jnp.concatenate([x, like(y, x)] + [x] * (c % 2), axis=_axis(x, c // 2))


def _slice(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = at_least(x, 1)
    axis = _axis(x, c)
    size = x.shape[axis]
    choices = (
        slice(0, -(-size // 2)),
        slice(size // 2, None),
        slice(None, None, 2),
        slice(0, 0),
        slice(0, 1),
        slice(None, None, -1),
    )
    return x[(slice(None),) * axis + (choices[c // 3 % len(choices)],)]


def _reshape(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = at_least(x, 2)
    axis = c % (x.ndim - 1)
    if c // 4 % 2 or x.size == 0:
        return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    divisors = [d for d in (2, 4, 8, 3) if x.shape[axis] % d == 0 and d < x.shape[axis]]
    return x.reshape(*x.shape[:axis], divisors[0], -1, *x.shape[axis + 1 :]) if divisors else x.reshape(-1)


def _transpose(x: Array, y: Array, ids: Array, c: int) -> Array:
    return jnp.transpose(x, tuple(int(i) for i in np.roll(np.arange(x.ndim), c)))


def _expand(x: Array, y: Array, ids: Array, c: int) -> Array:
    axis = c % (x.ndim + 1)
    shape = (*x.shape[:axis], (1, 2, 8, 4)[c % 4], *x.shape[axis:])
    return jnp.broadcast_to(jnp.expand_dims(x, axis), shape)


def _pad(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = at_least(x, 1)
    config = [(0, 0, 0)] * x.ndim
    config[_axis(x, c)] = (
        ((1, 2, 0), (0, 3, 0), (0, 0, 1), (2, -1, 0))[c // 3 % 4] if x.shape[_axis(x, c)] else (1, 1, 0)
    )
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def _one_hot(x: Array, y: Array, ids: Array, c: int) -> Array:
    hot = jax.nn.one_hot(ids % 8, (8, 5, 1)[c % 3], dtype=x.dtype if is_inexact(x) else "int32")
    return hot * total(x, None)


def _iota(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = at_least(as_float(x), 1)
    return x + jnp.cos(lax.broadcasted_iota(jnp.finfo(x.dtype).dtype, x.shape, _axis(x, c))).astype(x.dtype)


def _random(x: Array, y: Array, ids: Array, c: int) -> Array:
    key = jax.random.fold_in(jax.random.key(c), ids.sum())
    match c % 4:
        case 0:
            return jax.random.bits(key, x.shape, "uint8")
        case 1:
            return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x, jnp.zeros((), x.dtype))
        case 2:
            return jax.random.randint(key, x.shape, 0, 9, "int32")
        case _:
            return jax.vmap(lambda key: jax.random.bits(key, (), "uint8"))(jax.random.split(key, 8))


def _norm(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = at_least(as_float(x), 1)
    axis = _axis(x, c)
    centred = x - jnp.expand_dims(total(x, axis), axis)
    return centred * lax.rsqrt(jnp.expand_dims(total(jnp.square(jnp.abs(centred)), axis), axis) + 0.5).astype(x.dtype)


def _complex(x: Array, y: Array, ids: Array, c: int) -> Array:
    if is_complex(x):
        return (jnp.real, jnp.imag, lambda x: jnp.abs(x + 3))[c % 3](x)
    x = as_float(x)
    x = x if x.dtype in (jnp.float32, jnp.float64) else x.astype(_in_width("float32", x))
    return lax.complex(x, cast(in_shape(as_real(y), x.shape), x.dtype))


OPERATIONS: dict[str, Callable[[Array, Array, Array, int], Array]] = {
    "unary": _unary,
    "binary": _binary,
    "scalar": _scalar,
    "constant": _constant,
    "cast": _cast,
    "compare": _compare,
    "select": _select,
    "matmul": _matmul,
    "batch_matmul": _batch_matmul,
    "reduce": _reduce,
    "argmax": _argmax,
    "sort": _sort,
    "cumulative": _cumulative,
    "softmax": _softmax,
    "take": _take,
    "take_along": _take_along,
    "scatter": _scatter,
    "dynamic_slice": _dynamic_slice,
    "concatenate": _concatenate,
    "slice": _slice,
    "reshape": _reshape,
    "transpose": _transpose,
    "expand": _expand,
    "pad": _pad,
    "one_hot": _one_hot,
    "iota": _iota,
    "random": _random,
    "norm": _norm,
    "complex": _complex,
}
