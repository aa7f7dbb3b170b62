"""GPipe: all forward tasks, then all backward tasks (Huang et al., "GPipe", NeurIPS 2019)."""

from __future__ import annotations

from autopar.inter_op.schedules.order import one_stage_per_mesh
from autopar.inter_op.schedules.record import ScheduleRecord
from autopar.ir.pipeline import Schedule


def gpipe(num_meshes: int, num_microbatches: int) -> Schedule:
    """p meshes, m microbatches. Bubble (p−1)(f+b+2c) for c ≤ f and c ≤ b. Raises ScheduleError without meshes or
    microbatches."""
    held = in_flight(num_meshes, num_microbatches)
    return one_stage_per_mesh(GPIPE.name, num_meshes, num_microbatches, in_flight=held)


def in_flight(num_meshes: int, num_microbatches: int) -> tuple[int, ...]:
    """m at every stage."""
    return (num_microbatches,) * num_meshes


GPIPE = ScheduleRecord(name="gpipe", build=gpipe, in_flight=in_flight, in_flight_by_stages_after=True, hides=1.0)
