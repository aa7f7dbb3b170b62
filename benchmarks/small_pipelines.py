"""Is the pipeline that is planned the best of all? Exhaustive simulation of small cases; needs no device.

    python -m benchmarks.small_pipelines [--cases 200] [--seed 0]

Random steps and clusters (`benchmarks.small_steps`). What `plan_pipeline` chooses, against the fastest of all pipelines
that fit when they are simulated:

    cuts        every cut of the layers into stages
    submeshes   every assignment of submeshes to stages that the cluster has room for, in any order
    options     every logical shape and every price on memory of each stage, its layouts those of `ranges`
    schedules   every one; eager 1F1B with every depth that differs; interleaved with every number of chunks, on any
                number of equal meshes

Nothing is left out but what cannot beat the best so far, by what a step takes at least (`lower_bounds.least_s`).
``--check`` simulates those too, and fails where one is faster than its bound or holds less. The planner bounds memory
as well; here everything that may be faster is simulated, and only then asked whether it fits.

Bars: within 1 % in the mean and 5 % at worst, and never "does not fit" where something does. Where a case has a limit
on memory, the pipeline without one is planned first, and devices get a part of what it needs; cases in which nothing at
all fits are not counted, but it must have been said so.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from rich.table import Table as Rows

from autopar.inter_op.candidates import Builder, Option
from autopar.inter_op.cells import Cells
from autopar.inter_op.layer_layouts import Setting, table_of
from autopar.inter_op.layer_problems import parts_of
from autopar.inter_op.lower_bounds import least_bytes, least_s, work_s
from autopar.inter_op.pipeline_search import Pipeline, plan_pipeline
from autopar.inter_op.ranges import FIELDS
from autopar.inter_op.schedules import SCHEDULES
from autopar.inter_op.stage_dp import Partition, StageChoice
from autopar.inter_op.submesh import Submesh, logical_shapes, mesh_of, submeshes
from autopar.ir.errors import InfeasibleError
from autopar.ir.pipeline import StageCost
from benchmarks.small_steps import Case, random_case, with_memory

MEAN_BAR, WORST_BAR = 0.01, 0.05
MOST_CHUNKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One case: seconds a step of what was planned (inf: nothing was found), of the best of all, and which that is;
    pipelines that there are and that were simulated."""

    text: str
    planned_s: float
    planned: str
    best_s: float
    best: str
    simulated: int

    @property
    def off(self) -> float:
        """What the plan is slower by, as a part of the best; 0 where nothing fits, and that was said, and where sums in
        another order differ by their rounding."""
        same = math.isclose(self.planned_s, self.best_s, rel_tol=1e-12)
        return 0.0 if same else self.planned_s / self.best_s - 1


def outcome(case: Case, *, check: bool = False) -> Outcome:
    """Plans a case, and searches it exhaustively."""
    with tempfile.TemporaryDirectory() as cache:
        if case.memory:
            free = plan_pipeline(case.layered, case.cluster, case.options)
            part = max(w.peak_bytes for w in free.timeline.workers)
            case = replace(case, cluster=with_memory(case.cluster, case.memory * part))
        planned: Pipeline | None = None
        with suppress(InfeasibleError):  # what it is compared with says whether that is right
            planned = plan_pipeline(case.layered, case.cluster, case.options, cache=cache)
        every = Exhaustive(case, cache, check=check)
    every.run(planned.step_s if planned is not None else math.inf)
    chosen = "nothing fits"
    if planned is not None:
        chosen = next(text for text, _, seconds in planned.simulated if seconds == planned.step_s)
    return Outcome(
        text=case.text,
        planned_s=planned.step_s if planned is not None else math.inf,
        planned=chosen,
        best_s=every.best_s,
        best=every.best or chosen,
        simulated=every.simulated,
    )


