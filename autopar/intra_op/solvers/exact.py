"""What all exact solvers of a reduced problem share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``choice`` (int64[nodes], in the ledger's order) None where none that costs less than the cutoff was found;
    ``bound`` holds for all choices that fit, and is the cutoff where it is proven that none beats it."""

    choice: Any
    bound: float
    proven: bool


def peaks(excess: Any, have: set[int], most: int) -> list[int]:
    """The times of largest positive ``excess``, spread out, and not in ``have``."""
    picked: list[int] = []
    apart = max(1, len(excess) // 100)
    for t in np.argsort(-excess, kind="stable").tolist():
        if excess[t] <= 0 or len(picked) >= most:
            break
        if t not in have and all(abs(t - p) >= apart for p in picked):
            picked.append(t)
    return picked
