"""What the tasks of a stage take and give: arrays by key, and how they lie outside tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
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


def fused(first: StageTask, after: StageTask, later: Collection[Key], platform: str) -> StageTask:
    """A forward task and the task ``after`` it of the same microbatch (`Stage.fused`), in this order; of what the first
    keeps only ``later`` leaves. No operator of the one is merged with one of the other: what is to be recomputed is not
    kept, and numbers are those of two executables."""
    between = {array.key for array in first.gives}
    stays = [array for array in first.gives if array.key[0] == "combined" or array.key in later]
    takes = distinct((*first.takes, *(array for array in after.takes if array.key not in between)))

    def apart(task: Callable[..., list[Any]], *xs: Any) -> Any:
        if platform != "cpu":
            return task(*xs)
        # Barriers do not last until operators are merged there, but a call that is no inline one (XLA's CallInliner).
        return set_xla_metadata(jax.jit(task)(*xs), inlineable="false")

    def run(*xs: Any) -> list[Any]:
        known = {array.key: x for array, x in zip(takes, xs, strict=True)}
        made = apart(first.run, *(known[array.key] for array in first.takes))
        known.update(zip((array.key for array in first.gives), made, strict=True))
        known = dict(zip(known, lax.optimization_barrier(tuple(known.values())), strict=True))
        taken = [known[array.key] for array in after.takes]
        rest = apart(lambda made, *xs: after.run(*xs), made, *taken)  # never beside the first, whose results it has
        return [*(known[array.key] for array in stays), *rest]

    return StageTask(tuple(takes), (*stays, *after.gives), run)


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
