"""A Graph with bodies → one flat list of planning nodes, in execution order.

Every operator, every input (of the step or of a loop body) and every output that has a sharding of
its own becomes a planning node; bodies are inlined with the number of times they execute. Ties between a body
and its surroundings become ordinary edges:

- scan: a constant's and a carry's input node has an edge from the outer value; the carry has a second edge
  from the body's carry-out, paid every iteration, so that carry-in = carry-out is the same node; a
  scanned input or output has the outer type with its leading dimension whole.
- while: as scan, with an assumed trip count; the predicate is replicated.
- cond: one input node per operand and one output node per result, shared by the branches.
- remat: no nodes; the body's operators read the outer values, so that a gather is repeated with them.

An input that is state has an edge from its new value: their sharding is one choice, unless they are pinned apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from autopar.cost.roofline import while_trips
from autopar.ir.graph import Constant, Graph, Node, Operand, TensorType
from autopar.ir.layers import RECEIVE, SEND
from autopar.primitives import record_of

_PORTS = {RECEIVE: "recv", SEND: "send"}
"""Ends of transfers between stages: as free, and for free, as inputs and outputs are."""

Link: TypeAlias = "tuple[int, int] | None"
"""(producing planning node, result position), or None for a constant."""

CONSTANT = -1
"""The source of an operand that is a constant."""


@dataclass(slots=True)
class Region:
    """The step's graph, or body ``body`` of the node at ``position`` of region ``parent`` (−1: none). ``kind``: step,
    scan, while, cond or remat. ``trips``: executions per step (assumed where ``known`` is False). ``moves_out``: True
    for a loop out of which the compiler moves collectives of what does not change."""

    id: int
    graph: Graph
    parent: int
    position: int
    body: int
    kind: str
    trips: int
    known: bool
    moves_out: bool = False


@dataclass(slots=True)
class Flat:
    """Parallel lists: over planning nodes, over their operands (edges) and over their results (values).

    ``kind``: op, arg, out, const_in, carry, xs, ys, branch_in, branch_out, pred, loop_out, recv, send. Operand i of
    node n is edge ``first_edge[n] + i``: value ``source[edge]``, or CONSTANT, resharded, if at all, in region
    ``exec_region[edge]``.
    Result r is value ``first_value[n] + r``, and ``maker`` of that is n. Nodes of equal ``key`` have equal strategies:
    ``keys`` says what a key stands for, and ``example`` which node had it first. ``depth`` counts the matrix products
    and convolutions on the longest way to a node. ``args`` are the inputs' nodes, ``outs`` the (node, operand) that
    takes each output.
    """

    regions: list[Region] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    key: list[int] = field(default_factory=list)
    node: list[Node | None] = field(default_factory=list)
    region: list[int] = field(default_factory=list)
    operand_types: list[tuple[TensorType, ...]] = field(default_factory=list)
    result_types: list[tuple[TensorType, ...]] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    first_edge: list[int] = field(default_factory=lambda: [0])
    first_value: list[int] = field(default_factory=lambda: [0])
    source: list[int] = field(default_factory=list)
    exec_region: list[int] = field(default_factory=list)
    maker: list[int] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)
    example: list[int] = field(default_factory=list)
    args: list[int] = field(default_factory=list)
    donated: set[int] = field(default_factory=set)
    """Planning nodes of inputs whose buffer the new value takes."""
    outs: list[tuple[int, int]] = field(default_factory=list)
    env: list[list[int]] = field(default_factory=list)
    """Region → the value that each of its graph's values is."""
    at: list[list[int]] = field(default_factory=list)
    """Region → the planning node at each position of its graph; -1 for a node with bodies."""
    children: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """(region, position) → the regions of that node's bodies, in the node's order."""
    ends: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Region → (planning node, operand) that each of its outputs must suit; empty for remat."""
    span: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Region of a loop → its first planning node, and the last + 1, those of the bodies inside it included."""
    hoisted: dict[int, int] = field(default_factory=dict)
    """Value that is the same in every turn of a loop → the region outside the loop in which it is resharded: a constant
    of the loop, or what is made of such alone (which the compiler moves out, once it is gathered)."""
    ids: dict[Any, int] = field(default_factory=dict)
    """What a key stands for → that key."""
    op_ids: dict[Any, int] = field(default_factory=dict)
    """The same for operators by the identity of what they are made of, which trace shares between equal ones."""
    arrays: Columns | None = None
    tasks: int = -1
    """Position in the graph of a scan whose turns are programs of their own; −1: none."""

    def add(
        self,
        kind: str,
        key: int,
        region: int,
        sources: list[int],
        exec_region: list[int],
        operand_types: tuple[TensorType, ...],
        result_types: tuple[TensorType, ...],
        node: Node | None = None,
    ) -> int:
        """Appends a planning node and returns its index; ``exec_region`` holds one region per source."""
        n = len(self.kind)
        self.kind.append(kind)
        self.key.append(key)
        self.node.append(node)
        self.region.append(region)
        self.operand_types.append(operand_types)
        self.result_types.append(result_types)
        deepest, maker, depths = 0, self.maker, self.depth
        for value in sources:
            if value >= 0 and depths[maker[value]] > deepest:
                deepest = depths[maker[value]]
        depths.append(deepest + 1 if node is not None and record_of(node.primitive).traits.contraction else deepest)
        self.source += sources
        self.exec_region += exec_region
        self.first_edge.append(len(self.source))
        maker += [n] * len(result_types)
        self.first_value.append(len(maker))
        return n

    def add_kind(
        self, kind: str, rest: tuple[Any, ...], region: int, sources: list[int], exec_region: list[int],
        operand_types: tuple[TensorType, ...], result_types: tuple[TensorType, ...],
    ) -> int:  # fmt: skip
        """Appends a planning node that is no operator and returns its index. Equal ``kind`` and ``rest`` mean equal
        strategies."""
        return self.add(kind, self._key((kind, *rest)), region, sources, exec_region, operand_types, result_types)

    def add_op(self, node: Node, region: int, sources: list[int], exec_region: list[int]) -> int:
        """Appends an operator and returns its planning node."""
        fast: Any = (id(node.params), id(node.operand_types), id(node.result_types), node.primitive)
        zeros = CONSTANT in sources and tuple(
            (i, o.value == 0) for i, o in enumerate(node.operands) if not isinstance(o, int)
        )
        if zeros:
            fast = (*fast, zeros)
        if node.hidden is not None or node.flops is not None:
            fast = (*fast, _work(node))
        key = self.op_ids.get(fast)
        if key is None:
            key = self.op_ids[fast] = self._key(_op_key(node))
        return self.add("op", key, region, sources, exec_region, node.operand_types, node.result_types, node)

    def _key(self, key: Any) -> int:
        found = self.ids.setdefault(key, len(self.keys))
        if found == len(self.keys):
            self.keys.append(key)
            self.example.append(len(self.kind))
        return found

    def value(self, link: Link) -> int:
        """The value that a link names; `CONSTANT` for a constant."""
        return CONSTANT if link is None else self.first_value[link[0]] + link[1]

    def link(self, edge: int) -> Link:
        """What an operand is: a planning node's result, or a constant."""
        value = self.source[edge]
        return None if value < 0 else (self.maker[value], value - self.first_value[self.maker[value]])

    def columns(self) -> Columns:
        """The finished graph as arrays, made when they are first asked for."""
        if self.arrays is not None:
            return self.arrays
        first_edge = np.array(self.first_edge, np.int64)
        self.arrays = Columns(
            np.array(self.region, np.int64),
            np.array(self.key, np.int64),
            first_edge,
            np.array(self.first_value, np.int64),
            np.array(self.source, np.int64),
            np.array(self.exec_region, np.int64),
            np.repeat(np.arange(len(self.kind)), np.diff(first_edge)),
            np.array(self.maker, np.int64),
            np.array([node is not None and node.phase == "update" for node in self.node], bool),
        )
        return self.arrays

    @property
    def links(self) -> Links:
        """``links[n][i]`` is the link of operand i of planning node n."""
        return Links(self)


