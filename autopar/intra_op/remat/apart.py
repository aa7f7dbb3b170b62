"""Weights that the forward and the backward pass gather alike: gathered once and kept between, or twice.

In the sharding problem each reader pays for its own gather, and nothing is held between the two. The compiler merges
equal gathers, so that in the step as it is one is made and held for both. `Recompute` of the weight for its late
readers (`intra_op.remat.rewrite`) sets them apart: then the program does what the problem says.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.intra_op.decisions import Decisions
from autopar.intra_op.flatten import CONSTANT, Flat
from autopar.intra_op.liveness import Interval, Liveness
from autopar.intra_op.remat.forward import Readers
from autopar.intra_op.remat.rewrite import compares, recomputable
from autopar.primitives import record_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Result ``result`` of planning node ``node``, gathered to ``size_bytes`` for readers of both passes. ``late``:
    positions of those of the backward pass in the step; ``gap``: from the last early to the first late reader.
    ``copied``: when a copy of the argument that it is made from is held, of ``copied_bytes``, if that is read late and
    was not before."""

    node: int
    result: int
    late: tuple[int, ...]
    gap: Interval
    size_bytes: float
    copied: Interval | None
    copied_bytes: float


def shared_gathers(out: Decisions, live: Liveness, readers: Readers) -> list[Shared]:
    """The step's arguments, and casts of these, that the plan ``out`` gathers once for readers of both passes, without
    having a copy class for it."""
    graph, flat, uses = out.graph, out.graph.flat, out.graph.uses
    nodes = flat.regions[0].graph.nodes
    found: list[Shared] = []
    for buffer in out.buffers:
        pattern = uses.patterns[buffer.pattern]
        if len(buffer.readers) < 2 or pattern.region != 0 or pattern.source in out.copies:
            continue
        at = [uses.edges(buffer.pattern, k).tolist() for k in buffer.readers]
        for edges in zip(*at, strict=True):
            value = int(uses.value[edges[0]])
            n = flat.maker[value]
            arg = _argument(flat, n)
            if arg < 0:
                continue
            users = sorted(int(uses.user[e]) for e in edges)
            places = [(u, readers.place(u, 0)) for u in users]
            late = [(u, p) for u, p in places if p >= 0 and nodes[p].phase != "forward"]
            early = [u for u, p in places if p >= 0 and nodes[p].phase == "forward"]
            if (
                not late
                or not early
                or len(early) + len(late) < len(places)
                or any(compares(nodes[p]) for _, p in late)
            ):
                continue
            gap = max(int(live.ends[u]) for u in early), late[0][0]
            if gap[0] >= gap[1]:
                continue
            leads_to = 0
            for u, _ in late:
                leads_to |= live.leads_to[u]
            c = graph.class_of[arg]
            _, _, loose = live.loose.get(arg, (0, 0, []))
            held = any(out.operand_code(graph.class_of[u], i) == out.result_code(c, 0) for u, i in loose)
            found.append(
                Shared(
                    node=n, result=value - flat.first_value[n], late=tuple(sorted({p for _, p in late})), gap=gap,
                    size_bytes=buffer.size_bytes, copied=None if held else live.copied(arg, users[0], leads_to),
                    copied_bytes=float(graph.classes[c].signature.usage[0][out.strategy[c]]),
                )
            )  # fmt: skip
    return found


def _argument(flat: Flat, n: int) -> int:
    """The argument that planning node n is, or converts to another type; else −1."""
    if flat.kind[n] == "arg":
        return n
    node = flat.node[n]
    if node is None or not record_of(node.primitive).traits.casts or flat.region[n] != 0 or not recomputable(node):
        return -1
    source = flat.source[flat.first_edge[n]]
    return flat.maker[source] if source != CONSTANT and flat.kind[flat.maker[source]] == "arg" else -1
