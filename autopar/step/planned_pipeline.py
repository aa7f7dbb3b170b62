"""Pipelines from Python: `plan_pipeline` plans one for a step and a cluster, `load_pipeline` reads a saved one.

The step is cut into layers, all ways to run these on the cluster are searched, and what comes out is a
`PlannedPipeline`: a value to print, save, simulate and compare, and to run (`PlannedPipeline.compile`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax

from autopar._version import __version__
from autopar.frontend.arguments import Arguments
from autopar.frontend.layering.layers import Layered, layered
from autopar.frontend.trace import tensor_type
from autopar.frontend.user_rules import registered_rules, with_flops
from autopar.inter_op.follow import follow as follow_pipeline
from autopar.inter_op.pipeline_search import Pipeline
from autopar.inter_op.pipeline_search import plan_pipeline as search
from autopar.inter_op.program.emit import emit
from autopar.inter_op.program.simulate import simulate
from autopar.inter_op.program.timeline import Timeline
from autopar.inter_op.state_placement import place_leaves
from autopar.ir.cluster import ClusterSpec
from autopar.ir.errors import OptionError, PlanFormatError, PlanMismatchError
from autopar.ir.layers import REMAT, LayeredGraph
from autopar.ir.pipeline import PipelinePlan
from autopar.ir.pipelined import Pipelined, PipelineOptions, PlannedLayer
from autopar.ir.plan import (
    SCHEMA_VERSION,
    Considered,
    LinkPrediction,
    Plan,
    PlanConfig,
    Predictions,
    Provenance,
    WorkerPrediction,
)
from autopar.ir.plan_text import explain_text, plan_text
from autopar.ir.presets import cluster_from_text, mesh_shape_from_text
from autopar.ir.program import Program
from autopar.ir.serde import digest, save_plan
from autopar.ir.serde import load_plan as load_data
from autopar.jax_compat import Device, jax_version
from autopar.runtime.compiled_pipeline import CompiledPipeline
from autopar.runtime.on_ray.ray_cluster import Cluster, named
from autopar.runtime.part import check_stages
from autopar.step.options import check_supported

if TYPE_CHECKING:
    from autopar.runtime.on_ray.step import RayStep

log = logging.getLogger("autopar")


@dataclass(frozen=True)
class PlannedPipeline:
    """``data`` is the plan as saved; ``layered`` the step in layers, None for a plan loaded from a file."""

    data: Plan
    layered: Layered | None = None

    @property
    def plan(self) -> PipelinePlan:
        """Stages, what crosses between them, and the schedule."""
        return self.data.pipelined.plan

    @property
    def predictions(self) -> Predictions:
        """The simulated step: seconds, bytes, workers and links."""
        return self.data.predictions

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the plan without its provenance."""
        return digest(self.data)

    @property
    def program(self) -> Program:
        """The instructions of every worker."""
        return emit(self.data.pipelined.plan, exchange=self.data.pipelined.exchange)

    def simulate(self, *, blocking: bool = False) -> Timeline:
        """The step by discrete events; ``blocking``: True: no transfer runs beside compute. Raises ProgramError where
        workers then wait for ever."""
        return simulate(self.program, blocking=blocking)

    def follow(
        self,
        step: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any] | None = None,
        *,
        num_microbatches: int = 1,
        **options: Any,
    ) -> PlannedPipeline:
        """The plan of a step that infers (an evaluation, say) with its parameters where this plan has them; arguments
        and errors as `plan_pipeline`'s."""
        return plan_pipeline(step, args, kwargs, num_microbatches=num_microbatches, follow=self, **options)

    def place(self, state: Any, argument: str | None = None) -> Any:
        """Where a state lies that the step takes, so that it can be created, or loaded, there.

        Args:
            state: the tree of one of the step's arguments, arrays or shapes (``jax.eval_shape(create_state, key)``).
            argument: which, ``args[0]``; default: the first whose leaves these are.

        Returns:
            The tree with a tuple of `Place`s for each leaf: the stages that hold it, or rows of it, and their
            shardings on these stages' meshes. An empty one where no stage reads it.

        Raises:
            PlanMismatchError: no argument has these leaves.
        """
        found, tree = jax.tree_util.tree_flatten_with_path(state)
        leaves = [(jax.tree_util.keystr(path), tensor_type(jax.typeof(leaf))) for path, leaf in found]
        return jax.tree_util.tree_unflatten(tree, place_leaves(self.data, leaves, argument))

    def compile(
        self,
        devices: Sequence[Device] | None = None,
        *,
        cluster: Cluster | str | None = None,
        compiler_options: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
    ) -> CompiledPipeline | RayStep:
        """Compiles the step, for devices of this process or on a cluster.

        Args:
            devices: the plan's device i is ``devices[i]``; default: all of this process's.
            cluster: what `autopar.init` returned, or ``"ray"``: the one that it connected this process to.
            compiler_options: XLA's.
            deadline_s: on a cluster: for a step, after which its workers are ended; default: 300 s.

        Raises:
            PlanMismatchError: there are too few devices, or the plan was loaded and knows no step yet (`bind`).
            ClusterError, WorkerError: the cluster has no room for the workers, or one did not start.
        """
        if self.layered is None:
            raise PlanMismatchError(
                f"{self.data.name}: a plan from a file knows no step. Say which it is of: plan.bind(step, args)"
            )
        if cluster is None:
            if deadline_s is not None:
                raise OptionError("deadline_s: only steps on a cluster have one; leave it out, or give cluster=")
            devices = jax.devices() if devices is None else devices
            return CompiledPipeline(self.layered, self.data, devices, registered_rules(), compiler_options)
        if devices is not None:
            raise OptionError("devices: those of a cluster are its workers'; leave it out beside cluster=")
        if isinstance(cluster, str):
            cluster = named(cluster)
        return cluster.compile(
            self.layered, self.data, rules=registered_rules(), options=compiler_options, deadline_s=deadline_s
        )

    def bind(
        self,
        step: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any] | None = None,
        *,
        batch_argnums: Any = None,
        static_argnums: int | Sequence[int] = (),
        donate_argnums: int | Sequence[int] = (),
    ) -> PlannedPipeline:
        """This plan, for the step that it was made for, which is cut into layers again; arguments as
        `plan_pipeline`'s.

        Raises:
            PlanMismatchError: it is another step, or has other shapes.
            TraceError, MicrobatchError: the step cannot be traced, or not be split into microbatches exactly.
        """
        config = self.data.config
        made = layered(
            step, args, kwargs, num_microbatches=config.num_microbatches, batch_argnums=batch_argnums,
            static_argnums=_argnums(static_argnums), donate_argnums=_argnums(donate_argnums), layers=config.layers,
            platform=self.data.cluster.platform,
        )  # fmt: skip
        graph = _with_flops(made.graph)
        if graph.fingerprint != self.data.fingerprint:
            raise PlanMismatchError(_difference(graph, self.data))
        return replace(self, layered=made)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, atomically. Raises PlanFormatError where the file cannot be written."""
        save_plan(self.data, path)

    def explain(self) -> str:
        """Why this plan: what it was chosen from, what its time goes into and what bounds it."""
        return explain_text(self.data)

    def __str__(self) -> str:
        return plan_text(self.data)


def load_pipeline(path: str | os.PathLike[str]) -> PlannedPipeline:
    """Reads a saved pipeline plan. Raises PlanFormatError for damaged files, other kinds and other schema versions."""
    data = load_data(path)
    if not isinstance(data.body, Pipelined):
        raise PlanFormatError(
            f"{os.fspath(path)}: is a plan of one program, without stages: autopar.load_plan reads it"
        )
    return PlannedPipeline(data)


def plan_pipeline(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    cluster: ClusterSpec | str | None = None,
    num_microbatches: int | None = None,
    layers: int | str | None = None,
    schedules: Sequence[str] | str | None = None,
    num_stages: int | None = None,
    stage_starts: Sequence[int] | None = None,
    submeshes: Sequence[Sequence[int] | str] | None = None,
    mesh_shapes: Sequence[Sequence[int] | str] | None = None,
    batch_axes: int | Sequence[Sequence[int] | int | None] | None = None,
    whole_examples: bool = False,
    uniform_stages: bool = False,
    memory_bytes: int | None = None,
    remat: Sequence[str] | str = REMAT,
    forbid: Sequence[str] | str = (),
    batch_argnums: Any = None,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
    on_unsupported: str = "replicate",
    workers: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    follow: PlannedPipeline | None = None,
    follow_args: Mapping[str, str] | None = None,
) -> PlannedPipeline:
    """The pipeline that runs a step fastest on a cluster, by simulation.

    Args:
        step: a train step that takes its gradients by one `autopar.value_and_grad`, or one that only infers. A
            `Parallelized` step brings its own ``batch_argnums``, ``static_argnums`` and ``donate_argnums``.
        args, kwargs: its arguments; `jax.ShapeDtypeStruct`s will do.
        cluster: ClusterSpec, preset (``"dgx-h100:4"``) or file.
        num_microbatches: parts of the batch that go through the stages one after the other; see `autopar.serial`.
            Default with ``follow``: 1.
        layers: how many layers to cut the step into; ``"names"``: one per block that the user named; None: repeated
            blocks.
        schedules: names of those allowed: ``1f1b``, ``gpipe``, …; default: all that suit the step.
        num_stages: how many stages; default: as many as are best.
        stage_starts: the first layer of every stage, from 0.
        submeshes: what stages may run on: (hosts, devices of each), or ``"1x4"``; with ``stage_starts`` and one for
            each stage, that stage's.
        mesh_shapes: logical meshes that stages may have, (2, 4) or ``"2x4"``, of any rank. By itself the planner tries
            one and two axes.
        batch_axes: which axes of a stage's logical mesh the batch is split over, in all operators that have it, and
            over no others: a position, or a list of what each stage has (of one entry: all stages), which is a
            position, several, ``()`` for none, or None to leave it to the planner.
        whole_examples: no example is split, neither its positions nor its rows of pixels. With ``batch_axes=0`` and
            ``mesh_shapes=["2x4"]`` stages are data parallel over the first axis, operator parallel over the second.
        uniform_stages: all stages on submeshes of one kind.
        memory_bytes: limit per device; default: the device's memory.
        remat: what layers may keep of their forward pass: ``none`` (all is kept), ``dots``, ``full`` (nothing is).
        forbid: collectives not to use inside a stage.
        batch_argnums, static_argnums, donate_argnums, on_unsupported: as `autopar.parallelize` takes them.
        workers: planning processes; default: one a core.
        cache: a folder in which solved layers and pipelines are kept: planning the same again takes tracing alone.
        follow: plan a step that infers so that its parameters lie where this plan of a train step has them: on the same
            stages, meshes and in the same shardings. Only ``num_microbatches``, ``layers`` (default: as the train
            step's), ``memory_bytes``, ``forbid`` and the argnums may be given beside it.
        follow_args: where the train step has what the step reads, by path: ``{"args[0]": "args[0].params"}``. Needed
            where names do not tell.

    Raises:
        ClusterError: the cluster is malformed.
        OptionError: options contradict each other, the step or the cluster.
        TraceError, MicrobatchError: the step cannot be traced, or not be split into microbatches exactly.
        InfeasibleError: nothing fits the devices' memory; says by how much, and what would.
        LoweringError, RuleError: an operator cannot run on its shards, or a user's kernel not as its rule says.
    """
    if num_microbatches is None and follow is not None:
        num_microbatches = 1
    if num_microbatches is None:
        raise OptionError("num_microbatches: say into how many parts the batch is cut")
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise OptionError(f"num_microbatches: {num_microbatches!r} is no number of microbatches; at least 1")
    if follow is not None:
        _check_followed(locals())
        cluster, layers = follow.data.cluster, follow.data.config.layers if layers is None else layers
    if cluster is None:
        raise OptionError("cluster: none is given; a preset (dgx-h100:4), a ClusterSpec or a file")
    cluster = cluster_from_text(cluster) if isinstance(cluster, str) else cluster
    cluster.verify()
    options = PipelineOptions(
        schedules=None if schedules is None else _texts(schedules),
        num_stages=num_stages,
        starts=None if stage_starts is None else tuple(int(s) for s in stage_starts),
        submeshes=None if submeshes is None else tuple(_submesh(s) for s in submeshes),
        logical_shapes=None if mesh_shapes is None else tuple(_shape(s) for s in mesh_shapes),
        batch_axes=None if batch_axes is None else _bound(batch_axes),
        whole_examples=whole_examples,
        uniform=uniform_stages,
        memory_bytes=memory_bytes,
        remat=_texts(remat),
        forbid=_texts(forbid),
        workers=workers,
    )
    config = PlanConfig(
        num_microbatches=num_microbatches, layers=layers, memory_bytes=memory_bytes, forbid=_texts(forbid),
        stages=replace(options, workers=None),
    )  # fmt: skip
    known = getattr(step, "arguments", None)
    if isinstance(known, Arguments):
        batch_argnums = known.batch_argnums if batch_argnums is None else batch_argnums
        static_argnums, donate_argnums = static_argnums or known.static_argnums, donate_argnums or known.donate_argnums
        step = step.__wrapped__  # type: ignore[attr-defined]
    started_s = time.perf_counter()
    log.info("cutting %s into layers", getattr(step, "__name__", type(step).__name__))
    made = layered(
        step,
        args,
        kwargs,
        num_microbatches=num_microbatches,
        batch_argnums=batch_argnums,
        static_argnums=_argnums(static_argnums),
        donate_argnums=_argnums(donate_argnums),
        layers=layers,
        platform=cluster.platform,
    )
    graph = _with_flops(made.graph)
    check_supported(graph.graphs, on_unsupported, graph.name)
    trace_s = time.perf_counter() - started_s
    if follow is not None:
        found = follow_pipeline(graph, follow.data, options.forbid, registered_rules(), follow_args, memory_bytes)
        return _checked(PlannedPipeline(_data(graph, cluster, config, found, trace_s, made.notes), made))
    log.info(
        "planning %d layers (%d kinds) in %d microbatches for %s",
        len(graph.layers), len(graph.kinds), num_microbatches, cluster.name,
    )  # fmt: skip
    found = search(graph, cluster, options, registered_rules(), None if cache is None else os.fspath(cache))
    return _checked(PlannedPipeline(_data(graph, cluster, config, found, trace_s, made.notes), made))


def _checked(plan: PlannedPipeline) -> PlannedPipeline:
    """``plan``, every operator of which runs on its shards. Raises RuleError, LoweringError."""
    assert plan.layered is not None
    check_stages(plan.layered, plan.data.pipelined, plan.data.cluster.platform, registered_rules())
    return plan


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


def _check_followed(given: Mapping[str, Any]) -> None:
    """Raises OptionError for options that the plan that is followed decides."""
    free: dict[str, Any] = {
        "cluster": None, "schedules": None, "num_stages": None, "stage_starts": None, "submeshes": None,
        "mesh_shapes": None, "uniform_stages": False, "remat": REMAT,
    }  # fmt: skip
    for name, default in free.items():
        if given[name] != default:
            raise OptionError(f"{name}: the plan that is followed says that; leave it out beside follow=")


def _texts(given: Sequence[str] | str) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _argnums(given: int | Sequence[int]) -> tuple[int, ...]:
    return (given,) if isinstance(given, int) else tuple(given)


def _shape(given: Sequence[int] | str) -> tuple[int, ...]:
    return mesh_shape_from_text(given) if isinstance(given, str) else tuple(int(n) for n in given)


def _bound(given: int | Sequence[Sequence[int] | int | None]) -> tuple[tuple[int, ...] | None, ...]:
    each = (given,) if isinstance(given, int) else tuple(given)
    return tuple(x if x is None else (x,) if isinstance(x, int) else tuple(int(a) for a in x) for x in each)


def _submesh(given: Sequence[int] | str) -> tuple[int, int]:
    shape = _shape(given)
    if len(shape) != 2:
        raise OptionError(f"submeshes: {given!r} is not (hosts, devices of each); write (1, 4) or 1x4, say")
    return shape[0], shape[1]


def _with_flops(graph: LayeredGraph) -> LayeredGraph:
    """The step in layers, with what the user said of the FLOPs of own kernels."""
    kinds = tuple(
        replace(kind, forward=with_flops(kind.forward), joint=tuple(map(with_flops, kind.joint)))
        for kind in graph.kinds
    )
    before = None if graph.before is None else with_flops(graph.before)
    return replace(graph, before=before, kinds=kinds, update=with_flops(graph.update))


# The plan --------------------------------------------------------------------------------------------------------


def _data(
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
