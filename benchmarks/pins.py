"""What holds the planner to a published pipeline, for steps cut into as many layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from benchmarks.alpa_solutions import Measured, Solution


def logical_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """A logical mesh as the planner names it: axes of one device left out."""
    return tuple(size for size in shape if size > 1) or (1,)


def batch_axes(shape: Sequence[int]) -> tuple[int, ...]:
    """The batch bound to the first axis of a logical mesh, as the planner names it: whole where that has one device."""
    return (0,) if shape[0] > 1 else ()


def pins_of(solution: Solution) -> dict[str, Any]:
    """`PipelineOptions` that hold a published solution, for a step cut into ``solution.num_layers`` layers."""
    stages = solution.stages
    return {
        "starts": (0, *itertools.accumulate(stage.layers for stage in stages[:-1])),
        "submeshes": tuple(stage.submesh for stage in stages),
        "logical_shapes": tuple(dict.fromkeys(logical_shape(stage.logical) for stage in stages)),
        "batch_axes": tuple(batch_axes(stage.logical) if stage.batch_first else None for stage in stages),
        "schedules": ("1f1b",),
        "remat": ("full",),  # every layer keeps its operands alone
    }


def pins_of_measured(point: Measured, layers: int) -> dict[str, Any]:
    """The same for the measured point: equal stages of ``layers`` layers in all."""
    stages = point.pipeline_parallel
    devices = point.data_parallel * point.operator_parallel
    return {
        "starts": tuple(k * layers // stages for k in range(stages)),
        "submeshes": ((1, devices),) * stages,
        "logical_shapes": (logical_shape((point.data_parallel, point.operator_parallel)),),
        "batch_axes": (batch_axes((point.data_parallel, point.operator_parallel)) if point.batch_first else None,),
        "whole_examples": True,
        "schedules": ("1f1b",),
        "remat": ("full",),
    }
