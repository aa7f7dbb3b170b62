"""A step in layers and a cluster → the pipeline that trains it fastest: `plan_pipeline`.

layouts     cost[option, i, j] of layers i to j on every submesh, an option being a logical shape, a placement of the
            batch and a price of memory: `_cells` (`autopar.inter_op.layer_layouts`, `inter_op.ranges`)
partitions  cuts into stages k, on submeshes that fill the cluster, by  (m − 1) max_k t_k + Σ_k t_k  with m
            microbatches, as many of them held by each stage as the schedule has in flight: dynamic programming
            (`inter_op.stage_dp`). Schedules differ in what they hold and hide, which their records say
            (`inter_op.schedules`): `_cuts` for a stage a mesh, `_chunked` for several on each of equal meshes
built       stages on devices, what crosses between them, a schedule (`candidates.Builder`)
simulated   each as a program, by discrete events: `_best`, which refines what fits (`refinement`); the fastest that
            fits is the plan

The estimate only orders candidates: what a plan says of its time and memory is what its simulated program takes.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar._version import __version__
from autopar.inter_op.cache import StoredPipeline, key_of, load, store
from autopar.inter_op.candidates import Builder, Built, Option, Simulated
from autopar.inter_op.check_options import batch_divides, check_options
from autopar.inter_op.layer_layouts import NoTable, Setting, Table, tables
from autopar.inter_op.layer_pins import on_mesh
from autopar.inter_op.layer_problems import LayerProblems, MeshKind, Parts, distinct_layers, parts_of
from autopar.inter_op.layer_shardings import layer_shardings, placed
from autopar.inter_op.least_memory import least_memory
from autopar.inter_op.program.emit import emit
from autopar.inter_op.program.simulate import simulate
from autopar.inter_op.program.timeline import Timeline
from autopar.inter_op.ranges import FIELDS
from autopar.inter_op.refinement import is_small, refined
from autopar.inter_op.schedules import SCHEDULES, ScheduleOptions, ScheduleRecord, plain_schedule
from autopar.inter_op.search_space import Freedom, chunk_counts
from autopar.inter_op.stage_dp import Cells, Limits, Partition, partitions, stage_seconds
from autopar.inter_op.submesh import Submesh, logical_meshes, submeshes
from autopar.intra_op.mesh_problem import Asked
from autopar.intra_op.stage_costs import Solving
from autopar.ir.cluster import ClusterSpec, LogicalMesh
from autopar.ir.errors import InfeasibleError, OptionError, ShardingError, SolverTimeoutError
from autopar.ir.layer_sharding import LayerShardings
from autopar.ir.layers import LayeredGraph, StageGraph
from autopar.ir.pipeline import Layout, PipelinePlan, ScalarExchange
from autopar.ir.pipelined import PipelineOptions
from autopar.ir.plan import ArgPlan
from autopar.ir.program import Program
from autopar.ir.progress import Watch
from autopar.ir.text import bytes_text

T = TypeVar("T")
log = logging.getLogger("autopar")

BUILT = 4
"""Partitions that are built for each schedule (guessed)."""
LAYOUTS_SHARE = 0.8
"""The part of the time that is left in which layouts are looked for; stages are searched and simulated in the rest
(guessed)."""
FINALISTS = 12
"""Pipelines that are simulated at most."""
FINAL_TASKS = 150_000
"""Tasks that are simulated at most, all finalists together; one is always (three to four seconds, measured)."""
MOST_STAGES = 64
"""Stages that are tried at most (guessed)."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A planned pipeline: ``layouts[k]`` is layer k's, ``program`` is emitted from ``plan`` and ``exchange``,
    ``timeline`` the simulated step. ``seconds``: (phase of planning, wall seconds)."""

    plan: PipelinePlan
    exchange: ScalarExchange | None
    program: Program
    timeline: Timeline
    layouts: tuple[Layout, ...]
    shardings: LayerShardings
    inputs: tuple[ArgPlan, ...]
    outputs: tuple[ArgPlan, ...]
    """The step's arguments and results, and where they lie."""
    seconds: tuple[tuple[str, float], ...]
    simulated: tuple[tuple[str, int, float], ...]
    """(pipeline in a line, stages, seconds a step) of all that were simulated and fit."""
    apart: tuple[StageGraph, ...] | None = None
    """Every layer as a stage of its own; None of a pipeline that was stored."""
    distinct: tuple[str, ...] = ()
    """Which layers were planned as one (`layer_problems.distinct_layers`)."""

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.timeline.makespan_s

    @property
    def alone_s(self) -> float:
        """Seconds of a step of the fastest single stage; infinite where none was simulated, or fits."""
        return min((seconds for _, stages, seconds in self.simulated if stages == 1), default=float("inf"))


