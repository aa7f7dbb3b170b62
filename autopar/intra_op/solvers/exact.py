"""Exact solvers of a reduced problem, behind one signature."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.intra_op.reduce.core import Core
from autopar.intra_op.reduce.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``choice`` (int64[nodes], in the ledger's order) None where none that costs less than the cutoff was found;
    ``bound`` holds for all choices that fit, and is the cutoff where it is proven that none beats it."""

    choice: Any
    bound: float
    proven: bool


Solve = Callable[[Core, Ledger, float, float], Outcome]
"""(core, ledger, deadline, cutoff) → outcome."""

THREADS = 2
"""Of HiGHS, everywhere: its scheduler is one per process, and a run with another number of threads fails."""
ALL_ROWS = 100
"""Up to so many times all memory rows are stated from the start (guessed)."""


def exact_solver() -> Solve:
    """toulbar2 where it is installed and can state the problem, else HiGHS."""
    if importlib.util.find_spec("pytoulbar2") is None:
        return with_highs

    def best(core: Core, ledger: Ledger, deadline: float, cutoff: float) -> Outcome:
        from autopar.intra_op.solvers.toulbar import can_state, solve_toulbar

        if not can_state(ledger):
            return with_highs(core, ledger, deadline, cutoff)
        return solve_toulbar(core, ledger, first_rows(ledger), deadline, cutoff)

    return best


def with_highs(
    core: Core, ledger: Ledger, deadline: float, cutoff: float, times: Sequence[int] = (), room: float = 0.0
) -> Outcome:
    """HiGHS on the integer program: with the memory rows of ``times`` from the start, to an absolute gap ``room``."""
    from autopar.intra_op.solvers.highs import Program

    return Program(core, ledger).solve(sorted({*first_rows(ledger), *times}), deadline, cutoff, room)


def first_rows(ledger: Ledger) -> list[int]:
    """The times whose memory rows are stated from the start."""
    return list(range(ledger.horizon)) if ledger.horizon <= ALL_ROWS else []


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
