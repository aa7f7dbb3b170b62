"""The solver's benchmark: instances read, refused and judged, what counts as missed, and the table of a directory."""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.intra_op.evaluate import Evaluator
from benchmarks import solver, solver_graphs, solver_instances
from benchmarks.child import ChildError, ask
from benchmarks.instances import FORBIDDEN, InstanceError, Verdict, judge, load, read
from benchmarks.own_graphs import GraphCase

DATA = solver.INSTANCES


def document() -> dict[str, Any]:
    """Nodes 0–3; an empty interval (it stops before it starts), a forbidden cost of a node and one of an edge, and two
    edges between nodes 1 and 2, one in either order."""
    return {
        "problem": {
            "name": "tiny",
            "nodes": {
                "intervals": [[0, 4], [2, 6], [4, 9], [6, 4]],
                "costs": [[3], [5, 6], [2, 4, 10**18], [1, 7]],
                "usages": [[8], [2, 5], [1, 9, 3], [50, 60]],
            },
            "edges": {
                "nodes": [[0, 1], [1, 2], [2, 1], [2, 3]],
                "costs": [[1, 0], [1, 2, 3, 4, 5, 6], [10, 20, 30, 40, 50, 60], [0, 1, 2, 10**17, 4, 5]],
            },
            "usage_limit": 13,
        }
    }


def written(tmp_path: Path, content: Any, name: str = "T.json") -> Path:
    path = tmp_path / name
    text = json.dumps(content) if not isinstance(content, bytes) else content
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_read(tmp_path: Path) -> None:
    path = tmp_path / "T.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document()).encode()))
    problem = read(path)
    assert problem.limit_bytes == 13.0
    assert problem.fixed_bytes.tolist() == [0.0] * 9
    assert [n.costs_s.tolist() for n in problem.nodes] == [[3.0], [5.0, 6.0], [2.0, 4.0, np.inf], [1.0, 7.0]]
    assert [[(u.tolist(), s.tolist()) for u, s in n.usages] for n in problem.nodes] == [
        [([8.0], [[0, 4]])],
        [([2.0, 5.0], [[2, 6]])],
        [([1.0, 9.0, 3.0], [[4, 9]])],
        [],
    ]
    assert [(e.a, e.b) for e in problem.edges] == [(0, 1), (1, 2), (2, 3)]
    both = problem.edges[1]
    assert both.costs_s[np.ix_(both.rows, both.cols)].tolist() == [[11.0, 32.0, 53.0], [24.0, 45.0, 66.0]]
    assert problem.edges[2].costs_s.tolist() == [[0.0, 1.0], [2.0, np.inf], [4.0, 5.0]]


def test_judge_agrees_with_the_solvers_evaluation(tmp_path: Path) -> None:
    path = written(tmp_path, document())
    content, problem = load(path), read(path)
    evaluate = Evaluator(problem)
    for choice in itertools.product(range(1), range(2), range(3), range(2)):
        verdict = judge(content, choice)
        seconds = evaluate.objective(choice)
        assert verdict.forbidden == (seconds == np.inf)
        assert verdict.forbidden or verdict.cost == seconds
        assert verdict.peak == evaluate.live_bytes(choice).max()
        assert verdict.feasible == (not verdict.forbidden and verdict.peak <= 13)
    assert judge(content, (0, 0, 0, 0)) == Verdict(cost=23, peak=10, limit=13, forbidden=False)
    assert judge(content, (0, 1, 1, 1)).cost > FORBIDDEN


def test_judge_adds_large_integers_exactly() -> None:
    content = {
        "nodes": {"intervals": [[0, 1]] * 2, "costs": [[2**60 + 1], [1]], "usages": [[2**60 + 1], [1]]},
        "edges": {"nodes": [], "costs": []},
    }
    assert judge(content, (0, 0)) == Verdict(cost=2**60 + 2, peak=2**60 + 2, limit=None, forbidden=True)


@pytest.mark.skipif(not (DATA / "evaluate.py").exists(), reason=f"the contest's files are not in {DATA}")
@pytest.mark.parametrize("name", ["B", "G"])
def test_judge_agrees_with_the_contests(name: str) -> None:
    spec = importlib.util.spec_from_file_location("contest_evaluate", DATA / "evaluate.py")
    assert spec is not None and spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    content = load(DATA / f"{name}.json.gz")
    draw = random.Random(0)
    for _ in range(20):
        choice = [draw.randrange(len(costs)) for costs in content["nodes"]["costs"]]
        verdict = judge(content, choice)
        assert (verdict.cost, verdict.peak, verdict.limit) == theirs.evaluate(content, choice)


