"""`solve(Problem, seeds, limits) -> Solution`: the one solver interface.

Without a memory limit, or when the limit does not bind: nodes of degree ≤ 2 are eliminated exactly, message
passing (`solvers.trws`) gives a choice and a lower bound, which mostly meet; where they do not, the ILP
(`ilp`) closes the rest. With a binding limit the memory constraints get prices (`limited`), and the ILP
works on the strategies that were ever good at some price. Seeds are improved node by node and kept as a
floor: a result is never worse than the best seed that fits, and its report says what is proven.

``exhaustive`` takes another way (`search`): exact reductions with memory, then two processes until time is up or the
optimum is proven. It is for problems on their own, with tight memory, not for planning in seconds (decision 012).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from autopar.intra_op.evaluate import Evaluator
from autopar.intra_op.ilp import available_solver, solve_ilp
from autopar.intra_op.limited import Counted, solve_limited
from autopar.intra_op.reduce.core import core_of as reducible
from autopar.intra_op.search import Search
from autopar.intra_op.simplify import Core, core_of, eliminate
from autopar.intra_op.solvers.trws import improve, solve_trws
from autopar.ir.strategy import Problem, Solution, SolverReport, SolveStatus

GAP = 1e-4
"""Relative gap at which a solution counts as optimal."""

SMALL_GAP = 0.01
SMALL_GAP_S = 2.0
"""With at most this relative gap left, the ILP gets at most so many seconds to close it (guessed: plans are wanted in
seconds, and what is left to gain is less than the cost model's error)."""

ILP_PAIRS = 400_000
"""Largest problem, in grouped pairs, that goes to the ILP whole (measured: PuLP builds about 200,000 a second)."""


def solve(
    problem: Problem,
    seeds: Sequence[Sequence[int]] = (),
    time_limit_s: float = 60.0,
    solver: str = "auto",
    free: Solution | None = None,
    counted: Counted | None = None,
    *,
    gap: float = GAP,
    exhaustive: bool = False,
) -> Solution:
    """Solves a problem; returns the best choice found, with its proven lower bound.

    ``free`` is the solution of the same problem without a limit, known to exceed it. ``counted`` has the last word on
    what fits. ``exhaustive`` knows neither these nor ``solver``; only it takes another ``gap``.

    The status tells apart ``optimal`` (gap ≤ 1e-4), ``feasible`` (methods ended with a gap left), ``time_limit`` (time
    ended first) and ``infeasible`` (nothing fits: the choice is the attempt that came nearest, and ``over_bytes`` by
    how much it exceeds the limit). ``solver``: ``auto``, or ``highs`` / ``cbc`` to use that ILP solver from the start.
    """
    started = time.perf_counter()
    deadline = started + time_limit_s
    evaluate = Evaluator(problem)
    if exhaustive:
        if solver != "auto" or free is not None or counted is not None:
            raise ValueError("exhaustive takes no solver, no free solution and no count in full")
        return _exhausted(problem, evaluate, seeds, started, deadline, gap)
    if free is None:
        choice, bound, name, timed_out = _unlimited(problem, evaluate, seeds, deadline, solver)
    else:
        choice, bound, name, timed_out = free.choice, free.report.bound_s, free.report.solver, False
    over = evaluate.over(choice)
    if over > 0 or free is not None:
        limited = solve_limited(problem, evaluate, choice, seeds, bound, deadline, solver, counted)
        choice, over, bound = limited.choice, limited.over_bytes, limited.bound_s
        name, timed_out = limited.solver, limited.timed_out
    objective = evaluate.objective(choice)
    status: SolveStatus = "feasible"
    if over > 0 or not np.isfinite(objective):
        status = "infeasible"
    elif objective - bound <= GAP * objective:
        status = "optimal"
    elif timed_out:
        status = "time_limit"
    report = SolverReport(
        solver=name,
        status=status,
        objective_s=objective,
        bound_s=min(bound, objective),
        seconds=time.perf_counter() - started,
        over_bytes=over,
    )
    return Solution(choice=choice, report=report)


def _exhausted(
    problem: Problem, evaluate: Evaluator, seeds: Sequence[Sequence[int]], started: float, deadline: float, gap: float
) -> Solution:
    fitting = [s for s in seeds if evaluate.over(s) <= 0]
    search = Search(reducible(problem), deadline, gap)
    found = search.run(fitting, [evaluate.objective(s) for s in fitting])
    best = found.choice or found.nearest or (seeds[0] if seeds else [0] * len(problem.nodes))
    choice = tuple(int(s) for s in best)
    objective, over = evaluate.objective(choice), evaluate.over(choice)
    status: SolveStatus = "feasible"
    if over > 0 or not np.isfinite(objective):
        status = "infeasible"
    elif objective - found.bound <= gap * abs(objective):
        status = "optimal"
    elif found.timed_out:
        status = "time_limit"
    report = SolverReport(
        solver=" + ".join(dict.fromkeys(found.methods)) or "seeds",
        status=status,
        objective_s=objective,
        bound_s=min(found.bound, objective),
        seconds=time.perf_counter() - started,
        over_bytes=over,
    )
    return Solution(choice=choice, report=report, phases_s=tuple(found.phases_s.items()))


def _improved(problem: Problem, seeds: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    core = core_of(problem)
    out = [tuple(s) for s in seeds]
    for seed in seeds:
        better = dict(enumerate(seed))
        improve(core, better)
        out.append(tuple(better[v] for v in range(len(seed))))
    return out


def _unlimited(
    problem: Problem, evaluate: Evaluator, seeds: Sequence[Sequence[int]], deadline: float, solver: str
) -> tuple[tuple[int, ...], float, str, bool]:
    """(choice, bound, solver's name, whether time ended first), memory ignored."""
    core = core_of(problem)
    eliminate(core, frozenset())
    best: tuple[int, ...] | None = None
    bound, name = -np.inf, "elimination"
    if core.alive and solver == "auto":
        picked, low, _ = solve_trws(core, deadline, gap=GAP)
        best, bound, name = _whole(core, picked, problem), low + core.constant_s, "trw-s"
    elif not core.alive:
        best = _whole(core, {}, problem)
        bound = evaluate.objective(best)
    for seed in _improved(problem, seeds):
        if best is None or evaluate.objective(seed) < evaluate.objective(best):
            best = seed
    left = deadline - time.perf_counter()
    pairs = sum(m.size for v in core.alive for _, _, m in core.edges[v].values()) // 2
    gap_left = best is None or evaluate.objective(best) - bound > GAP * evaluate.objective(best)
    timed_out = left <= 0
    if (
        best is not None
        and solver == "auto"
        and evaluate.objective(best) - bound <= SMALL_GAP * evaluate.objective(best)
    ):
        left = min(left, SMALL_GAP_S)
    if core.alive and gap_left and left > 0.5 and (pairs <= ILP_PAIRS or best is None):
        result = solve_ilp(core, [], None if best is None else {v: best[v] for v in core.alive}, left, solver, GAP / 2)
        name = result.solver if name == "elimination" else f"{name} + {result.solver}"
        bound = max(bound, result.bound + core.constant_s)
        timed_out = result.status == "time_limit"
        if result.choice is not None:
            found = _whole(core, result.choice, problem)
            if best is None or evaluate.objective(found) < evaluate.objective(best):
                best = found
    if best is None:  # no seeds, and the ILP found nothing in time: messages always give a choice
        picked, low, _ = solve_trws(core, time.perf_counter() + 1.0, gap=GAP)
        best, bound = _whole(core, picked, problem), max(bound, low + core.constant_s)
    return best, bound, name, timed_out


def _whole(core: Core, picked: dict[int, int], problem: Problem) -> tuple[int, ...]:
    choice = dict(picked)
    core.restore(choice)
    return tuple(choice[v] for v in range(len(problem.nodes)))


__all__ = ["GAP", "available_solver", "solve"]
