"""Local lowerings of identities that mean something to the partitioner or the host, and nothing on a shard.

In: local operands. Out: the same values. (Every other elementwise operator binds unchanged.)
"""

from __future__ import annotations

from typing import Any

from autopar.runtime.local.context import LocalContext, LocalRule


def _identity(ctx: LocalContext, eqn: Any, *operands: Any) -> list[Any]:
    del ctx, eqn
    return list(operands)


LOCAL: dict[str, LocalRule] = {
    "device_put": _identity,
    "layout_constraint": _identity,
    "mesh_cast": _identity,
    "pvary": _identity,
    "reduced_vary_cast_p": _identity,
    "reshard": _identity,
    "shard_alike": _identity,
    "sharding_constraint": _identity,
}