@pytest.mark.parametrize(
    ("where", "value", "text"),
    [
        (("nodes",), [], "nodes is a list; expected an object with intervals, costs, usages"),
        (("edges", "costs"), None, "edges.costs is missing or null; expected a list"),
        (("edges", "nodes"), [[0, 1]], "edges.costs has 4 entries; expected 1, as edges.nodes"),
        (("usage_limit",), 1.5, "usage_limit is 1.5; expected an integer, or null for none"),
        (("nodes", "intervals", 1), [2], "nodes.intervals[1] is [2]; expected a list of two integers"),
        (("nodes", "intervals", 1), [-2, 3], "nodes.intervals[1] starts at -2; expected 0 or later"),
        (("nodes", "costs", 0), [], "nodes.costs[0] is empty; expected a cost for each strategy, at least one"),
        (("nodes", "costs", 1), [5, "6"], 'nodes.costs[1][1] is "6"; expected an integer'),
        (("nodes", "costs", 1), [5, [6]], "nodes.costs[1][1] is a list; expected an integer"),
        (("nodes", "costs", 1), [5, 0.5], "nodes.costs[1][1] is 0.5; expected an integer"),
        (("nodes", "costs", 1), 5, "nodes.costs[1] is 5; expected a list of integers"),
        (
            ("nodes", "usages", 2),
            [1, 9],
            "nodes.usages[2] has 2 entries; expected 3, one per strategy, as nodes.costs[2]",
        ),
        (("edges", "nodes", 3), [2, 4], "edges.nodes[3] is [2, 4]; expected two different nodes of 0 to 3"),
        (("edges", "nodes", 3), [2, 2], "edges.nodes[3] is [2, 2]; expected two different nodes of 0 to 3"),
        (
            ("edges", "costs", 1),
            [1, 2, 3],
            "edges.costs[1] has 3 entries; expected 2 × 3 = 6, the strategies of nodes 1 and 2",
        ),
    ],
)
def test_malformed(tmp_path: Path, where: tuple[Any, ...], value: Any, text: str) -> None:
    content = document()
    part = content["problem"]
    for step in where[:-1]:
        part = part[step]
    part[where[-1]] = value
    path = written(tmp_path, content)
    with pytest.raises(InstanceError) as caught:
        read(path)
    assert str(caught.value) == f"{path}: {text}"


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(InstanceError, match=r"no\.json: cannot be read: "):
        read(tmp_path / "no.json")
    with pytest.raises(InstanceError, match=r"bad\.json: is no JSON: "):
        read(written(tmp_path, b"{", "bad.json"))
    with pytest.raises(InstanceError, match=r"bad\.json\.gz: cannot be read: "):
        read(written(tmp_path, b"plain", "bad.json.gz"))
    with pytest.raises(InstanceError, match=r"list\.json: nodes is missing or null; expected an object"):
        read(written(tmp_path, [1], "list.json"))


def test_refused_choices() -> None:
    content = document()["problem"]
    with pytest.raises(InstanceError, match=r"^the solution has 3 strategies; expected 4, one per node$"):
        judge(content, (0, 0, 0))
    with pytest.raises(InstanceError, match=r"^node 2: the solution has strategy 3; expected 0 to 2$"):
        judge(content, (0, 0, 3, 0))


def outcome(**values: Any) -> solver_instances.Outcome:
    return solver_instances.Outcome(
        **{
            "nodes": 1, "edges": 0, "verdict": Verdict(cost=532843, peak=3, limit=3, forbidden=False),
            "reported_cost": 532843.0, "bound": 532843.0, "status": "optimal", "read_s": 0.1, "solve_s": 1.0,
            "phases": (), "peak_bytes": 10**8, **values,
        }
    )  # fmt: skip


def test_misses_of_instances() -> None:
    def misses(name: str, **values: Any) -> list[str]:
        return solver_instances.misses(name, outcome(**values), 60.0)

    def at(cost: int, **values: Any) -> dict[str, Any]:
        verdict = Verdict(cost=cost, peak=3, limit=3, forbidden=False)
        return {"verdict": verdict, "reported_cost": float(cost), "bound": 0.0, **values}

    assert misses("B") == []
    assert misses("B", status="feasible") == ["B: feasible, bar optimal"]
    assert misses("B", verdict=None, status="time_limit") == ["B: no solution (time_limit)"]
    assert misses("B", verdict=Verdict(cost=532843, peak=4, limit=3, forbidden=False)) == [
        "B: infeasible, peak 4 over the limit 3"
    ]
    assert misses("B", verdict=Verdict(cost=10**18, peak=3, limit=3, forbidden=True)) == [
        "B: infeasible, takes a forbidden choice"
    ]
    assert misses("B", reported_cost=532000.0) == ["B: the solver reports a cost of 532000, the judge finds 532843"]
    assert misses("B", bound=532844.0) == ["B: the bound 532844 exceeds a known cost, 532843"]
    assert misses("B", solve_s=61.3) == ["B: 61.3 s, time limit 60 s"]
    assert misses("K", **at(2_150_000_001, peak_bytes=4_500_000_000)) == [
        "K: cost 2150000001, bar 2150000000",
        "K: peak memory 4.50 GB, bar 4 GB",
    ]
    assert misses("V", **at(1_620_000)) == []
    assert misses("S", **at(1_512_027_230)) == ["S: cost 1512027230, bar 1512027229"]