@dataclass(frozen=True, slots=True)
class Columns:
    """A flat graph's integers as int64 arrays: over planning nodes (``region``, ``key``, ``first_edge`` and
    ``first_value``, with a last row past the end), edges (``source``, ``exec_region``, and ``user``, the node that an
    edge belongs to) and values (``maker``). ``updates`` is bool[planning nodes]: the update's operators."""

    region: Any
    key: Any
    first_edge: Any
    first_value: Any
    source: Any
    exec_region: Any
    user: Any
    maker: Any
    updates: Any


@dataclass(frozen=True, slots=True)
class Links:
    """A flat graph's operands as links, a list per planning node, made when they are asked for."""

    flat: Flat

    def __len__(self) -> int:
        return len(self.flat.kind)

    def __iter__(self) -> Iterator[list[Link]]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, n: int) -> list[Link]:
        flat = self.flat
        return [flat.link(edge) for edge in range(flat.first_edge[n], flat.first_edge[n + 1])]


def flatten(graph: Graph, pins: dict[Any, Any] | None = None, tasks: int = -1) -> Flat:
    """The planning nodes of ``graph``.

    Args:
        pins: an input's position, or ("out", an output's) → a hashable pin.
        tasks: position of a scan whose turns are programs of their own (a stage's microbatches); −1: none.
    """
    pins = pins or {}
    flat = Flat(tasks=tasks)
    flat.regions.append(Region(0, graph, -1, -1, 0, "step", 1, True))
    flat.env.append([CONSTANT] * len(graph.values))
    flat.at.append([])
    old, pin_of = _tied(graph, pins)
    state = set(old.values())
    for i, value in enumerate(graph.inputs):
        value_type = graph.values[value]
        loop = (value_type,) if i in state else ()
        rest = (value_type, i in state, pin_of.get(i))
        n = flat.add_kind("arg", rest, 0, [CONSTANT] * len(loop), [0] * len(loop), loop, (value_type,))
        flat.args.append(n)
        flat.env[0][value] = flat.first_value[n]
    flat.donated = {flat.args[i] for i in graph.donated if i in state}
    _run(flat, 0)
    for j, operand in enumerate(graph.outputs):
        source = _read(flat, 0, operand)
        value_type = graph.values[operand] if isinstance(operand, int) else operand.type
        if j in old:
            n = flat.args[old[j]]
            flat.source[flat.first_edge[n]] = source
        else:
            n = flat.add_kind("out", (value_type, pins.get(("out", j))), 0, [source], [0], (value_type,), ())
        flat.outs.append((n, 0))
    return flat


