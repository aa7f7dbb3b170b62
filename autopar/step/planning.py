"""A step and what was asked for → its plan, and what was traced to make or to check it.

`plan_program`  the whole step's graph → `planner.best_plan`
`plan_stages`   the step in layers → `pipeline_search.plan_pipeline`, or `follow`

Either takes a plan that is given, and only looks whether it is of this step.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import jax

from autopar._version import __version__
from autopar.arrays import Array
from autopar.frontend.arguments import Args, Arguments, Kwargs
from autopar.frontend.layering.layers import Layered, layered
from autopar.frontend.layering.source import Source, shapes_of
from autopar.frontend.partitioning_metadata import metadata_pins
from autopar.frontend.trace import Traced
from autopar.frontend.user_rules import registered_rules, with_flops
from autopar.frontend.whole_step import whole_step
from autopar.inter_op.follow import follow as follow_pipeline
from autopar.inter_op.pipeline_search import Pipeline
from autopar.inter_op.pipeline_search import plan_pipeline as search
from autopar.intra_op.remat.choose import Kept
from autopar.ir.cluster import ClusterSpec
from autopar.ir.errors import PlanMismatchError
from autopar.ir.graph import Graph
from autopar.ir.layers import LayeredGraph
from autopar.ir.pipelined import Pipelined, PlannedLayer
from autopar.ir.plan import (
    SCHEMA_VERSION,
    Considered,
    LinkPrediction,
    OneProgram,
    Plan,
    PlanConfig,
    Predictions,
    Provenance,
    WorkerPrediction,
)
from autopar.jax_compat import jax_version
from autopar.planner import best_plan
from autopar.runtime.local_devices import undoes_remat
from autopar.runtime.part import check_stages
from autopar.step.followed import Followed, followed
from autopar.step.options import check_supported, pipeline_options
from autopar.step.step_plan import StepPlan

log = logging.getLogger("autopar")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A step to plan.

    Attributes:
        cluster: what to plan for.
        given: a plan to take instead.
        follow: the plan where parameters lie.
        known: plans of the step for other calls, taken again where the graph is the same.
    """

    fun: Callable[..., Any]
    name: str
    arguments: Arguments
    config: PlanConfig
    cluster: ClusterSpec
    given: Plan | None = None
    follow: Followed | None = None
    known: Sequence[Plan] = ()
    on_unsupported: str = "replicate"
    workers: int | None = None
    cache: str | os.PathLike[str] | None = None


T = TypeVar("T", bound=Traced | Layered)


@dataclass(frozen=True, kw_only=True)
class Bound(Generic[T]):
    """A plan with the step that it is of: what was traced, and what that was made from, as shapes."""

    plan: StepPlan
    traced: T
    source: Source


def plan_program(request: Request, args: Args, kwargs: Kwargs) -> Bound[Traced]:
    """The step as one program.

    Raises:
        TraceError, MicrobatchError: the step cannot be traced, or not be split into microbatches exactly.
        PlanMismatchError: the plan that is given is of another step.
        OptionError, ClusterError, ShardingError, InfeasibleError, RuleError: see `planner.best_plan`.
        LoweringError: an operator that nobody has described, where these are refused.
    """
    config, arguments, cluster = request.config, request.arguments, request.cluster
    started_s = time.perf_counter()
    log.info("tracing %s", request.name)
    source = _source(request, args, kwargs)
    traced, in_tree = whole_step(source, request.name, keep_remat=not undoes_remat(cluster))
    dynamic, _ = arguments.split(args)
    trace_s = time.perf_counter() - started_s
    check_supported([traced.graph], request.on_unsupported, request.name)
    fingerprint = traced.graph.fingerprint
    same = [plan for plan in request.known if plan.fingerprint == fingerprint]
    if request.given is not None:
        _check_program(request.given, traced.graph, request.name)
        data = request.given
    elif same:
        data = same[0]
    else:
        if request.follow is not None:
            pins = followed(request.follow, arguments, args, kwargs, request.name)
            config = replace(config, pins=(*pins, *config.pins))
        log.info("planning %d operators for %s", len(traced.graph.nodes), cluster.name)
        dims = arguments.batch_dims(dynamic, kwargs)
        consts = len(traced.jaxpr.consts)
        data = best_plan(
            with_flops(traced.graph),
            cluster,
            config,
            name=request.name,
            user_rules=registered_rules(),
            batch_inputs={consts + i: dim for i, dim in enumerate(dims) if dim is not None},
            metadata=metadata_pins((dynamic, kwargs), traced.graph.arg_paths[consts:]),
            node_hashes=tuple(n.digest for n in traced.graph.nodes),
            notes=traced.notes,
            trace_s=trace_s,
            jax_version=jax_version(),
            kept=Kept(within=not undoes_remat(cluster)),
        )
    source = replace(source, args=shapes_of(args, source.static_argnums), kwargs=shapes_of([kwargs])[0])
    return Bound(plan=StepPlan(data, in_tree, traced.out_tree), traced=traced, source=source)


