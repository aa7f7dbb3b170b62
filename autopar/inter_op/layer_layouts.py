"""All ways to run the layers of a step on one logical mesh, and what ranges of them cost there.

Runs where jax is not: in this process or in one of several (`tables`).
"""

from __future__ import annotations

import itertools
import math
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import TypeAlias

from autopar._version import __version__
from autopar.garbage import collection_paused
from autopar.inter_op.cache import StoredLayouts, key_of, load, store
from autopar.inter_op.layer_problems import LayerProblems, Parts
from autopar.inter_op.ranges import Price, Ranges, ranges
from autopar.inter_op.workers import CONTEXT, cores, handed, no_main, turns
from autopar.intra_op.batch_bound import Bound, ExampleDims
from autopar.intra_op.degrees import bound_by, check_met
from autopar.intra_op.mesh_problem import Asked, Masks
from autopar.intra_op.stage_costs import Solving, StageProblem
from autopar.ir.cluster import LogicalMesh
from autopar.ir.degrees import Degrees
from autopar.ir.errors import InfeasibleError, SolverTimeoutError
from autopar.ir.graph import Graph
from autopar.ir.pipeline import Layout
from autopar.ir.progress import Stop, Watch
from autopar.ir.sharding import ShardingSpec

RATES = {"none": (0.01, 0.1, 1.0), "dots": (0.1, 1.0), "full": (0.01, 0.1, 1.0)}
"""Prices that are tried beside 0, by what is kept: as parts of the step's time for all of a device's memory (guessed:
from cheap to dear)."""
SMALL_GAIN = 0.0075
"""The part of a layer's cost at a price that is not worth solving for (chosen: large layers are solved to that)."""
SAVES = 0.05
"""The part of the activations that a slower rematerialisation must save to be solved at prices (guessed)."""
FEW = 4
"""Up to so many distinct layers, counted on every mesh, are solved in this process (guessed)."""
POLL_S = 0.2
"""Seconds from one look at what other processes have done to the next."""
ALL_RATES = sorted({r for rates in RATES.values() for r in rates})
IN_FLIGHT = (1, 4, 16)
"""Microbatches in flight that activations are priced for, in ranges, as far as there are so many; layers are solved for
the middle one (guessed)."""


Wanted: TypeAlias = frozenset[tuple[int, str, float]]
"""(number of a distinct layer, what it keeps, the rate of `RATES` at which, or 0)."""
NoTable: TypeAlias = InfeasibleError | SolverTimeoutError
"""Why a mesh has no table."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """What one logical mesh can do: ``layouts[k]`` are those that layer k may have, ``ranges`` what ranges of layers
    cost."""

    mesh: LogicalMesh
    layouts: tuple[tuple[Layout, ...], ...]
    ranges: Ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What layouts follow from beside layers and mesh: collectives not to use, ``degrees`` of parallelism, the user's
    rules for operators (name, text). ``batch_axes``: positions of the mesh axes that the batch is split over, and no
    others; None: what degrees say, else the planner's choice. ``whole_examples``: True where no example may be split.
    ``solving``: how each is found. ``only``: what is solved, other layers have no layouts; None: all. ``cache``: a
    folder for what was solved, or None."""

    forbid: tuple[str, ...] = ()
    degrees: Degrees = field(default_factory=Degrees)
    batch_axes: tuple[int, ...] | None = None
    whole_examples: bool = False
    user_rules: tuple[tuple[str, str], ...] = ()
    solving: Solving = field(default_factory=Solving)
    only: Wanted | None = None
    cache: str | None = None

    def problems(self, parts: Parts) -> LayerProblems:
        """The sharding problems of layers under this setting, none posed yet."""
        return LayerProblems(parts, self.forbid, Asked(user_rules=dict(self.user_rules)))

    @property
    def binds(self) -> bool:
        """True where it says how the batch or its examples are split."""
        return self.batch_axes is not None or self.whole_examples or bool(self.degrees)

    def bound(self, logical: LogicalMesh) -> Bound:
        """What is bound on a mesh."""
        at = self.batch_axes
        named = None if at is None else tuple(logical.axis_names[a] for a in at)
        found = bound_by(self.degrees, logical.axis_names, named)
        return replace(found, whole_examples=self.whole_examples)


