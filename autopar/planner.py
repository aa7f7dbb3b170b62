"""The order of the planning stages: a Graph, a mesh and a configuration → a `Plan`.

trace (elsewhere) → flatten bodies → strategies, classes and clusters → seeds → ILP → decisions → memory
→ plan. Pure: no jax, no devices, no files. Wall times are recorded as provenance only.
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar._version import __version__
from autopar.intra_op.extract import Decisions, decide, spell_out, totals
from autopar.intra_op.flatten import flatten
from autopar.intra_op.problem import build_problem
from autopar.intra_op.seeds import seeds_for
from autopar.intra_op.solve import Evaluator, solve
from autopar.intra_op.specs import Mesh
from autopar.intra_op.strategy_graph import StrategyGraph, build
from autopar.ir.cluster import ClusterSpec, LogicalMesh
from autopar.ir.errors import InfeasibleError, ShardingError, SolverTimeoutError
from autopar.ir.graph import Graph, Node
from autopar.ir.plan import (
    SCHEMA_VERSION,
    ArgPlan,
    Pin,
    Plan,
    PlanConfig,
    Predictions,
    Provenance,
    ShardingPlan,
)
from autopar.ir.strategy import Solution

__all__ = ["plan_graph"]
_ = (fnmatch, Callable, Sequence, replace, Any, Pin, InfeasibleError, SolverTimeoutError, ShardingError, Node, Evaluator)


def plan_graph(
    graph: Graph,
    cluster: ClusterSpec,
    logical: LogicalMesh,
    config: PlanConfig,
    *,
    name: str = "step",
    user_rules: Mapping[str, str] | None = None,
    batch_inputs: Mapping[int, int] | None = None,
    trace_s: float = 0.0,
    jax_version: str = "",
) -> Plan:
    """Plans one train step on one logical mesh."""
    clock = _Clock(trace=trace_s)
    mesh = Mesh(logical, config.forbid)
    flat = flatten(graph)
    strategy_graph = build(flat, mesh, user_rules)
    clock.lap("strategies")
    problem = build_problem(strategy_graph, config.memory_bytes)
    seeds = seeds_for(strategy_graph, problem)
    clock.lap("seeds")
    solution = solve(problem, [s for _, s in seeds], config.time_limit_s, config.solver)
    clock.lap("solve")
    out = decide(strategy_graph, solution.choice)
    plan = _assemble(graph, cluster, logical, config, strategy_graph, out, solution, clock, name, jax_version)
    return plan


def candidate_shapes(cluster: ClusterSpec) -> list[tuple[int, ...]]:
    """Mesh shapes worth planning for: one axis, and two: hosts × devices of a host, and each way to cut a host."""
    hosts = sum(g.hosts for g in cluster.groups)
    count = cluster.num_devices
    shapes = [(count,)]
    if hosts > 1 and count % hosts == 0:
        shapes.append((hosts, count // hosts))
    elif count >= 4 and count % 2 == 0:
        shapes.append((2, count // 2))
    return [s for s in shapes if all(n > 1 for n in s) or len(s) == 1]


class _Clock:
    def __init__(self, **given: float) -> None:
        self.seconds = dict(given)
        self.last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now


def _assemble(
    graph: Graph, cluster: ClusterSpec, logical: LogicalMesh, config: PlanConfig, strategy_graph: StrategyGraph,
    out: Decisions, solution: Solution, clock: _Clock, name: str, jax_version: str,
) -> Plan:  # fmt: skip
    parts = spell_out(out)
    compute_s, communication_s, flops = totals(out)
    out_of = dict(graph.donated)
    inputs = tuple(
        ArgPlan(path=path, type=graph.values[v], spec=spec, donated_to=out_of.get(i, -1))
        for i, (path, v, spec) in enumerate(zip(graph.arg_paths, graph.inputs, parts.root.inputs, strict=True))
    )
    outputs = tuple(
        ArgPlan(path=path, type=graph.values[o] if isinstance(o, int) else o.type, spec=spec)
        for path, o, spec in zip(graph.out_paths, graph.outputs, parts.root.outputs, strict=True)
    )
    peak = 0
    sharding = ShardingPlan(
        mesh=logical,
        strategies=parts.strategies,
        root=parts.root,
        chains=parts.chains,
        collectives=tuple(out.collectives),
        replicated=parts.replicated,
        objective_s=solution.report.objective_s,
        peak_memory_bytes=peak,
        report=solution.report,
    )
    clock.lap("plan")
    return Plan(
        schema_version=SCHEMA_VERSION,
        name=name,
        fingerprint=graph.fingerprint,
        node_hashes=(),
        cluster=cluster,
        config=config,
        inputs=inputs,
        outputs=outputs,
        sharding=sharding,
        predictions=Predictions(
            step_s=compute_s + communication_s,
            compute_s=compute_s,
            communication_s=communication_s,
            peak_memory_bytes=peak,
            argument_bytes=0,
            flops=flops,
        ),
        provenance=Provenance(
            autopar_version=__version__,
            jax_version=jax_version,
            seconds=tuple(clock.seconds.items()),
        ),
    )
