"""Local lowering of ragged_dot_general where its rows or its groups are split.

In: this device's pieces of the operands, and the sizes of all groups. Out: its piece, or its partial sum. Each group
has those of its rows that lie in this device's block of them; where groups are split, rows of other devices' groups
come behind its own, as rows of no group. Their results are set to zero here: JAX's own implementation makes zeros of
them, what the compilers of accelerators make of them nobody says.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.jax_compat import bind
from autopar.runtime.one_program.local.context import LocalContext, LocalRule


def _ragged_dot_general(ctx: LocalContext, eqn: Any, lhs: Any, rhs: Any, sizes: Any) -> list[Any]:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (ragged,) = numbers.lhs_ragged_dimensions
    row_axes, group_axes = ctx.operand_specs[0].dims[ragged], ctx.factor_axes.get("g", ())
    if not row_axes and not group_axes:
        return bind(eqn, lhs, rhs, sizes)
    rows = lhs.shape[ragged]
    ends = jnp.cumsum(sizes.astype(np.int32)) - ctx.offset(row_axes, rows)
    starts = jnp.clip(ends - sizes.astype(np.int32), 0, rows)
    ends = jnp.clip(ends, 0, rows)
    if not group_axes:
        return bind(eqn, lhs, rhs, (ends - starts).astype(sizes.dtype))
    count = sizes.shape[0] // ctx.num_shards(group_axes)
    mine = ctx.offset(group_axes, count)
    starts, ends = (lax.dynamic_slice_in_dim(x, mine, count) for x in (starts, ends))
    first, own = starts[0], (ends - starts).astype(sizes.dtype)
    contract, batch = numbers.dot_dimension_numbers
    lhs = _moved(lhs, ragged, -first)
    if ragged in contract[0]:
        return bind(eqn, lhs, _moved(rhs, contract[1][contract[0].index(ragged)], -first), own)
    (out,) = bind(eqn, lhs, rhs, own)
    dim = len(batch[0]) + sum(d not in contract[0] and d not in batch[0] for d in range(ragged))
    in_groups = lax.broadcasted_iota(np.int32, out.shape, dim) < ends[-1] - first
    return [_moved(jnp.where(in_groups, out, jnp.zeros_like(out)), dim, first)]


def _moved(x: Any, dim: int, by: Any) -> Any:
    """``x`` with what dimension ``dim`` has at r at r + ``by``, |by| ≤ its size; zeros come in."""
    rows = x.shape[dim]
    around = [(rows, rows, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
    return lax.dynamic_slice_in_dim(lax.pad(x, jnp.zeros((), x.dtype), around), rows - by, rows, axis=dim)


LOCAL: dict[str, LocalRule] = {"ragged_dot_general": _ragged_dot_general}
