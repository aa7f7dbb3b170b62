"""A plan's figures beside those of its compiled programs, and which of them are too far apart: `Verification`.

What a plan predicts of one program is compared as it is. A pipeline's compiled figures are put in the place of its
stages' costs, and its program is simulated with them: so its step, and what its workers hold, are predicted from the
same schedule, and only what tasks cost differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

from autopar.inter_op.program.emit import emit
from autopar.inter_op.program.simulate import simulate
from autopar.ir.cluster import LogicalMesh
from autopar.ir.pipeline import StageCost, Transients
from autopar.ir.plan import OneProgram, Plan
from autopar.ir.pretty import shard_bytes
from autopar.ir.strategy import Collective
from autopar.verify.hlo_collectives import axes_of
from autopar.verify.programs import CompiledProgram, HeldBytes
from autopar.verify.text import verification_text

SCALAR_BYTES = 8
"""What a collective of a scalar moves at most; such a one more or less is not counted as a difference."""
Key: TypeAlias = tuple[str, tuple[str, ...]]
"""Kind of a collective, and the mesh axes that it runs along (those of size 1 left out), sorted by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """How far a plan's figures may be from the compiled programs', as parts of these. Bytes of collectives, by kind and
    group, are to be equal."""

    memory: float = 0.20
    memory_under: float = 0.03
    """A plan that promises too little ends in a step that does not fit."""
    time: float = 0.25
    flops_under: float = 0.05
    """Of compiled programs products alone are counted, so that more may be planned; less means that devices do work
    which the plan did not see."""


TOLERANCES = Tolerances()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure, planned (None: the plan does not say it) and compiled. ``over`` and ``under``: how far, as parts of
    the compiled one, the plan's may be above and below; None: that side is not judged."""

    name: str
    unit: str
    planned: float | None
    compiled: float
    over: float | None = None
    under: float | None = None

    @property
    def relative(self) -> float | None:
        """(planned − compiled) / compiled."""
        if self.planned is None:
            return None
        return (self.planned - self.compiled) / self.compiled if self.compiled else float(self.planned > 0)

    @property
    def agrees(self) -> bool:
        """True where it is within its tolerances, or not judged."""
        off = self.relative
        if off is None:
            return True
        return (self.over is None or off <= self.over) and (self.under is None or off >= -self.under)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFigure:
    """All collectives of one kind along the same axes in a step: executions, and bytes per device before them. Of
    stages, all stages' on meshes of such axes together."""

    kind: str
    axes: tuple[str, ...]
    group: int
    planned_runs: int
    planned_bytes: int
    compiled_runs: int
    compiled_bytes: int

    @property
    def agrees(self) -> bool:
        """True where as many bytes move as planned, scalars left out; a compiler may move them in fewer executions."""
        off = abs(self.planned_bytes - self.compiled_bytes)
        return off <= SCALAR_BYTES * abs(self.planned_runs - self.compiled_runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """A plan against its compiled programs. ``notes``: what the comparison takes for granted, or leaves out."""

    name: str
    cluster: str
    compiler: str
    collectives: tuple[CollectiveFigure, ...]
    figures: tuple[Figure, ...]
    programs: tuple[CompiledProgram, ...]
    notes: tuple[str, ...] = ()
    tolerances: Tolerances = field(default_factory=Tolerances)

    @property
    def agrees(self) -> bool:
        """True where every figure is within its tolerances."""
        return all(c.agrees for c in self.collectives) and all(f.agrees for f in self.figures)

    def __str__(self) -> str:
        return verification_text(self)

    @property
    def facts(self) -> dict[str, Any]:
        """As JSON, with SI units in the names; a program's collectives are in the sums only."""
        programs = [{**asdict(replace(p, collectives=()))} for p in self.programs]
        for program in programs:
            del program["collectives"]
        return {
            "name": self.name, "cluster": self.cluster, "compiler": self.compiler, "agrees": self.agrees,
            "tolerances": asdict(self.tolerances),
            "collectives": [{**asdict(c), "agrees": c.agrees} for c in self.collectives],
            "figures": [{**asdict(f), "relative": f.relative, "agrees": f.agrees} for f in self.figures],
            "programs": programs, "notes": list(self.notes),
        }  # fmt: skip


def verification(
    plan: Plan, compiler: str, programs: Sequence[CompiledProgram], held: Sequence[HeldBytes],
    unknown_trips: int,
) -> Verification:  # fmt: skip
    """The comparison. Where the compiler is another platform's than the plan's, neither memory nor time is judged."""
    own = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}[plan.cluster.platform] == compiler
    figures = _of_one(plan, programs[0]) if isinstance(plan.body, OneProgram) else _of_stages(plan, programs, held)
    if not own:
        figures = [replace(f, over=None, under=None) if f.unit in ("bytes", "s") else f for f in figures]
    notes: list[str] = []
    if not own:
        notes.append(f"the plan is for {plan.cluster.name}: memory and time are shown, not judged")
    if by := sorted({p.note for p in programs if p.note}):
        notes.append(f"the compiler has no GPU to tune for, and failed: {', '.join(by)} instead")
    if opaque := sorted({o for p in programs for o in p.estimate.opaque}):
        notes.append(f"FLOPs of {', '.join(opaque)} cannot be seen: only its bytes are counted")
    if any(p.estimate.assumes_trips for p in programs):
        notes.append(f"a loop's length depends on values: {unknown_trips} trips are assumed, as in the plan")
    return Verification(
        name=plan.name, cluster=plan.cluster.name, compiler=compiler, figures=tuple(figures),
        collectives=tuple(_collectives(plan, programs, compiler, unknown_trips)), programs=tuple(programs),
        notes=tuple(notes), tolerances=TOLERANCES,
    )  # fmt: skip


