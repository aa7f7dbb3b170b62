"""Prices on memory: a lower bound under the limit, choices on the way, and where the cost of a choice comes from.

Lagrangian relaxation (Geoffrion 1974): with prices λ_t ≥ 0 on the bytes at each time, the problem without a limit at
costs  c + Σ_t λ_t usage(t)  of nodes and edges, less  Σ_t λ_t (limit − fixed_t),  bounds the limited one from below.
The priced problem itself is bounded by message passing (`Passing`), which goes on from one price to the next. Where
prices go is what the choices seen so far call for (`Level`).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.intra_op.reduce.core import Core
from autopar.intra_op.reduce.ledger import Ledger
from autopar.intra_op.solvers.level import Level
from autopar.intra_op.solvers.passing import Passing

POOL = 24
"""Choices that are kept, the latest."""
NEAR = 0.03
"""Over the limit by less than this part, a choice is worth combining with others (guessed)."""
PATIENCE = 8
"""Where there is no memory: rounds of passes without progress after which it ends (guessed)."""
STALLED, PROGRESS = 100, 0.01
"""With prices: steps in a row that gain less than this part of what is left after which it ends (guessed)."""
SHAKE = 10
"""After so many of them in a row, other prices are tried once (guessed)."""
TINY = 1e-30
"""In place of a cost of 0 where it divides."""
FIRST_PASSES = 30
"""Passes at the first prices, and to get around forbidden pairs."""
PASSES = 3
"""Passes at each price (measured: 1 to 5 are alike)."""


class Pricing:
    """The search for prices on a Core; keeps the best bound with its prices, and the best choice that fits."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.passing = Passing(core)
        self.ledger = Ledger(core, self.passing.nodes)
        ledger, passing = self.ledger, self.passing
        own = [ledger.bytes_of(k) for k in range(ledger.node_terms)]
        self._own = np.concatenate(own) if own else np.zeros(0)
        self._own_sizes = np.array([len(x) for x in own], np.int64)
        self._edge_of = dict(zip(ledger.part[ledger.node_terms :].tolist(), ledger.edge_owner.tolist(), strict=True))
        """Usage of an edge → the edge."""
        self._place = _ranges(passing.at[ledger.owner], self._own_sizes)
        """Where each byte of the nodes' terms is paid in the costs."""
        self.prices = np.zeros(ledger.horizon)
        self.priced = self.prices
        """The last ones."""
        self.most = np.inf
        """No prices give a better bound, as far as is known."""
        self.mixture: list[Any] = []
        """Choices of which a mixture fits and costs ``most``."""
        self.bound = self.last_bound = -np.inf
        self.best: Any = None
        self.best_cost = np.inf
        self.nearest: Any = None
        """Where nothing fits yet: the choice that exceeds the limit least."""
        self.nearest_over = np.inf
        self.pool: deque[Any] = deque(maxlen=POOL)
        """The latest choices that fit, or nearly."""

    def charge(self, prices: Any) -> None:
        """Sets the costs of the messages to those at ``prices`` (float64[times], cost per byte)."""
        ledger = self.ledger
        if not ledger.horizon:
            return
        covered = ledger.covered(prices)
        own, rest = covered[: ledger.node_terms], covered[ledger.node_terms :]
        free = self.passing.free_costs
        costs = free + np.bincount(self._place, np.repeat(own, self._own_sizes) * self._own, len(free))
        paid: dict[int, Any] = {}
        worth = np.bincount(ledger.part[ledger.node_terms :], rest) if len(rest) else rest
        for p in np.flatnonzero(worth).tolist():
            e = self._edge_of[p]
            paid[e] = paid.get(e, 0.0) + worth[p] * ledger.bytes_of_part(p)
        self.passing.price(costs, paid)

    def evaluate(self, prices: Any, passes: int) -> float:
        """The bound at ``prices`` (float64[times]) after so many passes; the messages are then theirs."""
        self.charge(prices)
        low = self.passing.both(passes) - float(prices @ (self.ledger.limit - self.ledger.fixed))
        self.last_bound, self.priced = low, prices
        if low > self.bound:
            self.bound, self.prices = low, prices
        return low

    def offer(self, choice: Any) -> Any:
        """Keeps a choice (int64[nodes]) if it is the best that fits so far; returns its live bytes."""
        live = self.ledger.live(choice)
        over = float(live.max(initial=0.0)) - self.ledger.limit if len(live) else 0.0
        cost = self.cost(choice)
        if not np.isfinite(cost):
            return live
        if over <= NEAR * self.ledger.limit:
            self.pool.append(choice)
        if over <= 0 and cost < self.best_cost:
            self.best, self.best_cost = choice, cost
        if over < self.nearest_over:
            self.nearest, self.nearest_over = choice, max(over, 0.0)
        return live

    def cost(self, choice: Any) -> float:
        """What a choice costs without prices; inf where it is forbidden."""
        return self.passing.cost(choice, free=True)

    @property
    def hopeless(self) -> bool:
        """True where it is proven that nothing fits: the bound is above what any choice costs."""
        return self.bound > self.passing.dearest() * (1 + 1e-6)

    def closed(self, gap: float) -> bool:
        """True where the best choice is proven to be within the relative gap ``gap`` of the optimum."""
        return self.best is not None and self.best_cost - self.bound <= gap * abs(self.best_cost)

    def ascend(self, deadline: float, gap: float, steps: int = 10_000) -> None:
        """Raises the bound until the relative ``gap`` closes, nothing is left to gain, ``deadline`` (of
        time.perf_counter) has passed or ``steps`` are done."""
        if self.ledger.horizon:
            self._ascend_prices(deadline, gap, steps)
            return
        stalled = 0
        for _ in range(steps):
            before = self.bound
            low = self.evaluate(self.prices, PASSES)
            self.offer(self.passing.decode(2))
            stalled = 0 if low - before > 1e-5 * abs(low) else stalled + 1
            if self.closed(gap) or stalled > PATIENCE or time.perf_counter() > deadline:
                return

    def _ascend_prices(self, deadline: float, gap: float, steps: int) -> None:
        """Each step: prices that the choices seen call for, passes at these prices, and two choices more, one of the
        messages and one that improves the best choice seen."""
        self.evaluate(self.prices, FIRST_PASSES)
        first = self.passing.decode(2)
        for _ in range(PATIENCE):  # messages may need more passes to get around forbidden pairs
            if np.isfinite(self.cost(first)) or time.perf_counter() > deadline:
                break
            self.evaluate(self.prices, FIRST_PASSES)
            first = self.passing.decode(2)
        if not np.isfinite(cost := self.cost(first)):
            return
        level = Level(self.ledger.horizon, self.ledger.limit, max(abs(self.bound), abs(cost), TINY))
        seen: list[Any] = []

        def learn(choice: Any) -> None:
            live = self.offer(choice)
            if np.isfinite(cost := self.cost(choice)) and not any(np.array_equal(choice, known) for known in seen):
                seen.append(choice)
                level.add(cost, live)

        learn(first)
        stalled, rng = 0, np.random.default_rng(0)
        for _ in range(steps):
            if self.closed(gap) or self.hopeless or time.perf_counter() > deadline:
                return
            most = self.most = level.best(self.prices)
            self.mixture = [seen[k] for k in level.mixture()]
            if most - self.bound <= gap * abs(most) or stalled > STALLED:
                return
            before = self.bound
            if stalled % SHAKE == SHAKE - 1:  # other choices than those of prices like the last ones
                low = self.evaluate(self.prices * rng.lognormal(0.0, 1.0, len(self.prices)), PASSES)
            else:
                low = self.evaluate(level.towards(most, before, self.prices), PASSES)
            stalled = 0 if low - before > PROGRESS * (most - before) else stalled + 1
            learn(self.passing.decode(2))
            learn(self.passing.improve(seen[level.cheapest(self.priced)]))
            learn(self.passing.improve(seen[int(rng.integers(len(seen)))]))

    def start(self, deadline: float) -> None:
        """Looks for choices that fit: at prices above the best ones, and on times that have none."""
        base = max(float(self.prices.sum()), 1e-12 * abs(self.bound) / self.ledger.limit) / max(1, self.ledger.horizon)
        for extra in (0.01, 0.1, 1.0, 10.0):
            for factor in (1.0, 1.05, 1.2, 2.0):
                self.charge(self.prices * factor + extra * base)
                self.passing.both(10)
                self.offer(self.passing.decode())
                if time.perf_counter() > deadline:
                    return
            if self.best is not None and extra >= 1.0:
                return
        scale = base
        for _ in range(30):
            if self.best is not None or time.perf_counter() > deadline:
                return
            scale *= 4.0
            self.charge(self.prices + scale)
            self.passing.both(5)
            self.offer(self.passing.decode())

    def settle(self, passes: int = 30) -> None:
        """Takes the messages back to the best prices, so that `Passing.excess` is theirs."""
        self.evaluate(self.prices, passes)

    def excess(self) -> Excess:
        """Where the cost of a choice above the bound comes from, at the prices of the last pass."""
        passing = self.passing
        low = np.array([passing.pair_excess(e).min() for e in range(len(passing.ends))])
        return Excess(
            nodes=passing.excess.copy(), share=passing.share, at=passing.at[:-1], ends=passing.ends,
            groups=passing.groups, groups_at=passing.groups_at, matrix=passing.matrix, matrix_at=passing.matrix_at,
            shapes=passing.shapes, messages=passing.messages.copy(), messages_at=passing.messages_at, low=low,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """By how much a choice exceeds the bound at least, because of a strategy or of a pair of them; arrays as in
    `Passing`."""

    nodes: Any
    share: Any
    at: Any
    ends: Any
    groups: Any
    groups_at: Any
    matrix: Any
    matrix_at: Any
    shapes: Any
    messages: Any
    messages_at: Any
    low: Any

    def __call__(self, choice: Any) -> Any:
        """float64[nodes]: each node's own excess under a choice and half of its edges'."""
        own = self.nodes[self.at + choice]
        if not len(self.ends):
            return own.copy()
        u, v = self.ends.T
        rows = self.groups[self.groups_at[:-1:2] + choice[u]]
        cols = self.groups[self.groups_at[1::2] + choice[v]]
        pair = self.matrix[self.matrix_at + rows * self.shapes[:, 1] + cols]
        pair = pair - self.messages[self.messages_at[:-1:2] + rows] - self.messages[self.messages_at[1::2] + cols]
        half = 0.5 * np.maximum(pair + self.share[u] * own[u] + self.share[v] * own[v] - self.low, 0.0)
        return own + np.bincount(u, half, len(own)) + np.bincount(v, half, len(own))


def _ranges(starts: Any, sizes: Any) -> Any:
    """int64[sum of sizes]: start, start + 1, … for each."""
    if not len(sizes):
        return np.zeros(0, np.int64)
    before = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    return np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()))
