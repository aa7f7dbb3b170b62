"""Local lowerings of identities that mean something to the partitioner or the host, and nothing on a shard; and of an
operator that JAX does not compile inside a shard_map. (Every other elementwise operator binds unchanged.)
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.runtime.one_program.local.context import LocalContext, LocalRule


def _identity(ctx: LocalContext, eqn: Any, *operands: Any) -> list[Any]:
    del ctx, eqn
    return list(operands)


def _mulhi(ctx: LocalContext, eqn: Any, *operands: Any) -> list[Any]:
    """The upper half of the product, from products of halves of the bits: JAX ends in ``Unable to convert MHLO to
    StableHLO`` for its own inside a shard_map (0.10.2)."""
    del ctx, eqn
    signed = operands[0].dtype
    x, y = (lax.bitcast_convert_type(o, jnp.dtype(f"uint{8 * signed.itemsize}")) for o in operands)
    half = jnp.asarray(4 * signed.itemsize, x.dtype)
    low = (jnp.asarray(1, x.dtype) << half) - 1
    mixed = (x >> half) * (y & low) + ((x & low) * (y & low) >> half)
    upper = (x >> half) * (y >> half) + (mixed >> half) + ((x & low) * (y >> half) + (mixed & low) >> half)
    if jnp.issubdtype(signed, jnp.signedinteger):
        zero = jnp.zeros_like(x)
        upper = upper - jnp.where(operands[0] < 0, y, zero) - jnp.where(operands[1] < 0, x, zero)
    return [lax.bitcast_convert_type(upper, signed)]


LOCAL: dict[str, LocalRule] = {
    "device_put": _identity,
    "layout_constraint": _identity,
    "mesh_cast": _identity,
    "mulhi": _mulhi,
    "pvary": _identity,
    "reduced_vary_cast_p": _identity,
    "reshard": _identity,
    "shard_alike": _identity,
    "sharding_constraint": _identity,
}
