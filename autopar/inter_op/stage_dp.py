"""Layer ranges and submeshes → stages: the cut of a model that a pipeline runs fastest.

With m microbatches, stages i of time t_i (a microbatch's forward and backward, and what runs once a step spread over
the microbatches) take about

    T = (m − 1) · max_i t_i  +  Σ_i t_i                          (Alpa, OSDI 2022, equation 2)

For every bound t on the slowest stage, the least sum over cuts in which no stage exceeds it: with F[a, i, d] the least
sum for layers i … n−1 on a stages and devices d (a number per group of hosts),

    F[a + 1, i, d] = min over j > i and submeshes q of  T_q(i, j | a)  +  c(j)  +  F[a, j, d − |q|]

where T_q(i, j | a) is the least time of layers i … j−1 on q, over logical shapes and prices on memory, among those that
hold what a stage with a others after it must hold (its schedule says how many microbatches are in flight there), and
c(j) what crosses at layer j as far as the schedule does not hide it. Cuts that come out best for some t and some number
of stages are handed on: the simulator decides (`autopar.inter_op.pipeline_search`).

Only submeshes on which a stage takes t at most can be part of such a cut, which is little near the best t. With D[a, i]
the fewest devices of layers i … n−1 on a stages, and B[a, i] the fewest of the stages in front of these, whatever they
take, only D[a, i] ≤ d ≤ total − B[a, i] is looked at, of a and i for which there is such a d.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.inter_op.cells import Cells

STEP = 1.01
"""Bounds on the slowest stage that are tried lie at least this factor apart: T is at most that much above the best."""


@dataclass(frozen=True, slots=True)
class StageChoice:
    """Layers ``start`` to ``stop`` on the submesh of ``cells[cell]``, by its option ``option``."""

    start: int
    stop: int
    cell: int
    option: int


@dataclass(frozen=True, slots=True)
class Partition:
    """Stages in order, and the estimate T of a step's seconds."""

    stages: tuple[StageChoice, ...]
    estimate_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is searched. ``devices``: per group of hosts. ``in_flight(a)``: microbatches held by a stage with a others
    after it. ``hidden``: the part of a transfer's time, 0 to 1, that the schedule hides behind compute; ``cut_s``
    float64[layers + 1]: seconds that what crosses before each layer takes. ``contexts``: True where weight gradients
    wait, so that what they read is held. ``step``: see `STEP`. ``wanted``: so many numbers of stages, those with the
    best cuts, have their best; None: all have."""

    devices: tuple[int, ...]
    most_stages: int
    num_microbatches: int
    in_flight: Callable[[int], int]
    cut_s: NDArray[np.float64]
    hidden: float = 0.0
    least_stages: int = 1
    contexts: bool = False
    step: float = STEP
    wanted: int | None = None


def partitions(cells: Sequence[Cells], limits: Limits) -> list[Partition]:
    """The best partition for every number of stages that has one (but see `Limits`, ``wanted``), best first."""
    return _Search(cells, limits).run()


Window: TypeAlias = tuple[NDArray[np.int64], int]
"""int64[layers + 1]: of each layer the least number of devices that is looked at; how many from there on."""


class Room:
    """Devices used, per group of hosts, as axes of a table: in units of the largest size that divides all submeshes
    of the group, ``unit``. ``shift[c]`` is what a stage on ``cells[c]`` adds."""

    def __init__(self, cells: Sequence[Cells], devices: Sequence[int]) -> None:
        groups = range(len(devices))
        unit = [math.gcd(*(c.submesh.size for c in cells if c.submesh.group == g)) or 1 for g in groups]
        self.layers = cells[0].layers
        self.unit = unit
        self.shape = tuple(d // u + 1 for d, u in zip(devices, unit, strict=True))
        self.shift = [tuple(c.submesh.size // unit[g] * (c.submesh.group == g) for g in groups) for c in cells]

    def no_stages(self) -> NDArray[np.float64]:
        """float64[layers + 1, devices used of each group …]: 0 with no layer left and no device used, else inf."""
        out = np.full((self.layers + 1, *self.shape), np.inf)
        out[(self.layers, *(0,) * len(self.shape))] = 0.0
        return out

    def one_more_near(
        self, before: NDArray[np.float64], stages: Sequence[NDArray[np.float64]], near: Window, wanted: Window
    ) -> NDArray[np.float64]:
        """`one_more` by np.add, of one group of hosts, where only ``near`` is looked at before, and only ``wanted`` is
        found: inf elsewhere."""
        (low, width), (least, found) = near, wanted
        padded = np.full((self.layers + 1, width + 2), np.inf)
        columns = np.minimum(low[:, None] + np.arange(width), self.shape[0] - 1)  # what is past it leads past it
        padded[:, 1:-1] = np.take_along_axis(before, columns, 1)
        alive = np.isfinite(padded).any(1)
        out = np.full((self.layers + 1, found), np.inf)
        for values, (shift,) in zip(stages, self.shift, strict=True):
            begin, end = np.nonzero(np.isfinite(values) & alive)  # in order of ``begin``
            moved = least[begin] - shift - low[end]
            begin, end, moved = (x[(-found < moved) & (moved < width)] for x in (begin, end, moved))
            if not len(begin):
                continue
            at = np.clip(np.arange(1, found + 1) + moved[:, None], 0, width + 1)
            joined = values[begin, end][:, None] + padded.take(end[:, None] * (width + 2) + at)
            begins, where = np.unique(begin, return_index=True)
            out[begins] = np.minimum(out[begins], np.minimum.reduceat(joined, where))
        table = np.full((self.layers + 1, self.shape[0] + found), np.inf)
        np.put_along_axis(table, least[:, None] + np.arange(found), out, 1)
        return table[:, : self.shape[0]]

    def one_more(
        self, before: NDArray[np.float64], stages: Sequence[NDArray[np.float64]], combine: np.ufunc
    ) -> NDArray[np.float64]:
        """The table with one stage more in front: the least ``combine(stages[c][start, stop], before[stop, …])`` over
        cells c and stops.

        Args:
            before: float64[layers + 1, devices used of each group …], as `no_stages` and this make it.
            stages: of each cell, float64[start, stop]; inf where there can be no such stage.
            combine: np.add or np.maximum.
        """
        out = np.full_like(before, np.inf)
        for values, shift in zip(stages, self.shift, strict=True):
            begin, end = np.nonzero(np.isfinite(values))  # in order of ``begin``
            if not len(begin) or any(s >= r for r, s in zip(self.shape, shift, strict=True)):
                continue
            tail = before[(slice(None), *(slice(0, r - s) for r, s in zip(self.shape, shift, strict=True)))]
            flat = tail.reshape(self.layers + 1, -1)
            alive = np.flatnonzero(np.isfinite(flat).any(0))
            if not len(alive):
                continue
            begins, where = np.unique(begin, return_index=True)
            found = np.full((self.layers, flat.shape[1]), np.inf)
            joined = combine(values[begin, end][:, None], flat[end][:, alive])
            found[np.ix_(begins, alive)] = np.minimum.reduceat(joined, where)
            view = out[(slice(0, self.layers), *(slice(s, None) for s in shift))]
            np.minimum(view, found.reshape(self.layers, *tail.shape[1:]), out=view)
        return out


class _Search:
    def __init__(self, cells: Sequence[Cells], limits: Limits) -> None:
        self.cells, self.limits, self.room = cells, limits, Room(cells, limits.devices)
        self.times = self._times(sorted({limits.in_flight(a) for a in range(limits.most_stages)}))
        self.total = sum(limits.devices)

    def _times(self, flights: Sequence[int]) -> dict[int, list[tuple[NDArray[np.float64], NDArray[np.int64]]]]:
        """Microbatches in flight, ascending → of each cell float64[start, stop] of the fastest option that fits, and
        which it is. Those that fit become fewer: only where the fastest no more does another is looked for."""
        out: dict[int, list[tuple[NDArray[np.float64], NDArray[np.int64]]]] = {n: [] for n in flights}
        for cell in self.cells:
            every = cell.stage_s(self.limits.num_microbatches)
            held = cell.held_waiting if self.limits.contexts else cell.held
            option = every.argmin(0)
            seconds, first, more = (x[option, np.arange(len(option))] for x in (every, *held))
            for n in flights:
                no_more = np.flatnonzero(np.isfinite(seconds) & (first + (n - 1) * more > cell.memory_bytes))
                if len(no_more):
                    able, one, each = (x[:, no_more] for x in (every, *held))
                    able = np.where(one + (n - 1) * each <= cell.memory_bytes, able, np.inf)
                    fastest = option[no_more] = able.argmin(0)
                    seconds[no_more], first[no_more], more[no_more] = (
                        x[fastest, np.arange(len(no_more))] for x in (able, one, each)
                    )
                out[n].append((cell.spread(seconds), np.append(option, -1)[cell.number]))
        return out

    def run(self) -> list[Partition]:
        """Looks at the least bound that some cut keeps to, at the largest that may be worth it, and between two of them
        at the middle one where that may be better for some number of stages: with bounds above t₁ and below t₂,
        T ≥ (m − 1) t₁ + F(t₂), as F falls with t."""
        bounds, m = self._bounds(), self.limits.num_microbatches
        first = bisect.bisect_left(bounds, True, key=lambda bound: self._reachable(bound * self.limits.step))
        if first == len(bounds):
            return []
        best: dict[int, Partition] = {}
        sums = {first: self._looked_at(bounds[first], best)}
        enough_s = min(p.estimate_s for p in best.values()) / (m - 1) if m > 1 else math.inf
        last = max(first, bisect.bisect_left(bounds, enough_s) - 1)
        if last > first:
            sums[last] = self._looked_at(bounds[last], best)
        todo = [(first, last)]
        while todo:
            low, high = todo.pop()
            if high - low < 2:
                continue
            least_s, above = (m - 1) * bounds[low + 1], sums[high]
            most_s = sorted(p.estimate_s for p in best.values())[: self.limits.wanted][-1]
            better = [n for n, total in above.items() if least_s + total < min(best[n].estimate_s, most_s)]
            if not better:
                continue
            middle = (low + high) // 2
            sums[middle] = above | self._looked_at(bounds[middle], best, max(better))
            todo += [(middle, high), (low, middle)]
        return sorted(best.values(), key=lambda p: (p.estimate_s, len(p.stages)))

    def _bounds(self) -> list[float]:
        """Bounds on the slowest stage, ascending."""
        every = np.concatenate([t[np.isfinite(t)] for found in self.times.values() for t, _ in found] or [np.zeros(0)])
        bounds: list[float] = []
        for bound in np.unique(every).tolist():
            if not bounds or self.limits.step == 1 or bound >= bounds[-1] * self.limits.step:
                bounds.append(bound)
        return bounds

    def _looked_at(self, bound: float, best: dict[int, Partition], most: int | None = None) -> dict[int, float]:
        """Number of stages, up to ``most`` → the least sum over cuts in which no stage exceeds ``bound``; ``best``
        learns those that are better than what it has."""
        limits, m = self.limits, self.limits.num_microbatches
        out: dict[int, float] = {}
        table = list(self._tables(bound * limits.step, most))
        for stages, sums in enumerate(table[limits.least_stages :], limits.least_stages):
            total = float(sums[0].min())
            if not np.isfinite(total):
                continue
            out[stages] = total
            if stages not in best or (m - 1) * bound + total < best[stages].estimate_s:
                found = self._partition(table, stages, bound * limits.step)
                times = [
                    self.times[limits.in_flight(stages - 1 - k)][s.cell][0][s.start, s.stop]
                    for k, s in enumerate(found)
                ]
                estimate = (m - 1) * float(max(times)) + total
                if stages not in best or estimate < best[stages].estimate_s:
                    best[stages] = Partition(tuple(found), estimate)
        return out

    def _reachable(self, bound: float) -> bool:
        """True where some cut has no stage slower than ``bound``: if so, also for any larger one."""
        if len(self.room.unit) == 1:
            return bool(self._fewest(bound, self.limits.most_stages))
        return any(
            np.isfinite(sums[0]).any() for sums in itertools.islice(self._tables(bound), self.limits.least_stages, None)
        )

    def _fewest(self, bound: float, most: int) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Of 0, 1, … stages of layers i … n−1 that take ``bound`` at most: float64[layers + 1] each of the fewest
        devices that they need, and that the stages in front of them do, inf where there are none; as many as a cut into
        ``most`` stages at most has, none where there is no such cut."""
        limits, size = self.limits, np.array([float(c.submesh.size) for c in self.cells])
        needs: dict[int, NDArray[np.float64]] = {}
        behind = [np.where(np.arange(self.room.layers + 1) == self.room.layers, 0.0, np.inf)]
        for after in range(most):
            n = limits.in_flight(after)
            if n not in needs:
                needs[n] = np.full((self.room.layers, self.room.layers + 1), np.inf)
                for c in np.argsort(-size, kind="stable"):
                    needs[n][self.times[n][c][0] <= bound] = size[c]
            behind.append(np.append((needs[n] + behind[-1]).min(1), np.inf))
        stages = [a for a in range(max(1, limits.least_stages), most + 1) if behind[a][0] <= self.total]
        out: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
        in_front = np.full(self.room.layers + 1, np.inf)
        for after in reversed(range(max(stages, default=-1) + 1)):
            if out:
                in_front = (needs[limits.in_flight(after)] + in_front[:-1, None]).min(0)
            in_front[0] = 0.0 if after in stages else np.inf
            out.append((behind[after], in_front))
        return out[::-1]

    def _stage(self, after: int, c: int, bound: float, start: int | slice = slice(None)) -> NDArray[np.float64]:
        """float64[stop], or of several starts [start, stop]: a stage with ``after`` others behind it, and what it sends
        to the next."""
        limits = self.limits
        seconds = self.times[limits.in_flight(after)][c][0][start]
        sends_s = limits.cut_s[: seconds.shape[-1]] * (1 - limits.hidden)
        if after == 0:
            sends_s = np.append(np.full(seconds.shape[-1] - 1, np.inf), 0.0)
        return np.where(seconds <= bound, seconds + sends_s, np.inf)

    def _tables(self, bound: float, most: int | None = None) -> Iterator[NDArray[np.float64]]:
        """F[stages]: float64[layers + 1, devices used of each group …], for each number of stages from 0 to ``most``;
        inf where no cut has as many devices as those and the others need."""
        table = self.room.no_stages()
        yield table
        fewest = self._fewest(bound, self.limits.most_stages if most is None else most)
        for after in range(len(fewest) - 1):
            (behind, _), (_, in_front) = fewest[after : after + 2]
            stages: list[NDArray[np.float64]] = []
            for c, cell in enumerate(self.cells):
                able = in_front[:-1, None] + cell.submesh.size + behind <= self.total
                stages.append(np.where(able, self._stage(after, c, bound), np.inf))
            if len(self.room.unit) == 1:
                near, wanted = (self._window(*both) for both in fewest[after : after + 2])
                table = self.room.one_more_near(table, stages, near, wanted)
            else:
                table = self.room.one_more(table, stages, np.add)
            yield table

    def _window(self, behind: NDArray[np.float64], in_front: NDArray[np.float64]) -> Window:
        """Devices of stages that need ``behind`` and leave ``in_front``."""
        spare, unit = self.total - behind - in_front, self.room.unit[0]
        return np.where(spare >= 0, behind, 0).astype(np.int64) // unit, int(spare.max()) // unit + 1

    def _partition(self, table: list[NDArray[np.float64]], stages: int, bound: float) -> list[StageChoice]:
        """The choices behind a table's best entry for a number of stages."""
        at = 0
        used = np.unravel_index(int(table[stages][0].argmin()), self.room.shape)
        out: list[StageChoice] = []
        for after in reversed(range(stages)):
            wanted = table[after + 1][(at, *used)]
            for c, shift in enumerate(self.room.shift):
                left = tuple(int(u) - s for u, s in zip(used, shift, strict=True))
                if min(left) < 0:
                    continue
                sums = self._stage(after, c, bound, at) + table[after][(slice(None), *left)]
                stop = int(sums.argmin())
                if sums[stop] <= wanted * (1 + 1e-12):
                    option = int(self.times[self.limits.in_flight(after)][c][1][at, stop])
                    out.append(StageChoice(at, stop, c, option))
                    at, used = stop, left
                    break
            else:
                raise AssertionError("no stage leads to the table's entry")
        return out
