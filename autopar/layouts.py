"""All ways to run the layers of a step on one logical mesh, and what ranges of them cost there.

Runs where jax is not: in this process or in one of several (`tables`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from types import ModuleType

from autopar.garbage import collection_paused
from autopar.inter_op.ranges import Price, Ranges, ranges
from autopar.inter_op.stage_graph import stage_graph
from autopar.intra_op.specs import Mesh
from autopar.intra_op.stage_costs import StageProblem
from autopar.ir.cluster import LogicalMesh
from autopar.ir.layers import REMAT, LayeredGraph, StageGraph
from autopar.ir.pipeline import Layout

RATES = (0.0, 0.01, 0.1, 1.0)
"""Prices that are tried: as parts of the step's time for all of a device's memory (guessed: from free to dear)."""
IN_FLIGHT = (1, 4, 16)
"""Microbatches in flight that activations are priced for, in ranges; layers are solved for the middle one (guessed)."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A step's layers as stages of their own. ``graphs[remat][k]`` is layer k's; equal ones have one number:
    ``number[k]``, and ``example[number]`` is the first layer that has it."""

    layered: LayeredGraph
    remats: tuple[str, ...]
    graphs: dict[str, tuple[StageGraph, ...]]
    number: tuple[int, ...]
    example: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """One mesh: ``layouts[k]`` of each layer, and what ranges cost."""

    mesh: LogicalMesh
    layouts: tuple[tuple[Layout, ...], ...]
    ranges: Ranges


def parts_of(layered: LayeredGraph, remats: Sequence[str] = REMAT) -> Parts:
    """Every layer as a stage, equal ones found."""
    remats = tuple(remats) if layered.loss >= 0 else ("none",)
    graphs = {r: tuple(stage_graph(layered, k, k + 1, [r]) for k in range(len(layered.layers))) for r in remats}
    seen: dict[tuple[str, ...], int] = {}
    number = tuple(
        seen.setdefault(tuple(graphs[r][k].graph.fingerprint for r in remats), len(seen))
        for k in range(len(layered.layers))
    )
    example = tuple(number.index(n) for n in range(len(seen)))
    return Parts(layered=layered, remats=remats, graphs=graphs, number=number, example=example)


@collection_paused()
def table_of(
    parts: Parts, logical: LogicalMesh, forbid: tuple[str, ...] = (), user_rules: Mapping[str, str] | None = None
) -> Table:
    """Layouts of every distinct layer at every price, and ranges of them."""
    mesh = Mesh(logical, forbid)
    problems = [[StageProblem(parts.graphs[r][k], mesh, r, user_rules) for r in parts.remats] for k in parts.example]
    free = [[p.solve() for p in those] for those in problems]
    count = parts.layered.num_microbatches
    total = 0.0
    for n in parts.number:
        cost = min((layout.cost for layout in free[n]), key=lambda c: c.forward_s + c.backward_s)
        total += count * (cost.forward_s + cost.backward_s) + cost.grad_sync_s + cost.update_s
    unit = total / logical.device.memory_bytes
    middle = IN_FLIGHT[len(IN_FLIGHT) // 2]
    found: list[tuple[Layout, ...]] = []
    for those, first in zip(problems, free, strict=True):
        more = [p.solve(r * unit, middle * r * unit) for r in RATES[1:] for p in those]
        found.append(tuple(dict.fromkeys((*first, *more))))
    layouts = tuple(found[n] for n in parts.number)
    prices = (Price(0.0, 0.0), *(Price(r * unit, n * r * unit) for r in RATES[1:] for n in IN_FLIGHT))
    first_remat = parts.graphs[parts.remats[0]]
    return Table(
        mesh=logical,
        layouts=layouts,
        ranges=ranges(
            parts.layered, first_remat, layouts, prices, mesh.costs, lambda t: t.size_bytes / mesh.space(t).shards
        ),
    )


_shared: list[Parts] = []
"""What a worker process was started for."""


def _started(parts: Parts) -> None:
    _shared.append(parts)


def _work(task: tuple[LogicalMesh, tuple[str, ...], Mapping[str, str] | None]) -> Table:
    return table_of(_shared[0], *task)


def tables(
    parts: Parts,
    meshes: Sequence[LogicalMesh],
    forbid: tuple[str, ...] = (),
    user_rules: Mapping[str, str] | None = None,
    workers: int | None = None,
) -> Iterator[Table]:
    """`table_of` for several meshes, in order. ``workers``: processes; default one a core, none for few layers."""
    tasks = [(mesh, forbid, user_rules) for mesh in meshes]
    if workers is None:
        workers = min(len(tasks), len(os.sched_getaffinity(0))) if len(tasks) * len(parts.example) > 4 else 1
    if workers <= 1:
        for task in tasks:
            yield table_of(parts, *task)
        return
    with ProcessPoolExecutor(workers, get_context("forkserver"), _started, (parts,)) as pool:
        with _no_main():
            made = pool.map(_work, tasks)  # submits everything, which starts the processes
        yield from made


@contextmanager
def _no_main() -> Iterator[None]:
    """Processes that start meanwhile do not run the user's script again, which they otherwise do before their work."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
