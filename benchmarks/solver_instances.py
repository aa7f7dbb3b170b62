"""The first table of `benchmarks.solver`: the contest's instances, judged exactly."""

from __future__ import annotations

import csv
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from autopar.intra_op.solve import solve
from benchmarks.child import ChildError, ask, peak_rss_bytes
from benchmarks.instances import InstanceError, Verdict, judge, load, read
from benchmarks.solver_team import EXHAUST

TIME_LIMIT_S = 300.0
"""For instances that the contest's costs do not list."""
LATE = 1.02
"""A solution counts as late from this multiple of its time limit on: clocks are read between steps."""
PATIENCE_S = 120.0
"""A child is stopped so long after twice its time limit: reading is not part of the limit."""
GAP = 1e-9
"""Costs are whole numbers below 10⁹·²: an optimum is proven exactly."""
BEST_KNOWN = {
    "A": 6548553650,
    "B": 532843,
    "D": 309195190496,
    "G": 217039,
    "K": 2130826095,
    "S": 1511272366,
    "V": 1617092,
}
"""Best costs known of any solver (A, B, D, G: optimal)."""
ROUNDING = 1e-9
"""Bounds may exceed a cost by this part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What an instance must reach: a proven optimum, a cost, a peak of its process's memory."""

    optimal: bool = False
    cost: float | None = None
    peak_bytes: int | None = None


BARS = {
    "A": Bar(optimal=True),
    "B": Bar(optimal=True),
    "D": Bar(optimal=True),
    "G": Bar(optimal=True),
    "K": Bar(cost=2.15e9, peak_bytes=4_000_000_000),
    "S": Bar(cost=1.0005 * 1511271594),
    "V": Bar(cost=1_620_000),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What the contest says of an instance; costs None where it has none."""

    time_limit_s: float = TIME_LIMIT_S
    best: int | None = None
    first_place: int | None = None
    xla: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One instance solved. ``cost``, ``bound`` and ``reported_cost`` are in the instance's units; ``verdict`` is None
    where there was no solution. ``peak_bytes`` includes reading."""

    nodes: int
    edges: int
    verdict: Verdict | None
    reported_cost: float
    bound: float
    status: str
    read_s: float
    solve_s: float
    phases: tuple[tuple[str, float], ...]
    peak_bytes: int


def instance_files(directory: Path) -> dict[str, Path]:
    """Name → file of every instance in a directory, sorted. Raises InstanceError where there is none."""
    found = {
        path.name.removesuffix(".gz").removesuffix(".json"): path
        for path in sorted(directory.glob("*.json*"))
        if path.name.endswith((".json", ".json.gz"))
    }
    if not found:
        raise InstanceError(
            f"{directory}: no instance files (*.json, *.json.gz). Name their directory: --instances DIR"
        )
    return found


def references(directory: Path) -> dict[str, Reference]:
    """Name → what ``contest_costs.csv`` of the directory says; empty without that file."""
    path = directory / "contest_costs.csv"
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {
            row["instance"]: Reference(
                time_limit_s=float(row["timeout_s"]),
                **{name: int(row[name]) if row[name] else None for name in ("best", "first_place", "xla")},
            )
            for row in csv.DictReader(file)
        }


def solve_one(path: Path, time_limit_s: float) -> dict[str, Any]:
    """The child's side: reads and solves, and says what it took. The judge is another child, so that what it holds is
    not counted."""
    start_s = time.perf_counter()
    problem = read(path)
    read_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    solution = solve(problem, (), time_limit_s, gap=GAP, effort=EXHAUST)
    solve_s = time.perf_counter() - start_s
    return {
        "nodes": len(problem.nodes),
        "edges": len(problem.edges),
        "choice": [int(s) for s in solution.choice],
        "reported_cost": solution.report.objective_s,
        "bound": solution.report.bound_s,
        "status": solution.report.status,
        "read_s": read_s,
        "solve_s": solve_s,
        "phases": solution.phases_s,
        "peak_bytes": peak_rss_bytes(),
    }


def judge_one(path: Path, choice: Sequence[int]) -> dict[str, Any]:
    """The judging child's side."""
    return asdict(judge(load(path), choice))


def phases_text(name: str, phases: Sequence[tuple[str, float]]) -> str:
    """One line: ``A: lower 0.50 s, …``."""
    return f"{name}: " + ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in phases)


