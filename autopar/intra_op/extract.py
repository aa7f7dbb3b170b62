"""A solved StrategyGraph → `ShardingPlan`: every operator's strategy, every copy and chain, every collective.

The collectives are counted by walking the plan as the lowering will (`runtime/lower.py`): a value has
versions (as it was made, then its copies); a reader whose spec equals a version takes it, any other reshards
the last version; chains of one value share their common beginning; what reads a loop's constant is
resharded before the loop.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from autopar.cost import roofline
from autopar.intra_op.flatten import Flat
from autopar.intra_op.places import Place, place_text
from autopar.intra_op.specs import Mesh, reshard_step
from autopar.intra_op.strategies import Signature, halo_exchanges
from autopar.intra_op.strategy_graph import StrategyGraph
from autopar.intra_op.user_shard_map import body_collectives
from autopar.ir.graph import TensorType
from autopar.ir.plan import Chain, NodeStrategy, RegionPlan, ReplicatedNode
from autopar.ir.sharding import ShardingSpec
from autopar.ir.strategy import Collective


@dataclass(slots=True)
class Buffer:
    """A resharded value, or a step on the way to one, in exec region ``region``: planning node ``source`` makes the
    value, ``first`` is the one for which it is resharded, ``readers`` those that read it, ``passing`` those for which
    it is only resharded further. ``copy_bytes`` is needed beside it while it is made."""

    size_bytes: float
    copy_bytes: float
    region: int
    source: int
    first: int
    readers: list[int] = field(default_factory=list)
    passing: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Decisions:
    """A choice spelled out: strategy index and signature per planning node; copies per value; collectives."""

    graph: StrategyGraph
    strategy: list[int]
    signature: list[Signature]
    copies: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """(planning node, result) → codes of its copies, in order."""
    reads: dict[tuple[int, int], tuple[int, int, tuple[int, ...]]] = field(default_factory=dict)
    """(planning node, operand) → (version read, code wanted, chain of codes)."""
    collectives: list[Collective] = field(default_factory=list)
    chains: dict[tuple[TensorType, int, int], tuple[Any, ...]] = field(default_factory=dict)
    halos: set[Any] = field(default_factory=set)
    """Halo exchanges already counted."""
    buffers: list[Buffer] = field(default_factory=list)
    taken: dict[tuple[int, int], Buffer] = field(default_factory=dict)
    """(planning node, operand) → the resharded buffer that it reads."""
    moved: dict[tuple[int, int], int] = field(default_factory=dict)
    """(planning node, result) → the last reader for which that value, as it was made, is resharded."""
    direct: set[tuple[int, int]] = field(default_factory=set)
    """(planning node, result) that have a reader which takes them as they were made."""

    def result_code(self, n: int, r: int) -> int:
        """The code in which planning node n makes its result r."""
        return int(self.signature[n].results[r][self.strategy[n]])

    def operand_code(self, n: int, i: int) -> int:
        """The code in which planning node n wants its operand i."""
        return int(self.signature[n].operands[i][self.strategy[n]])


def decide(graph: StrategyGraph, choice: Any) -> Decisions:
    """Strategies of all planning nodes under a choice of cluster states, and the collectives they lead to."""
    flat, mesh = graph.flat, graph.mesh
    of_class = [graph.strategy(c, choice) for c in range(len(graph.classes))]
    out = Decisions(
        graph,
        strategy=[of_class[c] for c in graph.class_of],
        signature=[graph.classes[c].signature for c in graph.class_of],
    )
    for c, this in enumerate(graph.classes):
        if this.copy_of is not None:
            source, r = this.copy_of
            code = int(this.signature.results[0][of_class[c]])
            for n in graph.classes[source].members:
                if code != out.result_code(n, r):
                    out.copies.setdefault((n, r), []).append(code)
    counted: Counter[tuple[Any, ...]] = Counter()
    seen: dict[tuple[Any, ...], int] = {}

    def move(
        region: int, n: int, r: int, t: TensorType, path: tuple[int, ...], dst: int, reader: int, copied: bool
    ) -> tuple[int, ...]:
        """Emits the chain from the last code of ``path``, for ``reader`` or (``copied``) for it and others; returns
        the path to ``dst``."""
        key = (t, path[-1], dst)
        if key not in out.chains:
            out.chains[key] = mesh.chain(t, path[-1], dst)
        before, copy_bytes = seen.get((region, n, r, path)), 0.0
        for step in out.chains[key]:
            at = path[-1]
            path = (*path, step[0])
            slot = seen.get((region, n, r, path))
            if slot is None:
                slot = seen[region, n, r, path] = len(out.buffers)
                space = mesh.space(t)
                size = t.size_bytes / space.shards[step[0]]
                copy_bytes = max(copy_bytes, copied_bytes(mesh, t, at, step))
                out.buffers.append(Buffer(size, 0.0, region, n, reader))
                if before is not None:
                    out.buffers[before].passing.append(reader)
                else:
                    out.moved[n, r] = max(reader, out.moved.get((n, r), reader))
                if step[1] not in ("slice", "mask"):
                    size, where = int(t.size_bytes / space.shards[at]), Place(reader, n, "copy for " if copied else "")
                    counted[step[1], step[2], size, t.dtype, region, where, "sum", 1, True] += 1
            before = slot
        if before is not None:  # one step after the other: the largest copy counts
            out.buffers[before].copy_bytes = max(out.buffers[before].copy_bytes, copy_bytes)
        return path

    for n in range(len(flat.kind)):
        signature = out.signature[n]
        for i, link in enumerate(flat.links[n]):
            if link is None:
                continue
            region = flat.exec_region[n][i]
            p, r = link
            t = signature.operand_types[i]
            want, have = out.operand_code(n, i), out.result_code(p, r)
            versions = [have]
            if region == _home(flat, p):
                versions += out.copies.get((p, r), [])
            path: tuple[int, ...] = (have,)
            for code in versions[1:]:
                if want == path[-1] or want == have:
                    break
                path = move(region, p, r, t, path, code, n, True)
            if want == have:
                path = (have,)
            elif want != path[-1]:
                path = move(region, p, r, t, path, want, n, False)
            if len(path) > 1:
                out.taken[n, i] = out.buffers[seen[region, p, r, path]]
                out.taken[n, i].readers.append(n)
            else:
                out.direct.add(link)
            out.reads[n, i] = (len(path), want, path)
        _own_collectives(out, mesh, n, counted)
    out.collectives = _collectives(flat, mesh, counted)
    return out


def copied_bytes(mesh: Mesh, t: TensorType, at: int, step: tuple[int, str, tuple[int, ...], int, int]) -> float:
    """A collective along a dimension that is not the leading one works on a copy in which it is."""
    to, kind, _, src, dst = step
    if kind not in ("all-gather", "reduce-scatter", "all-to-all"):
        return 0.0
    if all(math.prod(t.shape[:d]) == 1 for d in (src, dst) if d >= 0):
        return 0.0
    shards = mesh.space(t).shards
    return float(t.size_bytes / min(shards[at], shards[to]))


def _home(flat: Flat, p: int) -> int:
    return flat.region[p]


def _own_collectives(out: Decisions, mesh: Mesh, n: int, counted: Counter[tuple[Any, ...]]) -> None:
    """All-reduces of max and min factors, halo exchanges, and what a user's shard_map does."""
    signature, s = out.signature[n], out.strategy[n]
    if signature.rule is None or signature.node is None:
        return
    region, where = out.graph.flat.region[n], Place(n)
    for kind, axes in combined(mesh, signature, s):
        for r, t in enumerate(signature.result_types):
            counted["all-reduce", axes, int(signature.usage[r][s]), t.dtype, region, where, kind, 1, True] += 1
    if signature.rule.halos:
        split = {f: axes[0] for f, axes in axes_of(mesh, signature, s).items()}
        dtypes = signature.operand_types[signature.rule.halos[0].operand].dtype
        source = out.graph.flat.links[n][signature.rule.halos[0].operand]
        shared = (region, source, out.operand_code(n, signature.rule.halos[0].operand), signature.rule.halos)
        if source is not None and shared in out.halos:
            return  # the convolution and its weight gradient read the same halo: the compiler fetches it once
        out.halos.add(shared)
        for axis, size in halo_exchanges(mesh, signature.node, signature.rule, signature.operands, s, split):
            counted["collective-permute", (axis,), size, dtypes, region, where, "", 1, True] += 1
    if signature.fixed:
        for c in body_collectives(signature.node):
            axes = mesh.indices(c.axes)
            if axes:
                where = Place(n, before=f"{c.primitive} ({c.source}) in ")
                counted[c.kind, axes, c.operand_bytes, c.dtype, region, where, c.reduction, c.trips, c.known] += 1


