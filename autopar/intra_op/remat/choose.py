"""The plan with rematerialisation: groups from a reference plan, the joint problem, and the rewritten graph's own plan.

1. From a reference plan that exceeds the limit: candidates, cuts and groups (`forward`, `cuts`, `groups`).
2. The joint problem (`joint`) chooses shardings and groups under the limit.
3. What it recomputes is written into the graph (`ir.recompute`), whose plan is searched like any other's, starting from
   the joint choice: so shardings, reshardings, collectives and memory of what is recomputed are counted, not estimated.

Where the plan of 3 is over the limit, 2 is repeated with the limit lowered by as much; where much is left, raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.intra_op.flatten import Flat
from autopar.intra_op.problem import build_problem
from autopar.intra_op.remat.forward import Readers, candidates
from autopar.intra_op.remat.groups import Choices, choices, entries, named, path_of
from autopar.intra_op.remat.joint import joint_problem
from autopar.intra_op.search import Candidate, Found, Search, Space
from autopar.intra_op.seeds import restrict
from autopar.intra_op.solve import solve
from autopar.ir.graph import Graph
from autopar.ir.plan import Recompute
from autopar.ir.recompute import blocks_of, rewritten
from autopar.ir.strategy import Problem, Solution, SolverReport

ROUNDS = 4
"""How often one reference's joint problem is solved."""
SLACK = 0.03
"""Part of the limit that a plan may leave unused without another round (guessed)."""
WORTH = 0.01
"""A plan that fits is this much slower than the one without a limit, or recomputation is not tried (guessed)."""

MakeSpace = Callable[[Graph, tuple[Recompute, ...]], Space]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Where compilers keep a recomputation: ``within`` one body, that of the step or of a loop."""

    within: bool


def with_recomputation(
    search: Search, free: Solution, found: Found, limit: int, make: MakeSpace, kept: Kept
) -> Found | None:
    """The best plan that recomputes something and fits; None where none was found. ``free`` is the plan without a
    limit, ``found`` the search's result under the limit."""
    best: Found | None = None
    references = [search.candidate(search.whole(free.choice)), found.best or found.nearest]
    for reference in dict.fromkeys(references):
        chooser = _Chooser(search, reference, free.report, limit, make, kept)
        if not chooser.count:
            continue
        for this in chooser.rounds():
            if this.best is not None and (best is None or best.best is None or this.best.step_s < best.best.step_s):
                best = this
        if time.perf_counter() > search.deadline:
            break
    return best


class _Chooser:
    def __init__(
        self, search: Search, reference: Candidate, bound: SolverReport, limit: int, make: MakeSpace, kept: Kept
    ) -> None:
        self.search, self.reference, self.bound, self.limit, self.make = search, reference, bound, limit, make
        self.space = search.space
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
        self.count = sum(len(r.groups) for r in self.regions)

    def rounds(self) -> list[Found]:
        """The plans of a few joint problems."""
        out: list[Found] = []
        room = float(self.limit)
        done: set[tuple[Recompute, ...]] = set()
        for _ in range(ROUNDS):
            choice = self._joint(room)
            recompute = self._entries(choice)
            if not recompute or recompute in done:
                break
            done.add(recompute)
            plan = self._plan(recompute, choice)
            out.append(plan)
            peak = plan.nearest.peak if plan.best is None else plan.best.peak
            if plan.best is None:
                room -= 1.05 * (peak - self.limit)
            elif peak < (1 - SLACK) * self.limit:
                room += 0.7 * (self.limit - peak)
            else:
                break
            if time.perf_counter() > self.search.deadline:
                break
        return out

    def _joint(self, room: float) -> tuple[int, ...]:
        """The choice of clusters' states, then one of 0 and 1 per group."""
        space, out = self.space, self.reference.out
        problem = joint_problem(build_problem(space.graph, space.live, room), out, self.regions)
        small, keep = restrict(problem, space.masks)
        levels = [g.level for r in self.regions for g in r.groups]
        starts = dict.fromkeys([self.reference, *self.search.seeds])
        seeds = [
            (*self.search.inside(c.choice), *(int(g <= level) for g in levels))
            for c in starts
            for level in sorted({0, *levels})
        ]
        first = len(space.graph.roots)

        def counted(choice: tuple[int, ...]) -> Any:
            whole = tuple(int(k[s]) for s, k in zip(choice, keep, strict=True))
            return self.search.candidate(whole[:first]).live_bytes + _held(problem, whole, first)

        free = Solution(choice=(*self.search.inside(self.reference.choice), *[0] * len(levels)), report=self.bound)
        left = max(0.5, self.search.deadline - time.perf_counter())
        solution = solve(small, seeds, left, self.search.solver, free, counted)
        return tuple(int(k[s]) for s, k in zip(solution.choice, keep, strict=True))

    def _entries(self, choice: Sequence[int]) -> tuple[Recompute, ...]:
        flat, at = self.space.graph.flat, len(self.space.graph.roots)
        out: list[Recompute] = []
        for region in self.regions:
            chosen = [k for k in range(len(region.groups)) if choice[at + k]]
            at += len(region.groups)
            out += named(flat, region.region, entries(flat, region, chosen))
        return tuple(out)

    def _plan(self, recompute: tuple[Recompute, ...], choice: Sequence[int]) -> Found:
        """The plan of the rewritten graph."""
        space = self.make(rewritten(self.space.source, recompute), recompute)
        start = carried_over(self.space, space, choice)
        search = Search(space, [start], self.search.solver, self.search.deadline)
        free = Solution(choice=search.inside(start), report=self.bound)
        return search.limited(self.limit, free)


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


