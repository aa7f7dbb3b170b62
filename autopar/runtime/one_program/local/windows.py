"""Local lowerings of sums, maxima and minima over windows that overlap or are padded: neighbours' rows are fetched.

No parameter of the others holds a shape, and their rules split only dimensions whose windows lie within one shard, so
they bind unchanged on local operands. The arithmetic of halos is `primitives.convolution.covering`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.jax_compat import bind
from autopar.primitives.windows import overlapping
from autopar.runtime.one_program.local.context import LocalContext, LocalRule
from autopar.runtime.one_program.local.convolution import exchange_halo


def _reduce_window(ctx: LocalContext, eqn: Any, x: Any) -> list[Any]:
    padding = [tuple(p) for p in eqn.params["padding"]]
    for d, axes in enumerate(ctx.operand_specs[0].dims):
        found = overlapping(ctx.node, d) if axes else None
        if found is None:
            continue
        rows = x.shape[d]
        x = exchange_halo(ctx, x, d, found.low, found.high, axes)
        if eqn.primitive.name != "reduce_window_sum" and (found.low or found.high):
            at = ctx.shard_index(axes) * rows - found.low + lax.broadcasted_iota(jnp.int32, x.shape, d)
            inside = (at >= 0) & (at < ctx.node.operand_types[0].shape[d])
            x = jnp.where(inside, x, _padding(eqn.primitive.name, x.dtype))
        padding[d] = (found.padding[0], max(0, found.padding[1]))
    (result,) = bind(eqn, x, padding=tuple(padding))
    return [lax.slice(result, [0] * result.ndim, ctx.result_shape())]  # without windows of too much padding


def _padding(name: str, dtype: Any) -> Any:
    """What windows are padded with."""
    largest = name == "reduce_window_min"
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(jnp.inf if largest else -jnp.inf, dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return jnp.asarray(largest)
    return jnp.asarray(jnp.iinfo(dtype).max if largest else jnp.iinfo(dtype).min, dtype)


LOCAL: dict[str, LocalRule] = dict.fromkeys(
    ("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _reduce_window
)
