"""A layer of experts without a capacity: tokens sorted by expert, ragged products, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.microbatches import WIDTH

EXPERTS, TOP, HIDDEN = 4, 2, 12
Sizes = Callable[[Any], Any]


def weights() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {
        "gate": (WIDTH, EXPERTS),
        "up": (EXPERTS, WIDTH, HIDDEN),
        "bias": (EXPERTS, HIDDEN),
        "down": (EXPERTS, HIDDEN, WIDTH),
    }
    return {k: jnp.asarray(rng.normal(size=s) * 0.6) for k, s in shapes.items()}


def bincount(key: Any) -> Any:
    return jnp.bincount(key, length=EXPERTS)


def by_place(out: Any, order: Any) -> Any:
    return out[jnp.argsort(order)]


def experts(
    p: Any, h: Any, *, order: Any = jnp.argsort, sizes: Any = bincount, back: Any = by_place, read: Any = None
) -> Any:
    """(tokens, width) → the same, each token by its top experts."""
    gates, chosen = lax.top_k(jax.nn.softmax(h @ p["gate"]), TOP)
    key = chosen.reshape(-1)
    sorting = order(key)
    rows = (read or (lambda h, o: h[o // TOP]))(h, sorting)
    counted = sizes(key)
    out = jax.nn.silu(lax.ragged_dot(rows, p["up"], counted) + p["bias"][key[sorting]])
    out = back(lax.ragged_dot(out, p["down"], counted), sorting)
    return jnp.einsum("tk,tkd->td", gates, out.reshape(-1, TOP, WIDTH))
