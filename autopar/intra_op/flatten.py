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

A donated input has an edge from the output that takes its buffer: their sharding is one choice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from autopar.cost.roofline import WHILE_TRIPS
from autopar.ir.graph import Constant, Graph, Node, TensorType

HEAVY = frozenset(("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"))

Link: TypeAlias = "tuple[int, int] | None"
"""(producing planning node, result position), or None for a constant."""


@dataclass(slots=True)
class Region:
    """One graph or body. ``trips``: executions per step (assumed where ``known`` is False)."""

    id: int
    graph: Graph
    parent: int
    position: int
    body: int
    kind: str
    trips: int
    known: bool


@dataclass(slots=True)
class Flat:
    """Parallel lists over planning nodes.

    ``kind``: op, arg, out, const_in, carry, xs, ys, branch_in, branch_out, pred, loop_out. ``key`` is hashable: nodes
    of equal key have equal strategies. ``links[n][i]`` produces operand i, and its resharding runs in region
    ``exec_region[n][i]``.
    """

    regions: list[Region] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    key: list[Any] = field(default_factory=list)
    node: list[Node | None] = field(default_factory=list)
    region: list[int] = field(default_factory=list)
    links: list[list[Link]] = field(default_factory=list)
    exec_region: list[list[int]] = field(default_factory=list)
    operand_types: list[tuple[TensorType, ...]] = field(default_factory=list)
    result_types: list[tuple[TensorType, ...]] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    hoist: list[int] = field(default_factory=list)
    args: list[int] = field(default_factory=list)
    outs: list[tuple[int, int]] = field(default_factory=list)
    env: list[dict[int, Link]] = field(default_factory=list)
    at: dict[tuple[int, int], int] = field(default_factory=dict)
    """(region, position) → the planning node of that operator."""
    children: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """(region, position) → the regions of that node's bodies, in the node's order."""
    ends: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Region → (planning node, operand) that each of its outputs must suit; empty for remat."""
    span: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Region → first and last + 1 planning node made while it was open."""

    def add(
        self,
        kind: str,
        key: Any,
        region: int,
        links: list[Link],
        exec_region: list[int],
        operand_types: tuple[TensorType, ...],
        result_types: tuple[TensorType, ...],
        node: Node | None = None,
        hoist: int = -1,
    ) -> int:
        """Appends a planning node and returns its index."""
        self.kind.append(kind)
        self.key.append(key)
        self.node.append(node)
        self.region.append(region)
        self.links.append(links)
        self.exec_region.append(exec_region)
        self.operand_types.append(operand_types)
        self.result_types.append(result_types)
        depth = max((self.depth[link[0]] for link in links if link is not None), default=0)
        self.depth.append(depth + (node is not None and node.primitive in HEAVY))
        self.hoist.append(hoist)
        return len(self.kind) - 1


def flatten(graph: Graph, pins: dict[int, Any] | None = None, free: frozenset[int] = frozenset()) -> Flat:
    """The planning nodes of ``graph``; ``pins`` maps an input's position to a hashable pin."""
    flat = Flat()
    flat.regions.append(Region(0, graph, -1, -1, 0, "step", 1, True))
    flat.env.append({})
    donated = {j: i for i, j in graph.donated}
    taken_by = dict(graph.donated)
    for i, value in enumerate(graph.inputs):
        value_type = graph.values[value]
        loop = (value_type,) if i in taken_by else ()
        key = ("arg", value_type, i in taken_by, (pins or {}).get(i), i in free)
        n = flat.add("arg", key, 0, [None] * len(loop), [0] * len(loop), loop, (value_type,))
        flat.args.append(n)
        flat.env[0][value] = (n, 0)
    _run(flat, 0)
    for j, operand in enumerate(graph.outputs):
        link = flat.env[0][operand] if isinstance(operand, int) else None
        value_type = graph.values[operand] if isinstance(operand, int) else operand.type
        if j in donated:
            n = flat.args[donated[j]]
            flat.links[n][0] = link
            flat.outs.append((n, 0))
        else:
            pin = (pins or {}).get(("out", j))  # type: ignore[call-overload]
            n = flat.add("out", ("out", value_type, pin), 0, [link], [0], (value_type,), ())
            flat.outs.append((n, 0))
    return flat


