"""Bytes per device over time under a plan: values, the buffers of their reshardings, workspaces.

In: `Decisions`, and when values are live (`Liveness`). Out: `Spans`, the sum of which is

    live(t) = Σ_{i : start_i ≤ t < stop_i} size_i                                                     `Spans.live_bytes`

over values (`value_spans`), resharded buffers and the copies that collectives work on (`buffer_spans`), workspaces
(`_workspaces`), copies of donated arguments (`_loose`), and on TPUs what scatters need beside (`_scatters`) and the
layouts of convolutions pad (`_convolutions`), less what stays on the chip (`cost.on_chip`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.cost.on_chip import FILLED, LARGEST, ON_CHIP_BYTES
from autopar.cost.products import family
from autopar.intra_op.decisions import Buffer, Decisions
from autopar.intra_op.flatten import Flat
from autopar.intra_op.liveness import Liveness
from autopar.intra_op.usages import tensor_bytes
from autopar.intra_op.uses import Uses
from autopar.primitives.indexing import whole_rows


@dataclass(frozen=True, slots=True)
class Spans:
    """All that is in memory under a plan: float64 bytes per device, int64 start and stop of each. ``value`` is int64:
    which value it is; ``buffer`` which of the plan's resharded ones (`Decisions.buffers`); −1 for what is none."""

    size: Any
    start: Any
    stop: Any
    value: Any
    buffer: Any
    horizon: int

    def live_bytes(self, chosen: Any = None) -> Any:
        """float64[times]: bytes per device, of those ``chosen`` (bool[rows]) or of all."""
        delta = np.zeros(self.horizon + 1)
        size = self.size if chosen is None else np.where(chosen, self.size, 0.0)
        np.add.at(delta, self.start, size)
        np.subtract.at(delta, np.minimum(self.stop, self.horizon), size)
        return np.cumsum(delta)[: self.horizon]


def live_bytes(out: Decisions, live: Liveness) -> Any:
    """float64[times]: bytes of main memory per device under a plan."""
    found = spans(out, live)
    total = found.live_bytes()
    chip_bytes = ON_CHIP_BYTES.get(family(out.graph.mesh.logical.device), 0)
    if not chip_bytes:
        return total
    flat = out.graph.flat
    made = np.array([flat.kind[n] == "op" for n in flat.maker], bool)
    may_stay = (found.size <= LARGEST * chip_bytes) & (found.stop < found.horizon)
    may_stay &= (found.value < 0) | made[found.value]
    stays = np.minimum(FILLED * chip_bytes, found.live_bytes(may_stay))
    for start, stop in flat.span.values():  # a loop's body has it
        stays[start:stop] = 0.0
    return total - stays


def spans(out: Decisions, live: Liveness) -> Spans:
    """What is in memory under a plan, and when."""
    return _Bytes(out, live).run()


@dataclass(slots=True)
class _Rows:
    """Columns of `Spans`, in pieces."""

    size: list[Any] = field(default_factory=list)
    start: list[Any] = field(default_factory=list)
    stop: list[Any] = field(default_factory=list)
    value: list[Any] = field(default_factory=list)
    buffer: list[Any] = field(default_factory=list)


