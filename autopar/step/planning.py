"""A step and what was asked for → its plan of one kind, and what was traced to make or to check it.

`Forms`         a call of the step as it may be planned, each form traced once
`plan_program`  the whole step's graph → `planner.best_plan`
`plan_stages`   the step in layers → `pipeline_search.plan_pipeline`, or `follow`
`bound_to`      a plan that is there → whether it is of this step

Which of these a step gets is `step.choice`'s.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import jax

from autopar.arrays import Array
from autopar.frontend.arguments import Args, Arguments, Kwargs
from autopar.frontend.layering.layers import Layered, layered, outline
from autopar.frontend.layering.phases import Inlined, inlined
from autopar.frontend.layering.source import Source, shapes_of
from autopar.frontend.partitioning_metadata import metadata_pins
from autopar.frontend.trace import Traced
from autopar.frontend.user_rules import registered_rules, with_flops
from autopar.frontend.whole_step import WholeStep, whole_step
from autopar.garbage import collection_paused
from autopar.inter_op.follow import follow as follow_pipeline
from autopar.inter_op.pipeline_plan import pipeline_plan
from autopar.inter_op.pipeline_search import plan_pipeline as search
from autopar.intra_op.plan_search import SOLVE_S
from autopar.intra_op.remat.choose import Kept
from autopar.ir.cluster import ClusterSpec
from autopar.ir.errors import PlanMismatchError
from autopar.ir.graph import Graph
from autopar.ir.layers import LayeredGraph, Outline, StageGraph
from autopar.ir.plan import OneProgram, Plan, PlanConfig
from autopar.ir.planned_step import PlannedStep
from autopar.ir.progress import Watch
from autopar.jax_compat import jax_version, remat_is_undone
from autopar.planner import best_plan
from autopar.primitives import rules_of
from autopar.runtime.local_devices import undoes_remat
from autopar.runtime.part import check_stages
from autopar.step.asked import Asked, pipeline_options
from autopar.step.followed import Followed, followed
from autopar.step.options import check_supported
from autopar.step.step_plan import StepPlan

log = logging.getLogger("autopar")
PROGRAM_SHARE = 0.4
"""The part of the time that is left for the step as one program, where it may be in stages as well (guessed)."""
TASK_S = 1e-4
"""A pipeline's task takes that long at least: Python dispatches it (measured, `benchmarks.runtime`)."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A step to plan.

    Attributes:
        cluster: what to plan for.
        given: a plan to take instead.
        follow: the plan where parameters lie.
        known: plans of the step for other calls, taken again where the graph is the same.
        watch: ends the search, and is told how far it is.
    """

    fun: Callable[..., Any]
    name: str
    arguments: Arguments
    asked: Asked
    cluster: ClusterSpec
    given: Plan | None = None
    follow: Followed | None = None
    known: Sequence[Plan] = ()
    on_unsupported: str = "replicate"
    workers: int | None = None
    cache: str | os.PathLike[str] | None = None
    watch: Watch = field(default_factory=Watch)


T = TypeVar("T", bound=Traced | Layered)


@dataclass(frozen=True, kw_only=True)
class Bound(Generic[T]):
    """A plan with the step that it is of: what was traced, and what that was made from, as shapes."""

    plan: StepPlan
    traced: T
    source: Source

    @property
    def step_s(self) -> float:
        """Seconds of a step: as predicted, or as long as its tasks take to be dispatched."""
        plan = self.plan.data
        if isinstance(plan.body, OneProgram):
            return plan.predictions.step_s
        return max(plan.predictions.step_s, TASK_S * sum(map(len, plan.pipelined.plan.schedule.tasks)))

    @property
    def is_several(self) -> bool:
        """True of several stages: they idle the less, the more microbatches there are."""
        return len(self.plan.data.meshes) > 1

    @property
    def computes_again(self) -> bool:
        """True of stages some of whose layers keep less than all."""
        return any(kept != "none" for stage in self.plan.data.pipelined.plan.stages for kept in stage.remat)


class Forms:
    """A call of a step in the forms in which it may be planned, each traced when it is first asked for.

    Raises, from its methods:
        TraceError, MicrobatchError: the step cannot be traced, or not be split into microbatches exactly.
        LoweringError: an operator that nobody has described, where these are refused.
    """

    def __init__(self, request: Request, args: Args, kwargs: Kwargs) -> None:
        self.request, self.args, self.kwargs = request, args, kwargs
        self.trace_s = 0.0
        """Wall seconds of all tracing so far."""
        self.program = functools.cache(self._program)
        self.layered = functools.cache(self._layered)

    @property
    def honours_remat(self) -> bool:
        """True where the cluster's compiler computes again what it is told to."""
        return not undoes_remat(self.request.cluster)

    def _program(self, num_microbatches: int, checkpoints: bool) -> WholeStep:
        """The whole step; ``checkpoints``: with its own `jax.checkpoint`s."""
        request, started_s = self.request, time.perf_counter()
        request.watch.tell("tracing")
        log.info("tracing %s%s", request.name, _in_microbatches(num_microbatches))
        with request.watch.at_once():
            found = whole_step(self.source(num_microbatches), request.name, keep_remat=checkpoints)
        check_supported([found.traced.graph], request.on_unsupported, request.name)
        self.trace_s += time.perf_counter() - started_s
        return found

    def _layered(self, num_microbatches: int) -> Layered:
        """The step in layers."""
        request, arguments, started_s = self.request, self.request.arguments, time.perf_counter()
        assert request.asked.stages is not None or request.given is not None
        config = request.asked.stages or request.asked.config
        request.watch.tell("cutting into layers")
        log.info("cutting %s into layers%s", request.name, _in_microbatches(num_microbatches))
        with request.watch.at_once():
            made = layered(
                request.fun,
                *self._call_shapes,
                whole=self._inlined,
                num_microbatches=num_microbatches,
                batch_argnums=arguments.batch_argnums,
                static_argnums=arguments.static_argnums,
                donate_argnums=arguments.donate_argnums,
                layers=config.layers,
                platform=request.cluster.platform,
            )
        check_supported(made.graph.graphs, request.on_unsupported, made.graph.name)
        self.trace_s += time.perf_counter() - started_s
        return made

    @functools.cached_property
    def outline(self) -> Outline:
        """The step's layers with all examples, which takes a fraction of what `layered` does."""
        request, arguments, started_s = self.request, self.request.arguments, time.perf_counter()
        request.watch.tell("cutting into layers")
        with request.watch.at_once():
            found = outline(
                request.fun, *self._call_shapes, self._inlined, batch_argnums=arguments.batch_argnums,
                static_argnums=arguments.static_argnums, layers=(request.asked.stages or request.asked.config).layers,
                platform=request.cluster.platform,
            )  # fmt: skip
        self.trace_s += time.perf_counter() - started_s
        return found

    @functools.cached_property
    def _call_shapes(self) -> tuple[Args, Kwargs]:
        """The arguments, without where they lie."""
        return _shapes(self.args), _shapes(self.kwargs)

    @functools.cached_property
    def _inlined(self) -> Inlined:
        """The step's trace, which layers for any number of microbatches are cut out of."""
        arguments = self.request.arguments
        return inlined(
            self.request.fun, *self._call_shapes, arguments.static_argnums, arguments.donate_argnums,
            self.request.cluster.platform,
        )  # fmt: skip

    def source(self, num_microbatches: int) -> Source:
        """What the whole step is traced from."""
        request, arguments = self.request, self.request.arguments
        return Source(
            step=request.fun, args=self.args, kwargs=self.kwargs, num_microbatches=num_microbatches,
            batch_argnums=arguments.batch_argnums, static_argnums=arguments.static_argnums,
            donate_argnums=arguments.donate_argnums, layers=None, platform=request.cluster.platform,
        )  # fmt: skip

    def bound_program(self, plan: Plan, found: WholeStep) -> Bound[Traced]:
        """A plan with the whole step that it is of."""
        source = self.source(plan.config.num_microbatches)
        args, kwargs = shapes_of(self.args, source.static_argnums), shapes_of([self.kwargs])[0]
        return Bound(
            plan=StepPlan(plan, found.in_tree, found.traced.out_tree),
            traced=found.traced,
            source=replace(source, args=args, kwargs=kwargs),
        )

    def bound_stages(self, plan: Plan, made: Layered, apart: Sequence[StageGraph] | None = None) -> Bound[Layered]:
        """A plan with the layers that it is of; ``apart``: these as stages of their own, if they are there.

        Raises:
            LoweringError, RuleError: an operator cannot run on its shards, or a user's kernel not as its rule says.
        """
        check_stages(made, plan.pipelined, self.request.cluster.platform, registered_rules(), apart)
        return Bound(plan=StepPlan(plan, made.call.in_tree, made.call.out_tree), traced=made, source=made.source)


