"""Forward tasks only, microbatch after microbatch."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.inter_op.schedules.order import check_sizes
from autopar.inter_op.schedules.record import ScheduleRecord
from autopar.ir.pipeline import Schedule, Task


def inference(num_meshes: int, num_microbatches: int) -> Schedule:
    """p meshes, m microbatches. Bubble (p−1)(f+c) for c ≤ f. Raises ScheduleError without meshes or microbatches."""
    return inference_on(range(num_meshes), num_microbatches)


def inference_on(mesh_of_stage: Sequence[int], num_microbatches: int) -> Schedule:
    """The same for stages that may share meshes: as many microbatches as there are meshes go through a mesh's stages
    one after the other, so that the first is back when the last has left. Raises ScheduleError as `inference`."""
    num_meshes = max(mesh_of_stage, default=-1) + 1
    check_sizes(INFERENCE.name, num_meshes, num_microbatches)
    tasks: list[list[Task]] = [[] for _ in range(num_meshes)]
    for first in range(0, num_microbatches, num_meshes):
        for stage, mesh in enumerate(mesh_of_stage):
            for j in range(first, min(first + num_meshes, num_microbatches)):
                tasks[mesh].append(Task(stage=stage, microbatch=j, phase="forward"))
    return Schedule(
        name=INFERENCE.name,
        num_microbatches=num_microbatches,
        mesh_of_stage=tuple(mesh_of_stage),
        tasks=tuple(map(tuple, tasks)),
        in_flight=in_flight(len(mesh_of_stage), num_microbatches),
    )


def in_flight(num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """1 at every stage."""
    return (1,) * num_stages


INFERENCE = ScheduleRecord(
    name="inference",
    build=inference,
    in_flight=in_flight,
    in_flight_by_stages_after=True,
    hides=1.0,
    trains=False,
    on_one_stage=True,
)