class _Bytes:
    def __init__(self, out: Decisions, live: Liveness) -> None:
        self.out, self.live = out, live
        self.graph, self.flat, self.uses = out.graph, out.graph.flat, out.graph.uses
        self.rows = _Rows()
        self.resharded = np.zeros(len(self.uses.user), bool)
        """Edges that read a resharded buffer."""
        self.own = np.zeros(len(self.uses.user), bool)
        """Those of them whose buffer nothing else reads."""

    def run(self) -> Spans:
        """All of it."""
        self._values()
        if self.out.buffers:
            self._buffers()
        self._workspaces()
        self._loose()
        if self.graph.mesh.logical.device.platform == "tpu":
            self._scatters()
            self._convolutions()
        rows = self.rows
        columns = (np.concatenate(c) for c in (rows.size, rows.start, rows.stop, rows.value, rows.buffer))
        return Spans(*columns, horizon=self.live.horizon)

    def _add(self, size: Any, start: Any, stop: Any, value: Any = -1, buffer: int = -1) -> None:
        rows, shape = self.rows, np.shape(start)
        rows.size.append(size)
        rows.start.append(start)
        rows.stop.append(stop)
        rows.value.append(np.broadcast_to(np.asarray(value), shape))
        rows.buffer.append(np.full(shape, buffer))

    def _size(self, c: int, r: int) -> float:
        return float(self.graph.classes[c].signature.usage[r][self.out.strategy[c]])

    def _values(self) -> None:
        size, start, stop = value_spans(self.out, self.live)
        self._add(size, start, stop, np.arange(len(size)))

    def _buffers(self) -> None:
        uses = self.uses
        for number, buffer in enumerate(self.out.buffers):
            start, stop = buffer_spans(self.flat, uses, self.live, buffer)
            self._add(np.full(len(start), buffer.size_bytes), start, stop, buffer=number)
            self._add(np.full(len(start), buffer.copy_bytes), start, start + 1)
            for k in buffer.readers:
                edges = uses.edges(buffer.pattern, k)
                self.resharded[edges] = True
                self.own[edges] = len(buffer.readers) == 1

    def _workspaces(self) -> None:
        """One that follows a resharding for its reader alone takes the place of that buffer."""
        rows: list[tuple[float, int, int]] = []
        for n, spaces in self.live.workspaces.items():
            c = self.graph.class_of[n]
            first, count = self.flat.first_edge[n], len(self.flat.operand_types[n])
            for t, weight, end in spaces:
                if t >= count or not self.own[first + t]:
                    size = tensor_bytes(self.graph, c, t)[self.out.strategy[c]]
                    rows.append((weight * float(size), n, end))
        if rows:
            size, start, stop = zip(*rows, strict=True)
            self._add(np.array(size), np.array(start), np.array(stop))

    def _loose(self) -> None:
        """Donated arguments of which a copy is read."""
        for arg, (new, first, readers) in self.live.loose.items():
            direct = [n for n, i in readers if not self.resharded[self.flat.first_edge[n] + i]]
            if direct:
                size = self._size(self.graph.class_of[arg], 0)
                self._add(np.array([size]), np.array([first]), np.array([max(new, *direct) + 1]))

    def _scatters(self) -> None:
        """XLA for TPUs (libtpu 0.0.42) lays out by rows what few of its rows are scattered into or looked up in,
        however much that pads, and copies it (`Mesh.by_rows_bytes`). A sum that is reduced stays beside its result: an
        all-reduce's twice, a reduce-scatter's once."""
        flat, uses, mesh = self.flat, self.uses, self.graph.mesh
        nodes: list[int] = []
        """Those that scatter."""
        for n, node in enumerate(flat.node):
            if node is None or not node.primitive.startswith(("scatter", "gather")):
                continue
            scatters, c = node.primitive != "gather", self.graph.class_of[n]
            signature, s = self.graph.classes[c].signature, self.out.strategy[c]
            t = (signature.result_types if scatters else signature.operand_types)[0]
            codes = (signature.results if scatters else signature.operands)[0]
            if scatters:
                nodes.append(n)
            if codes is None or not whole_rows(node):
                continue
            if mesh.by_rows_bytes(t, codes[s]) > mesh.stored_bytes(t, codes[s]):
                self._add(np.array([mesh.by_rows_bytes(t, codes[s])]), np.array([n]), np.array([n + 1]))
        patterns: set[int] = set()
        for buffer in self.out.buffers:
            makers = uses.maker[uses.value[uses.edges(buffer.pattern, buffer.first)]]
            sums = np.isin(makers, nodes)
            if buffer.pattern in patterns or not sums.any():
                continue
            patterns.add(buffer.pattern)
            source = uses.patterns[buffer.pattern].source
            t = self.graph.classes[source[0]].signature.result_types[source[1]]
            if not mesh.space(t).has_unreduced[self.out.result_code(*source)]:
                continue
            _, stop = buffer_spans(flat, uses, self.live, buffer)
            times = 2 if buffer.pattern in self.out.reduced else 1
            size = times * self._size(self.graph.class_of[int(makers[sums][0])], 0)
            self._add(np.full(int(sums.sum()), size), makers[sums], stop[sums])

    def _convolutions(self) -> None:
        """XLA for TPUs (libtpu 0.0.42) has batch and features of what a convolution reads or makes as rows and lanes,
        which pads much where there are few of both: images."""
        flat, mesh, starts, stops = self.flat, self.graph.mesh, self.rows.start[0], self.rows.stop[0]
        held: dict[int, tuple[float, int, int]] = {}
        """Value → the most that its padding adds, from when to when."""
        for n, node in enumerate(flat.node):
            if node is None or node.primitive != "conv_general_dilated":
                continue
            c = self.graph.class_of[n]
            signature, s = self.graph.classes[c].signature, self.out.strategy[c]
            numbers, edge = node.params["dimension_numbers"], flat.first_edge[n]
            sides = [
                (flat.source[edge], signature.operand_types[0], signature.operands[0], numbers["lhs_spec"]),
                (flat.source[edge + 1], signature.operand_types[1], signature.operands[1], numbers["rhs_spec"]),
                (flat.first_value[n], signature.result_types[0], signature.results[0], numbers["out_spec"]),
            ]
            for value, value_type, codes, spec in sides:
                if value < 0 or codes is None:
                    continue
                stored = float(mesh.stored_bytes(value_type, codes[s]))
                more = float(mesh.convolved_bytes(value_type, codes[s], spec)) - stored
                if more <= 0:
                    continue
                start, stop = int(starts[value]), int(stops[value])
                if stop <= start or flat.kind[flat.maker[value]] == "arg":  # a copy, from its first use to its last
                    start, stop, more = n, n + 1, more + stored
                size, first, last = held.get(value, (0.0, start, stop))
                held[value] = max(size, more), min(first, start), max(last, stop)
        if held:
            size, start, stop = (np.array(column) for column in zip(*held.values(), strict=True))
            self._add(size, start, stop)


