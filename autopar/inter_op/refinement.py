"""Pipelines → a faster one, by simulation.

What is searched by dynamic programming is estimated: transfers at one bandwidth, no waiting for them, one best cut for
each number of stages, memory for messages that may never stand beside each other. Where simulations are cheap, the last
steps are taken by them.

*Neighbours.* From the pipelines that came out best, to whatever neighbour is fastest when it is simulated and fits, as
long as there is one; from one that does not fit, to the one that lacks least.

    a boundary between two stages moves by one layer; two stages become one, or one becomes two; a stage goes to another
    submesh, with another logical shape or price on memory; two neighbours change places; another schedule

*All.* Then all choices of stages (`search_space`) that may be faster, those first that may be fastest, under every
schedule, as long as there is work left (`EVERY`). Where it suffices the plan is the fastest of all of these pipelines,
and where none fits, none does.

Nothing is simulated that cannot be faster or cannot fit (`lower_bounds`). Nothing depends on the clock, so that equal
inputs give equal plans: counts bound the work, and a `Watch` where the user set a limit.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

from autopar.inter_op.candidates import Builder, Built, Simulated
from autopar.inter_op.cells import Cells
from autopar.inter_op.lower_bounds import least_bytes, least_s
from autopar.inter_op.schedules import SCHEDULES, ScheduleOptions, plain_schedule
from autopar.inter_op.search_space import Choices, Freedom, Space
from autopar.inter_op.stage_dp import Partition
from autopar.ir.pipeline import PipelinePlan
from autopar.ir.progress import Watch

TASKS = 40_000
"""Tasks that are simulated at most among neighbours (about a second, measured)."""
BUILT = 1_000
"""Pipelines that are built at most among neighbours (guessed)."""
EVERY = 60_000
"""Tasks that are simulated at most among all, and `FIXED` more for each pipeline (about 1.5 seconds, measured)."""
FIXED = 20
"""What a pipeline takes to be emitted and simulated beside what its tasks do, in tasks; and half to be built
(measured)."""
SEEDS = 3
"""Pipelines whose neighbours are tried, each with another number of stages or submeshes (guessed)."""
WORTH = 100
"""Where fewer pipelines can be simulated, nothing is (guessed)."""

Score = tuple[float, float]
"""What a pipeline lacks, as a part of its fullest device's memory, and its seconds: the less the better."""


def refined(
    builder: Builder, cells: Sequence[Cells], found: Sequence[Simulated], freedom: Freedom, watch: Watch | None = None
) -> list[Simulated]:
    """Pipelines that fit, each faster than the one before and the first faster than all of ``found`` that fit; none
    where steps are too large to simulate enough of them (`WORTH`).

    Args:
        cells: those of the builder, infinite where the user allows no stage.
        found: pipelines that were simulated; where none fits, those that lack least are where it starts.
        watch: ends it.
    """
    return _Refiner(builder, cells, freedom, watch or Watch()).run(found)


def is_small(layers: int, num_microbatches: int) -> bool:
    """True where simulations are cheap enough, whatever the stages, for all of this."""
    return 3 * layers * num_microbatches * WORTH <= TASKS


