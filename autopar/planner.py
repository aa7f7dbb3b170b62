"""The order of the planning stages: a Graph, a mesh and a configuration → a `Plan`.

trace (elsewhere) → flatten bodies → strategies, classes and clusters → seeds → solver → decisions → memory
→ plan. Pure: no jax, no devices, no files. Wall times are recorded as provenance only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autopar._version import __version__
from autopar.garbage import collection_paused
from autopar.intra_op.assumptions import assumptions
from autopar.intra_op.evaluate import Evaluator
from autopar.intra_op.extract import collectives, decide, spell_out, totals
from autopar.intra_op.flatten import Flat, flatten
from autopar.intra_op.liveness import Liveness, liveness
from autopar.intra_op.peak import live_bytes
from autopar.intra_op.problem import argument_bytes, build_problem
from autopar.intra_op.seeds import METHODS, restrict, restriction, seeds_for
from autopar.intra_op.solve import solve
from autopar.intra_op.specs import Mesh
from autopar.intra_op.strategy_graph import StrategyGraph, build
from autopar.ir.cluster import ClusterSpec, LogicalMesh
from autopar.ir.errors import InfeasibleError, ShardingError
from autopar.ir.graph import Graph, Node
from autopar.ir.plan import SCHEMA_VERSION, ArgPlan, Plan, PlanConfig, Predictions, Provenance, ShardingPlan
from autopar.ir.pretty import bytes_text
from autopar.ir.strategy import Problem, Solution, SolverReport
from autopar.pins import Pins


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
    node_hashes: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
    trace_s: float = 0.0,
    jax_version: str = "",
) -> Plan:
    """Plans one train step on one logical mesh.

    Args:
        batch_inputs: graph input → its batch dimension, for the baselines and forced methods.

    Raises:
        InfeasibleError: no plan found fits the memory limit; says by how much.
        ShardingError: a pin does not fit its value; an unknown method.
    """
    clock = Clock(trace=trace_s)
    posed = pose(graph, logical, config, user_rules=user_rules, batch_inputs=batch_inputs, pins=pins, clock=clock)
    limit = config.memory_bytes if config.memory_bytes is not None else logical.device.memory_bytes
    report, best = _solve(posed, config, limit)
    clock.lap("solve")
    rows = tuple((method, c.step_s, float(c.peak), c.peak <= limit) for method, c in posed.baselines if method)
    return _assemble(graph, cluster, logical, config, report, best, clock, name, jax_version, rows, node_hashes, notes)


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
) -> Posed:
    """All that comes before the solver: strategies, the problem without a limit, and seeds.

    Args:
        batch_inputs: as in `plan_graph`.
        fold_above: the most planning nodes that are not folded into classes; default `fold.UNFOLDED_NODES`.
        clock: gets the laps ``strategies`` and ``seeds``.

    Raises:
        ShardingError: as `plan_graph`.
    """
    clock = Clock() if clock is None else clock
    pins = pins or Pins()
    batch = batch_inputs or {}
    flat = flatten(graph, {**pins.inputs, **{("out", j): p for j, p in pins.outputs.items()}})
    strategy_graph = build(flat, Mesh(logical, config.forbid), user_rules, _pinner(pins, logical), fold_above)
    live = liveness(flat)
    clock.lap("strategies")
    problem = build_problem(strategy_graph, live, None)
    masks = _masks(strategy_graph, config, batch)
    deadline = time.perf_counter() + config.time_limit_s
    seeds = seeds_for(strategy_graph, problem, batch, deadline) if not masks else []
    clock.lap("seeds")
    return Posed(strategy_graph, live, problem, masks, seeds)


def candidate_shapes(cluster: ClusterSpec) -> list[tuple[int, ...]]:
    """Mesh shapes worth planning for: one axis, and two: hosts × devices of a host, or a host cut in two."""
    hosts = sum(g.hosts for g in cluster.groups)
    count = cluster.num_devices
    shapes = [(count,)]
    if hosts > 1 and count % hosts == 0:
        shapes.append((hosts, count // hosts))
    elif count >= 4 and count % 2 == 0:
        shapes.append((2, count // 2))
    return [s for s in shapes if all(n > 1 for n in s) or len(s) == 1]


def _pinner(pins: Pins, logical: LogicalMesh) -> Callable[[Node], Any]:
    """What a node's result is pinned to: by name, or by a sharding constraint in the user's code."""

    def pin_of(node: Node) -> Any:
        if node.primitive == "name":
            return pins.names.get(str(node.params.get("name")))
        if node.primitive == "sharding_constraint" and node.params.get("pin") is not None:
            return _constraint(node, logical)
        return None

    return pin_of


def _constraint(node: Node, logical: LogicalMesh) -> Any:
    shape = node.result_types[0].shape
    sizes = {a.name: a.size for a in logical.axes}
    dims = tuple(node.params["pin"]["dims"]) + ((),) * (len(shape) - len(node.params["pin"]["dims"]))
    for d, axes in enumerate(dims):
        parts = 1
        for axis in axes or ():
            if axis not in sizes:
                raise ShardingError(
                    f"{node}: with_sharding_constraint names mesh axis {axis!r}; the plan's mesh has "
                    f"{', '.join(sizes)}. Pass mesh= a jax.sharding.Mesh with the axis names that your code uses"
                )
            parts *= sizes[axis]
        if shape[d] % parts:
            raise ShardingError(
                f"{node}: with_sharding_constraint cannot shard dimension {d} (size {shape[d]}) over {'·'.join(axes)} "
                f"(size {parts}): not divisible. Pad to {-(-shape[d] // parts) * parts} or drop the constraint"
            )
    return dims


def _masks(graph: StrategyGraph, config: PlanConfig, batch: Mapping[int, int]) -> dict[int, Any]:
    """Cluster → allowed states, from a forced method and a forced batch axis."""
    masks: dict[int, Any] = {}
    if config.method != "auto":
        if config.method not in METHODS:
            raise ShardingError(f"unknown method {config.method!r}: known are auto, {', '.join(METHODS)}")
        masks = restriction(graph, config.method, batch)
    if config.batch_axis is not None:
        mesh = graph.mesh
        if config.batch_axis not in mesh.logical.axis_names:
            raise ShardingError(
                f"batch_axis={config.batch_axis!r}: the mesh has axes {', '.join(mesh.logical.axis_names)}"
            )
        if config.batch_axis in mesh.names:
            axis = mesh.names.index(config.batch_axis)
            for position, dim in batch.items():
                this = graph.classes[graph.class_of[graph.flat.args[position]]]
                codes = mesh.space(graph.flat.result_types[graph.flat.args[position]][0]).codes
                mask = np.array([codes[c][axis] == dim for c in this.signature.results[0][this.follow]], bool)
                if not mask.any():
                    raise ShardingError(
                        f"{graph.flat.regions[0].graph.arg_paths[position]}: batch dimension {dim} does not divide "
                        f"over batch_axis {config.batch_axis!r} (size {mesh.sizes[axis]})"
                    )
                masks[this.cluster] = masks.get(this.cluster, True) & mask
    return masks


class Candidate:
    """A choice of states with what it is predicted to cost when all is counted: chains shared, buffers included."""

    def __init__(self, graph: StrategyGraph, live: Liveness, choice: Sequence[int]) -> None:
        self.choice = tuple(choice)
        self.out = decide(graph, self.choice)
        self.compute_s, self.communication_s, self.flops = totals(self.out)
        self.step_s = self.compute_s + self.communication_s
        self.live_bytes = live_bytes(self.out, live)
        self.peak = int(self.live_bytes.max(initial=0.0))
        self.worst = int(np.argmax(self.live_bytes)) if len(self.live_bytes) else 0


class Posed:
    """One step on one mesh, ready to be solved.

    ``problem`` has no limit and all states; ``baselines`` are its seeds by method. The solver sees only the states that
    ``masks`` (cluster → bool[states]) allow: choices that it takes and gives number those.
    """

    def __init__(
        self,
        graph: StrategyGraph,
        live: Liveness,
        problem: Problem,
        masks: Mapping[int, Any],
        seeds: Sequence[tuple[str, Sequence[int]]],
    ) -> None:
        self.graph, self.live, self.problem = graph, live, problem
        self.baselines = tuple((method, Candidate(graph, live, seed)) for method, seed in seeds)
        self._masks = masks
        _, self._keep = restrict(problem, masks)
        self.seeds = [
            tuple(int(np.searchsorted(k, s)) for s, k in zip(c.choice, self._keep, strict=True))
            for _, c in self.baselines
        ]
        """The baselines' choices, for the solver."""
        self._counted: dict[tuple[int, ...], Candidate] = {}

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All that was counted so far, baselines last."""
        return (*self._counted.values(), *(c for _, c in self.baselines))

    def limited(self, limit_bytes: float) -> Problem:
        """The problem with usages and a limit, in bytes per device. Usages are an estimate: what fits is decided by
        counting (`count`)."""
        return build_problem(self.graph, self.live, limit_bytes)

    def count(self, choice: tuple[int, ...]) -> Candidate:
        """What a solver's choice costs when all is counted."""
        if choice not in self._counted:
            states = [int(k[s]) for s, k in zip(choice, self._keep, strict=True)]
            self._counted[choice] = Candidate(self.graph, self.live, states)
        return self._counted[choice]

    def solve(
        self, problem: Problem, time_limit_s: float, solver: str = "auto", free: Solution | None = None
    ) -> Solution:
        """Solves ``problem``, this one's own or a `limited` one; then ``free`` is the solution without the limit."""
        view, _ = restrict(problem, self._masks)
        return solve(view, self.seeds, time_limit_s, solver, free, lambda choice: self.count(choice).live_bytes)


