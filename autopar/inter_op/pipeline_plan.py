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
    Plan,
    PlanConfig,
    Predictions,
    Provenance,
    WorkerPrediction,
)
from autopar.ir.planned_step import PlannedStep


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


def _held(found: Pipeline, worker: int, peak_bytes: float) -> tuple[tuple[str, float], ...]:
    """What a worker holds all the time, and the rest of its peak."""
    mine = (s for s, w in enumerate(found.plan.schedule.mesh_of_stage) if w == worker)
    state_bytes = min(peak_bytes, sum(found.plan.stages[s].cost.state_bytes for s in mine))
    held = (("state and sums of gradients", state_bytes), ("activations and temporaries", peak_bytes - state_bytes))
    return tuple(sorted(held, key=lambda each: -each[1]))


def _predicted(config: PlanConfig, found: Pipeline) -> Predictions:
    stages, timeline = found.plan.stages, found.timeline
    first = [found.plan.schedule.mesh_of_stage.index(w) for w in range(len(timeline.workers))]
    workers = tuple(
        WorkerPrediction(
            num_devices=stages[s].mesh.num_devices,
            busy_s=worker.busy_s,
            peak_bytes=worker.peak_bytes,
            limit_bytes=float(config.memory_bytes or stages[s].mesh.device.usable_bytes),
            held=_held(found, w, worker.peak_bytes),
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
