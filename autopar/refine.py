"""A pipeline → a faster one near it, by simulation.

What is searched by dynamic programming is estimated: transfers at one bandwidth, no waiting for them, one best cut for
each number of stages. Where simulations are cheap, the last steps are taken by them: from the pipelines that came out
best, to whatever neighbour is fastest when it is simulated and fits, as long as there is one.

    a boundary between two stages moves by one layer; two stages become one, or one becomes two; a stage goes to another
    submesh, with another logical shape or price on memory; two neighbours change places; another schedule

A neighbour is not built where it cannot be faster (`least_s`). Nothing depends on the clock, so that equal inputs give
equal plans: `TASKS` and `BUILT` bound the work.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.building import Builder, Built, Simulated
from autopar.inter_op.ranges import FIELDS
from autopar.inter_op.schedules import SCHEDULES, overlap_depth
from autopar.inter_op.stage_dp import Cells, Partition, StageChoice
from autopar.ir.pipeline import PipelinePlan, StageCost

TASKS = 40_000
"""Tasks that are simulated at most (about a second, measured)."""
BUILT = 1_500
"""Pipelines that are built at most (guessed)."""
SEEDS = 3
"""Pipelines whose neighbours are tried, each with another number of stages or submeshes (guessed)."""
WORTH = 100
"""Where fewer pipelines can be simulated, nothing is (guessed)."""
DEPTHS = (2, 4)
"""Of eager 1F1B's warm-up, beside 1 and what follows from transfers (guessed)."""

