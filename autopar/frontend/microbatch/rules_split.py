"""Kinds through operations that no other rule knows, from their sharding rules.

A factor that a rule passes from operands to results is a loop whose turns do not know of each other: what splits over
devices splits over microbatches. So kernels follow with the rule that the user gave them, or that their grids imply.
"""

from __future__ import annotations

from autopar.frontend.microbatch.kinds import Kind, Max, Min, Rows, Same, Sum
from autopar.frontend.microbatch.view import View
from autopar.frontend.trace import node_of
from autopar.frontend.user_rules import registered_rules
from autopar.ir.sharding import Factor, OpShardingRule
from autopar.primitives import rule_for

_COMBINED: dict[str, type[Sum] | type[Max] | type[Min]] = {"sum": Sum, "max": Max, "min": Min}


def by_sharding_rule(v: View) -> Kind | list[Kind]:
    """Rows of one factor, or sums in operands that the operator is linear in."""
    node = node_of(v.full)
    rule = rule_for(node, registered_rules())
    if v.rows():
        return _rows(v, rule)
    summed = {i for i, k in enumerate(v.kinds) if isinstance(k, Sum)}
    for group in rule.linear:
        if summed <= set(group) and v.only(Sum, Same):
            v.mask_same(*group)
            return Sum()
    return v.fail("is not known to be linear in a sum over the batch")


def _rows(v: View, rule: OpShardingRule) -> Kind | list[Kind]:
    factors = {f.name: f for f in rule.factors}
    if not v.only(Rows, Same):
        return v.fail("combines a value per example with a sum over the batch, which one microbatch alone cannot know")
    places = [_place(v, rule, factors, i, k) for i, k in enumerate(v.kinds) if isinstance(k, Rows)]
    bad = next((p for p in places if isinstance(p, str)), None)
    if bad is not None:
        return v.fail(bad)
    found = {p for p in places if isinstance(p, tuple)}
    names, layouts = {n for n, _ in found}, {layout for _, layout in found if layout is not None}
    if len(names) != 1 or len(layouts) > 1:
        return v.fail("pairs examples with one another: its operands have the batch in different places or orders")
    (name,) = names
    carries = [any(name in dim for dim in tensor) for tensor in rule.operands]
    if any(c and not isinstance(k, Rows) for c, k in zip(carries, v.kinds, strict=True)):
        return v.fail("pairs examples with a value that does not depend on the batch")
    return [_result(v, rule, r, factors[name], next(iter(layouts), None)) for r in range(len(rule.results))]


def _place(
    v: View, rule: OpShardingRule, factors: dict[str, Factor], i: int, kind: Rows
) -> tuple[str, tuple[int, int] | None] | str:
    """The factor that operand ``i`` has the batch in, and what lies before and behind it there (None: anything fits);
    or why that cannot be."""
    names = rule.operands[i][kind.dim]
    if not names or factors[names[0]].kind == "whole" or any(h.factor == names[0] for h in rule.halos):
        return f"mixes what operand {i} has along dimension {kind.dim}, where the batch is ({rule})"
    block = v.shape(i)[kind.dim] // factors[names[0]].size
    if kind.uniform:
        return names[0], None
    if kind.post % block:
        return f"takes {block} rows of operand {i} together, which hold parts of several examples"
    return names[0], (kind.pre, kind.post // block)


def _result(v: View, rule: OpShardingRule, r: int, factor: Factor, layout: tuple[int, int] | None) -> Kind:
    for d, names in enumerate(rule.results[r]):
        if names and names[0] == factor.name:
            block = v.out_shape(r)[d] // factor.size
            pre, post = layout or (1, max(1, factor.size // v.batch))
            return Rows(dim=d, pre=pre, post=post * block, uniform=layout is None)
    if factor.kind in _COMBINED:
        return _COMBINED[factor.kind]()
    return v.fail(f"makes result {r} of all examples together")