def bound_to(forms: Forms, plan: Plan) -> Bound[Any]:
    """A plan with the step that it is of. Raises as `Forms`, and PlanMismatchError where it is of another step."""
    count, name = plan.config.num_microbatches, forms.request.name
    if isinstance(plan.body, OneProgram):
        found = forms.program(count, plan.body.checkpoints)
        _check_program(plan, found.traced.graph, name)
        return forms.bound_program(plan, found)
    made = forms.layered(count)
    if made.graph.fingerprint != plan.fingerprint:
        raise PlanMismatchError(_difference(made.graph, plan))
    return forms.bound_stages(plan, made)


def plan_program(
    forms: Forms, config: PlanConfig, *, checkpoints: bool, freely: bool = False, solve_s: float = SOLVE_S
) -> Bound[Traced]:
    """The step as one program; ``checkpoints``: with its own `jax.checkpoint`s; ``freely`` as in `best_plan`;
    ``solve_s`` too.

    Raises:
        OptionError, ClusterError, ShardingError, InfeasibleError, RuleError: see `planner.best_plan`; and as `Forms`.
    """
    request = forms.request
    found = forms.program(config.num_microbatches, checkpoints)
    traced, arguments = found.traced, request.arguments
    dynamic, _ = arguments.split(forms.args)
    asked = config
    if request.follow is not None:
        pins = followed(request.follow, arguments, forms.args, forms.kwargs, request.name)
        asked = replace(config, pins=(*pins, *config.pins))
    log.info(
        "planning %d operators for %s%s", len(traced.graph.nodes), request.cluster.name,
        _in_microbatches(config.num_microbatches),
    )  # fmt: skip
    dims = arguments.batch_dims(dynamic, forms.kwargs)
    consts = len(traced.jaxpr.consts)
    plan = best_plan(
        with_flops(traced.graph),
        request.cluster,
        asked,
        name=request.name,
        user_rules=registered_rules(),
        batch_inputs={consts + i: dim for i, dim in enumerate(dims) if dim is not None},
        metadata=metadata_pins((dynamic, forms.kwargs), traced.graph.arg_paths[consts:]),
        notes=traced.notes,
        trace_s=forms.trace_s,
        jax_version=jax_version(),
        kept=Kept(within=forms.honours_remat),
        freely=freely,
        watch=request.watch.part(PROGRAM_SHARE if request.asked.stages is not None else 1.0),
        solve_s=solve_s,
    )
    assert isinstance(plan.body, OneProgram) and plan.step is not None
    step = replace(plan.step, undoes_remat=("cpu",) if remat_is_undone() else ())
    plan = replace(plan, body=replace(plan.body, checkpoints=checkpoints), step=step)
    plan = _with_left_over(plan, forms)
    return forms.bound_program(plan, found)


