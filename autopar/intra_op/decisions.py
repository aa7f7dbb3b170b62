"""A choice of strategies spelled out (`decide`): copies, reshardings and collectives, and their seconds (`totals`).

The collectives are counted by walking the plan as the lowering will (`runtime/one_program/lowering.py`):

- a value has versions, as it was made and then its copies: a reader whose spec is a version's takes that, any other
  reshards the last; chains of one value share their common beginning                                        `_reshard`
- what reads a loop's constant is resharded before the loop; where others reshard the same value alike, the compiler
  makes one of both, unless a loop has run in between                                                   `_count_shared`
- all-reduces of max and min factors, and what a user's shard_map does, are the operator's own       `_own_collectives`
- a halo is fetched once for all that read the same rows                                                 `_fetch_halos`

A collective counts once for each execution of its region: Σ over regions of trips(region) × count, where the trips of
loops of unknown length are assumed (decision 005). Values that are read alike (`uses.Pattern`) are counted together.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from autopar.intra_op.flatten import Flat
from autopar.intra_op.overlap import exposed_s
from autopar.intra_op.places import Spot
from autopar.intra_op.specs import Mesh
from autopar.intra_op.strategies import Signature, halo_exchanges
from autopar.intra_op.strategy_graph import StrategyGraph
from autopar.intra_op.user_shard_map import body_collectives
from autopar.ir.graph import TensorType


@dataclass(slots=True)
class Buffer:
    """The resharded values of a pattern (`uses.Pattern`), or a step on the way to them: ``first`` is the reader for
    which they are resharded, ``readers`` those that read them, ``passing`` those for which they are only resharded
    further, all as positions among the pattern's readers. ``size_bytes`` are those of one of them on a device;
    ``copy_bytes`` more are needed while it is made."""

    size_bytes: float
    copy_bytes: float
    pattern: int
    first: int
    readers: list[int] = field(default_factory=list)
    passing: list[int] = field(default_factory=list)


class _Counted(NamedTuple):
    """A kind of collective. ``trips`` and ``known`` are those of loops inside the operator itself."""

    kind: str
    axes: tuple[int, ...]
    operand_bytes: int
    dtype: str
    region: int
    spot: Spot
    reduction: str
    trips: int = 1
    known: bool = True


@dataclass(slots=True)
class Decisions:
    """A choice spelled out: ``strategy`` per class, copies per kind of value, reshardings (``buffers``) per pattern,
    collectives (``counted``)."""

    graph: StrategyGraph
    strategy: list[int]
    copies: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """(class, result) → codes of its copies, in order."""
    counted: Counter[_Counted] = field(default_factory=Counter)
    """How often each collective occurs, in loops once."""
    chains: dict[tuple[TensorType, int, int], tuple[Any, ...]] = field(default_factory=dict)
    """(type, code from, code to) → steps, as `Mesh.chain` gives them."""
    buffers: list[Buffer] = field(default_factory=list)
    moved: dict[int, int] = field(default_factory=dict)
    """Pattern → the last reader for which its values, as they were made, are resharded."""
    reduced: set[int] = field(default_factory=set[int])
    """Patterns whose values an all-reduce alone makes into what all others read."""
    direct: list[int] = field(default_factory=list)
    """Patterns with a reader that takes the values as they were made."""

    def loops(self, what: _Counted) -> tuple[int, bool]:
        """(how often a step executes a collective, True where that is not assumed)."""
        home = self.graph.flat.regions[what.region]
        return home.trips * what.trips, home.known and what.known

    def result_code(self, c: int, r: int) -> int:
        """The code in which class c makes its result r."""
        return int(self.graph.classes[c].signature.results[r][self.strategy[c]])

    def operand_code(self, c: int, i: int) -> int:
        """The code in which class c wants its operand i."""
        return int(self.graph.classes[c].signature.operands[i][self.strategy[c]])


def decide(graph: StrategyGraph, choice: Any) -> Decisions:
    """Strategies of all classes under ``choice``, a state per cluster, and the collectives that they lead to."""
    out = Decisions(graph, strategy=[graph.strategy(c, choice) for c in range(len(graph.classes))])
    for c, this in enumerate(graph.classes):
        if this.copy_of is not None and (code := out.result_code(c, 0)) != out.result_code(*this.copy_of):
            out.copies.setdefault(this.copy_of, []).append(code)
    shared, moves = _shared(graph.flat), _Moves()
    for p in range(len(graph.uses.patterns)):
        _reshard(out, p, shared, moves)
    _count_shared(out, moves)
    for c in range(len(graph.classes)):
        _own_collectives(out, c)
    _fetch_halos(out)
    return out


def _shared(flat: Flat) -> frozenset[int]:
    """Loops' constants and the values that they are: what is resharded for one is resharded for all."""
    constants = [v for v in flat.hoisted if flat.kind[flat.maker[v]] == "const_in"]
    outside = (flat.source[flat.first_edge[flat.maker[v]]] for v in constants)
    return frozenset(constants).union(v for v in outside if v >= 0)


