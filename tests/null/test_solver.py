"""The solver against brute force: objective, lower bound, memory, forbidden pairs, status; for every ILP solver."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from autopar.intra_op.evaluate import Evaluator
from autopar.intra_op.simplify import core_of, eliminate
from autopar.intra_op.solve import solve
from autopar.intra_op.solvers.trws import core_cost, solve_trws
from autopar.ir.strategy import Problem, ProblemEdge, ProblemNode

HORIZON = 6


def random_problem(seed: int, *, limited: bool, forbidden: float = 0.1) -> Problem:
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.integers(1, 5, size=rng.integers(2, 7))]
    nodes = []
    for n in sizes:
        start = int(rng.integers(0, HORIZON - 1))
        stop = int(rng.integers(start + 1, HORIZON + 1))
        nodes.append(ProblemNode(costs_s=rng.random(n), usages=((10 * rng.random(n), ((start, stop),)),)))
    edges = []
    for a, b in itertools.combinations(range(len(sizes)), 2):
        if rng.random() < 0.6:
            matrix = rng.random((sizes[a], sizes[b]))
            matrix[rng.random(matrix.shape) < forbidden] = np.inf
            edges.append(ProblemEdge(a=a, b=b, rows=np.arange(sizes[a]), cols=np.arange(sizes[b]), costs_s=matrix))
    limit = float(rng.uniform(8, 25)) if limited else None
    return Problem(nodes=tuple(nodes), edges=tuple(edges), fixed_bytes=np.zeros(HORIZON), limit_bytes=limit)


def brute_force(problem: Problem) -> float:
    evaluate = Evaluator(problem)
    choices = itertools.product(*(range(len(n.costs_s)) for n in problem.nodes))
    return min(evaluate.objective(c) if evaluate.over(c) <= 0 else np.inf for c in choices)


@pytest.mark.parametrize("solver", ["auto", "highs", "cbc"])
@pytest.mark.parametrize("limited", [False, True])
def test_equals_brute_force(solver: str, limited: bool) -> None:
    for seed in range(60 if solver == "auto" else 8):
        problem = random_problem(seed, limited=limited)
        best = brute_force(problem)
        report = solve(problem, [], 20.0, solver).report
        if not np.isfinite(best):
            assert report.status == "infeasible", seed
            continue
        assert report.objective_s == pytest.approx(best, rel=2e-4), seed
        assert report.bound_s <= best * (1 + 1e-9), seed
        assert report.status == "optimal", seed


def test_message_passing_bound_is_a_bound() -> None:
    for seed in range(60):
        problem = random_problem(seed, limited=False, forbidden=0.0)
        core = core_of(problem)
        choice, bound, _ = solve_trws(core, time.perf_counter() + 10)
        assert bound <= brute_force(problem) * (1 + 1e-9), seed
        assert core_cost(core, choice) >= brute_force(problem) * (1 - 1e-9), seed


def test_elimination_keeps_the_optimum() -> None:
    for seed in range(60):
        problem = random_problem(seed, limited=False, forbidden=0.0)
        core = core_of(problem)
        eliminate(core, frozenset())
        rest = sorted(core.alive)
        found = np.inf
        for states in itertools.product(*(range(len(core.costs[v])) for v in rest)):
            choice = dict(zip(rest, states, strict=True))
            core.restore(choice)
            found = min(found, Evaluator(problem).objective([choice[v] for v in range(len(problem.nodes))]))
        assert found == pytest.approx(brute_force(problem)), seed


def test_never_worse_than_a_seed_that_fits() -> None:
    for seed in range(20):
        problem = random_problem(seed, limited=True)
        evaluate = Evaluator(problem)
        choices = itertools.product(*(range(len(n.costs_s)) for n in problem.nodes))
        fitting = [c for c in choices if evaluate.over(c) <= 0 and np.isfinite(evaluate.objective(c))]
        if fitting:
            start = min(fitting, key=evaluate.objective)
            found = solve(problem, [start], 0.001)
            assert found.report.objective_s <= evaluate.objective(start) * (1 + 1e-12)
            assert evaluate.over(found.choice) <= 0


def test_infeasible_says_by_how_much() -> None:
    problem = random_problem(3, limited=True)
    least = Evaluator(problem).least_peak()
    tight = Problem(nodes=problem.nodes, edges=problem.edges, fixed_bytes=problem.fixed_bytes, limit_bytes=least - 1.0)
    report = solve(tight, [], 5.0).report
    assert report.status == "infeasible"
    assert report.over_bytes >= 1.0 - 1e-9
