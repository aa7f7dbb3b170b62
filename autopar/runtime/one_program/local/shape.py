"""Local lowerings of operators whose parameters hold shapes or that make values from positions.

In: local operands. Out: local results; ``ctx.result_shape`` gives their shapes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from autopar.jax_compat import bind
from autopar.runtime.one_program.local.context import LocalContext, LocalRule


def _reshape(ctx: LocalContext, eqn: Any, operand: Any) -> list[Any]:
    return bind(eqn, operand, new_sizes=ctx.result_shape(), sharding=None)


def _broadcast_in_dim(ctx: LocalContext, eqn: Any, operand: Any) -> list[Any]:
    return bind(eqn, operand, shape=ctx.result_shape(), sharding=None)


def _empty(ctx: LocalContext, eqn: Any) -> list[Any]:
    return bind(eqn, shape=ctx.result_shape())


def _iota(ctx: LocalContext, eqn: Any) -> list[Any]:
    shape = ctx.result_shape()
    (local,) = bind(eqn, shape=shape, sharding=None)
    dimension = eqn.params["dimension"]
    axes = ctx.result_specs[0].dims[dimension]
    if not axes:
        return [local]
    offset = lax.convert_element_type(ctx.offset(axes, shape[dimension]), local.dtype)
    return [lax.add(local, lax.broadcast(offset, shape))]


def _slice(ctx: LocalContext, eqn: Any, operand: Any) -> list[Any]:
    """Split dimensions are taken whole, or in even steps from end to end: the same steps on each shard."""
    shape = ctx.result_shape()
    strides = eqn.params["strides"] or (1,) * len(shape)
    limits = tuple(
        start + (m - 1) * stride + 1 if axes else limit
        for start, limit, stride, m, axes in zip(
            eqn.params["start_indices"],
            eqn.params["limit_indices"],
            strides,
            shape,
            ctx.operand_specs[0].dims,
            strict=True,
        )
    )
    return bind(eqn, operand, limit_indices=limits)


def _tile(ctx: LocalContext, eqn: Any, operand: Any) -> list[Any]:
    reps = tuple(int(m // n) if n else r for m, n, r in zip(ctx.result_shape(), np.shape(operand), eqn.params["reps"]))
    return bind(eqn, operand, reps=reps)


LOCAL: dict[str, LocalRule] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "empty": _empty,
    "iota": _iota,
    "reshape": _reshape,
    "slice": _slice,
    "tile": _tile,
}
