"""Kinds through an operator: what microbatches make of it, from its record.

Sums and extremes over the batch go through what is linear and through what keeps an order. Rows go by the record's
batch rule; where it has none, by the sharding rule: a factor that a rule passes from operands to results is a loop
whose turns do not know of each other, so what splits over devices splits over microbatches. Kernels follow with the
rule that the user gave them, or that their grids imply.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.ir.sharding import Factor, OpShardingRule
from autopar.primitives import in_order
from autopar.primitives.kinds import COMBINED, InOrder, Kind, Max, Min, Rows, Same, Sum, name
from autopar.primitives.notation import operands_of
from autopar.primitives.record import Primitive
from autopar.primitives.view import View


def kinds_through(view: View, record: Primitive, rule: Callable[[], OpShardingRule]) -> list[Kind]:
    """The kinds of the results of an operator, one at least of whose operands is no `Same`, or whose shapes hold the
    batch. ``rule`` gives its sharding rule."""
    if record.traits.identity:
        return list(view.kinds)
    if any(isinstance(k, InOrder) for k in view.kinds):
        found = in_order.through(view, record, rule)
    elif not view.rows() and not view.only(Same):
        found = _combined(view, record, rule)
    elif record.batch is not None:
        found = record.batch(view)
    else:
        found = rows_through(view, rule())
    return found if isinstance(found, list) else [found] * view.results


def _combined(v: View, record: Primitive, rule: Callable[[], OpShardingRule]) -> Kind:
    """Sums in operands that the operator is linear in; extremes where it keeps or turns their order."""
    over = {type(k) for k in v.kinds if not isinstance(k, Same)}
    if len(over) > 1:
        return v.fail("combines a sum over the batch with a maximum or minimum over it")
    if any(v.differing(r) for r in range(v.results)):
        return v.fail(f"repeats a {name(next(k for k in v.kinds if not isinstance(k, Same)))} for every example")
    moving = {i for i, k in enumerate(v.kinds) if not isinstance(k, Same)}
    groups = [g for g in (operands_of(g, len(v.kinds)) for g in record.linear.groups) if moving <= set(g)]
    if over == {Sum}:
        if groups and record.linear.when(v.full):
            v.mask_same(*groups[0])
            return Sum()
        return v.fail(
            "is not linear in a sum over the batch: the sum of the microbatches' results is not the batch's result"
        )
    order = record.order if groups or not record.linear.groups else None  # of what it moves, not of indices
    if order in ("or", "and"):  # of booleans; numbers are combined bit by bit
        of_bools = v.full.operand_types[0].dtype == "bool"
        order = {"or": "max", "and": "min"}[order] if of_bools else None
    if order == "rising" or order == ("max" if over == {Max} else "min"):
        return next(k for k in v.kinds if not isinstance(k, Same))
    if order == "falling":
        return Min() if over == {Max} else Max()
    return v.fail("uses a maximum or minimum over the batch, which one microbatch alone cannot know")


def rows_through(v: View, rule: OpShardingRule) -> Kind | list[Kind]:
    """Kinds of the results where operands hold rows, by the sharding rule: rows of one factor."""
    if not v.rows() or not v.only(Rows, Same):
        return v.merged()
    factors = {f.name: f for f in rule.factors}
    places = [_place(v, rule, factors, i, k) for i, k in enumerate(v.kinds) if isinstance(k, Rows)]
    bad = next((p for p in places if isinstance(p, str)), None)
    if bad is not None:
        return v.fail(bad)
    found = {p for p in places if isinstance(p, tuple)}
    names, layouts = {n for n, _ in found}, {layout for _, layout in found if layout is not None}
    if len(names) != 1 or len(layouts) > 1:
        return v.fail(
            "pairs examples with one another (as contrastive losses do): its operands have the batch in different "
            "places or orders"
        )
    (shared,) = names
    carries = [any(shared in dim for dim in tensor) for tensor in rule.operands]
    if any(c and not isinstance(k, Rows) for c, k in zip(carries, v.kinds, strict=True)):
        return v.fail("pairs examples with a value that does not depend on the batch")
    layout = next(iter(layouts), None)
    return [_result(v, rule, r, factors[shared], layout) for r in range(len(rule.results))]


def _place(
    v: View, rule: OpShardingRule, factors: dict[str, Factor], i: int, kind: Rows
) -> tuple[str, tuple[int, int] | None] | str:
    """The factor that operand ``i`` has the batch in, and what lies before and behind it there (None: anything fits);
    or why that cannot be."""
    names = rule.operands[i][kind.dim]
    if not names or factors[names[0]].kind == "whole" or any(h.factor == names[0] for h in rule.halos):
        return (
            f"runs along the batch dimension, {kind.dim} of operand {i}, so that examples depend on one another (its "
            f"rule: {rule})"
        )
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
    if factor.kind in COMBINED:
        return COMBINED[factor.kind]()
    return v.fail(f"makes result {r} of all examples together")