def axes_of(mesh: Mesh, signature: Signature, s: int) -> dict[str, tuple[int, ...]]:
    """Factor name → mesh axes that strategy s gives it."""
    out: dict[str, tuple[int, ...]] = {}
    for axis, option in enumerate(signature.options[s]):
        name = signature.names[option]
        if name and not name.startswith("+"):
            out[name] = (*out.get(name, ()), axis)
    return out


def combined(mesh: Mesh, signature: Signature, s: int) -> list[tuple[str, tuple[int, ...]]]:
    """(max or min, axes) of the all-reduces that strategy s ends with."""
    assert signature.rule is not None
    kinds = {f.name: f.kind for f in signature.rule.factors}
    by_kind: dict[str, tuple[int, ...]] = {}
    for name, axes in axes_of(mesh, signature, s).items():
        if kinds[name] in ("max", "min"):
            by_kind[kinds[name]] = tuple(sorted((*by_kind.get(kinds[name], ()), *axes)))
    return sorted(by_kind.items())


def _collectives(flat: Flat, mesh: Mesh, counted: Counter[tuple[Any, ...]]) -> list[Collective]:
    merged: Counter[tuple[Any, ...]] = Counter()
    for (kind, axes, size, dtype, region, where, reduction, trips, known), count in counted.items():
        home = flat.regions[region]
        text = place_text(flat, where)
        merged[kind, axes, size, dtype, home.trips * trips, home.known and known, text, reduction] += count
    return [
        Collective(
            kind=kind,
            axes=tuple(mesh.names[a] for a in axes),
            operand_bytes=size,
            dtype=dtype,
            trips=trips,
            count=count,
            time_s=float(mesh.collective_s(kind, axes, size)) * count * trips,
            where=where,
            reduction=reduction if kind in ("all-reduce", "reduce-scatter") else "",
            trips_assumed=not known,
        )
        for (kind, axes, size, dtype, trips, known, where, reduction), count in sorted(merged.items(), key=repr)
    ]