def _solve(posed: Posed, config: PlanConfig, limit: int) -> tuple[SolverReport, Candidate]:
    """The best of the solver's plans and the seeds, by what is counted, among those that fit.

    Only where the best plan exceeds the limit are usages added to the problem.
    """
    deadline = time.perf_counter() + config.time_limit_s
    least = 0.0

    def attempt(problem: Problem, free: Solution | None = None) -> Solution:
        return posed.solve(problem, max(0.5, deadline - time.perf_counter()), config.solver, free)

    solution = attempt(posed.problem)
    if posed.count(solution.choice).peak > limit:
        problem = posed.limited(float(limit))
        least = Evaluator(problem).least_peak()
        if least <= limit:
            solution = attempt(problem, solution)
    report, found = solution.report, posed.count(solution.choice)
    fitting = [c for c in posed.candidates if c.peak <= limit]
    if fitting:
        best = min(fitting, key=lambda c: c.step_s)
        if best is not found:
            status = "optimal" if report.status == "optimal" and best.step_s <= found.step_s else "feasible"
            report = replace(report, status=status, objective_s=max(best.step_s, report.bound_s), over_bytes=0.0)
        return report, best
    mesh = posed.graph.mesh.logical
    if least > limit:
        raise InfeasibleError(
            f"no plan fits memory_bytes={limit} ({bytes_text(limit)} a device) on mesh {mesh}: every "
            f"plan needs at least {bytes_text(least)}, {bytes_text(least - limit)} over the limit. {_ADVICE}"
        )
    best = min(posed.candidates, key=lambda c: c.peak)
    raise InfeasibleError(
        f"no plan found fits memory_bytes={limit} ({bytes_text(limit)} a device) on mesh {mesh}: the "
        f"least peak found is {bytes_text(best.peak)}, {bytes_text(best.peak - limit)} over the limit, at "
        f"{_where(posed.graph.flat, best.worst)}; of it {bytes_text(argument_bytes(best.out))} are arguments. {_ADVICE}"
    )


