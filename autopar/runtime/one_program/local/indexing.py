"""Local lowerings of gather, the scatter family, dynamic_slice and dynamic_update_slice.

In: this device's pieces of the operands. Out: this device's piece, or its partial sum where an indexed
dimension is split. Out-of-bounds behaviour is decided on *global* indices, before the shard's offset is
subtracted, so that each mode (clip, fill_or_drop, promise_in_bounds) means what it means unsharded.

Single indices are brought into range here, also where nothing is split. XLA merges two slices of one value into one at
the sum of their starts; where the inner or the outer start is out of bounds, its clamping is lost and the result wrong
(algebraic simplification, seen on CPU with jaxlib 0.10). In a sharded step one of the two is often a resharding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.jax_compat import bind
from autopar.runtime.one_program.local.context import LocalContext, LocalRule


def _clamp(index: Any, upper: int) -> Any:
    """``index`` clamped to [0, upper] in its own dtype, then as int32."""
    top = min(upper, int(np.iinfo(index.dtype).max))
    return lax.clamp(index.dtype.type(0), index, index.dtype.type(top)).astype(jnp.int32)


def _is_single(indices: Any) -> bool:
    return indices.size == indices.shape[-1]


def _split_dims(ctx: LocalContext, operand: int, dims: Sequence[int], whole_window: Sequence[int]) -> dict[int, Any]:
    """Indexed dimensions of ``operand`` that are split (and not taken in full) → this shard's offset."""
    out: dict[int, Any] = {}
    for d in dims:
        axes = ctx.operand_specs[operand].dims[d]
        if axes and d not in whole_window:
            out[d] = ctx.offset(axes, ctx.operand_shape(operand)[d])
    return out


def _gather(ctx: LocalContext, eqn: Any, operand: Any, indices: Any) -> list[Any]:
    params = eqn.params
    numbers, mode = params["dimension_numbers"], params["mode"].name
    global_shape = ctx.node.operand_types[0].shape
    full = [d for d, n in enumerate(params["slice_sizes"]) if n == global_shape[d]]
    local_shape = ctx.operand_shape(0)
    sizes = tuple(local_shape[d] if d in full else n for d, n in enumerate(params["slice_sizes"]))
    offsets = _split_dims(ctx, 0, numbers.start_index_map, full)
    is_key = jnp.issubdtype(operand.dtype, jax.dtypes.extended)
    if not offsets and (is_key or not _is_single(indices) or not numbers.start_index_map):
        return bind(eqn, operand, indices, slice_sizes=sizes)
    columns, mine, in_bounds = [], True, True
    for column, d in enumerate(numbers.start_index_map):
        index = indices[..., column]
        upper = global_shape[d] - params["slice_sizes"][d]
        if mode == "FILL_OR_DROP":
            index = index.astype(jnp.int32)
            in_bounds = in_bounds & (index >= 0) & (index <= upper)
        index = _clamp(index, upper)
        if d in offsets:
            index = index - offsets[d]
            mine = mine & (index >= 0) & (index < local_shape[d])
            index = lax.clamp(np.int32(0), index, np.int32(local_shape[d] - 1))
        columns.append(index)
    out = bind(
        eqn,
        operand,
        jnp.stack(columns, axis=-1),
        slice_sizes=sizes,
        mode=type(params["mode"]).PROMISE_IN_BOUNDS,
        fill_value=None,
        indices_are_sorted=False,
        unique_indices=False,
    )[0]
    batch_dims = [d for d in range(out.ndim) if d not in numbers.offset_dims]

    def spread(mask: Any) -> Any:
        return lax.broadcast_in_dim(mask, out.shape, batch_dims)

    if mode != "FILL_OR_DROP":
        return [jnp.where(spread(mine), out, jnp.zeros_like(out)) if offsets else out]
    axes = tuple(a for d in offsets for a in ctx.operand_specs[0].dims[d])
    fill = jnp.full_like(out, params["fill_value"])
    elsewhere = jnp.where(spread(~in_bounds) & (ctx.shard_index(axes) == 0), fill, jnp.zeros_like(out))
    return [jnp.where(spread(mine & in_bounds), out, elsewhere)]


