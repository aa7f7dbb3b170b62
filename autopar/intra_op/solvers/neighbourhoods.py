"""Large-neighbourhood search (Shaw 1998): parts of a choice are freed and solved exactly, the rest stays.

A part is a ball around a node whose strategy is dear by the dual (`Passing.excess`): what a choice costs above the
bound is the sum of these excesses, so that is where something can be gained. Freed nodes keep their couplings to the
rest as costs and usages, and what memory the rest leaves as their limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.intra_op.reduce.core import Core, Usages
from autopar.intra_op.reduce.ledger import Ledger
from autopar.intra_op.reduce.run import reduce
from autopar.intra_op.solvers.exact import Solve
from autopar.intra_op.solvers.highs import with_highs

FIRST_SIZE = 600.0
"""Strategies in the first parts (guessed; grows while parts are quick to solve)."""
QUICK_S, SLOW_S, LONGEST_S = 1.0, 2.0, 5.0
"""Seconds: parts solved in less than the first grow, in more than the second shrink; none gets more than the third
(guessed)."""
ELSEWHERE = 0.2
"""How much of the chance to start somewhere is spread over all nodes."""


Weigh = Callable[[Any], Any]
"""Choice → float64[nodes]: where to look; `prices.Excess`, say."""


@dataclass(slots=True)
class Neighbourhoods:
    """A search on one Core; choices are int64[nodes] in the ledger's order. ``size``: strategies in a part, of a
    combination's parts ``combined_size``; ``rng`` is a numpy Generator. Counted: parts ``tried``, and that
    ``gained``."""

    core: Core
    ledger: Ledger
    solve: Solve
    rng: Any
    size: float = FIRST_SIZE
    combined_size: float = FIRST_SIZE
    tried: int = 0
    gained: int = 0

    def improve(
        self, choice: Any, excess: Weigh, deadline: float, tell: Callable[[Any], None] = lambda choice: None,
        parts: float = np.inf, idle: float = np.inf,
    ) -> Any:  # fmt: skip
        """The choice improved until the deadline, at most ``parts`` times, or until ``idle`` parts in a row gain
        nothing; where it exceeds the limit, that comes first. ``excess`` says where to look; ``tell`` hears of every
        better choice."""
        best, live = choice.copy(), self.ledger.live(choice)
        last, most = self.tried, self.tried + parts
        while time.perf_counter() < deadline and self.tried < most and self.tried - last < idle:
            weight = excess(best)
            weight = weight + ELSEWHERE * max(float(weight.mean()), 1e-30)
            free = self.ball(int(self.rng.choice(len(weight), p=weight / weight.sum())))
            trial, exact = self._trial(best, live, free, deadline)
            self.tried += 1
            if trial is not None:
                best, live, self.gained, last = trial, self.ledger.live(trial), self.gained + 1, self.tried
                tell(best)
            if exact and len(free) == len(weight):
                break
        return best

    def combine(
        self, choice: Any, others: Sequence[Any], deadline: float, parts: float = np.inf, idle: float = np.inf,
        whole_s: float = 0.0,
    ) -> Any:  # fmt: skip
        """The best choice found of those whose every strategy occurs in ``choice`` or in one of ``others`` (fusion
        moves, Lempitsky et al. 2010): a much smaller problem, reduced again, solved as a whole if that takes at most
        ``whole_s``, else improved in parts, which may be larger."""
        everywhere = list(range(len(choice)))
        live = self.ledger.live(choice)
        part, now = self.part(choice, live, everywhere)
        for k, seen in enumerate(np.stack([choice, *others]).T):
            wanted = np.zeros(len(part.costs[k]), bool)
            wanted[np.searchsorted(part.original[k], seen[np.isin(seen, part.original[k])])] = True
            part.keep(k, wanted)
        reduce(part, deadline)
        inside = None if part.infeasible else part.project(choice.tolist())
        if not part.alive or inside is None:
            return choice
        ledger = Ledger(part, sorted(part.alive))
        start = np.array([inside[v] for v in ledger.nodes], np.int64)
        search = Neighbourhoods(part, ledger, self.solve, self.rng, size=self.combined_size)
        best, exact = search.whole(start, min(deadline, time.perf_counter() + whole_s)) if whole_s else (start, False)
        if not exact:
            best = search.improve(best, lambda _: np.ones(len(start)), deadline, parts=parts, idle=idle)
            self.combined_size = search.size
        trial = np.array(part.restore({v: int(s) for v, s in zip(ledger.nodes, best, strict=True)}), np.int64)
        after = self.ledger.live(trial)
        fits = not len(after) or not (after > np.maximum(live, self.ledger.limit * (1 + 1e-12))).any()
        return trial if fits and self.ledger.cost(trial) < now else choice

    def whole(self, choice: Any, deadline: float) -> tuple[Any, bool]:
        """(the best choice found of all nodes at once, whether none is better). By HiGHS: what is left of combinations
        is mostly memory rows (measured: 0.04 to 1 s where toulbar2 takes more than 2)."""
        cost = self.ledger.cost(choice)
        if self.ledger.over(choice) > 0 or not np.isfinite(cost):
            return choice, False
        found = with_highs(self.core, self.ledger, deadline, cost - 1e-9 * abs(cost))
        return (choice if found.choice is None else found.choice), found.proven

    def _trial(self, choice: Any, live: Any, free: list[int], deadline: float) -> tuple[Any, bool]:
        """(the choice with a part chosen anew, None where that gains nothing; whether that is proven)."""
        over = np.maximum(0.0, live - self.ledger.limit) if len(live) else np.zeros(0)
        penalty = self._penalty(over)
        started = time.perf_counter()
        part, now = self.part(choice, live, free, penalty)
        found, exact = self._solved(part, min(deadline, started + LONGEST_S), now - 1e-9 * abs(now))
        took = time.perf_counter() - started
        if exact and took < QUICK_S:
            self.size *= 1.05
        elif not exact or took > SLOW_S:
            self.size = max(50.0, 0.9 * self.size)
        if found is None:
            return None, exact
        trial = choice.copy()
        trial[free] = found
        after = self.ledger.live(trial)
        if len(after) and (after > np.maximum(live, self.ledger.limit * (1 + 1e-12))).any():
            return None, False
        return trial, exact

    def _penalty(self, over: Any) -> Any:
        """float64[times]: what a byte costs at times beyond the limit: more than anything that it may be traded for."""
        if not over.any():
            return None
        worth = sum(float(np.max(self.core.costs[v])) for v in self.core.alive) + 1e-30
        return np.where(over > 0, 100.0 * worth / self.ledger.limit / (over > 0).sum(), 0.0)

    def _solved(self, part: Core, deadline: float, cutoff: float) -> tuple[list[int] | None, bool]:
        reduce(part, deadline)
        if part.infeasible:
            return None, True
        if not part.alive:
            return (part.restore({}) if part.constant < cutoff else None), True
        ledger = Ledger(part, sorted(part.alive))
        found = self.solve(part, ledger, deadline, cutoff - part.constant)
        if found.choice is None:
            return None, found.proven
        return part.restore({v: int(s) for v, s in zip(ledger.nodes, found.choice, strict=True)}), found.proven

    def ball(self, seed: int) -> list[int]:
        """Places of nodes around ``seed``, of at most ``size`` strategies in all, nearest first, ties at random."""
        inside, front = {seed}, [seed]
        total = len(self.core.costs[self.ledger.nodes[seed]])
        while front:
            nearby = sorted({w for k in front for w in self.ledger.neighbours[k]} - inside)
            self.rng.shuffle(nearby)
            front = []
            for k in nearby:
                size = len(self.core.costs[self.ledger.nodes[k]])
                if total + size <= self.size:
                    inside.add(k)
                    front.append(k)
                    total += size
        return sorted(inside)

    def part(self, choice: Any, live: Any, free: list[int], penalty: Any = None) -> tuple[Core, float]:
        """(the problem of choosing the nodes ``free`` anew, renumbered in that order; what they cost now). A time that
        is over the limit may stay as it is."""
        core, ledger = self.core, self.ledger
        place = {k: n for n, k in enumerate(free)}
        edges: list[dict[int, Any]] = [{} for _ in free]
        costs, memory = [], []
        held, now = live.copy(), 0.0
        paid = None if penalty is None else np.concatenate([[0.0], np.cumsum(penalty)])
        for n, k in enumerate(free):
            v = ledger.nodes[k]
            cost = core.costs[v].copy()
            spans, sizes = [core.memory[v].spans], [core.memory[v].bytes]
            for w, e in core.edges[v].items():
                other = ledger.place[w]
                if other in place:
                    edges[n][place[other]] = e
                    if other < k:
                        continue
                    row, col = e.rows[choice[k]], e.cols[choice[other]]
                    now += float(e.matrix[row, col])
                    for bytes_, where in e.usages:
                        _add(held, where, -bytes_[row, col])
                    continue
                col = e.cols[choice[other]]
                cost += e.matrix[:, col][e.rows]
                for bytes_, where in e.usages:
                    spans.append(where)
                    sizes.append(np.repeat(bytes_[:, col][e.rows][None, :], len(where), axis=0))
            mine = Usages(np.concatenate(spans), np.concatenate(sizes))
            for span, bytes_ in zip(mine.spans, mine.bytes, strict=True):
                _add(held, (span,), -bytes_[choice[k]])
            now += float(cost[choice[k]])
            if paid is not None and len(mine.spans):
                price = (paid[mine.spans[:, 1]] - paid[mine.spans[:, 0]]) @ mine.bytes
                cost, now = cost + price, now + float(price[choice[k]])
            costs.append(cost)
            memory.append(mine)
        part = Core(
            costs=costs, edges=edges, memory=memory, original=[np.arange(len(c)) for c in costs],
            sizes=[len(c) for c in costs], fixed=held - np.maximum(0.0, live - ledger.limit), limit=ledger.limit,
            alive=set(range(len(free))),
        )  # fmt: skip
        for n, cost in enumerate(costs):
            if not np.isfinite(cost).all():
                part.keep(n, np.isfinite(cost))
        part.dirty_nodes = set(part.alive)
        part.dirty_edges = {(u, v) for u in part.alive for v in part.edges[u] if u < v}
        return part, now


def _add(profile: Any, spans: Any, size: float) -> None:
    for start, stop in spans:
        profile[start:stop] += size
