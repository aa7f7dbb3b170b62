"""Zero-bubble schedules: the backward pass is split, and weight gradients fill what would be bubbles.

Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), the two schedules made by hand. Only input gradients lie on
the path from stage to stage; weight gradients may wait.
"""

from __future__ import annotations

from autopar.inter_op.schedules.order import one_stage_per_mesh
from autopar.inter_op.schedules.record import ScheduleRecord
from autopar.ir.pipeline import Schedule


def zb_h1(num_meshes: int, num_microbatches: int) -> Schedule:
    """ZB-H1: 1F1B, the weight gradients of stage s put off by s microbatches. Bubble (p−1)(F+B−W+4c) for W ≤ B,
    c ≤ W/2 and m > p, where 1F1B's is (p−1)(F+B+W) at c = 0; (p−1)F for W > B at c = 0. Raises ScheduleError without
    meshes or microbatches."""
    return one_stage_per_mesh(
        ZB_H1.name,
        num_meshes,
        num_microbatches,
        in_flight=h1_in_flight(num_meshes, num_microbatches),
        warm_up=lambda s: num_meshes - s,
        weight_grad_delay=lambda s: s,
    )


def h1_in_flight(num_meshes: int, num_microbatches: int) -> tuple[int, ...]:
    """Until the weight gradient: min(m, p) at every stage, as at 1F1B's first."""
    return (min(num_microbatches, num_meshes),) * num_meshes


def zb_h2(num_meshes: int, num_microbatches: int) -> Schedule:
    """ZB-H2: eager 1F1B's warm-up, 2(p−s)−1, and the weight gradients of stage s put off by 2s microbatches. Where
    transfers take no time and m ≥ 2p−1, mesh s waits (p−1−s)·max(0, F+B−2W) between its first and its last task; the
    meshes start and end one after the other. Raises ScheduleError without meshes or microbatches."""
    return one_stage_per_mesh(
        ZB_H2.name,
        num_meshes,
        num_microbatches,
        in_flight=h2_in_flight(num_meshes, num_microbatches),
        warm_up=lambda s: 2 * (num_meshes - s) - 1,
        weight_grad_delay=lambda s: 2 * s,
    )


def h2_in_flight(num_meshes: int, num_microbatches: int) -> tuple[int, ...]:
    """Until the weight gradient: min(m, 2p−1) at every stage."""
    return (min(num_microbatches, 2 * num_meshes - 1),) * num_meshes


ZB_H1 = ScheduleRecord(
    name="zb_h1",
    build=zb_h1,
    in_flight=h1_in_flight,
    in_flight_by_stages_after=False,
    hides=0.0,
    splits_backward=True,
)
ZB_H2 = ScheduleRecord(
    name="zb_h2",
    build=zb_h2,
    in_flight=h2_in_flight,
    in_flight_by_stages_after=False,
    hides=0.0,
    splits_backward=True,
)
