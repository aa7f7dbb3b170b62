"""Structural hashes of many things at once, as numpy columns.

Equal structures get equal 64-bit hashes; different ones collide with probability n²/2⁶⁵ (10⁻⁸ for a million).
The mixing step is that of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014). A sum of hashes is the hash of a multiset.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def mixed(*columns: Any) -> Any:
    """uint64[n]: one hash for each row of integer columns of length n."""
    with np.errstate(over="ignore"):
        out = np.uint64(0)
        for column in columns:
            out = out * np.uint64(0x9E3779B97F4A7C15) + column.astype(np.uint64) + np.uint64(1)
            out = (out ^ (out >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            out = (out ^ (out >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            out = out ^ (out >> np.uint64(31))
    return out


def numbered(hashes: Any) -> tuple[Any, Any]:
    """(int64[n], int64[distinct]): equal hashes as equal numbers, in order of their first occurrence, and where that
    is."""
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank[inverse.ravel()], first[order]