@dataclass(frozen=True, slots=True)
class _Found:
    """Layouts on a mesh; ``cut``: True where time ended before all were looked for."""

    layouts: StoredLayouts
    cut: bool


def table_of(
    parts: Parts, logical: LogicalMesh, setting: Setting | None = None, problems: LayerProblems | None = None
) -> Table:
    """Layouts of every distinct layer at every price on memory, from the cache where it has them, and what ranges of
    layers cost with these. ``problems``: those of ``parts`` under this setting, where the caller has them. Raises
    InfeasibleError where a layer cannot be on the mesh as asked, SolverTimeoutError where time ended before it could.
    """
    setting = setting or Setting()
    problems = problems or setting.problems(parts)
    return _table(parts, logical, _layouts_of(parts, logical, setting, problems, Watch()).layouts, problems)


def _layouts_of(parts: Parts, logical: LogicalMesh, setting: Setting, problems: LayerProblems, watch: Watch) -> _Found:
    """Layouts of every distinct layer; of ``parts`` only what `Parts.to_solve` leaves is looked at. What ``watch`` cut
    is not kept. Raises as `table_of`."""
    if setting.cache is None:
        return _solved("", problems, logical, setting, watch)
    key = _key(parts, logical, setting)
    if (stored := load(Path(setting.cache), StoredLayouts, key)) is not None:
        return _Found(stored, False)
    found = _solved(key, problems, logical, setting, watch)
    if not found.cut:
        store(Path(setting.cache), found.layouts)
    return found


def _table(parts: Parts, logical: LogicalMesh, stored: StoredLayouts, problems: LayerProblems) -> Table:
    """What ranges of layers cost with these layouts."""
    mesh = problems.mesh(logical)
    layouts, unit = tuple(stored.layouts[n] for n in parts.number), stored.unit_s
    prices = tuple(Price(r * unit, n * r * unit) for r, n in _prices(parts.layered.num_microbatches))
    found = ranges(
        parts.wires, parts.layered.num_microbatches, layouts, prices, mesh.costs,
        lambda t: t.size_bytes / mesh.space(t).shards,
    )  # fmt: skip
    return Table(mesh=logical, layouts=layouts, ranges=found)


def _prices(num_microbatches: int) -> list[tuple[float, int]]:
    """(rate, microbatches in flight) of each price of ranges."""
    flights = dict.fromkeys(min(n, num_microbatches) for n in IN_FLIGHT)
    return [(0.0, 0), *itertools.product(ALL_RATES, flights)]


def rate_of(price: int, num_microbatches: int) -> float:
    """The rate of price number ``price`` of a table's ranges."""
    return _prices(num_microbatches)[price][0]


def _solved(key: str, problems: LayerProblems, logical: LogicalMesh, setting: Setting, watch: Watch) -> _Found:
    """Layouts of distinct layers at no price and at each; the price of a byte at rate 1. Where time ends, what was
    found of each layer by then, the layouts without a price first. Raises SolverTimeoutError where a layer has none."""
    parts, cut = problems.parts, False
    only = None if setting.only is None else {(n, r) for n, r, _ in setting.only}
    posed: list[list[StageProblem]] = []
    for n in range(len(parts.example)):
        if watch.over():
            raise SolverTimeoutError(f"no layouts were found on {logical}")
        kept = [r for r in _distinct(parts, n) if only is None or (n, r) in only]
        posed.append(
            [StageProblem(parts.graphs[r][n], problems.posed(n, r, logical), r, solving=setting.solving) for r in kept]
        )
    if setting.binds:
        allowed = bound_masks(parts, posed, setting.degrees, setting.bound(logical))
        posed = [[p.held_to(allowed.get((n, k), {})) for k, p in enumerate(those)] for n, those in enumerate(posed)]
    free: list[list[Layout]] = []
    for n, those in enumerate(posed):
        found_here: list[Layout] = []
        for p in those:
            if watch.over():
                cut = True
                if not found_here:
                    raise SolverTimeoutError(f"layouts of {n} of {len(posed)} kinds of layers were found on {logical}")
                break
            found_here.append(p.solve(left_s=watch.left_s))
        free.append(found_here)
    count = parts.layered.num_microbatches
    alone = [min(_seconds(layout, count) for layout in free[n]) for n in parts.number if free[n]]
    unit = sum(alone) * len(parts.number) / len(alone) / logical.device.memory_bytes
    found: list[tuple[Layout, ...]] = []
    for n, (those, first) in enumerate(zip(posed, free, strict=True)):
        more = list[Layout]()
        for p, layout in _useful(those[: len(first)], first, count):
            if watch.over():
                break
            more += _priced(p, layout, unit, count, watch, _rates(n, p.remat, setting.only))
        more += [x for p in those for x in _whole(p)] if setting.forbid else []
        found.append(tuple(dict.fromkeys((*first, *more))))
    cut = cut or watch.over()
    return _Found(StoredLayouts(key=key, unit_s=unit, layouts=tuple(found)), cut)