class _Refiner:
    def __init__(self, builder: Builder, cells: Sequence[Cells], freedom: Freedom, watch: Watch) -> None:
        self.builder, self.cells, self.freedom, self.watch = builder, cells, freedom, watch
        self.m = builder.layered.num_microbatches
        self.plain = plain_schedule(trains=builder.layered.loss >= 0)
        self.space = Space(builder, cells, freedom)
        self.tasks, self.built = TASKS, BUILT
        self.every = EVERY
        self.seen: set[tuple[Choices, str, ScheduleOptions]] = set()
        self.best: Score = (float("inf"), float("inf"))
        self.better: list[Simulated] = []

    def run(self, found: Sequence[Simulated]) -> list[Simulated]:
        found = sorted(found, key=self._score)
        size = sum(map(len, found[0].built.plan.schedule.tasks)) if found else 0
        if size * WORTH > TASKS:
            return []
        if found:
            self.best = self._score(found[0])
        for seed in _different(found):
            self._climb(seed)
        known = self.better[-1] if self.better else None
        if not self._all() and self.better and self.better[-1] is not known:
            self._climb(self.better[-1])
        return [step for step in self.better if not self._score(step)[0]]

    def _score(self, step: Simulated) -> Score:
        return max(0.0, step.fullest(self.freedom.memory_bytes)[0] - 1), step.timeline.makespan_s

    def _best_now(self, step: Simulated) -> None:
        if self._score(step) < self.best:
            self.best = self._score(step)
            self.better.append(step)
            if not self.best[0]:
                self.watch.found(self.best[1])

    def _climb(self, seed: Simulated) -> None:
        """From a pipeline to its best neighbour, and so on."""
        now, near = seed, self._score(seed)
        while (best := self._best_near(now.built, near)) is not None:
            now, near = best, self._score(best)
            self._best_now(now)

    def _best_near(self, built: Built, limit: Score) -> Simulated | None:
        """The best neighbour that is better than ``limit``."""
        if self._spent:
            return None
        wanted = sorted(
            dict.fromkeys(self._neighbours(built, limit[1] if not limit[0] else float("inf"))),
            key=lambda c: (self._lacks(c) if limit[0] else 0.0, self.space.least(c), len(c), [s.cell for s in c]),
        )
        out: Simulated | None = None
        for choices in wanted:
            if (not limit[0] and self.space.least(choices) >= limit[1]) or self._spent:
                break
            for name, given in self._schedules(choices, built):
                step = self._near(choices, name, given, limit)
                if step is not None:
                    out, limit = step, self._score(step)
                    for suited in SCHEDULES[name].suited(step.built.plan):
                        better = self._near(choices, name, suited, limit)
                        if better is not None:
                            out, limit = better, self._score(better)
        return out

    @property
    def _spent(self) -> bool:
        """True where no more neighbours are to be tried."""
        return self.tasks <= 0 or self.built <= 0 or self.watch.over()

    def _near(self, choices: Choices, name: str, given: ScheduleOptions, limit: Score) -> Simulated | None:
        """A neighbour, where it is better than ``limit``."""
        if (choices, name, given) in self.seen:
            return None
        self.built -= 1
        step, tasks = self._tried(choices, name, given, limit)
        self.tasks -= tasks
        return step

    def _tried(self, choices: Choices, name: str, given: ScheduleOptions, limit: Score) -> tuple[Simulated | None, int]:
        """A pipeline, where it is better than ``limit``; tasks that were simulated."""
        self.seen.add((choices, name, given))
        built = self.builder.build(Partition(choices, 0.0), name, **dict(given))
        if built is None or (self._lacks_at_least(built.plan), least_s(built.plan)) >= limit:
            return None, 0
        step = self.builder.simulated(built)
        tasks = sum(map(len, built.plan.schedule.tasks))
        return (step if self._score(step) < limit else None), tasks

    def _lacks_at_least(self, plan: PipelinePlan) -> float:
        """What the fullest device lacks at least, as a part of its memory."""
        mesh_of, limit = plan.schedule.mesh_of_stage, self.freedom.memory_bytes
        return max(
            0.0,
            *(
                held / (limit or plan.stages[mesh_of.index(mesh)].mesh.device.memory_bytes) - 1
                for mesh, held in enumerate(least_bytes(plan))
            ),
        )

    def _lacks(self, choices: Choices) -> float:
        """What the fullest device of a choice lacks about, with as many microbatches as the plain schedule holds."""
        out = 0.0
        for one, held in zip(choices, self.plain.in_flight(len(choices), self.m), strict=True):
            way = self.builder.options[one.cell][one.option].table.ranges
            cost = way.stage_cost(self.builder.options[one.cell][one.option].price, one.start, one.stop)
            out = max(out, self.space.holds(cost, held) / self.cells[one.cell].memory_bytes - 1)
        return out

    def _all(self) -> bool:
        """Simulates all pipelines that may be better than the best, those first that may be fastest; False where there
        are too many."""
        if self.watch.over():
            return False
        limit_s = self.best[1] if not self.best[0] else float("inf")
        listed = self.space.every(limit_s)
        if listed is None:
            return False
        queue = [(least, number, -1) for number, (least, _, _) in enumerate(listed)]  # sorted, so a heap
        while queue:
            least, number, family = heapq.heappop(queue)
            best = self.best if not self.best[0] else (0.0, float("inf"))
            if least >= best[1]:
                break
            if self.every <= 0 or self.watch.over():
                return False
            _, chunks, choices = listed[number]
            families = self._families(len(choices), chunks)
            if family < 0:  # known by its work alone so far
                bounds = [max(least, self._least(choices, *orders[0])) for orders in families]
                self.every -= FIXED // 2
                for family, bound in enumerate(bounds):
                    if bound < best[1]:
                        heapq.heappush(queue, (bound, number, family))
                continue
            for name, given in families[family]:
                if (choices, name, given) in self.seen:
                    continue
                best = self.best if not self.best[0] else (0.0, float("inf"))
                step, tasks = self._tried(choices, name, given, best)
                self.every -= tasks + FIXED if tasks else 1
                if step is not None:
                    self._best_now(step)
        return True

    def _least(self, choices: Choices, name: str, given: ScheduleOptions) -> float:
        """Seconds at least of a choice, transfers counted, under all schedules of one family; infinite where its
        submeshes do not fit the hosts together."""
        built = self.builder.build(Partition(choices, 0.0), name, **dict(given))
        return float("inf") if built is None else least_s(built.plan)

    def _families(self, stages: int, chunks: int) -> list[list[tuple[str, ScheduleOptions]]]:
        """`_orders`, those together under which a choice has one least time: that with the backward pass whole, and
        that with it split."""
        out: dict[bool, list[tuple[str, ScheduleOptions]]] = {}
        for name, given in self._orders(stages, chunks):
            out.setdefault(SCHEDULES[name].splits_backward, []).append((name, given))
        return list(out.values())

    def _orders(self, stages: int, chunks: int) -> list[tuple[str, ScheduleOptions]]:
        """Schedules, and what they are given, of so many stages, ``chunks`` a mesh."""
        if chunks > 1:
            several = (name for name in self.freedom.schedules if SCHEDULES[name].chunked)
            return [(name, (("chunks", chunks),)) for name in several]
        return [(name, given) for name, given, _ in self.space.schedules(stages)]

    def _schedules(self, choices: Choices, built: Built) -> Iterator[tuple[str, ScheduleOptions]]:
        """Schedules of a neighbour, and what they are given."""
        if SCHEDULES[built.plan.schedule.name].chunked:
            yield built.plan.schedule.name, built.schedule_options
            return
        for name in self.freedom.schedules:
            schedule = SCHEDULES[name]
            if not schedule.chunked and (len(choices) > 1 or schedule.on_one_stage):
                yield from ((name, given) for given in schedule.tried(self.m))

    # --- neighbours --------------------------------------------------------------------------------------------------

    def _neighbours(self, built: Built, limit_s: float) -> Iterator[Choices]:
        """Choices of stages near those of a pipeline, and these themselves: none with a new stage that takes
        ``limit_s`` by itself."""
        choices = built.choices
        chunked = SCHEDULES[built.plan.schedule.name].chunked
        meshes = len(built.plan.schedule.tasks) if chunked else None  # later stages are on meshes of earlier ones
        free = self.freedom
        every = range(len(self.cells)) if free.submeshes and not chunked else ()
        yield choices
        for i, one in enumerate(choices):
            yield from self._with(choices, limit_s, i, i + 1, [(one.start, one.stop)], [[one.cell, *every]], meshes)
        for i, (one, two) in enumerate(itertools.pairwise(choices)):
            for at in (two.start - 1, two.start + 1):
                if one.start < at < two.stop:
                    ends = [(one.start, at), (at, two.stop)]
                    yield from self._with(choices, limit_s, i, i + 2, ends, [[one.cell], [two.cell]], meshes)
                    if every:
                        yield from self._with(choices, limit_s, i, i + 2, ends, [[two.cell], [one.cell]])
            if every and one.cell != two.cell:
                ends = [(one.start, one.stop), (two.start, two.stop)]
                yield from self._with(choices, limit_s, i, i + 2, ends, [[two.cell], [one.cell]])
            if len(choices) > free.least_stages and not chunked:
                yield from self._with(
                    choices, limit_s, i, i + 2, [(one.start, two.stop)], [[one.cell, two.cell, *every]]
                )
        if len(choices) < free.most_stages and not chunked:
            for i, one in enumerate(choices):
                cells = list(every) or [one.cell]
                for at in range(one.start + 1, one.stop):
                    yield from self._with(choices, limit_s, i, i + 1, [(one.start, at), (at, one.stop)], [cells, cells])

    def _with(
        self, choices: Choices, limit_s: float, first: int, last: int, ends: Sequence[tuple[int, int]],
        cells: Sequence[Sequence[int]], meshes: int | None = None,
    ) -> Iterator[Choices]:  # fmt: skip
        """Stages ``first`` to ``last`` replaced by stages of layers ``ends``, on any of ``cells``, by any option, where
        each may take less than ``limit_s``; there is to be room for the first ``meshes``."""
        for picked in itertools.product(*(dict.fromkeys(c) for c in cells)):
            wanted = [*(c.cell for c in choices[:first]), *picked, *(c.cell for c in choices[last:])]
            work_s = max(self.space.work_s[c][end] for c, end in zip(picked, ends, strict=True))
            if work_s >= limit_s or not self.space.room(wanted[:meshes]):
                continue
            new = [self.space.costs(c, start, stop) for c, (start, stop) in zip(picked, ends, strict=True)]
            for some in itertools.product(*new):
                yield (*choices[:first], *(way.choice for way in some), *choices[last:])


def _different(found: Sequence[Simulated]) -> list[Simulated]:
    """The fastest, and others with other numbers of stages or submeshes."""
    out: dict[object, Simulated] = {}
    for step in found:
        chunked = SCHEDULES[step.built.plan.schedule.name].chunked
        key = (len(step.built.choices), chunked, sorted(c.cell for c in step.built.choices).__repr__())
        out.setdefault(key, step)
    return list(out.values())[:SEEDS]
