"""1F1B: a backward task as soon as there is one, so that as few microbatches as possible are in flight.

PipeDream-Flush, in Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(SC 2021).
"""

from __future__ import annotations

from autopar.inter_op.schedules.order import one_stage_per_mesh
from autopar.ir.pipeline import Schedule


def one_f_one_b(num_meshes: int, num_microbatches: int) -> Schedule:
    """p meshes, m microbatches. In flight at stage s: min(m, p−s). Bubble (p−1)(f+b) where transfers take no time; with
    transfers of c each way 2c[(p−1)m/p + p−2] more (m > p, a multiple of it, and c ≤ f+b): a round trip of the
    pipeline holds only p microbatches. Raises ScheduleError without meshes or microbatches."""
    return one_stage_per_mesh("1f1b", num_meshes, num_microbatches, warm_up=lambda s: num_meshes - s)