class Exhaustive:
    """All pipelines of a case. ``best`` is empty where none is faster than what `run` was given."""

    def __init__(self, case: Case, cache: str | None, *, check: bool = False) -> None:
        self.case, self.check = case, check
        self.m = case.layered.num_microbatches
        self.count = len(case.layered.layers)
        parts = parts_of(case.layered, case.options.remat)
        self.kinds = submeshes(case.cluster)
        shapes = [(s, shape) for s in self.kinds for shape in logical_shapes(case.cluster, s)]
        meshes = [mesh_of(case.cluster, s, shape, range(s.size)) for s, shape in shapes]
        made = [table_of(parts, mesh, Setting(cache=cache)) for mesh in meshes]
        self.options: list[list[Option]] = []
        for kind in self.kinds:
            mine = [table for (s, _), table in zip(shapes, made, strict=True) if s == kind]
            self.options.append([Option(table, p) for table in mine for p in range(len(table.ranges.prices))])
        none = np.zeros((0, 0), np.int64), np.zeros((0, 0, len(FIELDS)))  # a Builder asks cells for their submesh only
        cells = [Cells(s, 0.0, *none) for s in self.kinds]
        self.builder = Builder(parts, case.cluster, cells, self.options)
        self.choices: dict[tuple[int, int, int], list[tuple[int, StageCost]]] = {}
        self.best_s, self.best, self.simulated = math.inf, "", 0

    def run(self, known_s: float = math.inf) -> None:
        """Simulates all that may be faster than ``known_s``."""
        self.best_s = known_s
        for stages in range(1, self.count + 1):
            for inner in itertools.combinations(range(1, self.count), stages - 1):
                ends = list(itertools.pairwise((0, *inner, self.count)))
                for cells in self._assignments(stages):
                    for choices in self._choices(ends, cells):
                        self._plain(choices)
                for kind, chunks in itertools.product(range(len(self.kinds)), range(2, MOST_CHUNKS + 1)):
                    meshes = stages // chunks
                    if stages % chunks or meshes < 2 or not self._room([self.kinds[kind]] * meshes):
                        continue
                    for choices in self._choices(ends, [kind] * stages):
                        for name in (name for name, schedule in SCHEDULES.items() if schedule.chunked):
                            self._simulate(choices, name, chunks=chunks)

    def _assignments(self, stages: int) -> Iterator[tuple[int, ...]]:
        """A submesh for each stage."""
        for found in itertools.product(range(len(self.kinds)), repeat=stages):
            if self._room([self.kinds[c] for c in found]):
                yield found

    def _room(self, wanted: Sequence[Submesh]) -> bool:
        groups = self.case.cluster.groups
        return all(
            sum(s.size for s in wanted if s.group == g) <= group.hosts * group.devices_per_host
            for g, group in enumerate(groups)
        )

    def _options(self, cell: int, start: int, stop: int) -> list[tuple[int, StageCost]]:
        """Options of a stage, those with equal layouts once."""
        key = (cell, start, stop)
        if key not in self.choices:
            found: dict[object, tuple[int, StageCost]] = {}
            for number, option in enumerate(self.options[cell]):
                ranges = option.table.ranges
                picked = ranges.picked(option.price, start, stop)
                layouts = tuple(option.table.layouts[start + i][c] for i, c in enumerate(picked))
                same = (option.table.mesh.shape, layouts)
                found.setdefault(same, (number, ranges.stage_cost(option.price, start, stop)))
            self.choices[key] = list(found.values())
        return self.choices[key]

    def _choices(
        self, ends: Sequence[tuple[int, int]], cells: Sequence[int], before_s: float = 0.0
    ) -> Iterator[tuple[StageChoice, ...]]:
        """All options of the stages, but those of which one stage alone takes too long."""
        if not ends:
            yield ()
            return
        (start, stop), cell = ends[0], cells[0]
        for option, cost in self._options(cell, start, stop):
            if not self.check and before_s + work_s(cost, self.m) >= self.best_s:
                continue
            first = StageChoice(start, stop, cell, option)
            for rest in self._choices(ends[1:], cells[1:], before_s + cost.forward_s):
                yield (first, *rest)

    def _plain(self, choices: tuple[StageChoice, ...]) -> None:
        """One stage a mesh, under every schedule."""
        for name, schedule in SCHEDULES.items():
            if schedule.trains and not schedule.chunked:
                for given in schedule.distinct(self.m):
                    self._simulate(choices, name, **dict(given))

    def _simulate(self, choices: tuple[StageChoice, ...], name: str, **given: int) -> None:
        built = self.builder.build(Partition(choices, 0.0), name, **given)
        if built is None:
            return
        least = least_s(built.plan)
        if least >= self.best_s and not self.check:
            return
        step = self.builder.simulated(built)
        self.simulated += 1
        seconds = step.timeline.makespan_s
        assert least <= seconds * (1 + 1e-9), f"{built.text} takes {seconds} s, the bound was {least} s"
        for held, worker in zip(least_bytes(built.plan), step.timeline.workers, strict=True):
            assert held <= worker.peak_bytes * (1 + 1e-9), f"{built.text}: {worker.peak_bytes}, the bound was {held}"
        if seconds < self.best_s and step.fullest(None)[0] <= 1:
            self.best_s, self.best = seconds, built.text + "".join(f", {k} {v}" for k, v in given.items())


def main() -> int:
    """Prints the cases that are furthest from the best; returns 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="leave nothing out, and check the bounds")
    options = parser.parse_args()
    found: list[tuple[int, Outcome]] = []
    began = time.perf_counter()
    number = nothing = 0
    while len(found) < options.cases:
        one = outcome(random_case(np.random.default_rng((options.seed, number))), check=options.check)
        if math.isfinite(one.best_s):
            found.append((number, one))
        nothing += not math.isfinite(one.best_s)
        number += 1
    console = Console(width=160)
    rows = Rows(title="cases that are furthest from the best of all pipelines")
    for name in ("number", "case", "planned", "best", "off %"):
        rows.add_column(name, justify="right" if name in ("number", "off %") else "left")
    for number, one in sorted(found, key=lambda f: -f[1].off)[:12]:
        if one.off > 0:
            rows.add_row(str(number), one.text, one.planned, one.best, f"{100 * one.off:.2f}")
    console.print(rows)
    off = [one.off for _, one in found]
    mean, worst = statistics.mean(off), max(off)
    console.print(
        f"{len(found)} cases, and {nothing} in which nothing fits; {sum(one.simulated for _, one in found)} "
        f"pipelines simulated in {time.perf_counter() - began:.0f} s: {sum(o > 0 for o in off)} not the best, mean "
        f"{100 * mean:.2f} % (bar {100 * MEAN_BAR:.0f} %), worst {100 * worst:.2f} % (bar {100 * WORST_BAR:.0f} %)"
    )
    return int(mean > MEAN_BAR or worst > WORST_BAR)


if __name__ == "__main__":
    raise SystemExit(main())