def _tied(graph: Graph, pins: dict[Any, Any]) -> tuple[dict[int, int], dict[int, Any]]:
    """(output that is a new value → its input, input → pin). Where one of the two is pinned, the other is alike; those
    pinned apart are not tied."""
    old: dict[int, int] = {}
    pin_of = {i: pin for i, pin in pins.items() if isinstance(i, int)}
    for i, j in graph.state:
        pin = pins.get(("out", j), pin_of.get(i))
        if pin_of.get(i, pin) == pin:
            old[j] = i
            pin_of[i] = pin
    return old, pin_of


def _read(flat: Flat, region: int, operand: Operand) -> int:
    return flat.env[region][operand] if isinstance(operand, int) else CONSTANT


def _run(flat: Flat, region: int) -> None:
    graph, env, at = flat.regions[region].graph, flat.env[region], flat.at[region]
    here = [[region] * i for i in range(8)]
    for position, node in enumerate(graph.nodes):
        sources = [env[o] if o.__class__ is int else CONSTANT for o in node.operands]  # type: ignore[index]
        if node.primitive in _PORTS:
            kind, types = _PORTS[node.primitive], (*node.operand_types, *node.result_types)
            n = flat.add_kind(
                kind, types, region, sources, [_exec(flat, value, region) for value in sources], node.operand_types,
                node.result_types,
            )  # fmt: skip
            at.append(n)
            for value in node.results:
                env[value] = flat.first_value[n]
            continue
        if not node.bodies:
            if region or len(sources) >= len(here):
                where = [_exec(flat, value, region) for value in sources]
            else:
                where = here[len(sources)]
            n = flat.add_op(node, region, sources, where)
            at.append(n)
            first = flat.first_value[n]
            for r, value in enumerate(node.results):
                env[value] = first + r
            if flat.regions[region].moves_out:
                outside = _outside(flat, region, sources, where)
                if outside >= 0:
                    flat.hoisted.update(dict.fromkeys(range(first, first + len(node.results)), outside))
            continue
        at.append(-1)
        if node.primitive == "scan":
            results = _scan(flat, region, position, node, sources)
        elif node.primitive == "while":
            results = _while(flat, region, position, node, sources)
        elif node.primitive == "cond":
            results = _cond(flat, region, position, node, sources)
        else:
            results = _inline(flat, region, position, node, sources)
        for value, result in zip(node.results, results, strict=True):
            env[value] = result