@dataclass(slots=True)
class _Moves:
    """Steps of shared values' chains, which are counted when all are known: see `_count_shared`."""

    steps: list[tuple[int, int, int, tuple[int, ...], _Counted]] = field(default_factory=list)
    """(value, region, planning node that reads it first, path, its last step)."""
    entered: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Loop's constant → the path from the value outside to it, where they differ."""


def _count_shared(out: Decisions, moves: _Moves) -> None:
    """Counts a step once for a value and the loops' constants that are made of it, unless a loop has run in between:
    a compiler that keeps collectives in order (`one_program.collective_order`) does not take those for the same."""
    flat = out.graph.flat
    seen: set[tuple[int, int, int, tuple[int, ...]]] = set()
    ends: dict[int, list[int]] = {}
    for region, (_, end) in sorted(flat.span.items(), key=lambda span: span[1][1]):
        ends.setdefault(flat.regions[region].parent, []).append(end)
    begins: dict[int, tuple[int, tuple[int, ...]]] = {}

    def begin(value: int) -> tuple[int, tuple[int, ...]]:
        """The value outside of all loops, and the path from it."""
        if value not in begins:
            n = flat.maker[value]
            source = flat.source[flat.first_edge[n]] if flat.kind[n] == "const_in" else -1
            if source >= 0:
                root, path = begin(source)
                begins[value] = root, path + moves.entered.get(value, ())[1:]
            else:
                begins[value] = value, (out.result_code(out.graph.class_of[n], value - flat.first_value[n]),)
        return begins[value]

    for value, region, reader, path, counted in moves.steps:
        root, before = begin(value)
        key = root, region, bisect.bisect_right(ends.get(region, []), reader), before + path[1:]
        if key not in seen:
            seen.add(key)
            out.counted[counted] += 1


def _reshard(out: Decisions, p: int, shared: frozenset[int], moves: _Moves) -> None:
    """The chains of pattern p, one reader after the other."""
    flat, mesh, classes, pattern = out.graph.flat, out.graph.mesh, out.graph.classes, out.graph.uses.patterns[p]
    have = out.result_code(*pattern.source)
    wants = [out.operand_code(*reader) for reader in pattern.readers]
    if have in wants:
        out.direct.append(p)
        if wants.count(have) == len(wants):
            return
    source_region = flat.region[classes[pattern.source[0]].members[0]]
    copies = out.copies.get(pattern.source, []) if pattern.region == source_region else []
    made: dict[tuple[int, ...], Buffer] = {}
    kinds: set[str] = set()
    uses = out.graph.uses
    values = uses.value[uses.order[pattern.starts]].tolist() if shared else []
    several = sorted(shared.intersection(values))

    def move(t: TensorType, path: tuple[int, ...], dst: int, reader: int, copied: bool) -> tuple[int, ...]:
        """Emits the chain from the last code of ``path``, for ``reader`` or (``copied``) for it and others; returns
        the path to ``dst``."""
        key = (t, path[-1], dst)
        if key not in out.chains:
            out.chains[key] = mesh.chain(t, path[-1], dst)
        before, copy_bytes = made.get(path), 0.0
        copies = lays_out(out.graph, pattern.readers[reader][0])
        for step in out.chains[key]:
            at = path[-1]
            path = (*path, step[0])
            kinds.add(step[1])
            buffer = made.get(path)
            if buffer is None:
                if copies:
                    copy_bytes = max(copy_bytes, copied_bytes(mesh, t, at, step))
                buffer = made[path] = Buffer(float(mesh.stored_bytes(t, step[0])), 0.0, p, reader)
                if before is not None:
                    before.passing.append(reader)
                else:
                    out.moved[p] = reader
                if step[1] not in ("slice", "mask"):
                    spot = Spot("pattern", p, reader, "copy for " if copied else "")
                    kind, moved, size = mesh.compiled(mesh.carried(t, path[0]), step[1], at, step[0])
                    counted = _Counted(kind, step[2], int(size), moved.dtype, pattern.region, spot, "sum")
                    if several:
                        first = dict(zip(values, uses.user[uses.edges(p, reader)].tolist(), strict=True))
                        moves.steps += ((v, pattern.region, first[v], path, counted) for v in several)
                    if len(pattern.starts) > len(several):
                        out.counted[counted] += len(pattern.starts) - len(several)
            before = buffer
        if before is not None:  # one step after the other: the largest copy counts
            before.copy_bytes = max(before.copy_bytes, copy_bytes)
        return path

    for k, ((user, i), want) in enumerate(zip(pattern.readers, wants, strict=True)):
        if want == have:
            continue
        signature = classes[user].signature
        t, path = signature.operand_types[i], (have,)
        for code in copies:
            if want == path[-1]:
                break
            path = move(t, path, code, k, True)
        if want != path[-1]:
            path = move(t, path, want, k, False)
        made[path].readers.append(k)
        if several:
            readers = uses.user[uses.edges(p, k)].tolist()
            moves.entered.update((flat.first_value[n], path) for n in readers if flat.kind[n] == "const_in")
    out.buffers += made.values()
    if len(made) == 1 and kinds == {"all-reduce"} and p not in out.direct:
        out.reduced.add(p)


