"""Eager 1F1B: a longer warm-up, so that transfers overlap with tasks.

Zhuang et al., "On Optimizing the Communication of Model Parallelism" (MLSys 2023): "overlapping-friendly" pipelines. A
microbatch that leaves stage s comes back after (p−s)(f+b) of work and 2c(p−1−s) of transfers; with w_s microbatches in
flight the stage's period is the larger of f+b and [(p−s)(f+b) + 2c(p−1−s)] / w_s. Transfers are hidden where

    w_s = 1 + (p−1−s)(1 + k),   k = ⌈2c/(f+b)⌉
"""

from __future__ import annotations

import math

from autopar.inter_op.schedules.order import one_stage_per_mesh
from autopar.inter_op.schedules.record import ScheduleOptions, ScheduleRecord
from autopar.ir.errors import ScheduleError
from autopar.ir.pipeline import PipelinePlan, Schedule

DEPTHS = (2, 4)
"""That are tried on choices of stages beside 1 and what follows from transfers (guessed)."""


def overlap_depth(forward_s: float, backward_s: float, transfer_s: float) -> int:
    """k = ⌈2c/(f+b)⌉: how many microbatches more per stage hide transfers of ``transfer_s`` seconds each way. 0 where
    nothing takes any time. Raises ScheduleError where transfers take time and tasks take none."""
    if transfer_s == 0:
        return 0
    if forward_s + backward_s <= 0:
        raise ScheduleError(
            f"{EAGER_1F1B.name}: no warm-up hides transfers of {transfer_s} s behind tasks that take no time"
        )
    return math.ceil(2 * transfer_s / (forward_s + backward_s))


def eager_1f1b(num_meshes: int, num_microbatches: int, *, depth: int = 1) -> Schedule:
    """p meshes, m microbatches; ``depth`` is k above (`overlap_depth`): 1 for c ≤ (f+b)/2, the paper's case; 0 is 1F1B.

    Bubble (p−1)(f+b+2c) for c ≤ k(f+b)/2 and c ≤ f+b (beyond that links are slower than tasks, whatever the depth).
    Raises ScheduleError without meshes or microbatches and for a negative depth."""
    if depth < 0:
        raise ScheduleError(f"{EAGER_1F1B.name}: depth is {depth}; give at least 0")
    held = in_flight(num_meshes, num_microbatches, depth=depth)
    return one_stage_per_mesh(EAGER_1F1B.name, num_meshes, num_microbatches, in_flight=held)


def in_flight(num_meshes: int, num_microbatches: int, *, depth: int = 1) -> tuple[int, ...]:
    """min(m, 1 + (p−1−s)(1+k)) at stage s, for k = 1 min(m, 2(p−s)−1)."""
    return tuple(min(num_microbatches, 1 + (num_meshes - 1 - s) * (1 + depth)) for s in range(num_meshes))


def _tried(num_microbatches: int) -> tuple[ScheduleOptions, ...]:
    """A depth that hides transfers may pay where 1 does not."""
    return ((), *((("depth", depth),) for depth in DEPTHS if depth < num_microbatches))


def _distinct(num_microbatches: int) -> tuple[ScheduleOptions, ...]:
    """Depths from 1 (0 is 1F1B) to that with which all microbatches are in flight but at the last stage."""
    return tuple((("depth", depth),) for depth in range(1, max(2, num_microbatches)))


def _suited(plan: PipelinePlan) -> tuple[ScheduleOptions, ...]:
    """The depth that hides the slowest transfer behind the slowest stage, twice that, and all microbatches."""
    costs, m = [stage.cost for stage in plan.stages], plan.schedule.num_microbatches
    forward, backward = max(c.forward_s for c in costs), max(c.backward_s for c in costs)
    slowest = max((c.time_s for c in plan.cuts if c.phase in ("forward", "backward")), default=0.0)
    depth = overlap_depth(forward, backward, slowest) if forward + backward else 1
    return tuple((("depth", k),) for k in sorted({max(1, min(k, m)) for k in (depth, 2 * depth, m)}))


EAGER_1F1B = ScheduleRecord(
    name="eager_1f1b",
    build=eager_1f1b,
    in_flight=in_flight,
    in_flight_by_stages_after=True,
    hides=1.0,
    options=("depth",),
    tried=_tried,
    distinct=_distinct,
    suited=_suited,
)