@dataclass(slots=True)
class PlanParts:
    """The pieces of a ShardingPlan that come from the decisions."""

    strategies: tuple[NodeStrategy, ...]
    root: RegionPlan
    chains: tuple[Chain, ...]
    replicated: tuple[ReplicatedNode, ...]


def spell_out(out: Decisions) -> PlanParts:
    """The plan's table of strategies, its regions, its chains and what it replicates."""
    flat, mesh = out.graph.flat, out.graph.mesh
    table: dict[tuple[int, int], int] = {}
    strategies: list[NodeStrategy] = []
    specs: dict[tuple[TensorType, int], ShardingSpec] = {}

    def spec(t: TensorType, code: int) -> ShardingSpec:
        if (t, code) not in specs:
            specs[t, code] = mesh.spec(t, code)
        return specs[t, code]

    def strategy(n: int) -> int:
        signature, s = out.signature[n], out.strategy[n]
        key = (id(signature), s)
        if key not in table:
            table[key] = len(strategies)
            operands = [
                spec(t, int(codes[s])) if codes is not None else ShardingSpec(dims=((),) * len(t.shape))
                for t, codes in zip(signature.operand_types, signature.operands, strict=True)
            ]
            results = [spec(t, int(c[s])) for t, c in zip(signature.result_types, signature.results, strict=True)]
            factor_axes = sorted(axes_of(mesh, signature, s).items())
            strategies.append(
                NodeStrategy(
                    factor_axes=tuple((f, tuple(mesh.names[a] for a in axes)) for f, axes in factor_axes),
                    operands=tuple(operands),
                    results=tuple(results),
                    combine=tuple((k, tuple(mesh.names[a] for a in axes)) for k, axes in combined(mesh, signature, s)),
                )
            )
        return table[key]

    def made(link: tuple[int, int] | None, t: TensorType) -> ShardingSpec:
        return ShardingSpec(dims=((),) * len(t.shape)) if link is None else spec(t, out.result_code(*link))

    copies: dict[int, list[tuple[int, ShardingSpec]]] = {}
    rebased: dict[int, list[tuple[int, ShardingSpec]]] = {}
    for region in flat.regions:
        copies[region.id], rebased[region.id] = [], []
        for value, link in flat.env[region.id].items():
            if link is None or _home(flat, link[0]) != region.id:
                continue
            t = region.graph.values[value]
            if flat.kind[link[0]] == "loop_out":
                carry = flat.links[link[0]][0]
                assert carry is not None
                if out.result_code(*link) != out.result_code(*carry):
                    rebased[region.id].append((value, spec(t, out.result_code(*link))))
            copies[region.id] += [(value, spec(t, code)) for code in out.copies.get(link, [])]

    def region_plan(region: int) -> RegionPlan:
        graph = flat.regions[region].graph
        env = flat.env[region]
        nodes: list[int] = []
        bodies: list[tuple[int, tuple[RegionPlan, ...]]] = []
        for position in range(len(graph.nodes)):
            n = flat.at.get((region, position))
            nodes.append(-1 if n is None else strategy(n))
            if n is None:
                bodies.append((position, tuple(region_plan(k) for k in flat.children[region, position])))
        ends = flat.outs if region == 0 else flat.ends[region]
        if ends or not graph.outputs:
            outputs = tuple(spec(out.signature[n].operand_types[i], out.operand_code(n, i)) for n, i in ends)
        else:
            types = [graph.values[o] if isinstance(o, int) else o.type for o in graph.outputs]
            links = [env[o] if isinstance(o, int) else None for o in graph.outputs]
            outputs = tuple(made(link, t) for link, t in zip(links, types, strict=True))
        return RegionPlan(
            inputs=tuple(made(env[v], graph.values[v]) for v in graph.inputs),
            outputs=outputs,
            nodes=tuple(nodes),
            rebased=tuple(rebased[region]),
            copies=tuple(copies[region]),
            bodies=tuple(bodies),
        )

    root = region_plan(0)
    chains = [
        Chain(type=t, src=spec(t, a), dst=spec(t, b), steps=tuple(reshard_step(mesh, s) for s in steps))
        for (t, a, b), steps in out.chains.items()
    ]
    return PlanParts(
        strategies=tuple(strategies),
        root=root,
        chains=tuple(sorted(chains, key=lambda c: (str(c.type), str(c.src), str(c.dst)))),
        replicated=_replicated(out),
    )