def origins(source: Graph, before: Flat, after: Flat, recompute: Sequence[Recompute]) -> list[tuple[int, bool]]:
    """For each planning node of the rewritten graph: the one that it is, or repeats, in the first graph; and whether it
    repeats it."""
    region_of: dict[int, int] = {}
    blocks: dict[int, list[int]] = {}
    """Region of a block → the planning nodes that it repeats."""
    originals = iter(range(len(before.regions)))
    for region in after.regions:
        parent = after.regions[region.parent] if region.parent >= 0 else None
        if parent is None or "after" not in parent.graph.nodes[region.position].params:
            region_of[region.id] = next(originals)
            continue
        home = region_of[parent.id]
        blocks[region.id] = []
    for home_after, home in region_of.items():
        mine = [r for r in after.regions if r.id in blocks and r.parent == home_after]
        if mine:
            path = path_of(before, home)
            here = [_without_path(e) for e in recompute if e.path == path]
            for region, block in zip(mine, blocks_of(before.regions[home].graph, here), strict=True):
                blocks[region.id] = [before.at[home][p] for p in block.nodes]
    rest = iter(range(len(before.kind)))
    taken = dict.fromkeys(blocks, 0)
    out: list[tuple[int, bool]] = []
    for n in range(len(after.kind)):
        region = after.region[n]
        if region in blocks:
            out.append((blocks[region][taken[region]], True))
            taken[region] += 1
        else:
            out.append((next(rest), False))
    return out


def _without_path(entry: Recompute) -> Recompute:
    return Recompute(value=entry.value, consumers=entry.consumers)


def carried_over(before: Space, after: Space, choice: Sequence[int]) -> tuple[int, ...]:
    """The states of the rewritten graph's clusters in which everything, what is repeated included, is sharded as under
    ``choice`` of the first graph's."""
    old, new = before.graph, after.graph
    origin = origins(before.source, old.flat, new.flat, after.recompute)
    copies = {this.copy_of: c for c, this in enumerate(old.classes) if this.copy_of is not None}
    out: list[int] = []
    for root in new.roots:
        this = new.classes[root]
        if this.copy_of is None:
            out.append(old.strategy(old.class_of[origin[this.members[0]][0]], choice))
            continue
        maker, r = this.copy_of
        was = old.class_of[origin[new.classes[maker].members[0]][0]]
        copy = copies.get((was, r))
        wanted = [old.classes[was].signature.results[r][old.strategy(was, choice)]]
        if copy is not None:
            wanted.insert(0, old.classes[copy].signature.results[0][old.strategy(copy, choice)])
        same = [int(s) for code in wanted for s in np.flatnonzero(this.signature.results[0][this.follow] == code)]
        out.append(next(iter(same), 0))
    return tuple(out)
