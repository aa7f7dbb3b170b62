"""The best plan of one strategy graph under a memory limit: the solver's choices, judged by what they count to.

The solver sees an estimate of memory (`usages`); what fits is decided by counting a choice in full (`Candidate`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.intra_op.evaluate import Evaluator
from autopar.intra_op.extract import decide, totals
from autopar.intra_op.liveness import Liveness
from autopar.intra_op.peak import live_bytes
from autopar.intra_op.problem import build_problem
from autopar.intra_op.seeds import restrict
from autopar.intra_op.solve import solve
from autopar.intra_op.strategy_graph import StrategyGraph
from autopar.ir.graph import Graph
from autopar.ir.plan import Recompute
from autopar.ir.strategy import Problem, Solution, SolverReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What is chosen from: the strategies of ``source``, the graph with ``recompute`` carried out; ``masks``: cluster →
    allowed states."""

    source: Graph
    recompute: tuple[Recompute, ...]
    graph: StrategyGraph
    live: Liveness
    masks: Mapping[int, Any]


class Candidate:
    """A choice of states with what it is predicted to cost when all is counted: chains shared, buffers included."""

    def __init__(self, space: Space, choice: Sequence[int]) -> None:
        self.space = space
        self.choice = tuple(choice)
        self.out = decide(space.graph, self.choice)
        self.compute_s, self.communication_s, self.flops = totals(self.out)
        self.step_s = self.compute_s + self.communication_s
        self.live_bytes = live_bytes(self.out, space.live)
        self.peak = int(self.live_bytes.max(initial=0.0))
        self.recompute = space.recompute
        """As the plan has it; see `remat.carry.measured`."""
        self.worst = int(np.argmax(self.live_bytes)) if len(self.live_bytes) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """``best`` fits, or is None; ``nearest`` has the least peak of all that were counted. ``least_bytes`` bounds every
    plan's peak from below. ``solution`` is the solver's, over the allowed states."""

    report: SolverReport
    best: Candidate | None
    nearest: Candidate
    least_bytes: float
    solution: Solution


class Search:
    """The search in one space until ``deadline`` (of time.perf_counter); ``seeds`` are choices to start from."""

    def __init__(self, space: Space, seeds: Sequence[Sequence[int]], solver: str, deadline: float) -> None:
        self.space, self.solver, self.deadline = space, solver, deadline
        self.tried: dict[tuple[int, ...], Candidate] = {}
        self.problem = build_problem(space.graph, space.live, None)
        _, self.keep = restrict(self.problem, space.masks)
        self.seeds = [self.candidate(seed) for seed in seeds]

    def candidate(self, choice: Sequence[int]) -> Candidate:
        """The candidate of a choice of states, counted once."""
        key = tuple(int(s) for s in choice)
        if key not in self.tried:
            self.tried[key] = Candidate(self.space, key)
        return self.tried[key]

    def whole(self, choice: Sequence[int]) -> tuple[int, ...]:
        """States of a choice among the allowed ones."""
        return tuple(int(k[s]) for s, k in zip(choice, self.keep, strict=True))

    def inside(self, choice: Sequence[int]) -> tuple[int, ...]:
        """A choice of states, among the allowed ones."""
        return tuple(int(np.searchsorted(k, s)) for s, k in zip(choice, self.keep, strict=True))

    def free(self) -> Solution:
        """The solver's plan without a limit."""
        return self._attempt(self.problem, None)

    def limited(self, limit: int, free: Solution) -> Found:
        """The best of the solver's plans and the seeds, by what is counted, among those that fit. ``free`` exceeds the
        limit, or its choice is only a start. Usages are added to the problem here: they are an estimate."""
        problem = build_problem(self.space.graph, self.space.live, float(limit))
        least = Evaluator(problem).least_peak()
        solution = self._attempt(problem, free) if least <= limit else free
        return self.found(limit, solution, least)

    def found(self, limit: int, solution: Solution, least: float = 0.0) -> Found:
        """What there is so far."""
        report, best = solution.report, self.candidate(self.whole(solution.choice))
        fitting = [c for c in (best, *self.tried.values()) if c.peak <= limit]
        nearest = min(self.tried.values(), key=lambda c: c.peak)
        if not fitting:
            return Found(report=report, best=None, nearest=nearest, least_bytes=least, solution=solution)
        cheapest = min(fitting, key=lambda c: c.step_s)
        if best.peak > limit or cheapest is not best:
            status = "optimal" if report.status == "optimal" and cheapest.step_s <= best.step_s else "feasible"
            report = replace(report, status=status, objective_s=max(cheapest.step_s, report.bound_s), over_bytes=0.0)
        return Found(report=report, best=cheapest, nearest=nearest, least_bytes=least, solution=solution)

    def _attempt(self, problem: Problem, free: Solution | None) -> Solution:
        left = max(0.5, self.deadline - time.perf_counter())
        seeds = [self.inside(c.choice) for c in self.seeds]
        return solve(
            restrict(problem, self.space.masks)[0],
            seeds,
            left,
            self.solver,
            free,
            lambda c: self.candidate(self.whole(c)).live_bytes,
        )
