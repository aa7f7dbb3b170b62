"""What a plan of stages says, as values for JSON: enough to fit a cost model's constants again without planning again.

`facts` is one dictionary a plan: the step, its schedule, each stage's cost in parts, and of each distinct sharding of
layers (`ir.layer_sharding.LayerSharding`, by number) its collectives and its operators as one device has them. Equal
operators of a layer are one row, with their ``count``; those in the loop over microbatches run ``trips`` times a step.
Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TypeAlias

from autopar.cost.roofline import flops
from autopar.inter_op.graph_builder import Alike
from autopar.inter_op.stage_graph import stage_graph
from autopar.ir.cluster import MeshAxis
from autopar.ir.graph import Graph, Node, TensorType
from autopar.ir.layer_sharding import LayerSharding
from autopar.ir.layers import RECEIVE, SEND, LayeredGraph
from autopar.ir.pipelined import Pipelined
from autopar.ir.plan import Plan
from autopar.ir.sharding import ShardingSpec
from autopar.ir.sharding_plan import Chain, NodeStrategy, RegionPlan
from autopar.primitives import record_of

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"
Row: TypeAlias = tuple[str, str, str, str, str, float, bool, int]
"""(phase, primitive, results, operands, dimension numbers, FLOPs of a device, on the matrix units,
trips)."""


def facts(plan: Plan) -> dict[str, Json]:
    """All of the above."""
    pipelined = plan.pipelined
    assert plan.step is not None and isinstance(plan.step.graph, LayeredGraph)
    schedule = pipelined.plan.schedule
    count, p = schedule.num_microbatches, plan.predictions
    return {
        "step_s": p.step_s, "compute_s": p.compute_s, "communication_s": p.communication_s,
        "peak_bytes": p.peak_memory_bytes,
        "worker_busy_s": [w.busy_s for w in p.workers], "worker_peak_bytes": [w.peak_bytes for w in p.workers],
        "link_busy_s": [[link.source, link.target, link.busy_s] for link in p.links],
        "schedule": schedule.name, "microbatches": count, "mesh_of_stage": list(schedule.mesh_of_stage),
        "in_flight": list(schedule.in_flight),
        "stages": _stages(pipelined),
        "cuts": _cuts(pipelined),
        "joins": [_chains(join.chains, join.axes) for join in pipelined.joins],
        "shardings": [_sharding(plan.step.graph, pipelined, number) for number in range(len(pipelined.shardings))],
        "notes": list(plan.provenance.notes),
    }  # fmt: skip


def _stages(pipelined: Pipelined) -> list[Json]:
    return [
        {
            "layers": [pipelined.layers[k].sharding for k in stage.layers], "mesh": _axes(stage.mesh.axes),
            "devices": stage.mesh.num_devices, "fused": stage.fused, "cost": asdict(stage.cost),
        }
        for stage in pipelined.plan.stages
    ]  # fmt: skip


def _cuts(pipelined: Pipelined) -> list[Json]:
    stages = pipelined.plan.stages
    return [
        {
            "source": cut.source, "target": cut.target, "phase": cut.phase, "time_s": cut.time_s,
            "gather_s": cut.gather_s, "strategy": cut.strategy,
            "values": [
                [str(v.type), _local(v.type, v.src_spec, stages[cut.source].mesh.axes),
                 _local(v.type, v.dst_spec, stages[cut.target].mesh.axes)]
                for v in cut.values
            ],
        }
        for cut in pipelined.plan.cuts
    ]  # fmt: skip


def _axes(axes: Sequence[MeshAxis]) -> list[Json]:
    return [[a.name, a.size, a.link.latency_s, a.link.bytes_per_s] for a in axes]


def _chains(chains: Sequence[Chain], axes: Sequence[MeshAxis]) -> list[Json]:
    """What is resharded between layers of one stage, for each of its microbatches, and by which steps."""
    return [
        [str(c.type), _local(c.type, c.src, axes), _local(c.type, c.dst, axes), [asdict(step) for step in c.steps]]
        for c in chains
    ]


def _sharding(graph: LayeredGraph, pipelined: Pipelined, number: int) -> Json:
    sharding = pipelined.shardings[number]
    layers = [k for k, layer in enumerate(pipelined.layers) if layer.sharding == number]
    sizes = {a.name: a.size for a in sharding.axes}
    return {
        "layers": len(layers), "first": pipelined.layers[layers[0]].name if layers else "", "remat": sharding.remat,
        "mesh": _axes(sharding.axes), "cost": asdict(sharding.cost),
        "collectives": [
            {**asdict(c), "sizes": [sizes[a] for a in c.axes], "devices": math.prod(sizes[a] for a in c.axes)}
            for c in sharding.collectives
        ],
        "work": _work(sharding), "operators": _operators(graph, sharding, layers[0]) if layers else [],
    }  # fmt: skip


def _work(sharding: LayerSharding) -> dict[str, Json]:
    """Pass and kind of work → a device's seconds and FLOPs a step."""
    found: dict[str, list[float]] = {}
    for row in sharding.operators:
        sums = found.setdefault(f"{row.phase} {row.work}", [0.0, 0.0])
        sums[0] += row.time_s
        sums[1] += row.flops
    return {name: [*sums] for name, sums in found.items()}


def _operators(graph: LayeredGraph, sharding: LayerSharding, layer: int) -> list[Json]:
    """A layer's operators on one device."""
    found = stage_graph(graph, layer, layer + 1, (sharding.remat,), Alike()).graph
    rows = Counter(_rows(found, sharding.root, sharding, 1, graph.num_microbatches))
    return [[*row, count] for row, count in rows.items()]


def _rows(graph: Graph, region: RegionPlan, sharding: LayerSharding, trips: int, microbatches: int) -> Iterator[Row]:
    bodies = dict(region.bodies)
    for position, node in enumerate(graph.nodes):
        row = region.nodes[position]
        if row < 0:
            again = trips * (int(node.params["length"]) if node.primitive == "scan" else 1)
            for body, inside in zip(node.bodies, bodies[position], strict=True):
                yield from _rows(body, inside, sharding, again, microbatches)
        elif node.primitive not in (RECEIVE, SEND):
            yield _row(node, sharding.strategies[row], sharding.axes, trips)


def _row(node: Node, strategy: NodeStrategy, axes: Sequence[MeshAxis], trips: int) -> Row:
    sizes = {a.name: a.size for a in axes}
    split = math.prod(sizes[a] for _, over in strategy.factor_axes for a in over)
    traits = record_of(node.primitive).traits

    def texts(types: Sequence[TensorType], specs: Sequence[ShardingSpec]) -> str:
        return " ".join(_local(t, spec, axes) for t, spec in zip(types, specs, strict=True))

    return (
        node.phase, node.primitive, texts(node.result_types, strategy.results),
        texts(node.operand_types, strategy.operands), _dims(node), flops(node) / split,
        traits.contraction or traits.opaque, trips,
    )  # fmt: skip


def _dims(node: Node) -> str:
    """Of a product, its dimension numbers; of attention, whether it is causal."""
    return str(node.params.get("dimension_numbers", node.params.get("mask_type", "")))


def _local(value_type: TensorType, spec: ShardingSpec, axes: Sequence[MeshAxis]) -> str:
    """The part of a value on one device, as dtype[sizes]."""
    sizes = {a.name: a.size for a in axes}
    dims = zip(value_type.shape, spec.dims, strict=True)
    local = [-(-n // math.prod(sizes[a] for a in over)) for n, over in dims]
    return f"{value_type.dtype}[{','.join(map(str, local))}]"
