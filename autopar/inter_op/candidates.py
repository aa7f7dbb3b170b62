"""Partitions → pipelines: stages on devices, what crosses between them, a schedule, and how long that takes.

In: what the search chose (`inter_op.stage_dp.Partition`) and the layouts behind it. Out: a `Built` pipeline, which
`simulated` emits as a program and runs by discrete events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby
from typing import TypeAlias

from autopar.inter_op.cells import Cells
from autopar.inter_op.common_mesh import common_mesh, spec_in
from autopar.inter_op.layer_layouts import Table
from autopar.inter_op.layer_problems import MeshKind, Parts
from autopar.inter_op.program.emit import emit
from autopar.inter_op.program.simulate import simulate
from autopar.inter_op.program.timeline import Timeline
from autopar.inter_op.schedules import SCHEDULES, make_schedule
from autopar.inter_op.stage_dp import Partition, StageChoice
from autopar.inter_op.submesh import moved, moved_up, place
from autopar.intra_op.specs import Mesh
from autopar.ir.cluster import ClusterSpec, LogicalMesh
from autopar.ir.layers import LayeredGraph, Port, StageGraph
from autopar.ir.pipeline import (
    Cut,
    CutPhase,
    CutValue,
    HostUse,
    Layout,
    PipelinePlan,
    ScalarExchange,
    Schedule,
    Stage,
    home_of,
)
from autopar.ir.pretty import shard_bytes
from autopar.ir.program import Program
from autopar.ir.resharding import CrossValue, PlacedMesh, network_of
from autopar.ir.resharding import place as place_mesh
from autopar.ir.sharding import ShardingSpec
from autopar.resharding.planning import Cost, reshard_cost

GATHER_GAIN = 0.95
"""Values land split, and are gathered by the target, where that takes at most this part of the time (chosen, as
`resharding.planning.GAIN`: it is one more program)."""
AddCut: TypeAlias = Callable[[CutPhase, int, tuple[int, int], tuple[int, int]], None]
"""Adds what crosses: (phase, value, layer and code of the source, of the target)."""


@dataclass(frozen=True)
class Option:
    """Option k of a submesh's cells: a table and one of its prices."""

    table: Table
    price: int


