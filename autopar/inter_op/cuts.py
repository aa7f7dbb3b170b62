"""What the layouts of layers → cuts into stages worth building, by estimate: `Cuts`.

A cut is a partition into stages k, on submeshes that fill the cluster, by  (m − 1) max_k t_k + Σ_k t_k  with m
microbatches, as many of them held by each stage as the schedule has in flight: dynamic programming
(`inter_op.stage_dp`). Schedules differ in what they hold and hide, which their records say (`inter_op.schedules`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.inter_op.cells import Cells
from autopar.inter_op.least_memory import least_memory
from autopar.inter_op.ranges import FIELDS
from autopar.inter_op.schedules import SCHEDULES, ScheduleOptions, ScheduleRecord, plain_schedule
from autopar.inter_op.search_space import chunk_counts
from autopar.inter_op.stage_dp import Limits, Partition, partitions
from autopar.inter_op.stage_layouts import MOST_STAGES, crossing_bytes, most_stages
from autopar.ir.cluster import ClusterSpec
from autopar.ir.layers import LayeredGraph
from autopar.ir.pipelined import PipelineOptions

BUILT = 4
"""Partitions that are built for each schedule (guessed)."""


class Cuts:
    """Cuts of a step in layers for a cluster under each of ``schedules``, as far as ``options`` leave them."""

    def __init__(
        self, layered: LayeredGraph, cluster: ClusterSpec, options: PipelineOptions, schedules: tuple[str, ...]
    ) -> None:
        self.layered, self.cluster, self.options, self.schedules = layered, cluster, options, schedules
        self.count, self.m = len(layered.layers), layered.num_microbatches
        self.plain = plain_schedule(trains=layered.loss >= 0)
        self.crossing = crossing_bytes(layered)
        self.devices = tuple(g.hosts * g.devices_per_host for g in cluster.groups)

    def candidates(self, cells: Sequence[Cells]) -> list[tuple[Partition, str, ScheduleOptions]]:
        """The best partitions under each schedule, with the schedule's options."""
        out: list[tuple[Partition, str, ScheduleOptions]] = []
        plain = self._partitions(cells, self.limits(self.plain, self._held(self.plain)))
        for name in self.schedules:
            schedule = SCHEDULES[name]
            if schedule.chunked:
                found = self._chunked(cells, schedule)
            else:
                found = [(p, ()) for p in self._cuts(cells, schedule, plain)]
            out += [(partition, name, given) for partition, given in found[:BUILT]]
        return out

    def roomier(self, cells: Sequence[Cells]) -> list[Cells]:
        """With as much memory as the leanest cut needs by estimate; where stages are given, of the schedules that are
        allowed."""
        at, need = self.at_starts(cells), 0.0
        if self.options.starts is not None:
            plain = [SCHEDULES[name] for name in self.schedules if not SCHEDULES[name].chunked]
            need = min((least_memory(at, self.limits(s, self._held(s))) for s in plain), default=0.0)
        need = max(need if np.isfinite(need) else 0.0, least_memory(at, self.leanest()))
        return [replace(c, memory_bytes=c.memory_bytes * max(1.0, need) * (1 + 1e-9)) for c in cells]

    def _held(self, schedule: ScheduleRecord) -> tuple[int, ...]:
        """Microbatches that each of as many stages as there are layers holds. Where that follows from the stages after,
        the last of these are what fewer stages hold."""
        return schedule.in_flight(self.count, self.m)

    def limits(
        self, schedule: ScheduleRecord, held: Sequence[int], stages: int | None = None, chunks: int = 1
    ) -> Limits:
        """What is searched: so many stages (None: all numbers that are allowed), ``chunks`` of them on each device; the
        last stages hold the last of ``held`` microbatches."""
        nic = min(g.nic.bytes_per_s * g.nics_per_host for g in self.cluster.groups)
        latency = max(g.nic.latency_s for g in self.cluster.groups)
        if sum(g.hosts for g in self.cluster.groups) == 1:
            nic = self.cluster.groups[0].intra_host.bytes_per_s
            latency = self.cluster.groups[0].intra_host.latency_s
        both = 2.0 if self.layered.loss >= 0 else 1.0
        least, _ = self.options.stages or (1, None)
        return Limits(
            devices=tuple(chunks * d for d in self.devices),
            most_stages=stages or most_stages(self.options, self.count, self.cluster),
            least_stages=stages or least,
            num_microbatches=self.m,
            in_flight=lambda after: held[-1 - after],
            cut_s=both * (latency + self.crossing / nic),
            hidden=schedule.hides,
            contexts=schedule.splits_backward,
            wanted=BUILT,
        )

    def _partitions(self, cells: Sequence[Cells], limits: Limits) -> list[Partition]:
        cells = self.at_starts(cells)
        if not self.options.uniform:
            return partitions(cells, limits)
        found: list[Partition] = []
        for number, cell in enumerate(cells):
            for p in partitions([cell], limits):
                found.append(replace(p, stages=tuple(replace(s, cell=number) for s in p.stages)))
        return sorted(found, key=lambda p: p.estimate_s)

    def at_starts(self, cells: Sequence[Cells]) -> Sequence[Cells]:
        """Only stages that begin and end where the user wants, on the submesh that the user wants there and with the
        batch where the user wants it."""
        starts = self.options.starts
        if starts is None:
            return cells
        ends = (*starts[1:], self.count)
        given, bound = self.options.submeshes, self.options.batch_axes or ()
        out: list[Cells] = []
        for cell in cells:
            cost = np.full((len(cell.cost), len(starts), len(FIELDS)), np.inf)
            numbers = np.full_like(cell.number, -1)
            each = len(bound) == len(starts) > 1
            for number, (start, stop) in enumerate(zip(starts, ends, strict=True)):
                if given is None or len(given) != len(starts) or given[number] == (
                    cell.submesh.hosts, cell.submesh.devices
                ):  # fmt: skip
                    rows = np.array([not each or axes == bound[number] for axes in cell.batch_axes], bool)
                    cost[rows, number], numbers[start, stop] = cell.at(start, stop)[rows], number
            out.append(replace(cell, number=numbers, cost=cost))
        return out

    def _cuts(self, cells: Sequence[Cells], schedule: ScheduleRecord, plain: list[Partition]) -> list[Partition]:
        """A stage a mesh. ``plain``: the cuts under the plain schedule, whose numbers of stages are tried where what a
        stage holds depends on how many there are."""
        if schedule is self.plain:
            return plain
        if schedule.in_flight_by_stages_after:
            return self._partitions(cells, self.limits(schedule, self._held(schedule)))
        out: list[Partition] = []
        for p in sorted({len(part.stages) for part in plain[:BUILT]} - {1}):
            out += self._partitions(cells, self.limits(schedule, schedule.in_flight(p, self.m), p))[:1]
        return out

    def _chunked(self, cells: Sequence[Cells], schedule: ScheduleRecord) -> list[tuple[Partition, ScheduleOptions]]:
        """Equal meshes that fill a group of hosts, each with several stages: the cuts whose slowest stages are
        fastest, and how many stages a mesh has."""
        found: list[tuple[Partition, ScheduleOptions]] = []
        for number, cell in enumerate(cells):
            group = self.cluster.groups[cell.submesh.group]
            meshes, rest = divmod(group.hosts * group.devices_per_host, cell.submesh.size)
            if meshes < 2 or rest:
                continue
            for v in self.chunk_counts((schedule.name,)):
                stages = meshes * v
                least, most = self.options.stages or (1, None)
                if not least <= stages <= min(self.count, most or 4 * MOST_STAGES):
                    continue
                held = max(schedule.in_flight(meshes, self.m, chunks=v))
                part = replace(self.at_starts([cell])[0], memory_bytes=cell.memory_bytes / v)
                limits = self.limits(schedule, (held,) * stages, stages, v)
                for p in partitions([part], limits)[:1]:
                    choices = tuple(replace(s, cell=number) for s in p.stages)
                    each_s = cell.stage_s(self.m)
                    slowest_s = max(each_s[s.option, cell.number[s.start, s.stop]] for s in choices)
                    # a mesh runs v stages in turn: each microbatch keeps it that often as long as the slowest
                    more_s = (v - 1) * (self.m - 1) * float(slowest_s)
                    found.append((Partition(choices, p.estimate_s + more_s), (("chunks", v),)))
        return sorted(found, key=lambda chosen: chosen[0].estimate_s)

    def chunk_counts(self, schedules: Sequence[str]) -> tuple[int, ...]:
        """Numbers of stages a mesh, 2 or more, that are tried."""
        found, wanted = chunk_counts(schedules), self.options.virtual_stages
        return found if wanted is None or not found else (wanted,)

    def leanest(self) -> Limits:
        """What cuts hold at least under the schedules that are allowed, with a stage a mesh: as many microbatches as
        under the plain one, and on every stage as many as a single stage."""
        alone = min(SCHEDULES[name].in_flight(1, self.m)[-1] for name in self.schedules)
        return self.limits(self.plain, [max(alone, held) for held in self._held(self.plain)])