def _memory(name: str, planned: float | None, compiled: float) -> Figure:
    over, under = TOLERANCES.memory, TOLERANCES.memory_under
    return Figure(name=name, unit="bytes", planned=planned, compiled=compiled, over=over, under=under)


def _of_one(plan: Plan, program: CompiledProgram) -> list[Figure]:
    p, memory, found = plan.predictions, program.memory, program.estimate
    mesh = plan.sharding.mesh
    outputs = [shard_bytes(a.type, a.spec, mesh) for a in plan.outputs]
    arguments = p.argument_bytes or 0
    aliased = sum(outputs[a.donated_to] for a in plan.inputs if a.donated_to >= 0)
    rest = p.peak_memory_bytes - arguments - (sum(outputs) - aliased)
    t = TOLERANCES
    return [
        _memory("peak memory", p.peak_memory_bytes, memory.peak_bytes),
        Figure(name="  arguments", unit="bytes", planned=arguments, compiled=memory.argument_bytes),
        Figure(name="  results", unit="bytes", planned=sum(outputs), compiled=memory.output_bytes),
        Figure(name="  of these in place", unit="bytes", planned=aliased, compiled=memory.alias_bytes),
        Figure(name="  temporaries", unit="bytes", planned=max(0.0, rest), compiled=memory.temporary_bytes),
        Figure(name="FLOPs", unit="FLOPs", planned=p.flops, compiled=found.flops, under=t.flops_under),
        Figure(name="memory traffic", unit="bytes", planned=None, compiled=found.memory_bytes),
        Figure(name="step", unit="s", planned=p.step_s, compiled=found.seconds, over=t.time, under=t.time),
        Figure(name="  compute", unit="s", planned=p.compute_s, compiled=found.compute_s),
        Figure(name="  communication", unit="s", planned=p.communication_s, compiled=found.communication_s),
        Figure(name="  collectives beside compute", unit="s", planned=p.hidden_s, compiled=found.hidden_s),
    ]


# --- stages ------------------------------------------------------------------------------------------------------


def _of_stages(plan: Plan, programs: Sequence[CompiledProgram], held: Sequence[HeldBytes]) -> list[Figure]:
    pipelined, p, t = plan.pipelined, plan.predictions, TOLERANCES
    by_stage: dict[int, dict[str, CompiledProgram]] = {}
    for program in programs:
        by_stage.setdefault(program.stage, {})[program.task] = program
    stages = tuple(
        replace(stage, cost=measured_cost(by_stage[s], held[s])) for s, stage in enumerate(pipelined.plan.stages)
    )
    timeline = simulate(emit(replace(pipelined.plan, stages=stages), exchange=pipelined.exchange))
    step_s = timeline.makespan_s
    figures = [Figure(name="step", unit="s", planned=p.step_s, compiled=step_s, over=t.time, under=t.time)]
    for number, (planned, found) in enumerate(zip(p.workers, timeline.workers, strict=True)):
        figures.append(_memory(f"peak memory, worker {number}", planned.peak_bytes, found.peak_bytes))
        figures.append(Figure(name="  busy", unit="s", planned=planned.busy_s, compiled=found.busy_s))
    for s, (before, after) in enumerate(zip(pipelined.plan.stages, stages, strict=True)):
        for what, of in (("a microbatch", _microbatch_s), ("the update", _update_s)):
            a, b = of(before.cost), of(after.cost)
            figures.append(Figure(name=f"  stage {s}, {what}", unit="s", planned=a, compiled=b))
    found_flops = sum(p.runs * p.estimate.flops for p in programs)
    figures.append(Figure(name="FLOPs, all stages", unit="FLOPs", planned=None, compiled=found_flops))
    moved = sum(p.runs * p.estimate.memory_bytes for p in programs)
    figures.append(Figure(name="memory traffic, all stages", unit="bytes", planned=None, compiled=moved))
    return figures


def _microbatch_s(cost: StageCost) -> float:
    return cost.forward_s + cost.backward_s


