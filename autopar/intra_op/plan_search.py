"""The search for a step's best plan: what the solver finds and the baselines, counted in full, and the best that fits.

In: a `MeshProblem` with its baselines, a solver's name, a deadline. Out: a `FoundPlan`, the x of least step_s(x) with
peak(x) ≤ limit among the candidates (`PlanSearch.found`). These are the baselines and what the solver looks at: without
a limit (`PlanSearch.free`), then, where that exceeds the limit, of the problem with memory rows (`PlanSearch.limited`).

The solver sees an estimate of memory (`intra_op.usages`); what fits is decided by counting a choice in full
(`Candidate`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from autopar.intra_op.evaluate import Evaluator
from autopar.intra_op.mesh_problem import Candidate, MeshProblem
from autopar.ir.strategy import Solution, SolverReport

SOLVE_S = 60.0
"""Seconds that the solver has at most for one mesh, also where the search has no limit (guessed)."""
EXCESS = 0.01
"""Of a step's time, by which a plan takes longer than the problem had it (chosen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """``best`` fits, or is None; ``nearest`` has the least peak of all that were counted. ``least_bytes`` bounds every
    plan's peak from below; 0 where nothing is known. ``report`` is the solver's, of ``best`` where there is one."""

    report: SolverReport
    best: Candidate | None
    nearest: Candidate
    least_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSearch:
    """The search for one step's best plan until ``deadline`` (of time.perf_counter); ``solver`` as in `solve.solve`."""

    posed: MeshProblem
    solver: str
    deadline: float

    @property
    def left_s(self) -> float:
        """Seconds for the next call of the solver: also where the deadline has passed, it gets a moment."""
        return max(0.5, self.deadline - time.perf_counter())

    def free(self) -> Solution:
        """The solver's plan without a limit. Where its collectives would take longer than the compute that they run
        beside, what is best if none does is a baseline, too."""
        found = self.posed.solve(self.posed.problem, self.left_s, self.solver)
        if found.report.fits and self.posed.counted(found.choice).step_s > (1 + EXCESS) * found.report.objective_s:
            shown = self.posed.solve(self.posed.all_shown, self.left_s, self.solver)
            if shown.report.fits:
                self.posed.start("", shown.choice)
        return found

    def limited(self, limit: int, free: Solution) -> FoundPlan:
        """The best plan under ``limit`` bytes per device. ``free``: the solution without a limit, which exceeds it; or
        another start, with a bound that holds without a limit. Usages are added to the problem only here."""
        problem = self.posed.limited(float(limit))
        least = Evaluator(problem).least_peak()
        if least <= limit:
            free = self.posed.solve(problem, self.left_s, self.solver, free)
        return self.found(limit, free, least)

    def found(self, limit: int, solution: Solution, least: float = 0.0) -> FoundPlan:
        """The best of the solver's plans and the baselines, by what is counted, among those that fit ``limit`` bytes
        per device; ``solution`` is the solver's last, ``least`` the `FoundPlan.least_bytes`."""
        report, found = solution.report, self.posed.counted(solution.choice)
        fitting = [c for c in self.posed.candidates if c.peak <= limit]
        best = min(fitting, key=lambda c: c.step_s, default=None)
        if best is not None and best is not found:
            status = "optimal" if report.status == "optimal" and best.step_s <= found.step_s else "feasible"
            report = replace(report, status=status, objective_s=max(best.step_s, report.bound_s), over_bytes=0.0)
        nearest = min(self.posed.candidates, key=lambda c: c.peak)
        return FoundPlan(report=report, best=best, nearest=nearest, least_bytes=least)