def measure(path: Path, time_limit_s: float) -> Outcome:
    """One instance in fresh processes. Raises ChildError where one of them fails."""
    request = {"kind": "instance", "path": str(path.resolve()), "time_limit_s": time_limit_s}
    answer = ask("benchmarks.solver", request, 2 * time_limit_s + PATIENCE_S)
    values = dict(answer.values)
    choice = values.pop("choice")
    verdict = None
    if choice:
        request = {"kind": "judge", "path": str(path.resolve()), "choice": choice}
        verdict = Verdict(**ask("benchmarks.solver", request, PATIENCE_S).values)
    values["phases"] = tuple((name, seconds) for name, seconds in values["phases"])
    values["peak_bytes"] = max(values["peak_bytes"], answer.together_bytes)
    return Outcome(verdict=verdict, **values)


def misses(name: str, got: Outcome, time_limit_s: float) -> list[str]:
    """What an outcome misses, in words."""
    out: list[str] = []
    bar, verdict = BARS.get(name, Bar()), got.verdict
    if verdict is None:
        return [f"{name}: no solution ({got.status})"]
    if not verdict.feasible:
        held = (
            "takes a forbidden choice" if verdict.forbidden else f"peak {verdict.peak} over the limit {verdict.limit}"
        )
        out.append(f"{name}: infeasible, {held}")
    elif abs(got.reported_cost - verdict.cost) > 1e-6 * max(1, verdict.cost):
        out.append(f"{name}: the solver reports a cost of {got.reported_cost:.0f}, the judge finds {verdict.cost}")
    reached = (BEST_KNOWN.get(name), verdict.cost if verdict.feasible else None)
    known = min((cost for cost in reached if cost is not None), default=None)
    if known is not None and got.bound > known * (1 + ROUNDING):
        out.append(f"{name}: the bound {got.bound:.0f} exceeds a known cost, {known}")
    if bar.optimal and got.status != "optimal":
        out.append(f"{name}: {got.status}, bar optimal")
    if bar.cost is not None and verdict.cost > bar.cost:
        out.append(f"{name}: cost {verdict.cost}, bar {int(bar.cost)}")
    if bar.peak_bytes is not None and got.peak_bytes > bar.peak_bytes:
        out.append(f"{name}: peak memory {got.peak_bytes / 1e9:.2f} GB, bar {bar.peak_bytes / 1e9:.0f} GB")
    if got.solve_s > LATE * time_limit_s:
        out.append(f"{name}: {got.solve_s:.1f} s, time limit {time_limit_s:.0f} s")
    return out


COLUMNS = (
    "cost", "best known", "1st place", "XLA", "bound", "gap %", "status", "feasible", "read s", "solve s", "limit s",
    "peak GB",
)  # fmt: skip


def run_table(console: Console, files: dict[str, Path], time_limit_s: float | None) -> list[str]:
    """Measures every file, prints the table, and returns what was missed. ``time_limit_s`` None: the contest's."""
    table = Table(title="The contest's instances, costs in their own units")
    table.add_column("instance", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    missed: list[str] = []
    for name, path in files.items():
        said = references(path.parent).get(name, Reference())
        limit_s = said.time_limit_s if time_limit_s is None else time_limit_s
        try:
            with console.status(f"solving {name}, up to {limit_s:.0f} s"):
                got = measure(path, limit_s)
        except ChildError as error:
            missed.append(f"{name}: {error}")
            table.add_row(name, *[""] * COLUMNS.index("status"), "failed")
            continue
        missed += misses(name, got, limit_s)
        table.add_row(name, *_row(name, got, said, limit_s))
        if got.phases:
            console.print(phases_text(name, got.phases))
    console.print(table)
    return missed


def _row(name: str, got: Outcome, said: Reference, limit_s: float) -> list[str]:
    cost = None if got.verdict is None else got.verdict.cost
    gap = "" if not cost else f"{100 * max(0.0, cost - got.bound) / cost:.4f}"
    return [
        _count(cost),
        _count(BEST_KNOWN.get(name, said.best)),
        _count(said.first_place),
        _count(said.xla),
        f"{got.bound:.0f}",
        gap,
        got.status,
        "yes" if got.verdict is not None and got.verdict.feasible else "no",
        f"{got.read_s:.1f}",
        f"{got.solve_s:.1f}",
        f"{limit_s:.0f}",
        f"{got.peak_bytes / 1e9:.2f}",
    ]


def _count(number: int | None) -> str:
    return "" if number is None else str(number)
