"""Local lowering of convolutions: fewer groups per device, and the exchange of halos for split spatial dimensions.

In: local lhs and rhs. Out: the local output, or for a split window (the weight gradient) its partial sum. The
arithmetic of halos is `primitives.convolution.spatial`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from autopar.jax_compat import bind
from autopar.primitives.convolution import spatial, spatial_factor
from autopar.runtime.one_program.local.context import LocalContext, LocalRule


def shift_shards(ctx: LocalContext, x: Any, axes: Sequence[str], shift: int) -> Any:
    """``x`` of the device ``shift`` places before this one along ``axes`` (major to minor); zeros where there is none.

    ppermute, unlike the other collectives, counts devices in the mesh's own order of axes (and jax 0.12 refuses
    any other), so the pairs are translated.
    """
    mesh_order = tuple(a for a in ctx.axis_sizes if a in axes)
    sizes = [ctx.axis_sizes[a] for a in axes]
    ranks = np.arange(math.prod(sizes)).reshape([ctx.axis_sizes[a] for a in mesh_order])
    ranks = ranks.transpose([mesh_order.index(a) for a in axes]).ravel()  # place along axes → place in the mesh
    pairs = [(int(ranks[r]), int(ranks[r + shift])) for r in range(len(ranks)) if 0 <= r + shift < len(ranks)]
    return lax.ppermute(x, mesh_order, pairs)


def exchange_halo(ctx: LocalContext, x: Any, dim: int, low: int, high: int, axes: Sequence[str]) -> Any:
    """``x`` with ``low`` rows from before it and ``high`` from after it along ``dim``, zeros beyond the edges.

    One ppermute per neighbour; rows that reach past the nearest neighbour take further ones.
    """
    shards, rows = ctx.num_shards(axes), x.shape[dim]

    def fetch(count: int, ahead: bool) -> list[Any]:
        """Pieces, nearest first."""
        pieces: list[Any] = []
        hop = 1
        while count > 0:
            take = min(count, rows)
            start = 0 if ahead else rows - take
            piece = lax.slice_in_dim(x, start, start + take, axis=dim)
            if hop < shards:
                pieces.append(shift_shards(ctx, piece, axes, -hop if ahead else hop))
            else:
                pieces.append(lax.full_like(piece, 0))
            count, hop = count - take, hop + 1
        return pieces

    return lax.concatenate([*reversed(fetch(low, False)), x, *fetch(high, True)], dim)


def _conv_general_dilated(ctx: LocalContext, eqn: Any, lhs: Any, rhs: Any) -> list[Any]:
    params = eqn.params
    numbers = params["dimension_numbers"]
    global_lhs, global_rhs = (t.shape for t in ctx.node.operand_types)
    global_out = ctx.node.result_types[0].shape
    padding = [tuple(p) for p in params["padding"]]
    for d, (at_lhs, at_rhs, at_out) in enumerate(
        zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    ):
        axes = ctx.factor_axes.get(spatial_factor(d), ())
        if not axes:
            continue
        found = spatial(params, d, global_lhs[at_lhs], global_rhs[at_rhs], global_out[at_out])
        assert found is not None, f"{ctx.node}: spatial dimension {d} is split but cannot be"
        if found.low or found.high:
            lhs = exchange_halo(ctx, lhs, at_lhs, found.low, found.high, axes)
        padding[d] = found.padding
    shards = ctx.factor_shards("g")
    groups = {
        name: params[name] // shards if params[name] > 1 else 1 for name in ("feature_group_count", "batch_group_count")
    }
    return bind(eqn, lhs, rhs, padding=tuple(padding), **groups)


LOCAL: dict[str, LocalRule] = {"conv_general_dilated": _conv_general_dilated}
