"""Which operators of a step cost nothing, as the backward pass makes for itself what they would hand to it.

What a backward pass reads of the forward are the residuals. What a step of arithmetic makes of residuals that are read
anyway (1 − tanh² of tanh, the mask of a relu) a compiler fuses into its readers: nothing is held for it, and it moves
no bytes of its own. Where such operators stand depends on how a step was differentiated: before the backward pass by
`jax.grad`, in it where something is under `jax.checkpoint`, or in stages, whose passes are compiled apart. So they are
told by what they read and by who reads them:

- what the backward pass computes depends on cotangents                              `_cotangents`
- what nothing else reads, and depends on none, is made for the backward pass alone  `_for_backward`
- of that, arithmetic on what the backward pass has or makes is its readers'         `fused_into_readers`
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from autopar.ir.graph import Constant, Graph, Node
from autopar.primitives import record_of


def fused_into_readers(graph: Graph, cotangents: Collection[int] | None = None) -> Graph:
    """``graph`` with what its backward passes make for themselves marked as `Node.fused`, in bodies of scans too.

    Args:
        cotangents: inputs that are; None for a step, which differentiates a loss itself.
    """
    return _marked(graph, frozenset(cotangents or ()), begins=cotangents is None, all_backward=False)


def _marked(graph: Graph, given: frozenset[int], *, begins: bool, all_backward: bool) -> Graph:
    """``graph``, of whose inputs ``given`` depend on cotangents. ``begins``: a backward pass may begin in it;
    ``all_backward``: a backward pass has it."""

    def backward(node: Node) -> bool:
        return all_backward or node.phase == "backward"

    late = _cotangents(graph, given, begins=begins)
    nodes = [_opened(node, late, begins=begins, backward=backward(node)) for node in graph.nodes]
    for_backward = _for_backward(graph, late, all_backward=all_backward)
    residuals = {o for n in graph.nodes if backward(n) and _is_late(n, late) for o in _read(n)}
    there = set(graph.inputs) - late
    """What the backward pass has, or can make of that."""
    light = set(there)
    """What it can make by whatever may be computed anywhere, of inputs alone: flipped weights."""
    for at, node in enumerate(graph.nodes):
        record = record_of(node.primitive)
        if _is_late(node, late):
            continue
        if record.light and light.issuperset(_read(node)):
            light.update(node.results)
        elif not record.arithmetic or not there.issuperset(_read(node)):
            there.update(residuals.intersection(node.results))
            continue
        there.update(node.results)
        if at in for_backward and record.traits.fusible:
            nodes[at] = replace(nodes[at], fused=True)
    return replace(graph, nodes=tuple(nodes))


def _cotangents(graph: Graph, given: frozenset[int], *, begins: bool) -> set[int]:
    """Values that depend on cotangents: on inputs that do, or on numbers with which a backward pass begins."""
    late = set(given)
    for node in graph.nodes:
        if any(o in late for o in _read(node)) or (begins and _begins(node)):
            late.update(node.results)
    return late


def _begins(node: Node) -> bool:
    """True for operators of a backward pass on numbers alone: the derivative of the loss by itself is 1."""
    if node.phase != "backward" or not node.result_types[0].dtype.startswith(("float", "bfloat", "complex")):
        return False
    filled = any(isinstance(o, Constant) and o.type.shape for o in node.operands)
    return filled or not any(True for _ in _read(node))


def _for_backward(graph: Graph, late: set[int], *, all_backward: bool) -> set[int]:
    """Positions of nodes that depend on no cotangent, and whose results nothing but the backward pass reads, itself or
    through others of them."""
    early = {o for o in graph.outputs if isinstance(o, int)}
    found: set[int] = set()
    for at, node in reversed(list(enumerate(graph.nodes))):
        own = not _is_late(node, late)
        if (node.phase == "update" and not all_backward) or (own and not early.isdisjoint(node.results)):
            early.update(_read(node))
        elif own:
            found.add(at)
    return found


def _opened(node: Node, late: set[int], *, begins: bool, backward: bool) -> Node:
    """A scan with its body's; other nodes as they are: what is under `jax.checkpoint` is computed again, not by
    readers. A carry depends on cotangents where what it starts from does, or what it becomes."""
    if node.primitive != "scan":
        return node
    (body,) = node.bodies
    first, carried = node.params["num_consts"], node.params["num_carry"]
    given = frozenset(v for v, o in zip(body.inputs, node.operands, strict=True) if isinstance(o, int) and o in late)
    while True:
        made = _cotangents(body, given, begins=begins)
        more = {v for v, o in zip(body.inputs[first : first + carried], body.outputs, strict=False) if o in made}
        if more <= given:
            break
        given |= more
    return replace(node, bodies=(_marked(body, given, begins=begins, all_backward=backward),))


def _is_late(node: Node, late: set[int]) -> bool:
    return any(v in late for v in node.results)


def _read(node: Node) -> Iterator[int]:
    return (o for o in node.operands if isinstance(o, int))
