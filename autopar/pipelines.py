"""A step in layers and a cluster → the pipeline that trains it fastest: `plan_pipeline`.

layouts     what every range of layers costs on every mesh                      (`autopar.layouts`)
partitions  cuts of the model into stages, by dynamic programming                (`inter_op.stage_dp`)
built       stages on devices, what crosses between them, a schedule             (`Built`)
simulated   each as a program, by discrete events; the fastest that fits is the plan
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.inter_op.options import check_options
from autopar.inter_op.ranges import FIELDS
from autopar.inter_op.refusal import least_memory
from autopar.inter_op.schedules import SCHEDULES, make_schedule
from autopar.inter_op.stage_dp import Cells, Limits, Partition, StageChoice, partitions
from autopar.inter_op.submesh import Submesh, logical_shapes, mesh_of, place, submeshes
from autopar.intra_op.specs import Mesh
from autopar.ir.cluster import ClusterSpec, LogicalMesh
from autopar.ir.errors import InfeasibleError, OptionError
from autopar.ir.layers import LayeredGraph, Port
from autopar.ir.pipeline import Cut, CutPhase, CutValue, Layout, PipelinePlan, ScalarExchange, Stage
from autopar.ir.pipeline_file import PipelineOptions
from autopar.ir.pretty import bytes_text, shard_bytes
from autopar.ir.program import Program
from autopar.ir.resharding import CrossValue, network_of
from autopar.ir.resharding import place as place_mesh
from autopar.layouts import Parts, Setting, Table, parts_of, tables
from autopar.program.emit import emit
from autopar.program.simulate import simulate
from autopar.program.timeline import Timeline
from autopar.resharding.plan import reshard_cost

FINALISTS = 12
"""Pipelines that are simulated at most."""
FINAL_TASKS = 400_000
"""Tasks that are simulated at most, all finalists together; one is always (what two seconds allow, measured)."""
MOST_STAGES = 64
"""Stages that are tried at most (guessed)."""
CHUNKS = (2, 3, 4)
"""Stages a mesh that interleaved schedules are tried with."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A planned pipeline: ``layouts[k]`` is layer k's, ``program`` is emitted from ``plan`` and ``exchange``,
    ``timeline`` the simulated step. ``seconds``: (phase, wall)."""

    plan: PipelinePlan
    exchange: ScalarExchange | None
    program: Program
    timeline: Timeline
    layouts: tuple[Layout, ...]
    seconds: tuple[tuple[str, float], ...]
    simulated: tuple[tuple[str, float], ...]
    """(pipeline in a line, seconds a step) of all that were simulated."""

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.timeline.makespan_s


def plan_pipeline(
    layered: LayeredGraph,
    cluster: ClusterSpec,
    options: PipelineOptions | None = None,
    user_rules: Mapping[str, str] | None = None,
    cache: str | None = None,
) -> Pipeline:
    """The fastest pipeline that fits, by simulation.

    Args:
        cache: a folder for solved layers (`autopar.stored`); None: none is used.

    Raises:
        OptionError: options contradict each other, the step or the cluster.
        InfeasibleError: nothing fits the devices' memory; says by how much.
    """
    options = options or PipelineOptions()
    cluster.verify()
    return _Planner(layered, cluster, options, user_rules, cache).run()


@dataclass(frozen=True)
class _Option:
    """Option k of a submesh's cells: a table and one of its prices."""

    table: Table
    price: int


@dataclass(frozen=True)
class Built:
    """A pipeline to be simulated."""

    text: str
    plan: PipelinePlan
    layouts: tuple[Layout, ...]
    estimate_s: float


