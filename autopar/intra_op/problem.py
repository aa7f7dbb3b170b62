"""StrategyGraph → `Problem`: the solver's view, with live bytes over time."""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.intra_op.extract import Decisions
from autopar.intra_op.flatten import Flat
from autopar.intra_op.liveness import Interval, Liveness
from autopar.intra_op.strategy_graph import StrategyGraph
from autopar.ir.strategy import Problem, ProblemEdge, ProblemNode


def build_problem(graph: StrategyGraph, live: Liveness, limit_bytes: float | None) -> Problem:
    """Costs and usages of the clusters; ``limit_bytes`` per device, None for no limit."""
    usages: list[list[tuple[Any, tuple[Interval, ...]]]] = [[] for _ in graph.costs]
    if limit_bytes is not None:
        for this in graph.classes:
            for r in range(len(this.signature.results)):
                intervals = [span for n in this.members if (span := live.intervals[n][r]) is not None]
                if intervals:
                    usages[this.cluster].append((this.signature.usage[r][this.follow], tuple(intervals)))
    nodes = tuple(ProblemNode(costs_s=c, usages=tuple(u)) for c, u in zip(graph.costs, usages, strict=True))
    edges = tuple(
        ProblemEdge(a=a, b=b, rows=e.rows, cols=e.cols, costs_s=e.matrix) for (a, b), e in sorted(graph.edges.items())
    )
    return Problem(nodes=nodes, edges=edges, fixed_bytes=np.zeros(live.horizon), limit_bytes=limit_bytes)


def live_bytes(out: Decisions, live: Liveness) -> Any:
    """float64[times]: bytes per device under a plan: values, and the buffers of their reshardings."""
    flat = out.graph.flat
    delta = np.zeros(live.horizon + 2)
    for n, spans in enumerate(live.intervals):
        for r, span in enumerate(spans):
            if span is not None:
                size = float(out.signature[n].usage[r][out.strategy[n]])
                delta[span[0]] += size
                delta[min(span[1], live.horizon)] -= size
    for first, last, size, region in out.buffers:
        start, stop = _buffer_span(flat, first, last, region)
        delta[start] += size
        delta[min(stop, live.horizon)] -= size
    return np.cumsum(delta)[: live.horizon]


def _buffer_span(flat: Flat, first: int, last: int, region: int) -> tuple[int, int]:
    """A resharded buffer lives from its first reader to its last; one made before a loop, for all of the loop."""
    home = flat.region[first]
    if home != region and home in flat.span and flat.kind[first] == "op":
        start, stop = flat.span[home]
        return min(start, first), max(stop, last + 1)
    return first, last + 1


def argument_bytes(out: Decisions) -> int:
    """Bytes of the step's arguments on one device."""
    return int(sum(out.signature[n].usage[0][out.strategy[n]] for n in out.graph.flat.args))