def plan_pipeline(
    layered: LayeredGraph,
    cluster: ClusterSpec,
    options: PipelineOptions | None = None,
    user_rules: Mapping[str, str] | None = None,
    cache: str | None = None,
    watch: Watch | None = None,
) -> Pipeline:
    """The fastest pipeline that fits, by simulation.

    Args:
        options: what the user fixed; None: nothing.
        user_rules: sharding rules by name, of primitives or ffi targets (`frontend.user_rules.registered_rules`).
        cache: a folder for pipelines and solved layers (`autopar.inter_op.cache`); None: none is used.
        watch: where it ends the search, the best pipeline of those that can be made of the layouts that were found by
            then. Such a one is not kept in the cache.

    Raises:
        ClusterError: the cluster is malformed.
        OptionError: options contradict each other, the step or the cluster.
        InfeasibleError: nothing fits the devices' memory; says by how much.
        SolverTimeoutError: nothing that fits was found before the search was ended.
    """
    options, watch = options or PipelineOptions(), watch or Watch()
    cluster.verify()
    planner = _Planner(layered, cluster, options, user_rules, cache, watch)
    if cache is None:
        return planner.run()
    started = time.perf_counter()
    given = replace(options, workers=None, time_limit_s=None)
    wanted = (__version__, layered, cluster, given, sorted((user_rules or {}).items()))
    key = key_of(wanted)
    found = load(Path(cache), StoredPipeline, key)
    if found is None:
        made = planner.run()
        entry = StoredPipeline(
            key=key, plan=made.plan, exchange=made.exchange, layouts=made.layouts, shardings=made.shardings,
            inputs=made.inputs, outputs=made.outputs, simulated=made.simulated, distinct=made.distinct,
        )  # fmt: skip
        if not watch.cut:
            store(Path(cache), entry)
        return made
    program = emit(found.plan, exchange=found.exchange)
    timeline = simulate(program)
    return Pipeline(
        plan=found.plan, exchange=found.exchange, program=program, timeline=timeline, layouts=found.layouts,
        shardings=found.shardings, inputs=found.inputs, outputs=found.outputs,
        seconds=(("cache", time.perf_counter() - started),), simulated=found.simulated, distinct=found.distinct,
    )  # fmt: skip


def pipeline_of(
    step: Simulated,
    simulated: Sequence[tuple[str, int, float]],
    problems: LayerProblems,
) -> Pipeline:
    """A simulated pipeline as a plan, the shardings of its layers spelled out. ``simulated`` as in
    `Pipeline`: all that it was chosen from."""
    built = step.built
    shardings = layer_shardings(problems, built.plan, built.layouts)
    inputs, outputs = placed(problems.parts, built.plan, shardings)
    remats = [remat for stage in built.plan.stages for remat in stage.remat]
    return Pipeline(
        plan=built.plan, exchange=step.exchange, program=step.program, timeline=step.timeline, layouts=built.layouts,
        shardings=shardings, inputs=inputs, outputs=outputs, seconds=(),
        simulated=tuple(simulated), apart=tuple(map(problems.parts.apart, range(len(remats)), remats)),
        distinct=distinct_layers(problems.parts),
    )  # fmt: skip