def _run(flat: Flat, region: int) -> None:
    graph, env = flat.regions[region].graph, flat.env[region]
    for position, node in enumerate(graph.nodes):
        links = [env[o] if isinstance(o, int) else None for o in node.operands]
        if not node.bodies:
            where = [_exec(flat, link, region) for link in links]
            n = flat.add("op", _op_key(node), region, links, where, node.operand_types, node.result_types, node)
            flat.at[region, position] = n
            results: list[Link] = [(n, r) for r in range(len(node.results))]
        elif node.primitive == "scan":
            results = _scan(flat, region, position, node, links)
        elif node.primitive == "while":
            results = _while(flat, region, position, node, links)
        elif node.primitive == "cond":
            results = _cond(flat, region, position, node, links)
        else:
            results = _inline(flat, region, position, node, links)
        env.update(zip(node.results, results, strict=True))


def _op_key(node: Node) -> Any:
    constants = tuple((i, o.value == 0) for i, o in enumerate(node.operands) if isinstance(o, Constant))
    work = (node.flops, node.hidden_runs, node.hidden.fingerprint if node.hidden is not None else "")
    key = ("op", node.primitive, tuple(node.params.items()), node.operand_types, node.result_types, constants, work)
    try:
        hash(key)
    except TypeError:
        return ("op", node.primitive, repr(node.params), node.operand_types, node.result_types, constants, work)
    return key


def _exec(flat: Flat, link: Link, region: int) -> int:
    """The region in which a resharding of ``link`` for a user in ``region`` runs: loop constants are hoisted."""
    if link is not None and flat.hoist[link[0]] >= 0 and flat.region[link[0]] == region:
        return flat.hoist[link[0]]
    return region


def _open(flat: Flat, region: int, position: int, body: int, graph: Graph, trips: int, known: bool, kind: str) -> int:
    outer = flat.regions[region]
    new = Region(len(flat.regions), graph, region, position, body, kind, outer.trips * trips, known and outer.known)
    flat.regions.append(new)
    flat.env.append({})
    return new.id


def _entry(flat: Flat, kind: str, region: int, outer: int, link: Link, inner: TensorType, over: TensorType) -> int:
    """An input node of a body: edge from the outer value, and for a carry a second, from the loop's end."""
    where = _exec(flat, link, outer)
    types = (over, inner) if kind == "carry" else (over,)
    links: list[Link] = [link, None] if kind == "carry" else [link]
    execs = [where, region] if kind == "carry" else [where]
    hoist = where if kind == "const_in" else -1
    return flat.add(kind, (kind, inner, over), region, links, execs, types, (inner,), hoist=hoist)


def _scan(flat: Flat, outer: int, position: int, node: Node, links: list[Link]) -> list[Link]:
    body, consts, carry = node.bodies[0], node.params["num_consts"], node.params["num_carry"]
    region = _open(flat, outer, position, 0, body, node.params["length"], True, "scan")
    entries: list[int] = []
    for i, (value, link) in enumerate(zip(body.inputs, links, strict=True)):
        kind = "const_in" if i < consts else "carry" if i < consts + carry else "xs"
        n = _entry(flat, kind, region, outer, link, body.values[value], node.operand_types[i])
        flat.env[region][value] = (n, 0)
        entries.append(n)
    _run(flat, region)
    results: list[Link] = []
    outs: list[tuple[int, int]] = []
    for j, operand in enumerate(body.outputs):
        link = flat.env[region][operand] if isinstance(operand, int) else None
        where = _exec(flat, link, region)
        if j < carry:
            n = entries[consts + j]
            flat.links[n][1], flat.exec_region[n][1] = link, where
            outs.append((n, 1))
            n = _loop_out(flat, outer, n, node.results[j])
        else:
            inner = body.values[operand] if isinstance(operand, int) else operand.type
            over = node.result_types[j]
            n = flat.add("ys", ("ys", inner, over), outer, [link], [where], (inner,), (over,))
            outs.append((n, 0))
        results.append((n, 0))
    flat.ends[region] = outs
    flat.span[region] = (entries[0] if entries else len(flat.kind), len(flat.kind))
    flat.children[outer, position] = (region,)
    return results