def bound_masks(
    parts: Parts, problems: Sequence[Sequence[StageProblem]], degrees: Degrees, bound: Bound
) -> dict[tuple[int, int], Masks]:
    """What is allowed in problem k of the layers of number n, by (n, k): where examples are follows from the step's,
    layer by layer. Equal layers have them in the same places. Raises ShardingError for a degree by which no layer is
    split."""
    known = {v: ExampleDims.of_batch(parts.layered.values[v], dim) for v, dim in parts.layered.examples}
    by = set[str]()
    made: dict[tuple[int, tuple[tuple[int, ExampleDims], ...]], dict[int, ExampleDims]] = {}
    seen: dict[int, dict[int, ExampleDims]] = {n: {} for n in range(len(parts.example))}
    allowed: dict[tuple[int, int], Masks] = {}
    for part, n in zip(parts.layers, parts.number, strict=True):
        here = {
            i: known[port.value]
            for i, port in enumerate(part.receives)
            if port.phase == "forward" and port.value in known
        }
        key = (n, tuple(here.items()))
        if key not in made:
            seen[n] = {**here, **seen[n]}
            for k, problem in enumerate(problems[n]):
                met, made[key] = problem.bind(seen[n], degrees, bound)
                allowed[n, k] = met.allowed
                by |= met.by
        known |= {part.sends[i].value: dims for i, dims in made[key].items() if part.sends[i].phase == "forward"}
    check_met(degrees, by)
    return allowed


def _whole(problem: StageProblem) -> list[Layout]:
    """The best layout that takes and gives everything whole, if there is one. Where collectives are forbidden, those
    that are best for two neighbours may not meet; these always do."""
    stage, whole = problem.stage, dict[tuple[str, int], int]()
    for side, ports in (("receive", stage.receives), ("send", stage.sends)):
        for i, port in enumerate(ports):
            if port.phase in ("forward", "backward", "gradient"):
                spec = ShardingSpec(dims=((),) * len(port.type.shape))
                whole[side, i] = problem.mesh.code_of(port.type, spec)
    try:
        return [problem.solve(pins=whole)]
    except (KeyError, InfeasibleError, SolverTimeoutError):
        return []


def _distinct(parts: Parts, n: int) -> list[str]:
    """What layers of number n may keep, where that makes a difference to what they compute."""
    return list({parts.graphs[r][n].graph.fingerprint: r for r in reversed(parts.remats)}.values())[::-1]


def _seconds(layout: Layout, count: int) -> float:
    """Of a step with ``count`` microbatches."""
    cost = layout.cost
    return count * (cost.forward_s + cost.backward_s) + cost.grad_sync_s + cost.update_s


def _useful(
    problems: Sequence[StageProblem], free: Sequence[Layout], count: int
) -> Iterator[tuple[StageProblem, Layout]]:
    """Rematerialisations, fastest first, that hold clearly less than every faster one: of a layer that the user
    rematerialises already, mostly one."""
    least = math.inf
    for p, layout in sorted(zip(problems, free, strict=True), key=lambda found: _seconds(found[1], count)):
        held = layout.cost.activation_bytes
        if least == math.inf or held <= (1 - SAVES) * least:
            yield p, layout
        least = min(least, held)


