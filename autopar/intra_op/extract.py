"""A solved StrategyGraph → the pieces of a `ShardingPlan`: what `decisions.decide` has decided, as the plan writes it.

`spell_out` makes the table of strategies, every body's nodes with their operands' and results' specs, and the chains
that bring values from one to another; `collectives` lists what was counted, each with the source line that it is for.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from autopar.cost import roofline
from autopar.intra_op.decisions import Decisions, axes_of, collective_s, combined, hideable_part
from autopar.intra_op.passes import passes
from autopar.intra_op.places import Places
from autopar.intra_op.precision import NARROW, WIDE, moved_narrow
from autopar.intra_op.specs import reshard_step
from autopar.ir.graph import Phase, TensorType
from autopar.ir.sharding import ShardingSpec
from autopar.ir.sharding_plan import Chain, NodeStrategy, OperatorRow, RegionPlan, ReplicatedNode, Work
from autopar.ir.strategy import Collective
from autopar.primitives import record_of


def collectives(out: Decisions) -> list[Collective]:
    """The plan's list, sorted: equal collectives for one source line are one row, with their count."""
    mesh, places = out.graph.mesh, Places(out.graph)
    merged: Counter[tuple[Any, ...]] = Counter()
    each_s: dict[tuple[Any, ...], float] = {}
    for what, count in out.counted.items():
        trips, known = out.loops(what)
        texts = places.texts(what.spot)
        each = count // texts.total()
        for text, share in texts.items():
            beside = hideable_part(out, what) > 0.5
            key = (what.kind, what.axes, what.operand_bytes, what.dtype, trips, known, text, what.reduction, beside)
            merged[key] += each * share
            each_s[key] = collective_s(out, what)
    return [
        Collective(
            kind=kind,
            axes=tuple(mesh.names[a] for a in axes),
            operand_bytes=size,
            dtype=dtype,
            trips=trips,
            count=count,
            time_s=each_s[key] * count,
            where=where,
            reduction=reduction if kind in ("all-reduce", "reduce-scatter") else "",
            trips_assumed=not known,
            beside=beside,
        )
        for key, count in sorted(merged.items(), key=repr)
        for kind, axes, size, dtype, trips, known, where, reduction, beside in (key,)
    ]


@dataclass(slots=True)
class PlanParts:
    """The pieces of a ShardingPlan that come from the decisions."""

    strategies: tuple[NodeStrategy, ...]
    root: RegionPlan
    chains: tuple[Chain, ...]
    replicated: tuple[ReplicatedNode, ...]
    operators: tuple[OperatorRow, ...]


def spell_out(out: Decisions) -> PlanParts:
    """The plan's table of strategies, its regions, its chains and what it replicates."""
    return _Spelling(out).run()