def _replicated(out: Decisions) -> tuple[ReplicatedNode, ...]:
    flat = out.graph.flat
    rows: dict[tuple[str, str, str], list[float]] = {}
    for n, node in enumerate(flat.node):
        rule = out.signature[n].rule
        if node is None or rule is None or not rule.why:
            continue
        trips = flat.regions[flat.region[n]].trips
        moved = sum(t.size_bytes for t in (*node.operand_types, *node.result_types))
        row = rows.setdefault((node.primitive, node.source, rule.why), [0, 0.0, 0.0])
        row[0] += 1
        row[1] += roofline.flops(node) * trips
        row[2] += moved * trips
    return tuple(
        ReplicatedNode(primitive=k[0], source=k[1], why=k[2], count=int(v[0]), flops=v[1], bytes=v[2])
        for k, v in sorted(rows.items())
    )


def totals(out: Decisions) -> tuple[float, float, float]:
    """(compute seconds, communication seconds, FLOPs) per device and step."""
    flat = out.graph.flat
    compute = flops = 0.0
    for n, signature in enumerate(out.signature):
        trips = flat.regions[flat.region[n]].trips
        s = out.strategy[n]
        compute += float(signature.compute_s[s]) * trips
        flops += float(signature.flops[s]) * trips
    return compute, sum(c.time_s for c in out.collectives), flops
