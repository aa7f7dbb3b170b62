"""What the roofline model asks of one operator: its FLOPs, and the dtype whose peak rate applies.

``time = max(FLOPs / peak, bytes / memory bandwidth)`` (Williams, Waterman, Patterson, "Roofline", CACM 2009); bytes
depend on the sharding, so that the time itself is that of a strategy (`intra_op.strategies`).
"""

from __future__ import annotations

from autopar.ir.graph import Graph, Node
from autopar.primitives import record_of

WHILE_TRIPS = 8
"""Assumed iterations of a while loop whose number depends on values (guessed; the plan says so)."""


def while_trips(node: Node) -> int:
    """Iterations of a ``while`` node; `WHILE_TRIPS` where they depend on values."""
    known = node.params["trips"]
    return WHILE_TRIPS if known is None else known


def flops(node: Node) -> float:
    """Floating-point operations of the whole operator, unsharded (a multiply-add counts two): those that the user
    stated, of an opaque call those of its body, else the primitive's (`Primitive.flops`)."""
    if node.flops is not None:
        return node.flops
    if node.hidden is not None:
        return node.hidden_runs * _body_flops(node.hidden)
    return record_of(node.primitive).flops(node)


def _body_flops(graph: Graph) -> float:
    """FLOPs of a hidden body: loops multiplied out, of a conditional the dearest branch."""
    total = 0.0
    for node in graph.nodes:
        bodies = [_body_flops(body) for body in node.bodies]
        if node.primitive == "scan":
            total += node.params["length"] * sum(bodies)
        elif node.primitive == "while":
            total += while_trips(node) * sum(bodies)
        elif node.bodies:
            total += max(bodies)
        else:
            total += flops(node)
    return total


def dominant_dtype(node: Node) -> str:
    """The dtype whose peak rate applies: that of the first operand, else of the first result."""
    types = node.operand_types or node.result_types
    return types[0].dtype if types else "float32"
