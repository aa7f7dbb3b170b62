"""A layer's graph and its shardings → the parts that a pipeline runs at different times.

    begin      once a step: weights resharded as the loop over microbatches reads them
    forward    the first part of the loop's body
    backward   the rest of it, gradients added to their sums
    (update    what follows the loop)

In: a `StageGraph` of one layer and its `LayerSharding`. Out: `LayerTask`s, each a graph with a plan that can be lowered
as those of whole steps are (`one_program.lowering`).

A value that one part makes and another reads is handed over as it stands, in each of its *versions* that the reader
needs: a version is the value after some steps of its resharding. Every step is run once, by the first part that needs
it, as the accounting of `intra_op.decisions` has it; what is read of the loop's constants is resharded before the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from autopar.ir.graph import Graph, Node, Operand
from autopar.ir.layer_sharding import LayerSharding
from autopar.ir.layers import Origin, PortPhase, StageGraph
from autopar.ir.sharding import ShardingSpec
from autopar.ir.sharding_plan import NodeStrategy, RegionPlan
from autopar.ir.strategy import ReshardStep

Version: TypeAlias = tuple[int, tuple[ReshardStep, ...]]
"""(value, the steps that led to it from the sharding in which the value is made)."""


@dataclass(frozen=True, kw_only=True)
class LayerTask:
    """A part of a layer.

    Attributes:
        graph, region: its operators, and how they run; values keep their numbers. The graph's inputs are what reaches
            the part anew (``fresh`` of them, in the order that `begin_task` … say), then values that it takes.
        origins: of the graph's nodes.
        takes: versions that earlier parts give; ``gives`` those that later parts take.
    """

    graph: Graph
    region: RegionPlan
    origins: tuple[Origin, ...]
    fresh: int
    takes: tuple[Version, ...]
    gives: tuple[Version, ...]


@dataclass(frozen=True, kw_only=True)
class LayerTasks:
    """The parts of a layer. ``weights`` are the loop's constants: (value in the loop's body, operand of the loop,
    spec in which the body starts from it); ``begins`` their versions that are made before the loop. A backward part
    that is split has ``input_grad`` (what leads to the cotangents that the layer sends) and ``weight_grad`` (the rest
    of it, which may run later) as well."""

    weights: tuple[tuple[int, int, ShardingSpec], ...]
    begins: tuple[Version, ...]
    forward: LayerTask
    backward: LayerTask | None
    input_grad: LayerTask | None = None
    weight_grad: LayerTask | None = None


def stacked(spec: ShardingSpec) -> ShardingSpec:
    """The spec of values that a loop stacks, or reads row by row."""
    return ShardingSpec(dims=((), *spec.dims), unreduced=spec.unreduced)


def wants(
    node: Node, region: RegionPlan, position: int, strategies: Sequence[NodeStrategy]
) -> list[ShardingSpec | None]:
    """The specs that the node at ``position`` wants its operands in; None: as they were made. ``strategies``: the table
    that ``region.nodes`` indexes."""
    row = region.nodes[position]
    if row >= 0:
        return list(strategies[row].operands)
    return body_wants(node, dict(region.bodies)[position])


def body_wants(node: Node, bodies: Sequence[RegionPlan]) -> list[ShardingSpec | None]:
    """The specs that a scan, while, cond or remat wants its operands in, by its bodies' inputs; None: as they were
    made."""
    match node.primitive:
        case "scan":
            whole = node.params["num_consts"] + node.params["num_carry"]
            return [s if i < whole else stacked(s) for i, s in enumerate(bodies[0].inputs)]
        case "while":
            n = node.params["cond_nconsts"]
            return [*bodies[0].inputs[:n], *bodies[1].inputs]
        case "cond":
            return [None, *bodies[0].inputs]
        case _:
            return [None] * len(node.operands)


def results_of(
    node: Node, region: RegionPlan, position: int, strategies: Sequence[NodeStrategy]
) -> tuple[ShardingSpec, ...]:
    """The specs in which the node at ``position`` makes its results; ``strategies``: the table that ``region.nodes``
    indexes."""
    row = region.nodes[position]
    if row >= 0:
        return strategies[row].results
    bodies = dict(region.bodies)[position]
    match node.primitive:
        case "scan":
            consts, carry = node.params["num_consts"], node.params["num_carry"]
            return (*bodies[0].inputs[consts : consts + carry], *map(stacked, bodies[0].outputs[carry:]))
        case "while":
            return bodies[1].inputs[node.params["body_nconsts"] :]
        case _:
            return bodies[0].outputs


class Versions:
    """Which versions of a region's values its readers need. ``bases``: value → the spec it is made in; ``chains``:
    (type, from, to) → steps."""

    def __init__(self, graph: Graph, region: RegionPlan, sharding: LayerSharding) -> None:
        self.graph, self.region, self.strategies = graph, region, sharding.strategies
        self.chains = {(c.type, c.src, c.dst): c.steps for c in sharding.chains}
        self.bases = dict(zip(graph.inputs, region.inputs, strict=True))
        for p, node in enumerate(graph.nodes):
            self.bases.update(zip(node.results, results_of(node, region, p, self.strategies), strict=False))
        self.bases.update(region.rebased)
        self.copies: dict[int, list[ShardingSpec]] = {}
        for value, spec in region.copies:
            self.copies.setdefault(value, []).append(spec)

    def path(self, value: int, want: ShardingSpec | None, constant: bool = False) -> tuple[ReshardStep, ...]:
        """The steps from how a value is made to ``want`` (None: as it is made), by way of the region's copies of it; of
        a loop's ``constant`` there are none."""
        at = self.bases[value]
        if want is None or want == at:
            return ()
        steps: tuple[ReshardStep, ...] = ()
        for copy in () if constant else self.copies.get(value, ()):
            steps, at = (*steps, *self._chain(value, at, copy)), copy
            if at == want:
                return steps
        return (*steps, *self._chain(value, at, want))

    def _chain(self, value: int, src: ShardingSpec, dst: ShardingSpec) -> tuple[ReshardStep, ...]:
        return () if src == dst else self.chains[self.graph.values[value], src, dst]

    def reads(self, positions: Iterable[int]) -> Iterator[tuple[int, ShardingSpec | None]]:
        """(value, spec wanted; None: as it is made) of every operand of the nodes at ``positions``, literals left
        out."""
        for p in positions:
            node = self.graph.nodes[p]
            for o, want in zip(node.operands, wants(node, self.region, p, self.strategies), strict=True):
                if isinstance(o, int):
                    yield o, want

    def spec(self, version: Version) -> ShardingSpec:
        """The spec in which a version is held."""
        return walked(self.bases[version[0]], version[1])


