"""What a region's forward pass leaves for later: each operator with its late readers, bytes, seconds and gap.

A value is *saved* where the longest stretch between two of its readers that no forward one follows, weighed by how much
the limit is exceeded meanwhile, has weight: what reads it before that gap is early, what reads it after is late.
Backward operators and what is made from them are left out. What may not run twice is only ever kept; so are values
of constants alone, which compilers find equal to the first ones, and what the backward pass compares.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.intra_op.decisions import Decisions
from autopar.intra_op.flatten import CONSTANT, Flat
from autopar.intra_op.liveness import Liveness
from autopar.intra_op.remat.rewrite import compares, recomputable

LEAST_S = 1e-9
"""Seconds that running an operator again costs at least, so that of equally cheap sets the smallest is taken."""


@dataclass(slots=True)
class ForwardNode:
    """A planning node whose results may be recomputed, or kept for others' recomputation.

    ``late``: result → positions in the region of its late readers; ``own_late``: the first time any of these needs it;
    ``late_at``: that, or for what has none the first time that what is made from it is needed late. ``early_end``:
    until when it is needed before that. ``reads``: the forward nodes that it reads. ``stands``: results that are
    materialised. ``gap``: share of the pressure between ``early_end`` and ``late_at``. ``cost_s`` and ``kept_bytes``
    are under the reference plan, per step and device; ``repeatable`` False: it can only be kept."""

    node: int
    late: dict[int, tuple[int, ...]]
    early_end: int
    stands: tuple[int, ...]
    reads: tuple[int, ...]
    own_late: int
    cost_s: float
    kept_bytes: float
    repeatable: bool
    readers: list[int] = field(default_factory=list)
    late_at: int = 0
    gap: float = 0.0

    @property
    def saved(self) -> bool:
        """True where something after the gap reads it."""
        return bool(self.late)


class Readers:
    """Who reads each value of a flat graph, seen from the value's region."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        columns = flat.columns()
        self.user = columns.user.tolist()
        by_value = np.argsort(columns.source, kind="stable")
        self.by_value = by_value.tolist()
        self.first = np.searchsorted(columns.source[by_value], np.arange(len(flat.maker) + 1)).tolist()
        self.position = {n: p for at in flat.at for p, n in enumerate(at) if n >= 0}

    def edges(self, value: int) -> list[int]:
        """The edges that read a value, in order of time."""
        return self.by_value[self.first[value] : self.first[value + 1]]

    def place(self, user: int, region: int) -> int:
        """The position in ``region`` of planning node ``user``, or of the node inside whose bodies it is; -1 where it
        is none of the region's operators: the value leaves."""
        flat = self.flat
        if flat.region[user] == region:
            return self.position[user] if flat.kind[user] == "op" else -1
        at = flat.regions[flat.region[user]]
        while at.parent >= 0:
            if at.parent == region:
                return at.position
            at = flat.regions[at.parent]
        return -1


def forward_nodes(
    out: Decisions, live: Liveness, readers: Readers, region: int, pressure: Any
) -> dict[int, ForwardNode]:
    """Planning node → what it leaves, of one region: those that are saved and what they are made from. ``pressure`` is
    float64[times], summing to one."""
    return _Run(out, live, readers, region, pressure).run()


