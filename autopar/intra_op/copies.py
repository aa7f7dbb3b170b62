"""Live bytes of copies, for problems whose limit is tight.

What a copy costs in memory depends on two choices, its own and its producer's: nothing where they agree. A
`Problem` knows usages of single nodes only, and leaves copies out; where the plans found so then exceed the limit,
the planner solves again with every copy counted as a buffer of its own, which errs on the safe side.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.intra_op.strategy_graph import StrategyGraph
from autopar.ir.strategy import Problem


def with_copies(problem: Problem, graph: StrategyGraph) -> Problem:
    """``problem`` with the buffers of all copies, from each one's first reader to its last."""
    flat = graph.flat
    copy_of = {this.copy_of: c for c, this in enumerate(graph.classes) if this.copy_of is not None}
    spans: dict[int, dict[tuple[int, int], tuple[int, int]]] = {c: {} for c in copy_of.values()}
    for n, links in enumerate(flat.links):
        inputs = graph.classes[graph.class_of[n]].inputs
        for i, link in enumerate(links):
            c = None if link is None else copy_of.get((graph.class_of[link[0]], link[1]))
            if link is not None and c is not None and (c, 0) in inputs[i]:
                first, last = spans[c].get(link, (n, n))
                spans[c][link] = (min(first, n), max(last, n))
    extra: dict[int, list[object]] = {}
    for c, found in spans.items():
        this = graph.classes[c]
        intervals = tuple((first, last + 1) for first, last in found.values())
        if intervals:
            extra.setdefault(this.cluster, []).append((this.signature.usage[0][this.follow], intervals))
    nodes = tuple(
        replace(node, usages=(*node.usages, *extra.get(k, ()))) if k in extra else node
        for k, node in enumerate(problem.nodes)
    )
    return replace(problem, nodes=nodes)