def solved(**values: Any) -> solver_graphs.Solved:
    return solver_graphs.Solved(
        **{
            "seconds": 0.5, "status": "optimal", "objective_s": 1.0, "bound_s": 1.0, "gap": 0.0,
            "peak_memory_bytes": 10**9, "phases": (), **values,
        }
    )  # fmt: skip


def test_misses_of_graphs() -> None:
    folded = GraphCase(model="gpt", mesh=(2, 4), folded=True)
    whole = replace(folded, folded=False)
    good = solver_graphs.Outcome(
        nodes=1,
        edges=1,
        pairs=1,
        before_s=(),
        free=solved(),
        limited=solved(),
        alone=solved(peak_memory_bytes=2 * 10**9),
        joint=solved(),
        recomputing=solved(gap=0.2),
        limit_bytes=1e9,
        tight_bytes=1e9,
        peak_bytes=1,
    )
    assert solver_graphs.misses(folded, good) == []
    assert solver_graphs.misses(folded, replace(good, free=solved(seconds=2.0, gap=2e-4))) == [
        "gpt-2x4-folded: 2.00 s, bar 1 s",
        "gpt-2x4-folded: gap 0.020 %, bar 0.01 %",
    ]
    assert solver_graphs.misses(whole, replace(good, free=solved(seconds=2.0))) == []
    assert solver_graphs.misses(whole, replace(good, limited=solved(seconds=21.0, gap=0.02))) == [
        "gpt-2x4-unfolded, limited: 21.0 s, bar 20 s",
        "gpt-2x4-unfolded, limited: gap 2.00 %, bar 1 %",
    ]
    assert solver_graphs.misses(whole, replace(good, limited=solved(peak_memory_bytes=2 * 10**9))) == [
        "gpt-2x4-unfolded, limited: optimal, peak 2.00 GB, limit 1.00 GB"
    ]
    tight = replace(good, joint=solved(gap=0.02), recomputing=solved(status="infeasible", peak_memory_bytes=2 * 10**9))
    assert solver_graphs.misses(whole, tight) == [
        "gpt-2x4-unfolded, recomputing, the joint problem alone: gap 2.00 %, bar 1 %",
        "gpt-2x4-unfolded, recomputing: infeasible, peak 2.00 GB, limit 1.00 GB",
    ]
    assert solver_graphs.misses(whole, replace(good, joint=None, recomputing=None)) == []
    assert solver_graphs.differences({folded: good, whole: replace(good, free=solved(objective_s=1.0001))}) == []
    assert solver_graphs.differences({folded: good, whole: replace(good, free=solved(objective_s=0.9))}) == [
        "gpt-2x4-folded: objective 1000.0000 ms folded, 900.0000 ms not folded"
    ]


@pytest.mark.slow
def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, document())
    (tmp_path / "contest_costs.csv").write_text(
        "instance,timeout_s,best,first_place,second_place,third_place,xla\nT,20,23,24,,,\n"
    )
    assert solver.main(["--instances", str(tmp_path), "--only", "T"]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("│ T "))
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[:5] == ["T", "23", "23", "24", ""]
    assert cells[8] == "yes" and cells[11] == "20"
    assert "missed" not in out


@pytest.mark.slow
def test_infeasible_instances_are_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = document()
    content["problem"]["usage_limit"] = 9
    written(tmp_path, content)
    assert solver.main(["--instances", str(tmp_path), "--time-limit", "5"]) == 1
    out = capsys.readouterr().out
    assert "missed: T: infeasible, peak 10 over the limit 9" in out or "missed: T: no solution (infeasible)" in out


def test_flags_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        solver.main(["--instances", str(tmp_path)])
    assert f"{tmp_path}: no instance files (*.json, *.json.gz)." in capsys.readouterr().err
    written(tmp_path, document())
    with pytest.raises(SystemExit):
        solver.main(["--instances", str(tmp_path), "--only", "T,X"])
    assert "--only: no X among T" in capsys.readouterr().err


@pytest.mark.slow
def test_children_that_fail() -> None:
    with pytest.raises(ChildError, match=r"^ended with exit status 1$"):
        ask("benchmarks.solver", {"kind": "instance", "path": "/nowhere.json", "time_limit_s": 1.0}, 60.0)
    with pytest.raises(ChildError, match=r"^answered \[\], no JSON$"):
        ask("autopar._version", {}, 60.0)
    with pytest.raises(ChildError, match=r"^no answer after 0 s$"):
        ask("tests.null.several_processes", {}, 0.0)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_memory_of_several_processes_is_added_up() -> None:
    answer = ask("tests.null.several_processes", {}, 60.0)
    assert answer.values["each_bytes"] * 2 < answer.together_bytes < answer.values["each_bytes"] * 4