class _Run:
    def __init__(self, out: Decisions, live: Liveness, readers: Readers, region: int, pressure: Any) -> None:
        self.out, self.graph, self.flat, self.live = out, out.graph, out.graph.flat, live
        self.readers, self.region = readers, region
        here = out.graph.flat.regions[region].graph.nodes
        self.phases = [node.phase for node in here]
        self.comparing = {p for p, node in enumerate(here) if compares(node)}
        self.before = np.concatenate([[0.0], np.cumsum(pressure)])

    def run(self) -> dict[int, ForwardNode]:
        flat = self.flat
        nodes = [n for n in flat.at[self.region] if n >= 0]
        found: dict[int, ForwardNode] = {}
        backward: set[int] = set()
        varies: set[int] = set()
        inside = set(nodes)
        for n in nodes:
            node = flat.node[n]
            assert node is not None
            makers = [flat.maker[v] for v in flat.source[flat.first_edge[n] : flat.first_edge[n + 1]] if v != CONSTANT]
            if node.phase == "backward" or any(m in backward for m in makers):
                backward.add(n)
                continue
            if any(m in varies or m not in inside for m in makers):
                varies.add(n)
            found[n] = self._forward_node(n, tuple(dict.fromkeys(m for m in makers if m in found)), n in varies)
        needed: set[int] = set()
        for n in reversed(list(found)):
            this = found[n]
            if this.saved or n in needed:
                needed.add(n)
                needed.update(this.reads)
        found = {n: this for n, this in found.items() if n in needed}
        for n, this in found.items():
            for m in this.reads:
                found[m].readers.append(n)
        for n in reversed(list(found)):
            self._times(found, found[n])
        return found

    def _forward_node(self, n: int, reads: tuple[int, ...], varies: bool) -> ForwardNode:
        flat, live, node = self.flat, self.live, self.flat.node[n]
        assert node is not None
        late, early_end, made, own_late, leaves = self._split(n)
        stands = [r for r in range(len(flat.result_types[n])) if live.interval(n, r) is not None]
        if not leaves:
            stands = [r for r in stands if r not in late or self._waits(n, r, made, own_late)]
        c = self.graph.class_of[n]
        s, signature = self.out.strategy[c], self.graph.classes[c].signature
        trips = flat.regions[self.region].trips
        kept = 0.0 if leaves else sum(float(signature.usage[r][s]) for r in stands)
        seconds = float(self.graph.classes[c].cost_s[s]) + resharded_s(self.out, n)
        return ForwardNode(
            node=n, late={} if leaves else late, early_end=early_end, stands=tuple(stands), reads=reads,
            own_late=own_late, cost_s=trips * max(LEAST_S, seconds),
            kept_bytes=kept, repeatable=recomputable(node) and not leaves and (varies or not stands),
        )  # fmt: skip

    def _split(self, n: int) -> tuple[dict[int, tuple[int, ...]], int, int, int, bool]:
        """(result → positions of its late readers, until when the early ones need any, when what these are fused into
        is done, when the first late one does, whether any result leaves the region or is compared)."""
        late: dict[int, tuple[int, ...]] = {}
        leaves = False
        early_end, own_late = n + 1, self.live.horizon
        made = early_end
        for r in range(len(self.flat.result_types[n])):
            edges = self.readers.edges(self.flat.first_value[n] + r)
            seen = sorted((self.readers.user[e], self.readers.place(self.readers.user[e], self.region)) for e in edges)
            leaves |= any(p < 0 or (p in self.comparing and self.phases[p] != "forward") for _, p in seen)
            times = [n + 1, *(u for u, _ in seen)]
            gaps = [self._weight(a + 1 if i else a, b) for i, (a, b) in enumerate(itertools.pairwise(times))]
            forward = [i for i, (_, p) in enumerate(seen) if p >= 0 and self.phases[p] == "forward"]
            for i in range(forward[-1] + 1 if forward else 0):
                gaps[i] = 0.0
            split = int(np.argmax(gaps)) if gaps else 0
            if leaves or not gaps or gaps[split] <= 0:
                split = len(seen)
            early = [u for u, _ in seen[:split]]
            behind = {p for _, p in seen[:split]}
            after = tuple(sorted({p for _, p in seen[split:]} - behind))
            if after:
                late[r] = after
                own_late = min(own_late, *(u for u, p in seen[split:] if p not in behind))
            early_end = max([early_end, *early])
            made = max([made, early_end, *(int(self.live.ends[u]) for u in early)])
        return late, early_end, made, own_late, leaves

    def _waits(self, n: int, r: int, made: int, own_late: int) -> bool:
        """True where result r is materialised from the kernels of its early readers, by ``made``, to its late ones,
        computed anew in neither."""
        span = self.live.interval(n, r)
        return span is not None and span[0] <= made and own_late <= span[1]

    def _weight(self, start: int, stop: int) -> float:
        return float(self.before[stop] - self.before[start]) if start < stop else 0.0

    def _times(self, found: dict[int, ForwardNode], this: ForwardNode) -> None:
        """``late_at``, ``early_end`` and ``gap``, from those of its readers."""
        flat = self.flat
        below = [found[w].late_at for w in this.readers]
        this.late_at = this.own_late if this.saved else min(below, default=self.live.horizon)
        end = this.early_end
        for r in range(len(flat.result_types[this.node])):
            late = this.late.get(r, ())
            for e in self.readers.edges(flat.first_value[this.node] + r):
                u = self.readers.user[e]
                place = self.readers.place(u, self.region)
                if place < 0 or place in late:
                    continue
                if u in found and not found[u].stands:
                    end = max(end, found[u].early_end)  # computed in its readers: what they need until then
                else:
                    needs = int(self.live.ends[u])
                    end = max(end, needs if needs < this.late_at else u + 1)
        this.early_end = end
        this.gap = self._weight(end, this.late_at)


def resharded_s(out: Decisions, n: int) -> float:
    """Seconds of the collectives that bring planning node n its operands, were they not there for others."""
    graph, flat, total = out.graph, out.graph.flat, 0.0
    c = graph.class_of[n]
    for i, e in enumerate(range(flat.first_edge[n], flat.first_edge[n + 1])):
        link = flat.link(e)
        if link is None or graph.classes[c].signature.operands[i] is None:
            continue
        have = out.result_code(graph.class_of[link[0]], link[1])
        total += float(graph.mesh.costs(flat.operand_types[n][i])[have, out.operand_code(c, i)])
    return total
