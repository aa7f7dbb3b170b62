"""What a plan's predictions take for granted, because the step does not say it, as rows of the plan.

In: the flattened step. Out: one `Assumption` per kind of operator and place. Nothing is costed at 0 for want of
knowing it: a guess is made, and shown here.
"""

from __future__ import annotations

from collections import Counter

from autopar.intra_op.flatten import WHILE_TRIPS, Flat
from autopar.ir.plan import Assumption

WHILE_WHY = "how often a while loop runs depends on values"


def assumptions(flat: Flat) -> tuple[Assumption, ...]:
    """The rows, sorted."""
    rows: Counter[tuple[str, str, str, str]] = Counter()
    for region in flat.regions:
        if region.kind == "while" and region.body == 1:
            loop = flat.regions[region.parent].graph.nodes[region.position]
            rows["while", loop.source, f"{WHILE_TRIPS} trips", WHILE_WHY] += 1
    return tuple(
        Assumption(primitive=primitive, source=source, assumed=assumed, why=why, count=count)
        for (primitive, source, assumed, why), count in sorted(rows.items())
    )
