"""Reductions over devices that are as those over an array, where `lax`'s own are not.

Of maxima and minima, a NaN on any device is the result. All-reduces of floating-point numbers by max or min drop NaNs
on CPUs (as do NCCL's). Integers have none: here numbers become integers of the same size in the same order, NaNs beyond
the infinities, and numbers again behind the all-reduce.

A sum of complex numbers that are all one constant ends the process in XLA, which makes a product of it and takes the
product's shape for an array's: it gets an operand of which XLA does not know that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.cost.scattering import LANES, stays_as_it_is, stays_in_rows
from autopar.runtime.one_program.collective_order import unknown_zero


def total(x: Any, axes: Sequence[str]) -> Any:
    """The sum of ``x`` over the devices along ``axes``, element by element."""
    return lax.psum(_summand(x, axes[0]), axes)


def scattered_total(x: Any, axes: Sequence[str], dim: int, parts: int | None = None) -> Any:
    """This device's part, along dimension ``dim``, of the sum of ``x`` over the devices along ``axes``.

    Args:
        parts: how many devices these are, where their parts are to become a dimension of their own, in front: XLA for
            TPUs makes an all-reduce and a slice, twice the bytes, of many a reduce-scatter along another dimension
            (`cost.scattering`). None: they are not.
    """
    x = _summand(x, axes[0])
    if parts is None:
        return lax.psum_scatter(x, tuple(axes), scatter_dimension=dim, tiled=True)
    apart = jnp.moveaxis(x.reshape(*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :]), dim, 0)
    part = apart.shape[1:]
    if not stays_as_it_is(part) and stays_in_rows(part):
        apart = apart.reshape(parts, -1, LANES)
    return lax.psum_scatter(apart, tuple(axes), scatter_dimension=0, tiled=False).reshape(part)


def _summand(x: Any, axis: str) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x
    return jnp.where(unknown_zero(axis) == 0, x, jnp.zeros((), x.dtype))


def extreme(kind: str, x: Any, axes: Sequence[str]) -> Any:
    """``x``'s largest (``kind`` max) or smallest (min) value over the devices along ``axes``, element by element."""
    reduce = lax.pmax if kind == "max" else lax.pmin
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return reduce(x, axes)
    nan = jnp.asarray(jnp.nan if kind == "max" else -jnp.nan, x.dtype)
    return _ordered(reduce(_ordered(jnp.where(jnp.isnan(x), nan, x)), axes), x.dtype)


def _ordered(x: Any, dtype: Any = None) -> Any:
    """Floating-point numbers as integers in the same order, or such integers as numbers of ``dtype`` again: the bits of
    negative ones, which are in reverse, are turned over."""
    bits = x if dtype is not None else lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))
    turned = jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)
    return turned if dtype is None else lax.bitcast_convert_type(turned, dtype)
