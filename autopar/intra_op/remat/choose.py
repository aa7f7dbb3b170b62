"""The plan with rematerialisation: groups from a reference plan, the joint problem, and the rewritten graph's own plan.

1. From a reference plan: candidates, cuts and groups (`forward`, `cuts`, `groups`).
2. The groups that are best while everything is sharded as in the reference plan; then, from there, groups and shardings
   together: the joint problem (`joint`).
3. What is recomputed is written into the graph (`ir.recompute`), where everything is counted like any other plan's:
   what is repeated starts out sharded as the first time. Where that is over the limit, or leaves much of it, 2 is
   repeated with the limit lowered or raised by as much.
4. The best rewritten graph's shardings are searched like any other graph's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.intra_op.problem import build_problem
from autopar.intra_op.remat.carry import carried_over, measured
from autopar.intra_op.remat.forward import Readers, candidates
from autopar.intra_op.remat.groups import Choices, choices, entries, named
from autopar.intra_op.remat.joint import groups_problem, joint_problem
from autopar.intra_op.search import Candidate, Found, Search, Space
from autopar.intra_op.seeds import restrict
from autopar.intra_op.solve import GAP, solve
from autopar.ir.graph import Graph
from autopar.ir.plan import Recompute
from autopar.ir.recompute import rewritten
from autopar.ir.strategy import Problem, Solution, SolverReport

ROUNDS = 4
"""How often the groups are chosen for one reference, with the limit moved in between."""
OVERSHOOT = 1.3
"""How much more than what a trial is over the limit the next one's is lowered (guessed)."""
SLACK = 0.03
"""Part of the limit that a plan may leave unused without another round (guessed)."""
WORTH = 0.01
"""A plan that fits is this much slower than the one without a limit, or recomputation is not tried (guessed)."""

MakeSpace = Callable[[Graph, tuple[Recompute, ...]], Space]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Where compilers keep a recomputation: ``within`` one body, that of the step or of a loop."""

    within: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A choice of the joint problem, and what it counts to in the rewritten graph."""

    choice: tuple[int, ...]
    counted: Candidate


def with_recomputation(
    search: Search, free: Solution, found: Found, limit: int, make: MakeSpace, kept: Kept
) -> Found | None:
    """The best plan that recomputes something; None where there is nothing to recompute. ``free`` is the solution
    without a limit, ``found`` the search's result under the limit."""
    references = dict.fromkeys([search.candidate(search.whole(free.choice)), found.best or found.nearest])
    choosers = [_Chooser(search, reference, free.report, limit, make, kept) for reference in references]
    choosers = [c for c in choosers if c.count]
    for chooser in choosers:
        chooser.rounds()
    if not any(c.trials for c in choosers):
        return None
    chooser = min((c for c in choosers if c.trials), key=lambda c: c.rank(c.best))
    chooser.together()
    return chooser.searched()


def better(kept: Found, again: Found, bound_s: float) -> Found:
    """Of two searches, without and with recomputation, the one whose plan fits and is faster; where none fits, the one
    that came nearer. Their own bounds, of seconds and bytes, hold for what they kept, and are given up for ``bound_s``,
    that of plans without a limit."""
    if again.best is not None and (kept.best is None or again.best.step_s < kept.best.step_s):
        chosen = again
    elif kept.best is not None:
        chosen = kept
    else:
        chosen = min(kept, again, key=lambda found: found.nearest.peak)
    return replace(chosen, report=_bounded(chosen.report, bound_s), least_bytes=0.0)


def _bounded(report: SolverReport, bound_s: float) -> SolverReport:
    """The report where ``bound_s`` is all that is proven."""
    bound_s = min(bound_s, report.objective_s)
    proven = report.objective_s - bound_s <= GAP * report.objective_s
    status = "feasible" if report.status == "optimal" and not proven else report.status
    return replace(report, bound_s=bound_s, status=status)


