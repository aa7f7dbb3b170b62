"""Pipeline plans made by hand: equal stages on one device each, costs as numbers."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.cluster import DeviceSpec, LinkSpec, LogicalMesh, MeshAxis
from autopar.ir.pipeline import Cut, CutPhase, PipelinePlan, Schedule, Stage, StageCost, Transients

DEVICE = DeviceSpec(name="unit", memory_bytes=1 << 30, flops_per_s=(("float32", 1.0),), memory_bytes_per_s=1.0)


def stage_cost(transients: Transients | None = None, **figures: float) -> StageCost:
    """``transient_bytes`` is what every phase needs, where ``transients`` does not say."""
    names = [name for name in StageCost.__slots__ if name != "transients"]
    beside = transients or even(figures.get("transient_bytes", 0.0))
    return StageCost(**{name: figures.get(name, 0.0) for name in names}, transients=beside)


def even(transient_bytes: float) -> Transients:
    """The same in every phase."""
    return Transients(**dict.fromkeys(Transients.__slots__, transient_bytes))


def cut(source: int, target: int, phase: CutPhase, time_s: float = 0.0, receive_bytes: float = 0.0) -> Cut:
    return Cut(
        source=source, target=target, phase=phase, values=(), time_s=time_s, bound_s=0.0, receive_bytes=receive_bytes
    )


def chain(num_stages: int, time_s: float, receive_bytes: float = 0.0, *, trains: bool = True) -> tuple[Cut, ...]:
    """Activations from each stage to the next, cotangents back."""
    forward = [cut(s, s + 1, "forward", time_s, receive_bytes) for s in range(num_stages - 1)]
    backward = [cut(s + 1, s, "backward", time_s, receive_bytes) for s in range(num_stages - 1)]
    return (*forward, *(backward if trains else ()))


def pipeline(
    schedule: Schedule, costs: StageCost | Sequence[StageCost], cuts: Sequence[Cut], fused: Sequence[int] = ()
) -> PipelinePlan:
    """``costs``: one for all stages, or one each."""
    each = [costs] * schedule.num_stages if isinstance(costs, StageCost) else costs
    meshes = [
        LogicalMesh(
            axes=(MeshAxis(name="x", size=1, link=LinkSpec(latency_s=1.0, bytes_per_s=1.0)),),
            device_ids=(mesh,),
            device=DEVICE,
        )
        for mesh in range(len(schedule.tasks))
    ]
    stages = tuple(
        Stage(start=s, stop=s + 1, mesh=meshes[schedule.mesh_of_stage[s]], remat=("none",), cost=cost, fused=s in fused)
        for s, cost in enumerate(each)
    )
    return PipelinePlan(stages=stages, cuts=tuple(cuts), schedule=schedule)
