"""StrategyGraph → `Problem`: the solver's view, with live bytes over time."""

from __future__ import annotations

import numpy as np

from autopar.intra_op.strategy_graph import StrategyGraph
from autopar.ir.strategy import Problem, ProblemEdge, ProblemNode


def build_problem(graph: StrategyGraph, limit_bytes: float | None) -> Problem:
    """Node and edge costs of the clusters."""
    nodes = tuple(ProblemNode(costs_s=c) for c in graph.costs)
    edges = tuple(
        ProblemEdge(a=a, b=b, rows=e.rows, cols=e.cols, costs_s=e.matrix) for (a, b), e in sorted(graph.edges.items())
    )
    return Problem(nodes=nodes, edges=edges, fixed_bytes=np.zeros(0), limit_bytes=None)
