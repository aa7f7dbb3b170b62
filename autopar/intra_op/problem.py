"""StrategyGraph → `Problem`: the solver's view, a node per cluster, with an estimate of live bytes over time."""

from __future__ import annotations

import numpy as np

from autopar.intra_op.decisions import Decisions
from autopar.intra_op.liveness import Liveness
from autopar.intra_op.strategy_graph import StrategyGraph
from autopar.intra_op.usages import usages
from autopar.ir.strategy import Problem, ProblemEdge, ProblemNode


def build_problem(graph: StrategyGraph, live: Liveness, limit_bytes: float | None) -> Problem:
    """Costs and usages of the clusters and of the edges between them; ``limit_bytes`` per device, None for no limit and
    no usages."""
    held = None if limit_bytes is None else usages(graph, live)
    nodes = tuple(
        ProblemNode(costs_s=c, usages=() if held is None else tuple(held.nodes[k])) for k, c in enumerate(graph.costs)
    )
    edges = tuple(
        ProblemEdge(
            a=a, b=b, rows=e.rows, cols=e.cols, costs_s=e.matrix,
            usages=() if held is None else tuple(held.edges.get((a, b), ())),
            suspected=() if held is None else tuple(held.suspected.get((a, b), ())),
        )
        for (a, b), e in sorted(graph.edges.items())
    )  # fmt: skip
    return Problem(nodes=nodes, edges=edges, fixed_bytes=np.zeros(live.horizon), limit_bytes=limit_bytes)


def argument_bytes(out: Decisions) -> int:
    """Bytes of the step's arguments on one device, sharded as ``out`` says."""
    classes, class_of = out.graph.classes, out.graph.class_of
    return int(sum(classes[c].signature.usage[0][out.strategy[c]] for c in (class_of[n] for n in out.graph.flat.args)))


def least_argument_bytes(graph: StrategyGraph) -> int:
    """What the step's arguments take on one device at least, under any plan."""
    return int(sum(np.min(graph.classes[graph.class_of[n]].signature.usage[0]) for n in graph.flat.args))