def _update_s(cost: StageCost) -> float:
    """Gradients reduced, and the update: which of the two a gradient is reduced in is the runtime's."""
    return cost.grad_sync_s + cost.update_s


def measured_cost(tasks: dict[str, CompiledProgram], held: HeldBytes) -> StageCost:
    """A stage's cost of what its compiled tasks take; what begins a step is counted with the update."""

    def seconds(*names: str) -> float:
        return sum(tasks[n].estimate.seconds for n in names if n in tasks)

    def more(*names: str) -> float:
        return float(max((tasks[n].memory.more_bytes for n in names if n in tasks), default=0))

    rounds = tuple(n for n in tasks if n.startswith("round "))
    fused = tuple(n for n in tasks if n.startswith("forward_"))
    backward = max(more("backward"), more("input_grad") - held.context, more("weight_grad"), 0.0)
    forward = max(0.0, more("forward") - held.activation)
    transients = Transients(
        forward_bytes=forward, backward_bytes=backward,
        input_grad_bytes=min(backward, max(0.0, more("input_grad") - held.context)),
        weight_grad_bytes=min(backward, more("weight_grad")),
        fused_bytes=max(0.0, more(*fused) - held.activation),
        fused_input_grad_bytes=max(0.0, more(*fused) - held.context), received_bytes=0.0,
        update_bytes=more("grad_sync", *rounds),
    )  # fmt: skip
    return StageCost(
        forward_s=seconds("forward", *fused), input_grad_s=seconds("backward", "input_grad"),
        weight_grad_s=seconds("weight_grad"), grad_sync_s=seconds("grad_sync"), update_s=seconds("begin", *rounds),
        state_bytes=held.state, activation_bytes=held.activation, weight_context_bytes=held.context,
        weight_kept_bytes=held.kept, results_bytes=0.0, transient_bytes=max(forward, backward), transients=transients,
    )  # fmt: skip


# --- collectives -------------------------------------------------------------------------------------------------


def _collectives(
    plan: Plan, programs: Sequence[CompiledProgram], compiler: str, unknown_trips: int
) -> list[CollectiveFigure]:
    planned: dict[Key, Counter[str]] = {}
    compiled: dict[Key, Counter[str]] = {}
    groups: dict[Key, int] = {}

    def add(to: dict[Key, Counter[str]], kind: str, axes: Sequence[str], runs: int, size: int) -> Counter[str]:
        counts = to.setdefault((kind, tuple(sorted(axes))), Counter())
        counts["runs"] += runs
        counts["bytes"] += runs * size
        return counts

    for mesh, row in _planned_rows(plan):
        axes = [a for a in mesh.axes if a.name in row.axes and a.size > 1]
        if axes and row.operand_bytes:
            size = row.operand_bytes * (_widening(row.dtype) if compiler == "cpu" else 1)
            add(planned, row.kind, [a.name for a in axes], row.count * row.trips, size)
    for program in programs:
        mesh = plan.meshes[program.stage]
        for row in program.collectives:
            try:
                axes = axes_of(row.groups, mesh.shape, mesh.axis_names, permute=row.kind == "collective-permute")
            except ValueError:
                axes = (f"{len(row.groups)} groups of {len(row.groups[0])}",)
            trips = unknown_trips * row.below if row.trips is None else row.trips
            add(compiled, row.kind, axes, trips * program.runs, row.operand_bytes)
            groups[row.kind, tuple(sorted(axes))] = max(map(len, row.groups))
    sizes = {a.name: a.size for mesh in plan.meshes for a in mesh.axes}
    out: list[CollectiveFigure] = []
    for key in sorted(planned.keys() | compiled.keys()):
        group = 1
        for axis in key[1]:
            group *= sizes.get(axis, groups.get(key, 1))
        wanted, found = planned.get(key, Counter()), compiled.get(key, Counter())
        out.append(
            CollectiveFigure(
                kind=key[0], axes=key[1], group=group, planned_runs=wanted["runs"], planned_bytes=wanted["bytes"],
                compiled_runs=found["runs"], compiled_bytes=found["bytes"],
            )
        )  # fmt: skip
    return out


def _widening(dtype: str) -> int:
    """XLA's CPU compiler moves bfloat16 as float32 and 8-bit floats as float16, in every collective."""
    return 2 if dtype == "bfloat16" or dtype.startswith("float8") else 1


def _planned_rows(plan: Plan) -> Iterator[tuple[LogicalMesh, Collective]]:
    """A plan's collectives, with the mesh of each; of stages those of layers and those between them. What gathers in
    cuts is no part of a stage's programs."""
    if isinstance(plan.body, OneProgram):
        for row in plan.sharding.collectives:
            yield plan.sharding.mesh, row
        return
    pipelined = plan.pipelined
    for stage, between in zip(pipelined.plan.stages, pipelined.between, strict=True):
        for row in between:
            yield stage.mesh, row
        for k in stage.layers:
            for row in pipelined.sharding_of(k).collectives:
                yield stage.mesh, row
