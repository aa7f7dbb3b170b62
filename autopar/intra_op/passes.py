"""The pass of a step in which each operator runs, wherever it is: `passes`."""

from __future__ import annotations

from autopar.intra_op.flatten import Flat
from autopar.ir.graph import Phase


def passes(flat: Flat) -> list[Phase]:
    """The pass of each planning node. What is inside a node of the backward pass is of that pass; inside one of the
    forward pass, a layer of a pipeline, the backward pass is told apart; inside any other, a loop over microbatches,
    all are. A step that differentiates nothing, an evaluation, is a forward pass."""
    found: list[Phase] = ["update"] * len(flat.regions)
    for region in flat.regions:
        if region.parent >= 0:
            outer = flat.regions[region.parent].graph.nodes[region.position]
            found[region.id] = _inside(found[region.parent], outer.phase)
    out: list[Phase] = [
        _inside(found[flat.region[n]], "update" if x is None else x.phase) for n, x in enumerate(flat.node)
    ]
    if any(phase != "update" for phase in out):
        return out
    return ["forward" for _ in out]


def _inside(outer: Phase, inner: Phase) -> Phase:
    return inner if outer == "update" or (outer, inner) == ("forward", "backward") else outer
