"""The sharding problem under a binding memory limit: prices on memory, repair, and an ILP over what is left.

Lagrangian relaxation (Geoffrion 1974): with prices λ_t ≥ 0 on the bytes that exceed the limit at the times in
`rows`, the problem without a limit, at costs  c_v + Σ_t λ_t usage_v(t),  less  Σ_t λ_t room_t,  bounds the
limited one from below. Prices follow the violation of the choices found (subgradient steps of Polyak's
length); each choice is repaired greedily until it fits and then improved without leaving the limit. The
strategies that occurred along the way make a small ILP with explicit memory rows, which has the last word.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from autopar.intra_op.evaluate import Evaluator
from autopar.intra_op.ilp import MemoryRow, solve_ilp
from autopar.intra_op.simplify import Core, core_of
from autopar.intra_op.solvers.trws import Messages, improve, local_costs
from autopar.ir.strategy import Problem

PRICE_STEPS = 60
MAX_ROWS = 40
ILP_ROUNDS = 8
WHOLE_PAIRS = 60_000
"""Largest problem, in grouped pairs, whose last ILP keeps all strategies (measured: some seconds)."""
ILP_SHARE_S = 3.0
"""Most seconds that the final ILP gets (guessed: plans are wanted in seconds)."""


def solve_limited(
    problem: Problem,
    evaluate: Evaluator,
    free: Sequence[int],
    incumbent: Sequence[int] | None,
    free_bound: float,
    deadline: float,
    solver: str,
) -> tuple[tuple[int, ...], float, str, bool]:
    """(choice, bound, solver's name, whether time ended first). ``free`` is the best choice without the limit. The
    choice exceeds the limit only where nothing that fits was found."""
    core = core_of(problem)
    search = _Search(problem, evaluate, core)
    if incumbent is not None:
        search.offer(incumbent)
    search.try_repair(free)
    bound = max(free_bound, search.price(deadline))
    timed_out = time.perf_counter() > deadline
    name = "priced trw-s"
    if search.best is None or search.best_cost - bound > 1e-4 * search.best_cost:
        left = min(deadline - time.perf_counter(), ILP_SHARE_S)
        if left > 0.5:
            used, ilp_bound = search.ilp(left, solver)
            name, bound = f"{name} + {used}", max(bound, ilp_bound)
    if search.best is None:
        return tuple(search.nearest), bound, name, timed_out
    return search.best, bound, name, timed_out


class _Search:
    def __init__(self, problem: Problem, evaluate: Evaluator, core: Core) -> None:
        self.problem, self.evaluate, self.core = problem, evaluate, core
        self.limit = float(problem.limit_bytes or 0.0)
        self.best: tuple[int, ...] | None = None
        self.best_cost = np.inf
        self.nearest: Sequence[int] = [0] * len(problem.nodes)
        self.nearest_over = np.inf
        self.rows: dict[int, MemoryRow] = {}
        self.seen: list[set[int]] = [set() for _ in problem.nodes]

    def offer(self, choice: Sequence[int]) -> None:
        """Keeps a choice if it fits and is the best so far."""
        over = self.evaluate.over(choice)
        for v, s in enumerate(choice):
            self.seen[v].add(int(s))
        if over < self.nearest_over:
            self.nearest, self.nearest_over = tuple(choice), over
        cost = self.evaluate.objective(choice)
        if over <= 0 and cost < self.best_cost:
            self.best, self.best_cost = tuple(int(s) for s in choice), cost

    def try_repair(self, choice: Sequence[int]) -> None:
        """Repairs and polishes a choice, and offers it."""
        fixed = self.repaired(dict(enumerate(choice)))
        self.offer(fixed)
        if self.evaluate.over(fixed) <= 0:
            self.offer(self.polished(dict(enumerate(fixed))))

    def repaired(self, choice: dict[int, int]) -> tuple[int, ...]:
        """Moves one node at a time to less memory, at the least cost per byte saved at the worst time."""
        live = self.evaluate.live_bytes(self._tuple(choice))
        for _ in range(600):
            t = int(np.argmax(live))
            excess = live[t] - self.limit
            if excess <= 0:
                break
            best = (np.inf, -1, -1)
            for v, usage in self.evaluate.row(t).terms.items():
                saved = usage[choice[v]] - usage
                if saved.max() <= 0:
                    continue
                cost = local_costs(self.core, self.core.costs, choice, v)
                ratio = np.where(
                    saved > 0, (cost - cost[choice[v]]) / np.minimum(np.maximum(saved, 1.0), excess), np.inf
                )
                s = int(np.argmin(ratio))
                best = min(best, (float(ratio[s]), v, s))
            _, v, s = best
            if v < 0:
                break
            live = live + self.evaluate.change(v, choice[v], s)
            choice[v] = s
        return self._tuple(choice)

    def polished(self, choice: dict[int, int]) -> tuple[int, ...]:
        """Improves a choice that fits, node by node, without leaving the limit."""
        live = self.evaluate.live_bytes(self._tuple(choice))
        for _ in range(4):
            changed = False
            for v in range(len(self.problem.nodes)):
                cost = local_costs(self.core, self.core.costs, choice, v)
                for s in np.argsort(cost, kind="stable")[:12]:
                    if cost[s] >= cost[choice[v]] * (1 - 1e-12):
                        break
                    after = live + self.evaluate.change(v, choice[v], int(s))
                    if after.max() <= self.limit:
                        live, choice[v], changed = after, int(s), True
                        break
            if not changed:
                break
        return self._tuple(choice)

    def price(self, deadline: float) -> float:
        """Subgradient steps on the memory prices; returns the best bound."""
        core, base = self.core, [c.copy() for c in self.core.costs]
        prices: dict[int, float] = {}
        bound, scale = -np.inf, 1.0
        messages = Messages(core)
        for step in range(PRICE_STEPS):
            for v in messages.nodes:
                messages.costs[v] = base[v].copy()
            for t, price in prices.items():
                for v, usage in self.rows[t].terms.items():
                    messages.costs[v] += price * usage
            low = -np.inf
            for _ in range(8 if step == 0 else 2):
                messages.sweep(True)
                low = max(low, messages.sweep(False))
            low -= sum(price * self.rows[t].room for t, price in prices.items())
            if low > bound:
                bound = low
            else:
                scale *= 0.9
            picked = messages.decode()
            improve(core, picked, messages.costs, sweeps=2)
            choice = self._tuple(picked)
            self.offer(choice)
            if step % 5 == 0 or self.best is None:
                self.try_repair(choice)
            if self.best is not None and self.best_cost - bound <= 1e-4 * self.best_cost:
                break
            if time.perf_counter() > deadline:
                break
            if len(self.rows) < MAX_ROWS:
                for row in self.evaluate.violated(choice, set(self.rows), 4):
                    self.rows[row.time] = row
            slope = {
                t: (sum(float(u[choice[v]]) for v, u in row.terms.items()) - row.room) / self.limit
                for t, row in self.rows.items()
            }
            slope = {t: g for t, g in slope.items() if g > 0 or prices.get(t, 0.0) > 0}
            norm = sum(g * g for g in slope.values())
            target = self.best_cost if np.isfinite(self.best_cost) else 1.2 * max(bound, 0.0)
            if norm > 0:
                length = scale * max(target - low, 1e-4 * abs(low)) / norm
                for t, g in slope.items():
                    prices[t] = max(0.0, prices.get(t, 0.0) + length * g / self.limit)
        return float(bound)

    def ilp(self, seconds: float, solver: str) -> tuple[str, float]:
        """The ILP with memory rows added as they are violated, over all strategies where they are few, else over those
        seen so far; returns (solver, bound), the bound -inf where strategies were left out."""
        whole = sum(e.costs_s.size for e in self.problem.edges) <= WHOLE_PAIRS
        sizes = [len(n.costs_s) for n in self.problem.nodes]
        allowed = [
            np.arange(n) if whole else np.array(sorted(s), np.int64) for n, s in zip(sizes, self.seen, strict=True)
        ]
        core = core_of(self.problem, allowed)
        bound = -np.inf
        stop = time.perf_counter() + seconds
        name = solver
        for _ in range(ILP_ROUNDS):
            left = stop - time.perf_counter()
            if left < 0.5:
                break
            rows = [
                MemoryRow(time=r.time, terms={v: u[allowed[v]] for v, u in r.terms.items()}, room=r.room)
                for r in self.rows.values()
            ]
            start = None
            if self.best is not None:
                start = {v: int(np.searchsorted(allowed[v], s)) for v, s in enumerate(self.best)}
            result = solve_ilp(core, rows, start, left, solver, 5e-5)
            name = result.solver
            if whole and np.isfinite(result.bound):
                bound = max(bound, result.bound)
            if result.choice is None:
                break
            choice = tuple(int(allowed[v][result.choice[v]]) for v in range(len(allowed)))
            self.offer(choice)
            more = self.evaluate.violated(choice, set(self.rows), 8)
            if not more:
                break
            self.try_repair(choice)
            for row in more:
                self.rows[row.time] = row
        return name, bound

    def _tuple(self, choice: dict[int, int]) -> tuple[int, ...]:
        return tuple(int(choice[v]) for v in range(len(self.problem.nodes)))
