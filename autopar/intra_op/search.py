"""The search for the best choice of a reduced problem: cheap and exact first, then as much as time allows.

1. Prices on memory (`solvers.prices`) give a lower bound, and choices that fit.
2. A small rest goes to an exact solver (`solvers.exact`).
3. Strategies whose excess is more than the gap go (reduced-cost fixing), and what that makes possible is reduced again.
4. With more time, two processes go on: one proves, where the rest is small enough, and large neighbourhoods
   (`solvers.neighbourhoods`) improve the best choice.

Nothing here knows where a problem comes from, and no constant was fitted to one instance.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.intra_op.ilp import available_solver, with_pulp
from autopar.intra_op.reduce.core import Core
from autopar.intra_op.reduce.ledger import Ledger
from autopar.intra_op.reduce.run import lighten, reduce
from autopar.intra_op.solvers.exact import Outcome, with_highs
from autopar.intra_op.solvers.helpers import Helper
from autopar.intra_op.solvers.neighbourhoods import Neighbourhoods
from autopar.intra_op.solvers.prices import Pricing
from autopar.intra_op.solvers.worker import Better, Combine, Done, Improve, Prove, Walk

LIGHT_PAIRS = 100_000
"""Above so many grouped pairs, messages come before reductions, and close most problems without a limit (measured: all
of a GPT's; reductions of 40 million pairs take 25 s, a pass 0.1 s)."""
THOROUGH_PAIRS = 8_000_000
"""Above so many pairs only what is cheap is reduced."""
SMALL_PAIRS = 60_000
"""A rest of so many grouped pairs goes to an exact solver at once (measured: contest instances of 13 to 38 thousand
pairs take HiGHS 1 to 3 s)."""
PROVE_PAIRS = 500_000
"""Up to so many pairs one process tries to prove (measured: toulbar2 finds the best known choice of 310 thousand)."""
HELP_S = 8.0
"""With less time left no process is started."""
COMBINE_S, IMPROVE_S = 12.0, 6.0
"""Combinations and neighbourhood searches meet after so many seconds (guessed)."""
WORTH_FIXING = 0.02
"""Part of all strategies that must go for fixing to pay (guessed)."""
MOST_COMBINED = 8
"""Choices whose strategies are combined at most (measured: two or three take a second or two, more find more)."""
ELITES = 16
"""Choices at the ends of walks that are kept (guessed)."""
WALKING_SHARE = 0.4
"""Of the time at most for walks from the choices that prices gave; then combinations begin (guessed)."""
RESERVE_S = 1.5
"""Kept at the end, to close (guessed)."""
SMALL_GAP = 0.003
"""With at most this relative gap left, a search that does not exhaust ends (guessed: less than the cost model's
error)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How far a search goes. Shares are of the time that is left."""

    price_share: float
    price_steps: int
    exact_share: float
    exact_s: float
    parts: float
    idle_parts: float
    processes: bool


PLAN = Effort(price_share=0.5, price_steps=150, exact_share=0.5, exact_s=2.0, parts=80, idle_parts=25, processes=False)
"""Plans are wanted in seconds: ends after so much work that gained little."""
EXHAUST = Effort(
    price_share=0.3,
    price_steps=10**9,
    exact_share=0.2,
    exact_s=np.inf,
    parts=np.inf,
    idle_parts=np.inf,
    processes=True,
)
"""Uses two processes and all the time there is, unless the optimum is proven."""


@dataclass(slots=True)
class Found:
    """``choice`` of all nodes, None where none was found that fits; seconds spent by phase."""

    choice: list[int] | None = None
    cost: float = np.inf
    bound: float = -np.inf
    methods: list[str] = field(default_factory=list)
    timed_out: bool = False
    infeasible: bool = False
    nearest: list[int] | None = None
    """Where nothing fits: the choice that exceeds the limit least."""
    phases_s: dict[str, float] = field(default_factory=dict)


class Search:
    """The search on one Core. Costs are those of the core: whatever has been eliminated counts in its ``constant``."""

    def __init__(self, core: Core, deadline: float, gap: float, effort: Effort = PLAN, solver: str = "auto") -> None:
        self.core, self.deadline, self.gap, self.effort, self.solver = core, deadline, gap, effort, solver
        self.found = Found()
        self.clock = time.perf_counter()

    def run(self, seeds: Sequence[Sequence[int]], cost_of_seeds: Sequence[float]) -> Found:
        """The best choice, never worse than the best of ``seeds``, which fit and cost ``cost_of_seeds``."""
        found = self.found
        for seed, cost in zip(seeds, cost_of_seeds, strict=True):
            if cost < found.cost:
                found.choice, found.cost = [int(s) for s in seed], cost
        try:
            self._run()
        except KeyboardInterrupt:
            if found.choice is None:
                raise
            found.timed_out = True
        return found

    def _lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.found.phases_s[phase] = self.found.phases_s.get(phase, 0.0) + now - self.clock
        self.clock = now

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.perf_counter()

    @property
    def closed(self) -> bool:
        """True where the best choice is proven good enough."""
        found = self.found
        return found.choice is not None and found.cost - found.bound <= self.gap * abs(found.cost)

    def _run(self) -> None:
        effort = self.effort
        if self.solver != "auto":
            if self._reduced(self._thoroughly):
                self._small(np.inf)
                self.found.timed_out = not self.closed and self.left < 0.1
            return
        if self.core.pairs > LIGHT_PAIRS and not len(self.core.fixed):
            if not self._reduced(lighten):
                return
            self._priced(self.left * effort.price_share)
            if self.enough:
                return
        if not self._reduced(self._thoroughly if self.core.pairs <= THOROUGH_PAIRS else lighten):
            return
        pricing = self._priced(self.left * effort.price_share)
        if self.enough or self._small(SMALL_PAIRS):
            return
        if self._fixed(pricing):
            if not self._reduced(self._thoroughly):
                return
            pricing = self._priced(self.left * 0.1)
            if self.enough or self._small(SMALL_PAIRS):
                return
        if not effort.processes:
            self._neighbourhoods(pricing)
        elif self.left > HELP_S:
            self._helped(pricing)
        self.found.timed_out = not self.closed and (effort.processes or self.left < 0.1)

    @property
    def enough(self) -> bool:
        """True where the search may end."""
        found = self.found
        if self.closed or self.effort.processes or found.choice is None:
            return self.closed
        return found.cost - found.bound <= SMALL_GAP * abs(found.cost) and self.core.pairs > SMALL_PAIRS

    def _reduced(self, by: Callable[[Core], None]) -> bool:
        """Reduces; False where that settles all."""
        core, found = self.core, self.found
        by(core)
        self._lap("reduction")
        if core.infeasible:
            found.infeasible = found.choice is None
            found.bound = max(found.bound, found.cost)
            return False
        if not core.alive:
            self._offer({}, core.constant)
            found.bound = max(found.bound, min(core.constant, found.cost))
            found.methods = found.methods or ["elimination"]
            return False
        return True

    def _thoroughly(self, core: Core) -> None:
        reduce(core, self.deadline)
        if not core.infeasible:  # where time ended first: messages need consistent edges
            lighten(core)

    def _offer(self, rest: dict[int, int], cost: float) -> None:
        """Keeps a choice of the live nodes that fits and costs so much in all, if it is the best."""
        if cost < self.found.cost:
            self.found.choice, self.found.cost = self.core.restore(rest), cost

    def _offer_array(self, ledger: Ledger, choice: Any, cost: float) -> None:
        self._offer({v: int(s) for v, s in zip(ledger.nodes, choice, strict=True)}, cost + self.core.constant)

    def _priced(self, seconds: float) -> Pricing:
        core, found = self.core, self.found
        pricing = Pricing(core)
        if found.choice is not None:
            inside = core.project(found.choice)
            if inside is not None:
                pricing.offer(np.array([inside[v] for v in pricing.ledger.nodes], np.int64))
        deadline = time.perf_counter() + seconds
        try:
            pricing.ascend(deadline, self.gap, self.effort.price_steps)
            if pricing.ledger.horizon and not pricing.closed(self.gap):
                pricing.start(min(self.deadline, max(deadline, time.perf_counter() + 0.2 * seconds)))
        finally:  # Ctrl-C, say
            if pricing.best is not None:
                self._offer_array(pricing.ledger, pricing.best, pricing.best_cost)
            elif pricing.nearest is not None:
                rest = {v: int(s) for v, s in zip(pricing.ledger.nodes, pricing.nearest, strict=True)}
                found.nearest = core.restore(rest)
            found.bound = max(found.bound, pricing.bound + core.constant)
        found.methods.append("priced trw-s" if pricing.ledger.horizon else "trw-s")
        self._lap("prices")
        return pricing

    def _small(self, most_pairs: float) -> bool:
        """Gives a small rest to an exact solver; True where that settles all."""
        core, found, effort = self.core, self.found, self.effort
        if core.pairs > most_pairs:
            return False
        ledger = Ledger(core, sorted(core.alive))
        seconds = self.left
        if self.solver == "auto" and (effort.processes or self.left >= HELP_S):
            seconds = min(effort.exact_s, self.left * effort.exact_share)
        outcome = self._exact(ledger, time.perf_counter() + seconds)
        if outcome.choice is not None:
            self._offer_array(ledger, outcome.choice, ledger.cost(outcome.choice))
        if outcome.proven:
            found.bound = max(found.bound, min(outcome.bound + core.constant, found.cost))
        found.infeasible = outcome.proven and found.choice is None
        self._lap("exact")
        return outcome.proven or self.closed

    def _exact(self, ledger: Ledger, deadline: float) -> Outcome:
        """What an exact solver finds below the best choice's cost."""
        core, cutoff = self.core, self.found.cost - self.core.constant
        name = available_solver(self.solver)
        self.found.methods.append(name)
        if name == "highs" and importlib.util.find_spec("highspy") is not None:
            return with_highs(core, ledger, deadline, cutoff)
        return with_pulp(core, ledger, deadline, cutoff, name, 0.5 * self.gap)

    def _neighbourhoods(self, pricing: Pricing) -> None:
        """Improves parts in this process, until too many in a row gain nothing."""
        effort, ledger, found = self.effort, pricing.ledger, self.found
        choice = self._start(pricing)
        if choice is None or not len(ledger.nodes):
            return
        pricing.settle()

        def keep(better: Any) -> None:
            if ledger.over(better) <= 0:
                self._offer_array(ledger, better, pricing.cost(better))

        search = Neighbourhoods(self.core, ledger, with_highs, np.random.default_rng(0))
        if len(pricing.pool) > 1:
            choice = search.combine(choice, list(pricing.pool), self.deadline, effort.parts, effort.idle_parts)
            keep(choice)
        search.improve(choice, pricing.excess(), self.deadline, keep, effort.parts, effort.idle_parts)
        found.methods.append("neighbourhoods")
        self._lap("neighbourhoods")

    def _start(self, pricing: Pricing) -> Any:
        """The best choice (int64[nodes]); where none fits, the one that comes nearest; None where there is none."""
        best = None if self.found.choice is None else self.core.project(self.found.choice)
        return pricing.nearest if best is None else np.array([best[v] for v in pricing.ledger.nodes], np.int64)

    def _fixed(self, pricing: Pricing) -> bool:
        """Removes strategies with which a choice would cost more than the best one; True where there were many."""
        core, found = self.core, self.found
        if found.choice is None:
            return False
        pricing.settle()
        room = found.cost - core.constant - pricing.last_bound
        passing = pricing.passing
        wanted = passing.excess <= room + 1e-9 * abs(found.cost)
        if wanted.mean() > 1 - WORTH_FIXING:
            return False  # pricing goes on with the core as it is
        for k, v in enumerate(passing.nodes):
            mine = wanted[passing.at[k] : passing.at[k + 1]]
            if not mine.all():
                core.keep(v, mine)
                if core.infeasible:
                    found.bound = max(found.bound, found.cost)
                    break
        self._lap("fixing")
        return True

    def _helped(self, pricing: Pricing) -> None:
        """Two processes until time is up or the best choice is proven."""
        core = self.core
        pricing.settle()
        excess = pricing.excess()
        choice = self._start(pricing)
        if choice is None:
            return
        helpers = [Helper(core), Helper(core)]
        try:
            team = _Team(self, pricing, excess, choice, helpers)
            team.run()
        finally:
            for helper in helpers:
                helper.close()
            self._lap("processes")


class _Team:
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
            self.search._offer_array(pricing.ledger, self.choice, self.cost)


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
