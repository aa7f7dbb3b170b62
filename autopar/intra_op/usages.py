"""What the choices hold in memory, and when: bytes of single clusters, and of pairs of them.

A value's buffers depend on how it is made (``have``) and on how its readers want it (``want``), which are choices of
two clusters. With T the bytes of a resharding's chain, all steps and the largest copy between them:

    before the resharding    size(have)
    while it runs            T(have, want) more, where have ≠ want; nothing where it is an all-reduce in place
    after it                 size(want): the same buffer where have = want, the resharded one else

So a value that all readers take through one resharding (a copy, or a single reader) counts for its maker until then
and for its reader afterwards; only T, and what lives longer in one of the two cases, belongs to the pair. Where readers
go several ways the original is counted as long as any of them needs it. A workspace is the pair's too: an operand that
is resharded for one reader alone is made as that reader wants it. Readers that gather a value alike share one buffer
from the first to the last, and need their workspaces beside it; which do is a question of three choices, so that is
only suspected.

`peak.live_bytes` has the truth of one plan, from its collectives; this is the solver's view of all plans.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from autopar.intra_op.decisions import copied_bytes, lays_out
from autopar.intra_op.flatten import Flat
from autopar.intra_op.liveness import Interval, Liveness
from autopar.intra_op.specs import Mesh
from autopar.intra_op.strategy_graph import StrategyGraph, first_of
from autopar.ir.graph import TensorType

Usage = tuple[Any, tuple[Interval, ...]]
"""(bytes per strategy, or per pair of groups of an edge; intervals)."""
_Kind = Literal["made", "wanted", "chain", "copied chain", "moving", "moved", "kept", "shared", "taken", "beside"]
_SUSPECTED = ("shared", "beside")


class _Link(NamedTuple):
    """Result ``result`` of class ``source`` as operand ``operand`` of class ``reader``, or as its copy."""

    source: int
    result: int
    reader: int
    operand: int


class _Buffer(NamedTuple):
    """The buffer that planning node ``first`` has made of a value of node ``source``, in ``region``; those that read
    it."""

    region: int
    source: int
    first: int
    readers: list[int]


@dataclass(slots=True)
class _Usages:
    """``nodes[cluster]``; ``edges[a, b]`` and ``suspected[a, b]``, a < b."""

    nodes: list[list[Usage]]
    edges: dict[tuple[int, int], list[Usage]] = field(default_factory=dict)
    suspected: dict[tuple[int, int], list[Usage]] = field(default_factory=dict)


def usages(graph: StrategyGraph, live: Liveness, times: Sequence[int] | None = None) -> _Usages:
    """All usages of a graph's clusters and of the edges between them, bytes on a device. With ``times``, only those
    with an interval that one of these is inside of."""
    run = _Run(graph, live, times)
    run.values()
    run.workspaces()
    run.donated()
    return run.summed()


class _Run:
    def __init__(self, graph: StrategyGraph, live: Liveness, times: Sequence[int] | None = None) -> None:
        self.graph, self.live, self.flat, self.times = graph, live, graph.flat, times
        self.copies = {this.copy_of: c for c, this in enumerate(graph.classes) if this.copy_of is not None}
        self.spans: dict[tuple[_Link, _Kind, float], list[Interval]] = {}
        self.own: dict[tuple[int, int, float], list[Interval]] = {}
        """(class, operand or result as `tensor_bytes` counts them, weight) → intervals."""
        self.chains: dict[tuple[tuple[int, ...], int, bool, bool], Any] = {}
        self.reduced: dict[tuple[tuple[int, ...], int, bool], Any] = {}
        self.link_of: dict[tuple[int, int], _Link] = {}
        """(planning node, operand) → the last link on its way there."""
        self.buffers: dict[tuple[int, int], list[tuple[_Link, _Buffer]]] = {}
        """(planning node, result) → what is made of it where it is resharded."""
        self.of_copy: dict[tuple[int, int], list[tuple[int, _Link]]] = {}
        """(planning node, result) → the readers of its copy."""
        self.alike: set[tuple[int, int]] = set()
        """(planning node, operand) of readers that may share their buffer with others."""
        self._follow_links()

    def _follow_links(self) -> None:
        flat, graph = self.flat, self.graph
        made: dict[tuple[int, int], _Buffer] = {}
        beside: dict[Any, list[tuple[_Link, _Buffer]]] = {}
        for n, links in enumerate(flat.links):
            reader = graph.class_of[n]
            for i, link in enumerate(links):
                if link is None:
                    continue
                region = flat.exec_region[flat.first_edge[n] + i]
                source = graph.class_of[link[0]]
                copy = self.copies.get((source, link[1]), -1)
                if (copy, 0) not in graph.classes[reader].inputs[i]:
                    self.link_of[n, i] = _Link(source, link[1], reader, i)
                    buffer = _Buffer(region, link[0], n, [n])
                    self.buffers.setdefault(link, []).append((self.link_of[n, i], buffer))
                    beside.setdefault((link, region, False), []).append((self.link_of[n, i], buffer))
                    continue
                self.link_of[n, i] = _Link(copy, 0, reader, i)
                if link not in made:
                    made[link] = _Buffer(region, link[0], n, [])
                    self.buffers.setdefault(link, []).append((_Link(source, link[1], copy, 0), made[link]))
                made[link].readers.append(n)
                self.of_copy.setdefault(link, []).append((n, self.link_of[n, i]))
                alone = _Buffer(region, link[0], n, [n])
                beside.setdefault((link, region, True), []).append((self.link_of[n, i], alone))
                self._resharded(self.link_of[n, i], _span(flat, self.live, alone))

        for readers in beside.values():
            if len(readers) > 1:
                self.alike.update((buffer.first, link.operand) for link, buffer in readers)
            spans = sorted((*_span(flat, self.live, buffer), link) for link, buffer in readers)
            for (_, before, _), (start, _, link) in itertools.pairwise(spans):
                self._add(link, "shared", (before, start))

    def values(self) -> None:
        """Every result, and what is made of it for its readers."""
        for n, c in enumerate(self.graph.class_of):
            count = len(self.graph.classes[c].signature.operand_types)
            for r in range(len(self.flat.result_types[n])):
                interval = self.live.interval(n, r)
                ways = self.buffers.get((n, r), [])
                stays = self.flat.kind[n] in ("arg", "carry")
                if interval is not None and not stays:
                    for reader, link in self.of_copy.get((n, r), ()):  # it cannot be made again where it is resharded
                        self._add(link, "made", (interval[1], max(reader, interval[0]) + 1))
                if len(ways) != 1 or interval is None or stays:
                    for link, buffer in ways:
                        self._resharded(link, _span(self.flat, self.live, buffer))
                        if interval is not None and not stays:
                            self._add(link, "made", (interval[1], max(buffer.first, interval[0]) + 1))
                    if interval is not None:
                        self.own.setdefault((c, count + r, 1.0), []).append(interval)
                    continue
                link, buffer = ways[0]
                (start, stop), (made, needed) = interval, _span(self.flat, self.live, buffer)
                cut = max(buffer.first, start) + 1
                both = max(cut, min(stop, needed))
                self.own.setdefault((c, count + r, 1.0), []).append((start, min(cut, stop)))
                self._add(link, "made", (stop, cut))
                self._add(link, "wanted", (cut, both))
                self._add(link, "kept", (both, stop))
                self._add(link, "moving" if self.live.in_place else "moved", (made, min(cut, both)))
                self._add(link, "moved", (both, needed))
                self._add(link, self._chain(link), (made, made + 1))

    def workspaces(self) -> None:
        """What operators need beside operands and results."""
        for n, spaces in self.live.workspaces.items():
            for t, weight, end in spaces:
                if (n, t) in self.link_of:
                    self._add(self.link_of[n, t], "taken", (n, end), weight)
                    if (n, t) in self.alike:
                        self._add(self.link_of[n, t], "beside", (n, end), weight)
                else:
                    self.own.setdefault((self.graph.class_of[n], t, weight), []).append((n, end))

    def donated(self) -> None:
        """Copies of donated arguments that are read, as they are, by what their new values do not depend on."""
        for arg, (new, first, readers) in self.live.loose.items():
            self._add(self.buffers[arg, 0][0][0], "kept", (first, max(new, *(n for n, _ in readers)) + 1))

    def _resharded(self, link: _Link, span: Interval) -> None:
        """A buffer beside the original, which stays."""
        self._add(link, "moved", span)
        self._add(link, self._chain(link), (span[0], span[0] + 1))

    def _chain(self, link: _Link) -> _Kind:
        return "copied chain" if lays_out(self.graph, link.reader) else "chain"

    def _add(self, link: _Link, kind: _Kind, interval: Interval, weight: float = 1.0) -> None:
        if interval[0] < interval[1]:
            self.spans.setdefault((link, kind, weight), []).append(interval)

    def summed(self) -> _Usages:
        """Bytes for all that was found, per cluster and per edge."""
        graph = self.graph
        out = _Usages([[] for _ in graph.costs])
        groups = {pair: (first_of(e.rows), first_of(e.cols)) for pair, e in graph.edges.items()}
        for (c, t, weight), spans in self.own.items():
            if not self._counts(spans):
                continue
            this = graph.classes[c]
            _put(out.nodes[this.cluster], weight * tensor_bytes(graph, c, t)[this.follow], spans)
        for (link, kind, weight), spans in self.spans.items():
            if not self._counts(spans):
                continue
            source, reader = graph.classes[link.source], graph.classes[link.reader]
            have = source.signature.results[link.result][source.follow]
            want = reader.signature.operands[link.operand][reader.follow]
            value_type = reader.signature.operand_types[link.operand]
            if kind == "wanted":
                sizes = value_type.size_bytes / graph.mesh.space(value_type).shards
                _put(out.nodes[reader.cluster], sizes[want], spans)
                continue
            a, b = source.cluster, reader.cluster
            if a == b and kind in _SUSPECTED:
                continue
            if a == b:
                _put(out.nodes[a], weight * self._pair_bytes(value_type, kind, have, want), spans)
                continue
            first = groups[min(a, b), max(a, b)]
            rows, cols = (have[first[a > b]], want[first[a < b]])
            pair = weight * self._pair_bytes(value_type, kind, rows[:, None], cols[None, :])
            edges = out.suspected if kind in _SUSPECTED else out.edges
            _put(edges.setdefault((min(a, b), max(a, b)), []), pair if a < b else pair.T, spans)
        return out

    def _counts(self, spans: Sequence[Interval]) -> bool:
        times = self.times
        return times is None or any(start < t < stop for start, stop in spans for t in times)

    def _pair_bytes(self, value_type: TensorType, kind: _Kind, have: Any, want: Any) -> Any:
        """Bytes of a value under codes ``have`` and ``want``, which broadcast."""
        sizes = value_type.size_bytes / self.graph.mesh.space(value_type).shards
        if kind in ("kept", "taken"):
            return np.where(have == want, sizes[want], 0.0)
        if kind in ("moved", "beside"):
            return np.where(have == want, 0.0, sizes[want])
        if kind == "moving":
            return np.where((have == want) | self._reduced(value_type)[have, want], 0.0, sizes[want])
        if kind == "shared":
            return np.where(sizes[want] > sizes[have], sizes[want], 0.0)
        if kind == "made":
            return np.where(have == want, 0.0, sizes[have])
        copies = kind == "copied chain"
        key = (value_type.shape, value_type.size_bytes, value_type.is_key, copies)
        if key not in self.chains:
            self.chains[key] = chain_bytes(self.graph.mesh, value_type, copies=copies)
        return self.chains[key][have, want]

    def _reduced(self, value_type: TensorType) -> Any:
        """bool[codes, codes]: True where an all-reduce alone leads from one code to another."""
        key = (value_type.shape, value_type.size_bytes, value_type.is_key)
        if key not in self.reduced:
            self.reduced[key] = reduced_alone(self.graph.mesh, value_type)
        return self.reduced[key]


def _span(flat: Flat, live: Liveness, buffer: _Buffer) -> Interval:
    """When the buffer exists: `peak.buffer_spans` of a single value that is not resharded further."""
    source = buffer.source
    start = max(buffer.first, source)
    stop = max([start + 1, *(max(int(live.ends[u]), source + 1) for u in buffer.readers)])
    home = flat.region[buffer.first]
    if home != buffer.region and home in flat.span and flat.kind[buffer.first] == "op":
        first, last = flat.span[home]
        start, stop = min(start, first), max(stop, last)
    return start, stop


def tensor_bytes(graph: StrategyGraph, c: int, t: int) -> Any:
    """float64[strategies of class c]: bytes on a device of operand t, or of result t − number of operands; or of a
    workspace that is no multiple of these."""
    signature = graph.classes[c].signature
    count = len(signature.operand_types)
    if t >= count:
        return signature.usage[t - count] if signature.workspace is None else signature.workspace
    codes, value_type = signature.operands[t], signature.operand_types[t]
    if codes is None:
        return np.zeros(signature.size)
    return graph.mesh.stored_bytes(value_type, codes)


def chain_bytes(mesh: Mesh, value_type: TensorType, *, copies: bool) -> Any:
    """float64[codes, codes]: bytes of the steps on the way from one code to another before the last, and, where there
    are ``copies``, of the largest that one of them makes."""
    space = mesh.space(value_type)
    before = mesh.last_steps(value_type)
    sizes = value_type.size_bytes / space.shards
    copied = np.zeros(before.shape)
    for step in space.steps if copies else ():
        copied[step[0], step[1]] = copied_bytes(mesh, value_type, step[0], step[1:])
    start = np.arange(len(sizes))[:, None]
    at = np.broadcast_to(np.arange(len(sizes)), before.shape)
    total, largest = np.zeros(before.shape), np.zeros(before.shape)
    previous, last = before, True
    while (open_ := previous >= 0).any():
        previous = np.where(open_, previous, at)
        largest = np.maximum(largest, copied[previous, at])
        if not last:
            total += np.where(open_, sizes[at], 0.0)
        at, last = previous, False
        previous = before[start, at]
    return total + largest


def reduced_alone(mesh: Mesh, value_type: TensorType) -> Any:
    """bool[codes, codes]: True where the chain from one code to another is one all-reduce."""
    before = mesh.last_steps(value_type)
    out = np.zeros(before.shape, bool)
    for at, to, kind, *_ in mesh.space(value_type).steps:
        out[at, to] |= kind == "all-reduce" and before[at, to] == at
    return out


def _put(usages: list[Usage], size: Any, spans: list[Interval]) -> None:
    """Adds a usage, to one of the same intervals where there is one."""
    if not size.any():
        return
    intervals = tuple(spans)
    for k, (other, found) in enumerate(usages):
        if found == intervals:
            usages[k] = (other + size, intervals)
            return
    usages.append((size, intervals))
