"""Seconds of a compiled program from its text: `estimate`.

A computation's instructions follow each other; each takes

    max(FLOPs / rate, bytes / memory bandwidth) + launch

(Williams, Waterman, Patterson, "Roofline", CACM 2009). What the program starts and later waits for goes on beside the
instructions in between: a copy uses what they leave of the memory's time, a collective the wires, one after another
(`_Clock`), and a share of its seconds is taken from the instructions beside it. A collective over several mesh axes
takes the faster of axis by axis and one ring over all; its tensors travel together where the compiler has combined
them.

Rates are given (`Rates`): those that a plan is made with, so that the two differ in what is done, not in how fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost.collectives import collective_s
from autopar.cost.kernels import memory_bytes_per_s, reached_flops_per_s
from autopar.intra_op.fusion import FUSIONS
from autopar.intra_op.overlap import SHARES
from autopar.ir.cluster import LinkSpec, LogicalMesh, MeshAxis
from autopar.verify.hlo_collectives import Groups, HloCollective, axes_of, collectives
from autopar.verify.hlo_costs import Work, works
from autopar.verify.hlo_loops import trip_count
from autopar.verify.hlo_text import Computation, Instruction, Module

DTYPES = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "s8": "int8", "u8": "int8",
    "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
}  # fmt: skip
"""HLO's name of a dtype → JAX's, of those for which devices have rates."""
_STARTS, _DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
"""Custom calls in the fusions with which a TPU's program starts a collective, and waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the devices of a mesh and the links along its axes can do. ``flops_per_s`` by JAX's names of dtypes; those
    that are not listed have float32's. ``launch_s``: from one kernel to the next; ``beside``: of a collective's seconds
    beside instructions, what these take longer."""

    flops_per_s: tuple[tuple[str, float], ...]
    memory_bytes_per_s: float
    axes: tuple[MeshAxis, ...]
    launch_s: float = 0.0
    beside: float = 0.0

    @classmethod
    def of(cls, mesh: LogicalMesh) -> Rates:
        """Those that a plan is made with: of products what large ones reach."""
        device = mesh.device
        return cls(
            flops_per_s=tuple((dtype, reached_flops_per_s(device, dtype)) for dtype, _ in device.flops_per_s),
            memory_bytes_per_s=memory_bytes_per_s(device), axes=mesh.axes, launch_s=FUSIONS[device.platform].launch_s,
            beside=SHARES[device.platform],
        )  # fmt: skip

    def product_flops_per_s(self, dtype: str) -> float:
        """FLOP/s of products whose operands are of an HLO dtype."""
        table = dict(self.flops_per_s)
        return table.get(DTYPES.get(dtype, "float32"), table["float32"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A program's seconds (of collectives those that show, and those beside compute), and a device's FLOPs and bytes
    between memory and chip. ``opaque``: kernels whose FLOPs cannot be seen, of which only the bytes count.
    ``assumes_trips``: True where a loop's length is not known."""

    compute_s: float
    communication_s: float
    hidden_s: float
    flops: float
    memory_bytes: float
    opaque: tuple[str, ...]
    assumes_trips: bool

    @property
    def seconds(self) -> float:
        """From the first instruction to the last."""
        return self.compute_s + self.communication_s


def estimate(module: Module, rates: Rates, unknown_trips: int = 1) -> Estimate:
    """What a run of ``module`` takes; ``unknown_trips``: of loops whose length it does not say."""
    found, moved = works(module), collectives(module)
    clock = _Clocks(module, rates, found, moved, unknown_trips).of(module.entry)

    def times(work: Work) -> int:
        return unknown_trips * work.below if work.trips is None else work.trips

    shown_s = clock.now_s - clock.busy_s
    hidden_s = clock.wire_s - shown_s
    hidden_s = hidden_s if hidden_s > 1e-9 * clock.wire_s else 0.0  # what is less is rounding
    return Estimate(
        compute_s=clock.busy_s, communication_s=shown_s + rates.beside * hidden_s,
        hidden_s=(1 - rates.beside) * hidden_s,
        flops=math.fsum(times(w) * count for w in found for _, count in w.flops),
        memory_bytes=math.fsum(times(w) * w.bytes for w in found),
        opaque=tuple(sorted({w.opaque for w in found if w.opaque})),
        assumes_trips=any(w.trips is None for w in found) or any(c.trips is None for c in moved),
    )  # fmt: skip