class _Planner:
    def __init__(
        self, layered: LayeredGraph, cluster: ClusterSpec, options: PipelineOptions, user_rules: Any, cache: str | None
    ) -> None:
        self.layered, self.cluster, self.options, self.user_rules = layered, cluster, options, user_rules
        self.cache = cache
        self.count = len(layered.layers)
        self.m = layered.num_microbatches
        self.network = network_of(cluster)
        self.meshes: dict[Any, Mesh] = {}
        self.cut_costs: dict[Any, Any] = {}
        self.seconds: dict[str, float] = {}
        self.schedules = check_options(layered, cluster, options)

    def run(self) -> Pipeline:
        self.parts: Parts = self._timed("layers", lambda: parts_of(self.layered, self.options.remat))
        parts = self.parts
        cells, self.choices = self._timed("layouts", lambda: self._cells(parts))
        found = self._timed("stages", lambda: self._candidates(cells))
        if not found:
            raise InfeasibleError(self._refusal(cells))
        best: Pipeline = self._timed("simulation", lambda: self._best(found))
        return replace(best, seconds=tuple(self.seconds.items()))

    def _timed(self, phase: str, what: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        out = what()
        self.seconds[phase] = time.perf_counter() - start
        return out

    # --- layouts ---------------------------------------------------------------------------------------------------

    def _cells(self, parts: Parts) -> tuple[list[Cells], list[list[_Option]]]:
        """What every submesh can do; which table and price each of its options is."""
        allowed = self.options.submeshes
        kinds = [s for s in submeshes(self.cluster) if allowed is None or (s.hosts, s.devices) in allowed]
        if not kinds:
            raise OptionError(f"submeshes: none of {allowed} is a part of cluster {self.cluster.name}")
        shapes = {
            s: [x for x in logical_shapes(s) if self.options.logical_shapes in (None, ()) or x in
                (self.options.logical_shapes or ())]
            for s in kinds
        }  # fmt: skip
        wanted: dict[Any, LogicalMesh] = {}
        keys: dict[tuple[Submesh, tuple[int, ...]], Any] = {}
        for s in kinds:
            for shape in shapes[s]:
                mesh = mesh_of(self.cluster, s, shape, range(s.size))
                keys[s, shape] = (mesh.axes, mesh.device)
                wanted.setdefault(keys[s, shape], mesh)
        order = sorted(wanted, key=lambda k: -wanted[k].num_devices)
        rules = tuple(sorted((self.user_rules or {}).items()))
        setting = Setting(forbid=self.options.forbid, user_rules=rules, cache=self.cache)
        made = tables(parts, [wanted[k] for k in order], setting, self.options.workers)
        found = dict(zip(order, made, strict=True))
        cells: list[Cells] = []
        choices: list[list[_Option]] = []
        for s in kinds:
            mine = [found[keys[s, shape]] for shape in shapes[s]]
            if not mine:
                continue
            memory = self.options.memory_bytes or mine[0].mesh.device.memory_bytes
            cost = np.concatenate([t.ranges.cost for t in mine])
            received = self._receive_bytes(len(mine[0].ranges.cost[0]))
            cost = cost.copy()
            cost[..., FIELDS.index("transient_bytes")] += received / s.size
            cells.append(Cells(s, float(memory), cost))
            choices.append([_Option(t, p) for t in mine for p in range(len(t.ranges.prices))])
        return cells, choices

    def _receive_bytes(self, count: int) -> NDArray[np.float64]:
        """float64[start, stop]: whole bytes of what crosses into a range, both ways: one microbatch that arrives while
        another is worked on."""
        crossing = self._crossing()
        return crossing[:count, None] + crossing[None, :]

    def _crossing(self) -> NDArray[np.float64]:
        """float64[layers + 1]: bytes of activations that cross before each layer."""
        layered = self.layered
        out = np.zeros(self.count + 1)
        for v, made in layered.makers.items():
            users = layered.users.get(v, ())
            if users:
                out[made + 1 : users[-1] + 1] += layered.values[v].size_bytes
        return out

    # --- candidates ------------------------------------------------------------------------------------------------

    def _candidates(self, cells: list[Cells]) -> list[Built]:
        """Pipelines worth simulating, by estimate."""
        out: list[Built] = []
        plain: list[Partition] = []
        for name in ("1f1b", "inference"):
            if name in self.schedules or name == "1f1b":
                plain = self._partitions(cells, lambda a: min(self.m, a + 1), 0.0)
                break
        for name in self.schedules:
            found = plain
            if name == "eager_1f1b":
                found = self._partitions(cells, lambda a: min(self.m, 2 * a + 1), 1.0)
            elif name == "gpipe":
                found = self._partitions(cells, lambda a: self.m, 1.0) if self.m <= 64 else []
            elif name == "inference":
                found = self._partitions(cells, lambda a: 1, 1.0)
            elif SCHEDULES[name].splits_backward:
                found = self._split(cells, name, plain)
            elif SCHEDULES[name].chunked:
                out += self._interleaved(cells, name)
                continue
            out += [b for p in found[:4] if (b := self._built(p, name, cells)) is not None]
        return sorted(out, key=lambda b: b.estimate_s)

    def _limits(self, in_flight: Callable[[int], int], hidden: float, **more: Any) -> Limits:
        nic = min((g.nic.bytes_per_s * g.nics_per_host for g in self.cluster.groups), default=1.0)
        latency = max(g.nic.latency_s for g in self.cluster.groups)
        if sum(g.hosts for g in self.cluster.groups) == 1:
            nic = self.cluster.groups[0].intra_host.bytes_per_s
            latency = self.cluster.groups[0].intra_host.latency_s
        both = 2.0 if self.layered.loss >= 0 else 1.0
        stages = self.options.num_stages
        limits: dict[str, Any] = {
            "devices": tuple(g.hosts * g.devices_per_host for g in self.cluster.groups),
            "most_stages": stages or min(self.count, self.cluster.num_devices, MOST_STAGES),
            "least_stages": stages or 1,
            "num_microbatches": self.m,
            "in_flight": in_flight,
            "cut_s": both * (latency + self._crossing() / nic),
            "hidden": hidden,
        }
        return Limits(**{**limits, **more})

    def _partitions(
        self, cells: list[Cells], in_flight: Callable[[int], int], hidden: float, **more: Any
    ) -> list[Partition]:
        limits = self._limits(in_flight, hidden, **more)
        cells = self._at_starts(cells)
        if not self.options.uniform:
            return partitions(cells, limits)
        found: list[Partition] = []
        for number, cell in enumerate(cells):
            for p in partitions([cell], limits):
                found.append(replace(p, stages=tuple(replace(s, cell=number) for s in p.stages)))
        return sorted(found, key=lambda p: p.estimate_s)

    def _at_starts(self, cells: list[Cells]) -> list[Cells]:
        """Only stages that begin and end where the user wants, on the submesh that the user wants there."""
        starts = self.options.starts
        if starts is None:
            return cells
        ends = (*starts[1:], self.count)
        given = self.options.submeshes
        out: list[Cells] = []
        for cell in cells:
            cost = np.full_like(cell.cost, np.inf)
            for number, (start, stop) in enumerate(zip(starts, ends, strict=True)):
                if given is None or len(given) != len(starts) or given[number] == (
                    cell.submesh.hosts, cell.submesh.devices
                ):  # fmt: skip
                    cost[:, start, stop] = cell.cost[:, start, stop]
            out.append(Cells(cell.submesh, cell.memory_bytes, cost))
        return out

    def _split(self, cells: list[Cells], name: str, plain: list[Partition]) -> list[Partition]:
        """Partitions for schedules that hold the same number of microbatches on every stage."""
        out: list[Partition] = []
        for p in sorted({len(part.stages) for part in plain[:3]} - {1}):
            held = make_schedule(name, p, self.m).in_flight[0]
            out += self._partitions(cells, lambda a, n=held: n, 0.0, most_stages=p, least_stages=p, contexts=True)[:1]
        return out

    def _interleaved(self, cells: list[Cells], name: str) -> list[Built]:
        """Equal meshes, each with several stages: the cut whose slowest stage is fastest."""
        out: list[Built] = []
        for number, cell in enumerate(cells):
            meshes = sum(
                g.hosts * g.devices_per_host for i, g in enumerate(self.cluster.groups) if i == cell.submesh.group
            )
            meshes //= cell.submesh.size
            if meshes < 2 or meshes * cell.submesh.size != self.cluster.num_devices:
                continue
            for v in CHUNKS:
                stages = meshes * v
                if stages > min(self.count, 4 * MOST_STAGES) or self.options.num_stages not in (None, stages):
                    continue
                if self.m % meshes:
                    continue
                held = make_schedule(name, meshes, self.m, chunks=v).in_flight[0]
                part = Cells(cell.submesh, cell.memory_bytes / v, self._at_starts([cell])[0].cost)
                limits = self._limits(
                    lambda a, n=held: n, 1.0, most_stages=stages, least_stages=stages,
                    devices=tuple(d * v for d in self._limits(lambda a: 1, 1.0).devices),
                )  # fmt: skip
                for p in partitions([part], limits)[:1]:
                    p = Partition(tuple(replace(s, cell=number) for s in p.stages), p.estimate_s)
                    built = self._built(p, name, cells, chunks=v)
                    if built is not None:
                        out.append(built)
        return out

    # --- a pipeline ------------------------------------------------------------------------------------------------

    def _built(self, partition: Partition, name: str, cells: list[Cells], **given: int) -> Built | None:
        choices = partition.stages
        chunks = given.get("chunks", 1)
        count = len(choices) // chunks
        if name != "1f1b" and count == 1 and SCHEDULES[name].trains:
            return None  # one mesh needs no schedule
        wanted = [cells[c.cell].submesh for c in choices[:count]]
        try:
            devices = place(self.cluster, wanted)
        except ValueError:
            return None
        schedule = make_schedule(name, count, self.m, **given)
        layouts: list[Layout] = []
        stages: list[Stage] = []
        for number, choice in enumerate(choices):
            option = self.choices[choice.cell][choice.option]
            ranges = option.table.ranges
            picked = ranges.choice[option.price, choice.start, choice.stop]
            mine = [option.table.layouts[k][picked[k]] for k in range(choice.start, choice.stop)]
            layouts += mine
            stages.append(
                Stage(
                    start=choice.start,
                    stop=choice.stop,
                    mesh=replace(option.table.mesh, device_ids=devices[number % count]),
                    remat=tuple(layout.remat for layout in mine),
                    cost=ranges.stage_cost(option.price, choice.start, choice.stop),
                )
            )
        cuts = self._cuts(stages, layouts)
        plan = PipelinePlan(stages=tuple(stages), cuts=tuple(cuts), schedule=schedule)
        return Built(_text(name, choices, cells), plan, tuple(layouts), partition.estimate_s)

    def _cuts(self, stages: Sequence[Stage], layouts: Sequence[Layout]) -> list[Cut]:
        """What crosses between stages: sends and receives of their layers, one value to each stage once."""
        layered = self.layered
        home = [s for s, stage in enumerate(stages) for _ in range(stage.start, stage.stop)]
        found: dict[tuple[int, int, CutPhase], dict[int, CutValue]] = {}

        def add(phase: CutPhase, value: int, source: tuple[int, int, int], target: tuple[int, int, int]) -> None:
            (a, i, have), (b, j, want) = source, target
            del i, j
            if home[a] == home[b]:
                return
            value_type = layered.values[value]
            group = found.setdefault((home[a], home[b], phase), {})
            if value not in group:
                group[value] = CutValue(
                    name=f"{layered.layers[layered.makers[value]].name}" if value in layered.makers else "parameter",
                    type=value_type,
                    src_spec=self._mesh(stages[home[a]].mesh).spec(value_type, have),
                    dst_spec=self._mesh(stages[home[b]].mesh).spec(value_type, want),
                )

        ports = self.ports
        for k in range(self.count):
            for (value, phase), i in ports[k].receives.items():
                if phase == "forward" and value in layered.makers:
                    p = layered.makers[value]
                    there = ports[p].sends[value, "forward"]
                    add("forward", value, (p, there, layouts[p].sends[there]), (k, i, layouts[k].receives[i]))
                elif phase in ("backward", "gradient"):
                    for user in layered.users[value]:
                        if user > k and (value, phase) in ports[user].sends:
                            there = ports[user].sends[value, phase]
                            add(phase, value, (user, there, layouts[user].sends[there]), (k, i, layouts[k].receives[i]))
                            if phase == "gradient":
                                self._updated(add, value, (k, user), layouts)
        out: list[Cut] = []
        for (source, target, phase), values in sorted(found.items()):
            out.append(self._cut(stages, source, target, phase, tuple(values.values())))
        return out

    def _updated(self, add: Any, value: int, ends: tuple[int, int], layouts: Sequence[Layout]) -> None:
        """The new value of a parameter, from the layer that updates it to another that reads it."""
        owner, user = ends
        i, j = self.ports[owner].inputs[value], self.ports[user].inputs[value]
        add("update", value, (owner, i, layouts[owner].inputs[i]), (user, j, layouts[user].inputs[j]))

    def _cut(
        self, stages: Sequence[Stage], source: int, target: int, phase: CutPhase, values: tuple[CutValue, ...]
    ) -> Cut:
        src, dst = stages[source].mesh, stages[target].mesh
        if src.device_ids == dst.device_ids:
            size = sum(shard_bytes(v.type, v.dst_spec, dst) for v in values)
            seconds = sum(self._moved(v, src) for v in values)
            return Cut(source=source, target=target, phase=phase, values=values, time_s=seconds, bound_s=0.0,
                       receive_bytes=size)  # fmt: skip
        key = (src, dst, values)
        if key not in self.cut_costs:
            crossing = tuple(
                CrossValue(type=v.type, src=0, src_spec=v.src_spec, dst=1, dst_spec=v.dst_spec) for v in values
            )
            placed = (place_mesh(src, self.cluster), place_mesh(dst, self.cluster))
            self.cut_costs[key] = reshard_cost(crossing, placed, self.network)
        cost = self.cut_costs[key]
        return Cut(
            source=source,
            target=target,
            phase=phase,
            values=values,
            time_s=cost.time_s,
            bound_s=min(cost.bound_s, cost.time_s),
            receive_bytes=sum(shard_bytes(v.type, v.dst_spec, dst) for v in values),
        )

    def _moved(self, value: CutValue, logical: LogicalMesh) -> float:
        mesh = self._mesh(logical)
        have, want = mesh.code_of(value.type, value.src_spec), mesh.code_of(value.type, value.dst_spec)
        return float(mesh.costs(value.type)[have, want])

    def _mesh(self, logical: LogicalMesh) -> Mesh:
        key = (logical.axes, logical.device)
        if key not in self.meshes:
            self.meshes[key] = Mesh(logical, self.options.forbid)
        return self.meshes[key]

    @property
    def ports(self) -> list[_Ports]:
        if not hasattr(self, "_ports"):
            self._ports = [_Ports(part) for part in self.parts.layers]
        return self._ports

    # --- the choice ------------------------------------------------------------------------------------------------

    def _best(self, found: list[Built]) -> Pipeline:
        memory = self.options.memory_bytes
        best: Pipeline | None = None
        nearest = (float("inf"), "")
        simulated: list[tuple[str, float]] = []
        tasks = 0
        for built in found[: 3 * FINALISTS]:
            number = sum(map(len, built.plan.schedule.tasks))
            if best is not None and (tasks + number > FINAL_TASKS or len(simulated) >= FINALISTS):
                break
            tasks += number
            exchange = self._exchange(built.plan)
            program = emit(built.plan, exchange=exchange)
            timeline = simulate(program)
            limits = [
                memory or built.plan.stages[built.plan.schedule.mesh_of_stage.index(w)].mesh.device.memory_bytes
                for w in range(len(program.workers))
            ]
            peaks = [w.peak_bytes for w in timeline.workers]
            part, peak = max((p / limit, p) for p, limit in zip(peaks, limits, strict=True))
            if part > 1:
                text = f"{built.text} needs {bytes_text(peak)} of {bytes_text(peak / part)} a device"
                nearest = min(nearest, (part, f"{text} ({100 * (part - 1):.3g} % more than there is)"))
                continue
            simulated.append((built.text, timeline.makespan_s))
            if best is None or timeline.makespan_s < best.step_s:
                best = Pipeline(
                    plan=built.plan, exchange=exchange, program=program, timeline=timeline, layouts=built.layouts,
                    seconds=(), simulated=(),
                )  # fmt: skip
        if best is None:
            raise InfeasibleError(
                f"no pipeline fits the devices' memory when it is simulated, of {min(len(found), 3 * FINALISTS)} that "
                f"were tried. The nearest, {nearest[1]}, would with that as its limit, or with more devices"
            )
        return replace(best, simulated=tuple(simulated))

    def _exchange(self, plan: PipelinePlan) -> ScalarExchange | None:
        """Scalars that the update needs of several stages: a sum over all meshes, there and back."""
        home = [s for s, stage in enumerate(plan.stages) for _ in range(stage.start, stage.stop)]
        shared = any(len({home[k] for k in where}) > 1 for where in self.layered.update_layers)
        if not shared or self.layered.loss < 0:
            return None
        latency = max(g.nic.latency_s for g in self.cluster.groups)
        steps = 2 * (len(plan.schedule.tasks) - 1)
        return ScalarExchange(compute_s=(0.0,) * len(plan.stages), reduce_s=steps * latency, device_bytes=8.0)

    def _refusal(self, cells: list[Cells]) -> str:
        """Why nothing could be built, by how much it misses, and the nearest things that would fit."""
        memory = min(c.memory_bytes for c in cells)
        limits = self._leanest()
        need = least_memory(self._at_starts(cells), limits)
        if need <= 1:
            return (
                f"no pipeline of {self.layered.name} under {', '.join(self.schedules)} can be built on "
                f"{self.cluster.name} with {self.m} microbatches, though memory would do. "
                "Allow other schedules (1f1b), numbers of stages or submeshes"
            )
        if need == float("inf"):
            return f"no cut of {self.count} layers into stages covers {self.cluster.name} as it was asked for"
        text = (
            f"no cut of {self.count} layers into stages fits {bytes_text(memory)} a device on {self.cluster.name}: the "
            f"leanest needs {bytes_text(need * memory)}, {bytes_text((need - 1) * memory)} "
            f"({100 * (need - 1):.3g} %) more. What would fit: a limit of that"
        )
        options = self.options
        if options.starts is not None or options.num_stages is not None:
            most = min(self.count, self.cluster.num_devices, MOST_STAGES)
            free = least_memory(cells, replace(limits, most_stages=most, least_stages=1))
            text += f"; other stages ({bytes_text(free * memory)} a device)" if free < need else ""
        for times in (2, 4, 8):
            devices = tuple(times * d for d in limits.devices)
            most = options.num_stages or min(self.count, sum(devices), MOST_STAGES)
            more = least_memory(self._at_starts(cells), replace(limits, devices=devices, most_stages=most))
            if more <= 1:
                text += f"; {times} times as many hosts ({bytes_text(more * memory)} a device)"
                break
        if self.layered.loss >= 0 and "full" not in options.remat:
            text += "; recomputing layers (remat full is not allowed)"
        return text + ". More microbatches lower what activations take"

    def _leanest(self) -> Limits:
        """Of the schedules that are allowed, the one that holds the fewest microbatches."""
        if self.layered.loss < 0:
            return self._limits(lambda a: 1, 1.0)
        if set(self.schedules) == {"gpipe"}:
            return self._limits(lambda a: self.m, 1.0)
        return self._limits(lambda a: min(self.m, a + 1), 0.0)


class _Ports:
    """Where a layer's ports and inputs are, by value."""

    def __init__(self, part: Any) -> None:
        def by_value(ports: Sequence[Port]) -> dict[tuple[int, str], int]:
            return {(port.value, port.phase): i for i, port in enumerate(ports)}

        self.receives, self.sends = by_value(part.receives), by_value(part.sends)
        self.inputs = {value: i for i, value in enumerate(part.input_values)}


def _text(name: str, choices: Sequence[StageChoice], cells: Sequence[Cells]) -> str:
    """A pipeline in a line: stages of equal shape together."""
    parts: list[str] = []
    runs: list[list[Any]] = []
    for c in choices:
        key = (c.stop - c.start, str(cells[c.cell].submesh))
        if runs and runs[-1][0] == key:
            runs[-1][1] += 1
        else:
            runs.append([key, 1])
    for (layers, submesh), times in runs:
        parts.append((f"{times} x " if times > 1 else "") + f"{layers} layers on {submesh}")
    return f"{name}: " + ", ".join(parts)
