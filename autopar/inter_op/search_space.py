"""All pipelines that a step and a cluster have, and which of them cannot be faster or cannot fit: `Space`.

A pipeline is a choice of stages (`Choices`) under a schedule. A choice takes at least

    max over stages s of  Σ_(r<s) f_r  +  m (f_s + b_s)  +  o_s

where each layer reads the one before, and the last of these without the sum where one does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.inter_op.candidates import Builder
from autopar.inter_op.cells import Cells
from autopar.inter_op.lower_bounds import work_s
from autopar.inter_op.ranges import FIELDS
from autopar.inter_op.schedules import SCHEDULES, ScheduleOptions, make_schedule
from autopar.inter_op.stage_dp import StageChoice
from autopar.ir.pipeline import Schedule, StageCost

VISITED = 20_000
"""Beginnings of choices that `Space.every` looks at (0.2 to 0.5 s, measured)."""
_HELD = [FIELDS.index("state_bytes"), FIELDS.index("activation_bytes")]
"""What a device holds at least while a stage trains; of these the first while it only infers."""

Choices = tuple[StageChoice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Freedom:
    """What the user leaves open: numbers of stages, whether other submeshes than those of a pipeline that was found may
    be tried (``submeshes``), names of schedules, and ``chunks``, how many stages a mesh under those of several.
    ``devices``: of each group of hosts. ``memory_bytes``: a limit on each
    device; None: its own memory."""

    least_stages: int
    most_stages: int
    submeshes: bool
    schedules: tuple[str, ...]
    chunks: tuple[int, ...]
    devices: tuple[int, ...]
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Way:
    """A stage and what it costs."""

    choice: StageChoice
    cost: StageCost


class Space:
    """Choices of stages on the cells of a builder. ``cells``: those of the builder, infinite where the user allows no
    stage."""

    def __init__(self, builder: Builder, cells: Sequence[Cells], freedom: Freedom) -> None:
        self.builder, self.cells, self.freedom = builder, cells, freedom
        self.m, self.count = builder.layered.num_microbatches, len(builder.layered.layers)
        self.chained, self.trains = _chained(builder), builder.layered.loss >= 0
        self.found: dict[tuple[int, int, int], tuple[Way, ...]] = {}
        self.different: dict[tuple[int, int, int], tuple[Way, ...]] = {}
        self.known: dict[int, tuple[tuple[str, ScheduleOptions, Schedule], ...]] = {}
        self.work_s = [cell.spread((self.m * cell.microbatch_s + cell.once_s).min(0)) for cell in cells]
        """Of each cell float64[start, stop]: seconds that a stage there takes at least in a step."""

    def ways(self, cell: int, start: int, stop: int) -> tuple[Way, ...]:
        """All ways to run layers ``start`` to ``stop`` on a cell's submesh that may fit its devices, of those with
        the same layouts of one table the first."""
        key = (cell, start, stop)
        if key not in self.found:
            there: dict[object, Way] = {}
            here = self.cells[cell]
            costs = here.at(start, stop)
            held = costs[:, _HELD if self.trains else _HELD[:1]].sum(1)
            able = np.isfinite(costs).all(1) & (held <= here.memory_bytes)
            for number in np.flatnonzero(able).tolist():
                option = self.builder.options[cell][number]
                ranges = option.table.ranges
                same = (id(option.table), ranges.same(option.price, start, stop))
                if same in there:
                    continue
                cost = ranges.stage_cost(option.price, start, stop)
                if self.holds(cost, 1) <= here.memory_bytes:
                    there[same] = Way(StageChoice(start, stop, cell, number), cost)
            self.found[key] = tuple(there.values())
        return self.found[key]

    def costs(self, cell: int, start: int, stop: int) -> tuple[Way, ...]:
        """`ways`, of those that cost the same the first, although what crosses to other stages may differ."""
        key = (cell, start, stop)
        if key not in self.different:
            self.different[key] = tuple({way.cost: way for way in reversed(self.ways(*key))}.values())[::-1]
        return self.different[key]

    def holds(self, cost: StageCost, microbatches: int) -> float:
        """Bytes on a device that a stage needs at least, with so many microbatches in flight and the backward pass
        split or not."""
        beside = cost.transients
        if not self.trains:
            return cost.state_bytes + beside.forward_bytes
        split_bytes = cost.weight_context_bytes - cost.kept_bytes + beside.input_grad_bytes
        task_bytes = max(beside.forward_bytes, min(beside.backward_bytes, split_bytes))
        return cost.state_bytes + max(microbatches * cost.activation_bytes + task_bytes, beside.update_bytes)

    def room(self, cells: Sequence[int]) -> bool:
        """True where the cluster has enough devices for a stage on each of these cells."""
        used = [0] * len(self.freedom.devices)
        for cell in cells:
            submesh = self.cells[cell].submesh
            used[submesh.group] += submesh.size
        return all(u <= d for u, d in zip(used, self.freedom.devices, strict=True))

    def least(self, choices: Choices) -> float:
        """Seconds that a step takes at least, each stage on a mesh of its own (the bound above)."""
        before, out = 0.0, 0.0
        for one in choices:
            cost = self.cells[one.cell].at(one.start, one.stop)[one.option]
            out = max(out, before + self.m * float(cost[:3].sum()) + float(cost[3:5].sum()))
            before += float(cost[0]) if self.chained else 0.0
        return out

    def schedules(self, stages: int) -> tuple[tuple[str, ScheduleOptions, Schedule], ...]:
        """(name, options, order) of the schedules of a stage a mesh on so many meshes, of equal orders the first."""
        if stages not in self.known:
            out: dict[object, tuple[str, ScheduleOptions, Schedule]] = {}
            for name in self.freedom.schedules:
                schedule = SCHEDULES[name]
                if schedule.chunked or (stages == 1 and not schedule.on_one_stage):
                    continue
                for given in schedule.distinct(self.m):
                    made = make_schedule(name, stages, self.m, **dict(given))
                    out.setdefault(made.tasks, (name, given, made))
            self.known[stages] = tuple(out.values())
        return self.known[stages]

    def every(self, limit_s: float) -> list[tuple[float, int, Choices]] | None:
        """(least seconds, stages a mesh, choice) of all that may fit and take less than ``limit_s``, those with the
        least first; None where there are too many to look at."""
        out: list[tuple[float, int, Choices]] = []
        visits, several = _Visits(self, limit_s), self.freedom.chunks
        for stages in range(self.freedom.least_stages, self.freedom.most_stages + 1):
            for chunks in (1, *(v for v in several if stages % v == 0 and stages > v)):
                for least, choices in visits.run(stages, chunks):
                    out.append((least, chunks, choices))
                if visits.left <= 0:
                    return None
        return sorted(out, key=lambda one: (*one[:2], len(one[2]), [(s.stop, s.cell, s.option) for s in one[2]]))


class _Visits:
    """Depth first over the stages of a choice, from layer 0 on."""

    def __init__(self, space: Space, limit_s: float) -> None:
        self.space, self.limit_s, self.left = space, limit_s, VISITED

    def run(self, stages: int, chunks: int) -> Iterator[tuple[float, Choices]]:
        """Choices of so many stages, ``chunks`` a mesh: more than one only on equal submeshes."""
        space = self.space
        every = list(range(len(space.cells)))
        free = space.freedom.devices
        if chunks > 1:
            for cell in every:
                yield from self._more([1] * stages, stages // chunks, [cell], (), free, 0.0, 0.0)
            return
        orders = space.schedules(stages) if stages <= sum(space.freedom.devices) else ()
        if orders:
            held = [min(_most_held(made, s) for _, _, made in orders) for s in range(stages)]
            for cells in [every] if space.freedom.submeshes else [[cell] for cell in every]:
                yield from self._more(held, stages, cells, (), free, 0.0, 0.0)

    def _more(
        self, held: Sequence[int], meshes: int, cells: Sequence[int], choices: Choices, free: tuple[int, ...],
        before_s: float, least_s: float,
    ) -> Iterator[tuple[float, Choices]]:  # fmt: skip
        """All continuations of a choice to ``len(held)`` stages on ``cells``, of which stage s holds ``held[s]``
        microbatches at least. ``free``: devices of each group that no stage has yet."""
        space, stage = self.space, len(choices)
        if stage == len(held):
            yield least_s, choices
            return
        start, others = choices[-1].stop if choices else 0, len(held) - stage - 1
        for cell in cells:
            left = free
            if stage < meshes:
                submesh = space.cells[cell].submesh
                if free[submesh.group] < submesh.size:
                    continue
                left = tuple(n - submesh.size * (g == submesh.group) for g, n in enumerate(free))
            memory = space.cells[cell].memory_bytes
            for stop in range(start + 1, space.count - others + 1) if others else (space.count,):
                if before_s + space.work_s[cell][start, stop] >= self.limit_s:
                    continue
                for way in space.ways(cell, start, stop):
                    self.left -= 1
                    if self.left <= 0:
                        return
                    least = max(least_s, before_s + work_s(way.cost, space.m))
                    if least < self.limit_s and space.holds(way.cost, held[stage]) <= memory:
                        after_s = before_s + (way.cost.forward_s if space.chained else 0.0)
                        yield from self._more(held, meshes, cells, (*choices, way.choice), left, after_s, least)


def chunk_counts(schedules: Iterable[str]) -> tuple[int, ...]:
    """Numbers of stages a mesh, 2 or more, that schedules of these names are tried with."""
    return tuple(sorted({v for name in schedules for v in SCHEDULES[name].chunks}))


def _chained(builder: Builder) -> bool:
    """True where each layer reads the one before."""
    layered = builder.layered
    links = {(made, user) for value, made in layered.makers.items() for user in layered.users.get(value, ())}
    return all((k, k + 1) in links for k in range(len(layered.layers) - 1))


def _most_held(schedule: Schedule, stage: int) -> int:
    """Microbatches that a stage with a mesh of its own has activations of at a time, at most."""
    now = most = 0
    for task in schedule.tasks[stage]:
        now += (task.phase == "forward") - (task.phase in ("backward", "input_grad"))
        most = max(most, now)
    return most
