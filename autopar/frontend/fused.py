"""Which operators of a step take little time, as the backward pass makes for itself what they would hand to it.

What a backward pass reads of the forward are the residuals. What a step of arithmetic makes of residuals that are read
anyway (1 − tanh² of tanh) a compiler fuses into its readers: nothing is held for it, and it moves no bytes of its own.
Where such operators stand depends on how a step was differentiated: before the backward pass by `jax.grad`, in it where
something is under `jax.checkpoint`, or in layers, whose passes are compiled apart and make again what they can. So they
are told by what they read and by who reads them. An operator is marked where all of this holds:

- it depends on no cotangent                                              `_cotangents`
- it is arithmetic on inputs, residuals and what else is such arithmetic  `_made_of_residuals`
- whoever reads it depends on cotangents or is marked                     `_read_by_backward`

That contractions take arithmetic on their operands in, too, is assumed. Bodies of scans are looked into, and those of
`jax.checkpoint` in the backward pass: arithmetic on what they compute again is its readers', too. Those of `while` and
of `cond` are not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from autopar.ir.graph import Constant, Graph, Node
from autopar.primitives import record_of


def fused_into_readers(graph: Graph, cotangents: Collection[int] | None = None) -> Graph:
    """``graph`` with what its backward passes make for themselves marked as `Node.fused`.

    Args:
        cotangents: of a layer, the inputs that are; None for a step, which differentiates a loss itself.
    """
    given = frozenset(cotangents or ())
    light = frozenset(graph.inputs) - given
    return _marked(_Part(graph, given, light, is_step=cotangents is None, all_backward=False))


@dataclass(frozen=True, slots=True)
class _Part:
    """A graph, and what is known of it from where it stands.

    Attributes:
        late: inputs that depend on cotangents.
        light: inputs that are some of the whole's, or no more than moved.
        is_step: of a step, whose forward and backward pass are one program, and in which a backward pass may begin.
        all_backward: the body of a loop of the backward pass.
    """

    graph: Graph
    late: frozenset[int]
    light: frozenset[int]
    is_step: bool
    all_backward: bool

    def backward(self, node: Node) -> bool:
        return self.all_backward or node.phase == "backward"

    def may_be(self, node: Node) -> bool:
        """True where it may be the backward pass's: what a layer's forward pass hands over is computed there."""
        return self.backward(node) or (self.is_step and node.phase == "forward")


def _marked(part: _Part) -> Graph:
    late = _cotangents(part.graph, part.late, begins=part.is_step)
    made, light = _made_of_residuals(part, late)
    fused = _read_by_backward(part, late, {n.id for n in part.graph.nodes if n.id in made and part.may_be(n)})
    nodes = (replace(n, fused=True) if n.id in fused else _looked_into(n, part, late, light) for n in part.graph.nodes)
    return replace(part.graph, nodes=tuple(nodes))


def _cotangents(graph: Graph, given: frozenset[int], *, begins: bool) -> set[int]:
    """Values that depend on cotangents: on inputs that do, or on numbers with which a backward pass begins."""
    late = set(given)
    for node in graph.nodes:
        if any(o in late for o in _read(node)) or (begins and _begins(node)):
            late.update(node.results)
    return late


def _begins(node: Node) -> bool:
    """True for operators of a backward pass on single numbers, or on one throughout: the derivative of the loss by
    itself is 1."""
    if node.phase != "backward":
        return False
    filled = any(isinstance(o, Constant) and o.type.shape for o in node.operands)
    return filled or all(t.size == 1 for t in node.operand_types)


def _made_of_residuals(part: _Part, late: set[int]) -> tuple[set[int], set[int]]:
    """Ids of the nodes that do arithmetic on what the backward pass has, or makes so; the values that are inputs, or
    no more than moved: flipped weights."""
    residuals = {o for n in part.graph.nodes if part.backward(n) and _is_late(n, late) for o in _read(n)}
    has, light = set(part.graph.inputs) - late, set(part.light)
    made: set[int] = set()
    for node in part.graph.nodes:
        if _is_late(node, late):
            continue
        record, read = record_of(node.primitive), list(_read(node))
        moved = record.light and not record.traits.function and light.issuperset(read)
        if moved:
            light.update(node.results)
        if moved or (record.arithmetic and has.issuperset(read)):
            has.update(node.results)
            if record.traits.fusible:
                made.add(node.id)
        else:
            has.update(residuals.intersection(node.results))
    return made, light


def _read_by_backward(part: _Part, late: set[int], made: set[int]) -> set[int]:
    """Those of ``made`` that nothing reads but what depends on cotangents, before the update, and others of them."""
    elsewhere = {o for o in part.graph.outputs if isinstance(o, int)}
    found: set[int] = set()
    for node in reversed(part.graph.nodes):
        if node.id in made and elsewhere.isdisjoint(node.results):
            found.add(node.id)
        elif not (part.backward(node) and _is_late(node, late)):
            elsewhere.update(_read(node))
    return found


def _looked_into(node: Node, outer: _Part, late: set[int], light: set[int]) -> Node:
    """A loop of `lax.scan`, or what `jax.checkpoint` computes again, with its body's operators marked; any other node
    as it is. A carry depends on cotangents where what it starts from does, or what it becomes; what begins with one
    number throughout in the backward pass does, too."""
    backward = outer.backward(node)
    again = node.primitive in ("remat2", "checkpoint") and backward
    if node.primitive != "scan" and not again:
        return node
    (body,) = node.bodies
    arrives = list(zip(body.inputs, node.operands, strict=True))
    given = frozenset(v for v, o in arrives if (o in late if isinstance(o, int) else backward and o.type.shape))
    first, carries = (0, 0) if again else (node.params["num_consts"], node.params["num_carry"])
    while True:
        made = _cotangents(body, given, begins=False)
        turns = zip(body.inputs[first : first + carries], body.outputs[:carries], strict=True)
        more = {v for v, o in turns if o in made}
        if more <= given:
            break
        given |= more
    mine = frozenset(v for v, o in arrives if isinstance(o, int) and o in light) - given
    return replace(node, bodies=(_marked(_Part(body, given, mine, outer.is_step, backward)),))


def _is_late(node: Node, late: set[int]) -> bool:
    return any(v in late for v in node.results)


def _read(node: Node) -> Iterator[int]:
    return (o for o in node.operands if isinstance(o, int))