def value_spans(out: Decisions, live: Liveness) -> tuple[Any, Any, Any]:
    """float64[values], int64[values] twice: bytes of each value as it is made, and its time in memory (none where it
    starts as it stops): one that is resharded for all its readers goes once the last copy is made, or becomes it."""
    graph, uses, start, stop = out.graph, out.graph.uses, live.start, live.stop.copy()
    sizes = [float(graph.classes[c].signature.usage[r][out.strategy[c]]) for c, r in uses.made]
    size = np.array(sizes)[uses.made_as] if sizes else np.zeros(len(start))
    stands = stop > start
    if out.moved:
        moved, direct = np.full(len(start), -1), np.zeros(len(start), bool)
        taken = np.zeros(len(start), int)
        for p, position in out.moved.items():
            edges = uses.edges(p, position)
            moved[uses.value[edges]] = np.maximum(moved[uses.value[edges]], uses.user[edges])
        for p in out.direct:
            direct[uses.value[uses.edges(p, 0)]] = True
        for p in out.reduced if live.in_place else ():
            values = uses.value[uses.edges(p, 0)]
            taken[values] = 1
            for value in values[~stands[values]].tolist():
                operand = _becomes(graph.flat, value, stands)
                if operand >= 0 and stop[operand] == moved[value] + 1:
                    stop[operand] -= 1
        goes = (moved >= 0) & ~uses.stays
        done = np.maximum(moved, start) + 1 - taken
        stop = np.where(goes, np.where(direct, np.maximum(stop, done), done), stop)
    return size, start, np.where(stands, stop, start)


def _becomes(flat: Flat, value: int, stands: Any) -> int:
    """What is in memory of that which an elementwise operator makes ``value`` of on the fly, and as large; −1: nothing.
    Where it dies as the value is reduced in place, that takes its place."""
    while value >= 0 and not stands[value]:
        n = flat.maker[value]
        size, first = flat.result_types[n][0].size_bytes, flat.first_edge[n]
        same = (flat.source[first + i] for i, t in enumerate(flat.operand_types[n]) if t.size_bytes == size)
        value = next((v for v in same if v >= 0), -1)
    return value


def buffer_spans(flat: Flat, uses: Uses, live: Liveness, buffer: Buffer) -> tuple[Any, Any]:
    """int64[values of the buffer's pattern] twice: start and stop. A resharded buffer is made for its first reader and
    lives as long as any needs it; one made before a loop for readers inside it, for all of the loop. What a loop's end
    reads is made where the value is."""
    edges = uses.edges(buffer.pattern, buffer.first)
    first, source = uses.user[edges], uses.maker[uses.value[edges]]
    start = np.maximum(first, source)
    stop = start + 1 if not buffer.passing else source + 1
    for k in buffer.passing:
        stop = np.maximum(stop, uses.user[uses.edges(buffer.pattern, k)] + 1)
    for k in buffer.readers:
        reader = uses.user[uses.edges(buffer.pattern, k)]
        stop = np.maximum(stop, np.maximum(live.ends[reader], source + 1))
    n = int(first[0])
    home = flat.region[n]
    if home != uses.patterns[buffer.pattern].region and home in flat.span and flat.kind[n] == "op":
        start, stop = np.minimum(start, flat.span[home][0]), np.maximum(stop, flat.span[home][1])
    return start, stop
