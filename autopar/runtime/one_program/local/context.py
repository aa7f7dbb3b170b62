"""What a local lowering may know: the shape of its mesh and how its operator's factors are split.

The lowered step is one `jax.shard_map` over the whole mesh, so every operator runs on local shapes. Most
primitives bind unchanged on their local operands. Those whose parameters hold shapes, or whose result
depends on where the shard lies (iota, random bits, gathers from a split dimension, halos), have a
function here: ``lower(ctx, eqn, *operands) -> list of results``, called inside shard_map with operands
already split as ``ctx.operand_specs`` say, and returning results split as ``ctx.result_specs`` say (a
result that is unreduced over an axis: this device's partial sum).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jax import lax

from autopar.ir.graph import Node
from autopar.ir.sharding import OpShardingRule, ShardingSpec

LocalRule: TypeAlias = "Callable[..., Sequence[Any]]"


@dataclass(frozen=True, kw_only=True)
class LocalContext:
    """One operator's strategy, at lowering time."""

    axis_sizes: dict[str, int]
    factor_axes: dict[str, tuple[str, ...]]
    operand_specs: tuple[ShardingSpec, ...]
    result_specs: tuple[ShardingSpec, ...]
    rule: OpShardingRule
    node: Node
    threads: bool = False
    """Devices are threads of one process that wait for each other in collectives, and so for the pool they share."""

    def num_shards(self, axes: Sequence[str]) -> int:
        """Product of the sizes of ``axes``."""
        return math.prod(self.axis_sizes[a] for a in axes)

    def shard_index(self, axes: Sequence[str]) -> Any:
        """int32 scalar: this device's position along ``axes`` (major to minor); 0 for no axes."""
        if not axes:
            return 0
        return lax.axis_index(tuple(axes))

    def factor_shards(self, name: str) -> int:
        """Into how many parts factor ``name`` is split."""
        return self.num_shards(self.factor_axes.get(name, ()))

    def operand_shape(self, i: int) -> tuple[int, ...]:
        """Local shape of operand i."""
        return self._local(self.node.operand_types[i].shape, self.operand_specs[i])

    def result_shape(self, i: int = 0) -> tuple[int, ...]:
        """Local shape of result i."""
        return self._local(self.node.result_types[i].shape, self.result_specs[i])

    def _local(self, shape: tuple[int, ...], spec: ShardingSpec) -> tuple[int, ...]:
        return tuple(-(-n // self.num_shards(axes)) for n, axes in zip(shape, spec.dims, strict=True))

    def offset(self, axes: Sequence[str], local_size: int) -> Any:
        """First global index of this device's shard of a dimension split over ``axes``."""
        return self.shard_index(axes) * local_size
