"""A training state with every kind of leaf, and what identifies each leaf. Imports nothing of autopar: the script of an
Orbax user (`tests/orbax_reader.py`) uses it too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding


def training_state(sharding: NamedSharding | None = None) -> Any:
    """The state; ``sharding``: of its (4, 8) matrix."""
    params = {
        "w": jax.device_put(jnp.arange(32.0).reshape(4, 8), sharding),
        "half": jnp.arange(3.0).astype(jnp.bfloat16),
        "eighth": jnp.arange(3.0).astype(jnp.float8_e4m3fn),
        "mlp/~/linear": {"w": jnp.ones((2, 3))},
        "layers": [jnp.ones(2), (jnp.int32(3),)],
    }
    return {
        "params": params,
        "opt": optax.adam(1e-3).init(params),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(1), 4),
        "step": 3,
        "rate": 0.5,
        "flag": True,
        "none": None,
        "empty": {},
        "mask": jnp.array([True, False]),
        "bytes": np.arange(3, dtype=np.int8),
    }


def texts(tree: Any, keys: bool = True) -> list[str]:
    """dtype, shape and bytes of all leaves, in order; without ``keys``, random keys as their words."""

    def text(value: Any) -> str:
        if jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.prng_key):
            return ("key " if keys else "") + text(jax.random.key_data(value))
        array = np.asarray(value)
        return f"{array.dtype} {array.shape} {array.tobytes().hex()}"

    return [text(leaf) for leaf in jax.tree.leaves(tree)]