def plan_stages(request: Request, args: Args, kwargs: Kwargs) -> Bound[Layered]:
    """The step as a pipeline of stages.

    Raises:
        TraceError, MicrobatchError: the step cannot be traced, or not be split into microbatches exactly.
        PlanMismatchError: the plan that is given is of another step.
        OptionError, ClusterError, InfeasibleError: see `pipeline_search.plan_pipeline`.
        LoweringError, RuleError: an operator cannot run on its shards, or a user's kernel not as its rule says.
    """
    config, arguments, cluster, given = request.config, request.arguments, request.cluster, request.given
    started_s = time.perf_counter()
    log.info("cutting %s into layers", request.name)
    made = layered(
        request.fun,
        _shapes(args),
        _shapes(kwargs),
        num_microbatches=config.num_microbatches,
        batch_argnums=arguments.batch_argnums,
        static_argnums=arguments.static_argnums,
        donate_argnums=arguments.donate_argnums,
        layers=config.layers,
        platform=cluster.platform,
    )
    graph = _with_flops(made.graph)
    check_supported(graph.graphs, request.on_unsupported, graph.name)
    trace_s = time.perf_counter() - started_s
    same = [plan for plan in request.known if plan.fingerprint == graph.fingerprint]
    if given is not None:
        if graph.fingerprint != given.fingerprint:
            raise PlanMismatchError(_difference(graph, given))
        data = given
    elif same:
        data = same[0]
    else:
        options = pipeline_options(config, request.workers)
        if request.follow is not None:
            plan, paths = request.follow.plan, request.follow.paths
            found = follow_pipeline(graph, plan, options.forbid, registered_rules(), paths, config.memory_bytes)
        else:
            log.info(
                "planning %d layers (%d kinds) in %d microbatches for %s",
                len(graph.layers), len(graph.kinds), config.num_microbatches, cluster.name,
            )  # fmt: skip
            cache = None if request.cache is None else os.fspath(request.cache)
            found = search(graph, cluster, options, registered_rules(), cache)
        data = _of_pipeline(graph, cluster, config, found, trace_s, made.notes)
        check_stages(made, data.pipelined, cluster.platform, registered_rules())
    return Bound(plan=StepPlan(data, made.call.in_tree, made.call.out_tree), traced=made, source=made.source)


def _check_program(plan: Plan, graph: Graph, name: str) -> None:
    """Raises PlanMismatchError, naming the first argument or operator that differs, unless ``plan`` is of ``graph``."""
    if plan.fingerprint == graph.fingerprint:
        return
    for i, (have, path) in enumerate(zip(plan.inputs, graph.arg_paths, strict=False)):
        t = graph.values[graph.inputs[i]]
        if have.path != path or have.type != t:
            raise PlanMismatchError(
                f"the plan was made for other arguments: plan has {have.path}: {have.type}, {name} got {path}: {t}. "
                "Plan again for these shapes"
            )
    assert isinstance(plan.body, OneProgram)
    hashes = plan.body.node_hashes
    if len(plan.inputs) != len(graph.inputs):
        raise PlanMismatchError(
            f"the plan was made for {len(plan.inputs)} argument leaves; {name} got {len(graph.inputs)}. Plan again"
        )
    for node, wanted in zip(graph.nodes, hashes, strict=False):
        if node.digest != wanted:
            raise PlanMismatchError(
                f"the plan was made for another function (planned {plan.name!r}, given {name!r}): the first operator "
                f"that differs is {node}. Plan again, or load the plan of this function"
            )
    raise PlanMismatchError(
        f"the plan was made for another function: it has {len(hashes)} operators, {name} has "
        f"{len(graph.nodes)}. "
        "Plan again, or load the plan of this function"
    )


