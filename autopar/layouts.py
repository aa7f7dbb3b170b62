"""All ways to run the layers of a step on one logical mesh, and what ranges of them cost there.

Runs where jax is not: in this process or in one of several (`tables`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from autopar.garbage import collection_paused
from autopar.inter_op.ranges import Price, Ranges, ranges
from autopar.inter_op.stage_graph import stage_graph
from autopar.intra_op.specs import Mesh
from autopar.intra_op.stage_costs import StageProblem
from autopar.ir.cluster import LogicalMesh
from autopar.ir.layers import REMAT, LayeredGraph, StageGraph
from autopar.ir.pipeline import Layout

RATES = {"none": (0.01, 0.1, 1.0), "dots": (0.1,), "full": (0.01, 0.1, 1.0)}
"""Prices that are tried beside 0, by what is kept: as parts of the step's time for all of a device's memory (guessed:
from cheap to dear)."""
ALL_RATES = sorted({r for rates in RATES.values() for r in rates})
IN_FLIGHT = (1, 4, 16)
"""Microbatches in flight that activations are priced for, in ranges; layers are solved for the middle one (guessed)."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A step's layers as stages of their own: ``layers[k]`` is layer k's under the first choice of ``remats``. Equal
    ones have one number, ``number[k]``; ``example[number]`` is the first layer that has it, ``graphs[remat][number]``
    what it is under each choice."""

    layered: LayeredGraph
    remats: tuple[str, ...]
    layers: tuple[StageGraph, ...]
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
    first = tuple(stage_graph(layered, k, k + 1, remats[:1]) for k in range(len(layered.layers)))
    seen: dict[tuple[str, int], int] = {}
    number = tuple(
        seen.setdefault((part.graph.fingerprint, layered.layers[k].kind), len(seen)) for k, part in enumerate(first)
    )
    example = tuple(number.index(n) for n in range(len(seen)))
    graphs = {r: tuple(stage_graph(layered, k, k + 1, [r]) for k in example) for r in remats[1:]}
    graphs[remats[0]] = tuple(first[k] for k in example)
    return Parts(layered=layered, remats=remats, layers=first, graphs=graphs, number=number, example=example)


@collection_paused()
def table_of(
    parts: Parts, logical: LogicalMesh, forbid: tuple[str, ...] = (), user_rules: Mapping[str, str] | None = None
) -> Table:
    """Layouts of every distinct layer at every price, and ranges of them."""
    mesh = Mesh(logical, forbid)
    problems = [
        [StageProblem(parts.graphs[r][n], mesh, r, user_rules) for r in parts.remats] for n in range(len(parts.example))
    ]
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
        more = [p.solve(r * unit, middle * r * unit) for p in those for r in RATES[p.remat]]
        found.append(tuple(dict.fromkeys((*first, *more))))
    layouts = tuple(found[n] for n in parts.number)
    prices = (Price(0.0, 0.0), *(Price(r * unit, n * r * unit) for r in ALL_RATES for n in IN_FLIGHT))
    return Table(
        mesh=logical,
        layouts=layouts,
        ranges=ranges(
            parts.layered, parts.layers, layouts, prices, mesh.costs, lambda t: t.size_bytes / mesh.space(t).shards
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
        yield from pool.map(_work, tasks)
