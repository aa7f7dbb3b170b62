"""The exhaustive search against brute force: objective, bound, memory of nodes and edges, forbidden pairs, status; its
parts, and its processes."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.intra_op.evaluate import Evaluator
from autopar.intra_op.reduce.core import Core, core_of
from autopar.intra_op.reduce.ledger import Ledger
from autopar.intra_op.reduce.run import lighten
from autopar.intra_op.search import PLAN, Effort
from autopar.intra_op.solve import solve
from autopar.intra_op.solvers import highs, prices
from autopar.intra_op.solvers.forests import Forests
from autopar.intra_op.solvers.highs import Program
from autopar.intra_op.solvers.neighbourhoods import Neighbourhoods
from autopar.intra_op.solvers.passing import Passing
from autopar.intra_op.solvers.prices import Pricing
from autopar.ir.strategy import Problem, ProblemEdge, ProblemNode
from benchmarks.solver_team import EXHAUST, toulbar
from benchmarks.solver_team.helpers import Helper
from benchmarks.solver_team.worker import Better, Combine, Done, Improve, Prove, Walk
from tests.null.problems import agrees, choices, cost, dense_problem, random_problem
from tests.shares import each

EXACT = {
    "highs": lambda core, ledger, cutoff: Program(core, ledger).solve([], time.perf_counter() + 20, cutoff=cutoff),
    "toulbar2": lambda core, ledger, cutoff: toulbar.solve_toulbar(core, ledger, [], time.perf_counter() + 20, cutoff),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 4))])
def test_equals_brute_force(part: int) -> None:
    for seed in range(500 * part, 500 * (part + 1)):
        agrees(seed, effort=EXHAUST)


def test_however_many_pairs_are_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of which one node is left, or messages would have to get around it."""
    monkeypatch.setattr("autopar.intra_op.search.THOROUGH_PAIRS", 0)
    nodes = tuple(ProblemNode(costs_s=np.arange(3.0), usages=((np.arange(3.0)[::-1], ((0, 2),)),)) for _ in range(4))
    same = np.where(np.eye(3) > 0, 0.0, np.inf)
    edges = tuple(
        ProblemEdge(a=a, b=b, rows=np.arange(3), cols=np.arange(3), costs_s=same)
        for a, b in ((0, 1), (1, 2), (2, 3), (0, 3))
    )
    problem = Problem(nodes=nodes, edges=edges, fixed_bytes=np.zeros(2), limit_bytes=5.0)
    report = solve(problem, (), 20.0, effort=EXHAUST).report
    assert (report.objective_s, report.solver) == (4.0, "elimination")


