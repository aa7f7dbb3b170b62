"""Random programs: a list of small integers → a JAX function of two float arrays and an integer array.

A program is a sequence of instructions ``(operation, a, b, c)``. Each takes earlier values, chosen by ``a`` and ``b``
counting back from the newest, and appends one; integers beyond what a shape allows wrap around, so every list is
a program and lists shrink well. Operations keep values of order 1, and never decide on values that
differ by rounding only (no comparison of a float with a constant that it equals).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MAX_SIZE = 4096
Array = Any
Instruction = tuple[str, int, int, int]


@dataclass(frozen=True, kw_only=True)
class Program:
    """``shapes`` of the two float arguments, ``rows`` the length of the integer one (values below 64);
    ``gradient``: returns the gradient of the outputs' sum too."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    rows: int
    instructions: tuple[Instruction, ...]
    gradient: bool

    def __call__(self, x: Array, y: Array, ids: Array) -> Any:
        """A list of outputs, and with ``gradient`` those of ``x`` and ``y``."""
        if not self.gradient:
            return self.outputs(x, y, ids)

        def total(x: Array, y: Array) -> tuple[Array, list[Array]]:
            outs = self.outputs(x, y, ids)
            return sum(jnp.sum(jnp.sin(o)) for o in outs), outs

        (_, outs), grads = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(x, y)
        return outs, grads

    def outputs(self, x: Array, y: Array, ids: Array) -> list[Array]:
        """The last three values."""
        values = [x, y]
        for name, a, b, c in self.instructions:
            first, second = values[-1 - a % len(values)], values[-1 - b % len(values)]
            out = OPERATIONS[name](first, second, ids, c)
            values.append(out if out.size <= MAX_SIZE else out.mean(0))
        return values[-3:]

    def arguments(self, seed: int, dtype: str) -> tuple[Array, Array, Array]:
        """Normal floats and integers in [0, 64)."""
        rng = np.random.default_rng(seed)
        x, y = (rng.standard_normal(s).astype(dtype) for s in self.shapes)
        return x, y, rng.integers(0, 64, (self.rows,), dtype=np.int32)


def _constant(shape: tuple[int, ...], like: Array) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(like.dtype)


def _dim(x: Array, c: int) -> int:
    return c % x.ndim


def _at_least(x: Array, rank: int) -> Array:
    return x.reshape((1,) * (rank - x.ndim) + x.shape) if x.ndim < rank else x


def _match(x: Array, y: Array) -> Array:
    """``y`` in a shape that broadcasts against ``x``."""
    try:
        if np.broadcast_shapes(x.shape, y.shape) == x.shape:
            return y
    except ValueError:
        pass
    for axis in range(y.ndim):
        if x.ndim and y.shape[axis] == x.shape[-1]:
            return y.mean(tuple(d for d in range(y.ndim) if d != axis))
    return y.mean()


def _unary(x: Array, y: Array, ids: Array, c: int) -> Array:
    functions = (jnp.tanh, jnp.sin, lambda x: -x, lambda x: lax.rsqrt(1 + x * x), jax.nn.sigmoid, jax.nn.gelu)
    return functions[c % len(functions)](x)


def _binary(x: Array, y: Array, ids: Array, c: int) -> Array:
    functions = (lambda x, y: (x + y) / 2, lambda x, y: x - y, lambda x, y: jnp.tanh(x * y), jnp.maximum)
    return functions[c % len(functions)](x, _match(x, y))


def _select(x: Array, y: Array, ids: Array, c: int) -> Array:
    return jnp.where(x > 0.1234, x, 0.5 * _match(x, y))


def _dot(x: Array, y: Array, ids: Array, c: int) -> Array:
    x, y = _at_least(x, 2), _at_least(y, 2)
    for dim in range(y.ndim):
        if y.shape[dim] == x.shape[-1]:
            return jnp.tensordot(x, y, (x.ndim - 1, dim)) / x.shape[-1]
    return x @ _constant((x.shape[-1], (3, 8, 16)[c % 3]), x) / x.shape[-1]