def lays_out(graph: StrategyGraph, c: int) -> bool:
    """True where what a collective brings to class c lies there as the program has it, so that one along another
    dimension than the leading one copies: on CPUs everywhere, on others for loops and results (operators read it as the
    collective leaves it)."""
    if graph.mesh.logical.device.platform == "cpu":
        return True
    return any(graph.flat.kind[n] != "op" for n in graph.classes[c].members[:1])


def copied_bytes(mesh: Mesh, t: TensorType, at: int, step: tuple[int, str, tuple[int, ...], int, int]) -> float:
    """Bytes on a device of the copy that ``step`` (of `Mesh.chain`), from code ``at``, works on: a collective along a
    dimension that is not the leading one copies its operand or result so that it is; 0 for all others."""
    to, kind, _, src, dst = step
    if kind not in ("all-gather", "reduce-scatter", "all-to-all"):
        return 0.0
    if all(math.prod(t.shape[:d]) == 1 for d in (src, dst) if d >= 0):
        return 0.0
    shards = mesh.space(t).shards
    return float(t.size_bytes / min(shards[at], shards[to]))


def _own_collectives(out: Decisions, c: int) -> None:
    """All-reduces of a class's max and min factors, and what a user's shard_map does."""
    graph, this, s = out.graph, out.graph.classes[c], out.strategy[c]
    signature = this.signature
    if signature.rule is None or signature.node is None:
        return
    region, count = graph.flat.region[this.members[0]], len(this.members)
    if any(f.kind in ("max", "min") for f in signature.rule.factors):
        for kind, axes in combined(graph.mesh, signature, s):
            for r, t in enumerate(signature.result_types):
                size = int(t.size_bytes / graph.mesh.space(t).shards[signature.results[r][s]])
                out.counted[_Counted("all-reduce", axes, size, t.dtype, region, Spot("class", c), kind)] += count
    if signature.fixed:
        for each in body_collectives(signature.node):
            axes = graph.mesh.indices(each.axes)
            if axes:
                spot = Spot("class", c, before=f"{each.primitive} ({each.source}) in ")
                out.counted[
                    _Counted(
                        each.kind, axes, each.operand_bytes, each.dtype, region, spot, each.reduction, each.trips,
                        each.known,
                    )
                ] += count  # fmt: skip


