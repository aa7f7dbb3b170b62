"""1F1B: a backward task as soon as there is one, so that as few microbatches as possible are in flight.

PipeDream-Flush, in Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(SC 2021).
"""

from __future__ import annotations

from autopar.inter_op.schedules.order import one_stage_per_mesh
from autopar.inter_op.schedules.record import ScheduleRecord
from autopar.ir.pipeline import Schedule


def one_f_one_b(num_meshes: int, num_microbatches: int) -> Schedule:
    """p meshes, m microbatches. Bubble (p−1)(f+b) where transfers take no time; with transfers of c each way
    2c[(p−1)m/p + p−2] more (m > p, a multiple of it, and c ≤ f+b): a round trip of the pipeline holds only p
    microbatches. Raises ScheduleError without meshes or microbatches."""
    held = in_flight(num_meshes, num_microbatches)
    return one_stage_per_mesh(ONE_F_ONE_B.name, num_meshes, num_microbatches, in_flight=held)


def in_flight(num_meshes: int, num_microbatches: int) -> tuple[int, ...]:
    """min(m, p−s) at stage s."""
    return tuple(min(num_microbatches, num_meshes - s) for s in range(num_meshes))


ONE_F_ONE_B = ScheduleRecord(
    name="1f1b",
    build=one_f_one_b,
    in_flight=in_flight,
    in_flight_by_stages_after=True,
    hides=0.0,
    on_one_stage=True,
)
