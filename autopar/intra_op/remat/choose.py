"""The plan with rematerialisation: groups from a reference plan, the joint problem, and the rewritten graph's own plan.

1. From a reference plan: forward nodes, cuts and groups (`remat.forward`, `remat.cuts`, `remat.joint_groups`).
2. Groups and shardings are chosen together: the joint problem (`remat.joint`). Weights that both passes gather alike
   are gathered twice as far as the limit asks for it (`remat.apart`).
3. What is recomputed is written into the graph (`remat.rewrite`), where everything is counted like any other plan's:
   what is repeated starts out sharded as the first time (`remat.carry`). Where that is over the limit, or leaves much
   of it, 2 is repeated with the limit lowered or raised by as much (`Chooser.rounds`).
4. The best rewritten graph's shardings are searched like any other graph's (`Chooser.searched`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.intra_op.mesh_problem import Candidate
from autopar.intra_op.plan_search import FoundPlan, PlanSearch
from autopar.intra_op.remat.apart import Shared, shared_gathers
from autopar.intra_op.remat.carry import carried_over
from autopar.intra_op.remat.forward import Readers, forward_nodes
from autopar.intra_op.remat.joint import Joint, joint_problem
from autopar.intra_op.remat.joint_groups import Choices, choices, entries, named, named_by_path
from autopar.intra_op.remat.rewrite import rewritten
from autopar.intra_op.seeds import restrict
from autopar.intra_op.solve import GAP, solve
from autopar.ir.sharding_plan import Recompute
from autopar.ir.strategy import Problem, Solution, SolverReport

ROUNDS = 4
"""How often the groups are chosen for one reference, with the limit moved in between."""
OVERSHOOT = 1.3
"""How much more than what a trial is over the limit the next one's is lowered (guessed)."""
SLACK = 0.03
"""Part of the limit that a plan may leave unused without another round (guessed)."""
WORTH = 0.01
"""A plan that fits is this much slower than the one without a limit, or recomputation is not tried (guessed)."""

UNDONE = "XLA's CPU compiler before jax 0.12 undoes it"
"""Why nothing is recomputed where `Kept.within` is False."""

