"""Eager 1F1B: a longer warm-up, so that transfers overlap with tasks.

Zhuang et al., "On Optimizing the Communication of Model Parallelism" (MLSys 2023): "overlapping-friendly" pipelines. A
microbatch that leaves stage s comes back after (p−s)(f+b) of work and 2c(p−1−s) of transfers; with w_s microbatches in
flight the stage's period is the larger of f+b and [(p−s)(f+b) + 2c(p−1−s)] / w_s. Transfers are hidden where

    w_s = 1 + (p−1−s)(1 + k),   k = ⌈2c/(f+b)⌉
"""

from __future__ import annotations

import math

from autopar.inter_op.schedules.order import one_stage_per_mesh
from autopar.ir.errors import ScheduleError
from autopar.ir.pipeline import Schedule


def overlap_depth(forward_s: float, backward_s: float, transfer_s: float) -> int:
    """k = ⌈2c/(f+b)⌉: how many microbatches more per stage hide transfers of ``transfer_s`` seconds each way. 0 where
    nothing takes any time. Raises ScheduleError where transfers take time and tasks take none."""
    if transfer_s == 0:
        return 0
    if forward_s + backward_s <= 0:
        raise ScheduleError(f"eager_1f1b: no warm-up hides transfers of {transfer_s} s behind tasks that take no time")
    return math.ceil(2 * transfer_s / (forward_s + backward_s))


def eager_1f1b(num_meshes: int, num_microbatches: int, *, depth: int = 1) -> Schedule:
    """p meshes, m microbatches; ``depth`` is k above (`overlap_depth`): 1 for c ≤ (f+b)/2, the paper's case; 0 is 1F1B.

    In flight at stage s: min(m, 1 + (p−1−s)(1+k)), for k = 1 min(m, 2(p−s)−1). Bubble (p−1)(f+b+2c) for
    c ≤ k(f+b)/2 and c ≤ f+b (beyond that links are slower than tasks, whatever the depth). Raises ScheduleError without
    meshes or microbatches and for a negative depth."""
    if depth < 0:
        raise ScheduleError(f"eager_1f1b: depth is {depth}; give at least 0")
    return one_stage_per_mesh(
        "eager_1f1b", num_meshes, num_microbatches, warm_up=lambda s: 1 + (num_meshes - 1 - s) * (1 + depth)
    )
