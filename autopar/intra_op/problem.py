"""StrategyGraph → `Problem`: the solver's view, with live bytes over time."""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.intra_op.extract import Buffer, Decisions
from autopar.intra_op.flatten import Flat
from autopar.intra_op.liveness import Interval, Liveness
from autopar.intra_op.strategies import Signature
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
            extra: dict[tuple[int, float], list[Interval]] = {}
            for n in this.members:
                for t, weight, end in live.workspaces.get(n, ()):
                    extra.setdefault((t, weight), []).append((n, end))
            for (t, weight), spans in extra.items():
                size = weight * _tensor_bytes(graph, this.signature, t)
                usages[this.cluster].append((size[this.follow], tuple(spans)))
    nodes = tuple(ProblemNode(costs_s=c, usages=tuple(u)) for c, u in zip(graph.costs, usages, strict=True))
    edges = tuple(
        ProblemEdge(a=a, b=b, rows=e.rows, cols=e.cols, costs_s=e.matrix) for (a, b), e in sorted(graph.edges.items())
    )
    return Problem(nodes=nodes, edges=edges, fixed_bytes=np.zeros(live.horizon), limit_bytes=limit_bytes)


def _tensor_bytes(graph: StrategyGraph, signature: Signature, t: int) -> Any:
    """float64[strategies]: bytes on a device of operand t, or of result t − number of operands; or of a workspace that
    is no multiple of these."""
    count = len(signature.operand_types)
    if t >= count:
        return signature.usage[t - count] if signature.workspace is None else signature.workspace
    codes, value_type = signature.operands[t], signature.operand_types[t]
    if codes is None:
        return np.zeros(signature.size)
    return value_type.size_bytes / graph.mesh.space(value_type).shards[codes]


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
            add(weight * float(_tensor_bytes(out.graph, out.signature[n], t)[out.strategy[n]]), n, end)
    for arg, (new, first, readers) in live.loose.items():
        direct = [n for n, i in readers if out.reads[n, i][0] == 1]
        if direct:
            add(float(out.signature[arg].usage[0][out.strategy[arg]]), first, max(new, *direct) + 1)
    return np.cumsum(delta)[: live.horizon]


def buffer_span(flat: Flat, live: Liveness, buffer: Buffer) -> Interval:
    """A resharded buffer is made for its first reader and lives as long as any needs it; one made before a loop
    for readers inside it, for all of the loop. What a loop's end reads is made where the value is."""
    source = buffer.source
    start = max(buffer.first, source)
    stop = max([max(u, source) + 1 for u in buffer.passing], default=start + 1)
    for u in buffer.readers:
        stop = max(stop, live.ends[u] if u > source else source + 1)
    home = flat.region[buffer.first]
    if home != buffer.region and home in flat.span and flat.kind[buffer.first] == "op":
        first, last = flat.span[home]
        start, stop = min(start, first), max(stop, last)
    return start, stop


def argument_bytes(out: Decisions) -> int:
    """Bytes of the step's arguments on one device."""
    return int(sum(out.signature[n].usage[0][out.strategy[n]] for n in out.graph.flat.args))
