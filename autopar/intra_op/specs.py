"""All shardings of one shape on one mesh, and the cheapest chain of steps between any two.

A sharding is a *code*: one integer per mesh axis: the dimension that the axis splits, `REPLICATED` or `UNREDUCED`. Axes
that split the same dimension do so in mesh order, major to minor. Steps (each one collective over one axis or several,
or local): all-gather of a dimension's minor axes, all-to-all of them to another dimension, all-reduce or reduce-scatter
of partial sums, slicing locally, and masking (a finished value becomes partial sums: kept on shard 0, zero elsewhere).
The cost between two codes is the shortest path, and `Mesh.chain` returns that very path for the lowering to emit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import dijkstra

from autopar.cost.collectives import COMBINED_BYTES, collective_s, combined_bytes
from autopar.cost.scattering import stays_scattered
from autopar.cost.tiling import LANES, padded, scattered
from autopar.intra_op.precision import NARROW, WIDE
from autopar.ir.cluster import LinkSpec, LogicalMesh, MeshAxis
from autopar.ir.graph import TensorType
from autopar.ir.sharding import ShardingSpec
from autopar.ir.strategy import ReshardStep

REPLICATED = -1
UNREDUCED = -2
LOCAL_STEP_S = 2e-7
"""Fixed price of a local slice or mask (guessed: it keeps chains short among equals)."""

STEP_S = 1e-12
"""Added to each collective of a chain: one over two axes before an equally dear chain of several."""

Code = tuple[int, ...]
_COMMUNICATES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


def _seen(axis: MeshAxis, kind: str) -> LinkSpec:
    """What a collective sees of an axis."""
    return axis.exchange or axis.link if kind == "all-to-all" else axis.link


@dataclass(frozen=True, slots=True)
class SpecSpace:
    """The codes of one shape: ``codes[i]``; ``index`` maps a code back. ``shards`` is float64[codes], how many parts a
    value is split in; ``padding`` and ``by_rows`` are float64[codes], how many times its bytes a part takes in memory,
    and while rows are scattered into it or looked up in it (`cost.tiling`); ``has_unreduced`` is bool[codes]; ``dense``
    is int64[(rank + 2)^axes], from the number whose digits are a code's entries + 2 to its index, -1 where the code
    does not divide the shape. ``by_pair``: (source, destination) → the step between them."""

    shape: tuple[int, ...]
    codes: tuple[Code, ...]
    index: dict[Code, int]
    shards: Any
    padding: Any
    by_rows: Any
    dense: Any
    has_unreduced: Any
    steps: tuple[tuple[int, int, str, tuple[int, ...], int, int], ...]
    """(source, destination, kind, axes, source dimension, destination dimension)."""
    by_pair: dict[tuple[int, int], tuple[int, int, str, tuple[int, ...], int, int]]


class Mesh:
    """The planner's view of a LogicalMesh: axes larger than 1, spec spaces and chains, all cached. ``forbid``: kinds of
    collectives that no chain may use; ``rounded``: of which shapes float32 values are planned as what they are rounded
    to (`precision.rounded`)."""

    def __init__(
        self, logical: LogicalMesh, forbid: tuple[str, ...] = (), rounded: Set[tuple[int, ...]] = frozenset()
    ) -> None:
        self.logical, self.rounded = logical, rounded
        self.axes = tuple(a for a in logical.axes if a.size > 1)
        self.sizes = tuple(a.size for a in self.axes)
        self.names = tuple(a.name for a in self.axes)
        self.rank = len(self.axes)
        self.forbid = frozenset(forbid)
        self.signatures: dict[Any, Any] = {}
        """What equal operators have in common on this mesh (`strategy_graph`)."""
        self._spaces: dict[tuple[int, ...], SpecSpace] = {}
        self._space_of: dict[TensorType, SpecSpace] = {}
        self._paths: dict[TensorType, tuple[Any, Any]] = {}
        self._combined: dict[TensorType, Any] = {}

    def space(self, value_type: TensorType) -> SpecSpace:
        """The spec space of a type; keys and empty values can only be replicated."""
        found = self._space_of.get(value_type)
        if found is None:
            shape = value_type.shape
            key = (-1, *shape) if value_type.is_key or value_type.size == 0 else shape
            if key not in self._spaces:
                self._spaces[key] = self._build(shape, movable=key is shape)
            found = self._space_of[value_type] = self._spaces[key]
        return found

    def stored_bytes(self, value_type: TensorType, codes: Any) -> Any:
        """Bytes of a device's memory that a value takes, split as ``codes`` (an index or an array of them) say."""
        space = self.space(value_type)
        return value_type.size_bytes / space.shards[codes] * space.padding[codes]

    def carried(self, value_type: TensorType, src: int) -> TensorType:
        """What a chain from code ``src`` moves: what is rounded is so before anything moves it, but added up first."""
        rounds = value_type.dtype == NARROW and value_type.shape in self.rounded
        return replace(value_type, dtype=WIDE) if rounds and self.space(value_type).has_unreduced[src] else value_type

    def compiled(self, value_type: TensorType, kind: str, at: int, to: int) -> tuple[str, TensorType, float]:
        """(kind, type, bytes a device) of the collective that becomes of such a step from code ``at`` to code ``to``.

        XLA for TPUs (libtpu 0.0.42) makes an all-reduce, of parts among zeros, of the all-gather of a vector whose
        parts are no multiple of 128 elements.
        """
        shards = self.space(value_type).shards
        vector = sum(n > 1 for n in value_type.shape) == 1 and self.logical.device.platform == "tpu"
        if kind == "all-gather" and vector and value_type.size / shards[at] % LANES:
            kind, at = "all-reduce", to
            if value_type.dtype == NARROW and value_type.shape in self.rounded:
                value_type = replace(value_type, dtype=WIDE)
        return kind, value_type, value_type.size_bytes / float(shards[at])

    def by_rows_bytes(self, value_type: TensorType, codes: Any) -> Any:
        """`stored_bytes` while rows are scattered into it or looked up in it."""
        space = self.space(value_type)
        return value_type.size_bytes / space.shards[codes] * space.by_rows[codes]

    def convolved_bytes(self, value_type: TensorType, code: int, spec: tuple[int, ...]) -> float:
        """`stored_bytes` while it is a convolution's operand or result, of whose dimension numbers ``spec`` is."""
        space, (rows, lanes) = self.space(value_type), (value_type.shape[d] for d in spec[:2])
        for axis, d in enumerate(space.codes[code]):
            rows //= self.sizes[axis] if d == spec[0] else 1
            lanes //= self.sizes[axis] if d == spec[1] else 1
        return value_type.size_bytes / float(space.shards[code]) * padded((rows, lanes))

    def _build(self, shape: tuple[int, ...], movable: bool) -> SpecSpace:
        base = len(shape) + 2
        dense = np.full(base**self.rank, -1, np.int64)
        codes: list[Code] = []
        parts: list[tuple[int, ...]] = []
        """Shapes on a device."""
        options = range(-2, len(shape)) if movable else (REPLICATED,)
        ordered = sorted(itertools.product(options, repeat=self.rank), key=lambda c: c != (REPLICATED,) * self.rank)
        for code in ordered:
            split = [1] * len(shape)
            for axis, d in enumerate(code):
                if d >= 0:
                    split[d] *= self.sizes[axis]
            if all(n % s == 0 for n, s in zip(shape, split, strict=True)):
                dense[_radix(code, base)] = len(codes)
                codes.append(code)
                parts.append(tuple(n // s for n, s in zip(shape, split, strict=True)))
        index = {c: i for i, c in enumerate(codes)}
        shards = np.array([math.prod(self.sizes[a] for a, d in enumerate(c) if d >= 0) for c in codes], float)
        tiled = self.logical.device.platform == "tpu"
        steps = tuple(s for s in self._steps(codes, index, len(shape)) if self._stays(s[2], parts[s[1]]))
        return SpecSpace(
            shape=shape,
            codes=tuple(codes),
            index=index,
            shards=shards,
            padding=np.array([padded(part) if tiled else 1.0 for part in parts]),
            by_rows=np.array([scattered(part) if tiled else 1.0 for part in parts]),
            dense=dense,
            has_unreduced=np.array([UNREDUCED in c for c in codes], bool),
            steps=steps,
            by_pair={(s[0], s[1]): s for s in steps},
        )

    def _stays(self, kind: str, part: tuple[int, ...]) -> bool:
        """False for a reduce-scatter to ``part`` of which the compiler makes an all-reduce: chains have that and a
        slice."""
        if kind != "reduce-scatter" or self.logical.device.platform != "tpu" or "all-reduce" in self.forbid:
            return True
        return stays_scattered(part)

    def _steps(self, codes: list[Code], index: dict[Code, int], rank: int) -> Any:
        def minor(code: Code, axis: int, d: int) -> bool:
            return all(code[b] != d for b in range(axis + 1, self.rank))

        def moved(code: Code, axis: int, d: int) -> Code:
            return (*code[:axis], d, *code[axis + 1 :])

        def together(code: Code, axes: tuple[int, ...], d: int) -> Code:
            return tuple(d if a in axes else e for a, e in enumerate(code))

        for i, code in enumerate(codes):
            partial = [a for a, d in enumerate(code) if d == UNREDUCED]
            for count in range(2, len(partial) + 1):
                for axes in itertools.combinations(partial, count):
                    yield i, index[together(code, axes, REPLICATED)], "all-reduce", axes, -1, -1
                    for e in range(rank):
                        j = index.get(together(code, axes, e))
                        if j is not None and minor(code, axes[0], e):
                            yield i, j, "reduce-scatter", axes, -1, e
            for d in range(rank):
                split = tuple(a for a in range(self.rank) if code[a] == d)
                for axes in (split[first:] for first in range(len(split) - 1)):
                    yield i, index[together(code, axes, REPLICATED)], "all-gather", axes, d, -1
                    for e in range(rank):
                        j = index.get(together(code, axes, e))
                        if j is not None and e != d and minor(code, axes[0], e):
                            yield i, j, "all-to-all", axes, d, e
            for axis, d in enumerate(code):
                if d == UNREDUCED:
                    yield i, index[moved(code, axis, REPLICATED)], "all-reduce", (axis,), -1, -1
                elif d == REPLICATED:
                    j = index.get(moved(code, axis, UNREDUCED))
                    if j is not None:
                        yield i, j, "mask", (axis,), -1, -1
                elif minor(code, axis, d):
                    yield i, index[moved(code, axis, REPLICATED)], "all-gather", (axis,), d, -1
                else:
                    continue
                for e in range(rank):
                    j = index.get(moved(code, axis, e))
                    if j is None or e == d or not minor(code, axis, e):
                        continue
                    kind = {REPLICATED: "slice", UNREDUCED: "reduce-scatter"}.get(d, "all-to-all")
                    yield i, j, kind, (axis,), max(d, -1), e

    def step_costs(self, value_type: TensorType, combined: bool = False) -> Any:
        """float64[steps]: seconds of each of the space's steps, slices and masks included; inf where the collective is
        forbidden. ``combined``: of collectives that are one with others."""
        space = self.space(value_type)
        total = value_type.size_bytes
        bandwidth = self.logical.device.memory_bytes_per_s
        out = np.empty(len(space.steps))
        for n, (i, j, kind, axes, _, _) in enumerate(space.steps):
            if kind in _COMMUNICATES:
                becomes, _, local = self.compiled(value_type, kind, i, j)
                out[n] = self.collective_s(becomes, axes, local, combined) + STEP_S
                if kind in self.forbid:
                    out[n] = math.inf
            else:
                out[n] = LOCAL_STEP_S + 2 * total / space.shards[j] / bandwidth
        return out

    def costs(self, value_type: TensorType, combined: bool = False) -> Any:
        """float64[codes, codes]: seconds to reshard a value of this type from code i to code j; inf where every chain
        needs a forbidden collective. ``combined``: where its collectives are one with those of other values."""
        if not combined or not COMBINED_BYTES[self.logical.device.platform]:
            return self._shortest(value_type)[0]
        if value_type not in self._combined:
            self._combined[value_type] = self._along_chains(value_type)
        return self._combined[value_type]

    def spread_s(self, value_type: TensorType, src: int, codes: Iterable[int]) -> float:
        """Seconds to get a value from code ``src`` to several: steps that their chains begin with alike run once."""
        costs = self.costs(value_type)[src]
        steps: dict[tuple[int, ...], float] = {}
        for code in codes:
            path = (src,)
            for to, *_ in self.chain(value_type, src, code):
                path = (*path, to)
                steps[path] = float(costs[to] - costs[path[-2]])
        return math.fsum(steps.values())

    def _along_chains(self, value_type: TensorType) -> Any:
        """As `costs`, of the very chains that it has."""
        found, back = self._shortest(value_type)
        space, cost = self.space(value_type), self.step_costs(value_type, True)
        step = np.full((len(space.codes),) * 2, math.inf)
        for (i, j, *_), seconds in zip(space.steps, cost, strict=True):
            step[i, j] = min(step[i, j], seconds)
        first, at = np.indices(found.shape)
        out = np.where(np.isfinite(found), 0.0, math.inf)
        going = np.isfinite(found) & (first != at)
        while going.any():
            before = np.where(going, back[first, at], at)
            out[going] += step[before[going], at[going]]
            at = before
            going &= first != at
        return self._summed_first(value_type, self._along_chains, out)

    def last_steps(self, value_type: TensorType) -> Any:
        """int[codes, codes]: the last code but one on the cheapest chain from one to another; below 0 for none."""
        return self._shortest(value_type)[1]

    def _shortest(self, value_type: TensorType) -> tuple[Any, Any]:
        found = self._paths.get(value_type)
        if found is None:
            costs, before = dijkstra(self._matrix(value_type), directed=True, return_predecessors=True)
            costs = self._summed_first(value_type, lambda wide: self._shortest(wide)[0], costs)
            before = self._summed_first(value_type, lambda wide: self._shortest(wide)[1], before)
            found = self._paths[value_type] = costs, before
        return found

    def _summed_first(self, value_type: TensorType, of: Callable[[TensorType], Any], found: Any) -> Any:
        """[codes, codes] of a type, those from partial sums as they are carried."""
        sums = self.space(value_type).has_unreduced
        if sums.any() and (wide := self.carried(value_type, int(np.argmax(sums)))) != value_type:
            found = np.where(sums[:, None], of(wide), found)
        return found

    def collective_s(self, kind: str, axes: tuple[int, ...], operand_bytes: Any, combined: bool = False) -> Any:
        """Seconds of one collective over ``axes`` (positions in ``self.axes``); ``operand_bytes`` per device before it,
        a number or an array. ``combined``: its share of one of `combined_bytes`, which a compiler makes of several.
        Over several axes it is the faster of two: axis by axis, the slowest where a device has
        least (`_by_axis`), or one ring over all (`_one_ring`); an all-to-all goes axis by axis. Raises ValueError
        where ``kind`` is not a collective."""
        size = math.prod(self.sizes[a] for a in axes)
        if combined and (least := combined_bytes(self.logical.device.platform, size)):
            whole = least / size if kind == "all-gather" else least
            large = np.maximum(operand_bytes, whole)
            return self.collective_s(kind, axes, large) * operand_bytes / large
        if len(axes) == 1:
            axis = self.axes[axes[0]]
            return collective_s(kind, axis.size, operand_bytes, _seen(axis, kind))
        apart = self._by_axis(kind, axes, operand_bytes)
        if kind == "all-to-all":
            return apart
        return np.minimum(apart, collective_s(kind, size, operand_bytes, self._one_ring(axes)))

    def _by_axis(self, kind: str, axes: tuple[int, ...], operand_bytes: Any) -> Any:
        """Hierarchical: each axis carries what those before it have left, or put together."""
        total, remaining = 0.0, operand_bytes
        for a in sorted(axes, key=lambda a: self.axes[a].link.bytes_per_s, reverse=kind != "all-gather"):
            size = self.sizes[a]
            total = total + collective_s(kind, size, remaining, _seen(self.axes[a], kind))
            if kind in ("all-reduce", "reduce-scatter"):
                remaining = remaining / size
            elif kind == "all-gather":
                remaining = remaining * size
        return total

    def _one_ring(self, axes: tuple[int, ...]) -> LinkSpec:
        """What a ring over several axes sees: it leaves a host once, and has what the rings of an outer axis, one for
        each device along the inner ones, share between hosts. Of a torus' links it takes no more than the innermost
        axis has."""
        inner, slowest = 1, self.axes[axes[-1]].link
        for a in sorted(axes, reverse=True):
            link = self.axes[a].link
            if inner == 1 or inner * link.bytes_per_s < slowest.bytes_per_s:
                slowest = replace(link, bytes_per_s=inner * link.bytes_per_s)
            inner *= self.sizes[a]
        hops = sum((self.sizes[a] - 1) * self.axes[a].link.latency_s for a in axes)
        return replace(slowest, latency_s=hops / sum(self.sizes[a] - 1 for a in axes))

    def _matrix(self, value_type: TensorType) -> Any:
        space = self.space(value_type)
        cost = self.step_costs(value_type)
        finite = np.isfinite(cost)
        src = np.array([s[0] for s in space.steps], int)[finite]
        dst = np.array([s[1] for s in space.steps], int)[finite]
        return csr_matrix((cost[finite], (src, dst)), shape=(len(space.codes),) * 2)

    def chain(
        self, value_type: TensorType, src: int, dst: int
    ) -> tuple[tuple[int, str, tuple[int, ...], int, int], ...]:
        """The cheapest chain, as (next code, kind, axes, source dimension, destination dimension) steps.

        Raises:
            ValueError: there is none (a forbidden collective).
        """
        if src == dst:
            return ()
        space, back = self.space(value_type), self.last_steps(value_type)[src]
        path: list[tuple[int, str, tuple[int, ...], int, int]] = []
        at = dst
        while at != src:
            before = int(back[at])
            if before < 0:
                raise ValueError(f"no chain from {self.spec(value_type, src)} to {self.spec(value_type, dst)}")
            path.append((at, *space.by_pair[before, at][2:]))
            at = before
        return tuple(reversed(path))

    def spec(self, value_type: TensorType, index: int) -> ShardingSpec:
        """The ShardingSpec of code ``index``."""
        code = self.space(value_type).codes[index]
        return ShardingSpec(
            dims=tuple(
                tuple(self.names[a] for a in range(self.rank) if code[a] == d) for d in range(len(value_type.shape))
            ),
            unreduced=tuple(self.names[a] for a in range(self.rank) if code[a] == UNREDUCED),
        )

    def code_of(self, value_type: TensorType, spec: ShardingSpec) -> int:
        """Index of a spec's code. In ``spec.dims``, axes of size 1 and names that are no axis here are ignored.

        Raises:
            KeyError: the spec does not divide the shape.
            ValueError: it is unreduced over an axis of size 1, or over a name that is no axis of this mesh.
        """
        code = [REPLICATED] * self.rank
        for d, axes in enumerate(spec.dims):
            for name in axes:
                if name in self.names:
                    code[self.names.index(name)] = d
        for name in spec.unreduced:
            code[self.names.index(name)] = UNREDUCED
        return self.space(value_type).index[tuple(code)]

    def indices(self, names: Sequence[str]) -> tuple[int, ...]:
        """Positions in ``axes`` of the mesh axes ``names``, ascending; those of size 1 are left out."""
        return tuple(i for i, name in enumerate(self.names) if name in names)

    def lead_shift(self, inner: TensorType, outer: TensorType) -> Any:
        """int64[codes of ``inner``]: for each the code of ``outer``, its values stacked along a new leading dimension
        that stays whole."""
        a, b = self.space(inner), self.space(outer)
        return np.array([b.index[tuple(d + 1 if d >= 0 else d for d in c)] for c in a.codes], np.int64)


def _radix(code: Code, base: int) -> int:
    out = 0
    for d in code:
        out = out * base + d + 2
    return out


def reshard_step(mesh: Mesh, step: tuple[int, str, tuple[int, ...], int, int]) -> ReshardStep:
    """A step of `Mesh.chain` as plans have it, with its axes by name."""
    _, kind, axes, src, dst = step
    return ReshardStep(kind=kind, axes=tuple(mesh.names[a] for a in axes), src=src, dst=dst)  # type: ignore[arg-type]