SHARE = 0.2
"""Part of the time left that the rewritten graph's search gets, where its start fits; else twice as much (guessed: few
searches that take longer find a plan)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Where compilers keep a recomputation. ``within``: True where they do within one body, that of the step or of a
    loop; False: nothing is recomputed."""

    within: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A choice of the joint problem, and what it counts to in the rewritten graph."""

    choice: tuple[int, ...]
    counted: Candidate


def with_recomputation(
    search: PlanSearch, free: Solution, found: FoundPlan, limit: int, kept: Kept
) -> FoundPlan | None:
    """The best plan found that recomputes something; None where there is nothing to recompute.

    Args:
        search: the search for the plan without recomputation, of which this uses what time is left.
        free: the solution without a limit; ``found``: the search's result under it. Their plans are the references.
        limit: bytes per device.
        kept: where the compiler keeps recomputations.
    """
    if all(node is None or node.phase == "forward" for node in search.posed.graph.flat.node):
        return None  # nothing is read late
    references = dict.fromkeys([search.posed.counted(free.choice), found.best or found.nearest])
    choosers = [Chooser(search, reference, free.report, limit, kept) for reference in references]
    for chooser in choosers:
        chooser.rounds()
        if chooser.trials and chooser.best.counted.peak <= limit:
            break
    choosers = [c for c in choosers if c.trials]
    if not choosers:
        return None
    return min(choosers, key=lambda c: c.rank(c.best)).searched()


def better(kept: FoundPlan, again: FoundPlan, bound_s: float) -> FoundPlan:
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


class Chooser:
    """Chooses what to recompute, with groups made from the plan ``reference``, so that it fits ``limit`` bytes per
    device. ``bound``: the report of the solution without a limit, whose bound holds here too."""

    def __init__(self, search: PlanSearch, reference: Candidate, bound: SolverReport, limit: int, kept: Kept) -> None:
        self.search, self.reference, self.bound, self.limit = search, reference, bound, limit
        self.posed, self.kept = search.posed, kept
        self.first = len(self.posed.graph.roots)
        flat, live = self.posed.graph.flat, self.posed.live
        over = np.maximum(reference.live_bytes - min(limit, 0.98 * reference.peak), 0.0)
        pressure = over / max(float(over.sum()), 1e-30)
        readers = self.readers = Readers(flat)
        self._shared: dict[Candidate, list[Shared]] = {}
        self.regions: list[Choices] = []
        for region in flat.regions:
            if kept.within and region.kind in ("step", "scan") and named_by_path(flat, region.id):
                found = forward_nodes(reference.out, live, readers, region.id, pressure)
                self.regions.append(choices(flat, live, region.id, found, joins=self.posed.fusion.joins))
        self.regions = [r for r in self.regions if r.groups]
        self.count = sum(len(r.groups) for r in self.regions)
        self.trials: list[Trial] = []
        self.room = float(limit)
        self._joint: Joint | None = None

    def rank(self, trial: Trial) -> tuple[float, float]:
        """(bytes over the limit, seconds of a step): the least is the best."""
        over = max(0, trial.counted.peak - self.limit)
        return over, trial.counted.step_s

    @property
    def best(self) -> Trial:
        """The best trial, of one or more."""
        return min(self.trials, key=self.rank)

    def rounds(self) -> None:
        """Groups and shardings chosen together, under a limit that moves by what is counted in the rewritten graph."""
        _, keep = restrict(self.joint(), self.posed.masks)

        def inside(choice: Sequence[int]) -> tuple[int, ...]:
            return tuple(int(np.searchsorted(k, s)) for k, s in zip(keep, choice, strict=True))

        def whole(choice: Sequence[int]) -> tuple[int, ...]:
            return tuple(int(k[s]) for k, s in zip(keep, choice, strict=True))

        start = Solution(choice=inside(self.completed((*self.reference.choice, *[0] * self.count))), report=self.bound)
        seeds = [inside(self.completed((*c.choice, *[1] * self.count))) for _, c in self.posed.baselines]
        low, high = 0.0, math.inf  # rooms under which a trial fits, or nothing does, and under which one is over
        for _ in range(ROUNDS):
            view, _ = restrict(self.joint(), self.posed.masks)
            solution = solve(
                view, seeds, self.search.left_s / 2, self.search.solver, start, lambda c: self.live_bytes(whole(c))
            )
            failed = not solution.report.fits
            known = len(self.trials)
            trial = self.trial(whole(solution.choice))
            stuck = failed and known == len(self.trials)
            if not self.trials or stuck or time.perf_counter() > self.search.deadline:
                return
            left = -math.inf  # nothing is recomputed, which is over
            if trial is not None:
                seeds.insert(0, solution.choice)
                left = self.limit - trial.counted.peak
                if 0 <= left <= SLACK * self.limit:
                    return
            if failed or left > 0:
                low = max(low, self.room)
            if left < 0:
                high = min(high, self.room)
            guess = self.room + (left if left > 0 else OVERSHOOT * left)
            self.room = guess if low < guess < high else (low + high) / 2

    def live_bytes(self, choice: tuple[int, ...]) -> Any:
        """float64[times]: the live bytes of the shardings, counted in full, and what the groups and second gathers
        change."""
        return self._apart(choice)[0]

    def _apart(self, choice: tuple[int, ...]) -> tuple[Any, list[Shared]]:
        """(live bytes, the gathers that are made twice): those that are held while there is too much, the largest
        first, until it fits."""
        base = self.posed.counted(choice[: self.first])
        live = base.live_bytes + _held(self._whole().problem, choice, self.first)
        if base not in self._shared:
            self._shared[base] = shared_gathers(base.out, self.posed.live, self.readers) if self.kept.within else []
        twice: list[Shared] = []
        for shared in sorted(self._shared[base], key=lambda shared: -shared.size_bytes):
            if live.max(initial=0.0) <= self.room:
                break
            start, stop = shared.gap
            if live[start:stop].max() > self.room:
                twice.append(shared)
                live[start:stop] -= shared.size_bytes
                if shared.copied is not None:
                    live[slice(*shared.copied)] += shared.copied_bytes
        return live, twice

    def searched(self) -> FoundPlan:
        """What the search under the limit finds in the best trial's graph, in a part of the time left (`SHARE`)."""
        share = SHARE if self.best.counted.peak <= self.limit else 2 * SHARE
        deadline = time.perf_counter() + share * self.search.left_s
        search = replace(self.search, posed=self.best.counted.posed, deadline=deadline)
        [seed] = search.posed.seeds
        return search.limited(self.limit, Solution(choice=seed, report=self.bound))

    def joint(self) -> Problem:
        """The joint problem under the present limit: a node per cluster, then one per group, then others."""
        return replace(self._whole().problem, limit_bytes=self.room)

    def completed(self, choice: Sequence[int]) -> tuple[int, ...]:
        """States of clusters and groups → a choice of the joint problem."""
        return self._whole().completed(choice)

    def _whole(self) -> Joint:
        if self._joint is None:
            self._joint = joint_problem(self.posed.limited(self.room), self.reference.out, self.regions)
        return self._joint

    def trial(self, choice: tuple[int, ...]) -> Trial | None:
        """A choice of the joint problem, counted; None where it recomputes nothing."""
        recompute = self._entries(choice)
        if not recompute:
            return None
        for trial in self.trials:
            if trial.choice == choice and trial.counted.posed.recompute == recompute:
                return trial
        posed = self.posed.again(rewritten(self.posed.source, recompute), recompute)
        trial = Trial(choice=choice, counted=posed.start("", carried_over(self.posed, posed, choice)))
        self.trials.append(trial)
        return trial

    def _entries(self, choice: tuple[int, ...]) -> tuple[Recompute, ...]:
        flat, at = self.posed.graph.flat, self.first
        out: list[Recompute] = []
        for region in self.regions:
            chosen = [k for k in range(len(region.groups)) if choice[at + k]]
            at += len(region.groups)
            out += named(flat, region.region, entries(flat, region, chosen))
        made = {e.value for e in out if not e.path}
        for shared in self._apart(choice)[1]:
            [entry] = named(flat, 0, [(shared.node, shared.result, shared.late)])
            if entry.value not in made:
                out.append(entry)
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
