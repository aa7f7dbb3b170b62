"""Sharding rules by primitive: `rule_for` turns a Node into an `OpShardingRule`, a pure function of what the node is.

One file per family; each exports ``RULES``, a dictionary literal from primitive to a function of a Node. To cover a
new primitive add its entry there, a case to `tests/op_cases_*.py`, and regenerate the golden file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from autopar.ir.graph import Graph, Node
from autopar.ir.sharding import OpShardingRule
from autopar.primitives import (
    attention,
    contraction,
    control,
    convolution,
    custom,
    elementwise,
    indexing,
    linalg,
    random,
    reduction,
    shape,
    sorting,
    windows,
)
from autopar.primitives.notation import replicated

FAMILIES = (
    control, elementwise, contraction, convolution, reduction, shape, indexing, windows, random, linalg, sorting,
    attention, custom,
)  # fmt: skip

RULES: dict[str, Callable[[Node], OpShardingRule]] = {
    name: r for family in FAMILIES for name, r in family.RULES.items()
}
"""Primitive → its rule. No primitive is in two families (tested)."""

NO_RULE = "no rule for primitive"
"""How `OpShardingRule.why` begins for a primitive that nobody has described."""


def unknown_operators(graph: Graph, user_rules: Mapping[str, str]) -> Iterator[Node]:
    """The operators, in bodies too, that nobody has described: they can only be replicated."""
    for node in graph.nodes:
        for body in node.bodies:
            yield from unknown_operators(body, user_rules)
        if node.bodies or custom.operator_name(node) in user_rules:
            continue
        if node.primitive not in RULES or custom.is_opaque(node):
            yield node


def rule_for(node: Node, user_rules: Mapping[str, str] | None = None) -> OpShardingRule:
    """The node's rule; one that replicates, and says so, for a primitive without any.

    ``user_rules`` are rules given by name (primitive or ffi target → text, see `custom`); they come first.
    """
    if user_rules:
        given = custom.user_rule(node, user_rules)
        if given is not None:
            return given
    rule = RULES.get(node.primitive)
    if rule is None:
        return replicated(node, f"{NO_RULE} '{node.primitive}'")
    return rule(node)
