"""The search for the best choice of a reduced problem: cheap and exact first, then as much as time allows.

    minimise  Σ_v c_v[x_v] + Σ_(u,v) C_uv[x_u, x_v]   subject to   fixed[t] + usage_t(x) ≤ limit  for all times t

(the ILP of `solvers.cbc`, over one state x_v per node). In: a `Core` and choices that fit. Out: `Found`. Kept at any
time: the best choice that fits, of cost U, and a lower bound L on every choice; the search ends where U − L is at most
the gap.

1. Reductions that keep an optimum (`reduce`; of large problems first those that are cheap, `lighten`): dominated
   states, nodes of one or two neighbours                                                                    `_reduced`
2. L(λ) = min_x [cost(x) + Σ_t λ_t usage_t(x)] − Σ_t λ_t (limit − fixed_t)  for prices λ ≥ 0 bounds every choice that
   fits (Geoffrion 1974); the minimum over x is itself bounded by messages along the edges (TRW-S: Kolmogorov 2006).
   Choices found on the way start walks, and are combined               `_priced`, `_settled`, `_walked`, `_restricted`
3. A small rest goes to an exact solver (`solvers.exact`)                                                      `_small`
4. A state that no choice cheaper than U can have, excess_v[i] > U − L, goes (reduced-cost fixing), and what that makes
   possible is reduced again                                                                                   `_fixed`
5. The states of least excess alone, few and then more: any choice with another costs at least L + τ          `_sparse`
6. Large neighbourhoods of the best choice, each solved exactly                                       `_neighbourhoods`
7. With time left, what `Effort.finish` gives (contest instances: `benchmarks.solver_team`)

Nothing here knows where a problem comes from, and no constant was fitted to one instance.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.intra_op.reduce.core import Core
from autopar.intra_op.reduce.ledger import Ledger
from autopar.intra_op.reduce.run import lighten, reduce
from autopar.intra_op.solvers import solver_named
from autopar.intra_op.solvers.exact import Outcome
from autopar.intra_op.solvers.forests import Forests
from autopar.intra_op.solvers.highs import with_highs
from autopar.intra_op.solvers.neighbourhoods import Neighbourhoods
from autopar.intra_op.solvers.prices import Pricing
from autopar.intra_op.solvers.restricted import solve_restricted, wanted_by, within

LIGHT_PAIRS, LIMITED_LIGHT_PAIRS, COARSE_LIGHT_PAIRS = 10_000, 100_000, 500
"""Above so many grouped pairs, without a limit, under one, and where a gap of `COARSE_GAP` will do, messages precede
reductions, and close most problems without a limit (measured: all of a GPT's; layers of 400 to 1600 edges in a third of
the time, of 300 edges whose operators have few strategies in a ninth; reductions of 40 million pairs take 25 s, a pass
0.1 s). Under a limit messages alone rarely do."""
COARSE_GAP = 1e-3
"""From this relative gap on a problem is solved coarsely: layers are, at one price each."""
THOROUGH_PAIRS = 8_000_000
"""Where plans are wanted in seconds, above so many pairs only what is cheap is reduced. Pairs say little of the seconds
that reductions take, and nothing of what they leave (a contest instance of 10 million: 4 s, 56 thousand left)."""
REDUCE_SHARE = 0.5
"""Of the time left at most for reductions (guessed); what they leave then is as exact."""
REDUCED_PAIRS = 600_000
"""Where plans under a limit are wanted in seconds, more pairs than that are not reduced (measured: of 1.5 million few
are left out, in 4 s)."""
SMALL_PAIRS = 60_000
"""A rest of so many grouped pairs goes to an exact solver at once (measured: contest instances of 13 to 38 thousand
pairs take HiGHS 1 to 3 s)."""
HELP_S = 8.0
"""With less time left `Effort.finish` is not called."""
WORTH_FIXING = 0.02
"""Part of all strategies that must go for fixing to pay (guessed)."""
TINY = 1e-30
"""In place of a cost of 0 where it divides."""
TINY_PAIRS = 2_000
"""Up to so many pairs an exact solver comes first (measured: 50 nodes of two states take 0.03 s, prices 1 s)."""
SPARSE_PAIRS = 15_000
"""Strategies that may matter most are tried alone first, as many as leave so many pairs (guessed)."""
COMBINE_S = 2.0
"""Longest that the strategies of a pool, or those that may matter most, are searched (guessed)."""
WALK_S = 1.5
"""Longest for walks by forests (guessed)."""
GOOD_GAP = 0.01
"""With at most this relative gap left, no more is tried where plans are wanted in seconds and a solver has tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How far a search goes.

    ``accept``: the relative gap at which it may end, where that is wider than the one asked for. Prices are sought for
    at most ``price_s`` seconds and ``price_share`` of the time left; an exact solver gets at most ``exact_s`` seconds
    and ``exact_share`` of the time left. ``parts``: neighbourhoods at most, ``idle_parts`` of them in a row without
    gain. ``finish`` gets all the time that is left then; None: the search ends when it gains little.
    """

    accept: float
    price_s: float
    price_share: float
    exact_s: float
    exact_share: float
    parts: float
    idle_parts: float
    finish: Callable[[Search, Pricing], None] | None = None


PLAN = Effort(accept=0.005, price_s=5.0, price_share=0.5, exact_s=6.0, exact_share=0.5, parts=20, idle_parts=8)
"""Plans are wanted in seconds: ends after so much work that gained little, or where what is left to gain is less than
the cost model's error."""


