"""Random batches, of the default precision."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def ints(limit: int, *shape: int, seed: int = 0) -> jax.Array:
    """int32 below ``limit``."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, limit, shape), jnp.int32)