class _Spelling:
    def __init__(self, out: Decisions) -> None:
        self.out, self.graph, self.flat, self.mesh = out, out.graph, out.graph.flat, out.graph.mesh
        self.strategies: list[NodeStrategy] = []
        self.table: dict[tuple[int, int], int] = {}
        self.row_of = [-1] * len(self.graph.classes)
        """Class → its row in the table of strategies, -1 until it is needed."""
        self.specs: dict[tuple[TensorType, int], ShardingSpec] = {}

    def run(self) -> PlanParts:
        root = self.region_plan(0)
        found, narrow = dict(self.out.chains), moved_narrow(self.flat.regions[0].graph)
        for (t, a, b), steps in self.out.chains.items():
            if t.shape in narrow and t.dtype == NARROW:  # a value that is a wider one in the program
                found.setdefault((replace(t, dtype=WIDE), a, b), steps)
        chains = [
            Chain(
                type=t,
                src=self.spec(t, a),
                dst=self.spec(t, b),
                steps=tuple(reshard_step(self.mesh, s) for s in steps),
            )
            for (t, a, b), steps in found.items()
        ]
        return PlanParts(
            strategies=tuple(self.strategies),
            root=root,
            chains=tuple(sorted(chains, key=lambda c: (str(c.type), str(c.src), str(c.dst)))),
            replicated=_replicated(self.out),
            operators=self.operators(),
        )

    def operators(self) -> tuple[OperatorRow, ...]:
        """All operators for people, in order of first occurrence."""
        flat, graph = self.flat, self.graph
        rows: dict[tuple[Phase, str, str, int, Work], list[float]] = {}
        for n, phase in enumerate(passes(flat)):
            if flat.kind[n] == "op" and (node := flat.node[n]) is not None:
                c = graph.class_of[n]
                key = phase, node.called, node.source, self.row_of[c], _work(node.primitive)
                row = rows.setdefault(key, [0, 0.0, 0.0])
                s, trips = self.out.strategy[c], graph.classes[c].trips
                row[0] += 1
                row[1] += trips * float(graph.classes[c].compute_s[s])
                row[2] += trips * float(graph.classes[c].signature.flops[s])
        return tuple(
            OperatorRow(
                phase=phase, primitive=primitive, source=source, strategy=row, count=int(found[0]), work=work,
                time_s=found[1], flops=found[2],
            )
            for (phase, primitive, source, row, work), found in rows.items()
        )  # fmt: skip

    def spec(self, t: TensorType, code: int) -> ShardingSpec:
        if (t, code) not in self.specs:
            self.specs[t, code] = self.mesh.spec(t, code)
        return self.specs[t, code]

    def strategy(self, c: int) -> int:
        """The row of the table that holds class c's strategy."""
        signature, s = self.graph.classes[c].signature, self.out.strategy[c]
        key = (id(signature), s)
        if key not in self.table:
            self.table[key] = len(self.strategies)
            operands = [
                self.spec(t, int(codes[s])) if codes is not None else _whole(t)
                for t, codes in zip(signature.operand_types, signature.operands, strict=True)
            ]
            results = [
                self.spec(t, int(codes[s])) for t, codes in zip(signature.result_types, signature.results, strict=True)
            ]
            factors = sorted(axes_of(self.mesh, signature, s).items())
            combine = combined(self.mesh, signature, s) if signature.rule is not None else ()  # ports have none
            self.strategies.append(
                NodeStrategy(
                    factor_axes=tuple((f, tuple(self.mesh.names[a] for a in axes)) for f, axes in factors),
                    operands=tuple(operands),
                    results=tuple(results),
                    combine=tuple((k, tuple(self.mesh.names[a] for a in axes)) for k, axes in combine),
                )
            )
        return self.table[key]

    def rows(self, region: int, plans: dict[int, tuple[RegionPlan, ...]]) -> list[int]:
        """Each operator's row, in the table's order of first occurrence; fills ``plans`` with those of bodies."""
        class_of, row_of = self.graph.class_of, self.row_of
        rows: list[int] = []
        for position, n in enumerate(self.flat.at[region]):
            if n < 0:
                rows.append(-1)
                plans[position] = tuple(self.region_plan(k) for k in self.flat.children[region, position])
                continue
            c = class_of[n]
            if row_of[c] < 0:
                row_of[c] = self.strategy(c)
            rows.append(row_of[c])
        return rows

    def made(self, value: int, t: TensorType) -> ShardingSpec:
        """The spec in which a value is made."""
        if value < 0:
            return _whole(t)
        n = self.flat.maker[value]
        return self.spec(t, self.out.result_code(self.graph.class_of[n], value - self.flat.first_value[n]))

    def changed(self, region: int) -> tuple[list[tuple[int, ShardingSpec]], list[tuple[int, ShardingSpec]]]:
        """The region's values that are resharded before anyone reads them, and the copies of its values."""
        flat, class_of = self.flat, self.graph.class_of
        rebased: list[tuple[int, ShardingSpec]] = []
        copies: list[tuple[int, ShardingSpec]] = []
        touched = {c for c, _ in self.out.copies}
        touched |= {c for c, this in enumerate(self.graph.classes) if this.signature.kind == "loop_out"}
        for name, value in enumerate(flat.env[region]) if touched else ():
            n = flat.maker[value]
            c = class_of[n]
            if value < 0 or c not in touched or flat.region[n] != region:
                continue
            t = flat.regions[region].graph.values[name]
            code = self.out.result_code(c, value - flat.first_value[n])
            if flat.kind[n] == "loop_out":
                carry = flat.maker[flat.source[flat.first_edge[n]]]
                if code != self.out.result_code(class_of[carry], 0):
                    rebased.append((name, self.spec(t, code)))
            link = (c, value - flat.first_value[n])
            copies += [(name, self.spec(t, other)) for other in self.out.copies.get(link, ())]
        return rebased, copies

    def region_plan(self, region: int) -> RegionPlan:
        flat, class_of, graph = self.flat, self.graph.class_of, self.flat.regions[region].graph
        env, classes = flat.env[region], self.graph.classes
        bodies: dict[int, tuple[RegionPlan, ...]] = {}
        rows = self.rows(region, bodies)
        ends = flat.outs if region == 0 else flat.ends[region]
        if ends or not graph.outputs:
            wanted = ((class_of[n], i) for n, i in ends)
            outputs = [self.spec(classes[c].signature.operand_types[i], self.out.operand_code(c, i)) for c, i in wanted]
        else:
            outputs = [
                self.made(env[o], graph.values[o]) if isinstance(o, int) else _whole(o.type) for o in graph.outputs
            ]
        rebased, copies = self.changed(region)
        return RegionPlan(
            inputs=tuple(self.made(env[v], graph.values[v]) for v in graph.inputs),
            outputs=tuple(outputs),
            nodes=tuple(rows),
            rebased=tuple(rebased),
            copies=tuple(copies),
            bodies=tuple(bodies.items()),
        )


def _work(primitive: str) -> Work:
    traits = record_of(primitive).traits
    if traits.attends:
        return "attention"
    return "products" if traits.contraction else "kernels" if traits.opaque else "memory"


def _whole(t: TensorType) -> ShardingSpec:
    return ShardingSpec(dims=((),) * len(t.shape))


def _replicated(out: Decisions) -> tuple[ReplicatedNode, ...]:
    flat = out.graph.flat
    rows: dict[tuple[str, str, str], list[float]] = {}
    for this in out.graph.classes:
        rule = this.signature.rule
        for n in this.members if rule is not None and rule.why else ():
            node = flat.node[n]
            assert node is not None and rule is not None
            moved = sum(t.size_bytes for t in (*node.operand_types, *node.result_types))
            row = rows.setdefault((node.called, node.source, rule.why), [0, 0.0, 0.0])
            row[0] += 1
            row[1] += roofline.flops(node) * this.trips
            row[2] += moved * this.trips
    return tuple(
        ReplicatedNode(primitive=k[0], source=k[1], why=k[2], count=int(v[0]), flops=v[1], bytes=v[2])
        for k, v in sorted(rows.items())
    )
