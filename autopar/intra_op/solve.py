"""`solve(Problem, seeds, limits) -> Solution`: the one solver interface.

Order of work: seeds and a local search give an incumbent; nodes of degree ≤ 2 that hold no memory are eliminated
exactly; what remains goes to the ILP, whose memory rows are added for the times that its solution
violates. The incumbent is returned unless the ILP's solution is cheaper and fits, so a result is never
worse than the best seed that fits; its status says whether it is proven.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.intra_op.ilp import MemoryRow, available_solver, solve_ilp
from autopar.intra_op.simplify import Core, core_of, eliminate
from autopar.ir.strategy import Problem, Solution, SolverReport

MAX_MEMORY_ROUNDS = 12
ROWS_PER_ROUND = 6
GAP = 1e-4


class Evaluator:
    """Cost and live bytes of a choice."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.horizon = len(problem.fixed_bytes)

    def objective(self, choice: Sequence[int]) -> float:
        """Seconds of a choice; inf where it uses a forbidden pair."""
        total = sum(float(n.costs_s[choice[v]]) for v, n in enumerate(self.problem.nodes))
        for e in self.problem.edges:
            total += float(e.costs_s[e.rows[choice[e.a]], e.cols[choice[e.b]]])
        return total

    def live_bytes(self, choice: Sequence[int]) -> Any:
        """float64[times]: live bytes under a choice."""
        delta = np.zeros(self.horizon + 1)
        for v, node in enumerate(self.problem.nodes):
            for usage, intervals in node.usages:
                size = float(usage[choice[v]])
                if size:
                    for start, stop in intervals:
                        delta[start] += size
                        delta[min(stop, self.horizon)] -= size
        return np.asarray(self.problem.fixed_bytes) + np.cumsum(delta)[: self.horizon]

    def over(self, choice: Sequence[int]) -> float:
        """Bytes by which a choice exceeds the limit; 0 where it fits."""
        if self.problem.limit_bytes is None or not self.horizon:
            return 0.0
        return max(0.0, float(self.live_bytes(choice).max()) - self.problem.limit_bytes)

    def row(self, t: int) -> MemoryRow:
        """The memory constraint at time t."""
        terms: dict[int, Any] = {}
        for v, node in enumerate(self.problem.nodes):
            for usage, intervals in node.usages:
                live = sum(1 for start, stop in intervals if start <= t < stop)
                if live:
                    terms[v] = terms.get(v, 0.0) + live * usage
        assert self.problem.limit_bytes is not None
        return MemoryRow(time=t, terms=terms, room=self.problem.limit_bytes - float(self.problem.fixed_bytes[t]))


def local_search(problem: Problem, choice: Sequence[int], sweeps: int = 8) -> tuple[int, ...]:
    """Improves a choice node by node until nothing changes (iterated conditional modes, Besag 1986), ignoring memory."""
    current = list(choice)
    edges: list[list[tuple[int, Any, Any, Any]]] = [[] for _ in problem.nodes]
    for e in problem.edges:
        edges[e.a].append((e.b, e.rows, e.cols, e.costs_s))
        edges[e.b].append((e.a, e.cols, e.rows, e.costs_s.T))
    for _ in range(sweeps):
        changed = False
        for v, node in enumerate(problem.nodes):
            total = node.costs_s.copy()
            for u, rows, cols, matrix in edges[v]:
                total += matrix[:, cols[current[u]]][rows]
            best = int(np.argmin(total))
            if total[best] < total[current[v]] * (1 - 1e-12):
                current[v], changed = best, True
        if not changed:
            break
    return tuple(current)