@pytest.mark.parametrize("effort", [PLAN, EXHAUST])
def test_reductions_that_time_ends_leave_what_is_exact(effort: Effort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.intra_op.search.REDUCE_SHARE", 0.0)
    monkeypatch.setattr("autopar.intra_op.search.TINY_PAIRS", 0)
    for seed in range(40):
        agrees(seed, effort=effort)


def left_of(problem: Problem) -> tuple[Core, Ledger]:
    core = core_of(problem)
    lighten(core)
    return core, Ledger(core, sorted(core.alive))


def least_left(core: Core, ledger: Ledger) -> tuple[float, dict[tuple[int, int], float]]:
    """By brute force: the least cost of what is left, and with each strategy of each node (place, strategy)."""
    passing = Passing(core, compiled=False)
    best, least = np.inf, {}
    for states in itertools.product(*(range(len(core.costs[v])) for v in ledger.nodes)):
        choice = np.array(states, np.int64)
        total = passing.cost(choice) if ledger.over(choice) <= 0 else np.inf
        best = min(best, total)
        for at in enumerate(states):
            least[at] = min(least.get(at, np.inf), total)
    return best, least


@pytest.mark.slow
@pytest.mark.parametrize("limited", [False, True])
def test_bounds_and_excesses_are_bounds(limited: bool) -> None:
    for seed in range(12):
        core, ledger = left_of(dense_problem(seed, size=6, states=3, limited=limited))
        best, least = least_left(core, ledger)
        pricing = Pricing(core)
        pricing.ascend(time.perf_counter() + 5, 0.0, 60)
        assert pricing.bound <= best * (1 + 1e-9)
        assert pricing.best_cost >= best * (1 - 1e-9)
        pricing.settle(3)
        for k, v in enumerate(pricing.passing.nodes):
            for s in range(len(core.costs[v])):
                excess = pricing.passing.excess[pricing.passing.at[k] + s]
                assert pricing.last_bound + excess <= least[k, s] + 1e-9, (seed, k, s)


def test_messages_are_the_same_compiled_or_not() -> None:
    pytest.importorskip("numba", reason="numba is not installed")
    for seed in range(10):
        core, _ = left_of(random_problem(seed) if seed % 2 else dense_problem(seed, limited=False))
        if core.infeasible:
            continue
        fast, slow = Passing(core, compiled=True), Passing(core, compiled=False)
        for _ in range(6):
            assert fast.both() == pytest.approx(slow.both(), abs=1e-9)
            np.testing.assert_allclose(fast.excess, slow.excess, atol=1e-9)
            np.testing.assert_array_equal(fast.decode(), slow.decode())


@pytest.mark.parametrize("name", EXACT)
def test_exact_solvers(name: str) -> None:
    if name == "toulbar2":
        pytest.importorskip("pytoulbar2", reason="pytoulbar2 is not installed")
    for seed in range(6):
        core, ledger = left_of(dense_problem(seed, size=6, states=3))
        best, _ = least_left(core, ledger)
        found = EXACT[name](core, ledger, np.inf)
        assert found.proven
        if np.isfinite(best):
            assert Passing(core, compiled=False).cost(found.choice) == pytest.approx(best)
            assert ledger.over(found.choice) <= 0
            none = EXACT[name](core, ledger, best * (1 - 1e-6))
            assert none.choice is None
            assert none.proven
        else:
            assert found.choice is None


@pytest.mark.slow
def test_what_runs_out_of_time_is_not_proven() -> None:
    pytest.importorskip("pytoulbar2", reason="pytoulbar2 is not installed")
    core, ledger = left_of(dense_problem(0, size=40, states=6, limited=False))
    for cutoff in (np.inf, 0.9 * Passing(core, compiled=False).cost(Passing(core, compiled=False).decode())):
        found = toulbar.solve_toulbar(core, ledger, [], time.perf_counter() + 0.5, cutoff)
        assert not found.proven
        assert found.bound < cutoff


@pytest.mark.slow
@pytest.mark.parametrize("compiled", each(2, [True, False]))
def test_forests(compiled: bool) -> None:
    if compiled:
        pytest.importorskip("numba", reason="numba is not installed")
    for seed in range(6):
        core, ledger = left_of(dense_problem(seed, size=9, states=3, limit=30.0))
        pricing, prices = Pricing(core), np.full(ledger.horizon, 0.02)
        forests = Forests(pricing, np.random.default_rng(seed))
        forests.compiled = compiled
        choice = np.zeros(len(ledger.nodes), np.int64)
        for _ in range(20):
            before = pricing.cost(choice) + float(prices @ ledger.live(choice))
            forests.rechoose(choice, prices)
            assert pricing.cost(choice) + float(prices @ ledger.live(choice)) <= before + 1e-9
        best, found = forests.wander(choice, prices, 200, np.inf)
        assert ledger.over(best) <= 0
        better = forests.polish(best, found, 200, np.inf)
        assert ledger.over(better) <= 0
        assert least_left(core, ledger)[0] - 1e-9 <= pricing.cost(better) <= pricing.cost(best)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_a_forest_is_chosen_at_best(compiled: bool) -> None:
    if compiled:
        pytest.importorskip("numba", reason="numba is not installed")
    for seed in range(6):
        problem = dense_problem(seed, size=7, states=4, limited=False)
        core = core_of(replace(problem, edges=tuple(e for e in problem.edges if e.a == (e.b - 1) // 2)))  # a tree
        ledger = Ledger(core, sorted(core.alive))
        forests = Forests(Pricing(core), np.random.default_rng(seed))
        forests.compiled = compiled
        choice = np.zeros(len(ledger.nodes), np.int64)
        forests.rechoose(choice, np.zeros(0))
        assert ledger.cost(choice) == pytest.approx(least_left(core, ledger)[0])


def test_parts_of_bytes_are_not_rounded() -> None:
    for seed in range(6):
        problem = dense_problem(seed, size=6, states=3)
        nodes = tuple(replace(n, usages=tuple((0.37 * held, at) for held, at in n.usages)) for n in problem.nodes)
        assert problem.limit_bytes is not None
        core, ledger = left_of(replace(problem, nodes=nodes, limit_bytes=0.37 * problem.limit_bytes + 0.2))
        best, _ = least_left(core, ledger)
        found = toulbar.exact_solver()(core, ledger, time.perf_counter() + 20, np.inf)
        assert found.proven
        assert found.bound == pytest.approx(best)


def test_highs_runs_beside_the_planners_ilp() -> None:
    for name in ("auto", "highs"):  # the planner's solver first: HiGHS keeps the number of threads it began with
        problem = dense_problem(0, size=6, states=3, limited=False)
        planned = solve(problem, (), 20.0, name)
        core, ledger = left_of(problem)
        assert ledger.cost(EXACT["highs"](core, ledger, np.inf).choice) == pytest.approx(planned.report.objective_s)


@pytest.mark.slow
def test_neighbourhoods_keep_the_limit_and_gain() -> None:
    gained = 0
    for seed in range(6):
        core, ledger = left_of(dense_problem(seed, size=8, states=3))
        pricing = Pricing(core)
        pricing.ascend(time.perf_counter() + 5, 0.0, 20)
        start = np.array([np.argmin([sum(core.memory[v].bytes[:, s]) for s in range(3)]) for v in ledger.nodes])
        search = Neighbourhoods(core, ledger, highs.with_highs, np.random.default_rng(seed), size=12.0)
        before, over = pricing.cost(start), ledger.over(start)
        after = search.improve(start, pricing.excess(), time.perf_counter() + 20, parts=12)
        assert ledger.over(after) <= over
        if over == 0:
            assert pricing.cost(after) <= before
        gained += search.gained
    assert gained > 3


def test_a_choice_over_the_limit_is_brought_under_it() -> None:
    core, ledger = left_of(dense_problem(1, size=8, states=4))
    pricing = Pricing(core)
    pricing.passing.both(10)
    start = pricing.passing.decode()
    assert ledger.over(start) > 0
    search = Neighbourhoods(core, ledger, highs.with_highs, np.random.default_rng(0), size=16.0)
    after = search.improve(start, pricing.excess(), time.perf_counter() + 20, parts=40)
    assert ledger.over(after) == 0


def test_never_worse_than_a_seed_that_fits() -> None:
    for seed in range(40):
        problem = random_problem(seed)
        evaluate = Evaluator(problem)
        fitting = [c for c in choices(problem) if np.isfinite(cost(problem, c))]
        if fitting:
            start = min(fitting, key=evaluate.objective)
            found = solve(problem, [start], 0.0, effort=EXHAUST)
            assert cost(problem, found.choice) <= evaluate.objective(start) * (1 + 1e-12)


def test_infeasible_says_by_how_much() -> None:
    problem = dense_problem(3)
    least = Evaluator(problem).least_peak()
    report = solve(replace(problem, limit_bytes=least - 1.0), [], 5.0, effort=EXHAUST).report
    assert report.status == "infeasible"
    assert report.over_bytes >= 1.0 - 1e-9


@pytest.mark.slow
def test_processes_end_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.intra_op.search.SMALL_PAIRS", 0)
    monkeypatch.setattr("autopar.intra_op.search.HELP_S", 0.1)
    problem = dense_problem(0, size=30, states=5, limit=110.0)
    before = children()
    solution = solve(problem, (), 9.0, gap=0.0, effort=EXHAUST)
    assert Evaluator(problem).over(solution.choice) <= 0
    assert "neighbourhoods" in solution.report.solver
    assert children() == before


@pytest.mark.slow
def test_workers_answer() -> None:
    core, ledger = left_of(dense_problem(4, size=9, states=3, limit=30.0))
    pricing = Pricing(core)
    pricing.ascend(time.perf_counter() + 5, 0.0, 30)
    pricing.settle(3)
    start = np.array([np.argmin(core.memory[v].bytes.sum(axis=0)) for v in ledger.nodes])
    assert ledger.over(start) == 0
    helper = Helper(core)
    try:
        helper.ask(Improve(choice=start, excess=pricing.excess(), seconds=2.0, seed=1))
        better = answer_of(helper)
        assert ledger.over(better.choice) == 0
        assert ledger.cost(better.choice) < ledger.cost(start)
        helper.ask(Walk(choice=start, prices=pricing.prices, seconds=2.0, seed=1))
        walked = answer_of(helper)
        assert ledger.over(walked.choice) == 0
        others = tuple(np.full(len(start), s, np.int64) for s in range(2))
        helper.ask(Combine(choice=better.choice, others=others, seconds=2.0, seed=1))
        combined = answer_of(helper)
        assert ledger.cost(combined.choice) <= ledger.cost(better.choice)
        helper.ask(Prove(cutoff=np.inf, seconds=60.0))
        best = answer_of(helper)
        assert best.proven
        assert ledger.cost(best.choice) <= ledger.cost(combined.choice) + 1e-9
        assert ledger.cost(best.choice) == pytest.approx(best.bound, rel=1e-6)
    finally:
        helper.close()


def answer_of(helper: Helper) -> Done:
    """The last answer to a request."""
    while not isinstance(answer := helper.answers.get(timeout=100), Done):
        assert isinstance(answer, Better)
    return answer


def children() -> set[int]:
    """Process ids of this process's children."""
    out = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[1]) == os.getpid():
            out.add(int(stat.parent.name))
    return out


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell ignores it
from autopar.intra_op import search
from autopar.intra_op.evaluate import Evaluator
from autopar.intra_op.solve import solve
from benchmarks.solver_team import EXHAUST
from tests.null.test_search import dense_problem
search.SMALL_PAIRS, search.HELP_S = 0, 0.1
problem = dense_problem(0, size=40, states=6, limit=150.0)
offer, found = search.Search._offer, []
def told(self, *choice):
    offer(self, *choice)
    if not found:
        found.append(choice)
        print("found", flush=True)
search.Search._offer = told
solution = solve(problem, (), 600.0, gap=0.0, effort=EXHAUST)
assert Evaluator(problem).over(solution.choice) <= 0
print(solution.report.status, flush=True)
"""


@pytest.mark.slow
def test_ctrl_c_returns_the_best_choice_so_far() -> None:
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    try:
        assert process.stdout.readline() == "found\n"
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "time_limit\n"
        assert process.wait() == 0
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


def test_prices_say_what_a_choice_costs() -> None:
    core, ledger = left_of(dense_problem(2, size=5, states=3))
    pricing = prices.Pricing(core)
    for _ in range(3):
        rates = np.random.default_rng(0).random(ledger.horizon)
        pricing.charge(rates)
        choice = np.zeros(len(ledger.nodes), np.int64)
        paid = pricing.passing.cost(choice) - pricing.cost(choice)
        assert paid == pytest.approx(float(rates @ (ledger.live(choice) - ledger.fixed)))
