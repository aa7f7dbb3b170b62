"""A pipeline plan written by hand: what tests of files, text and the command line look at without planning."""

from __future__ import annotations

from dataclasses import replace

from autopar.inter_op.program.emit import emit
from autopar.inter_op.program.simulate import simulate
from autopar.inter_op.schedules import make_schedule
from autopar.ir.cluster import ClusterSpec, HostGroup, LinkSpec, MeshAxis
from autopar.ir.graph import Phase, TensorType
from autopar.ir.layer_sharding import LayerSharding, LayerWiring
from autopar.ir.pipeline import CutValue, ScalarExchange, StageCost
from autopar.ir.pipelined import Pipelined, PipelineOptions, PlannedLayer
from autopar.ir.plan import (
    SCHEMA_VERSION,
    ArgPlan,
    Considered,
    LinkPrediction,
    Place,
    Plan,
    PlanConfig,
    Predictions,
    Provenance,
    WorkerPrediction,
)
from autopar.ir.sharding import ShardingSpec
from autopar.ir.sharding_plan import NodeStrategy, OperatorRow, RegionPlan
from tests.null.pipelines import DEVICE, chain, pipeline, stage_cost


def handmade_pipeline(name: str = "1f1b", microbatches: int = 3) -> Plan:
    """Two stages of one layer, on one device each: a second forwards, two backwards, half a second between them."""
    link = LinkSpec(latency_s=1.0, bytes_per_s=1.0)
    cluster = ClusterSpec(
        name="pair",
        groups=(
            HostGroup(hosts=1, devices_per_host=2, device=DEVICE, intra_host=link, nics_per_host=1, nic=link),
        ),
    )  # fmt: skip
    cost = stage_cost(
        forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, grad_sync_s=0.25, update_s=0.25, state_bytes=100.0,
        activation_bytes=10.0, transient_bytes=5.0,
    )  # fmt: skip
    weight = TensorType(shape=(8, 8), dtype="float32")
    whole = ShardingSpec(dims=((), ()))
    value = CutValue(value=5, name="layer 0", type=weight, src_spec=whole, dst_spec=whole)
    cuts = [replace(c, bound_s=0.25, values=(value,)) for c in chain(2, 0.5, receive_bytes=256.0)]
    plan = pipeline(make_schedule(name, 2, microbatches), cost, cuts)
    exchange = ScalarExchange(compute_s=(0.0, 0.0), reduce_s=0.125, device_bytes=8.0)
    timeline = simulate(emit(plan, exchange=exchange))
    return Plan(
        schema_version=SCHEMA_VERSION,
        name="train_step",
        fingerprint="0123456789abcdef",
        cluster=cluster,
        config=PlanConfig(
            num_microbatches=microbatches,
            memory_bytes=10_000,
            stages=PipelineOptions(stages=(2, 2), submeshes=((1, 1),), memory_bytes=10_000),
        ),
        inputs=tuple(
            ArgPlan(path=f"args[0]['w'][{k}]", type=weight, places=(Place(stage=k, spec=whole),)) for k in range(2)
        ),
        outputs=(),
        body=Pipelined(
        layers=tuple(
            PlannedLayer(
                name=f"layer {k}",
                kind=k,
                sources=(f"model.py:{k + 3}",),
                sharding=k,
                wiring=LayerWiring(
                    receives=((5, "backward" if k == 0 else "forward"),),
                    sends=((5, "forward" if k == 0 else "backward"),),
                    inputs=((k, k, 0, 0),),
                ),
            )
            for k in range(2)
        ),
        shardings=tuple(_sharding(cost, whole, plan.stages[0].mesh.axes, k) for k in range(2)),
        joins=(),
        between=((), ()),
        plan=plan,
        exchange=exchange,
        ),
        predictions=Predictions(
            step_s=timeline.makespan_s,
            compute_s=max(w.busy_s for w in timeline.workers),
            communication_s=max(k.busy_s for k in timeline.links),
            peak_memory_bytes=max(w.peak_bytes for w in timeline.workers),
            argument_bytes=None,
            flops=None,
            workers=tuple(
                WorkerPrediction(num_devices=1, busy_s=w.busy_s, peak_bytes=w.peak_bytes, limit_bytes=10_000.0)
                for w in timeline.workers
            ),
            links=tuple(LinkPrediction(source=k.source, target=k.target, busy_s=k.busy_s) for k in timeline.links),
        ),
        provenance=Provenance(
            autopar_version="0.1.0",
            jax_version="0.10.2",
            seconds=(("trace", 0.5), ("simulation", 0.25)),
            considered=(
                Considered(name="gpipe: 2 x 1 layers on (1,1)", step_s=2 * timeline.makespan_s),
                Considered(name="1f1b: 2 x 1", step_s=timeline.makespan_s),
            ),
        ),
    )  # fmt: skip


def _row(phase: Phase, primitive: str, source: str, strategy: int) -> OperatorRow:
    work = "products" if primitive == "dot_general" else "memory"
    return OperatorRow(
        phase=phase, primitive=primitive, source=source, strategy=strategy, count=1, work=work, time_s=1e-3, flops=1e9
    )


def _sharding(cost: StageCost, whole: ShardingSpec, axes: tuple[MeshAxis, ...], layer: int) -> LayerSharding:
    """A layer that multiplies twice for each microbatch, and updates by one operator."""
    body = RegionPlan(inputs=(whole,), outputs=(whole,), nodes=(0, 0), rebased=(), copies=())
    root = RegionPlan(
        inputs=(whole,), outputs=(whole,), nodes=(-1, 1), rebased=(), copies=(), bodies=((0, (body,)),)
    )  # fmt: skip
    multiplies = NodeStrategy(factor_axes=(), operands=(whole, whole), results=(whole,))
    updates = NodeStrategy(factor_axes=(), operands=(whole,), results=(whole,))
    source = f"model.py:{layer + 3}"
    return LayerSharding(
        axes=axes, remat="none", cost=cost, receives=(whole,), sends=(whole,), strategies=(multiplies, updates),
        root=root, chains=(), collectives=(),
        operators=(
            _row("forward", "dot_general", source, 0),
            _row("backward", "dot_general", source, 0),
            _row("update", "sub", "", 1),
        ),
        uses=(),
    )  # fmt: skip