def _outside(flat: Flat, region: int, sources: Sequence[int], where: Sequence[int]) -> int:
    """The region outside the loop ``region`` in which all that an operator reads is known; -1 where it is not. (What a
    while loop's predicate makes of constants the compiler leaves where it is.)"""
    known = [r for v, r in zip(sources, where, strict=True) if v >= 0]
    if region in known:
        return -1
    out = region
    while flat.regions[out].moves_out:
        out = flat.regions[out].parent
    return max([out, *known])


def _work(node: Node) -> Any:
    """What an opaque operator's cost follows from, beside its parameters and types."""
    return node.flops, node.hidden_runs, node.hidden.fingerprint if node.hidden is not None else ""


def _op_key(node: Node) -> Any:
    constants = tuple((i, o.value == 0) for i, o in enumerate(node.operands) if isinstance(o, Constant))
    work = _work(node)
    key = ("op", node.primitive, tuple(node.params.items()), node.operand_types, node.result_types, constants, work)
    try:
        hash(key)
    except TypeError:
        return ("op", node.primitive, repr(node.params), node.operand_types, node.result_types, constants, work)
    return key


def _exec(flat: Flat, value: int, region: int) -> int:
    """The region in which a resharding of ``value`` for a user in ``region`` runs: loop constants are hoisted."""
    outside = flat.hoisted.get(value)
    return region if outside is None or flat.region[flat.maker[value]] != region else outside


def _open(flat: Flat, region: int, position: int, body: int, graph: Graph, trips: int, known: bool, kind: str) -> int:
    outer = flat.regions[region]
    new = Region(len(flat.regions), graph, region, position, body, kind, outer.trips * trips, known and outer.known)
    flat.regions.append(new)
    flat.env.append([CONSTANT] * len(graph.values))
    flat.at.append([])
    return new.id


def _entry(flat: Flat, kind: str, region: int, outer: int, value: int, inner: TensorType, over: TensorType) -> int:
    """An input node of a body: edge from the outer value, and for a carry a second, from the loop's end."""
    where = _exec(flat, value, outer)
    types = (over, inner) if kind == "carry" else (over,)
    sources = [value, CONSTANT] if kind == "carry" else [value]
    execs = [where, region] if kind == "carry" else [where]
    n = flat.add_kind(kind, (inner, over), region, sources, execs, types, (inner,))
    if kind == "const_in":
        flat.hoisted[flat.first_value[n]] = where
    return n


def _scan(flat: Flat, outer: int, position: int, node: Node, sources: list[int]) -> list[int]:
    body, consts, carry = node.bodies[0], node.params["num_consts"], node.params["num_carry"]
    region = _open(flat, outer, position, 0, body, node.params["length"], True, "scan")
    flat.regions[region].moves_out = bool(outer) or position != flat.tasks
    begins = len(flat.kind)
    entries: list[int] = []
    for i, (value, source) in enumerate(zip(body.inputs, sources, strict=True)):
        kind = "const_in" if i < consts else "carry" if i < consts + carry else "xs"
        n = _entry(flat, kind, region, outer, source, body.values[value], node.operand_types[i])
        flat.env[region][value] = flat.first_value[n]
        entries.append(n)
    _run(flat, region)
    results: list[int] = []
    outs: list[tuple[int, int]] = []
    for j, operand in enumerate(body.outputs):
        source = _read(flat, region, operand)
        where = _exec(flat, source, region)
        if j < carry:
            n = entries[consts + j]
            _close(flat, n, source, where)
            outs.append((n, 1))
            results.append(_loop_out(flat, outer, n, node.results[j]))
        else:
            inner = body.values[operand] if isinstance(operand, int) else operand.type
            over = node.result_types[j]
            n = flat.add_kind("ys", (inner, over), outer, [source], [where], (inner,), (over,))
            outs.append((n, 0))
            results.append(flat.first_value[n])
    flat.ends[region] = outs
    flat.span[region] = (begins, len(flat.kind))
    flat.children[outer, position] = (region,)
    return results


def _close(flat: Flat, carry: int, source: int, where: int) -> None:
    """Ties a carry's input node to the loop's end."""
    edge = flat.first_edge[carry] + 1
    flat.source[edge], flat.exec_region[edge] = source, where


