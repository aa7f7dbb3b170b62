"""Forward tasks only, microbatch after microbatch."""

from __future__ import annotations

from autopar.inter_op.schedules.order import check_sizes, tasks_of
from autopar.ir.pipeline import Schedule


def inference(num_meshes: int, num_microbatches: int) -> Schedule:
    """p meshes, m microbatches. In flight: 1. Bubble (p−1)(f+c) for c ≤ f. Raises ScheduleError without meshes or
    microbatches."""
    check_sizes("inference", num_meshes, num_microbatches)
    return Schedule(
        name="inference",
        num_microbatches=num_microbatches,
        mesh_of_stage=tuple(range(num_meshes)),
        tasks=tuple(tuple(tasks_of(s, num_microbatches, "forward")) for s in range(num_meshes)),
        in_flight=(1,) * num_meshes,
    )
