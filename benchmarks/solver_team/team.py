"""Two processes on what is left of a problem, until time is up or the best choice is proven."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from autopar.intra_op.reduce.core import Core
from autopar.intra_op.search import Search
from autopar.intra_op.solvers.prices import Pricing
from benchmarks.solver_team.helpers import Helper
from benchmarks.solver_team.worker import Better, Combine, Done, Improve, Prove, Walk

PROVE_PAIRS = 500_000
"""Up to so many pairs one process tries to prove (measured: toulbar2 finds the best known choice of 310 thousand)."""
COMBINE_S, IMPROVE_S = 12.0, 6.0
"""Combinations and neighbourhood searches meet after so many seconds (guessed)."""
MOST_COMBINED = 8
"""Choices whose strategies are combined at most (measured: two or three take a second or two, more find more)."""
ELITES = 16
"""Choices at the ends of walks that are kept (guessed)."""
WALKING_SHARE = 0.4
"""Of the time at most for walks from the choices that prices gave; then combinations begin (guessed)."""
RESERVE_S = 1.5
"""Kept at the end, to close (guessed)."""


class Team:
    """Two workers: the first proves if the rest is small enough; else both walk by forests from the choices that prices
    gave, then combine what they found, walk on from it, and improve the best."""

    def __init__(self, search: Search, pricing: Pricing, excess: Any, choice: Any, helpers: list[Helper]) -> None:
        self.search, self.pricing, self.excess, self.helpers = search, pricing, excess, helpers
        self.choice = choice
        self.over = pricing.ledger.over(choice)
        self.cost = pricing.cost(choice)
        self.rounds = 0
        self.starts = sorted([choice, *pricing.pool], key=self._priced)
        self.walking_until = time.perf_counter() + WALKING_SHARE * search.left
        self.elites: list[tuple[float, Any, Any]] = []
        """(cost, choice, prices) of choices that fit, the best first."""
        self.prover: Helper | None = helpers[0] if search.core.pairs <= PROVE_PAIRS else None

    def run(self) -> None:
        """Asks and listens until the end."""
        search = self.search
        names = search.found.methods
        names += ["exact"] if self.prover else []
        names += ["forests", "neighbourhoods"]
        while search.left > RESERVE_S and not search.closed:
            for helper in self.helpers:
                if not helper.busy:
                    self._ask(helper)
            for helper in self.helpers:
                if not self._listen(helper):
                    return
            time.sleep(0.02)

    def _ask(self, helper: Helper) -> None:
        search = self.search
        left = search.left - RESERVE_S
        if helper is self.prover:
            helper.ask(Prove(cutoff=search.found.cost - search.core.constant, seconds=max(1.0, left - RESERVE_S)))
            return
        self.rounds += 1
        seed = self.rounds
        if self.starts and time.perf_counter() < self.walking_until:
            start = self.starts.pop(0)
            helper.ask(Walk(choice=start, prices=self.pricing.prices, seconds=left, seed=seed))
            return
        rng, elites = np.random.default_rng(seed), self.elites
        turn = seed % 4
        if turn == 3 or len(elites) < 2:
            helper.ask(Improve(choice=self.choice, excess=self.excess, seconds=min(IMPROVE_S, left), seed=seed))
        elif turn == 1:
            here, there = rng.choice(len(elites), size=2, replace=False)
            helper.ask(Walk(choice=elites[here][1], prices=elites[there][2], seconds=left, seed=seed))
        else:
            base = elites[int(rng.integers(len(elites)))][1] if turn else self.choice
            others = [known for _, known, _ in elites if not np.array_equal(known, base)]
            size = min(int(rng.integers(1, MOST_COMBINED)), len(others))
            some = tuple(others[i] for i in rng.choice(len(others), size=size, replace=False))
            helper.ask(Combine(choice=base, others=some, seconds=min(COMBINE_S, left), seed=seed))

    def _listen(self, helper: Helper) -> bool:
        """Takes what a worker has to say; False where it has ended."""
        search, found = self.search, self.search.found
        while not helper.answers.empty():
            answer = helper.answers.get()
            if answer is None:
                raise RuntimeError("a process of the solver has ended by itself; its messages are above")
            if answer.choice is not None:
                self._take(answer.choice)
            match answer:
                case Better():
                    pass
                case Done():
                    helper.busy = False
                    if answer.choice is not None:
                        self._keep(answer.choice, answer.prices)
                    if helper is self.prover:
                        self.prover = None
                        found.bound = max(found.bound, min(answer.bound + search.core.constant, found.cost))
                        if answer.proven:
                            found.infeasible = found.choice is None
                            return False
        return True

    def _priced(self, choice: Any) -> float:
        """What a choice costs at the best prices, up to a constant."""
        return self.pricing.cost(choice) + float((self.pricing.ledger.live(choice) * self.pricing.prices).sum())

    def _keep(self, choice: Any, prices: Any) -> None:
        """Keeps a choice that fits among the elites, unless it is there."""
        if self.pricing.ledger.over(choice) > 0 or any(np.array_equal(choice, known) for _, known, _ in self.elites):
            return
        if prices is None:
            prices = self.elites[0][2] if self.elites else self.pricing.prices
        self.elites.append((self.pricing.cost(choice), choice, prices))
        self.elites.sort(key=lambda elite: elite[0])
        del self.elites[ELITES:]

    def _take(self, choice: Any) -> None:
        """A better choice, or the best one with those parts of it that are better."""
        pricing = self.pricing
        for trial in (choice, merged(self.search.core, pricing, self.choice, choice)):
            over, cost = pricing.ledger.over(trial), pricing.cost(trial)
            if (over, cost) < (self.over, self.cost) and np.isfinite(cost):
                self.choice, self.over, self.cost = trial, over, cost
        if self.over <= 0:
            self.search.offer(pricing.ledger, self.choice, self.cost)


def merged(core: Core, pricing: Pricing, base: Any, other: Any) -> Any:
    """``base`` with those connected parts in which ``other`` differs that make it cheaper and fit."""
    ledger = pricing.ledger
    out, live = base.copy(), ledger.live(base)
    differ = set(np.flatnonzero(base != other).tolist())
    while differ:
        part, stack = set(), [differ.pop()]
        while stack:
            k = stack.pop()
            part.add(k)
            for w in ledger.neighbours[k]:
                if w in differ:
                    differ.remove(w)
                    stack.append(w)
        trial = out.copy()
        where = np.array(sorted(part))
        trial[where] = other[where]
        after = ledger.live(trial)
        if pricing.cost(trial) < pricing.cost(out) and not (after > np.maximum(live, ledger.limit)).any():
            out, live = trial, after
    return out
