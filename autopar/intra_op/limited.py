"""The sharding problem under a binding memory limit: prices on memory, repair, mixing, and an ILP over what is left.

Lagrangian relaxation (Geoffrion 1974): with prices λ_t ≥ 0 on the bytes at each time, the problem without a limit, at
costs  c + Σ_t λ_t usage(t)  of nodes and edges, less  Σ_t λ_t (limit − fixed_t),  bounds the limited one from below.
Prices follow the violation of the choices found (subgradient steps of Polyak's length).

Every choice that comes along, the seeds' first, is made to fit (`_Search.repaired`) and mixed with the best one that
fits: the nodes in which two choices differ fall into connected parts, each of which may be taken from either, its
seconds and bytes known exactly (`_Search.mixed`). Where nothing fits yet, `_Search.squeeze` minimises the peak itself,
with prices that sum to one: its bound  min Σ_t p_t live(t)  on every peak proves that nothing can fit, or a plan that
does is a start. The strategies that occurred along the way make a small ILP with explicit memory rows, which has the
last word.

A problem's usages are a close estimate. Where the caller can count a choice's live bytes in full (`Counted`), a choice
is accepted by that count alone, and what it finds beyond the estimate counts as fixed from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.intra_op.evaluate import Evaluator
from autopar.intra_op.ilp import MemoryRow, solve_ilp
from autopar.intra_op.simplify import Core, core_of
from autopar.intra_op.solvers.trws import Messages, improve, local_costs
from autopar.ir.strategy import Problem

SQUEEZE_STEPS = 12
SQUEEZE_PATIENCE = 4
"""Steps without progress after which squeezing stops."""
PRICE_STEPS = 12
PATIENCE = 4
"""Steps without progress after which pricing stops."""
REPAIR_ROUNDS = 30
REPAIRS = 4
"""How often one choice is repaired, with corrections from counting in full in between."""
NEAR = 0.05
"""Over the limit by less than this part, a choice is counted in full while nothing fits (guessed)."""
ILP_ROUNDS = 6
ILP_ROWS = 12
WHOLE_PAIRS = 20_000
"""Largest problem, in grouped pairs, whose last ILP keeps all strategies (measured: a second)."""
SEEN_PAIRS = 5_000
"""Most pairs of strategies seen that the last ILP takes (guessed)."""
ILP_SHARE_S = 1.0
"""Most seconds that the final ILP gets (guessed: plans are wanted in seconds)."""
GAP = 1e-4
SMALL_GAP = 0.003
"""With at most this relative gap left, dear methods are not tried (guessed: less than the cost model's error)."""


Counted = Callable[[tuple[int, ...]], Any]
"""Choice → float64[times], its live bytes in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limited:
    """The best choice that fits, or, with ``over_bytes`` above 0, the one that came nearest. ``bound_s`` is a lower
    bound on the cost of what fits."""

    choice: tuple[int, ...]
    over_bytes: float
    bound_s: float
    solver: str
    timed_out: bool


def solve_limited(
    problem: Problem,
    evaluate: Evaluator,
    free: Sequence[int],
    seeds: Sequence[Sequence[int]],
    free_bound: float,
    deadline: float,
    solver: str,
    counted: Counted | None,
) -> Limited:
    """``free`` is the best choice without the limit, and ``free_bound`` bounds its cost."""
    search = _Search(problem, evaluate, free_bound, deadline, counted)
    for seed in seeds:
        search.offer(seed, count=True)
    for cautious in (False, True):
        if cautious:
            if counted is None or search.nearly or search.hopeless or evaluate.on.all():
                break
            search.suspect_all()
        for choice in (*seeds, free):
            search.consider(choice)
        if search.best is None:
            search.squeeze()
        if search.best is not None:
            search.price()
    name = "priced trw-s"
    left = min(deadline - time.perf_counter(), ILP_SHARE_S)
    if not search.closed and not search.hopeless and left > 0.2:
        name += search.ilp(left, solver)
    return Limited(
        choice=search.best or search.nearest,
        over_bytes=0.0 if search.best is not None else search.nearest_over,
        bound_s=search.bound,
        solver=name,
        timed_out=time.perf_counter() > deadline,
    )


class _Search:
    def __init__(
        self, problem: Problem, evaluate: Evaluator, bound: float, deadline: float, counted: Counted | None
    ) -> None:
        self.problem, self.evaluate, self.deadline, self.counted = problem, evaluate, deadline, counted
        self.core = core_of(problem)
        self.limit = evaluate.limit
        self.bound = bound
        self.best: tuple[int, ...] | None = None
        self.best_cost = np.inf
        self.nearest: tuple[int, ...] = (0,) * len(problem.nodes)
        self.nearest_over = np.inf
        self.seen: list[set[int]] = [set() for _ in problem.nodes]
        self.pressure = np.zeros(evaluate.horizon)
        """How often, and by how much, a time was over the limit."""
        self.considered: set[tuple[int, ...]] = set()
        self.hopeless = False
        """True where it is proven that nothing fits."""

    @property
    def closed(self) -> bool:
        """True where the best choice is proven good enough."""
        return self.best is not None and self.best_cost - self.bound <= GAP * self.best_cost

    @property
    def nearly(self) -> bool:
        """True where little is left to gain."""
        return self.best is not None and self.best_cost - self.bound <= SMALL_GAP * self.best_cost

    def offer(self, choice: Sequence[int], count: bool = False) -> bool:
        """Keeps a choice if it fits and is the best so far, or exceeds the limit the least; True where it fits, as far
        as it was looked at. It is counted in full where that decides, or where ``count`` says so."""
        picked = tuple(int(s) for s in choice)
        for v, s in enumerate(picked):
            self.seen[v].add(s)
        live, cost = self.evaluate.live_bytes(picked), self.evaluate.objective(picked)
        self.pressure += np.maximum(live / self.limit - 1, 0.0)
        over = max(0.0, float(live.max(initial=0.0)) - self.limit)
        good = cost < self.best_cost if over <= 0 else self.best is None and over < NEAR * self.limit
        if self.counted is not None and (good or count) and np.isfinite(cost):
            true = self.counted(picked)
            over = max(0.0, float(true.max(initial=0.0)) - self.limit)
            if over > 0:
                self.evaluate.correct(picked, true)
        if over < self.nearest_over and np.isfinite(cost):
            self.nearest, self.nearest_over = picked, over
        if over <= 0 and cost < self.best_cost:
            self.best, self.best_cost = picked, cost
        return over <= 0

    def suspect_all(self) -> None:
        """Goes on with an estimate on the safe side: what was learned by counting is replaced by all that may be."""
        self.evaluate.suspect_all()
        self.considered.clear()

    def consider(self, choice: Sequence[int]) -> None:
        """Offers a choice, repaired where it does not fit, polished, and mixed with the best."""
        if tuple(choice) in self.considered:
            return
        self.considered.add(tuple(choice))
        self._settle(choice)
        for other in (choice, self.nearest):
            if self.best is not None and tuple(other) != self.best:
                self._settle(self.mixed(self.best, other))

    def _settle(self, choice: Sequence[int]) -> None:
        """Repairs, polishes and offers a choice, again where counting in full corrects the estimate."""
        for _ in range(REPAIRS):
            before = tuple(choice)
            if self.evaluate.over(before) > 0:
                self.offer(before)
                choice = self.repaired(before)
            if self.evaluate.over(choice) <= 0:
                choice = self.polished(choice)
            if self.offer(choice) or tuple(choice) == before:
                return

    def repaired(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Moves nodes to less memory, at the least cost per byte saved at the worst times, until it fits or no move
        helps. Times that were worst before keep weight, so that peaks do not take turns."""
        evaluate, picked = self.evaluate, [int(s) for s in choice]
        live = evaluate.live_bytes(picked)
        best, least, stalled = tuple(picked), float(live.max(initial=0.0)), 0
        history = np.zeros(evaluate.count)
        for _ in range(REPAIR_ROUNDS):
            t = int(np.argmax(live))
            excess = live[t] - self.limit
            if excess <= 0 or stalled > 6:
                break
            history *= 0.7
            history[history < 0.1] = 0.0
            history += evaluate.at(t)
            saved = self._thin(picked, history, excess)
            live = evaluate.live_bytes(picked)
            if not saved:
                break
            peak = float(live.max())
            stalled = stalled + 1 if peak >= least else 0
            if peak < least:
                best, least = tuple(picked), peak
        return best

    def _thin(self, choice: list[int], weights: Any, excess: float) -> bool:
        """One round of repair, in place: the best moves of nodes that are not neighbours, until the excess is gone."""
        evaluate, moves = self.evaluate, []
        for v, terms in sorted(evaluate.active(weights).items()):
            size = evaluate.local_bytes(weights, terms, choice, v)
            saved = size[choice[v]] - size
            if saved.max() <= 0:
                continue
            cost = local_costs(self.core, self.core.costs, choice, v)
            with np.errstate(divide="ignore", invalid="ignore"):
                worth = (cost - cost[choice[v]]) / np.minimum(saved, excess)
            worth[saved <= 0] = np.inf
            s = int(np.argmin(worth))
            moves.append((float(worth[s]), v, s, float(saved[s])))
        blocked: set[int] = set()
        for _, v, s, saved_bytes in sorted(moves):
            if excess <= 0:
                break
            if v not in blocked:
                choice[v] = s
                excess -= saved_bytes
                blocked |= {v, *self.core.edges[v]}
        return bool(moves)

    def polished(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Improves a choice that fits, node by node, without leaving the limit."""
        picked = list(choice)
        live = self.evaluate.live_bytes(picked)
        allowed = max(self.limit, float(live.max(initial=0.0)))
        waiting = set(range(len(picked)))
        for _ in range(4):
            now, waiting = sorted(waiting), set()
            for v in now:
                cost = local_costs(self.core, self.core.costs, picked, v)
                better = np.flatnonzero(cost < cost[picked[v]] * (1 - 1e-12))
                for s in better[np.argsort(cost[better], kind="stable")][:8]:
                    after = live + self.evaluate.change(picked, v, int(s))
                    if after.max(initial=0.0) <= allowed:
                        live, picked[v] = after, int(s)
                        waiting |= {v, *self.core.edges[v]}
                        break
            if not waiting:
                break
        return tuple(picked)

    def mixed(self, base: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
        """``base``, which fits, with those connected parts in which ``other`` differs that make it cheaper and fit."""
        evaluate = self.evaluate
        part = self._parts(base, other)
        count = max(part.values(), default=-1) + 1
        gain, moved = np.zeros(count), np.zeros((count, evaluate.horizon))
        before, after = evaluate.term_bytes(base), evaluate.term_bytes(other)
        for v, p in part.items():
            costs = self.core.costs[v]
            gain[p] += costs[base[v]] - costs[other[v]]
            for w, (rows, cols, matrix) in self.core.edges[v].items():
                share = 0.5 if w in part else 1.0
                gain[p] += share * (matrix[rows[base[v]], cols[base[w]]] - matrix[rows[other[v]], cols[other[w]]])
        for k in np.flatnonzero(before != after):
            if k < len(evaluate.node_terms):
                p = part[evaluate.node_terms[k][0]]
            else:
                edge = evaluate.edges[evaluate.edge_terms[k - len(evaluate.node_terms)][0]]
                p = part[edge.a] if edge.a in part else part[edge.b]
            moved[p] += (after[k] - before[k]) * evaluate.presence(k)
        live = evaluate.live_bytes(base)
        pressure = (live / self.limit) ** 8
        dear = np.maximum(moved @ pressure / max(float(pressure.sum()), 1e-30), 1e-9 * self.limit)
        allowed = max(self.limit, float(live.max(initial=0.0)))
        taken: set[int] = set()
        for p in sorted(range(count), key=lambda p: -gain[p] / dear[p]):
            if gain[p] >= 0 and float((live + moved[p]).max(initial=0.0)) <= allowed:
                live = live + moved[p]
                taken.add(p)
        return tuple(int(other[v] if part.get(v) in taken else s) for v, s in enumerate(base))

    def _parts(self, base: Sequence[int], other: Sequence[int]) -> dict[int, int]:
        """Node in which two choices differ → number of its connected part."""
        differ = {v for v in range(len(base)) if base[v] != other[v]}
        part: dict[int, int] = {}
        count = 0
        for v in sorted(differ):
            if v in part:
                continue
            stack, part[v] = [v], count
            while stack:
                for w in self.core.edges[stack.pop()]:
                    if w in differ and w not in part:
                        part[w] = count
                        stack.append(w)
            count += 1
        return part

    def _priced(self, base: Core, weights: Any) -> Core:
        """``base`` with every term's bytes at its price."""
        evaluate = self.evaluate
        costs, edges = list(base.costs), [dict(e) for e in base.edges]
        for k in np.flatnonzero(weights[: len(evaluate.node_terms)]):
            v, size = evaluate.node_terms[k]
            costs[v] = costs[v] + weights[k] * size
        extra: dict[int, Any] = {}
        for k in np.flatnonzero(weights[len(evaluate.node_terms) :]):
            e, size = evaluate.edge_terms[k]
            priced = weights[len(evaluate.node_terms) + k] * size
            extra[e] = extra[e] + priced if e in extra else priced
        for e, priced in extra.items():
            a, b = evaluate.edges[e].a, evaluate.edges[e].b
            rows, cols, matrix = edges[a][b]
            total = matrix + priced
            edges[a][b], edges[b][a] = (rows, cols, total), (cols, rows, total.T)
        return Core(costs, edges, base.alive)

    def squeeze(self) -> None:
        """Looks for a choice of small peak until one fits, or its bound proves that none can, or progress stops."""
        empty = _without_costs(self.core, self.problem)
        messages = Messages(empty)
        share = self.pressure / max(float(self.pressure.sum()), 1e-30)
        logits = np.zeros(self.evaluate.horizon)
        stalled, before = 0, np.inf
        for _ in range(SQUEEZE_STEPS):
            core = self._priced(empty, self.evaluate.weights(share / self.limit))
            messages.use(core)
            low = max(_swept(messages) for _ in range(3)) + float(share @ self.problem.fixed_bytes) / self.limit
            self.hopeless = low > 1 + 1e-9 and not self.evaluate.suspicious
            if self.hopeless:
                return
            picked = messages.decode()
            improve(core, picked, sweeps=2)
            choice = self._tuple(picked)
            self.consider(choice)
            stalled = stalled + 1 if self.nearest_over >= before else 0
            before = self.nearest_over
            if self.best is not None or stalled >= SQUEEZE_PATIENCE or time.perf_counter() > self.deadline:
                return
            logits += 20 * (self.evaluate.live_bytes(choice) / self.limit - 1)
            spread = np.exp(logits - logits.max())
            share = 0.5 * share + 0.5 * spread / spread.sum()

    def price(self) -> None:
        """Subgradient steps on the memory prices, from those of the best bound; steps that lead to a worse one get
        shorter, and what they found over the limit bends the direction."""
        evaluate, messages = self.evaluate, Messages(self.core)
        prices = center = np.zeros(evaluate.horizon)
        slope = np.zeros(evaluate.horizon)
        scale, best_low, stalled = 1.0, -np.inf, 0
        for step in range(PRICE_STEPS):
            if self.closed or stalled >= PATIENCE or time.perf_counter() > self.deadline:
                return
            core = self._priced(self.core, evaluate.weights(prices))
            messages.use(core)
            low = max(_swept(messages) for _ in range(4 if step == 0 else 2))
            low -= float(prices @ (self.limit - self.problem.fixed_bytes))
            picked = messages.decode()
            improve(core, picked, sweeps=2)
            choice = self._tuple(picked)
            before = best_low, self.best_cost
            self.consider(choice)
            found = evaluate.live_bytes(choice) / self.limit - 1
            if low > best_low:
                best_low, center, slope = low, prices, found
                scale = min(1.0, 1.5 * scale)
            else:
                slope, scale = 0.5 * (slope + found), 0.5 * scale
            if not evaluate.suspicious:
                self.bound = max(self.bound, best_low)
            gained = best_low - before[0] > GAP * abs(best_low) or self.best_cost < before[1] * (1 - GAP)
            stalled = 0 if gained else stalled + 1
            direction = np.where((slope < 0) & (center <= 0), 0.0, slope)
            norm = float(direction @ direction)
            if norm > 0:
                length = scale * max(self.best_cost - best_low, GAP * abs(best_low)) / norm
                prices = np.maximum(0.0, center + length * direction / self.limit)

    def ilp(self, seconds: float, solver: str) -> str:
        """The ILP over all strategies where they are few, else over those seen so far, with memory rows added as they
        are violated; returns the solver's name, nothing where even those are too many."""
        sizes = [len(n.costs_s) for n in self.problem.nodes]
        whole = sum(e.costs_s.size for e in self.problem.edges) <= WHOLE_PAIRS
        allowed = [
            np.arange(n) if whole else np.array(sorted(s), np.int64) for n, s in zip(sizes, self.seen, strict=True)
        ]
        pairs = sum(len(allowed[e.a]) * len(allowed[e.b]) for e in self.problem.edges)
        if not whole and (self.nearly or pairs > SEEN_PAIRS):
            return ""
        core = core_of(self.problem, allowed)
        rows: dict[int, MemoryRow] = {
            t: self.evaluate.row(t) for t in self.evaluate.peaks(self.pressure, set(), ILP_ROWS)
        }
        stop, name = time.perf_counter() + seconds, ""
        for _ in range(ILP_ROUNDS):
            left = stop - time.perf_counter()
            if left < 0.1:
                break
            memory = [
                MemoryRow(time=r.time, terms={v: u[allowed[v]] for v, u in r.terms.items()}, pairs=r.pairs, room=r.room)
                for r in rows.values()
            ]
            start = None
            if self.best is not None:
                start = {v: int(np.searchsorted(allowed[v], s)) for v, s in enumerate(self.best)}
            result = solve_ilp(core, memory, start, left, solver, GAP / 2)
            name = f" + {result.solver}"
            if whole and np.isfinite(result.bound) and not self.evaluate.suspicious:
                self.bound = max(self.bound, result.bound)
            if result.choice is None:
                break
            choice = tuple(int(allowed[v][result.choice[v]]) for v in range(len(allowed)))
            more = self.evaluate.violated(choice, set(rows), 8)
            self.consider(choice)
            if not more:
                break
            rows |= {row.time: row for row in more}
        return name

    def _tuple(self, choice: dict[int, int]) -> tuple[int, ...]:
        return tuple(int(choice[v]) for v in range(len(self.problem.nodes)))


def _swept(messages: Messages) -> float:
    messages.sweep(True)
    return messages.sweep(False)


def _without_costs(core: Core, problem: Problem) -> Core:
    """Zero seconds for everything but forbidden pairs, which cost twice the limit's price."""
    edges: list[dict[int, tuple[Any, Any, Any]]] = [{} for _ in core.edges]
    for e in problem.edges:
        matrix = np.where(np.isfinite(e.costs_s), 0.0, 2.0)
        rows, cols, _ = core.edges[e.a][e.b]
        edges[e.a][e.b], edges[e.b][e.a] = (rows, cols, matrix), (cols, rows, matrix.T)
    return Core([np.zeros(len(c)) for c in core.costs], edges, core.alive)
