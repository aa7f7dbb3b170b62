"""The problem over some of its strategies only: much smaller, reduced again, and solved exactly."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.intra_op.reduce.core import restricted
from autopar.intra_op.reduce.ledger import Ledger
from autopar.intra_op.reduce.run import reduce
from autopar.intra_op.solvers.exact import Outcome, peaks
from autopar.intra_op.solvers.highs import with_highs
from autopar.intra_op.solvers.prices import Pricing

PEAKS = 3
"""Times of each choice known whose memory rows are stated from the start (guessed)."""


def wanted_by(pricing: Pricing, choices: Sequence[Any]) -> Any:
    """bool[strategies of all nodes]: those that occur in one of ``choices`` (int64[nodes] each)."""
    at = pricing.passing.at
    out = np.zeros(int(at[-1]), bool)
    for choice in choices:
        out[at[:-1] + choice] = True
    return out


def within(pricing: Pricing, most_pairs: int, room: float) -> tuple[Any, float]:
    """(bool[strategies of all nodes], τ): those whose excess is at most τ, for the largest τ ≤ ``room`` that leaves no
    more than ``most_pairs`` pairs, of a few tried. A choice with any other costs more than the last bound by τ."""
    passing = pricing.passing
    excess, (u, v) = passing.excess, passing.ends.T
    cells = passing.shapes.prod(axis=1)
    for tau in room * np.geomspace(1.0, 1e-4, 17):
        wanted = excess <= tau
        sizes = np.add.reduceat(wanted, passing.at[:-1])
        if np.minimum(sizes[u] * sizes[v], cells).sum() <= most_pairs:
            return wanted, float(tau)
    return excess <= 0.0, 0.0


def solve_restricted(
    pricing: Pricing, wanted: Any, deadline: float, cutoff: float, room: float, most_pairs: int
) -> Outcome | None:
    """The best choice (int64[nodes], in the order of the pricing's ledger) of ``wanted`` (bool[strategies of all
    nodes]) that costs less than ``cutoff``, to an absolute gap ``room``. None where more than ``most_pairs`` pairs are
    left after reductions, or time is up."""
    ledger, at = pricing.ledger, pricing.passing.at
    part = restricted(pricing.core, ledger.nodes, np.split(wanted, at[1:-1]))
    reduce(part, deadline)
    if part.infeasible:
        return Outcome(choice=None, bound=cutoff, proven=True)
    if not part.alive:
        choice = np.array(part.restore({}), np.int64)
        better = part.constant < cutoff
        return Outcome(choice=choice if better else None, bound=min(part.constant, cutoff), proven=True)
    if part.pairs > most_pairs or time.perf_counter() > deadline:
        return None
    rest = Ledger(part, sorted(part.alive))
    times: set[int] = set()
    for choice in (*pricing.mixture, *pricing.pool):  # where these exceed the limit, others would too
        inside = part.project(choice.tolist())
        if inside is not None:
            live = rest.live(np.array([inside[v] for v in rest.nodes], np.int64))
            times |= set(peaks(live - rest.limit, times, PEAKS))
    found = with_highs(part, rest, deadline, cutoff - part.constant, sorted(times), room)
    bound = min(found.bound + part.constant, cutoff)
    if found.choice is None:
        return Outcome(choice=None, bound=bound, proven=found.proven)
    choice = part.restore({v: int(s) for v, s in zip(rest.nodes, found.choice, strict=True)})
    return Outcome(choice=np.array(choice, np.int64), bound=bound, proven=found.proven)
