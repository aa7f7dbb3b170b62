"""What the tasks of a stage take and give: arrays by key, and how they lie outside tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from autopar.ir.graph import TensorType
from autopar.ir.sharding import ShardingSpec
from autopar.runtime.partition_specs import partition_spec

Key = tuple[Any, ...]
"""What names an array of a task: ("receive", value, spec), ("weight", layer, version), ("kept", layer, version),
("sum", layer, number), ("send", value), ("combined", value)."""

Rows = tuple[int, int, int]
"""(argument, first row, last row + 1) of a stage's input; 0, 0 for all of it."""


@dataclass(frozen=True)
class Array:
    """An array that a task takes or gives: its key, the type of the whole value, its spec on the stage's mesh."""

    key: Key
    type: TensorType
    spec: ShardingSpec


@dataclass(frozen=True)
class StageTask:
    """``run`` maps arrays as ``takes`` lists them to those of ``gives``; jit it. ``same``: what else it gives is, array
    by array, one that it takes."""

    takes: tuple[Array, ...]
    gives: tuple[Array, ...]
    run: Callable[..., list[Any]]
    same: tuple[tuple[Key, Key], ...] = ()


def outer_spec(spec: ShardingSpec) -> PartitionSpec:
    """The PartitionSpec of an array outside tasks: partial sums have a leading dimension of their own, split over the
    axes that they are to be added over."""
    inner = partition_spec(spec)
    return PartitionSpec(spec.unreduced, *inner) if spec.unreduced else inner


def outer_shape(value_type: TensorType, spec: ShardingSpec, axis_sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an array outside tasks; ``axis_sizes``: of the stage's mesh."""
    count = math.prod(axis_sizes[a] for a in spec.unreduced)
    return (count, *value_type.shape) if spec.unreduced else value_type.shape


def distinct(arrays: Iterable[Array]) -> list[Array]:
    """The last of the arrays of each key, in the order of the first."""
    return list({array.key: array for array in arrays}.values())