def _loop_out(flat: Flat, outer: int, carry: int, value: int) -> int:
    """The carried value after the loop: a node of its own, so that partial sums are reduced once for all readers."""
    if value not in flat.regions[outer].graph.last_use:
        return carry
    t = flat.result_types[carry][0]
    return flat.add("loop_out", ("loop_out", t), outer, [(carry, 0)], [outer], (t,), (t,))


def _while(flat: Flat, outer: int, position: int, node: Node, links: list[Link]) -> list[Link]:
    cond_consts, body_consts = node.params["cond_nconsts"], node.params["body_nconsts"]
    cond, body = node.bodies
    inside = _open(flat, outer, position, 1, body, WHILE_TRIPS, False, "while")
    entries: list[int] = []
    for i, value in enumerate(body.inputs):
        kind = "const_in" if i < body_consts else "carry"
        n = _entry(
            flat, kind, inside, outer, links[cond_consts + i], body.values[value], node.operand_types[cond_consts + i]
        )
        flat.env[inside][value] = (n, 0)
        entries.append(n)
    test = _open(flat, outer, position, 0, cond, WHILE_TRIPS, False, "while")
    for i, value in enumerate(cond.inputs):
        value_type = cond.values[value]
        if i < cond_consts:
            n = _entry(flat, "const_in", test, outer, links[i], value_type, value_type)
        else:
            n = _entry(
                flat, "branch_in", test, test, (entries[body_consts + i - cond_consts], 0), value_type, value_type
            )
        flat.env[test][value] = (n, 0)
    _run(flat, test)
    predicate = cond.outputs[0]
    link = flat.env[test][predicate] if isinstance(predicate, int) else None
    bool_type = cond.values[predicate] if isinstance(predicate, int) else predicate.type
    n = flat.add("pred", ("pred", bool_type), test, [link], [test], (bool_type,), ())
    flat.ends[test] = [(n, 0)]
    _run(flat, inside)
    outs: list[tuple[int, int]] = []
    for j, operand in enumerate(body.outputs):
        n = entries[body_consts + j]
        flat.links[n][1] = flat.env[inside][operand] if isinstance(operand, int) else None
        outs.append((n, 1))
    flat.ends[inside] = outs
    flat.span[inside] = flat.span[test] = (entries[0], len(flat.kind))
    flat.children[outer, position] = (test, inside)
    return [(_loop_out(flat, outer, n, v), 0) for (n, _), v in zip(outs, node.results, strict=True)]


def _cond(flat: Flat, outer: int, position: int, node: Node, links: list[Link]) -> list[Link]:
    index_type = node.operand_types[0]
    flat.add("pred", ("pred", index_type), outer, [links[0]], [_exec(flat, links[0], outer)], (index_type,), ())
    entries = [
        _entry(flat, "branch_in", outer, outer, link, t, t)
        for link, t in zip(links[1:], node.operand_types[1:], strict=True)
    ]
    ends: list[list[Link]] = []
    regions: list[int] = []
    for b, body in enumerate(node.bodies):
        region = _open(flat, outer, position, b, body, 1, True, "cond")
        for value, n in zip(body.inputs, entries, strict=True):
            flat.env[region][value] = (n, 0)
        _run(flat, region)
        ends.append([flat.env[region][o] if isinstance(o, int) else None for o in body.outputs])
        regions.append(region)
    results: list[Link] = []
    for j, value_type in enumerate(node.result_types):
        n = flat.add(
            "branch_out",
            ("branch_out", value_type, len(node.bodies)),
            outer,
            [end[j] for end in ends],
            list(regions),
            (value_type,) * len(ends),
            (value_type,),
        )
        results.append((n, 0))
    for b, region in enumerate(regions):
        flat.ends[region] = [(link[0], b) for link in results if link is not None]
    flat.children[outer, position] = tuple(regions)
    return results


def _inline(flat: Flat, outer: int, position: int, node: Node, links: list[Link]) -> list[Link]:
    body = node.bodies[0]
    region = _open(flat, outer, position, 0, body, 1, True, "remat")
    flat.env[region].update(zip(body.inputs, links, strict=True))
    _run(flat, region)
    flat.ends[region] = []
    flat.children[outer, position] = (region,)
    return [flat.env[region][o] if isinstance(o, int) else None for o in body.outputs]
