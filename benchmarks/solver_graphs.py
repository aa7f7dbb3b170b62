"""The second table of `benchmarks.solver`: autopar's own train steps, folded and not, without and with a limit.

Seconds of a row with a limit are those of lowering the usages and of the second attempt, which starts from the solution
without a limit, as in planning. "recomputing" is the planner's search of groups and shardings at `LIMIT_SHARE` of the
free plan's peak, its first joint problem alone and then all of it; its bound is that of plans without a limit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from autopar.intra_op.mesh_problem import MeshProblem
from autopar.intra_op.plan_search import PlanSearch
from autopar.intra_op.remat.choose import Chooser, Kept, with_recomputation
from autopar.intra_op.solve import solve
from autopar.ir.strategy import Solution, SolverReport
from benchmarks.child import ChildError, ask, peak_rss_bytes
from benchmarks.own_graphs import LIMIT_SHARE, GraphCase, grouped_pairs, limited, pose_case, save
from benchmarks.solver_instances import phases_text

TIME_LIMIT_S = 60.0
"""As `autopar.parallelize` has it."""
PATIENCE_S = 600.0
"""A child is stopped so long after both its time limits."""
GAP_BAR = 1e-4
LIMITED_GAP_BAR = 0.01
LIMITED_BAR_S = 20.0
FOLDED_BAR_S = 1.0
UNFOLDED_BAR_S = {(8,): 3.0, (2, 4): 3.0, (2, 2, 2): 8.0}
"""Mesh → most seconds that solving the GPT without folding and limit may take."""

MESHES = {(8,): "dgx-h100", (2, 4): "dgx-h100", (2, 2, 2): "dgx-h100", (4, 4, 4): "dgx-h100:8"}
CASES = tuple(
    GraphCase(model=model, mesh=mesh, folded=folded, cluster=MESHES[mesh])
    for model, meshes in (
        ("gpt", tuple(MESHES)),
        ("gpt-remat", ((2, 4),)),
        ("moe", ((2, 4),)),
        ("u-transformer", ((2, 4),)),
    )
    for mesh in meshes
    for folded in (True, False)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """One attempt. ``peak_memory_bytes`` of its plan is counted in full; 0 where there is none."""

    seconds: float
    status: str
    objective_s: float
    bound_s: float
    gap: float
    peak_memory_bytes: int
    phases: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One case: without a limit, and with ``limit_bytes``; ``alone`` is the latter as the solver sees it, its usages
    taken at their word. ``joint`` and ``recomputing`` are with recomputation, under ``tight_bytes``, the first as
    ``alone``, the second as planned; None where there is nothing to recompute. ``before_s`` are (phase, seconds) of
    what comes first; ``peak_bytes`` is the measuring process's."""

    nodes: int
    edges: int
    pairs: int
    before_s: tuple[tuple[str, float], ...]
    free: Solved
    limited: Solved
    alone: Solved
    joint: Solved | None
    recomputing: Solved | None
    limit_bytes: float
    tight_bytes: float
    peak_bytes: int


def solve_one(case: GraphCase, time_limit_s: float, directory: Path | None) -> dict[str, Any]:
    """The child's side: poses the problem, solves it without and with a limit, and saves both where ``directory`` is
    given."""
    posed, before_s = pose_case(case)
    problem = posed.problem
    start_s = time.perf_counter()
    unlimited = posed.solve(problem, time_limit_s)
    free = _solved(posed, unlimited, time.perf_counter() - start_s)
    start_s = time.perf_counter()
    tight_problem = limited(posed, free.peak_memory_bytes)
    lowered_s = time.perf_counter() - start_s
    solution = posed.solve(tight_problem, time_limit_s, free=unlimited)
    tight = _solved(posed, solution, time.perf_counter() - start_s)
    start_s = time.perf_counter()
    alone = _solved(posed, solve(tight_problem, posed.seeds, time_limit_s), time.perf_counter() - start_s)
    tight = replace(tight, phases=(("usages", lowered_s), *tight.phases))
    tight_bytes = int(LIMIT_SHARE * free.peak_memory_bytes)
    joint, recomputing = _recomputing(case, posed, unlimited, tight_bytes, time_limit_s)
    peak = peak_rss_bytes()
    if directory is not None:
        save(directory, case.name, posed, problem)
        save(directory, f"{case.name}-limited", posed, tight_problem)
    return asdict(
        Outcome(
            nodes=len(problem.nodes),
            edges=len(problem.edges),
            pairs=grouped_pairs(problem),
            before_s=tuple(before_s.items()),
            free=free,
            limited=tight,
            alone=alone,
            joint=joint,
            recomputing=recomputing,
            limit_bytes=float(tight_problem.limit_bytes or 0.0),
            tight_bytes=float(tight_bytes),
            peak_bytes=peak,
        )
    )