@collection_paused()
def plan_stages(forms: Forms, config: PlanConfig) -> tuple[Bound[Layered], float]:
    """The step as a pipeline of stages, and seconds a step of the fastest single stage, infinite where none was
    simulated.

    Raises:
        OptionError, ClusterError, InfeasibleError, SolverTimeoutError: see `pipeline_search.plan_pipeline`; and as
            `Forms`, `Forms.bound_stages`.
    """
    request = forms.request
    made = forms.layered(config.num_microbatches)
    graph = _with_flops(made.graph)
    options = pipeline_options(config, request.workers)
    if request.follow is not None:
        plan, paths = request.follow.plan, request.follow.paths
        found = follow_pipeline(graph, plan, options.forbid, registered_rules(), paths, config.memory_bytes)
    else:
        log.info(
            "planning %d layers (%d kinds) for %s%s",
            len(graph.layers), len(graph.kinds), request.cluster.name, _in_microbatches(config.num_microbatches),
        )  # fmt: skip
        cache = None if request.cache is None else os.fspath(request.cache)
        found = search(graph, request.cluster, options, registered_rules(), cache, request.watch)
    step = PlannedStep(
        graph=graph,
        user_rules=rules_of(graph.graphs, registered_rules()),
        follows=request.follow is not None,
        notes=made.notes,
    )
    data = pipeline_plan(step, request.cluster, config, found, trace_s=forms.trace_s, jax_version=jax_version())
    return forms.bound_stages(_with_left_over(data, forms), made, found.apart), found.alone_s