@dataclass(slots=True)
class Found:
    """``choice``: a strategy of every node, None where none was found that fits; ``cost`` is its, ``bound`` a lower
    bound on every choice that fits. ``methods``: what ran, in order. ``timed_out``: True where time ended the search;
    ``infeasible``: True where it is proven that nothing fits. ``phases_s``: wall seconds by phase."""

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
    """The search on one Core until ``deadline`` (of time.perf_counter), to the relative gap ``gap``. Costs are those of
    the core: whatever has been eliminated counts in its ``constant``. ``solver``: auto for the steps above, else the
    exact solver of that name on what reductions leave."""

    def __init__(self, core: Core, deadline: float, gap: float, effort: Effort = PLAN, solver: str = "auto") -> None:
        self.core, self.deadline, self.gap, self.effort, self.solver = core, deadline, gap, effort, solver
        self.found = Found()
        self.accept = 0.0
        """The relative gap with which to end; small problems are solved to the end."""
        self.cap = np.inf
        """Strategies were removed that only choices have which cost at least this: no bound is better."""
        self.clock = time.perf_counter()

    def run(self, seeds: Sequence[Sequence[int]], cost_of_seeds: Sequence[float]) -> Found:
        """The best choice, never worse than the best of ``seeds``, which fit and cost ``cost_of_seeds``. Ctrl-C ends
        the search; KeyboardInterrupt is raised where nothing was found yet."""
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

    def lap(self, phase: str) -> None:
        """Adds the seconds since the last lap to ``phase``."""
        now = time.perf_counter()
        self.found.phases_s[phase] = self.found.phases_s.get(phase, 0.0) + now - self.clock
        self.clock = now

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.perf_counter()

    @property
    def closed(self) -> bool:
        """True where the best choice is proven to be within ``gap`` of the optimum."""
        found = self.found
        return found.choice is not None and found.cost - found.bound <= self.gap * abs(found.cost)

    def _run(self) -> None:
        if self.solver != "auto":
            if self._reduced(self._thoroughly):
                self._small(np.inf)
                self.found.timed_out = not self.closed and self.left < 0.1
            return
        limited, exhausts = len(self.core.fixed) > 0, self.effort.finish is not None
        freely = COARSE_LIGHT_PAIRS if self.gap >= COARSE_GAP else LIGHT_PAIRS
        most = (np.inf if exhausts else LIMITED_LIGHT_PAIRS) if limited else freely
        light = self.core.pairs > most
        if not self._reduced(lighten if light else self._thoroughly):
            return
        self.accept = self.effort.accept if self.core.pairs > SPARSE_PAIRS else 0.0
        if self._small(TINY_PAIRS):
            return
        pricing = self._priced()
        if self._settled(pricing):
            return
        fixed = self._fixed(pricing)
        thorough = exhausts or self.core.pairs <= (REDUCED_PAIRS if limited else THOROUGH_PAIRS)
        small = SMALL_PAIRS if exhausts else SPARSE_PAIRS
        if fixed or (light and thorough):
            if not self._reduced(self._thoroughly if thorough else lighten) or self._small(small):
                return
            pricing = self._priced()
            if self._settled(pricing):
                return
        elif self._small(small):
            return
        if not exhausts:
            if self.core.pairs > small:
                self._sparse(pricing)
            if self.gap_left > GOOD_GAP:
                self._neighbourhoods(pricing)
        elif self.left > HELP_S and self.effort.finish is not None:
            self.effort.finish(self, pricing)
        self.found.timed_out = not self.enough and (exhausts or self.left < 0.1)

    @property
    def gap_left(self) -> float:
        """(cost − bound) / |cost| of the best choice; inf without one."""
        found = self.found
        return np.inf if found.choice is None else (found.cost - found.bound) / max(abs(found.cost), TINY)

    @property
    def enough(self) -> bool:
        """True where the search may end: closed, proven infeasible, or within the gap that is accepted."""
        return self.closed or self.found.infeasible or self.gap_left <= self.accept

    def _settled(self, pricing: Pricing) -> bool:
        """Goes on from what prices have found, and combines it; True where that is enough."""
        if not self.enough and pricing.ledger.horizon:
            self._walked(pricing)
        if not self.enough:
            self._restricted(pricing, wanted_by(pricing, [*pricing.mixture, *pricing.pool]), np.inf, "combination")
        return self.enough

    def _walked(self, pricing: Pricing) -> None:
        """Walks by forests from the choices that prices have found, where they are compiled."""
        if importlib.util.find_spec("numba") is None:
            return
        forests = Forests(pricing, np.random.default_rng(0))
        deadline = min(self.deadline, time.perf_counter() + WALK_S)
        for start in (*pricing.mixture, *reversed(pricing.pool)):
            best, _ = forests.walk(start, pricing.prices, deadline)
            if best is not None:
                self.offer(pricing.ledger, best, pricing.cost(best))
                pricing.pool.append(best)
            if self.enough or time.perf_counter() > deadline:
                break
        self.found.methods.append("forests")
        self.lap("forests")

    def _sparse(self, pricing: Pricing) -> None:
        """Tries the strategies of the least excess alone, few and then more: at most those that a choice may have
        which is better by more than what is good enough."""
        pricing.settle()
        for most in (SPARSE_PAIRS, SMALL_PAIRS):
            cost = self.found.cost
            room = cost - self.accept * abs(cost) - self.core.constant - pricing.last_bound
            if not np.isfinite(room):
                return
            wanted, tau = within(pricing, most, room)
            wanted |= wanted_by(pricing, list(pricing.pool))
            self._restricted(pricing, wanted, pricing.last_bound + tau, "sparse ilp")
            if self.gap_left <= (GOOD_GAP if pricing.ledger.horizon else self.accept) or tau >= room:
                return

    def _restricted(self, pricing: Pricing, wanted: Any, others: float, method: str) -> None:
        """Solves for the strategies ``wanted``; a choice with any other is known to cost at least ``others``."""
        found, constant = self.found, self.core.constant
        room = self.accept * abs(found.cost) if np.isfinite(found.cost) else 0.0
        effort = self.effort
        seconds = min(effort.exact_s, self.left * effort.exact_share) if np.isfinite(others) else COMBINE_S
        cutoff = found.cost - constant
        stop_s = min(self.deadline, time.perf_counter() + seconds)
        outcome = solve_restricted(pricing, wanted, stop_s, cutoff, room, most_pairs=SMALL_PAIRS)
        found.methods.append(method)
        if outcome is not None and outcome.choice is not None:
            self.offer(pricing.ledger, outcome.choice, pricing.cost(outcome.choice))
            pricing.pool.append(outcome.choice)
        if outcome is not None and np.isfinite(others):
            self._bounded(min(outcome.bound, others) + constant)
        self.lap(method)

    def _bounded(self, bound: float) -> None:
        """Learns a lower bound of what is left."""
        found = self.found
        found.bound = max(found.bound, min(bound, self.cap, found.cost))

    def _reduced(self, by: Callable[[Core], None]) -> bool:
        """Reduces; False where that settles all."""
        core, found = self.core, self.found
        by(core)
        self.lap("reduction")
        if core.infeasible:
            found.infeasible = found.choice is None
            self._bounded(np.inf)
            return False
        if not core.alive:
            self._offer({}, core.constant)
            self._bounded(core.constant)
            found.methods = found.methods or ["elimination"]
            return False
        return True

    def _thoroughly(self, core: Core) -> None:
        reduce(core, time.perf_counter() + REDUCE_SHARE * self.left)
        if not core.infeasible:  # where time ended first: messages need consistent edges
            lighten(core)

    def _offer(self, rest: dict[int, int], cost: float) -> None:
        """Keeps a choice of the live nodes that fits and costs so much in all, if it is the best."""
        if cost < self.found.cost:
            self.found.choice, self.found.cost = self.core.restore(rest), cost

    def offer(self, ledger: Ledger, choice: Any, cost: float) -> None:
        """Keeps a choice (int64[nodes of the ledger]) that fits, if it is the best; ``cost``: of the live nodes."""
        self._offer({v: int(s) for v, s in zip(ledger.nodes, choice, strict=True)}, cost + self.core.constant)

    def _priced(self) -> Pricing:
        core, found = self.core, self.found
        seconds = min(self.effort.price_s, self.left * self.effort.price_share)
        pricing = Pricing(core)
        if found.choice is not None:
            inside = core.project(found.choice)
            if inside is not None:
                pricing.offer(np.array([inside[v] for v in pricing.ledger.nodes], np.int64))
        deadline = time.perf_counter() + seconds
        try:
            pricing.ascend(deadline, self.gap)
            if pricing.ledger.horizon and not pricing.closed(self.gap):
                pricing.start(min(self.deadline, max(deadline, time.perf_counter() + 0.2 * seconds)))
        finally:  # Ctrl-C, say
            if pricing.best is not None:
                self.offer(pricing.ledger, pricing.best, pricing.best_cost)
            elif pricing.nearest is not None:
                rest = {v: int(s) for v, s in zip(pricing.ledger.nodes, pricing.nearest, strict=True)}
                found.nearest = core.restore(rest)
            self._bounded(pricing.bound + core.constant)
            found.infeasible = found.choice is None and pricing.hopeless
        found.methods.append("priced trw-s" if pricing.ledger.horizon else "trw-s")
        self.lap("prices")
        return pricing

    def _small(self, most_pairs: float) -> bool:
        """Gives a small rest to an exact solver; True where that settles all."""
        core, found, effort = self.core, self.found, self.effort
        if core.pairs > most_pairs:
            return False
        ledger = Ledger(core, sorted(core.alive))
        seconds = self.left
        if self.solver == "auto" and (effort.finish is not None or self.left >= HELP_S):
            seconds = min(effort.exact_s, self.left * effort.exact_share)
        outcome = self._exact(ledger, time.perf_counter() + seconds)
        if outcome.choice is not None:
            self.offer(ledger, outcome.choice, ledger.cost(outcome.choice))
        self._bounded(outcome.bound + core.constant)
        found.infeasible = outcome.proven and found.choice is None
        self.lap("exact")
        return outcome.proven or self.enough

    def _exact(self, ledger: Ledger, deadline: float) -> Outcome:
        """What an exact solver finds below the best choice's cost."""
        core, cutoff = self.core, self.found.cost - self.core.constant
        solver = solver_named(self.solver)
        self.found.methods.append(solver.name)
        room = self.accept * abs(self.found.cost) if np.isfinite(cutoff) else 0.0
        return solver.solve(core, ledger, deadline, cutoff, room, 0.5 * self.gap)

    def _neighbourhoods(self, pricing: Pricing) -> None:
        """Improves parts in this process, until too many in a row gain nothing."""
        effort, ledger, found = self.effort, pricing.ledger, self.found
        choice = self.start(pricing)
        if choice is None or not len(ledger.nodes):
            return
        pricing.settle()

        def keep(better: Any) -> None:
            if ledger.over(better) <= 0:
                self.offer(ledger, better, pricing.cost(better))

        search = Neighbourhoods(self.core, ledger, with_highs, np.random.default_rng(0))
        deadline = min(self.deadline, time.perf_counter() + effort.exact_s)
        search.improve(choice, pricing.excess(), deadline, keep, effort.parts, effort.idle_parts)
        found.methods.append("neighbourhoods")
        self.lap("neighbourhoods")

    def start(self, pricing: Pricing) -> Any:
        """The best choice (int64[nodes]); where none fits, the one that comes nearest; None where there is none."""
        best = None if self.found.choice is None else self.core.project(self.found.choice)
        return pricing.nearest if best is None else np.array([best[v] for v in pricing.ledger.nodes], np.int64)

    def _fixed(self, pricing: Pricing) -> bool:
        """Removes strategies with which a choice would cost more than the best one; True where there were many."""
        core, found = self.core, self.found
        if found.choice is None:
            return False
        pricing.settle()
        worth = found.cost - self.accept * abs(found.cost)
        room = worth - core.constant - pricing.last_bound
        passing = pricing.passing
        wanted = passing.excess <= room + 1e-9 * abs(found.cost)
        if wanted.mean() > 1 - WORTH_FIXING:
            return False  # pricing goes on with the core as it is
        self.cap = min(self.cap, worth)
        for k, v in enumerate(passing.nodes):
            mine = wanted[passing.at[k] : passing.at[k + 1]]
            if not mine.all():
                core.keep(v, mine)
                if core.infeasible:
                    break
        self.lap("fixing")
        return True