def _rates(n: int, remat: str, only: Wanted | None) -> tuple[float, ...]:
    """Rates beside 0 at which a layer is solved: those that are wanted, and the nearest on either side."""
    every = (0.0, *RATES[remat])
    if only is None:
        return every[1:]
    found = set[float]()
    for rate in {rate for number, r, rate in only if (number, r) == (n, remat)}:
        at = min(range(len(every)), key=lambda k: (every[k] < rate, every[k]))
        found |= {*every[max(0, at - 1) : at + 2]}
    return tuple(sorted(found - {0.0}))


def _priced(
    problem: StageProblem, free: Layout, unit: float, count: int, watch: Watch, priced: tuple[float, ...]
) -> list[Layout]:
    """Layouts at the prices of the rates ``priced``, if any. The least cost is concave in the rate, so that between two
    rates it lies above the chord of theirs: a rate between is left out where the better of the two layouts is that near
    to the chord."""
    if not priced:
        return []
    rates = (0.0, *priced)
    middle = min(IN_FLIGHT[len(IN_FLIGHT) // 2], count)

    def solve(k: int) -> Layout:
        return problem.solve(rates[k] * unit, middle * rates[k] * unit, left_s=watch.left_s)

    def cost(layout: Layout, k: int) -> float:
        held = layout.cost.state_bytes + middle * layout.cost.activation_bytes
        return _seconds(layout, count) + rates[k] * unit * held

    def gain(low: int, high: int, k: int) -> float:
        """What rate k may bring at most, beyond what is not worth it."""
        share = (rates[k] - rates[low]) / (rates[high] - rates[low])
        chord = (1 - share) * cost(found[low], low) + share * cost(found[high], high)
        return min(cost(found[low], k), cost(found[high], k)) - (1 + SMALL_GAIN) * chord

    found = {0: free, len(rates) - 1: solve(len(rates) - 1)}
    todo = [(0, len(rates) - 1)]
    while todo and not watch.over():
        low, high = todo.pop()
        gains = {k: gain(low, high, k) for k in range(low + 1, high)}
        k = max(gains, key=lambda k: gains[k], default=-1)
        if k >= 0 and gains[k] > 0:
            found[k] = solve(k)
            todo += [(low, k), (k, high)]
    return [found[k] for k in sorted(found)]


def _priced_otherwise(graph: Graph) -> list[tuple[int, float | None]]:
    """What prices depend on and a fingerprint leaves out."""
    return [(n.id, n.flops) for n in graph.nodes if n.flops is not None]


def _key(parts: Parts, logical: LogicalMesh, setting: Setting) -> str:
    graphs = [(r, [(g.graph.fingerprint, _priced_otherwise(g.graph)) for g in parts.graphs[r]]) for r in parts.remats]
    mesh = (logical.axes, logical.device)
    rest = (
        sorted(setting.forbid),
        None if setting.only is None else sorted(setting.only),
        (setting.batch_axes, setting.whole_examples, parts.layered.examples if setting.binds else (), setting.degrees),
        sorted(setting.user_rules),
        setting.solving,
        RATES,
        IN_FLIGHT,
        SMALL_GAIN,
        SAVES,
        parts.layered.num_microbatches,
    )
    return key_of((__version__, graphs, parts.number, parts.pinned, mesh, rest))


_shared: list[tuple[Parts, Stop, Synchronized[int]]] = []
"""What a worker process works on, what ends it, and how many meshes have been begun in all processes."""


def _started(parts: Connection, turn: AbstractContextManager[bool], stop: Stop, begun: Synchronized[int]) -> None:
    """``parts`` has them for each process, which takes them when it is its ``turn``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the process that asks
    with turn:
        _shared.append((parts.recv(), stop, begun))


@collection_paused()
def _work(todo: Sequence[tuple[LogicalMesh, Setting, float]]) -> dict[int, _Found | NoTable]:
    """What this process finds of (mesh, what is asked there, when time ends: of time.time, which all processes
    share)."""
    (parts, stop, begun), out = _shared[0], dict[int, _Found | NoTable]()
    for k in turns(begun, len(todo)):
        logical, setting, ends_s = todo[k]
        watch = Watch(None if math.isinf(ends_s) else ends_s - time.time(), stop=stop)
        out[k] = _layouts_or_why(parts, logical, setting, setting.problems(parts), watch)
    return out


def tables(
    parts: Parts,
    meshes: Sequence[LogicalMesh],
    setting: Setting,
    workers: int | None = None,
    problems: LayerProblems | None = None,
    watch: Watch | None = None,
    only: Mapping[LogicalMesh, Wanted] | None = None,
    always: Collection[LogicalMesh] = (),
) -> list[Table | NoTable]:
    """`table_of` for several meshes, in order; of meshes that a layer cannot be on as asked, why.

    Those of ``always`` are first, then those of most axes, and of those the largest: they take longest, and one of them
    at the end would leave others idle; and where time ends before all are looked at, they do most (two axes can do what
    one can, and stages on many devices are few).

    Args:
        workers: processes, this one included; default one a core, this one alone for little work.
        problems: as in `table_of`, for what this process solves itself.
        watch: where it ends the search, tables have what was found by then, and so do those of the processes.
        only: of each mesh, as in `Setting`.
        always: meshes that are looked at to the end although time has ended.
    """
    watch = watch or Watch()
    until = {mesh: watch.without_limit() if mesh in always else watch for mesh in meshes}
    problems = problems or setting.problems(parts)
    settings = [setting if only is None else replace(setting, only=only[mesh]) for mesh in meshes]
    if workers is None:
        workers = min(len(meshes), cores()) if len(meshes) * len(parts.example) > FEW else 1
    order = sorted(
        range(len(meshes)), key=lambda k: (meshes[k] not in always, -len(meshes[k].shape), -meshes[k].num_devices)
    )
    found: dict[int, _Found | NoTable] = {}
    if workers <= 1:
        for k in order:
            watch.tell("layouts of layers, meshes", len(found), len(order))
            found[k] = _layouts_or_why(parts, meshes[k], settings[k], problems, until[meshes[k]])
    else:
        stop, begun, count = CONTEXT.Event(), CONTEXT.Value("q", 0), len(order)
        with (
            handed(parts.to_solve(), workers - 1) as given,
            ProcessPoolExecutor(workers - 1, CONTEXT, _started, (given, CONTEXT.Lock(), stop, begun)) as pool,
        ):
            with no_main():
                todo = [(meshes[k], settings[k], time.time() + until[meshes[k]].left_s) for k in order]
                others = {pool.submit(_work, todo) for _ in range(workers - 1)}
            try:
                for turn in turns(begun, count):
                    watch.tell("layouts of layers, meshes", max(0, turn - len(others)), count)
                    k = order[turn]
                    found[k] = _layouts_or_why(parts, meshes[k], settings[k], problems, until[meshes[k]])
                while others:
                    watch.tell("layouts of layers, meshes", count - len(others), count)
                    if watch.stopped:
                        stop.set()
                    done, others = wait(others, POLL_S, FIRST_COMPLETED)
                    for future in done:
                        found |= {order[turn]: what for turn, what in future.result().items()}
            finally:  # an error, or Ctrl-C, ends it without what has not begun, and what has at its next solution
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
    if any(isinstance(x, _Found) and x.cut for x in found.values()):
        watch.was_cut()
    return [
        _table(parts, mesh, made.layouts, problems) if isinstance(made := found[k], _Found) else made
        for k, mesh in enumerate(meshes)
    ]


def _layouts_or_why(
    parts: Parts, mesh: LogicalMesh, setting: Setting, problems: LayerProblems, watch: Watch
) -> _Found | NoTable:
    try:
        return _layouts_of(parts, mesh, setting, problems, watch)
    except (InfeasibleError, SolverTimeoutError) as error:
        return error