def _difference(graph: LayeredGraph, plan: Plan) -> str:
    """How a step is another than a plan's."""
    what = f"{plan.name}'s plan is for another step than {graph.name}"
    types = dict(zip(graph.arg_paths, graph.argument_types, strict=True))
    for planned in plan.inputs:
        if planned.path in types and types[planned.path] != planned.type:
            return f"{what}: {planned.path} is {types[planned.path]}, in the plan {planned.type}. Plan again for it"
    layers = plan.pipelined.layers
    if len(graph.layers) != len(layers):
        return f"{what}: it has {len(graph.layers)} layers, in the plan {len(layers)}. Plan again for it"
    for k, (layer, planned) in enumerate(zip(graph.layers, layers, strict=True)):
        if (layer.name, layer.kind, layer.sources) != (planned.name, planned.kind, planned.sources):
            return f"{what}: the first layer that differs is {k}, {layer.name} ({', '.join(layer.sources)})"
    return f"{what}: their layers or their updates compute other things, or other arguments are donated"


def _source(request: Request, args: Args, kwargs: Kwargs) -> Source:
    arguments, config = request.arguments, request.config
    return Source(
        step=request.fun, args=args, kwargs=kwargs, num_microbatches=config.num_microbatches,
        batch_argnums=arguments.batch_argnums, static_argnums=arguments.static_argnums,
        donate_argnums=arguments.donate_argnums, layers=config.layers, platform=request.cluster.platform,
    )  # fmt: skip


def _shapes(tree: Any) -> Any:
    """The tree with arrays as their shapes: what is planned and traced has no mesh yet."""
    return jax.tree_util.tree_map(_shape, tree)


def _shape(x: Any) -> Any:
    if not isinstance(x, jax.Array | Array):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))


def _with_flops(graph: LayeredGraph) -> LayeredGraph:
    """The step in layers, with what the user said of the FLOPs of own kernels."""
    kinds = tuple(
        replace(kind, forward=with_flops(kind.forward), joint=tuple(map(with_flops, kind.joint)))
        for kind in graph.kinds
    )
    before = None if graph.before is None else with_flops(graph.before)
    return replace(graph, before=before, kinds=kinds, update=with_flops(graph.update))


def _of_pipeline(
    graph: LayeredGraph, cluster: ClusterSpec, config: PlanConfig, found: Pipeline, trace_s: float,
    notes: tuple[str, ...],
) -> Plan:  # fmt: skip
    spelled = found.shardings
    made = Plan(
        schema_version=SCHEMA_VERSION,
        name=graph.name,
        fingerprint=graph.fingerprint,
        cluster=cluster,
        config=config,
        inputs=found.inputs,
        outputs=found.outputs,
        body=Pipelined(
            layers=tuple(
                PlannedLayer(name=x.name, kind=x.kind, sources=x.sources, sharding=number, wiring=wiring)
                for x, number, wiring in zip(graph.layers, spelled.of, spelled.wiring, strict=True)
            ),
            shardings=spelled.distinct,
            joins=spelled.chains,
            plan=found.plan,
            exchange=found.exchange,
        ),
        predictions=_predicted(config, found),
        provenance=Provenance(
            autopar_version=__version__,
            jax_version=jax_version(),
            seconds=(("trace", trace_s), *found.seconds),
            considered=tuple(Considered(name=text, step_s=seconds) for text, seconds in found.simulated),
            notes=notes,
        ),
    )
    made.verify()
    return made


def _predicted(config: PlanConfig, found: Pipeline) -> Predictions:
    stages, timeline = found.plan.stages, found.timeline
    first = [found.plan.schedule.mesh_of_stage.index(w) for w in range(len(timeline.workers))]
    workers = tuple(
        WorkerPrediction(
            num_devices=stages[s].mesh.num_devices,
            busy_s=worker.busy_s,
            peak_bytes=worker.peak_bytes,
            limit_bytes=float(config.memory_bytes or stages[s].mesh.device.memory_bytes),
        )
        for s, worker in zip(first, timeline.workers, strict=True)
    )
    links = tuple(LinkPrediction(source=link.source, target=link.target, busy_s=link.busy_s) for link in timeline.links)
    return Predictions(
        step_s=timeline.makespan_s,
        compute_s=max(w.busy_s for w in workers),
        communication_s=max((link.busy_s for link in links), default=0.0),
        peak_memory_bytes=max(w.peak_bytes for w in workers),
        argument_bytes=None,
        flops=None,
        workers=workers,
        links=links,
    )