@dataclass(slots=True)
class _Clock:
    """Seconds of a computation as far as it has run: ``now_s``, of these busy with instructions, and of its wires."""

    now_s: float = 0.0
    busy_s: float = 0.0
    wire_s: float = 0.0
    free_s: float = 0.0
    """When the wires have moved all that was started."""
    due_s: dict[str, float] = field(default_factory=dict[str, float])
    """When collectives that have been started have arrived, by the instruction that starts them."""
    copies_s: dict[str, float] = field(default_factory=dict[str, float])
    """Copies that have been started, and what they still need of the memory's time, the first first."""

    def move(self, seconds: float) -> float:
        """A collective goes on; when it has arrived."""
        self.free_s = max(self.now_s, self.free_s) + seconds
        self.wire_s += seconds
        return self.free_s

    def add(self, inner: _Clock, times: int) -> None:
        """Another computation runs in its place."""
        self.now_s += times * inner.now_s
        self.busy_s += times * inner.busy_s
        self.wire_s += times * inner.wire_s

    def work(self, product_s: float, memory_s: float, launch_s: float) -> None:
        """An instruction; copies use what it leaves of the memory's time."""
        idle_s = max(0.0, product_s - memory_s)
        for name, left_s in self.copies_s.items():
            used_s = min(idle_s, left_s)
            self.copies_s[name] -= used_s
            idle_s -= used_s
        seconds = launch_s + max(product_s, memory_s)
        self.now_s += seconds
        self.busy_s += seconds


class _Clocks:
    """One run of each computation."""

    def __init__(
        self, module: Module, rates: Rates, found: Sequence[Work], moved: Sequence[HloCollective], unknown_trips: int
    ) -> None:
        self.module, self.rates, self.unknown_trips = module, rates, unknown_trips
        self.works = {(w.computation, w.instruction): w for w in found}
        self.moved: dict[str, dict[str, list[HloCollective]]] = {}
        """Computation → instruction → what it moves."""
        for row in moved:
            self.moved.setdefault(row.computation, {}).setdefault(row.instruction, []).append(row)
        self.known: dict[str, _Clock] = {}

    def of(self, name: str) -> _Clock:
        """Seconds of a computation; what it has started, it waits for at its end."""
        if name not in self.known:
            clock, computation = _Clock(), self.module.computations[name]
            for i in computation.instructions.values():
                self._step(clock, computation, i)
            clock.now_s = max(clock.now_s, clock.free_s)
            self.known[name] = clock
        return self.known[name]

    def _step(self, clock: _Clock, computation: Computation, i: Instruction) -> None:
        if i.opcode == "while":
            trips = trip_count(self.module, computation, i)
            count = self.unknown_trips if trips is None else trips
            body, condition = i.called_as("body"), i.called_as("condition")
            assert body is not None and condition is not None, f"{i.name} has no body"
            clock.add(self.of(body), count)
            clock.add(self.of(condition), count + (trips is not None))
        elif i.opcode in ("call", "conditional"):
            for called in i.called:
                clock.add(self.of(called), 1)
        self._collective(clock, computation, i)
        work = self.works.get((computation.name, i.name))
        if work is not None:
            self._work(clock, work)
        if i.opcode.endswith("-done"):
            clock.now_s = max(clock.now_s, clock.due_s.get(i.operands[0], 0.0))
        elif self._calls(i, _DONE):
            clock.now_s = max([clock.now_s, *(clock.due_s[s] for s in self._started(computation, i, clock.due_s))])

    def _work(self, clock: _Clock, work: Work) -> None:
        memory_s = work.bytes / self.rates.memory_bytes_per_s
        if work.is_start:
            clock.copies_s[work.instruction] = memory_s
            return
        left_s = clock.copies_s.pop(work.awaits, 0.0)
        clock.now_s += left_s
        clock.busy_s += left_s
        product_s = sum(count / self.rates.product_flops_per_s(dtype) for dtype, count in work.flops)
        clock.work(product_s, memory_s, self.rates.launch_s if product_s or memory_s else 0.0)

    def _collective(self, clock: _Clock, computation: Computation, i: Instruction) -> None:
        rows = self.moved.get(computation.name, {}).get(i.name, [])
        if i.opcode in ("fusion", "async-start"):
            rows = [row for name in i.called for each in self.moved.get(name, {}).values() for row in each]
        if not rows:
            return
        arrived_s = clock.move(self._seconds(rows))
        if i.opcode.endswith("-start") or self._calls(i, _STARTS):
            clock.due_s[i.name] = arrived_s
        else:
            clock.now_s = arrived_s

    def _seconds(self, rows: Sequence[HloCollective]) -> float:
        first = rows[0]
        return groups_s(first.kind, first.groups, sum(r.operand_bytes for r in rows), self.rates.axes)

    def _calls(self, i: Instruction, target: str) -> bool:
        """True for a fusion that holds such a custom call."""
        if i.opcode != "fusion":
            return False
        return any(x.target == target for n in i.called for x in self.module.computations[n].instructions.values())

    def _started(self, computation: Computation, i: Instruction, due_s: Mapping[str, float]) -> set[str]:
        """What has been started of that which an instruction is handed, through others."""
        found: set[str] = set()
        seen: set[str] = set()
        left = list(i.operands)
        while left:
            name = left.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in due_s:
                found.add(name)
            elif (other := computation.instructions[name]).opcode in ("fusion", "get-tuple-element"):
                left += other.operands
        return found