def _scatter(ctx: LocalContext, eqn: Any, operand: Any, indices: Any, updates: Any) -> list[Any]:
    params = eqn.params
    numbers, mode = params["dimension_numbers"], params["mode"]
    partial_axes = ctx.result_specs[0].unreduced if eqn.primitive.name in ("scatter-add", "scatter-sub") else ()
    partial_axes = tuple(a for a in partial_axes if a not in ctx.operand_specs[0].unreduced)
    if partial_axes:  # the operand counts once, not once per shard of the updates
        operand = jnp.where(ctx.shard_index(partial_axes) == 0, operand, jnp.zeros_like(operand))
    global_shape, global_updates = ctx.node.operand_types[0].shape, ctx.node.operand_types[2].shape
    windowed = [
        d
        for d in range(len(global_shape))
        if d not in numbers.inserted_window_dims and d not in numbers.operand_batching_dims
    ]
    window = dict.fromkeys(range(len(global_shape)), 1)
    window.update({d: global_updates[u] for d, u in zip(windowed, numbers.update_window_dims, strict=True)})
    full = [d for d in windowed if window[d] == global_shape[d]]
    offsets = _split_dims(ctx, 0, numbers.scatter_dims_to_operand_dims, full)
    single = _is_single(indices) and bool(numbers.scatter_dims_to_operand_dims)
    if not offsets and not single:
        return bind(eqn, operand, indices, updates)
    local_shape = ctx.operand_shape(0)
    columns, mine = [], np.bool_(True)
    for column, d in enumerate(numbers.scatter_dims_to_operand_dims):
        index, upper = indices[..., column], global_shape[d] - window[d]
        index = _clamp(index, upper) if mode.name == "CLIP" else index.astype(jnp.int32)
        if d in offsets:
            index = index - offsets[d]
            upper = local_shape[d] - 1
        if d in offsets or single:
            mine = mine & (index >= 0) & (index <= upper)
        columns.append((d, index, upper))
    neutral = _NEUTRAL.get(eqn.primitive.name)
    if neutral is not None or single:  # what lies elsewhere becomes harmless, and nothing leaves this shard
        columns = [
            lax.clamp(np.int32(0), i, np.int32(upper)) if d in offsets or single else i for d, i, upper in columns
        ]
    else:
        columns = [jnp.where(mine, i, local_shape[d]) if d in offsets else i for d, i, _ in columns]
    if neutral is not None:
        batch_dims = [d for d in range(updates.ndim) if d not in numbers.update_window_dims]
        mask = lax.broadcast_in_dim(mine, updates.shape, batch_dims)
        updates = jnp.where(mask, updates, neutral(updates.dtype).astype(updates.dtype))
    (out,) = bind(
        eqn,
        operand,
        jnp.stack(columns, axis=-1),
        updates,
        mode=type(mode).FILL_OR_DROP,
        indices_are_sorted=False,
        unique_indices=False,
    )
    return [jnp.where(jnp.reshape(mine, ()), out, operand) if neutral is None and single else out]


def _extreme(dtype: Any, largest: bool) -> Any:
    if jnp.issubdtype(dtype, jnp.bool_):
        return np.bool_(largest)
    if jnp.issubdtype(dtype, jnp.integer):
        return np.asarray(jnp.iinfo(dtype).max if largest else jnp.iinfo(dtype).min)
    return np.asarray(np.inf if largest else -np.inf)


_NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "scatter-add": lambda dtype: np.asarray(-0.0 if jnp.issubdtype(dtype, jnp.inexact) else 0),
    "scatter-sub": lambda dtype: np.asarray(0),
    "scatter-mul": lambda dtype: np.asarray(1),
    "scatter-min": lambda dtype: _extreme(dtype, True),
    "scatter-max": lambda dtype: _extreme(dtype, False),
}
"""Updates that change nothing. XLA's CPU compiler gives wrong results where a single out-of-bounds index meets an
operand that is itself a slice (it merges the two slices, and the clamping of the first is lost)."""


def _dynamic_slice(ctx: LocalContext, eqn: Any, operand: Any, *starts: Any) -> list[Any]:
    global_shape, local_shape = ctx.node.operand_types[0].shape, ctx.operand_shape(0)
    sizes = eqn.params["slice_sizes"]
    full = [d for d, n in enumerate(sizes) if n == global_shape[d]]
    offsets = _split_dims(ctx, 0, range(len(sizes)), full)
    local_sizes = tuple(local_shape[d] if d in full else n for d, n in enumerate(sizes))
    local_starts, mine = _local_starts(starts, sizes, offsets, global_shape, local_shape)
    out = bind(eqn, operand, *local_starts, slice_sizes=local_sizes)[0]
    return [out if mine is None else jnp.where(mine, out, jnp.zeros_like(out))]


def _dynamic_update_slice(ctx: LocalContext, eqn: Any, operand: Any, update: Any, *starts: Any) -> list[Any]:
    global_shape, local_shape = ctx.node.operand_types[0].shape, ctx.operand_shape(0)
    sizes = ctx.node.operand_types[1].shape
    full = [d for d, n in enumerate(sizes) if n == global_shape[d]]
    offsets = _split_dims(ctx, 0, range(len(starts)), full)
    local_starts, mine = _local_starts(starts, sizes, offsets, global_shape, local_shape)
    if mine is not None:
        update = jnp.where(mine, update, lax.dynamic_slice(operand, local_starts, update.shape))
    return bind(eqn, operand, update, *local_starts)


def _local_starts(
    starts: Sequence[Any],
    sizes: Sequence[int],
    offsets: dict[int, Any],
    global_shape: Sequence[int],
    local_shape: Sequence[int],
) -> tuple[list[Any], Any]:
    """Start indices within this shard, and whether the row lies in it (None where no indexed dimension is split).

    Rows of split dimensions are single, so a start is clamped to [0, size - 1].
    """
    out: list[Any] = []
    mine = None
    for d, start in enumerate(starts):
        start = jnp.asarray(start)
        index = _clamp(start, global_shape[d] - sizes[d])
        if d in offsets:
            index = index - offsets[d]
            here = (index >= 0) & (index < local_shape[d])
            mine = here if mine is None else mine & here
            index = lax.clamp(np.int32(0), index, np.int32(local_shape[d] - 1))
        out.append(index.astype(start.dtype))
    return out, mine


LOCAL: dict[str, LocalRule] = {
    "gather": _gather,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scatter-sub": _scatter,
    "scatter-mul": _scatter,
    "scatter-min": _scatter,
    "scatter-max": _scatter,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
}
