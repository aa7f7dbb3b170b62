"""StrategyGraph → `Problem`: the solver's view, with live bytes over time."""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.intra_op.extract import Decisions
from autopar.intra_op.liveness import Liveness
from autopar.intra_op.strategy_graph import StrategyGraph
from autopar.intra_op.usages import buffer_span, tensor_bytes, usages
from autopar.ir.strategy import Problem, ProblemEdge, ProblemNode


def build_problem(graph: StrategyGraph, live: Liveness, limit_bytes: float | None) -> Problem:
    """Costs and usages of the clusters; ``limit_bytes`` per device, None for no limit and no usages."""
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


def live_bytes(out: Decisions, live: Liveness) -> Any:
    """float64[times]: bytes per device under a plan: values, the buffers of their reshardings, workspaces."""
    flat = out.graph.flat
    delta = np.zeros(live.horizon + 2)

    def add(size: float, start: int, stop: int) -> None:
        delta[start] += size
        delta[min(stop, live.horizon)] -= size

    for n, spans in enumerate(live.intervals):
        for r, span in enumerate(spans):
            if span is not None:
                start, stop = span
                if (n, r) in out.moved and flat.kind[n] not in ("arg", "carry"):
                    moved = max(out.moved[n, r], start) + 1
                    stop = max(stop, moved) if (n, r) in out.direct else moved
                add(float(out.signature[n].usage[r][out.strategy[n]]), start, stop)
    for buffer in out.buffers:
        start, stop = buffer_span(flat, live, buffer)
        add(buffer.size_bytes, start, stop)
        add(buffer.copy_bytes, start, start + 1)
    for n, spaces in live.workspaces.items():
        for t, weight, end in spaces:
            if (n, t) in out.taken and len(out.taken[n, t].readers) == 1:
                continue  # resharded for this reader alone: its copy follows in the place of the buffer
            add(weight * float(tensor_bytes(out.graph, out.graph.class_of[n], t)[out.strategy[n]]), n, end)
    for arg, (new, first, readers) in live.loose.items():
        direct = [n for n, i in readers if out.reads[n, i][0] == 1]
        if direct:
            add(float(out.signature[arg].usage[0][out.strategy[arg]]), first, max(new, *direct) + 1)
    return np.cumsum(delta)[: live.horizon]


def argument_bytes(out: Decisions) -> int:
    """Bytes of the step's arguments on one device."""
    return int(sum(out.signature[n].usage[0][out.strategy[n]] for n in out.graph.flat.args))