def groups_s(kind: str, groups: Groups, operand_bytes: float, axes: Sequence[MeshAxis]) -> float:
    """Seconds of one collective among ``groups`` of the devices of a mesh; ``operand_bytes`` per device before it."""
    shape, names = [a.size for a in axes], [a.name for a in axes]
    by_name = {a.name: a for a in axes}
    try:
        along = [by_name[n] for n in axes_of(groups, shape, names, permute=kind == "collective-permute")]
    except ValueError:  # no axes have these groups: a ring over the slowest link
        slowest = min(axes, key=lambda a: a.link.bytes_per_s)
        return float(collective_s(kind, max(map(len, groups)), operand_bytes, slowest.link))
    along = [a for a in axes if a in along]
    if kind == "collective-permute":
        return float(max(collective_s(kind, 2, operand_bytes, a.link) for a in along))
    apart, remaining = 0.0, operand_bytes
    for a in sorted(along, key=lambda a: a.link.bytes_per_s, reverse=kind != "all-gather"):
        link = a.exchange if kind == "all-to-all" and a.exchange is not None else a.link
        apart += float(collective_s(kind, a.size, remaining, link))
        if kind in ("all-reduce", "reduce-scatter"):
            remaining /= a.size
        elif kind == "all-gather":
            remaining *= a.size
    if kind == "all-to-all" or len(along) == 1:
        return apart
    return min(apart, float(collective_s(kind, math.prod(a.size for a in along), operand_bytes, _ring(along))))


def _ring(axes: Sequence[MeshAxis]) -> LinkSpec:
    """What one ring over several axes sees: the rings of an outer axis share their links, and it has all of them."""
    inner, rate = 1, math.inf
    for a in reversed(axes):
        rate = min(rate, inner * a.link.bytes_per_s)
        inner *= a.size
    slowest = min(axes, key=lambda a: a.link.bytes_per_s)
    return LinkSpec(latency_s=max(a.link.latency_s for a in axes), bytes_per_s=rate, fabric=slowest.link.fabric)