def _with_left_over(plan: Plan, forms: Forms) -> Plan:
    """The plan with notes on what a user may not expect: devices that have no part of the step, examples that are not
    split, and what was taken for the batch where nobody said it and there is more to choose from."""
    notes: list[str] = []
    used = sum(mesh.num_devices for mesh in plan.meshes)
    if used < plan.cluster.num_devices:
        notes.append(f"the plan uses {used} of the cluster's {plan.cluster.num_devices} devices")
    arguments, count = forms.request.arguments, plan.config.num_microbatches
    dynamic, _ = arguments.split(forms.args)
    dims = arguments.batch_dims(dynamic, forms.kwargs)
    leaves = zip(plan.inputs[len(plan.inputs) - len(dims) :], dims, strict=True)
    batch = [(leaf.path, leaf.type.shape[dim] // count) for leaf, dim in leaves if dim is not None]
    sizes = [[axis.size for axis in mesh.axes if axis.size > 1] for mesh in plan.meshes]
    for path, examples in batch:
        whole = [s for s, axes in enumerate(sizes) if axes and all(examples % size for size in axes)]
        if whole:
            where = "the mesh" if len(sizes) == 1 else f"the mesh of stage {' and '.join(map(str, whole))}"
            what = f"the {examples} examples{' of a microbatch' if count > 1 else ''}"
            notes.append(f"{path}: no axis of {where} divides {what}: they are not split")
            break
    if batch and arguments.batch_argnums is None and jax.tree_util.tree_leaves((dynamic[2:], forms.kwargs)):
        examples = batch[0][1] * count
        notes.append(f"the batch is taken to be args[1], of {examples} examples; batch_argnums= says otherwise")
    made = plan.provenance
    return replace(plan, provenance=replace(made, notes=(*notes, *made.notes)))


def _in_microbatches(count: int) -> str:
    return f" in {count} microbatches" if count > 1 else ""


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
    if len(plan.inputs) != len(graph.inputs):
        raise PlanMismatchError(
            f"the plan was made for {len(plan.inputs)} argument leaves; {name} got {len(graph.inputs)}. Plan again"
        )
    planned = None if plan.step is None else plan.step.graph
    nodes = planned.nodes if isinstance(planned, Graph) else ()
    for node, wanted in zip(graph.nodes, nodes, strict=False):
        if node.digest != wanted.digest:
            raise PlanMismatchError(
                f"the plan was made for another function (planned {plan.name!r}, given {name!r}): the first operator "
                f"that differs is {node}, in the plan {wanted}. Plan again, or load the plan of this function"
            )
    raise PlanMismatchError(
        f"the plan was made for another function: it has {len(nodes)} operators, {name} has {len(graph.nodes)}. "
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
