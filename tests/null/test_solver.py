"""The solver against brute force: objective, lower bound, memory of nodes and edges, forbidden pairs, status, what is
counted in full; for every ILP solver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autopar.intra_op import search
from autopar.intra_op.evaluate import Evaluator
from autopar.intra_op.solve import solve
from autopar.intra_op.solvers import SOLVERS
from autopar.ir.strategy import Problem
from tests.null.problems import agrees, brute_force, choices, cost, dense_problem, live_bytes, random_problem

ALL = 2000
"""Problems of the whole comparison; a part of them runs in `make test`."""


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 8))])
def test_equals_brute_force(part: int) -> None:
    for seed in range(part * ALL // 8, (part + 1) * ALL // 8):
        agrees(seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("light", "accept"),
    [pytest.param(*way, marks=pytest.mark.full) for way in ((100_000, 0.005), (0, 0.005), (0, 0.2))],
)
def test_every_way_of_planning_gives_bounds(light: int, accept: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What large problems go through, on small ones."""
    for name, value in (("TINY", 0), ("SPARSE", 0), ("REDUCED", 0), ("LIGHT", light)):
        monkeypatch.setattr(search, f"{name}_PAIRS", value)
    monkeypatch.setattr(search, "WALK_S", 0.05)
    effort = replace(search.PLAN, accept=accept)
    ways: set[str] = set()
    for seed in range(40):
        problem = random_problem(seed) if seed % 2 else dense_problem(seed, size=7, states=4)
        best, solution = brute_force(problem), solve(problem, (), 20.0, effort=effort)
        report = solution.report
        ways |= set(report.solver.split(" + "))
        assert report.bound_s <= best * (1 + 1e-9) + 1e-12 or not np.isfinite(best), seed
        if report.status != "infeasible":
            assert report.objective_s == pytest.approx(cost(problem, solution.choice), rel=1e-12, abs=1e-12), seed
            assert best * (1 - 1e-9) <= report.objective_s <= best / (1 - 2 * accept) + 1e-12, seed
        else:
            assert not np.isfinite(best), seed
    if accept < 0.1:
        assert ways >= {"priced trw-s", "combination", "sparse ilp"}


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_ilp_solver_equals_brute_force(solver: str) -> None:
    for seed in range(40):
        agrees(seed, solver)


def test_never_worse_than_a_seed_that_fits() -> None:
    for seed in range(40):
        problem = random_problem(seed)
        evaluate = Evaluator(problem)
        fitting = [c for c in choices(problem) if np.isfinite(cost(problem, c))]
        if fitting:
            start = min(fitting, key=evaluate.objective)
            found = solve(problem, [start], 0.0)
            assert cost(problem, found.choice) <= evaluate.objective(start) * (1 + 1e-12)


def test_infeasible_says_by_how_much() -> None:
    problem = dense_problem(3)
    least = Evaluator(problem).least_peak()
    report = solve(replace(problem, limit_bytes=least - 1.0), [], 5.0).report
    assert report.status == "infeasible"
    assert report.over_bytes >= 1.0 - 1e-9


def test_live_bytes() -> None:
    for seed in range(30):
        problem, rng = random_problem(seed, suspected=True), np.random.default_rng(seed)
        evaluate = Evaluator(problem)
        choice = [int(rng.integers(len(n.costs_s))) for n in problem.nodes]
        np.testing.assert_allclose(evaluate.live_bytes(choice), live_bytes(problem, choice), atol=1e-9)
        evaluate.suspect_all()
        np.testing.assert_allclose(evaluate.live_bytes(choice), live_bytes(problem, choice, True), atol=1e-9)
        believed = evaluate.believed()
        np.testing.assert_allclose(live_bytes(believed, choice), live_bytes(problem, choice, True), atol=1e-9)


@pytest.mark.slow
def test_what_is_counted_in_full_has_the_last_word() -> None:
    found = 0
    for seed in range(60):
        problem = random_problem(seed, suspected=True)
        if problem.limit_bytes is None:
            continue
        evaluate, limit = Evaluator(problem), problem.limit_bytes

        def counted(choice: Sequence[int], problem: Problem = problem) -> Any:
            return live_bytes(problem, choice, suspected=True)

        fitting = [c for c in choices(problem) if np.isfinite(cost(problem, c, suspected=True))]
        free = solve(replace(problem, limit_bytes=None))
        if free.report.status == "infeasible" or counted(free.choice).max() <= limit:
            continue
        solution = solve(problem, fitting[:1], 20.0, "auto", free, counted)
        if solution.report.over_bytes <= 0:
            found += 1
            assert counted(solution.choice).max() <= limit + 1e-9
            least = min(evaluate.objective(c) for c in fitting)
            assert solution.report.bound_s <= least * (1 + 1e-9) + 1e-12, seed
            assert solution.report.objective_s <= evaluate.objective(fitting[0]) * (1 + 1e-9), seed
        else:
            assert not fitting, seed
            assert solution.report.status == "infeasible"
    assert found > 5
