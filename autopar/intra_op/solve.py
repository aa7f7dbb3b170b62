"""`solve(Problem, seeds, limits) -> Solution`: the one solver interface.

A problem is reduced (`reduce`) and searched (`search`); seeds are a floor, so that a result is never worse than the
best seed that fits, and its report says what is proven.

Where the caller can count a choice's live bytes in full (`Counted`), the problem's usages are an estimate: a choice is
accepted by that count alone, and what it finds beyond the estimate counts from then on (`Evaluator.correct`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autopar.intra_op.evaluate import Evaluator
from autopar.intra_op.reduce.core import core_of
from autopar.intra_op.search import PLAN, Effort, Found, Search
from autopar.ir.strategy import Problem, Solution, SolverReport, SolveStatus

GAP = 1e-4
"""Relative gap at which a solution counts as optimal."""
CORRECTIONS = 6
"""How often a problem whose usages were corrected is solved again."""

Counted = Callable[[tuple[int, ...]], Any]
"""Choice → float64[times], its live bytes in full."""


def solve(
    problem: Problem,
    seeds: Sequence[Sequence[int]] = (),
    time_limit_s: float = 60.0,
    solver: str = "auto",
    free: Solution | None = None,
    counted: Counted | None = None,
    *,
    gap: float = GAP,
    effort: Effort = PLAN,
) -> Solution:
    """Solves a problem; returns the best choice found, with its proven lower bound.

    The status tells apart ``optimal`` (relative gap ≤ ``gap``), ``feasible`` (methods ended with a gap left),
    ``time_limit`` (time ended first, or Ctrl-C came) and ``infeasible`` (nothing that fits was found). Where nothing
    was, in time or not (`SolverReport.fits`), the choice is the attempt that came nearest, and ``over_bytes`` by how
    much it exceeds the limit.

    Args:
        seeds: choices to start from, a strategy per node.
        time_limit_s: wall seconds.
        solver: ``auto``, or a name of `solvers.SOLVERS`, which gets what is left after reductions.
        free: a solution of the same problem without a limit: its bound holds here too. Where there is a limit and
            ``counted``, its choice is a start too.
        counted: has the last word on what fits.
        gap: relative.
        effort: how far the search goes.

    Raises:
        ValueError: ``solver`` is needed and not installed.
    """
    started = time.perf_counter()
    deadline = started + time_limit_s
    evaluate = Evaluator(problem)
    if problem.limit_bytes is None or counted is None:
        found = _attempt(problem, evaluate, seeds, deadline, solver, gap, effort)
        choice = _chosen(found, seeds, len(problem.nodes))
        over = evaluate.over(choice)
    else:
        starts = [*seeds, *([] if free is None else [free.choice])]
        found, choice, over = _corrected(evaluate, starts, counted, deadline, solver, gap, effort)
    bound = found.bound if free is None else max(found.bound, free.report.bound_s)
    objective = evaluate.objective(choice)
    bound = min(bound, objective)
    status: SolveStatus = "feasible"
    if over > 0 or not np.isfinite(objective):
        status = "time_limit" if found.timed_out else "infeasible"
    elif objective - bound <= gap * abs(objective):
        status = "optimal"
    elif found.timed_out:
        status = "time_limit"
    report = SolverReport(
        solver=" + ".join(dict.fromkeys(found.methods)) or "seeds",
        status=status,
        objective_s=objective,
        bound_s=bound,
        seconds=time.perf_counter() - started,
        over_bytes=over,
    )
    return Solution(choice=choice, report=report, phases_s=tuple(found.phases_s.items()))


def _attempt(
    problem: Problem, evaluate: Evaluator, seeds: Sequence[Sequence[int]], deadline: float, solver: str, gap: float,
    effort: Effort,
) -> Found:  # fmt: skip
    """The search on one problem, from those seeds that fit."""
    fitting = [s for s in seeds if evaluate.over(s) <= 0]
    search = Search(core_of(problem), deadline, gap, effort, solver)
    return search.run(fitting, [evaluate.objective(s) for s in fitting])


def _chosen(found: Found, seeds: Sequence[Sequence[int]], count: int) -> tuple[int, ...]:
    """What was found; where nothing fits, the nearest attempt."""
    best = found.choice or found.nearest or (seeds[0] if seeds else [0] * count)
    return tuple(int(s) for s in best)


def _corrected(
    evaluate: Evaluator, seeds: Sequence[Sequence[int]], counted: Counted, deadline: float, solver: str, gap: float,
    effort: Effort,
) -> tuple[Found, tuple[int, ...], float]:  # fmt: skip
    """(the first attempt with what all took, the best choice that fits by ``counted``, 0), or the choice that comes
    nearest and by how many bytes it exceeds the limit."""
    ranked: list[tuple[float, float, tuple[int, ...]]] = []

    def count(choice: tuple[int, ...]) -> tuple[float, Any]:
        live = counted(choice)
        over = max(0.0, float(live.max(initial=0.0)) - evaluate.limit)
        cost = evaluate.objective(choice)
        ranked.append((over, cost, choice) if np.isfinite(cost) else (np.inf, cost, choice))
        return over, live

    for seed in seeds:
        count(tuple(int(s) for s in seed))
    first: Found | None = None
    for n in range(2 * CORRECTIONS):
        fitting = [choice for over, _, choice in ranked if over <= 0]
        found = _attempt(evaluate.believed(), evaluate, fitting, deadline, solver, gap, effort)
        if first is None:
            first = found
        else:
            first.methods += found.methods
            first.timed_out |= found.timed_out
            for phase, seconds in found.phases_s.items():
                first.phases_s[phase] = first.phases_s.get(phase, 0.0) + seconds
        choice = _chosen(found, seeds, len(evaluate.problem.nodes))
        over, live = count(choice)
        if (over <= 0 and found.choice is not None) or time.perf_counter() > deadline:
            break
        if found.choice is None and n == 0 and found.infeasible:
            break  # the sure usages alone do not fit
        if n == CORRECTIONS - 1 or found.choice is None:
            if evaluate.on.all():
                break
            evaluate.suspect_all()
        else:
            evaluate.correct(choice, live)
    assert first is not None
    over, _, choice = min(ranked)
    return first, choice, over
