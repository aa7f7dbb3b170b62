"""What a plan's predictions take for granted, because the step does not say it, as rows of the plan.

In: the flattened step. Out: one `Assumption` per kind of operator and place. Nothing is costed at 0 for want of
knowing it: a guess is made, and shown here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

from autopar.cost.roofline import WHILE_TRIPS
from autopar.intra_op.flatten import Flat
from autopar.ir.graph import Graph, Node
from autopar.ir.sharding_plan import Assumption
from autopar.primitives import record_of

WHILE_WHY = "how often a while loop runs depends on values"
FLOPS_WHY = "its work cannot be seen; autopar.sharding_rule(name, rule, flops=...) says it"

_Row: TypeAlias = "tuple[str, str, str, str]"


def assumptions(flat: Flat) -> tuple[Assumption, ...]:
    """The rows, sorted: while loops whose length depends on values, and opaque calls whose FLOPs nobody has stated."""
    rows: Counter[_Row] = Counter()
    for region in flat.regions:
        if region.kind == "while" and region.body == 1:
            loop = flat.regions[region.parent].graph.nodes[region.position]
            if loop.params["trips"] is not None:
                continue
            rows[_loop(loop, loop.source)] += 1
    for node in flat.node:
        if node is not None:
            rows.update(_unseen(node, node.source))
    return tuple(
        Assumption(primitive=primitive, source=source, assumed=assumed, why=why, count=count)
        for (primitive, source, assumed, why), count in sorted(rows.items())
    )


def _unseen(node: Node, source: str) -> Iterator[_Row]:
    """Rows of an operator and of what its hidden body holds; ``source``: where no operator inside has its own."""
    if node.flops is not None:
        return
    if node.hidden is not None:
        yield from _inside(node.hidden, source)
    elif not node.bodies and record_of(node.primitive).traits.opaque:
        yield _kernel(node, source)


def _inside(graph: Graph, source: str) -> Iterator[_Row]:
    for node in graph.nodes:
        here = node.source or source
        if node.primitive == "while" and node.params["trips"] is None:
            yield _loop(node, here)
        for body in node.bodies:
            yield from _inside(body, here)
        yield from _unseen(node, here)


def _loop(node: Node, source: str) -> _Row:
    return node.primitive, source, f"{WHILE_TRIPS} trips", WHILE_WHY


def _kernel(node: Node, source: str) -> _Row:
    name = node.params.get("target_name") or node.params.get("name")
    label = f"{node.primitive} {name!r}" if isinstance(name, str) else node.primitive
    return label, source, "1 FLOP an element", FLOPS_WHY
