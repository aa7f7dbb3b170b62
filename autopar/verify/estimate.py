"""Seconds of a compiled program from its text: `estimate`.

    seconds = Σ max(FLOPs / peak, bytes / memory bandwidth) + Σ collectives

over the instructions of `hlo_costs.works` and `hlo_collectives.collectives`, each as often as it runs (Williams,
Waterman, Patterson, "Roofline", CACM 2009). A copy that the program starts and later waits for uses first what the
instructions in between leave of the memory's time (`_compute_s`). A collective takes the α–β model's time of a ring
(Thakur, Rabenseifner, Gropp, 2005; `wire_s`), over several mesh axes the faster of axis by axis and one ring over all;
its tensors travel together where the compiler has combined them. Nothing runs beside a collective.

Rates are given, so that a plan's prices have no part in this beside the data sheet's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.ir.cluster import LinkSpec, LogicalMesh, MeshAxis
from autopar.verify.hlo_collectives import Groups, HloCollective, axes_of, collectives
from autopar.verify.hlo_costs import Work, works
from autopar.verify.hlo_text import Module

DTYPES = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "s8": "int8", "u8": "int8",
    "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
}  # fmt: skip
"""HLO's name of a dtype → JAX's, of those for which devices have rates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the devices of a mesh and the links along its axes can do. ``flops_per_s`` by JAX's names of dtypes; those
    that are not listed have float32's."""

    flops_per_s: tuple[tuple[str, float], ...]
    memory_bytes_per_s: float
    axes: tuple[MeshAxis, ...]

    @classmethod
    def of(cls, mesh: LogicalMesh) -> Rates:
        """Those that a plan was made with."""
        device = mesh.device
        return cls(flops_per_s=device.flops_per_s, memory_bytes_per_s=device.memory_bytes_per_s, axes=mesh.axes)

    def peak_flops_per_s(self, dtype: str) -> float:
        """FLOP/s of products whose operands are of an HLO dtype."""
        table = dict(self.flops_per_s)
        return table.get(DTYPES.get(dtype, "float32"), table["float32"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A program's seconds, and a device's FLOPs and bytes between memory and chip. ``opaque``: kernels whose FLOPs
    cannot be seen, of which only the bytes count. ``assumes_trips``: True where a loop's length is not known."""

    compute_s: float
    communication_s: float
    flops: float
    memory_bytes: float
    opaque: tuple[str, ...]
    assumes_trips: bool

    @property
    def seconds(self) -> float:
        """Of all: nothing is beside anything."""
        return self.compute_s + self.communication_s


def estimate(module: Module, rates: Rates, unknown_trips: int = 1) -> Estimate:
    """What a run of ``module`` takes; ``unknown_trips``: of loops whose length it does not say."""
    found, moved = works(module), collectives(module)

    def times(work: Work) -> int:
        return unknown_trips * work.below if work.trips is None else work.trips

    return Estimate(
        compute_s=_compute_s(found, rates, [times(w) for w in found]),
        communication_s=_communication_s(moved, rates, unknown_trips),
        flops=math.fsum(times(w) * count for w in found for _, count in w.flops),
        memory_bytes=math.fsum(times(w) * w.bytes for w in found),
        opaque=tuple(sorted({w.opaque for w in found if w.opaque})),
        assumes_trips=any(w.trips is None for w in found) or any(c.trips is None for c in moved),
    )


def _compute_s(found: Sequence[Work], rates: Rates, times: Sequence[int]) -> float:
    total = 0.0
    under_way: dict[tuple[str, str], float] = {}
    """Copies that have been started, and what they still need of the memory's time, the first first."""
    for work, count in zip(found, times, strict=True):
        memory_s = work.bytes / rates.memory_bytes_per_s
        if work.is_start:
            under_way[work.computation, work.instruction] = memory_s
            continue
        spent_s = under_way.pop((work.computation, work.awaits), 0.0) if work.awaits else 0.0
        product_s = sum(count / rates.peak_flops_per_s(dtype) for dtype, count in work.flops)
        idle_s = max(0.0, product_s - memory_s)
        for key in list(under_way):
            if not idle_s:
                break
            if key[0] == work.computation:
                used_s = min(idle_s, under_way[key])
                under_way[key] -= used_s
                idle_s -= used_s
        total += count * (spent_s + max(product_s, memory_s))
    return total


def _communication_s(moved: Iterable[HloCollective], rates: Rates, unknown_trips: int) -> float:
    together: dict[int, list[HloCollective]] = {}
    for row in moved:
        together.setdefault(row.place, []).append(row)
    total = 0.0
    for rows in together.values():
        first = rows[0]
        count = unknown_trips * first.below if first.trips is None else first.trips
        total += count * groups_s(first.kind, first.groups, sum(r.operand_bytes for r in rows), rates.axes)
    return total


def groups_s(kind: str, groups: Groups, operand_bytes: float, axes: Sequence[MeshAxis]) -> float:
    """Seconds of one collective among ``groups`` of the devices of a mesh; ``operand_bytes`` per device before it."""
    shape, names = [a.size for a in axes], [a.name for a in axes]
    by_name = {a.name: a for a in axes}
    try:
        along = [by_name[n] for n in axes_of(groups, shape, names, permute=kind == "collective-permute")]
    except ValueError:  # no axes have these groups: a ring over the slowest link
        slowest = min(axes, key=lambda a: a.link.bytes_per_s)
        return wire_s(kind, max(map(len, groups)), operand_bytes, slowest.link)
    along = [a for a in axes if a in along]
    if kind == "collective-permute":
        return max(wire_s(kind, 2, operand_bytes, a.link) for a in along)
    apart, remaining = 0.0, operand_bytes
    for a in sorted(along, key=lambda a: a.link.bytes_per_s, reverse=kind != "all-gather"):
        link = a.exchange if kind == "all-to-all" and a.exchange is not None else a.link
        apart += wire_s(kind, a.size, remaining, link)
        if kind in ("all-reduce", "reduce-scatter"):
            remaining /= a.size
        elif kind == "all-gather":
            remaining *= a.size
    if kind == "all-to-all" or len(along) == 1:
        return apart
    return min(apart, wire_s(kind, math.prod(a.size for a in along), operand_bytes, _ring(along)))


def _ring(axes: Sequence[MeshAxis]) -> LinkSpec:
    """What one ring over several axes sees: the rings of an outer axis share their links, and it has all of them."""
    inner, rate = 1, math.inf
    for a in reversed(axes):
        rate = min(rate, inner * a.link.bytes_per_s)
        inner *= a.size
    return LinkSpec(latency_s=max(a.link.latency_s for a in axes), bytes_per_s=rate)


def wire_s(kind: str, size: int, operand_bytes: float, link: LinkSpec) -> float:
    """Seconds of a ring of ``size`` devices: each hop takes α and what it carries.

    Raises ValueError where ``kind`` is not a collective."""
    hop_bytes = {
        "all-gather": operand_bytes,
        "collective-permute": operand_bytes,
        "reduce-scatter": operand_bytes / size,
        "all-to-all": operand_bytes / size,
        "all-reduce": operand_bytes / size,
    }
    if kind not in hop_bytes:
        raise ValueError(f"not a collective: {kind}")
    hops = {"collective-permute": 1, "all-reduce": 2 * (size - 1)}.get(kind, size - 1)
    return hops * (link.latency_s + hop_bytes[kind] / link.bytes_per_s)
