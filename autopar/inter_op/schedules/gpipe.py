"""GPipe: all forward tasks, then all backward tasks (Huang et al., "GPipe", NeurIPS 2019)."""

from __future__ import annotations

from autopar.inter_op.schedules.order import one_stage_per_mesh
from autopar.ir.pipeline import Schedule


def gpipe(num_meshes: int, num_microbatches: int) -> Schedule:
    """p meshes, m microbatches. In flight: m. Bubble (p−1)(f+b+2c) for c ≤ f and c ≤ b.
    Raises ScheduleError without meshes or microbatches."""
    return one_stage_per_mesh("gpipe", num_meshes, num_microbatches, warm_up=lambda s: num_microbatches)
