"""Why no cut of a model into stages fits the devices' memory, and what would: `least_memory`.

With h_q(i, j | a) what layers i … j−1 hold on a device of submesh q as a stage with a others after it (see `stage_dp`),
as a part of that device's memory, the least that any cut needs of its fullest device is G[·, 0, ·] of

    G[a + 1, i, d] = min over j > i and q of  max(h_q(i, j | a), G[a, j, d − |q|])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from autopar.inter_op.stage_dp import Cells, Limits
from autopar.ir.pipeline import StageCost

_FIELDS = [field.name for field in fields(StageCost)]
_STATE, _ACTIVATION = _FIELDS.index("state_bytes"), _FIELDS.index("activation_bytes")
_CONTEXT, _TRANSIENT = _FIELDS.index("weight_context_bytes"), _FIELDS.index("transient_bytes")


def least_memory(cells: Sequence[Cells], limits: Limits) -> float:
    """The least part of its device's memory that the fullest device of any cut needs, above 1 where none fits; inf
    where there is no cut at all. ``limits.devices`` may be more than the cluster has."""
    count = cells[0].cost.shape[1]
    unit = [
        int(np.gcd.reduce([c.submesh.size for c in cells if c.submesh.group == g] or [1]))
        for g in range(len(limits.devices))
    ]
    room = tuple(d // u + 1 for d, u in zip(limits.devices, unit, strict=True))
    best = np.full((count + 1, *room), np.inf)
    best[(count, *(0,) * len(room))] = 0.0
    least = np.inf
    for after in range(limits.most_stages):
        new = np.full_like(best, np.inf)
        for cell in cells:
            shift = [0] * len(room)
            shift[cell.submesh.group] = cell.submesh.size // unit[cell.submesh.group]
            source = tuple(slice(0, max(0, r - s)) for r, s in zip(room, shift, strict=True))
            target = tuple(slice(min(r, s), r) for r, s in zip(room, shift, strict=True))
            tail = best[(slice(None), *source)]
            flat = tail.reshape(count + 1, -1)
            alive = np.isfinite(flat).any(0)
            if not alive.any():
                continue
            held = _held(cell, limits, after)
            found = np.full((count, flat.shape[1]), np.inf)
            for start in range(count):
                found[start, alive] = np.maximum(held[start, :, None], flat[:, alive]).min(0)
            view = new[(slice(0, count), *target)]
            np.minimum(view, found.reshape(count, *tail.shape[1:]), out=view)
        best = new
        if after + 1 >= limits.least_stages:
            least = min(least, float(best[0].min()))
        if not np.isfinite(best).any():
            break
    return float(least)


def _held(cell: Cells, limits: Limits, after: int) -> NDArray[np.float64]:
    """float64[start, stop]: what the leanest option holds, as a part of the memory."""
    cost = cell.cost
    held = cost[..., _STATE] + limits.in_flight(after) * cost[..., _ACTIVATION] + cost[..., _TRANSIENT]
    if limits.contexts:
        held = held + cost[..., _CONTEXT]
    return held.min(0) / cell.memory_bytes
