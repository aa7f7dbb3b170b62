"""Interleaved 1F1B: each mesh has v chunks of the model, p stages apart, for a bubble v times smaller.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC 2021). A mesh
runs chunk 0 for p microbatches, chunk 1 for the same, … chunk v−1, then chunk 0 for the next p; backward the chunks
in reverse. Mesh s does w_s = 2(p−s−1) + (v−1)p + 1 forward tasks before its first backward task.

Where p does not divide m, the order is that of the next multiple of p, with the tasks of the microbatches that are not
there left out: every dependency is within a microbatch, so what is left waits for nothing new.
"""

from __future__ import annotations

from autopar.inter_op.schedules.order import alternate, check_sizes
from autopar.inter_op.schedules.record import ScheduleRecord
from autopar.ir.errors import ScheduleError
from autopar.ir.pipeline import Schedule, Task


def interleaved_1f1b(num_meshes: int, num_microbatches: int, *, chunks: int = 2) -> Schedule:
    """p meshes, m microbatches, v ``chunks`` a mesh: stage kp + s is chunk k of mesh s. Bubble (p−1)(f+b)/v where
    transfers take no time and p divides m; v times the traffic. Raises ScheduleError for fewer than 2 chunks, and
    without meshes or microbatches."""
    p, v = num_meshes, chunks
    check_sizes(INTERLEAVED_1F1B.name, p, num_microbatches)
    if v < 2:
        raise ScheduleError(f"{INTERLEAVED_1F1B.name}: {v} chunks a mesh; with fewer than 2 take 1f1b")
    tasks: list[tuple[Task, ...]] = []
    for s in range(p):
        turns = [(first, k) for first in range(0, num_microbatches, p) for k in range(v)]
        forwards = [
            Task(stage=k * p + s, microbatch=j, phase="forward") for first, k in turns for j in range(first, first + p)
        ]
        backwards = [
            Task(stage=(v - 1 - k) * p + s, microbatch=j, phase="backward")
            for first, k in turns
            for j in range(first, first + p)
        ]
        order = alternate(forwards, backwards, 2 * (p - s - 1) + (v - 1) * p + 1)
        tasks.append(tuple(task for task in order if task.microbatch < num_microbatches))
    return Schedule(
        name=INTERLEAVED_1F1B.name,
        num_microbatches=num_microbatches,
        mesh_of_stage=tuple(range(p)) * v,
        tasks=tuple(tasks),
        in_flight=in_flight(p, num_microbatches, chunks=v),
    )


def in_flight(num_meshes: int, num_microbatches: int, *, chunks: int = 2) -> tuple[int, ...]:
    """At chunk k of mesh s, with a = 2(p−s)−1: min(m, p + clamp((v−2−2k)p + a, 0, p)) for k < v−1 and min(m, a, p) for
    k = v−1. (The forward tasks of a chunk come p in a row and so do its backward tasks; the most are in flight where
    the chunk's turn to go backward comes, w_s + (v−1−k)p forward tasks from the mesh's start.)"""
    p, v = num_meshes, chunks
    return tuple(min(num_microbatches, _most(p, v, k, 2 * (p - s) - 1)) for k in range(v) for s in range(p))


def _most(p: int, v: int, k: int, a: int) -> int:
    """Microbatches in flight at chunk k, were there enough of them."""
    return min(a, p) if k == v - 1 else p + max(0, min((v - 2 - 2 * k) * p + a, p))


INTERLEAVED_1F1B = ScheduleRecord(
    name="interleaved_1f1b",
    build=interleaved_1f1b,
    in_flight=in_flight,
    in_flight_by_stages_after=False,
    hides=1.0,
    chunks=(2, 3, 4, 6, 8, 12),
    options=("chunks",),
)
