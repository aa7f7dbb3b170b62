"""A small plan written by hand: what the tests of serde, pretty and the command line look at."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost.logical_meshes import logical_mesh
from autopar.ir.graph import TensorType
from autopar.ir.plan import (
    SCHEMA_VERSION,
    ArgPlan,
    Considered,
    Live,
    OneProgram,
    Pin,
    Place,
    Plan,
    PlanConfig,
    Predictions,
    Provenance,
    WorkerPrediction,
)
from autopar.ir.presets import cluster_from_text
from autopar.ir.sharding import ShardingSpec
from autopar.ir.sharding_plan import (
    Assumption,
    AxisUse,
    Chain,
    NodeStrategy,
    OperatorRow,
    Recompute,
    RegionPlan,
    ReplicatedNode,
    ShardingPlan,
)
from autopar.ir.strategy import Collective, ReshardStep, SolverReport


def spec(*dims: str, unreduced: tuple[str, ...] = ()) -> ShardingSpec:
    """``spec("x", "", "yz")``: one string of one-letter axes per dimension."""
    return ShardingSpec(dims=tuple(tuple(axes) for axes in dims), unreduced=unreduced)


def handmade_plan() -> Plan:
    """Three layers on a 2x4 mesh: q and k split, the batch split, one loop of unknown length, one sort."""
    cluster = cluster_from_text("cpu:8")
    weight, batch = TensorType(shape=(64, 64), dtype="float32"), TensorType(shape=(8, 30), dtype="int32")
    inputs = [
        ArgPlan(
            path=f"args[0]['layers'][{i}]['{name}']",
            type=weight,
            places=(Place(spec=s),),
            role="weights" if name == "wq" else "optimizer state",
            donated_to=2 * i + j,
            becomes=2 * i + j,
        )
        for i in range(3)
        for j, (name, s) in enumerate((("wq", spec("", "y")), ("w1", spec("y", "") if i < 2 else spec("", ""))))
    ]
    outputs = [replace(a, path=a.path.replace("args[0]", "out[0]"), donated_to=-1, becomes=-1) for a in inputs]
    scalar = TensorType(shape=(), dtype="float32")
    region = RegionPlan(
        inputs=tuple(a.spec for a in inputs) + (spec("x", ""),),
        outputs=tuple(a.spec for a in outputs) + (spec(),),
        nodes=(0, -1, 0),
        rebased=((2, spec("x")),),
        copies=((0, spec("", "")),),
        bodies=((1, (RegionPlan(inputs=(spec("x"),), outputs=(), nodes=(0,), rebased=(), copies=()),)),),
    )
    strategy = NodeStrategy(
        factor_axes=(("i", ("x",)), ("k", ("y",))),
        operands=(spec("x", "y"), spec("y", "")),
        results=(spec("x", "", unreduced=("y",)),),
    )
    collectives = (
        Collective(
            kind="all-reduce",
            axes=("x",),
            operand_bytes=4096,
            dtype="float32",
            trips=1,
            count=6,
            time_s=150e-6,
            where="result out[0]",
            reduction="sum",
        ),
        Collective(
            kind="all-reduce",
            axes=("y",),
            operand_bytes=1024,
            dtype="float32",
            trips=3,
            count=2,
            time_s=180e-6,
            where="dot_general (node 7, model.py:88)",
            reduction="sum",
        ),
        Collective(
            kind="all-gather",
            axes=("y",),
            operand_bytes=512,
            dtype="bfloat16",
            trips=8,
            count=1,
            time_s=160e-6,
            where="while (node 9, model.py:91)",
            trips_assumed=True,
        ),
    )
    sharding = ShardingPlan(
        mesh=logical_mesh(cluster, (2, 4)),
        strategies=(strategy,),
        root=region,
        chains=(
            Chain(
                type=weight,
                src=spec("", "y"),
                dst=spec("", ""),
                steps=(ReshardStep(kind="all-gather", axes=("y",), src=1),),
            ),
        ),
        collectives=collectives,
        recompute=(Recompute(value=7, consumers=(3,), what="tanh (model.py:9)", saved_bytes=4e6, cost_s=1e-5),),
        replicated=(
            ReplicatedNode(primitive="my_kernel", source="model.py:12", why="no rule", count=2, flops=1e4, bytes=240.0),
        ),
        operators=(
            OperatorRow(
                phase="forward",
                primitive="dot_general",
                source="model.py:88",
                strategy=0,
                count=2,
                work="products",
                time_s=1.2e-3,
                flops=2e6,
            ),
        ),
        assumptions=(
            Assumption(
                primitive="while",
                source="model.py:91",
                assumed="8 trips",
                why="how often a while loop runs depends on values",
                count=1,
            ),
        ),
        objective_s=2e-3,
        peak_memory_bytes=123_456,
        uses=(AxisUse(axis="x", flops=(("examples", 2e6),)), AxisUse(axis="y", flops=(("features", 2e6),))),
        report=SolverReport(solver="highs", status="optimal", objective_s=2e-3, bound_s=1.98e-3, seconds=0.25),
    )
    return Plan(
        schema_version=SCHEMA_VERSION,
        name="train_step",
        fingerprint="0123456789abcdef",
        cluster=cluster,
        config=PlanConfig(
            mesh_shape=(2, 4),
            num_microbatches=4,
            pins=(Pin(target="args[0]*wq", dims=((), ("y",))), Pin(target="name:hidden", dims=(("x",), None))),
        ),
        inputs=(*inputs, ArgPlan(path="args[1]", type=batch, places=(Place(spec=spec("x", "")),), role="batch")),
        outputs=(*outputs, ArgPlan(path="out[1]", type=scalar, places=(Place(spec=spec()),))),
        body=OneProgram(sharding=sharding),
        predictions=Predictions(
            step_s=2e-3,
            compute_s=1.65e-3,
            communication_s=350e-6,
            peak_memory_bytes=123_456,
            argument_bytes=50_000,
            flops=1e7,
            workers=(
                WorkerPrediction(
                    num_devices=8,
                    busy_s=2e-3,
                    peak_bytes=123_456,
                    limit_bytes=4 * 2**30,
                    live=(
                        Live(kind="activations", what="tanh (model.py:9)", count=3, bytes=100_000),
                        Live(kind="weights", what="args[0]['layers'][*]['wq']", count=3, bytes=23_456),
                    ),
                ),
            ),
        ),
        provenance=Provenance(
            autopar_version="0.1.0",
            jax_version="0.10.2",
            seconds=(("trace", 0.5), ("ilp", 0.25)),
            considered=(
                Considered(name="data_parallel", step_s=3e-3, peak_bytes=2e5),
                Considered(name="zero3", step_s=2.5e-3, peak_bytes=1e5, fits=False),
            ),
            notes=("the batch of 8 leaves 1 row a device",),
        ),
    )
