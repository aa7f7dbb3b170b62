"""A step in layers and a cluster → the pipeline that trains it fastest: `plan_pipeline`.

layouts     cost[option, i, j] of layers i to j on every submesh: `stage_layouts`. With three axes, first on meshes of
            two, then also on meshes of three of the submeshes that the best cut uses
partitions  cuts into stages by estimate, under each schedule: `cuts`
built       stages on devices, what crosses between them, a schedule: `candidates.Builder`
simulated   each as a program, by discrete events: `_best`, which refines what fits (`refinement`); the fastest that
            fits is the plan

The estimate only orders candidates: what a plan says of its time and memory is what its simulated program takes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from autopar._version import __version__
from autopar.inter_op.cache import StoredPipeline, key_of, load, store
from autopar.inter_op.candidates import Builder, Built, Simulated
from autopar.inter_op.cells import Cells
from autopar.inter_op.check_options import check_options
from autopar.inter_op.cuts import Cuts
from autopar.inter_op.layer_layouts import Wanted, rate_of
from autopar.inter_op.layer_problems import LayerProblems, Parts, distinct_layers, parts_of
from autopar.inter_op.layer_shardings import layer_shardings, placed
from autopar.inter_op.program.emit import emit
from autopar.inter_op.program.simulate import simulate
from autopar.inter_op.program.timeline import Timeline
from autopar.inter_op.refinement import is_small, refined
from autopar.inter_op.refusals import why_none_fits, why_none_is_built
from autopar.inter_op.search_space import Freedom
from autopar.inter_op.stage_layouts import StageLayouts
from autopar.inter_op.submesh import Submesh
from autopar.intra_op.mesh_problem import Asked
from autopar.ir.cluster import ClusterSpec
from autopar.ir.errors import InfeasibleError, SolverTimeoutError
from autopar.ir.layer_sharding import LayerShardings
from autopar.ir.layers import LayeredGraph, StageGraph
from autopar.ir.pipeline import Layout, PipelinePlan, ScalarExchange
from autopar.ir.pipelined import PipelineOptions
from autopar.ir.plan import ArgPlan
from autopar.ir.program import Program
from autopar.ir.progress import Watch

T = TypeVar("T")
log = logging.getLogger("autopar")

FINALISTS = 12
"""Pipelines that are simulated at most."""
ROOMS = 3
"""How often pipelines are cut again with less memory, where simulations are dear and those that fit by estimate lack
some (guessed)."""
FINAL_TASKS = 150_000
"""Tasks that are simulated at most, all finalists together; one is always (three to four seconds, measured)."""


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
        self.seconds: dict[str, float] = {}
        self.cuts = Cuts(layered, cluster, options, check_options(layered, cluster, options))

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
        layouts = self.layouts()
        found = self._timed("stages", lambda: self.built(layouts))
        if self.options.mesh_axes > 2:
            used = self._used(found[0], layouts.problems.parts) if found else {}
            if self._timed("layouts of three axes", lambda: layouts.look_closer(used)):
                found = self._timed("stages", lambda: self.built(layouts))
        refusal = ""
        if not found:
            cells = self._known(layouts, every=True)
            refusal = why_none_is_built(self.cuts, cells, layouts.pins_refused)
            if not is_small(self.cuts.count, self.cuts.m) and self.options.starts is None:
                raise InfeasibleError(refusal)
            # estimates count more than there is at any time: the simulator decides
            found = self._timed("stages again", lambda: self._candidates(self.cuts.roomier(cells)))
        best, simulated = self._timed("simulation", lambda: self._best(found, refusal))
        made = self._timed("shardings", lambda: pipeline_of(best, simulated, layouts.problems))
        return replace(made, seconds=tuple(self.seconds.items()))

    def layouts(self) -> StageLayouts:
        """What layers can do on the submeshes of the cluster."""
        parts = self._timed("layers", lambda: parts_of(self.layered, self.options.remat, self.options.pins))
        log.debug("; ".join(distinct_layers(parts)))
        problems = LayerProblems(parts, self.options.forbid, Asked(user_rules=self.user_rules or {}))
        layouts = StageLayouts(problems, self.cluster, self.options, self.user_rules, self.cache, self.watch)
        self._timed("layouts", layouts.look)
        return layouts

    def _timed(self, phase: str, what: Callable[[], T]) -> T:
        start = time.perf_counter()
        out = what()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
        return out

    def built(self, layouts: StageLayouts) -> list[Built]:
        """Pipelines worth simulating, by estimate, of what was found of layouts."""
        self.watch.tell("stages")
        return self._candidates(self._known(layouts, every=False))

    def _known(self, layouts: StageLayouts, *, every: bool) -> list[Cells]:
        """What was found of layouts (`StageLayouts.cells`), of which pipelines are built from now on."""
        cells, choices = layouts.cells(every=every)
        parts, options = layouts.problems.parts, self.options
        self.builder = Builder(parts, self.cluster, cells, choices, options.forbid, options.resharding)
        return cells

    def _used(self, built: Built, parts: Parts) -> dict[Submesh, Wanted]:
        """The submeshes of a pipeline, which layers they have, what these keep, and at what rate of a price."""
        out: dict[Submesh, Wanted] = {}
        for choice in built.choices:
            here = range(choice.start, choice.stop)
            rate = rate_of(self.builder.options[choice.cell][choice.option].price, self.cuts.m)
            found = frozenset((parts.number[k], built.layouts[k].remat, rate) for k in here)
            submesh = self.builder.cells[choice.cell].submesh
            out[submesh] = out.get(submesh, frozenset()) | found
        return out

    def _candidates(self, cells: Sequence[Cells]) -> list[Built]:
        made = (self.builder.build(p, name, **dict(given)) for p, name, given in self.cuts.candidates(cells))
        return sorted((built for built in made if built is not None), key=lambda b: b.estimate_s)

    def _best(self, found: list[Built], refusal: str) -> tuple[Simulated, list[tuple[str, int, float]]]:
        """The fastest that fits; (pipeline in a line, stages, seconds a step) of all that fit. ``refusal``: why none
        was expected to."""
        memory, room, small = self.options.memory_bytes, 1.0, is_small(self.cuts.count, self.cuts.m)
        fits, lacking = self._simulated(found)
        for _ in range(0 if refusal or small else ROOMS):  # what refinement does where simulations are cheap
            if fits or not found:
                break
            room /= min(step.fullest(memory)[0] for step in lacking[-len(found) :])
            found = self._candidates([replace(c, memory_bytes=room * c.memory_bytes) for c in self.builder.cells])
            fits, more = self._simulated(found)
            lacking += more
        self.watch.tell("refinement")
        fits += refined(
            self.builder, self.cuts.at_starts(self.builder.cells), fits or lacking, self._freedom(), self.watch
        )
        if not fits:
            raise InfeasibleError(refusal or why_none_fits(lacking, memory))
        best = min(range(len(fits)), key=lambda i: fits[i].timeline.makespan_s)
        fits[best] = self.builder.fused(fits[best], memory)
        return fits[best], [(s.built.text, len(s.built.plan.stages), s.timeline.makespan_s) for s in fits]

    def _simulated(self, found: list[Built]) -> tuple[list[Simulated], list[Simulated]]:
        """Those that fit and those that do not, the best by estimate first; no more once there is one that fits, and
        work or time are spent."""
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
            if step.fullest(self.options.memory_bytes)[0] <= 1:
                self.watch.found(step.timeline.makespan_s)
                fits.append(step)
            else:
                lacking.append(step)
        return fits, lacking

    def _freedom(self) -> Freedom:
        """What may still change of a pipeline that was built."""
        options, cuts = self.options, self.cuts
        least, most = options.stages or (1, None)
        fixed = None if options.starts is None else len(options.starts)
        return Freedom(
            least_stages=fixed or least,
            most_stages=fixed or most or cuts.count,
            submeshes=not options.uniform,
            schedules=cuts.schedules,
            chunks=cuts.chunk_counts(cuts.schedules),
            devices=cuts.devices,
            memory_bytes=options.memory_bytes,
        )
