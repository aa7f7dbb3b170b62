"""Why no cut of a model into stages fits the devices' memory, and what would: `least_memory`.

With h_q(i, j | a) what layers i … j−1 hold on a device of submesh q as a stage with a others after it (see `stage_dp`),
as a part of that device's memory, the least that any cut needs of its fullest device is G[·, 0, ·] of

    G[a + 1, i, d] = min over j > i and q of  max(h_q(i, j | a), G[a, j, d − |q|])
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.inter_op.cells import Cells
from autopar.inter_op.stage_dp import Limits, Room


def least_memory(cells: Sequence[Cells], limits: Limits) -> float:
    """The least part of its device's memory that the fullest device of any cut needs, above 1 where none fits; inf
    where there is no cut at all. ``limits.devices`` may be more than the cluster has."""
    room = Room(cells, limits.devices)
    table, least = room.no_stages(), np.inf
    for after in range(limits.most_stages):
        in_flight = limits.in_flight(after)
        parts = [cell.spread(cell.held_bytes(in_flight, limits.contexts).min(0)) / cell.memory_bytes for cell in cells]
        table = room.one_more(table, parts, np.maximum)
        if after + 1 >= limits.least_stages:
            least = min(least, float(table[0].min()))
        if not np.isfinite(table).any():
            break
    return float(least)