_ADVICE = (
    "More devices, more microbatches (num_microbatches), rematerialisation (jax.checkpoint) or a smaller batch lower it"
)


def _where(flat: Flat, n: int) -> str:
    node = flat.node[n]
    return str(node) if node is not None else f"a loop's {flat.kind[n]}"


class Clock:
    """Wall seconds by phase."""

    def __init__(self, **given: float) -> None:
        self.seconds = dict(given)
        self.last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now


def _assemble(
    graph: Graph, cluster: ClusterSpec, logical: LogicalMesh, config: PlanConfig, report: SolverReport,
    best: Candidate, clock: Clock, name: str, jax_version: str, baselines: Any, node_hashes: tuple[str, ...],
    notes: tuple[str, ...],
) -> Plan:  # fmt: skip
    out = best.out
    parts = spell_out(out)
    out_of = dict(graph.donated)
    inputs = tuple(
        ArgPlan(path=path, type=graph.values[v], spec=spec, donated_to=out_of.get(i, -1))
        for i, (path, v, spec) in enumerate(zip(graph.arg_paths, graph.inputs, parts.root.inputs, strict=True))
    )
    outputs = tuple(
        ArgPlan(path=path, type=graph.values[o] if isinstance(o, int) else o.type, spec=spec)
        for path, o, spec in zip(graph.out_paths, graph.outputs, parts.root.outputs, strict=True)
    )
    sharding = ShardingPlan(
        mesh=logical,
        strategies=parts.strategies,
        root=parts.root,
        chains=parts.chains,
        collectives=tuple(collectives(out)),
        replicated=parts.replicated,
        assumptions=assumptions(best.out.graph.flat),
        objective_s=report.objective_s,
        peak_memory_bytes=best.peak,
        report=report,
    )
    clock.lap("plan")
    return Plan(
        schema_version=SCHEMA_VERSION,
        name=name,
        fingerprint=graph.fingerprint,
        node_hashes=node_hashes,
        cluster=cluster,
        config=config,
        inputs=inputs,
        outputs=outputs,
        sharding=sharding,
        predictions=Predictions(
            step_s=best.step_s,
            compute_s=best.compute_s,
            communication_s=best.communication_s,
            peak_memory_bytes=best.peak,
            argument_bytes=argument_bytes(out),
            flops=best.flops,
        ),
        provenance=Provenance(
            autopar_version=__version__,
            jax_version=jax_version,
            seconds=tuple(clock.seconds.items()),
            baselines=baselines,
            notes=notes,
        ),
    )