def _recomputing(
    case: GraphCase, posed: MeshProblem, free: Solution, limit: int, time_limit_s: float
) -> tuple[Solved | None, Solved | None]:
    """`Outcome.joint` and `Outcome.recomputing`."""
    search = PlanSearch(posed=posed, solver="auto", deadline=time.perf_counter() + time_limit_s)
    kept = Kept(within=True)
    chooser = Chooser(search, posed.counted(free.choice), free.report, limit, kept)
    if not chooser.count:
        return None, None
    problem = chooser.joint()
    seeds = [chooser.completed((*c.choice, *[g] * chooser.count)) for _, c in posed.baselines for g in (0, 1)]
    start_s = time.perf_counter()
    solution = solve(problem, seeds, time_limit_s)
    taken_s = time.perf_counter() - start_s
    report = solution.report
    peak = int(chooser.live_bytes(solution.choice).max())
    joint = _report(report, taken_s, peak, solution.phases_s)
    start_s = time.perf_counter()
    search = replace(search, deadline=start_s + time_limit_s)
    found = with_recomputation(search, free, search.found(limit, free), limit, kept)
    if found is None:
        return joint, None
    taken_s = time.perf_counter() - start_s
    plan = found.best or found.nearest
    status = "feasible" if found.best is not None else "infeasible"
    report = replace(report, status=status, objective_s=plan.step_s, bound_s=free.report.bound_s)
    return joint, _report(report, taken_s, plan.peak, ())


def _report(report: SolverReport, seconds: float, peak: int, phases: Any) -> Solved:
    return Solved(
        seconds=seconds, status=report.status, objective_s=report.objective_s, bound_s=report.bound_s, gap=report.gap,
        peak_memory_bytes=peak, phases=phases,
    )  # fmt: skip


def _solved(posed: Any, solution: Any, seconds: float) -> Solved:
    peak = posed.counted(solution.choice).peak if solution.choice else 0
    return _report(solution.report, seconds, peak, solution.phases_s)


def measure(case: GraphCase, time_limit_s: float, directory: Path | None) -> Outcome:
    """One case in a fresh process. Raises ChildError where that fails."""
    request = {
        "kind": "graph",
        "case": asdict(case),
        "time_limit_s": time_limit_s,
        "save": None if directory is None else str(directory.resolve()),
    }
    answer = ask("benchmarks.solver", request, 2 * time_limit_s + PATIENCE_S)
    values = dict(answer.values)
    for name in ("free", "limited", "alone", "joint", "recomputing"):
        if values[name] is not None:
            values[name] = Solved(**{**values[name], "phases": _pairs(values[name]["phases"])})
    values["before_s"] = _pairs(values["before_s"])
    values["peak_bytes"] = max(values["peak_bytes"], answer.together_bytes)
    return Outcome(**values)


def case_of(values: dict[str, Any]) -> GraphCase:
    """The inverse of a request's ``asdict(case)``."""
    return GraphCase(**{**values, "mesh": tuple(values["mesh"])})


def _pairs(phases: Any) -> tuple[tuple[str, float], ...]:
    return tuple((name, seconds) for name, seconds in phases)


def misses(case: GraphCase, got: Outcome) -> list[str]:
    """What an outcome misses of the bars, in words."""
    out: list[str] = []
    if case.model == "gpt":
        bar_s = FOLDED_BAR_S if case.folded else UNFOLDED_BAR_S.get(case.mesh)
        if bar_s is not None and got.free.seconds > bar_s:
            out.append(f"{case.name}: {got.free.seconds:.2f} s, bar {bar_s:.0f} s")
        if got.free.gap > GAP_BAR:
            out.append(f"{case.name}: gap {100 * got.free.gap:.3f} %, bar {100 * GAP_BAR:.2f} %")
    for name, limit, tight in (
        ("limited", got.limit_bytes, got.limited),
        ("the problem alone", np.inf, got.alone),
        ("recomputing, the joint problem alone", np.inf, got.joint),
        ("recomputing", got.tight_bytes, got.recomputing),
    ):
        out += [] if tight is None else _tight_misses(f"{case.name}, {name}", limit, tight, name != "recomputing")
    return out