def solve(
    problem: Problem, seeds: Sequence[Sequence[int]] = (), time_limit_s: float = 60.0, solver: str = "auto"
) -> Solution:
    """Solves a problem; returns the best choice found, with its proven lower bound.

    The status tells apart ``optimal`` (gap ≤ 1e-4), ``time_limit`` (a choice, not proven) and ``infeasible``
    (no choice fits: ``over_bytes`` of the best attempt, ``choice`` that attempt).
    """
    started = time.perf_counter()
    evaluate = Evaluator(problem)
    incumbent = _best_seed(problem, evaluate, seeds)
    core = core_of(problem)
    limited = problem.limit_bytes is not None
    eliminate(core, frozenset(v for v, n in enumerate(problem.nodes) if limited and n.usages))
    rows: list[MemoryRow] = []
    status, bound, name, attempt = "time_limit", 0.0, available_solver(solver), None
    for _ in range(MAX_MEMORY_ROUNDS):
        left = time_limit_s - (time.perf_counter() - started)
        if left <= 0:
            status = "time_limit"
            break
        result = solve_ilp(core, rows, _restricted(core, incumbent), left, solver, GAP) if core.alive else None
        if result is not None and result.choice is None:
            status = result.status
            bound = max(bound, result.bound + core.constant_s if np.isfinite(result.bound) else 0.0)
            break
        picked = dict(result.choice) if result is not None and result.choice is not None else {}
        core.restore(picked)
        choice = tuple(picked[v] for v in range(len(problem.nodes)))
        status = result.status if result is not None else "optimal"
        bound = max(bound, result.bound + core.constant_s if result is not None else evaluate.objective(choice))
        attempt = choice
        if evaluate.over(choice) <= 0:
            if incumbent is None or evaluate.objective(choice) < evaluate.objective(incumbent):
                incumbent = choice
            break
        rows += _violated(evaluate, choice, {r.time for r in rows})
    else:
        status = "time_limit"
    return _finish(problem, evaluate, incumbent, attempt, status, bound, name, started)


def _finish(
    problem: Problem, evaluate: Evaluator, incumbent: Any, attempt: Any, status: str, bound: float, name: str,
    started: float,
) -> Solution:  # fmt: skip
    over = 0.0
    if incumbent is None:
        least = least_memory(problem, evaluate, attempt)
        over = evaluate.over(least)
        if over <= 0:
            incumbent = least
            status = "time_limit" if status == "infeasible" else status
        else:
            attempt = least
    choice = incumbent if incumbent is not None else attempt
    objective = evaluate.objective(choice) if choice is not None else np.inf
    if incumbent is None and status != "infeasible":
        status = "infeasible" if over > 0 and status == "optimal" else status
    report = SolverReport(
        solver=name,
        status=status,  # type: ignore[arg-type]
        objective_s=objective,
        bound_s=min(bound, objective),
        seconds=time.perf_counter() - started,
        over_bytes=over,
    )
    return Solution(choice=tuple(choice or ()), report=report)


def least_memory(problem: Problem, evaluate: Evaluator, start: Any) -> tuple[int, ...]:
    """A choice that lowers the peak greedily: at the worst time, the node that saves most takes a smaller strategy."""
    choice = list(start) if start is not None else [int(np.argmin(n.costs_s)) for n in problem.nodes]
    for _ in range(400):
        live = evaluate.live_bytes(choice)
        if problem.limit_bytes is None or live.max() <= problem.limit_bytes:
            break
        row = evaluate.row(int(np.argmax(live)))
        saving = {v: usage[choice[v]] - usage.min() for v, usage in row.terms.items()}
        v = max(saving, key=lambda n: (saving[n], -n), default=None)
        if v is None or saving[v] <= 0:
            break
        choice[v] = int(np.argmin(row.terms[v]))
    return tuple(choice)


def _best_seed(problem: Problem, evaluate: Evaluator, seeds: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    fitting: list[tuple[float, tuple[int, ...]]] = []
    for seed in seeds:
        for choice in (tuple(seed), local_search(problem, seed)):
            if evaluate.over(choice) <= 0 and np.isfinite(evaluate.objective(choice)):
                fitting.append((evaluate.objective(choice), choice))
    return min(fitting)[1] if fitting else None


def _restricted(core: Core, incumbent: Sequence[int] | None) -> dict[int, int] | None:
    return None if incumbent is None else {v: incumbent[v] for v in core.alive}


def _violated(evaluate: Evaluator, choice: Sequence[int], have: set[int]) -> list[MemoryRow]:
    """Rows for the most violated times, spread out so that they are not all the same peak."""
    live = evaluate.live_bytes(choice)
    assert evaluate.problem.limit_bytes is not None
    order = np.argsort(-live, kind="stable")
    picked: list[int] = []
    apart = max(1, evaluate.horizon // 50)
    for t in order:
        if live[t] <= evaluate.problem.limit_bytes or len(picked) >= ROWS_PER_ROUND:
            break
        if int(t) not in have and all(abs(int(t) - p) >= apart for p in picked):
            picked.append(int(t))
    return [evaluate.row(t) for t in picked]
