"""From the solver's choices to plans: one step posed as a problem, its choices counted in full, and the best that fits.

The solver sees an estimate of memory (`usages`); what fits is decided by counting a choice in full (`Candidate`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.intra_op.decisions import decide, totals
from autopar.intra_op.evaluate import Evaluator
from autopar.intra_op.liveness import Liveness
from autopar.intra_op.peak import live_bytes
from autopar.intra_op.problem import build_problem
from autopar.intra_op.seeds import restrict
from autopar.intra_op.solve import solve
from autopar.intra_op.strategy_graph import StrategyGraph
from autopar.ir.graph import Graph
from autopar.ir.plan import Recompute
from autopar.ir.strategy import Problem, Solution, SolverReport


class Candidate:
    """A choice of states with what it is predicted to cost when all is counted: chains shared, buffers included."""

    def __init__(self, posed: Posed, choice: Sequence[int]) -> None:
        self.posed = posed
        self.choice = tuple(choice)
        self.out = decide(posed.graph, self.choice)
        self.compute_s, self.communication_s, self.flops = totals(self.out)
        self.step_s = self.compute_s + self.communication_s
        self.live_bytes = live_bytes(self.out, posed.live)
        self.peak = int(self.live_bytes.max(initial=0.0))
        self.worst = int(np.argmax(self.live_bytes)) if len(self.live_bytes) else 0


class Posed:
    """One step on one mesh, ready to be solved.

    ``source`` is the step with ``recompute`` carried out. ``problem`` has no limit and all states. The solver sees only
    the states that ``masks`` (cluster → bool[states]) allow: choices that it takes and gives number those (`inside`,
    `states`).
    """

    def __init__(
        self,
        source: Graph,
        recompute: tuple[Recompute, ...],
        graph: StrategyGraph,
        live: Liveness,
        masks: Mapping[int, Any],
    ) -> None:
        self.source, self.recompute, self.graph, self.live, self.masks = source, recompute, graph, live, masks
        self.problem = build_problem(graph, live, None)
        self.baselines: list[tuple[str, Candidate]] = []
        """Where the solver starts, by method."""
        _, self._keep = restrict(self.problem, masks)
        self._counted: dict[tuple[int, ...], Candidate] = {}

    @property
    def seeds(self) -> list[tuple[int, ...]]:
        """The baselines' choices, for the solver."""
        return [self.inside(c.choice) for _, c in self.baselines]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All that was counted so far, baselines that the solver did not ask for last."""
        return tuple(dict.fromkeys((*self._counted.values(), *(c for _, c in self.baselines))))

    def start(self, method: str, states: Sequence[int]) -> Candidate:
        """Adds a baseline."""
        baseline = Candidate(self, [int(s) for s in states])
        self.baselines.append((method, baseline))
        return baseline

    def states(self, choice: Sequence[int]) -> tuple[int, ...]:
        """A solver's choice → states among all."""
        return tuple(int(k[s]) for s, k in zip(choice, self._keep, strict=True))

    def inside(self, states: Sequence[int]) -> tuple[int, ...]:
        """States among all → the choice as the solver has it."""
        return tuple(int(np.searchsorted(k, s)) for s, k in zip(states, self._keep, strict=True))

    def count(self, choice: Sequence[int]) -> Candidate:
        """What a solver's choice costs when all is counted."""
        return self.counted(self.states(choice))

    def counted(self, states: tuple[int, ...]) -> Candidate:
        """What a choice of states costs when all is counted."""
        if states not in self._counted:
            same = (c for _, c in self.baselines if c.choice == states)
            self._counted[states] = next(same, None) or Candidate(self, states)
        return self._counted[states]

    def limited(self, limit_bytes: float) -> Problem:
        """The problem with usages and a limit, in bytes per device. Usages are an estimate: what fits is decided by
        counting (`count`)."""
        return build_problem(self.graph, self.live, limit_bytes)

    def solve(
        self, problem: Problem, time_limit_s: float, solver: str = "auto", free: Solution | None = None
    ) -> Solution:
        """Solves ``problem``, this one's own or a `limited` one; then ``free`` is the solution without the limit."""
        view, _ = restrict(problem, self.masks)
        return solve(view, self.seeds, time_limit_s, solver, free, lambda choice: self.count(choice).live_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """``best`` fits, or is None; ``nearest`` has the least peak of all that were counted. ``least_bytes`` bounds every
    plan's peak from below."""

    report: SolverReport
    best: Candidate | None
    nearest: Candidate
    least_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSearch:
    """The search for one step's best plan until ``deadline`` (of time.perf_counter)."""

    posed: Posed
    solver: str
    deadline: float

    @property
    def left_s(self) -> float:
        """Seconds for the next call of the solver: also where the deadline has passed, it gets a moment."""
        return max(0.5, self.deadline - time.perf_counter())

    def free(self) -> Solution:
        """The solver's plan without a limit."""
        return self.posed.solve(self.posed.problem, self.left_s, self.solver)

    def limited(self, limit: int, free: Solution) -> FoundPlan:
        """The best under a limit that ``free`` exceeds, or of which ``free`` is only a start. Usages are added to the
        problem only here."""
        problem = self.posed.limited(float(limit))
        least = Evaluator(problem).least_peak()
        if least <= limit:
            free = self.posed.solve(problem, self.left_s, self.solver, free)
        return self.found(limit, free, least)

    def found(self, limit: int, solution: Solution, least: float = 0.0) -> FoundPlan:
        """The best of the solver's plans and the baselines, by what is counted, among those that fit."""
        report, found = solution.report, self.posed.count(solution.choice)
        fitting = [c for c in self.posed.candidates if c.peak <= limit]
        best = min(fitting, key=lambda c: c.step_s, default=None)
        if best is not None and best is not found:
            status = "optimal" if report.status == "optimal" and best.step_s <= found.step_s else "feasible"
            report = replace(report, status=status, objective_s=max(best.step_s, report.bound_s), over_bytes=0.0)
        nearest = min(self.posed.candidates, key=lambda c: c.peak)
        return FoundPlan(report=report, best=best, nearest=nearest, least_bytes=least)
