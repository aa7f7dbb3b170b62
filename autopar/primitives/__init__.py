"""What planning knows of every primitive: `record_of` gives a name's `Primitive`, `rule_for` a Node's sharding rule.

One file per family; each exports ``PRIMITIVES``, a tuple of records (see `record`). To cover a new primitive add its
record there and regenerate the golden files. Whatever has no record is costed and replicated as `UNKNOWN`, and the plan
says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from autopar.ir.errors import VerifyError
from autopar.ir.graph import Graph, Node
from autopar.ir.sharding import OpShardingRule
from autopar.primitives import (
    attention,
    collectives,
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
from autopar.primitives.notation import linear_in, replicated
from autopar.primitives.record import ONE, JoinedBy, Primitive, Traits

FAMILIES = (
    control, collectives, elementwise, contraction, convolution, reduction, shape, indexing, windows, random, linalg,
    sorting, attention, custom,
)  # fmt: skip

PRIMITIVES: dict[str, Primitive] = {p.name: p for family in FAMILIES for p in family.PRIMITIVES}
"""Name → record. No primitive is in two families (`verify`)."""

NO_RULE = "no rule for primitive"
"""How `OpShardingRule.why` begins for a primitive that nobody has described."""


def _unknown(node: Node) -> OpShardingRule:
    return replicated(node, f"{NO_RULE} '{node.primitive}'")


UNKNOWN = Primitive(name="", rule=_unknown, flops=ONE, traits=Traits(opaque=True, repeatable=False))
"""Of a primitive that nobody has described: replicated, one FLOP an element, and the plan says so."""


def record_of(name: str) -> Primitive:
    """The record of primitive ``name``, else `UNKNOWN`."""
    return PRIMITIVES.get(name, UNKNOWN)


def joined_by(node: Node) -> JoinedBy:
    """How what several layers make of a node's result is put together. Raises VerifyError where it cannot be."""
    join = node.params["op"] if node.primitive == elementwise.JOIN else record_of(node.primitive).joined_by
    if join is None:
        raise VerifyError(f"{node} of the update runs on rows and does not keep them")
    return join


def verify() -> None:
    """Raises VerifyError where a record breaks a constraint, or a primitive has two."""
    every = [p for family in FAMILIES for p in family.PRIMITIVES]
    if len(every) != len(PRIMITIVES):
        seen: set[str] = set()
        twice = sorted({p.name for p in every if p.name in seen or seen.add(p.name)})
        raise VerifyError(f"primitives with two records: {', '.join(twice)}")
    for p in (*every, UNKNOWN):
        try:
            p.verify()
        except VerifyError as error:
            raise VerifyError(f"record of primitive {p.name!r}: {error}") from None
        if p.joined_by and p.joined_by not in PRIMITIVES:
            raise VerifyError(f"record of primitive {p.name!r}: joined by {p.joined_by!r}, which has no record")


def unknown_operators(graph: Graph, user_rules: Mapping[str, str]) -> Iterator[Node]:
    """The operators, in bodies too, that nobody has described: they can only be replicated."""
    for node in graph.nodes:
        for body in node.bodies:
            yield from unknown_operators(body, user_rules)
        if node.bodies or custom.operator_name(node) in user_rules:
            continue
        if node.primitive not in PRIMITIVES or custom.is_opaque(node):
            yield node


def rules_of(graphs: Iterable[Graph], user_rules: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Of the rules by name those that an operator of ``graphs`` has, in bodies too, in order of their names."""
    used = set(_names(graphs)) & user_rules.keys() if user_rules else set[str]()
    return tuple((name, user_rules[name]) for name in sorted(used))


def _names(graphs: Iterable[Graph]) -> Iterator[str]:
    for graph in graphs:
        for node in graph.nodes:
            yield custom.operator_name(node)
            yield from _names(node.bodies if node.hidden is None else (*node.bodies, node.hidden))


def rule_for(node: Node, user_rules: Mapping[str, str] | None = None) -> OpShardingRule:
    """The node's rule; one that replicates, and says so, for a primitive without any.

    ``user_rules`` are rules given by name (primitive or ffi target → text, see `custom`); they come first.
    """
    if user_rules:
        given = custom.user_rule(node, user_rules)
        if given is not None:
            return given
    record = record_of(node.primitive)
    rule, linear = record.rule(node), linear_in(node, record.linear, record.traits.identity)
    return replace(rule, linear=linear) if linear else rule
