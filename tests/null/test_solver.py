"""The solver against brute force: objective, lower bound, memory of nodes and edges, forbidden pairs, status, what is
counted in full; for every ILP solver."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autopar.intra_op.evaluate import Evaluator
from autopar.intra_op.simplify import core_of, eliminate
from autopar.intra_op.solve import solve
from autopar.intra_op.solvers.trws import core_cost, solve_trws
from autopar.ir.strategy import Problem, ProblemEdge, ProblemNode

HORIZON = 6


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested is what is found, not how soon on a busy machine."""
    monkeypatch.setattr("autopar.intra_op.solve.SMALL_GAP_S", 20.0)
    monkeypatch.setattr("autopar.intra_op.limited.ILP_SHARE_S", 20.0)


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
            usages, suspected = (_usage(rng, matrix.shape), _usage(rng, matrix.shape)) if limited else ((), ())
            rows, cols = np.arange(sizes[a]), np.arange(sizes[b])
            edge = ProblemEdge(a=a, b=b, rows=rows, cols=cols, costs_s=matrix, usages=usages, suspected=suspected)
            edges.append(edge)
    limit = float(rng.uniform(8, 25)) if limited else None
    return Problem(nodes=tuple(nodes), edges=tuple(edges), fixed_bytes=np.zeros(HORIZON), limit_bytes=limit)


def _usage(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    start = int(rng.integers(0, HORIZON - 1))
    size = 5 * rng.random(shape) * (rng.random(shape) < 0.5)
    return ((size, ((start, int(rng.integers(start + 1, HORIZON + 1))),)),)


def naive_live_bytes(problem: Problem, choice: Sequence[int], suspected: bool = False) -> Any:
    live = np.array(problem.fixed_bytes, float)
    for v, node in enumerate(problem.nodes):
        for size, spans in node.usages:
            for start, stop in spans:
                live[start:stop] += size[choice[v]]
    for e in problem.edges:
        for size, spans in (*e.usages, *(e.suspected if suspected else ())):
            for start, stop in spans:
                live[start:stop] += size[e.rows[choice[e.a]], e.cols[choice[e.b]]]
    return live


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


def test_live_bytes_and_their_changes() -> None:
    for seed in range(30):
        problem = random_problem(seed, limited=True)
        evaluate, rng = Evaluator(problem), np.random.default_rng(seed)
        choice = [int(rng.integers(len(n.costs_s))) for n in problem.nodes]
        live = evaluate.live_bytes(choice)
        np.testing.assert_allclose(live, naive_live_bytes(problem, choice), atol=1e-9)
        prices = rng.random(HORIZON)
        weights = evaluate.weights(prices)
        active = evaluate.active(weights)
        for v, node in enumerate(problem.nodes):
            local = evaluate.local_bytes(weights, active.get(v, []), choice, v)
            for s in range(len(node.costs_s)):
                moved = naive_live_bytes(problem, [s if u == v else c for u, c in enumerate(choice)])
                np.testing.assert_allclose(evaluate.change(choice, v, s), moved - live, atol=1e-9)
                assert local[s] - local[choice[v]] == pytest.approx(prices @ (moved - live), abs=1e-9)
        for t in range(HORIZON):
            row = evaluate.row(t)
            held = sum(size[choice[v]] for v, size in row.terms.items())
            held += sum(size[choice[a], choice[b]] for (a, b), size in row.pairs.items())
            assert row.room - held == pytest.approx(evaluate.limit - live[t])


def test_what_is_counted_in_full_has_the_last_word() -> None:
    found = 0
    for seed in range(40):
        problem = random_problem(seed, limited=True)
        assert problem.limit_bytes is not None
        evaluate, limit = Evaluator(problem), problem.limit_bytes

        def counted(choice: Sequence[int], problem: Problem = problem) -> Any:
            return naive_live_bytes(problem, choice, suspected=True)

        free = solve(replace(problem, limit_bytes=None))
        if counted(free.choice).max() <= limit:
            continue
        choices = [
            c
            for c in itertools.product(*(range(len(n.costs_s)) for n in problem.nodes))
            if counted(c).max() <= limit and np.isfinite(evaluate.objective(c))
        ]
        solution = solve(problem, choices[:1], 20.0, "auto", free, counted)
        if solution.report.over_bytes <= 0:
            found += 1
            assert counted(solution.choice).max() <= limit + 1e-9
            least = min(evaluate.objective(c) for c in choices)
            assert solution.report.bound_s <= least * (1 + 1e-9), seed
            assert solution.report.objective_s <= evaluate.objective(choices[0]) * (1 + 1e-9), seed
        else:
            assert not choices, seed
            assert solution.report.status == "infeasible"
    assert found > 5