def _fetch_halos(out: Decisions) -> None:
    """Halo exchanges, node by node: the convolution and its weight gradient read the same halo, and the compiler
    fetches it once."""
    flat, mesh, classes = out.graph.flat, out.graph.mesh, out.graph.classes
    with_halos = [c for c, this in enumerate(classes) if this.signature.rule is not None and this.signature.rule.halos]
    done: set[Any] = set()
    for n, c in sorted((n, k) for k in with_halos for n in classes[k].members):
        signature, s, region = classes[c].signature, out.strategy[c], flat.region[n]
        assert signature.rule is not None and signature.node is not None
        halos = signature.rule.halos
        source = flat.source[flat.first_edge[n] + halos[0].operand]
        rows = tuple((h.dim, h.low, h.high) for h in halos)
        shared = (region, source, out.operand_code(c, halos[0].operand), rows)
        if source >= 0 and shared in done:
            continue
        done.add(shared)
        dtype = signature.operand_types[halos[0].operand].dtype
        split = {f: axes[0] for f, axes in axes_of(mesh, signature, s).items()}
        for axis, size in halo_exchanges(mesh, signature.node, signature.rule, signature.operands, s, split):
            out.counted[_Counted("collective-permute", (axis,), size, dtype, region, Spot("node", n), "")] += 1


def axes_of(mesh: Mesh, signature: Signature, s: int) -> dict[str, tuple[int, ...]]:
    """Factor name → the mesh axes, by position in `Mesh.axes`, that strategy s gives it."""
    out: dict[str, tuple[int, ...]] = {}
    for axis, option in enumerate(signature.options[s]):
        name = signature.names[option]
        if name and not name.startswith("+"):
            out[name] = (*out.get(name, ()), axis)
    return out


def combined(mesh: Mesh, signature: Signature, s: int) -> list[tuple[str, tuple[int, ...]]]:
    """(max or min, axes by position) of the all-reduces that strategy s of an operator ends with."""
    assert signature.rule is not None
    kinds = {f.name: f.kind for f in signature.rule.factors}
    by_kind: dict[str, tuple[int, ...]] = {}
    for name, axes in axes_of(mesh, signature, s).items():
        if kinds[name] in ("max", "min"):
            by_kind[kinds[name]] = tuple(sorted((*by_kind.get(kinds[name], ()), *axes)))
    return sorted(by_kind.items())


@dataclass(frozen=True, slots=True)
class Totals:
    """Of a device and step: seconds of compute, of collectives that show and of those that run beside compute, and
    FLOPs."""

    compute_s: float
    exposed_s: float
    hidden_s: float
    flops: float


def totals(out: Decisions) -> Totals:
    """What a device's step takes. What may run beside compute does so within its region (`overlap`), and not beside
    the update, which waits for it."""
    flat, per_class = out.graph.flat, np.zeros((len(out.graph.classes), 2))
    for c, (this, s) in enumerate(zip(out.graph.classes, out.strategy, strict=True)):
        if this.copy_of is None:
            per_class[c] = this.compute_s[s] * this.trips, this.signature.flops[s] * this.trips
    per_node = per_class[out.graph.class_of]
    columns = flat.columns()
    beside_s = np.bincount(columns.region, np.where(columns.updates, 0.0, per_node[:, 0]), len(flat.regions))
    shown_s, hideable_s = 0.0, np.zeros(len(flat.regions))
    for what, count in out.counted.items():
        seconds, part = collective_s(out, what) * count, hideable_part(out, what)
        hideable_s[what.region] += part * seconds
        shown_s += (1 - part) * seconds
    platform = out.graph.mesh.logical.device.platform
    exposed = sum(exposed_s(platform, float(f), float(c)) for f, c in zip(hideable_s, beside_s, strict=True) if f)
    return Totals(
        compute_s=float(per_node[:, 0].sum()), exposed_s=shown_s + exposed, hidden_s=float(hideable_s.sum()) - exposed,
        flops=float(per_node[:, 1].sum()),
    )  # fmt: skip


def collective_s(out: Decisions, what: _Counted) -> float:
    """Seconds a step of one collective of that kind."""
    combined = _part(out, what, out.graph.combined) == 1
    return float(out.graph.mesh.collective_s(what.kind, what.axes, what.operand_bytes, combined)) * out.loops(what)[0]


def hideable_part(out: Decisions, what: _Counted) -> float:
    """Which part of the collectives of that kind may run beside compute."""
    return _part(out, what, out.graph.hideable)


def _part(out: Decisions, what: _Counted, marked: Any) -> float:
    """Of how many of the operands for which collectives of that kind run ``marked`` (bool[operands]) says so."""
    if what.spot.kind != "pattern":
        return 0.0
    return float(marked[out.graph.uses.edges(what.spot.number, what.spot.position)].mean())