@dataclass(frozen=True)
class Built:
    """A pipeline to be simulated: ``text`` is it in a line, ``layouts[k]`` layer k's, ``estimate_s`` the T of
    `stage_dp.Partition`, ``schedule_options`` what its schedule was given."""

    text: str
    plan: PipelinePlan
    layouts: tuple[Layout, ...]
    estimate_s: float
    schedule_options: tuple[tuple[str, int], ...] = ()
    choices: tuple[StageChoice, ...] = ()
    """Of each stage, which cell of the search it is and by which option."""


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A built pipeline as a program, and its step."""

    built: Built
    exchange: ScalarExchange | None
    program: Program
    timeline: Timeline

    def fullest(self, memory_bytes: int | None) -> tuple[float, float]:
        """(part of its device's memory, or of ``memory_bytes``, that the fullest worker needs; its bytes)."""
        plan = self.built.plan
        out: list[tuple[float, float]] = []
        for number, worker in enumerate(self.timeline.workers):
            stage = plan.stages[plan.schedule.mesh_of_stage.index(number)]
            out.append((worker.peak_bytes / (memory_bytes or stage.mesh.device.usable_bytes), worker.peak_bytes))
        return max(out)


@dataclass(frozen=True, slots=True)
class _CutCost:
    """How ``values`` cross: what bringing them over takes, and what gathering where they land."""

    values: tuple[CutValue, ...]
    brought: Cost
    gather_s: float
    bound_s: float

    @property
    def time_s(self) -> float:
        """Seconds of both."""
        return self.brought.time_s + self.gather_s


@dataclass(frozen=True, slots=True)
class _Joined:
    """A pipeline but for its schedule."""

    stages: tuple[Stage, ...]
    cuts: tuple[Cut, ...]
    layouts: tuple[Layout, ...]


class Builder:
    """Builds pipelines of one step on one cluster. ``options[c][o]`` is what option o of ``cells[c]`` stands for."""

    def __init__(
        self,
        parts: Parts,
        cluster: ClusterSpec,
        cells: Sequence[Cells],
        options: Sequence[Sequence[Option]],
        forbid: tuple[str, ...] = (),
        resharding: str = "auto",
    ) -> None:
        self.layered: LayeredGraph = parts.layered
        self.cluster, self.cells, self.options, self.forbid = cluster, cells, options, forbid
        self.network, self.resharding = network_of(cluster), resharding
        self.ports = [_Ports(part) for part in parts.layers]
        readers = {
            v: [k for k, port in enumerate(self.ports) if (v, "forward") in port.receives] for v in self.layered.makers
        }
        self.spread = {value: layers for value, layers in readers.items() if len(layers) > 1}
        """Values that several other layers read → these layers."""
        self.meshes: dict[MeshKind, Mesh] = {}
        self.cut_costs: dict[tuple[LogicalMesh, LogicalMesh, tuple[CutValue, ...]], _CutCost] = {}
        self.placed = cache(partial(place_mesh, cluster=cluster))
        self.moved_up = cache(partial(moved_up, cluster))
        self.schedules: dict[tuple[str, int, tuple[tuple[str, int], ...]], Schedule] = {}
        self.together = {where for where in self.layered.update_layers if len(where) > 1}
        """Layers that run nodes of the update together."""
        self.last: tuple[tuple[tuple[StageChoice, ...], int], _Joined | None] | None = None

    def build(self, partition: Partition, name: str, **given: int) -> Built | None:
        """The pipeline of a partition under the schedule ``name`` with options ``given``; None where its submeshes do
        not fit the hosts together, and on one mesh for a schedule that asks for several
        (`ScheduleRecord.on_one_stage`). Raises ScheduleError as `make_schedule`."""
        choices, cells = partition.stages, self.cells
        chunks = given.get("chunks", 1)
        count = len(choices) // chunks
        if count == 1 and not SCHEDULES[name].on_one_stage:
            return None
        if self.last is None or self.last[0] != (choices, count):  # the same stages are tried under many schedules
            self.last = ((choices, count), self._joined(choices, count))
        joined = self.last[1]
        if joined is None:
            return None
        schedule = self.schedule(name, count, **given)
        plan = PipelinePlan(stages=joined.stages, cuts=joined.cuts, schedule=schedule)
        text = _text(name, choices, cells)
        return Built(text, plan, joined.layouts, partition.estimate_s, tuple(given.items()), choices)

    def _joined(self, choices: Sequence[StageChoice], count: int) -> _Joined | None:
        """Stages on ``count`` meshes, and what crosses; None where their submeshes do not fit the hosts together."""
        try:
            devices = place(self.cluster, [self.cells[c.cell].submesh for c in choices[:count]])
        except ValueError:
            return None
        layouts: list[Layout] = []
        stages: list[Stage] = []
        for number, choice in enumerate(choices):
            option = self.options[choice.cell][choice.option]
            ranges = option.table.ranges
            picked = ranges.picked(option.price, choice.start, choice.stop)
            mine = [option.table.layouts[choice.start + i][c] for i, c in enumerate(picked)]
            layouts += mine
            mesh = moved(option.table.mesh, devices[number % count])
            cost = ranges.stage_cost(option.price, choice.start, choice.stop)
            twice_s = self._twice_s(choice.start, mine, mesh)
            stages.append(
                Stage(
                    start=choice.start,
                    stop=choice.stop,
                    mesh=mesh,
                    remat=tuple(layout.remat for layout in mine),
                    cost=replace(cost, forward_s=cost.forward_s - twice_s) if twice_s else cost,
                )
            )
        return _Joined(tuple(stages), self.cuts(stages, layouts), tuple(layouts))

    def _twice_s(self, start: int, layouts: Sequence[Layout], logical: LogicalMesh) -> float:
        """Seconds that `Ranges` counts and a stage does not take: of a value that several of its layers read, the steps
        that these have in common. ``layouts``: of its layers, the first being ``start``."""
        out = 0.0
        for value, layers in self.spread.items():
            maker, inside = self.layered.makers[value] - start, [k - start for k in layers if k < start + len(layouts)]
            if maker < 0 or len(inside) < 2:
                continue
            have = layouts[maker].sends[self.ports[start + maker].sends[value, "forward"]]
            codes = [layouts[k].receives[self.ports[start + k].receives[value, "forward"]] for k in inside]
            mesh, value_type = self._mesh(logical), self.layered.values[value]
            out += float(mesh.costs(value_type)[have, codes].sum()) - mesh.spread_s(value_type, have, codes)
        return max(0.0, out)

    def schedule(self, name: str, meshes: int, **given: int) -> Schedule:
        """The schedule of that name and options for so many meshes and all microbatches of the step; made once. Raises
        ScheduleError as `make_schedule`."""
        key = (name, meshes, tuple(given.items()))
        if key not in self.schedules:
            self.schedules[key] = make_schedule(name, meshes, self.layered.num_microbatches, **given)
        return self.schedules[key]

    def cuts(self, stages: Sequence[Stage], layouts: Sequence[Layout]) -> tuple[Cut, ...]:
        """What crosses between stages, by (source, target, phase): what their layers send and receive, each value to
        each stage once, in the shardings of ``layouts`` (layer → its layout)."""
        layered = self.layered
        home = home_of(stages)
        found: dict[tuple[int, int, CutPhase], dict[int, CutValue]] = {}

        def add(phase: CutPhase, value: int, source: tuple[int, int], target: tuple[int, int]) -> None:
            """Layer and code of both sides."""
            (a, have), (b, want) = source, target
            if home[a] == home[b]:
                return
            value_type = layered.values[value]
            group = found.setdefault((home[a], home[b], phase), {})
            if value not in group:
                group[value] = CutValue(
                    value=value,
                    name=layered.layers[layered.makers[value]].name if value in layered.makers else "parameter",
                    type=value_type,
                    src_spec=self._mesh(stages[home[a]].mesh).spec(value_type, have),
                    dst_spec=self._mesh(stages[home[b]].mesh).spec(value_type, want),
                )

        ports = self.ports
        for k in range(len(self.layered.layers)):
            for (value, phase), i in ports[k].receives.items():
                if phase == "forward" and value in layered.makers:
                    p = layered.makers[value]
                    there = ports[p].sends[value, "forward"]
                    add("forward", value, (p, layouts[p].sends[there]), (k, layouts[k].receives[i]))
                elif phase in ("backward", "gradient"):
                    for user in layered.users[value]:
                        if user > k and (value, phase) in ports[user].sends:
                            there = ports[user].sends[value, phase]
                            add(phase, value, (user, layouts[user].sends[there]), (k, layouts[k].receives[i]))
                            if phase == "gradient":
                                self._updated(add, value, (k, user), layouts)
        out: list[Cut] = []
        for (source, target, phase), values in sorted(found.items()):
            out.append(self._cut(stages, source, target, phase, tuple(values.values())))
        return tuple(out)

    def _updated(self, add: AddCut, value: int, ends: tuple[int, int], layouts: Sequence[Layout]) -> None:
        """The new value of a parameter, from the layer that updates it to another that reads it."""
        owner, user = ends
        i, j = self.ports[owner].inputs[value], self.ports[user].inputs[value]
        add("update", value, (owner, layouts[owner].inputs[i]), (user, layouts[user].inputs[j]))

    def _cut(
        self, stages: Sequence[Stage], source: int, target: int, phase: CutPhase, values: tuple[CutValue, ...]
    ) -> Cut:
        src, dst = stages[source].mesh, stages[target].mesh
        if src.device_ids == dst.device_ids:
            size = sum(shard_bytes(v.type, v.dst_spec, dst) for v in values)
            seconds = sum(self._moved(v, src, dst) for v in values)
            return Cut(source=source, target=target, phase=phase, values=values, time_s=seconds, bound_s=0.0,
                       receive_bytes=size, strategy="")  # fmt: skip
        here = [self.placed(mesh) for mesh in (src, dst)]
        src, dst = self.moved_up((src, dst))
        key = (src, dst, values)
        if key not in self.cut_costs:
            cost = direct = self._cut_cost(src, dst, values)
            split = tuple(self._split(v, dst) for v in values)
            if split != values:
                gathered = self._cut_cost(src, dst, split)
                if gathered.time_s < GATHER_GAIN * direct.time_s:
                    cost = replace(gathered, bound_s=direct.bound_s)
            self.cut_costs[key] = cost
        cost = self.cut_costs[key]
        return Cut(
            source=source,
            target=target,
            phase=phase,
            values=cost.values,
            time_s=cost.time_s,
            bound_s=min(cost.bound_s, cost.time_s),
            receive_bytes=sum(
                shard_bytes(v.type, spec, dst) for v in cost.values for spec in dict.fromkeys((v.lands, v.dst_spec))
            ),
            strategy=cost.brought.strategy,
            hosts=self._hosts(cost, here, (src, dst)),
            gather_s=cost.gather_s,
        )

    def _cut_cost(self, src: LogicalMesh, dst: LogicalMesh, values: tuple[CutValue, ...]) -> _CutCost:
        crossing = tuple(CrossValue(type=v.type, src=0, src_spec=v.src_spec, dst=1, dst_spec=v.lands) for v in values)
        placed = (self.placed(src), self.placed(dst))
        brought = reshard_cost(crossing, placed, self.network, self.resharding)
        gather_s = sum(self._resharded(v, dst, v.lands, v.dst_spec) for v in values if v.landed is not None)
        return _CutCost(values, brought, gather_s, brought.bound_s)

    def _split(self, value: CutValue, dst: LogicalMesh) -> CutValue:
        """The value landing split over all axes of the target's mesh that it is whole on, in the first dimension that
        they divide, to be gathered there; as it is where there is none."""
        sizes = {axis.name: axis.size for axis in dst.axes}
        used = {a for axes in value.dst_spec.dims for a in axes}
        more = tuple(a for a, size in sizes.items() if a not in used and size > 1)
        for d, (n, axes) in enumerate(zip(value.type.shape, value.dst_spec.dims, strict=True)):
            if more and n and not value.type.is_key and n % math.prod(sizes[a] for a in (*axes, *more)) == 0:
                dims = (*value.dst_spec.dims[:d], (*axes, *more), *value.dst_spec.dims[d + 1 :])
                return replace(value, landed=ShardingSpec(dims=dims))
        return value

    def _hosts(self, cost: _CutCost, here: Sequence[PlacedMesh], moved: Sequence[LogicalMesh]) -> tuple[HostUse, ...]:
        """What a cut uses of hosts' NICs, from what it would on the hosts that its meshes were moved to."""
        of: dict[int, int] = {}
        for placed, mesh in zip(here, moved, strict=True):
            of.update(zip(self.placed(mesh).hosts, placed.hosts, strict=True))
        found = ((of[host], sends_s, receives_s) for host, sends_s, receives_s in cost.brought.nics)
        return tuple(
            HostUse(host=host, sends=min(1.0, sends_s / cost.time_s), receives=min(1.0, receives_s / cost.time_s))
            for host, sends_s, receives_s in sorted(found)
        )

    def _moved(self, value: CutValue, src: LogicalMesh, dst: LogicalMesh) -> float:
        """Seconds between two stages of the same devices; where their meshes have no common one, for the whole value
        on each."""
        common = common_mesh(src, dst)
        if common is None:
            whole = ShardingSpec(dims=((),) * len(value.type.shape))
            return self._resharded(value, src, value.src_spec, whole) + self._resharded(
                value, dst, whole, value.dst_spec
            )
        have, want = spec_in(value.src_spec, common.of_one), spec_in(value.dst_spec, common.of_two)
        return self._resharded(value, common.mesh, have, want)

    def _resharded(self, value: CutValue, logical: LogicalMesh, have: ShardingSpec, want: ShardingSpec) -> float:
        mesh = self._mesh(logical)
        return float(mesh.costs(value.type)[mesh.code_of(value.type, have), mesh.code_of(value.type, want)])

    def _mesh(self, logical: LogicalMesh) -> Mesh:
        key = (logical.axes, logical.device)
        if key not in self.meshes:
            self.meshes[key] = Mesh(logical, self.forbid)
        return self.meshes[key]

    def extrapolated_s(self, built: Built) -> float:
        """Seconds of a step. With more than 8 microbatches a mesh, by a line through the simulated steps of 4 and of 8
        a mesh: once a pipeline is full, each more takes as long as the one before."""
        schedule = built.plan.schedule
        meshes, m = len(schedule.tasks), schedule.num_microbatches
        few, more = 4 * meshes, 8 * meshes
        if m <= more:
            return self.simulated(built).timeline.makespan_s
        times: list[float] = []
        for count in (few, more):
            short = make_schedule(schedule.name, meshes, count, **dict(built.schedule_options))
            plan = replace(built.plan, schedule=short)
            times.append(simulate(emit(plan, exchange=self.exchange(plan))).makespan_s)
        return times[1] + (m - more) * (times[1] - times[0]) / (more - few)

    def simulated(self, built: Built) -> Simulated:
        """Emits the pipeline's program and runs its step by discrete events."""
        exchange = self.exchange(built.plan)
        program = emit(built.plan, exchange=exchange)
        return Simulated(built=built, exchange=exchange, program=program, timeline=simulate(program))

    def fused(self, step: Simulated, memory_bytes: int | None) -> Simulated:
        """The pipeline with all stages fused that can be (`Stage.fused`), if it still fits the memory of its devices,
        or ``memory_bytes`` of each, and takes no longer: what a stage received stays until both tasks are done."""
        plan = step.built.plan
        which = [plan.can_fuse(s) for s in range(len(plan.stages))]
        if not any(which):
            return step
        stages = tuple(replace(stage, fused=can) for stage, can in zip(plan.stages, which, strict=True))
        again = self.simulated(replace(step.built, plan=replace(plan, stages=stages)))
        longer = again.timeline.makespan_s > step.timeline.makespan_s * (1 + 1e-9)
        return step if longer or again.fullest(memory_bytes)[0] > 1 else again

    def exchange(self, plan: PipelinePlan) -> ScalarExchange | None:
        """Scalars that the update needs of several stages, as a sum over all p meshes: 2(p − 1) hops at the slowest
        NIC's latency; what each stage makes of its own gradients for them is part of its ``update_s``. None where each
        scalar is one stage's, or the step takes no gradients."""
        home = plan.home
        shared = any(len({home[k] for k in where}) > 1 for where in self.together)
        if not shared or self.layered.loss < 0:
            return None
        latency = max(g.nic.latency_s for g in self.cluster.groups)
        steps = 2 * (len(plan.schedule.tasks) - 1)
        return ScalarExchange(compute_s=(0.0,) * len(plan.stages), reduce_s=steps * latency, device_bytes=8.0)


class _Ports:
    """Where a layer's ports and inputs are, by value."""

    def __init__(self, part: StageGraph) -> None:
        def by_value(ports: Sequence[Port]) -> dict[tuple[int, str], int]:
            return {(port.value, port.phase): i for i, port in enumerate(ports)}

        self.receives, self.sends = by_value(part.receives), by_value(part.sends)
        self.inputs = {value: i for i, value in enumerate(part.input_values)}


def _text(name: str, choices: Sequence[StageChoice], cells: Sequence[Cells]) -> str:
    """A pipeline in a line: stages of equal shape together."""
    parts: list[str] = []
    for (layers, submesh), run in groupby((c.stop - c.start, str(cells[c.cell].submesh)) for c in choices):
        times = len(list(run))
        parts.append((f"{times} x " if times > 1 else "") + f"{layers} layer{'s' if layers > 1 else ''} on {submesh}")
    return f"{name}: " + ", ".join(parts)
