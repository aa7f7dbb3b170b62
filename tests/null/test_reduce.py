"""Every reduction keeps the optimum, memory included, and choices of what is left cost what they say: against brute
force."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from autopar.intra_op.reduce import edges, memory_rows, nodes
from autopar.intra_op.reduce.core import Core, core_of
from autopar.intra_op.reduce.ledger import Ledger
from autopar.intra_op.reduce.run import lighten, reduce, tidy
from tests.null.problems import brute_force, choices, cost, random_problem
from tests.shares import each

Step = Callable[[Core], None]


def best_left(core: Core) -> tuple[float, list[int] | None]:
    """(cost, choice of all nodes) of the cheapest choice of what is left; (inf, None) where there is none."""
    if core.infeasible:
        return np.inf, None
    ledger = Ledger(core, sorted(core.alive))
    best, choice = np.inf, None
    for states in itertools.product(*(range(len(core.costs[v])) for v in ledger.nodes)):
        total = core.constant + sum(float(core.costs[v][s]) for v, s in zip(ledger.nodes, states, strict=True))
        for u, v in ledger.edges:
            e = core.edges[u][v]
            total += float(e.matrix[e.rows[states[ledger.place[u]]], e.cols[states[ledger.place[v]]]])
        if total < best and ledger.over(np.array(states, np.int64)) <= 1e-9:
            best, choice = total, core.restore(dict(zip(ledger.nodes, states, strict=True)))
    return best, choice


def at_edges(step: Callable[[Core, int, int], bool], *before: Callable[[Core, int, int], bool]) -> Step:
    """``step`` at every edge that is there, after what it needs."""

    def run(core: Core) -> None:
        for u, v in sorted(core.dirty_edges):
            for one in (*before, step):
                if v in core.edges[u] and not core.infeasible:
                    one(core, u, v)

    return run


def at_nodes(step: Callable[[Core, int], bool]) -> Step:
    """``step`` at every node, after edges have become consistent."""

    def run(core: Core) -> None:
        lighter = at_edges(edges.make_arc_consistent, edges.drop_unused)
        for _ in range(8):
            lighter(core)
        at_edges(edges.drop_unused)(core)
        for v in sorted(core.alive):
            if v in core.alive and not core.infeasible:
                step(core, v)

    return run


CONSISTENT = (edges.drop_unused, edges.make_arc_consistent, edges.drop_unused)
STEPS: dict[str, Step] = {
    "drop unused rows": at_edges(edges.drop_unused),
    "arc consistency": at_edges(edges.make_arc_consistent),
    "move minima": at_edges(edges.move_minima, *CONSISTENT, *CONSISTENT),
    "group": at_edges(edges.group),
    "drop constant": at_edges(edges.drop_constant, *CONSISTENT, *CONSISTENT, edges.move_minima, edges.group),
    "contract": at_edges(edges.contract, edges.drop_unused),
    "absorb": at_nodes(nodes.absorb),
    "eliminate": at_nodes(nodes.eliminate),
    "drop dominated": at_nodes(nodes.drop_dominated),
    "merge usages": at_nodes(memory_rows.merge_usages),
    "merge edge usages": at_edges(memory_rows.merge_edge_usages),
    "drop times": lambda core: memory_rows.drop_times(core) and None,
    "drop too large": lambda core: memory_rows.drop_too_large(core) and None,
    "lighten": lighten,
    "reduce": reduce,
}


def measured(core: Core) -> tuple[float, ...]:
    """What a reduction changes."""
    strategies = sum(len(core.costs[v]) for v in core.alive)
    return len(core.alive), core.pairs, strategies, core.constant, len(core.fixed), float(core.fixed.sum())


@pytest.mark.slow
@pytest.mark.parametrize("name", each(3, STEPS))
def test_keeps_the_optimum(name: str) -> None:
    changed = 0
    for seed in range(120):
        problem = random_problem(seed)
        core = core_of(problem)
        if core.infeasible:
            assert brute_force(problem) == np.inf, seed
            continue
        before = measured(core)
        STEPS[name](core)
        changed += before != measured(core)
        best, choice = best_left(core)
        assert best == pytest.approx(brute_force(problem), abs=1e-9), seed
        if choice is not None:
            assert cost(problem, choice) == pytest.approx(best, abs=1e-9), seed
    assert changed >= 1, "no problem on which this does anything"


def test_what_is_left_is_in_its_simplest_form() -> None:
    for seed in range(200):
        core = core_of(random_problem(seed))
        reduce(core)
        for u in () if core.infeasible else core.alive:
            assert len(core.costs[u]) > 1
            for v, e in core.edges[u].items():
                assert min(e.matrix.shape) > 1, seed
                assert np.isfinite(e.matrix).any(axis=0).all() and np.isfinite(e.matrix).any(axis=1).all()
                pairs = core.pairs
                tidy(core, min(u, v), max(u, v)) if u < v else None
                assert core.pairs == pairs


@pytest.mark.slow
def test_a_choice_is_projected_to_one_that_is_never_worse() -> None:
    for seed in range(150):
        problem = random_problem(seed)
        allowed = [c for c in choices(problem) if np.isfinite(cost(problem, c))]
        core = core_of(problem)
        reduce(core)
        for choice in allowed[:: max(1, len(allowed) // 5)]:
            inside = core.project(choice)
            assert inside is not None
            assert cost(problem, core.restore(inside)) <= cost(problem, choice) + 1e-9, seed


def test_a_choice_that_is_left_can_be_projected() -> None:
    for seed in range(60):
        core = core_of(random_problem(seed))
        reduce(core)
        if core.alive and not core.infeasible:
            rest = {v: len(core.costs[v]) - 1 for v in core.alive}
            assert core.project(core.restore(rest)) == rest


@pytest.mark.parametrize("by", [reduce, lighten])
def test_a_node_without_strategies_ends_it(by: Callable[[Core], None]) -> None:
    for seed in range(20):
        core = core_of(random_problem(seed))
        at = min(core.alive)
        core.keep(at, np.zeros(len(core.costs[at]), bool))
        by(core)
        assert core.infeasible