Choices = tuple[StageChoice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Freedom:
    """What may change: numbers of stages, submeshes, and to which schedules. ``devices``: of each group of hosts;
    ``memory_bytes``: a limit on each device, or None for its own."""

    stages: bool
    submeshes: bool
    schedules: tuple[str, ...]
    devices: tuple[int, ...]
    memory_bytes: int | None


def least_s(plan: PipelinePlan) -> float:
    """Seconds that a step takes at least: what one worker has to do, after the forward tasks of one microbatch on the
    stages before its first. Each layer reads the one before."""
    schedule = plan.schedule
    before, first, own = 0.0, dict[int, float](), dict[int, float]()
    for stage, mesh in zip(plan.stages, schedule.mesh_of_stage, strict=True):
        first.setdefault(mesh, before)
        own[mesh] = own.get(mesh, 0.0) + work_s(stage.cost, schedule.num_microbatches)
        before += stage.cost.forward_s
    return max(first[mesh] + own[mesh] for mesh in own)


def work_s(cost: StageCost, num_microbatches: int) -> float:
    """Seconds that a stage works in a step."""
    return num_microbatches * (cost.forward_s + cost.backward_s) + cost.grad_sync_s + cost.update_s


def refined(builder: Builder, cells: Sequence[Cells], found: Sequence[Simulated], freedom: Freedom) -> list[Simulated]:
    """Pipelines that fit and are faster than all of ``found``, fastest last.

    Args:
        cells: those of the builder, infinite where the user allows no stage.
        found: pipelines that fit.
    """
    return _Refiner(builder, cells, freedom).run(found)


class _Refiner:
    def __init__(self, builder: Builder, cells: Sequence[Cells], freedom: Freedom) -> None:
        self.builder, self.cells, self.freedom = builder, cells, freedom
        self.m = builder.layered.num_microbatches
        self.tasks, self.built = TASKS, BUILT
        self.seen: set[tuple[Choices, str, tuple[tuple[str, int], ...]]] = set()
        self.options: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self.best_s = np.inf

    def run(self, found: Sequence[Simulated]) -> list[Simulated]:
        found = sorted(found, key=_seconds)
        size = sum(map(len, found[0].built.plan.schedule.tasks)) if found else 0
        if not found or size * WORTH > TASKS:
            return []
        self.best_s = _seconds(found[0])
        better: list[Simulated] = []
        for seed in _different(found):
            now = seed
            near = _seconds(seed)
            while (best := self._best_near(now.built, near)) is not None:
                now, near = best, _seconds(best)
                if near < self.best_s:
                    better.append(now)
                    self.best_s = near
        return better

    def _best_near(self, built: Built, limit_s: float) -> Simulated | None:
        """The fastest neighbour that fits and takes less than ``limit_s``."""
        wanted = sorted(
            dict.fromkeys(self._neighbours(built)), key=lambda c: (self._least(c), len(c), [s.cell for s in c])
        )
        out: Simulated | None = None
        for choices in wanted:
            if self._least(choices) >= limit_s or self.tasks <= 0 or self.built <= 0:
                break
            for name, given in self._schedules(choices, built):
                step = self._tried(choices, name, given, limit_s)
                if step is not None and _seconds(step) < limit_s:
                    out, limit_s = step, _seconds(step)
                    for depth in self._depths(step.built.plan):
                        deeper = self._tried(choices, name, {"depth": depth}, limit_s)
                        if deeper is not None:
                            out, limit_s = deeper, _seconds(deeper)
        return out

    def _tried(self, choices: Choices, name: str, given: dict[str, int], limit_s: float) -> Simulated | None:
        """A pipeline, where it fits and takes less than ``limit_s``."""
        key = (choices, name, tuple(given.items()))
        if key in self.seen:
            return None
        self.seen.add(key)
        self.built -= 1
        built = self.builder.build(Partition(choices, 0.0), name, **given)
        if built is None or least_s(built.plan) >= limit_s:
            return None
        self.tasks -= sum(map(len, built.plan.schedule.tasks))
        step = self.builder.simulated(built)
        fits = step.fullest(self.freedom.memory_bytes)[0] <= 1
        return step if fits and _seconds(step) < limit_s else None

    def _schedules(self, choices: Choices, built: Built) -> Iterator[tuple[str, dict[str, int]]]:
        """Schedules of a neighbour, and what they are given."""
        given = dict(built.schedule_options)
        if "chunks" in given:
            yield built.plan.schedule.name, given
            return
        for name in self.freedom.schedules:
            if not SCHEDULES[name].chunked and (len(choices) > 1 or name in ("1f1b", "inference")):
                yield name, {}
                if name == "eager_1f1b":  # a depth that hides transfers may pay where 1 does not
                    yield from ((name, {"depth": depth}) for depth in DEPTHS if depth < self.m)

    def _depths(self, plan: PipelinePlan) -> list[int]:
        """Of eager 1F1B's warm-up: what hides the slowest transfer behind the slowest stage, twice that, and all."""
        if plan.schedule.name != "eager_1f1b":
            return []
        costs = [stage.cost for stage in plan.stages]
        forward, backward = max(c.forward_s for c in costs), max(c.backward_s for c in costs)
        slowest = max((c.time_s for c in plan.cuts if c.phase in ("forward", "backward")), default=0.0)
        depth = overlap_depth(forward, backward, slowest) if forward + backward else 1
        return sorted({max(1, min(k, self.m)) for k in (depth, 2 * depth, self.m)})

    # --- neighbours --------------------------------------------------------------------------------------------------

    def _neighbours(self, built: Built) -> Iterator[Choices]:
        """Choices of stages near those of a pipeline, and these themselves."""
        choices = built.choices
        chunked = "chunks" in dict(built.schedule_options)
        free = self.freedom
        every = range(len(self.cells)) if free.submeshes and not chunked else ()
        yield choices
        for i, one in enumerate(choices):
            yield from self._with(choices, i, i + 1, [(one.start, one.stop)], [[one.cell, *every]])
        for i, (one, two) in enumerate(itertools.pairwise(choices)):
            for at in (two.start - 1, two.start + 1):
                if one.start < at < two.stop:
                    ends = [(one.start, at), (at, two.stop)]
                    yield from self._with(choices, i, i + 2, ends, [[one.cell], [two.cell]])
                    if every:
                        yield from self._with(choices, i, i + 2, ends, [[two.cell], [one.cell]])
            if every and one.cell != two.cell:
                ends = [(one.start, one.stop), (two.start, two.stop)]
                yield from self._with(choices, i, i + 2, ends, [[two.cell], [one.cell]])
            if free.stages and not chunked:
                yield from self._with(choices, i, i + 2, [(one.start, two.stop)], [[one.cell, two.cell, *every]])
        if free.stages and not chunked:
            for i, one in enumerate(choices):
                cells = list(every) or [one.cell]
                for at in range(one.start + 1, one.stop):
                    yield from self._with(choices, i, i + 1, [(one.start, at), (at, one.stop)], [cells, cells])

    def _with(
        self, choices: Choices, first: int, last: int, ends: Sequence[tuple[int, int]], cells: Sequence[Sequence[int]]
    ) -> Iterator[Choices]:
        """Stages ``first`` to ``last`` replaced by stages of layers ``ends``, on any of ``cells``, by any option."""
        for picked in itertools.product(*(dict.fromkeys(c) for c in cells)):
            new = [self._ways(c, start, stop) for c, (start, stop) in zip(picked, ends, strict=True)]
            if not self._room([*choices[:first], *(ways[0] for ways in new if ways), *choices[last:]]):
                continue
            for some in itertools.product(*new):
                yield (*choices[:first], *some, *choices[last:])

    def _ways(self, cell: int, start: int, stop: int) -> list[StageChoice]:
        """Options of a stage, those with equal costs once."""
        key = (cell, start, stop)
        if key not in self.options:
            cost = self.cells[cell].cost[:, start, stop]
            fits = np.isfinite(cost).all(1) & (cost[:, FIELDS.index("state_bytes")] <= self.cells[cell].memory_bytes)
            distinct: dict[tuple[float, ...], int] = {}
            for option in np.flatnonzero(fits).tolist():
                distinct.setdefault(tuple(cost[option].tolist()), option)
            self.options[key] = tuple(distinct.values())
        return [StageChoice(start, stop, cell, option) for option in self.options[key]]

    def _room(self, choices: Sequence[StageChoice]) -> bool:
        used = [0] * len(self.freedom.devices)
        for one in choices:
            submesh = self.cells[one.cell].submesh
            used[submesh.group] += submesh.size
        return all(u <= d for u, d in zip(used, self.freedom.devices, strict=True))

    def _least(self, choices: Choices) -> float:
        """Of a step, as `least_s` with a stage a mesh."""
        before, out = 0.0, 0.0
        for one in choices:
            cost = self.cells[one.cell].cost[one.option, one.start, one.stop]
            out = max(out, before + self.m * float(cost[:3].sum()) + float(cost[3:5].sum()))
            before += float(cost[0])
        return out


def _seconds(step: Simulated) -> float:
    return step.timeline.makespan_s


def _different(found: Sequence[Simulated]) -> list[Simulated]:
    """The fastest, and others with other numbers of stages or submeshes."""
    out: dict[object, Simulated] = {}
    for step in found:
        given = dict(step.built.schedule_options)
        key = (len(step.built.choices), "chunks" in given, sorted(c.cell for c in step.built.choices).__repr__())
        out.setdefault(key, step)
    return list(out.values())[:SEEDS]
