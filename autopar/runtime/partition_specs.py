"""`ShardingSpec`s of finished values as JAX has them."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.ir.sharding import ShardingSpec


def partition_spec(spec: ShardingSpec) -> PartitionSpec:
    """The PartitionSpec of a finished value."""
    return PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in spec.dims))


def named_shardings(specs: Sequence[ShardingSpec], mesh: Mesh) -> list[NamedSharding]:
    """The NamedShardings of finished values."""
    return [NamedSharding(mesh, partition_spec(spec)) for spec in specs]