def _loop_out(flat: Flat, outer: int, carry: int, value: int) -> int:
    """The carried value after the loop: a node of its own, so that partial sums are reduced once for all readers."""
    if value not in flat.regions[outer].graph.last_use:
        return flat.first_value[carry]
    t = flat.result_types[carry][0]
    return flat.first_value[flat.add_kind("loop_out", (t,), outer, [flat.first_value[carry]], [outer], (t,), (t,))]


def _while(flat: Flat, outer: int, position: int, node: Node, sources: list[int]) -> list[int]:
    cond_consts, body_consts = node.params["cond_nconsts"], node.params["body_nconsts"]
    cond, body = node.bodies
    trips, known = while_trips(node), node.params["trips"] is not None
    inside = _open(flat, outer, position, 1, body, trips, known, "while")
    flat.regions[inside].moves_out = True
    entries: list[int] = []
    for i, value in enumerate(body.inputs):
        kind, operand = "const_in" if i < body_consts else "carry", cond_consts + i
        n = _entry(flat, kind, inside, outer, sources[operand], body.values[value], node.operand_types[operand])
        flat.env[inside][value] = flat.first_value[n]
        entries.append(n)
    test = _open(flat, outer, position, 0, cond, trips + known, known, "while")
    for i, value in enumerate(cond.inputs):
        value_type = cond.values[value]
        if i < cond_consts:
            n = _entry(flat, "const_in", test, outer, sources[i], value_type, value_type)
        else:
            carried = flat.first_value[entries[body_consts + i - cond_consts]]
            n = _entry(flat, "branch_in", test, test, carried, value_type, value_type)
        flat.env[test][value] = flat.first_value[n]
    _run(flat, test)
    predicate = cond.outputs[0]
    bool_type = cond.values[predicate] if isinstance(predicate, int) else predicate.type
    n = flat.add_kind("pred", (bool_type,), test, [_read(flat, test, predicate)], [test], (bool_type,), ())
    flat.ends[test] = [(n, 0)]
    _run(flat, inside)
    outs: list[tuple[int, int]] = []
    for j, operand in enumerate(body.outputs):
        n, source = entries[body_consts + j], _read(flat, inside, operand)
        _close(flat, n, source, _exec(flat, source, inside))
        outs.append((n, 1))
    flat.ends[inside] = outs
    flat.span[inside] = flat.span[test] = (entries[0], len(flat.kind))
    flat.children[outer, position] = (test, inside)
    return [_loop_out(flat, outer, n, v) for (n, _), v in zip(outs, node.results, strict=True)]


def _cond(flat: Flat, outer: int, position: int, node: Node, sources: list[int]) -> list[int]:
    index_type = node.operand_types[0]
    flat.add_kind("pred", (index_type,), outer, [sources[0]], [_exec(flat, sources[0], outer)], (index_type,), ())
    entries = [
        _entry(flat, "branch_in", outer, outer, source, t, t)
        for source, t in zip(sources[1:], node.operand_types[1:], strict=True)
    ]
    ends: list[list[int]] = []
    regions: list[int] = []
    for b, body in enumerate(node.bodies):
        region = _open(flat, outer, position, b, body, 1, True, "cond")
        for value, n in zip(body.inputs, entries, strict=True):
            flat.env[region][value] = flat.first_value[n]
        _run(flat, region)
        ends.append([_read(flat, region, o) for o in body.outputs])
        regions.append(region)
    results: list[int] = []
    for j, t in enumerate(node.result_types):
        rest = (t, len(node.bodies))
        n = flat.add_kind("branch_out", rest, outer, [e[j] for e in ends], list(regions), (t,) * len(ends), (t,))
        results.append(n)
    for b, region in enumerate(regions):
        flat.ends[region] = [(n, b) for n in results]
    flat.children[outer, position] = tuple(regions)
    return [flat.first_value[n] for n in results]


def _inline(flat: Flat, outer: int, position: int, node: Node, sources: list[int]) -> list[int]:
    body = node.bodies[0]
    region = _open(flat, outer, position, 0, body, 1, True, "remat")
    for value, source in zip(body.inputs, sources, strict=True):
        flat.env[region][value] = source
    _run(flat, region)
    flat.ends[region] = []
    flat.children[outer, position] = (region,)
    return [_read(flat, region, o) for o in body.outputs]
