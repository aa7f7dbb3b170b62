"""A process that searches beside the planner's: it owns one Core, and answers one request at a time.

Requests and answers are pickled to its standard input and output, by `helpers`. What it finds on the way is
told at once, so that it may be ended at any time.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.intra_op.reduce.core import Core
from autopar.intra_op.reduce.ledger import Ledger
from autopar.intra_op.solvers.forests import Forests
from autopar.intra_op.solvers.neighbourhoods import Neighbourhoods
from autopar.intra_op.solvers.prices import Excess, Pricing
from benchmarks.solver_team.toulbar import exact_solver

WHOLE_S = 3.0
"""So long a combination is tried as a whole, then in parts (guessed)."""
IDLE = 15
"""A combination ends after so many parts that gained nothing (guessed)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt:
    """The problem that later requests are about."""

    core: Core


@dataclass(frozen=True, slots=True, kw_only=True)
class Improve:
    """Improve a choice by large neighbourhoods for some seconds. ``excess`` says where."""

    choice: Any
    excess: Excess
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Go from a choice to better ones by forests, from some prices on memory on."""

    choice: Any
    prices: Any
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Combine:
    """Look among all combinations of some choices' strategies for a better one than ``choice``."""

    choice: Any
    others: tuple[Any, ...]
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prove:
    """Solve all of it exactly; what is found must cost less than ``cutoff``."""

    cutoff: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Better:
    """An answer on the way: a better choice."""

    choice: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The last answer to a request: the best choice (None where none was found), and what is proven; of a walk the
    prices at which it was found."""

    choice: Any
    prices: Any = None
    bound: float = -np.inf
    proven: bool = False


def main() -> None:
    """Answers requests until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the planner decides when this ends
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # solvers print

    def tell(answer: Better | Done) -> None:
        pickle.dump(answer, out, protocol=pickle.HIGHEST_PROTOCOL)
        out.flush()

    solve = exact_solver()
    search: Neighbourhoods | None = None
    forests: Forests | None = None
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        match request:
            case Adopt(core=core):
                search = Neighbourhoods(core, Ledger(core, sorted(core.alive)), solve, np.random.default_rng(0))
                forests = Forests(Pricing(core), search.rng)
                continue
            case Walk():
                assert forests is not None
                forests.rng = np.random.default_rng(request.seed)
                best, prices = forests.walk(request.choice, request.prices, time.perf_counter() + request.seconds)
                tell(Done(choice=best, prices=prices))
            case Improve():
                assert search is not None
                search.rng = np.random.default_rng(request.seed)
                deadline = time.perf_counter() + request.seconds
                best = search.improve(request.choice, request.excess, deadline, lambda c: tell(Better(choice=c)))
                tell(Done(choice=best))
            case Combine():
                assert search is not None
                search.rng = np.random.default_rng(request.seed)
                deadline = time.perf_counter() + request.seconds
                best = search.combine(request.choice, request.others, deadline, idle=IDLE, whole_s=WHOLE_S)
                tell(Done(choice=best))
            case Prove():
                assert search is not None
                deadline = time.perf_counter() + request.seconds
                found = solve(search.core, search.ledger, deadline, request.cutoff)
                tell(Done(choice=found.choice, bound=found.bound, proven=found.proven))
            case _:
                raise TypeError(f"no request: {request!r}")
