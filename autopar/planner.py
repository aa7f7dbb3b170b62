"""The order of the planning stages: a Graph, a cluster and a configuration → a `Plan`.

`best_plan` is the fastest of the plans on the mesh that was asked for, or on those worth planning for
(`candidate_shapes`), each made by `plan_graph`:

    Graph ─ `MeshProblem` (strategies, classes and clusters of them, when values are live), its baselines        `pose`
          ─ `PlanSearch.free`: the fastest choice x without a limit
          ─ `PlanSearch.limited`, where that does not fit: minimise step_s(x) with peak(x) ≤ limit
          ─ `with_recomputation`, where nothing else fits, or where it was asked for                           `_solve`
          ─ `measured`: what recomputation saves and costs under the plan                                  `plan_graph`
          ─ `spell_out`, `collectives`, `assumptions`                                                       `_assemble`

What decides is step_s(x) = compute + collectives, and peak(x) = max_t live_bytes(x, t), both counted in full for each
choice that is looked at (`mesh_problem.Candidate`); the solver's own memory rows are an estimate of the second. Pure:
no jax, no devices, no files. The clock is read for the solver's time limit and for the plan's provenance.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar._version import __version__
from autopar.cost.logical_meshes import candidate_shapes, default_axis_names, logical_mesh
from autopar.garbage import collection_paused
from autopar.intra_op.assumptions import assumptions
from autopar.intra_op.axis_uses import axis_uses, where_examples_are
from autopar.intra_op.degrees import argument_roles, check_examples, microbatch_loop
from autopar.intra_op.extract import collectives, spell_out
from autopar.intra_op.held import live_at
from autopar.intra_op.mesh_problem import Asked, Candidate, MeshProblem
from autopar.intra_op.pins import Pins, on_mesh, resolve_pins
from autopar.intra_op.plan_search import SOLVE_S, PlanSearch
from autopar.intra_op.precision import rounded
from autopar.intra_op.problem import argument_bytes, least_argument_bytes
from autopar.intra_op.refusals import OverLimitError, contradiction, no_plan, refusal
from autopar.intra_op.remat.carry import measured
from autopar.intra_op.remat.choose import UNDONE, WORTH, Kept, better, with_recomputation
from autopar.intra_op.specs import Mesh
from autopar.ir.cluster import ClusterSpec, LogicalMesh
from autopar.ir.errors import AutoparError, InfeasibleError, OptionError, SolverTimeoutError
from autopar.ir.graph import Graph
from autopar.ir.plan import (
    SCHEMA_VERSION,
    ArgPlan,
    Considered,
    OneProgram,
    Pin,
    Place,
    Plan,
    PlanConfig,
    Predictions,
    Provenance,
    WorkerPrediction,
)
from autopar.ir.planned_step import PlannedStep
from autopar.ir.progress import Watch
from autopar.ir.sharding_plan import Recompute, ShardingPlan
from autopar.ir.strategy import SolverReport
from autopar.ir.text import bytes_text, seconds_text
from autopar.primitives import rules_of

log = logging.getLogger("autopar")


SLOW = 0.1
"""Part by which a plan that fits is slower than the one without a limit, before one that computes again is looked for
without having been asked for (chosen: that search takes its time)."""


def best_plan(
    graph: Graph,
    cluster: ClusterSpec,
    config: PlanConfig,
    *,
    name: str = "step",
    user_rules: Mapping[str, str] | None = None,
    batch_inputs: Mapping[int, int] | None = None,
    metadata: Sequence[Pin] = (),
    notes: tuple[str, ...] = (),
    trace_s: float = 0.0,
    jax_version: str = "",
    kept: Kept | None = None,
    freely: bool = False,
    watch: Watch | None = None,
    solve_s: float = SOLVE_S,
) -> Plan:
    """The fastest plan of a train step over the mesh that was asked for, or over those worth planning for
    (`candidate_shapes`). Where recomputation is a last resort, it is tried on several meshes only after none has a plan
    without.

    Args:
        config: what was asked for, in the plan as it is; ``memory_bytes`` None: the device's memory.
        user_rules: primitive or ffi target → text of its sharding rule (`primitives.custom`).
        batch_inputs: graph input, by position → its batch dimension, for the baselines and forced methods.
        metadata: pins that a model library keeps beside its parameters; those that name axes of a mesh hold there.
        notes: of tracing, for the plan's record, as are ``name``, ``trace_s`` (seconds) and ``jax_version``.
        kept: where the compiler keeps recomputations (default: everywhere).
        freely: take only plans that the limit on memory does not slow: what fits otherwise is not looked for.
        watch: where it ends the search, the best plan so far is returned, meshes that were not begun left out.
        solve_s: seconds that the solver has at most for one mesh.

    Raises:
        OverLimitError: under ``freely``, the fastest plan of no mesh fits; with the least that one needs.
        InfeasibleError: no mesh has a plan that fits; the message is that of the first mesh.
        SolverTimeoutError: likewise, and for one of them the time limit passed first.
        OptionError: ``batch_axis`` is no axis of the mesh.
        ClusterError: a mesh does not fit the cluster, or would mix devices of two kinds.
        OptionError: degrees do not divide the devices, or the examples of a microbatch.
        ShardingError: a pin does not fit its value; an unknown method; a batch that ``batch_axis`` does not divide.
        RuleError: a user's rule is malformed or does not fit its operator.
    """
    kept, watch = kept or Kept(within=True), watch or Watch()
    shapes = _shapes(cluster, config)
    passes: list[bool | None] = [config.recompute]
    if config.recompute is None and len(shapes) > 1 and not freely:
        passes = [False, None] if kept.within else [False]

    def plan_on(shape: tuple[int, ...], recompute: bool | None, watch: Watch) -> Plan:
        """The plan over one mesh, its configuration as it was asked for."""
        logical = logical_mesh(cluster, shape, config.axis_names or config.degrees.names, config.devices)
        if config.batch_axis is not None and config.batch_axis not in logical.axis_names:
            raise OptionError(f"batch_axis {config.batch_axis!r} is no axis of the mesh {logical}")
        if config.degrees and config.batch_axis is None:
            check_examples(graph, logical, config.degrees, batch_inputs or {}, config.num_microbatches)
        log.info("solving for mesh %s", logical)
        from_metadata, unknown = on_mesh(metadata, logical)
        pins = resolve_pins(graph, logical, (*from_metadata, *config.pins))
        said = [f"partitioning metadata names no axis of the mesh: {', '.join(unknown)}"] if unknown else []
        if apart := [graph.arg_paths[i] for i, _ in pins.apart(graph)]:
            shown = ", ".join(apart[:4]) + (f" and {len(apart) - 4} more" if len(apart) > 4 else "")
            said.append(f"state: pinned apart from its new value, which is moved back unpredicted: {shown}")
        if config.recompute and not kept.within:
            said.append(f"nothing is recomputed: {UNDONE}")
        plan = plan_graph(
            graph,
            cluster,
            logical,
            replace(config, recompute=recompute),
            name=name,
            user_rules=user_rules,
            batch_inputs=batch_inputs,
            pins=pins,
            notes=(*notes, *said),
            trace_s=trace_s,
            jax_version=jax_version,
            kept=kept,
            freely=freely,
            watch=watch,
            solve_s=solve_s,
        )
        assert plan.step is not None
        watch.found(plan.predictions.step_s)
        return replace(plan, config=config, step=replace(plan.step, metadata=tuple(metadata), notes=notes))

    order = sorted(shapes, key=lambda shape: len(shape) != 2)  # two axes can do what one can: first, if time ends
    plans: dict[tuple[int, ...], Plan] = {}
    failed: dict[tuple[int, ...], AutoparError] = {}
    for recompute in passes:
        for number, shape in enumerate(order):
            if plans and watch.over():
                break
            watch.tell("meshes of the whole step", number, len(order))
            try:
                plans[shape] = plan_on(shape, recompute, watch.part(1 / (len(order) - number)))
            except (InfeasibleError, SolverTimeoutError) as error:  # another shape may fit
                failed[shape] = error
            except KeyboardInterrupt:
                if not (plans and watch.over()):
                    raise
        if plans:
            found = [plans[shape] for shape in shapes if shape in plans]
            return _with_slower(*sorted(found, key=lambda p: p.predictions.step_s))
    errors = [failed[shape] for shape in shapes]
    if freely:
        over = [error for error in errors if isinstance(error, OverLimitError)]
        raise min(over, key=lambda error: error.peak_bytes) if over else errors[-1]
    if len(shapes) == 1:
        raise errors[0]
    tried = ", ".join("x".join(map(str, shape)) for shape in shapes)
    error = next((e for e in errors if isinstance(e, SolverTimeoutError)), errors[0])
    raise type(error)(f"{error}. Tried were meshes {tried}")


def _with_slower(best: Plan, *others: Plan) -> Plan:
    """The best plan, which says what those on other meshes would take."""
    rows = tuple(
        Considered(
            name=f"mesh {plan.sharding.mesh}",
            step_s=plan.predictions.step_s,
            peak_bytes=plan.predictions.peak_memory_bytes,
        )
        for plan in others
    )
    made = best.provenance
    return replace(best, provenance=replace(made, considered=(*made.considered, *rows)))


@collection_paused()
def plan_graph(
    graph: Graph,
    cluster: ClusterSpec,
    logical: LogicalMesh,
    config: PlanConfig,
    *,
    name: str = "step",
    user_rules: Mapping[str, str] | None = None,
    batch_inputs: Mapping[int, int] | None = None,
    pins: Pins | None = None,
    notes: tuple[str, ...] = (),
    trace_s: float = 0.0,
    jax_version: str = "",
    kept: Kept | None = None,
    freely: bool = False,
    watch: Watch | None = None,
    solve_s: float = SOLVE_S,
) -> Plan:
    """Plans one train step on the mesh ``logical``; ``config``'s own mesh and pins are only recorded.

    Args:
        pins: resolved for this graph and mesh (`resolve_pins`); arguments that are not named here as `best_plan` has.

    Raises:
        InfeasibleError: no plan found fits the memory limit; says by how much.
        ShardingError: a sharding constraint in the user's code does not fit the mesh; an unknown method; a batch axis
            that the mesh does not have or that does not divide the batch.
        RuleError: a user's rule is malformed or does not fit its operator.
    """
    clock, watch = Clock(trace=trace_s), watch or Watch()
    posed = pose(graph, logical, config, user_rules=user_rules, batch_inputs=batch_inputs, pins=pins, clock=clock)
    limit = config.memory_bytes if config.memory_bytes is not None else logical.device.usable_bytes
    deadline = time.perf_counter() + min(solve_s, watch.left_s)
    search = PlanSearch(posed=posed, solver=config.solver, deadline=deadline)
    with watch.at_once():
        solved = _solve(search, config, limit, kept or Kept(within=True), freely)
    if solved.report.status != "optimal":
        watch.over()
    best, notes = solved.best, (*notes, *solved.notes)
    report = posed.proven(solved.report, best)
    recompute = measured(posed, best)
    clock.lap("solve")
    rows = tuple(
        Considered(name=method, step_s=c.step_s, peak_bytes=float(c.peak), fits=c.peak <= limit)
        for method, c in posed.baselines
        if method
    )
    step = PlannedStep(
        graph=graph,
        user_rules=rules_of([graph], user_rules or {}),
        batch_inputs=tuple(sorted((batch_inputs or {}).items())),
        freely=freely,
    )
    return _assemble(step, cluster, logical, config, report, best, recompute, clock, name, jax_version, rows, notes)


def pose(
    graph: Graph,
    logical: LogicalMesh,
    config: PlanConfig,
    *,
    user_rules: Mapping[str, str] | None = None,
    batch_inputs: Mapping[int, int] | None = None,
    pins: Pins | None = None,
    fold_above: int | None = None,
    clock: Clock | None = None,
    baselines: bool = True,
) -> MeshProblem:
    """All that comes before the solver: strategies, the problem without a limit and, unless a
    method or a batch axis is forced, the methods' baselines.

    Args:
        batch_inputs: as in `best_plan`.
        pins: as in `plan_graph`.
        fold_above: as in `Asked`.
        clock: gets the laps ``strategies`` and ``seeds``.
        baselines: False to leave these out, which take longest: of a choice that is known.

    Raises:
        ShardingError, RuleError: as `plan_graph`.
    """
    clock = Clock() if clock is None else clock
    asked = Asked(
        user_rules=user_rules or {}, pins=pins or Pins(), method=config.method, batch_axis=config.batch_axis,
        batch=batch_inputs or {}, degrees=config.degrees, num_microbatches=config.num_microbatches,
        fold_above=fold_above,
    )  # fmt: skip
    mesh = Mesh(logical, config.forbid, rounded(graph, logical.device.platform))
    posed = MeshProblem(graph, mesh, asked)
    if not baselines:
        return posed
    assert posed.problem is not None  # builds all that it needs
    clock.lap("strategies")
    posed.start_all(time.perf_counter() + SOLVE_S)
    clock.lap("seeds")
    return posed


def _shapes(cluster: ClusterSpec, config: PlanConfig) -> list[tuple[int, ...]]:
    """Mesh shapes to plan for."""
    if config.mesh_shape is not None:
        return [config.mesh_shape]
    if config.degrees.names is None:
        return _with_axes(candidate_shapes(cluster, config.mesh_axes), config)
    shape = config.degrees.shape(cluster.num_devices)
    if shape is None:
        raise OptionError(f"{config.degrees}: does not divide the {cluster.num_devices} devices of {cluster.name}")
    return [shape]


def _with_axes(shapes: list[tuple[int, ...]], config: PlanConfig) -> list[tuple[int, ...]]:
    """Those shapes whose meshes have all axes that pins name; where none has, all."""
    named = {axis for pin in config.pins for dim in pin.dims for axis in dim or ()}
    return [shape for shape in shapes if named <= set(default_axis_names(len(shape)))] or shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solved:
    report: SolverReport
    best: Candidate
    notes: tuple[str, ...] = ()


def _solve(search: PlanSearch, config: PlanConfig, limit: int, kept: Kept, freely: bool) -> _Solved:
    """The best of the solver's plans and the baselines, by what is counted, among those that fit ``limit`` bytes a
    device.

    Only where the best plan exceeds the limit are usages added to the problem. Plans that recompute are looked for
    where nothing else fits, and where what does is much slower than the best plan without a limit; if they were asked
    for, where it is slower at all.
    Raises InfeasibleError where nothing that was found fits, SolverTimeoutError where time ended before more was.
    """
    free = search.free()
    if not free.report.fits:
        raise no_plan(free.report, config, contradiction(search.posed.graph.mesh.logical, config))
    fastest = search.posed.counted(free.choice)
    if fastest.peak <= limit:
        found = search.found(limit, free)
        assert found.best is not None
        return _Solved(report=found.report, best=found.best)
    if freely:
        needs = f"the fastest plan on mesh {search.posed.graph.mesh.logical} needs {bytes_text(fastest.peak)}"
        raise OverLimitError(f"{needs}, over {bytes_text(limit)}", fastest.step_s, fastest.peak, limit)
    may = config.recompute is not False and kept.within
    now = time.perf_counter()
    half = replace(search, deadline=now + search.left_s / 2) if may else search
    keeping = found = half.limited(limit, free)
    most_s = (1 + (WORTH if config.recompute else SLOW)) * fastest.step_s
    if may and (found.best is None or found.best.step_s > most_s):
        if least_argument_bytes(search.posed.graph) <= limit:
            again = with_recomputation(search, free, found, limit, kept)
            found = found if again is None else better(found, again, free.report.bound_s)
    if found.best is None:
        proven = max(found.least_bytes, least_argument_bytes(search.posed.graph)) > limit
        why = refusal(found, limit, config, kept)
        raise InfeasibleError(why) if proven else no_plan(found.report, config, why)
    notes: tuple[str, ...] = ()
    if found.best.posed.recompute:
        without = f"the least peak found is {bytes_text(keeping.nearest.peak)}"
        if keeping.best is not None:
            without = f"the fastest found takes {seconds_text(keeping.best.step_s)}"
        notes = (f"values are recomputed: without that {without}",)
    return _Solved(report=found.report, best=found.best, notes=notes)


class Clock:
    """Wall seconds by phase, beside those that were ``given``."""

    def __init__(self, **given: float) -> None:
        self.seconds = dict(given)
        self.last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Adds the seconds since the last lap to ``phase``."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now


def _assemble(
    step: PlannedStep, cluster: ClusterSpec, logical: LogicalMesh, config: PlanConfig, report: SolverReport,
    best: Candidate, recompute: tuple[Recompute, ...], clock: Clock, name: str, jax_version: str,
    considered: tuple[Considered, ...], notes: tuple[str, ...],
) -> Plan:  # fmt: skip
    """The plan of ``best``: its decisions as they are written down, its predictions and its provenance."""
    out, graph = best.out, step.graph
    assert isinstance(graph, Graph)
    parts = spell_out(out)
    new, donated = dict(graph.state), set(graph.donated)
    roles = argument_roles(out.graph.flat, dict(step.batch_inputs), microbatch_loop(graph, config.num_microbatches))
    inputs = tuple(
        ArgPlan(
            path=path,
            type=graph.values[v],
            places=(Place(spec=spec),),
            role=roles[i],
            becomes=new.get(i, -1),
            donated_to=new[i] if i in donated else -1,
        )
        for i, (path, v, spec) in enumerate(zip(graph.arg_paths, graph.inputs, parts.root.inputs, strict=True))
    )
    of_result = {j: roles[i] for i, j in graph.state}
    outputs = tuple(
        ArgPlan(
            path=path,
            type=graph.values[o] if isinstance(o, int) else o.type,
            places=(Place(spec=spec),),
            role=of_result.get(j, "other"),
        )
        for j, (path, o, spec) in enumerate(zip(graph.out_paths, graph.outputs, parts.root.outputs, strict=True))
    )
    sharding = ShardingPlan(
        mesh=logical,
        strategies=parts.strategies,
        root=parts.root,
        chains=parts.chains,
        collectives=tuple(collectives(out)),
        recompute=recompute,
        replicated=parts.replicated,
        operators=parts.operators,
        assumptions=assumptions(best.out.graph.flat),
        objective_s=report.objective_s,
        peak_memory_bytes=best.peak,
        report=report,
        uses=axis_uses(out, where_examples_are(out, step.batch_inputs)),
    )
    clock.lap("plan")
    return Plan(
        schema_version=SCHEMA_VERSION,
        name=name,
        fingerprint=graph.fingerprint,
        cluster=cluster,
        config=config,
        inputs=inputs,
        outputs=outputs,
        body=OneProgram(sharding=sharding),
        predictions=Predictions(
            step_s=best.step_s,
            compute_s=best.compute_s,
            communication_s=best.communication_s,
            hidden_s=best.hidden_s,
            peak_memory_bytes=best.peak,
            argument_bytes=argument_bytes(out),
            flops=best.flops,
            workers=(
                WorkerPrediction(
                    num_devices=logical.num_devices,
                    busy_s=best.step_s,
                    peak_bytes=best.peak,
                    limit_bytes=config.memory_bytes or logical.device.usable_bytes,
                    live=live_at(out, best.posed.live, best.worst, inputs),
                ),
            ),
        ),
        provenance=Provenance(
            autopar_version=__version__,
            jax_version=jax_version,
            seconds=tuple(clock.seconds.items()),
            considered=considered,
            notes=notes,
        ),
        step=step,
    )