class _Chooser:
    def __init__(
        self, search: Search, reference: Candidate, bound: SolverReport, limit: int, make: MakeSpace, kept: Kept
    ) -> None:
        self.search, self.reference, self.bound, self.limit, self.make = search, reference, bound, limit, make
        self.space = search.space
        self.first = len(self.space.graph.roots)
        flat, live = self.space.graph.flat, self.space.live
        over = np.maximum(reference.live_bytes - min(limit, 0.98 * reference.peak), 0.0)
        pressure = over / max(float(over.sum()), 1e-30)
        readers = Readers(flat)
        self.regions: list[Choices] = []
        for region in flat.regions:
            if kept.within and region.kind in ("step", "scan"):
                found = candidates(reference.out, live, readers, region.id, pressure)
                self.regions.append(choices(flat, live, region.id, found))
        self.regions = [r for r in self.regions if r.groups]
        self.levels = [g.level for r in self.regions for g in r.groups]
        self.count = len(self.levels)
        self.trials: list[_Trial] = []
        self.room = float(limit)
        self.problem: Problem | None = None

    def rank(self, trial: _Trial) -> tuple[float, float]:
        """What fits first, then by seconds; what does not by bytes."""
        over = max(0, trial.counted.peak - self.limit)
        return over, trial.counted.step_s

    @property
    def best(self) -> _Trial:
        """The best trial."""
        return min(self.trials, key=self.rank)

    def rounds(self) -> None:
        """The groups that are best at the reference's shardings, for limits nearer and nearer to what is counted."""
        tops = sorted(set(self.levels))
        seeds = [tuple(int(g <= level) for g in self.levels) for level in tops]
        for _ in range(ROUNDS):
            small = groups_problem(self._joint(), self.reference.choice, self.first, self.reference.live_bytes)
            start = Solution(choice=seeds[0], report=replace(self.bound, bound_s=0.0))
            solution = solve(small, seeds, self._left(), self.search.solver, start)
            trial = self._trial((*self.reference.choice, *solution.choice))
            if trial is None or time.perf_counter() > self.search.deadline:
                return
            left = self.limit - trial.counted.peak
            if 0 <= left <= SLACK * self.limit:
                return
            self.room += left if left > 0 else OVERSHOOT * left

    def together(self) -> None:
        """Shardings and groups chosen together, from what was found so far."""
        problem = self._joint()
        small, keep = restrict(problem, self.space.masks)

        def whole(choice: Sequence[int]) -> tuple[int, ...]:
            return tuple(int(k[s]) for s, k in zip(choice, keep, strict=True))

        def counted(choice: tuple[int, ...]) -> Any:
            picked = whole(choice)
            return self.search.candidate(picked[: self.first]).live_bytes + _held(problem, picked, self.first)

        best = self.best.choice
        starts = (best, *((*c.choice, *best[self.first :]) for c in self.search.seeds))
        seeds = [(*self.search.inside(choice[: self.first]), *choice[self.first :]) for choice in starts]
        start = Solution(choice=seeds[0], report=self.bound)
        self._trial(whole(solve(small, seeds, self._left(), self.search.solver, start, counted).choice))

    def searched(self) -> Found:
        """The search in the best trial's graph."""
        best = self.best
        search = Search(best.counted.space, [best.counted.choice], self.search.solver, self.search.deadline)
        found = search.limited(self.limit, Solution(choice=search.inside(best.counted.choice), report=self.bound))
        for candidate in {id(c): c for c in (found.best, found.nearest) if c is not None}.values():
            candidate.recompute = measured(self.space, candidate)
        return found

    def _joint(self) -> Problem:
        if self.problem is None:
            base = build_problem(self.space.graph, self.space.live, self.room)
            self.problem = joint_problem(base, self.reference.out, self.regions)
        return replace(self.problem, limit_bytes=self.room)

    def _left(self) -> float:
        return max(0.5, self.search.deadline - time.perf_counter())

    def _trial(self, choice: tuple[int, ...]) -> _Trial | None:
        """A choice of the joint problem, counted; None where it recomputes nothing, or was tried."""
        recompute = self._entries(choice)
        if not recompute or any(t.choice == choice for t in self.trials):
            return None
        space = self.make(rewritten(self.space.source, recompute), recompute)
        trial = _Trial(choice=choice, counted=Candidate(space, carried_over(self.space, space, choice)))
        self.trials.append(trial)
        return trial

    def _entries(self, choice: Sequence[int]) -> tuple[Recompute, ...]:
        flat, at = self.space.graph.flat, self.first
        out: list[Recompute] = []
        for region in self.regions:
            chosen = [k for k in range(len(region.groups)) if choice[at + k]]
            at += len(region.groups)
            out += named(flat, region.region, entries(flat, region, chosen))
        return tuple(out)


def _held(problem: Problem, choice: Sequence[int], first: int) -> Any:
    """float64[times]: what the groups, nodes from ``first`` on, add to the live bytes."""
    delta = np.zeros(len(problem.fixed_bytes) + 1)
    for e in problem.edges:
        if e.b >= first:
            for size, spans in e.usages:
                held = size[e.rows[choice[e.a]], e.cols[choice[e.b]]]
                for start, stop in spans if held else ():
                    delta[start] += held
                    delta[stop] -= held
    return np.cumsum(delta)[:-1]