def _batch_dot(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = _at_least(x, 3)
    if c % 2:
        return jnp.einsum("...ij,...kj->...ik", x, x) / x.shape[-1]
    return jnp.einsum("...ij,...ik->...jk", x, jnp.tanh(x)) / x.shape[-2]


def _reduce(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = _at_least(x, 1)
    functions = (jnp.mean, jnp.max, jnp.min, lambda x, a, keepdims: jnp.sum(x, a, keepdims=keepdims) / x.shape[a])
    return functions[c % 4](x, _dim(x, c // 4), keepdims=bool(c // 12 % 2))


def _argmax(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = _at_least(x, 1)
    axis = _dim(x, c)
    shape = [x.shape[d] if d == axis else 1 for d in range(x.ndim)]
    distinct = x + 0.37 * jnp.arange(x.shape[axis], dtype=x.dtype).reshape(shape)
    return jnp.argmax(distinct, axis).astype(x.dtype) / 8


def _reshape(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = _at_least(x, 2)
    axis = c % (x.ndim - 1)
    if c // 4 % 2:
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    size = x.shape[axis]
    divisors = [d for d in (2, 4, 8, 3) if size % d == 0 and d < size]
    return x.reshape(*x.shape[:axis], divisors[0], -1, *x.shape[axis + 1 :]) if divisors else x.reshape(-1)


def _transpose(x: Array, y: Array, ids: Array, c: int) -> Array:
    order = np.roll(np.arange(x.ndim), c)
    return jnp.transpose(x, tuple(int(i) for i in order))


def _broadcast(x: Array, y: Array, ids: Array, c: int) -> Array:
    axis = c % (x.ndim + 1)
    shape = (*x.shape[:axis], (2, 4, 8)[c % 3], *x.shape[axis:])
    return jnp.broadcast_to(jnp.expand_dims(x, axis), shape)


def _take(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = _at_least(x, 1)
    axis = _dim(x, c)
    return jnp.take(x, ids % x.shape[axis], axis=axis)


def _take_along(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = _at_least(x, 2)
    index = (jnp.arange(x.shape[0], dtype=jnp.int32) * 3 + ids[0]) % x.shape[-1]
    return jnp.take_along_axis(x, index.reshape((-1,) + (1,) * (x.ndim - 1)), axis=-1)


def _scatter(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = _at_least(x, 1)
    index = ids % x.shape[0]
    update = jnp.broadcast_to(x.mean(0), (ids.shape[0], *x.shape[1:]))
    return x.at[index].add(update / ids.shape[0]) if c % 2 else x.at[index].max(update)


def _concatenate(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = _at_least(x, 1)
    other = jnp.broadcast_to(_match(x, y), x.shape)
    return jnp.concatenate([x, other] + [jnp.sin(x)] * (c % 2), axis=_dim(x, c // 2))


def _slice(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = _at_least(x, 1)
    axis = _dim(x, c)
    size = x.shape[axis]
    choices = (slice(0, -(-size // 2)), slice(size // 2, None), slice(None, None, 2), slice(1 if size > 1 else 0, None))
    return x[(slice(None),) * axis + (choices[c // 3 % 4],)]


def _dynamic_slice(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = _at_least(x, 1)
    axis = _dim(x, c)
    start, size = ids[0] % x.shape[axis], -(-x.shape[axis] // 2)
    piece = lax.dynamic_slice_in_dim(x, start, size, axis)
    return lax.dynamic_update_slice_in_dim(x, jnp.sin(piece), start, axis) if c // 3 % 2 else piece


def _pad(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = _at_least(x, 1)
    config = [(0, 0, 0)] * x.ndim
    config[_dim(x, c)] = ((1, 2, 0), (0, 3, 0), (0, 0, 1), (-1, 1, 0) if x.shape[_dim(x, c)] > 1 else (1, 0, 0))[
        c // 3 % 4
    ]
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def _rev(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = _at_least(x, 1)
    return jnp.flip(x, _dim(x, c)) if c // 3 % 2 else jnp.roll(x, 1 + c % 2, _dim(x, c))


def _cumulative(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = _at_least(x, 1)
    axis = _dim(x, c)
    if c // 3 % 3 == 0:
        return jnp.cumsum(x, axis) / x.shape[axis]
    return lax.cummax(x, axis) if c // 3 % 3 == 1 else lax.cumlogsumexp(x, axis, reverse=True)


def _sort(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = _at_least(x, 1)
    if c % 3 == 0:
        return lax.top_k(x, -(-x.shape[-1] // 2))[0]
    return jnp.sort(x, _dim(x, c // 3))


def _softmax(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = _at_least(x, 1)
    axis = _dim(x, c)
    return jax.nn.logsumexp(x, axis) if c // 3 % 2 else jax.nn.softmax(x, axis)


def _one_hot(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = _at_least(x, 1)
    return jax.nn.one_hot(ids % 8, 8, dtype=x.dtype) * x.mean()


def _iota(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = _at_least(x, 1)
    axis = _dim(x, c)
    return x + jnp.cos(lax.broadcasted_iota(x.dtype, x.shape, axis))


def _image(x: Array) -> Array:
    x = _at_least(x, 2)
    return x.reshape(-1, x.shape[-2], x.shape[-1], 1)


def _conv(x: Array, y: Array, ids: Array, c: int) -> Array:
    image = _image(x)
    stride, dilation = ((1, 1), (2, 1), (1, 2), (1, 1))[c % 4]
    kernel = _constant((3, 3, 1, (4, 8)[c // 4 % 2]), x) / 3
    numbers = ("NHWC", "HWIO", "NHWC")
    out = lax.conv_general_dilated(
        image, kernel, (stride, stride), "SAME", rhs_dilation=(dilation, dilation), dimension_numbers=numbers
    )
    if c // 8 % 2:
        out = lax.conv_general_dilated(
            out, _constant((3, 3, 1, out.shape[-1]), x) / 3, (1, 1), "SAME", dimension_numbers=numbers,
            feature_group_count=out.shape[-1],
        )  # fmt: skip
    return out


def _pool(x: Array, y: Array, ids: Array, c: int) -> Array:
    window = (1, 2, 2, 1) if c % 2 else (1, 3, 1, 1)
    strides = (1, 2, 2, 1) if c // 2 % 2 else (1, 1, 1, 1)
    if c // 4 % 2:
        return lax.reduce_window(_image(x), 0.0, lax.add, window, strides, "SAME") / 4
    return lax.reduce_window(_image(x), -jnp.inf, lax.max, window, strides, "SAME")


def _scan(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = _at_least(x, 2)
    weight = _constant((x.shape[-1], x.shape[-1]), x) / x.shape[-1]

    def body(carry: Array, row: Array) -> tuple[Array, Array]:
        carry = jnp.tanh(carry @ weight + row) if c % 2 else 0.5 * carry + row
        return carry, carry * 0.5

    carry, rows = lax.scan(body, jnp.zeros_like(x[0]), x, reverse=bool(c // 2 % 2))
    return rows + carry


def _loop(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = _at_least(x, 1)

    def body(x: Array, _: None) -> tuple[Array, None]:
        return jnp.tanh(x - x.mean(_dim(x, c // 2), keepdims=True)), None

    if c % 2:
        body = jax.checkpoint(body)
    return lax.scan(body, x, None, length=2 + c // 6 % 2)[0]


def _cond(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = _at_least(x, 1)
    return lax.cond(ids[0] % 2 == c % 2, lambda x: jnp.sin(x) - x.mean(), lambda x: jax.nn.softmax(x, _dim(x, c)), x)


def _remat(x: Array, y: Array, ids: Array, c: int) -> Array:
    return jax.checkpoint(lambda x: jnp.tanh(_dot(x, y, ids, c)) * 2)(x)


def _normalise(x: Array, y: Array, ids: Array, c: int) -> Array:
    x = _at_least(x, 1)
    axis = _dim(x, c)
    centred = x - x.mean(axis, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(axis, keepdims=True) + 0.1)


def _random(x: Array, y: Array, ids: Array, c: int) -> Array:
    key = jax.random.fold_in(jax.random.key(c), ids[0])
    keep = jax.random.bernoulli(key, 0.7, x.shape)
    return jnp.where(keep, x / 0.7, 0)


OPERATIONS: dict[str, Callable[[Array, Array, Array, int], Array]] = {
    "unary": _unary,
    "binary": _binary,
    "select": _select,
    "dot": _dot,
    "batch_dot": _batch_dot,
    "reduce": _reduce,
    "argmax": _argmax,
    "reshape": _reshape,
    "transpose": _transpose,
    "broadcast": _broadcast,
    "take": _take,
    "take_along": _take_along,
    "scatter": _scatter,
    "concatenate": _concatenate,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "pad": _pad,
    "rev": _rev,
    "cumulative": _cumulative,
    "sort": _sort,
    "softmax": _softmax,
    "one_hot": _one_hot,
    "iota": _iota,
    "conv": _conv,
    "pool": _pool,
    "scan": _scan,
    "loop": _loop,
    "cond": _cond,
    "remat": _remat,
    "normalise": _normalise,
    "random": _random,
}
