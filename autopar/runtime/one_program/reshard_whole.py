"""Between shardings for which a plan has no chain, inside `jax.shard_map`: over the whole value.

For what is small, or crosses between stages where the plan says nothing of how (scalars of the update, what is combined
over microbatches): summed, gathered, and cut again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from autopar.ir.sharding import ShardingSpec
from autopar.ir.strategy import ReshardStep

Emit = Callable[[ReshardStep, Any], Any]
"""A step on this device's shard."""


def settled(x: Any, spec: ShardingSpec, emit: Emit) -> tuple[Any, ShardingSpec]:
    """(``x`` with its partial sums added up, its spec then)."""
    if not spec.unreduced:
        return x, spec
    x = emit(ReshardStep(kind="all-reduce", axes=spec.unreduced), x)
    return x, ShardingSpec(dims=spec.dims)


def whole(x: Any, spec: ShardingSpec, emit: Emit) -> Any:
    """All of a value on every device, from its shard ``x`` in ``spec``."""
    if not spec.is_replicated and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):  # no collective moves keys
        inner = ShardingSpec(dims=(*spec.dims, ()))
        return jax.random.wrap_key_data(whole(jax.random.key_data(x), inner, emit), impl=jax.random.key_impl(x))
    x, spec = settled(x, spec, emit)
    for dim, axes in enumerate(spec.dims):
        for axis in reversed(axes):
            x = emit(ReshardStep(kind="all-gather", axes=(axis,), src=dim), x)
    return x


def cut(x: Any, spec: ShardingSpec, emit: Emit) -> Any:
    """The shard in ``spec`` of a value that every device has all of; of partial sums, the first device's is the
    value."""
    for dim, axes in enumerate(spec.dims):
        for axis in axes:
            x = emit(ReshardStep(kind="slice", axes=(axis,), dst=dim), x)
    for axis in spec.unreduced:
        x = emit(ReshardStep(kind="mask", axes=(axis,)), x)
    return x


def carried(x: Any, have: ShardingSpec, want: ShardingSpec, emit: Emit) -> Any:
    """The shard in ``want`` from that in ``have``, by way of the whole value where more than partial sums differ."""
    if have == want:
        return x
    x, have = settled(x, have, emit)
    return x if have == want else cut(whole(x, have, emit), want, emit)
