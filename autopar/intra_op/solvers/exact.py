"""Exact solvers of a reduced problem, behind one signature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.intra_op.reduce.core import Core
from autopar.intra_op.reduce.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``choice`` (int64[nodes], in the ledger's order) None where none that costs less than the cutoff was found;
    ``bound`` holds for all choices that fit, and is the cutoff where it is proven that none beats it. ``proven``: True
    where the choice is optimal to the gap asked for, or none beats the cutoff."""

    choice: Any
    bound: float
    proven: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactSolver:
    """What a user may choose by ``name``. ``solve``: (core, ledger, deadline, cutoff, room, gap) → outcome, to an
    absolute gap of ``room`` or a relative one of ``gap``, whichever it knows; only choices that cost less than
    ``cutoff``, the core's constant apart, are asked for, until ``deadline`` (of time.perf_counter). ``available``
    gives True where it is installed."""

    name: str
    available: Callable[[], bool]
    solve: Callable[[Core, Ledger, float, float, float, float], Outcome]


Solve = Callable[[Core, Ledger, float, float], Outcome]
"""(core, ledger, deadline, cutoff) → outcome."""

THREADS = 2
"""Of HiGHS, everywhere: its scheduler is one per process, and a run with another number of threads fails."""
ALL_ROWS = 100
"""Up to so many times all memory rows are stated from the start (guessed)."""


def first_rows(ledger: Ledger) -> list[int]:
    """The times whose memory rows are stated from the start: all of at most `ALL_ROWS`, else none."""
    return list(range(ledger.horizon)) if ledger.horizon <= ALL_ROWS else []


def peaks(excess: Any, have: set[int], most: int) -> list[int]:
    """At most ``most`` times of the largest positive ``excess`` (float64[times]), spread out, and not in ``have``."""
    picked: list[int] = []
    apart = max(1, len(excess) // 100)
    for t in np.argsort(-excess, kind="stable").tolist():
        if excess[t] <= 0 or len(picked) >= most:
            break
        if t not in have and all(abs(t - p) >= apart for p in picked):
            picked.append(t)
    return picked