def _tight_misses(name: str, limit: float, got: Solved, proves: bool) -> list[str]:
    """``proves``: its bound is one of what it may choose."""
    if got.status == "infeasible" or got.peak_memory_bytes > limit:
        sizes = f"peak {got.peak_memory_bytes / 1e9:.2f} GB, limit {limit / 1e9:.2f} GB"
        return [f"{name}: {got.status}, {sizes}"]
    out: list[str] = []
    if got.seconds > LIMITED_BAR_S:
        out.append(f"{name}: {got.seconds:.1f} s, bar {LIMITED_BAR_S:.0f} s")
    if proves and got.gap > LIMITED_GAP_BAR:
        out.append(f"{name}: gap {100 * got.gap:.2f} %, bar {100 * LIMITED_GAP_BAR:.0f} %")
    return out


def differences(outcomes: dict[GraphCase, Outcome]) -> list[str]:
    """Where folding changes an objective by more than what both gaps leave open."""
    out: list[str] = []
    for case, folded in outcomes.items():
        whole = outcomes.get(replace(case, folded=False))
        if not case.folded or whole is None:
            continue
        for a, b, limit in ((folded.free, whole.free, ""), (folded.limited, whole.limited, ", limited")):
            room = (max(a.gap, GAP_BAR) + max(b.gap, GAP_BAR)) * max(a.objective_s, b.objective_s)
            if abs(a.objective_s - b.objective_s) > room:
                out.append(
                    f"{case.name}{limit}: objective {1e3 * a.objective_s:.4f} ms folded, "
                    f"{1e3 * b.objective_s:.4f} ms not folded"
                )
    return out


COLUMNS = (
    "nodes", "edges", "1000 pairs", "trace s", "strategies s", "seeds s", "solve s", "status", "objective ms",
    "bound ms", "gap %", "plan GB", "peak GB",
)  # fmt: skip


def run_table(
    console: Console, cases: Sequence[GraphCase], time_limit_s: float | None, directory: Path | None
) -> list[str]:
    """Measures every case, prints the table, and returns what was missed."""
    table = Table(title="autopar's own train steps")
    table.add_column("step and mesh", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    missed: list[str] = []
    outcomes: dict[GraphCase, Outcome] = {}
    for case in cases:
        try:
            with console.status(f"solving {case.name}"):
                got = measure(case, TIME_LIMIT_S if time_limit_s is None else time_limit_s, directory)
        except ChildError as error:
            missed.append(f"{case.name}: {error}")
            table.add_row(case.name, *[""] * COLUMNS.index("status"), "failed")
            continue
        outcomes[case] = got
        missed += misses(case, got)
        before = dict(got.before_s)
        sizes = [str(got.nodes), str(got.edges), f"{got.pairs / 1e3:.0f}"]
        sizes += [f"{before[phase]:.2f}" for phase in ("trace", "strategies", "seeds")]
        table.add_row(case.name, *sizes, *_row(got.free), f"{got.peak_bytes / 1e9:.2f}")
        table.add_row(f"  limit {got.limit_bytes / 1e9:.2f} GB", *[""] * len(sizes), *_row(got.limited))
        table.add_row("  the problem alone", *[""] * len(sizes), *_row(got.alone))
        if got.joint is not None and got.recomputing is not None:
            table.add_row(f"  recomputing {got.tight_bytes / 1e9:.2f} GB", *[""] * len(sizes), *_row(got.recomputing))
            table.add_row("  the joint problem alone", *[""] * len(sizes), *_row(got.joint))
        for name, solved in ((case.name, got.free), (f"{case.name}, limited", got.limited)):
            if solved.phases:
                console.print(phases_text(name, solved.phases))
    console.print(table)
    return missed + differences(outcomes)


def _row(got: Solved) -> list[str]:
    return [
        f"{got.seconds:.2f}",
        got.status,
        f"{got.objective_s * 1e3:.4f}",
        f"{got.bound_s * 1e3:.4f}",
        f"{got.gap * 100:.3f}",
        f"{got.peak_memory_bytes / 1e9:.2f}",
    ]