class _Planner:
    def __init__(
        self, layered: LayeredGraph, cluster: ClusterSpec, options: PipelineOptions,
        user_rules: Mapping[str, str] | None, cache: str | None, watch: Watch | None = None,
    ) -> None:  # fmt: skip
        self.watch = watch or Watch()
        self.layered, self.cluster, self.options, self.user_rules = layered, cluster, options, user_rules
        self.cache = cache
        self.count = len(layered.layers)
        self.m = layered.num_microbatches
        self.seconds: dict[str, float] = {}
        self.pins_refused = ""
        self.no_table: NoTable | None = None
        """Why the first of the meshes is none that layers can be on as asked."""
        self.schedules = check_options(layered, cluster, options)
        self.plain = plain_schedule(trains=layered.loss >= 0)
        self.devices = tuple(g.hosts * g.devices_per_host for g in cluster.groups)

    def run(self) -> Pipeline:
        try:
            return self._run()
        except InfeasibleError as error:
            if not self.watch.cut:
                raise
            raise SolverTimeoutError(
                f"the search ended before a pipeline was found that fits; until then: {error}"
            ) from error

    def _run(self) -> Pipeline:
        self.parts: Parts = self._timed("layers", lambda: parts_of(self.layered, self.options.remat, self.options.pins))
        parts = self.parts
        log.debug("; ".join(distinct_layers(parts)))
        self.problems = LayerProblems(parts, self.options.forbid, Asked(user_rules=self.user_rules or {}))
        cells, choices = self._timed("layouts", lambda: self._cells(self.problems))
        self.watch.tell("stages")
        self.builder = Builder(parts, self.cluster, cells, choices, self.options.forbid, self.options.resharding)
        found = self._timed("stages", lambda: self._candidates(cells))
        self.refusal = "" if found else self._refusal(cells)
        if not found:
            if not is_small(self.count, self.m) and self.options.starts is None:
                raise InfeasibleError(self.refusal)
            # estimates count more than there is at any time: the simulator decides
            found = self._timed("stages again", lambda: self._candidates(self._roomier(cells)))
        best, simulated = self._timed("simulation", lambda: self._best(found, cells))
        made = self._timed("shardings", lambda: pipeline_of(best, simulated, self.problems))
        return replace(made, seconds=tuple(self.seconds.items()))

    def _timed(self, phase: str, what: Callable[[], T]) -> T:
        start = time.perf_counter()
        out = what()
        self.seconds[phase] = time.perf_counter() - start
        return out

    # --- layouts ---------------------------------------------------------------------------------------------------

    def _cells(self, problems: LayerProblems) -> tuple[list[Cells], list[list[Option]]]:
        """What every submesh can do; which table and price each of its options is."""
        allowed = self.options.submeshes
        most = self._most_stages if allowed is None else None
        kinds = [s for s in submeshes(self.cluster, most) if allowed is None or (s.hosts, s.devices) in allowed]
        if not kinds:
            raise OptionError(f"submeshes: none of {allowed} is a part of cluster {self.cluster.name}")
        meshes = self._meshes(kinds)
        wanted: dict[MeshKind, LogicalMesh] = {}
        for mesh in itertools.chain(*meshes.values()):
            wanted.setdefault((mesh.axes, mesh.device), mesh)
        order = sorted(wanted, key=lambda k: -wanted[k].num_devices)
        rules = tuple(sorted((self.user_rules or {}).items()))
        found: dict[MeshKind, list[tuple[tuple[int, ...] | None, Table]]] = {k: [] for k in order}
        solving, watch = Solving(solver=self.options.solver), self.watch.part(LAYOUTS_SHARE)
        for axes in dict.fromkeys(self.options.batch_axes or (None,)):
            setting = Setting(
                forbid=self.options.forbid,
                degrees=self.options.degrees,
                batch_axes=axes,
                whole_examples=self.options.whole_examples,
                user_rules=rules,
                solving=solving,
                cache=self.cache,
            )
            fitting = [k for k in order if batch_divides(self.layered, wanted[k], axes, self.options.degrees)]
            made = tables(problems.parts, [wanted[k] for k in fitting], setting, self.options.workers, problems, watch)
            for k, table in zip(fitting, made, strict=True):
                if isinstance(table, Table):
                    found[k].append((axes, table))
                elif self.no_table is None or isinstance(table, SolverTimeoutError):
                    self.no_table = table
        cells: list[Cells] = []
        choices: list[list[Option]] = []
        for s in kinds:
            mine = [x for mesh in meshes[s] for x in found[mesh.axes, mesh.device]]
            if not mine:
                continue
            memory = self.options.memory_bytes or mine[0][1].mesh.device.memory_bytes
            cost = np.concatenate([t.ranges.cost for _, t in mine])
            cost[..., FIELDS.index("transient_bytes")] += self._receive_bytes() / s.size
            bound = tuple(axes for axes, t in mine for _ in t.ranges.prices)
            cells.append(Cells(s, float(memory), cost, bound))
            choices.append([Option(t, p) for _, t in mine for p in range(len(t.ranges.prices))])
        if not cells and self.no_table is not None:
            if isinstance(self.no_table, SolverTimeoutError):
                raise self.no_table
            raise InfeasibleError(f"{self.no_table}. Leave one of these out: {', '.join(self._asked())}")
        return cells, choices

    def _meshes(self, kinds: Sequence[Submesh]) -> dict[Submesh, list[LogicalMesh]]:
        """Logical meshes of each submesh, those on which all pins can be."""
        out: dict[Submesh, list[LogicalMesh]] = {}
        failed: ShardingError | None = None
        for s in kinds:
            out[s] = []
            for mesh in logical_meshes(self.cluster, s, self.options):
                try:
                    for pinned in self.parts.pinned:
                        on_mesh(pinned, mesh)
                    out[s].append(mesh)
                except ShardingError as error:
                    failed = failed or error
        if failed is not None:
            if not any(out.values()):
                raise failed
            self.pins_refused = f". Meshes are left out on which constraints cannot be: {failed}"
        return out

    @property
    def _most_stages(self) -> int:
        """Stages of a mesh each that are tried."""
        _, most = self.options.stages or (1, None)
        return most or min(self.count, self.cluster.num_devices, MOST_STAGES)

    def _receive_bytes(self) -> NDArray[np.float64]:
        """float64[start, stop]: whole bytes of what crosses into a range, both ways: one microbatch that arrives while
        another is worked on."""
        crossing = self._crossing()
        return crossing[:-1, None] + crossing[None, :]

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
        plain = self._partitions(cells, self._limits(self.plain, self._held(self.plain)))
        for name in self.schedules:
            schedule = SCHEDULES[name]
            found: Sequence[tuple[Partition, ScheduleOptions]]
            if schedule.chunked:
                found = self._chunked(cells, schedule)
            else:
                found = [(p, ()) for p in self._cuts(cells, schedule, plain)]
            out += [b for p, given in found[:BUILT] if (b := self.builder.build(p, name, **dict(given))) is not None]
        return sorted(out, key=lambda b: b.estimate_s)

    def _roomier(self, cells: list[Cells]) -> list[Cells]:
        """With as much memory as the leanest cut needs by estimate; where stages are given, of the schedules that are
        allowed."""
        at, need = self._at_starts(cells), 0.0
        if self.options.starts is not None:
            plain = [SCHEDULES[name] for name in self.schedules if not SCHEDULES[name].chunked]
            need = min((least_memory(at, self._limits(s, self._held(s))) for s in plain), default=0.0)
        need = max(need if np.isfinite(need) else 0.0, least_memory(at, self._leanest()))
        return [replace(c, memory_bytes=c.memory_bytes * max(1.0, need) * (1 + 1e-9)) for c in cells]

    def _held(self, schedule: ScheduleRecord) -> tuple[int, ...]:
        """Microbatches that each of as many stages as there are layers holds. Where that follows from the stages after,
        the last of these are what fewer stages hold."""
        return schedule.in_flight(self.count, self.m)

    def _limits(
        self, schedule: ScheduleRecord, held: Sequence[int], stages: int | None = None, chunks: int = 1
    ) -> Limits:
        """What is searched: so many stages (None: all numbers that are allowed), ``chunks`` of them on each device; the
        last stages hold the last of ``held`` microbatches."""
        nic = min(g.nic.bytes_per_s * g.nics_per_host for g in self.cluster.groups)
        latency = max(g.nic.latency_s for g in self.cluster.groups)
        if sum(g.hosts for g in self.cluster.groups) == 1:
            nic = self.cluster.groups[0].intra_host.bytes_per_s
            latency = self.cluster.groups[0].intra_host.latency_s
        both = 2.0 if self.layered.loss >= 0 else 1.0
        least, _ = self.options.stages or (1, None)
        return Limits(
            devices=tuple(chunks * d for d in self.devices),
            most_stages=stages or self._most_stages,
            least_stages=stages or least,
            num_microbatches=self.m,
            in_flight=lambda after: held[-1 - after],
            cut_s=both * (latency + self._crossing() / nic),
            hidden=schedule.hides,
            contexts=schedule.splits_backward,
            wanted=BUILT,
        )

    def _partitions(self, cells: list[Cells], limits: Limits) -> list[Partition]:
        cells = self._at_starts(cells)
        if not self.options.uniform:
            return partitions(cells, limits)
        found: list[Partition] = []
        for number, cell in enumerate(cells):
            for p in partitions([cell], limits):
                found.append(replace(p, stages=tuple(replace(s, cell=number) for s in p.stages)))
        return sorted(found, key=lambda p: p.estimate_s)

    def _at_starts(self, cells: list[Cells]) -> list[Cells]:
        """Only stages that begin and end where the user wants, on the submesh that the user wants there and with the
        batch where the user wants it."""
        starts = self.options.starts
        if starts is None:
            return cells
        ends = (*starts[1:], self.count)
        given, bound = self.options.submeshes, self.options.batch_axes or ()
        out: list[Cells] = []
        for cell in cells:
            cost = np.full_like(cell.cost, np.inf)
            each = len(bound) == len(starts) > 1
            for number, (start, stop) in enumerate(zip(starts, ends, strict=True)):
                if given is None or len(given) != len(starts) or given[number] == (
                    cell.submesh.hosts, cell.submesh.devices
                ):  # fmt: skip
                    rows = np.array([not each or axes == bound[number] for axes in cell.batch_axes], bool)
                    cost[rows, start, stop] = cell.cost[rows, start, stop]
            out.append(replace(cell, cost=cost))
        return out

    def _cuts(self, cells: list[Cells], schedule: ScheduleRecord, plain: list[Partition]) -> list[Partition]:
        """A stage a mesh. ``plain``: the cuts under the plain schedule, whose numbers of stages are tried where what a
        stage holds depends on how many there are."""
        if schedule is self.plain:
            return plain
        if schedule.in_flight_by_stages_after:
            return self._partitions(cells, self._limits(schedule, self._held(schedule)))
        out: list[Partition] = []
        for p in sorted({len(part.stages) for part in plain[:BUILT]} - {1}):
            out += self._partitions(cells, self._limits(schedule, schedule.in_flight(p, self.m), p))[:1]
        return out

    def _chunked(self, cells: list[Cells], schedule: ScheduleRecord) -> list[tuple[Partition, ScheduleOptions]]:
        """Equal meshes that fill a group of hosts, each with several stages: the cuts whose slowest stages are
        fastest, and how many stages a mesh has."""
        found: list[tuple[Partition, ScheduleOptions]] = []
        for number, cell in enumerate(cells):
            group = self.cluster.groups[cell.submesh.group]
            meshes, rest = divmod(group.hosts * group.devices_per_host, cell.submesh.size)
            if meshes < 2 or rest:
                continue
            for v in self._chunk_counts((schedule.name,)):
                stages = meshes * v
                least, most = self.options.stages or (1, None)
                if not least <= stages <= min(self.count, most or 4 * MOST_STAGES):
                    continue
                held = max(schedule.in_flight(meshes, self.m, chunks=v))
                part = replace(self._at_starts([cell])[0], memory_bytes=cell.memory_bytes / v)
                limits = self._limits(schedule, (held,) * stages, stages, v)
                for p in partitions([part], limits)[:1]:
                    choices = tuple(replace(s, cell=number) for s in p.stages)
                    slowest_s = max(stage_seconds(cell, self.m)[s.option, s.start, s.stop] for s in choices)
                    # a mesh runs v stages in turn: each microbatch keeps it that often as long as the slowest
                    more_s = (v - 1) * (self.m - 1) * float(slowest_s)
                    found.append((Partition(choices, p.estimate_s + more_s), (("chunks", v),)))
        return sorted(found, key=lambda chosen: chosen[0].estimate_s)

    # --- the choice ------------------------------------------------------------------------------------------------

    def _best(self, found: list[Built], cells: list[Cells]) -> tuple[Simulated, list[tuple[str, int, float]]]:
        """The fastest that fits; (pipeline in a line, stages, seconds a step) of all that fit."""
        memory = self.options.memory_bytes
        fits: list[Simulated] = []
        lacking: list[Simulated] = []
        tasks = 0
        found = found[: 3 * FINALISTS]
        if sum(sum(map(len, built.plan.schedule.tasks)) for built in found[:FINALISTS]) > FINAL_TASKS:
            found = sorted(found, key=self.builder.extrapolated_s)  # few can be simulated in full
        for done, built in enumerate(found):
            number = sum(map(len, built.plan.schedule.tasks))
            if fits and (tasks + number > FINAL_TASKS or len(fits) >= FINALISTS or self.watch.over()):
                break
            self.watch.tell("simulation", done, len(found))
            tasks += number
            step = self.builder.simulated(built)
            if step.fullest(memory)[0] <= 1:
                self.watch.found(step.timeline.makespan_s)
                fits.append(step)
            else:
                lacking.append(step)
        self.watch.tell("refinement")
        fits += refined(self.builder, self._at_starts(cells), fits or lacking, self._freedom(), self.watch)
        if not fits:
            raise InfeasibleError(self.refusal or self._lacking(lacking))
        best = min(range(len(fits)), key=lambda i: fits[i].timeline.makespan_s)
        fits[best] = self.builder.fused(fits[best], memory)
        return fits[best], [(s.built.text, len(s.built.plan.stages), s.timeline.makespan_s) for s in fits]

    def _lacking(self, found: list[Simulated]) -> str:
        """Which of pipelines that do not fit lacks least, and how much."""
        memory = self.options.memory_bytes
        step = min(found, key=lambda s: s.fullest(memory)[0])
        part, peak = step.fullest(memory)
        return (
            f"no pipeline fits the devices' memory when it is simulated, of {len(found)} that were tried. The nearest: "
            f"{step.built.text} needs {bytes_text(peak)} of {bytes_text(peak / part)} a device ({_percent(part - 1)} "
            "more than there is); it fits a limit of that"
        )

    def _chunk_counts(self, schedules: Sequence[str]) -> tuple[int, ...]:
        """Numbers of stages a mesh, 2 or more, that are tried."""
        found, wanted = chunk_counts(schedules), self.options.virtual_stages
        return found if wanted is None or not found else (wanted,)

    def _freedom(self) -> Freedom:
        """What may still change of a pipeline that was built."""
        options = self.options
        least, most = options.stages or (1, None)
        fixed = None if options.starts is None else len(options.starts)
        return Freedom(
            least_stages=fixed or least,
            most_stages=fixed or most or self.count,
            submeshes=not options.uniform,
            schedules=self.schedules,
            chunks=self._chunk_counts(self.schedules),
            devices=self.devices,
            memory_bytes=options.memory_bytes,
        )

    def _refusal(self, cells: list[Cells]) -> str:
        """Why nothing could be built, by how much it misses, and the nearest things that would fit."""
        memory = min(c.memory_bytes for c in cells)
        limits = self._leanest()
        need = least_memory(self._at_starts(cells), limits)
        if need <= 1 and (apart := self._apart(cells)):
            return apart
        if need <= 1:
            return (
                f"no pipeline of {self.layered.name} under {', '.join(self.schedules)} can be built on "
                f"{self.cluster.name} with {self.m} microbatches, though memory would do. "
                f"Allow other schedules ({self.plain.name}), numbers of stages or submeshes"
            )
        if need == float("inf"):
            return (
                f"no cut of {self.count} layers into stages suits {self.cluster.name} as it was asked for, under "
                f"{', '.join(self.schedules)}; interleaved schedules want equal meshes, with "
                f"{', '.join(map(str, chunk_counts(SCHEDULES)))} stages each{self.pins_refused}"
            )
        text = (
            f"no cut of {self.count} layers into stages fits {bytes_text(memory)} a device on {self.cluster.name}: the "
            f"leanest needs {bytes_text(need * memory)}, {bytes_text((need - 1) * memory)} "
            f"({_percent(need - 1)}) more. What would fit: a limit of that"
        )
        options = self.options
        if options.starts is not None or options.stages is not None:
            every = min(self.count, self.cluster.num_devices, MOST_STAGES)
            free = least_memory(cells, replace(limits, most_stages=every, least_stages=1))
            text += f"; other stages ({bytes_text(free * memory)} a device)" if free < need else ""
        for times in (2, 4, 8):
            devices = tuple(times * d for d in limits.devices)
            _, asked = options.stages or (1, None)
            most = asked or min(self.count, sum(devices), MOST_STAGES)
            more = least_memory(self._at_starts(cells), replace(limits, devices=devices, most_stages=most))
            if more <= 1:
                text += f"; {times} times as many hosts ({bytes_text(more * memory)} a device)"
                break
        if self.layered.loss >= 0 and "full" not in options.remat:
            text += '; recomputing layers (recompute="full")'
        tried = ", ".join(dict.fromkeys(str(cell.submesh) for cell in cells))
        return f"{text}. More microbatches than {self.m} lower what activations take. Tried were submeshes {tried}"

    def _asked(self) -> list[str]:
        """Options that rule out layouts."""
        options = self.options
        asked = [f"forbid={', '.join(options.forbid)}"] if options.forbid else []
        asked += ["batch_axis="] if options.batch_axes is not None else []
        asked += [str(options.degrees)] if options.degrees else []
        asked += ["whole_examples=True"] if options.whole_examples else []
        return asked + ([f"constraints of {', '.join(p.target for p in options.pins)}"] if options.pins else [])

    def _apart(self, cells: list[Cells]) -> str:
        """Which layers cannot be on one stage, as nothing that was asked for lets their layouts meet; "" where all
        can."""
        seconds = np.min([c.cost[..., FIELDS.index("forward_s")].min(axis=0) for c in cells], axis=0)
        pairs = [k for k in range(self.count - 1) if not np.isfinite(seconds[k, k + 2])]
        asked = self._asked()
        if not pairs or not asked:
            return ""
        names = self.layered.layers
        return (
            f"no stage of {self.layered.name} was found that has both {names[pairs[0]].name} and "
            f"{names[pairs[0] + 1].name} (layers {pairs[0]} and {pairs[0] + 1}) under {' and '.join(asked)}: none of "
            "the layouts that were tried for them meet without what is ruled out. Leave one of these out, or begin a "
            "stage between them"
        )

    def _leanest(self) -> Limits:
        """What cuts hold at least under the schedules that are allowed, with a stage a mesh: as many microbatches as
        under the plain one, and on every stage as many as a single stage."""
        alone = min(SCHEDULES[name].in_flight(1, self.m)[-1] for name in self.schedules)
        return self._limits(self.plain, [max(alone, held) for held in self._held(self.plain)])


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %" if part >= 1 else f"{100 * part:.3g} %"