def walked(spec: ShardingSpec, steps: Sequence[ReshardStep]) -> ShardingSpec:
    """What steps of resharding make of a spec. The axes of a dimension keep their order; one that comes to it is its
    most minor."""
    dims, sums = [list(axes) for axes in spec.dims], list(spec.unreduced)
    for step in steps:
        for axis in step.axes:
            if step.kind in ("all-reduce", "reduce-scatter"):
                sums.remove(axis)
            if step.kind in ("all-gather", "all-to-all"):
                dims[step.src].remove(axis)
            if step.kind in ("reduce-scatter", "all-to-all", "slice"):
                dims[step.dst].append(axis)
            if step.kind == "mask":
                sums.append(axis)
    return ShardingSpec(dims=tuple(map(tuple, dims)), unreduced=tuple(sums))


def layer_tasks(part: StageGraph, sharding: LayerSharding, split: bool = False) -> LayerTasks:
    """Splits a layer; with ``split`` its backward part too.

    Fresh inputs of the forward part: what it receives, in the order of its ports; of the backward part: likewise, then
    the gradient sums. Outputs: what they send; then results that are combined over microbatches (forward), or the sums
    (backward); then, as they are made, values that later parts take."""
    return _Split(part, sharding).run(split)


class _Split:
    def __init__(self, part: StageGraph, sharding: LayerSharding) -> None:
        self.part, self.body = part, part.body
        [self.region] = dict(sharding.root.bodies)[part.loop]
        self.versions = Versions(self.body, self.region, sharding)
        loop = part.graph.nodes[part.loop]
        self.num_consts: int = loop.params["num_consts"]
        self.num_carry: int = loop.params["num_carry"]
        self.constants = set(self.body.inputs[: self.num_consts])
        self.carry = self.body.inputs[self.num_consts :]
        self.results = {r: p for p, node in enumerate(self.body.nodes) for r in node.results}
        self.ports = {port.node for port in (*part.receives, *part.sends) if port.phase in ("forward", "backward")}

    def run(self, split: bool) -> LayerTasks:
        part, body, region = self.part, self.body, self.region
        nodes = len(body.nodes)
        ahead, back = range(part.boundary), range(part.boundary, nodes)
        combined = list(zip(body.outputs[self.num_carry :], region.outputs[self.num_carry :], strict=True))
        first = [*self.versions.reads(ahead), *((o, s) for o, s in combined if isinstance(o, int))]
        second = [*self.versions.reads(back)]
        second += [
            (o, s) for o, s in zip(body.outputs, region.outputs[: self.num_carry], strict=False) if isinstance(o, int)
        ]
        begins = self._paths([(v, s) for v, s in (*first, *second) if v in self.constants])
        kept = self._residuals(first, [(v, s) for v, s in second if self._made(v) < part.boundary])
        forward = self._task(ahead, "forward", first, (), combined, kept)
        backward = input_grad = weight_grad = None
        if part.boundary < nodes or self.carry:
            sums = list(zip(body.outputs[: self.num_carry], region.outputs[: self.num_carry], strict=True))
            if split:
                input_grad, weight_grad = self._apart(sums, kept)
            backward = self._task(back, "backward", second, self.carry, sums, (), kept)
        operands = part.graph.nodes[part.loop].operands[: self.num_consts]
        weights: list[tuple[int, int, ShardingSpec]] = []
        for v, o, spec in zip(body.inputs, operands, region.inputs, strict=False):
            assert isinstance(o, int)
            weights.append((v, o, spec))
        return LayerTasks(
            weights=tuple(weights), begins=begins, forward=forward, backward=backward, input_grad=input_grad,
            weight_grad=weight_grad,
        )  # fmt: skip

    def _apart(
        self, sums: Sequence[tuple[Operand, ShardingSpec]], kept: tuple[Version, ...]
    ) -> tuple[LayerTask, LayerTask]:
        """The backward part in two: what the cotangents that leave are made of, and the rest."""
        body, back = self.body, range(self.part.boundary, len(self.body.nodes))
        wanted = {o for p in back if p in self.ports for o in body.nodes[p].operands if isinstance(o, int)}
        ahead: list[int] = []
        for p in reversed(back):
            node = body.nodes[p]
            if p in self.ports or wanted & set(node.results):
                ahead.append(p)
                wanted |= {o for o in node.operands if isinstance(o, int)}
        ahead.reverse()
        behind = [p for p in back if p not in set(ahead)]
        first = list(self.versions.reads(ahead))
        second = [*self.versions.reads(behind), *((o, s) for o, s in sums if isinstance(o, int))]
        here = {r for p in ahead for r in body.nodes[p].results}
        read = [(v, s) for v, s in second if v not in self.constants and v not in set(self.carry)]
        read = [(v, s) for v, s in read if v in here or self._made(v) < self.part.boundary]
        mine = self._nearest([(v, s) for v, s in first if self._made(v) < self.part.boundary], kept)
        handed: dict[Version, None] = {}
        late: dict[Version, None] = {}
        known = {
            (v, steps[:n]) for v, steps in self._paths((v, s) for v, s in first if v not in self.constants)
            for n in range(len(steps) + 1)
        } | {(v, ()) for v in here}  # fmt: skip
        for v, steps in self._paths(read):
            ours = max((n for n in range(len(steps) + 1) if (v, steps[:n]) in known), default=-1)
            old = max((n for n in range(len(steps) + 1) if (v, steps[:n]) in kept), default=-1)
            (handed if ours > old else late)[v, steps[: max(ours, old)]] = None
        input_grad = self._task(ahead, "backward", first, (), (), tuple(handed), mine)
        weight_grad = self._task(behind, None, second, self.carry, sums, (), (*late, *handed))
        return input_grad, weight_grad

    def _nearest(
        self, reads: Sequence[tuple[int, ShardingSpec | None]], given: tuple[Version, ...]
    ) -> tuple[Version, ...]:
        """Those of ``given`` from which readers go on."""
        there = set(given)
        out: dict[Version, None] = {}
        for v, steps in self._paths(reads):
            out[v, steps[: max(n for n in range(len(steps) + 1) if (v, steps[:n]) in there)]] = None
        return tuple(out)

    def _made(self, value: int) -> int:
        """Position of the node that makes a value; past the end for inputs."""
        return self.results.get(value, len(self.body.nodes))

    def _paths(self, reads: Iterable[tuple[int, ShardingSpec | None]]) -> tuple[Version, ...]:
        found = {(v, self.versions.path(v, s, v in self.constants)): None for v, s in reads}
        return tuple(sorted(found, key=lambda version: (version[0], repr(version[1]))))

    def _residuals(
        self, first: Sequence[tuple[int, ShardingSpec | None]], second: Sequence[tuple[int, ShardingSpec | None]]
    ) -> tuple[Version, ...]:
        """Of what the backward part reads of the forward part's values, the versions there that are nearest."""
        there = {
            (v, steps[:n])
            for v, steps in self._paths((v, s) for v, s in first if v not in self.constants)
            for n in range(len(steps) + 1)
        }
        out: dict[Version, None] = {}
        for v, steps in self._paths(second):
            n = max((n for n in range(len(steps) + 1) if (v, steps[:n]) in there), default=0)
            out[v, steps[:n]] = None
        return tuple(out)

    def _task(
        self,
        positions: Sequence[int],
        phase: PortPhase | None,
        reads: Sequence[tuple[int, ShardingSpec | None]],
        more: Sequence[int],
        ends: Sequence[tuple[Operand, ShardingSpec]],
        gives: tuple[Version, ...],
        kept: tuple[Version, ...] = (),
    ) -> LayerTask:
        body, region, strategies = self.body, self.region, self.versions.strategies
        rows = [p for p in positions if p not in self.ports]
        receives = [port.stored for port in self.part.receives if port.phase == phase]
        sends = [port for port in self.part.sends if port.phase == phase]
        weights = self._paths((v, s) for v, s in reads if v in self.constants)
        takes = (*weights, *kept)
        inputs = [*receives, *more, *dict.fromkeys(v for v, _ in takes)]
        outputs = [port.stored for port in sends]
        wanted = [strategies[region.nodes[port.node]].operands[0] for port in sends]
        again = tuple(dict.fromkeys(v for v, _ in gives))  # what is only kept is made all the same
        bases, here = self.versions.bases, {v for p in rows for v in body.nodes[p].results} | set(inputs)
        graph = replace(
            body, nodes=tuple(body.nodes[p] for p in rows), inputs=tuple(inputs),
            outputs=(*outputs, *(o for o, _ in ends), *again), arg_paths=(), out_paths=(), fingerprint="",
        )  # fmt: skip
        bodies = dict(region.bodies)
        plan = RegionPlan(
            inputs=tuple(bases[v] for v in inputs),
            outputs=(*wanted, *(s for _, s in ends), *(bases[v] for v in again)),
            nodes=tuple(region.nodes[p] for p in rows),
            rebased=tuple((v, s) for v, s in region.rebased if v in here),
            copies=tuple((v, s) for v, s in region.copies if v in here),
            bodies=tuple((i, bodies[p]) for i, p in enumerate(rows) if p in bodies),
        )
        return LayerTask(
            graph=graph, region=plan, origins=tuple(self.part.body_origins[p] for p in rows),
            fresh=len(receives) + len(more), takes=takes, gives=gives,
        )  # fmt: skip


def by_value(versions: Iterable[Version]) -> Mapping[int, list[tuple[ReshardStep, ...]]]:
    """Value → the steps of each of its versions, in the order given."""
    out: dict[int, list[tuple[ReshardStep, ...]]] = {}
    for value, steps in versions:
        out.setdefault(value, []).append(steps)
    return out
