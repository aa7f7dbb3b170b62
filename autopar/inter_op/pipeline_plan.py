"""A pipeline that was found → the `ir.plan.Plan` of it: what it was found from, and what its simulation predicts."""

from __future__ import annotations

from autopar._version import __version__
from autopar.inter_op.pipeline_search import Pipeline
from autopar.ir.cluster import ClusterSpec
from autopar.ir.layers import LayeredGraph
from autopar.ir.pipelined import Pipelined, PlannedLayer
from autopar.ir.plan import (
    SCHEMA_VERSION,
    Considered,
    LinkPrediction,
    Live,
    Plan,
    PlanConfig,
    Predictions,
    Provenance,
    WorkerPrediction,
)
from autopar.ir.planned_step import PlannedStep
from autopar.ir.pretty import fold_paths, shard_bytes


def pipeline_plan(
    step: PlannedStep, cluster: ClusterSpec, config: PlanConfig, found: Pipeline, *, trace_s: float, jax_version: str,
    notes: tuple[str, ...] = (),
) -> Plan:  # fmt: skip
    """The plan of ``found``, verified. ``notes`` beside the step's, ``trace_s`` (seconds) and ``jax_version`` are for
    its record."""
    graph, spelled = step.graph, found.shardings
    assert isinstance(graph, LayeredGraph)
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
            between=spelled.between,
            plan=found.plan,
            exchange=found.exchange,
        ),
        predictions=_predicted(config, found),
        provenance=Provenance(
            autopar_version=__version__,
            jax_version=jax_version,
            seconds=(("trace", trace_s), *found.seconds),
            considered=tuple(Considered(name=text, step_s=seconds) for text, _, seconds in found.simulated),
            notes=(*step.notes, *found.distinct, *notes),
        ),
        step=step,
    )
    made.verify()
    return made


def _live(found: Pipeline, worker: int, peak_bytes: float) -> tuple[Live, ...]:
    """What a worker holds at its peak: arguments and sums of gradients, which it always holds; activations of as many
    microbatches as are in flight at most; and the rest."""
    plan = found.plan
    mine = [s for s, w in enumerate(plan.schedule.mesh_of_stage) if w == worker]
    rows: list[Live] = []
    held = [(a, place) for a in found.inputs for place in a.places if place.stage in mine]
    sizes = [shard_bytes(place.type_of(a.type), place.spec, plan.stages[place.stage].mesh) for a, place in held]
    for fold in fold_paths([(a.path, (a.role, place.rows)) for a, place in held]):
        size = float(sum(sizes[r] for r in fold.rows))
        argument, place = held[fold.rows[0]]
        if size:
            rows.append(Live(kind=argument.role, what=fold.path + place.rows, count=len(fold.rows), bytes=size))
    arguments, state = float(sum(sizes)), sum(plan.stages[s].cost.state_bytes for s in mine)
    left = peak_bytes - arguments

    def add(kind: str, what: str, count: int, size: float) -> None:
        nonlocal left
        size = min(size, left)
        left -= size
        if size > 0:
            rows.append(Live(kind=kind, what=what, count=count, bytes=size))

    add("gradients", "sums over microbatches", 1, state - arguments)
    for s in mine:
        count, size = plan.schedule.in_flight[s], plan.stages[s].cost.activation_bytes
        add("activations", f"of stage {s}, microbatches in flight", count, count * size)
    add("temporaries", "of the task that runs", 1, left)
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _predicted(config: PlanConfig, found: Pipeline) -> Predictions:
    stages, timeline = found.plan.stages, found.timeline
    first = [found.plan.schedule.mesh_of_stage.index(w) for w in range(len(timeline.workers))]
    workers = tuple(
        WorkerPrediction(
            num_devices=stages[s].mesh.num_devices,
            busy_s=worker.busy_s,
            peak_bytes=worker.peak_bytes,
            limit_bytes=float(config.memory_bytes or stages[s].mesh.device.usable_bytes),
            live=_live(found, w, worker.peak_bytes),
        )
        for w, (s, worker) in enumerate(zip(first, timeline.workers, strict=True))
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
