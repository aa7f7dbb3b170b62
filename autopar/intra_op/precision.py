"""What products of a platform's default precision read: `as_read`.

XLA for TPUs rounds the float32 operands of products whose precision is not asked for to bfloat16 (in programs for v5e,
libtpu 0.0.42), before anything moves them: they are gathered, and kept where nothing else reads them, at half their
bytes. Partial sums of them it adds up first (`Mesh.carried`). Planning nodes have the types that such values have in
the compiled program.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.cluster import Platform
from autopar.ir.graph import Graph, Node, TensorType
from autopar.primitives import record_of

WIDE, NARROW = "float32", "bfloat16"
_DEFAULT = (None, "DEFAULT")


def as_read(graph: Graph, platform: Platform) -> Graph:
    """``graph`` with the types that its nodes read and write on a platform."""
    if platform != "tpu" or not any(_rounds(node) or node.bodies for node in graph.nodes):
        return graph
    nodes = list(graph.nodes)
    wide: set[int] = {o for o in graph.outputs if isinstance(o, int)}
    """Values that something reads as they are."""
    for k, node in reversed(list(enumerate(nodes))):
        if node.bodies:
            nodes[k] = replace(node, bodies=tuple(as_read(body, platform) for body in node.bodies))
            wide.update(o for o in node.operands if isinstance(o, int))
            continue
        results = _results(node, wide)
        traits = record_of(node.primitive).traits
        if _rounds(node) or (results and (traits.moves or traits.looks_up)):
            operands = tuple(map(_narrow, node.operand_types))
        else:
            operands = node.operand_types
            wide.update(o for o in node.operands if isinstance(o, int))
        if results or operands != node.operand_types:
            nodes[k] = replace(node, operand_types=operands, result_types=results or node.result_types)
    return replace(graph, nodes=tuple(nodes))


def moved_narrow(graph: Graph) -> frozenset[tuple[int, ...]]:
    """Shapes of the float32 values that `as_read` has as bfloat16."""
    out: set[tuple[int, ...]] = set()
    for node in graph.nodes:
        for operand, t in zip(node.operands, node.operand_types, strict=True):
            if isinstance(operand, int) and t.dtype == NARROW and graph.values[operand].dtype == WIDE:
                out.add(t.shape)
        for body in node.bodies:
            out |= moved_narrow(body)
    return frozenset(out)


def rounded(graph: Graph, platform: Platform) -> frozenset[tuple[int, ...]]:
    """`moved_narrow` of a graph that `as_read` has not changed yet."""
    return moved_narrow(as_read(graph, platform)) if platform == "tpu" else frozenset()


def _results(node: Node, wide: set[int]) -> tuple[TensorType, ...]:
    """The types of what products alone read; none where it is not so, or the operator cannot round on the fly."""
    traits = record_of(node.primitive).traits
    if not (traits.fusible or traits.looks_up) or traits.reduces or len(node.results) != 1 or node.results[0] in wide:
        return ()
    return tuple(map(_narrow, node.result_types))


def _rounds(node: Node) -> bool:
    if not record_of(node.primitive).traits.contraction or "precision" not in node.params:
        return False
    precision = node.params["precision"]
    both = precision if isinstance(precision, list | tuple) else (precision,)
    return all(p in _DEFAULT for p in both)


def _narrow(t: TensorType) -> TensorType:
    return replace(t, dtype=NARROW) if t.dtype == WIDE and t.size > 1 else t
