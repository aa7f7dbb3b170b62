"""Small random sharding problems with all that real ones have, and their solution by brute force."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from autopar.intra_op.solve import solve
from autopar.ir.strategy import Problem, ProblemEdge, ProblemNode

HORIZON = 8


def random_problem(seed: int, suspected: bool = False) -> Problem:
    """2 to 7 nodes of 1 to 4 strategies; edges dense, forbidden in part, functional, sums of row and column costs,
    grouped, or constant; whole or fractional costs; usages of nodes and edges over several intervals; a limit that
    binds, does not, or cannot be met. With ``suspected``: edges have such usages too."""
    rng = np.random.default_rng(seed)
    whole = rng.random() < 0.5
    sizes = [int(n) for n in rng.integers(1, 5, size=rng.integers(2, 8))]

    def costs(shape: Any) -> Any:
        return rng.integers(0, 6, size=shape).astype(float) if whole else rng.random(shape)

    nodes = []
    for n in sizes:
        least = -3 if rng.random() < 0.2 else 0  # below zero: makes room
        usages = tuple((rng.integers(least, 8, size=n).astype(float), _spans(rng)) for _ in range(rng.integers(0, 3)))
        cost = costs(n)
        if n > 1 and rng.random() < 0.1:
            cost[rng.integers(n)] = np.inf
        nodes.append(ProblemNode(costs_s=cost, usages=usages))
    density = rng.uniform(0.2, 0.8)
    edges = []
    for a, b in itertools.combinations(range(len(sizes)), 2):
        if rng.random() < density:
            rows, cols = _groups(rng, sizes[a]), _groups(rng, sizes[b])
            shape = (int(rows.max()) + 1, int(cols.max()) + 1)
            matrix = _matrix(rng, costs, shape)
            usages = ()
            if rng.random() < 0.4:
                held = rng.integers(-2 if rng.random() < 0.2 else 0, 6, size=shape) * (rng.random(shape) < 0.5)
                usages = ((held.astype(float), _spans(rng)),)
            more = ((rng.integers(0, 4, size=shape).astype(float), _spans(rng)),) if suspected else ()
            edges.append(ProblemEdge(a=a, b=b, rows=rows, cols=cols, costs_s=matrix, usages=usages, suspected=more))
    fixed = rng.integers(0, 3, size=HORIZON).astype(float)
    limit = None if rng.random() < 0.25 else float(rng.integers(4, 28))
    return Problem(nodes=tuple(nodes), edges=tuple(edges), fixed_bytes=fixed, limit_bytes=limit)


def _spans(rng: np.random.Generator) -> Any:
    spans = []
    for _ in range(rng.integers(1, 3)):
        start = int(rng.integers(0, HORIZON))
        spans.append((start, int(rng.integers(start, HORIZON + 1))))
    return tuple(spans)


def _groups(rng: np.random.Generator, size: int) -> Any:
    if rng.random() < 0.6:
        return np.arange(size)
    return np.unique(rng.integers(0, size, size=size), return_inverse=True)[1].ravel()


def _matrix(rng: np.random.Generator, costs: Any, shape: tuple[int, int]) -> Any:
    kind = rng.integers(0, 5)
    if kind == 0:
        return costs(shape[0])[:, None] + costs(shape[1])[None, :]
    if kind == 1:
        return np.zeros(shape)
    matrix = costs(shape)
    if kind == 2:
        only = rng.integers(0, shape[1], size=shape[0])
        matrix[np.arange(shape[1])[None, :] != only[:, None]] = np.inf
    elif kind == 3:
        matrix[rng.random(shape) < 0.3] = np.inf
    return matrix


def live_bytes(problem: Problem, choice: Sequence[int], suspected: bool = False) -> Any:
    """float64[times], counted naively."""
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


def cost(problem: Problem, choice: Sequence[int], suspected: bool = False) -> float:
    """What a choice costs; inf where it is forbidden or does not fit."""
    total = sum(float(n.costs_s[choice[v]]) for v, n in enumerate(problem.nodes))
    total += sum(float(e.costs_s[e.rows[choice[e.a]], e.cols[choice[e.b]]]) for e in problem.edges)
    if problem.limit_bytes is not None and live_bytes(problem, choice, suspected).max() > problem.limit_bytes:
        return np.inf
    return total


def brute_force(problem: Problem) -> float:
    """The least cost of all choices; inf where none is allowed and fits."""
    return min(cost(problem, c) for c in choices(problem))


def choices(problem: Problem) -> Iterator[tuple[int, ...]]:
    """All choices."""
    return itertools.product(*(range(len(n.costs_s)) for n in problem.nodes))


def dense_problem(
    seed: int, size: int = 9, states: int = 4, limited: bool = True, limit: float | None = None
) -> Problem:
    """Every pair of nodes coupled at random: nothing that reductions could take apart."""
    rng = np.random.default_rng(seed)
    nodes = []
    for _ in range(size):
        start = int(rng.integers(0, 6))
        held = rng.integers(1, 9, size=states).astype(float)
        nodes.append(ProblemNode(costs_s=rng.random(states), usages=((held, ((start, start + 3),)),)))
    edges = tuple(
        ProblemEdge(a=a, b=b, rows=np.arange(states), cols=np.arange(states), costs_s=rng.random((states, states)))
        for a, b in itertools.combinations(range(size), 2)
    )
    limit_bytes = (limit or 2.0 * size) if limited else None
    return Problem(nodes=tuple(nodes), edges=edges, fixed_bytes=np.zeros(9), limit_bytes=limit_bytes)


def agrees(seed: int, solver: str = "auto", **options: Any) -> None:
    """The solver's answer is brute force's."""
    problem = random_problem(seed)
    best, solution = brute_force(problem), solve(problem, (), 20.0, solver, **options)
    report = solution.report
    if not np.isfinite(best):
        assert report.status == "infeasible", seed
        return
    assert report.status == "optimal", seed
    assert report.objective_s == pytest.approx(cost(problem, solution.choice), rel=1e-12, abs=1e-12), seed
    assert report.objective_s == pytest.approx(best, rel=2e-4, abs=1e-9), seed
    assert report.bound_s <= best + 1e-9 * abs(best), seed
