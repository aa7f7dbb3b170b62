"""A Graph and what a plan recomputes of it → the Graph that runs: rematerialisation as a rewrite.

A `Recompute` names a value and the nodes that shall not read the kept one but one made again right before them. The
operators that make it again are copied into the body of a new ``remat2`` node (a *block*), behind an optimisation
barrier with what they read, so that the compiler does not merge them with the first ones. With
R the recomputed values, and p(n) the position of node n, a value v ∈ R is made again at

    t(v) = min ( {p(n) : n a consumer of v}  ∪  {t(w) : w ∈ R is made from v} ),

once for all its consumers; what has one time is one block. A block reads kept values and results of earlier blocks,
never another block's inside. It also takes, and reads nothing of, what the matrix products and convolutions since the
block before led to and is still to be read, ``after``: it waits for them. Else compilers make all of a step's blocks at
once, or put off what reads them.

An input of the graph may be recomputed too: its block hands on a copy of it. Nothing is made again by that, but what is
resharded of the copy is not what is resharded of the input, so that a gathered weight need not stay between readers.

The same blocks rewrite the jaxpr (`runtime/one_program/recompute.py`): node ids are equation indices there too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autopar.ir.errors import VerifyError
from autopar.ir.graph import Constant, Graph, Node, Operand, TensorType
from autopar.ir.sharding_plan import Recompute
from autopar.primitives import record_of

PRIMITIVE = "remat2"
COPY = "copy"
"""What hands on an input of the graph inside a block."""
_LOOK_BACK = 200
"""How many nodes before a block are looked at for values to wait for (guessed)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Nodes that run again before the node at position ``before``: their positions, ascending; the graph's inputs that
    are handed on; the values that the block reads and that others read of it, in order, copies first; and the values
    that it waits for."""

    before: int
    nodes: tuple[int, ...]
    copies: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    after: tuple[int, ...]


def recomputable(node: Node) -> bool:
    """True for operators that may run a second time. Not those whose results may jump where a value differs by its
    rounding, as a second one may that is sharded or fused in another way: what was chosen once stays chosen."""
    return (
        not node.bodies
        and node.hidden is None
        and record_of(node.primitive).traits.repeatable
        and bool(node.results)
        and not _jumps(node)
        and not compares(node)
    )


def compares(node: Node) -> bool:
    """True for operators that compare floats which both vary, or whose bodies so compare something that they are given.
    Such a one never reads one value of the first making beside one of the second: a maximum must equal itself."""
    if record_of(node.primitive).traits.compares:
        return len({o for o in node.operands if isinstance(o, int)}) == 2 and _is_float(node.operand_types[0])
    return any(
        compares(inner) and not set(body.inputs).isdisjoint(o for o in inner.operands if isinstance(o, int))
        for body in node.bodies
        for inner in body.nodes
    )


def _jumps(node: Node) -> bool:
    """Integers made of floats, and floats put in an order or rounded."""
    if not any(map(_is_float, node.operand_types)):
        return False
    traits = record_of(node.primitive).traits
    if traits.jumps or (traits.orders and len(node.results) > 1):
        return True
    return any("int" in t.dtype for t in node.result_types)


def _is_float(t: TensorType) -> bool:
    return "float" in t.dtype or "complex" in t.dtype


def blocks_of(graph: Graph, entries: Iterable[Recompute]) -> tuple[Block, ...]:
    """The blocks of one region, in order of their positions.

    Raises:
        VerifyError: a value that is neither an input nor made by a node that may run twice; a consumer that does not
            read its value, or compares it; a value that nothing needs again.
    """
    maker = {v: p for p, node in enumerate(graph.nodes) for v in node.results}
    given = set(graph.inputs)
    consumers: dict[int, tuple[int, ...]] = {}
    for entry in entries:
        position = maker.get(entry.value, -1)
        if entry.value not in given and (position < 0 or not recomputable(graph.nodes[position])):
            raise VerifyError(
                f"recompute: value {entry.value} is no input and no result of an operator that may run twice"
            )
        made = f", made by node {position}" if position >= 0 else ""
        for c in entry.consumers:
            if not position < c < len(graph.nodes) or entry.value not in graph.nodes[c].operands:
                raise VerifyError(f"recompute: node {c} does not read value {entry.value}{made}")
            if compares(graph.nodes[c]):
                raise VerifyError(f"recompute: {graph.nodes[c]} compares value {entry.value}, which must be the first")
        consumers[entry.value] = entry.consumers
    times: dict[int, int] = {}
    makers = sorted({maker[v] for v in consumers if v in maker})
    for position in reversed(makers):
        node = graph.nodes[position]
        wanted = [times[v] for v in node.results if v in times]
        wanted += [c for v in node.results for c in consumers.get(v, ())]
        if not wanted:
            raise VerifyError(f"recompute: nothing needs a result of {node} again")
        for o in node.operands:
            if isinstance(o, int) and o in consumers:
                times[o] = min([times.get(o, len(graph.nodes)), *wanted])
        times.update(dict.fromkeys(node.results, min(wanted)))
    by_time: dict[int, tuple[list[int], list[int]]] = {}
    for v in (v for v in consumers if v in given):
        if not consumers[v]:
            raise VerifyError(f"recompute: nothing needs input {v} again")
        by_time.setdefault(min(times.get(v, len(graph.nodes)), *consumers[v]), ([], []))[0].append(v)
    for position in makers:
        by_time.setdefault(times[graph.nodes[position].results[0]], ([], []))[1].append(position)
    return tuple(_block(graph, consumers, by_time, before) for before in sorted(by_time))


def _block(
    graph: Graph,
    consumers: Mapping[int, tuple[int, ...]],
    by_time: Mapping[int, tuple[list[int], list[int]]],
    before: int,
) -> Block:
    copies, nodes = by_time[before]
    made = {v for p in nodes for v in graph.nodes[p].results}
    read = (o for p in nodes for o in graph.nodes[p].operands if isinstance(o, int) and o not in made)
    inputs = dict.fromkeys((*copies, *read))
    later = {o for t, (_, those) in by_time.items() if t > before for p in those for o in graph.nodes[p].operands}
    outputs = [*copies, *(v for p in nodes for v in graph.nodes[p].results if consumers.get(v) or v in later)]
    after: tuple[int, ...] = ()
    if copies or not all(v in consumers for v in inputs):  # else made again already, just before
        since = max([-1, *nodes[-1:], before - 1 - _LOOK_BACK, *(t - 1 for t in by_time if t < before)])
        after = _since(graph, since, before)
    return Block(
        before=before, nodes=tuple(nodes), copies=tuple(copies), inputs=tuple(inputs), outputs=tuple(outputs),
        after=after,
    )  # fmt: skip


def _since(graph: Graph, since: int, before: int) -> tuple[int, ...]:
    """What matrix products and convolutions between two positions led to and is still to be read. Their results are
    materialised anyway: to wait for one costs no buffer."""
    led: set[int] = set()
    for p in range(since + 1, before):
        node = graph.nodes[p]
        if record_of(node.primitive).traits.contraction or any(o in led for o in node.operands if isinstance(o, int)):
            led.update(node.results)
    return tuple(sorted(v for v in led if graph.last_use.get(v, -1) >= before and not graph.values[v].is_key))


def rewritten(graph: Graph, entries: Iterable[Recompute]) -> Graph:
    """``graph`` with its blocks in place, those of bodies too. Raises VerifyError as `blocks_of`, and where a path
    leads to no body of a scan or of a remat."""
    entries = tuple(entries)
    if not entries:
        return graph
    inner: dict[int, list[Recompute]] = {}
    for e in entries:
        if e.path:
            _check_path(graph, e.path[0])
            inner.setdefault(e.path[0], []).append(replace(e, path=e.path[1:]))
    here = [e for e in entries if not e.path]
    bodies = {p: _with_body(graph.nodes[p], rewritten(graph.nodes[p].bodies[0], e)) for p, e in inner.items()}
    return _with_blocks(graph, blocks_of(graph, here), {e.value: e.consumers for e in here}, bodies)


def _check_path(graph: Graph, position: int) -> None:
    if not 0 <= position < len(graph.nodes) or graph.nodes[position].primitive not in ("scan", PRIMITIVE):
        raise VerifyError(f"recompute: node {position} is no scan and has no body in which values are recomputed")


def _with_body(node: Node, body: Graph) -> Node:
    return replace(node, bodies=(body, *node.bodies[1:]))


def _with_blocks(
    graph: Graph, blocks: Iterable[Block], consumers: Mapping[int, tuple[int, ...]], replaced: Mapping[int, Node]
) -> Graph:
    values = list(graph.values)
    nodes: list[Node] = []
    again: dict[int, int] = {}
    """Recomputed value → the value that a block gives for it."""
    waiting = list(blocks)
    for position, original in enumerate(graph.nodes):
        node = replaced.get(position, original)
        if waiting and waiting[0].before == position:
            block = waiting.pop(0)
            new = range(len(values), len(values) + len(block.outputs))
            values += [graph.values[v] for v in block.outputs]
            nodes.append(_block_node(graph, block, len(nodes), again, tuple(new)))
            again.update(zip(block.outputs, new, strict=True))
        operands = tuple(again[o] if position in consumers.get(o, ()) else o for o in node.operands)  # type: ignore[arg-type,index]
        nodes.append(replace(node, id=len(nodes), operands=operands))
    return replace(graph, values=tuple(values), nodes=tuple(nodes))


def _block_node(graph: Graph, block: Block, index: int, again: Mapping[int, int], results: tuple[int, ...]) -> Node:
    reads = (*block.inputs, *block.after)
    last = graph.nodes[block.nodes[-1] if block.nodes else block.before]
    return Node(
        id=index,
        primitive=PRIMITIVE,
        params={"after": len(block.after)},
        operands=tuple(again.get(v, v) for v in reads),
        results=results,
        operand_types=tuple(graph.values[v] for v in reads),
        result_types=tuple(graph.values[v] for v in block.outputs),
        bodies=(_body(graph, block, reads),),
        phase="backward",
        source=last.source,
        digest=f"recompute:{last.digest}",
    )


def entries(body: Graph, count: int) -> tuple[int, ...]:
    """Of a block's first ``count`` inputs those which, being late, make all of it late: of each node that reads nothing
    made inside, the smallest operand."""
    found: set[int] = set()
    for node in body.nodes:
        read = [o for o in node.operands if isinstance(o, int)]
        if read and max(read) < count:
            found.add(min(read, key=lambda v: (body.values[v].size, v)))
    return tuple(sorted(found))


def _body(graph: Graph, block: Block, reads: tuple[int, ...]) -> Graph:
    number = {v: i for i, v in enumerate(reads)}
    values = [graph.values[v] for v in reads]
    nodes: list[Node] = []
    copied: dict[int, int] = {}
    """Copied input → its copy, which nothing inside reads."""
    for k, v in enumerate(block.copies):
        copied[v] = len(values)
        values.append(graph.values[v])
        types = (graph.values[v],)
        nodes.append(
            Node(
                id=k, primitive=COPY, params={}, operands=(number[v],), results=(copied[v],), operand_types=types,
                result_types=types, phase="backward", source=graph.nodes[block.before].source, digest="recompute:copy",
            )
        )  # fmt: skip
    for k, p in enumerate(block.nodes, start=len(nodes)):
        node = graph.nodes[p]
        operands: list[Operand] = [o if isinstance(o, Constant) else number[o] for o in node.operands]
        for v in node.results:
            number[v] = len(values)
            values.append(graph.values[v])
        results = tuple(number[v] for v in node.results)
        nodes.append(replace(node, id=k, operands=tuple(operands), results=results, phase="backward"))
    return Graph(
        values=tuple(values),
        nodes=tuple(nodes),
        inputs=tuple(range(len(reads))),
        outputs=tuple(copied.get(v, number[v]) for v in block.outputs),
        fingerprint=f"recompute:{block.before}",
    )
