"""Reductions and running reductions.

In: a Node with ``axes`` (or ``axis``, ``dimensions``). Out: kept dimensions pass; reduced ones leave partial sums or
are combined by max or min, where such a collective exists; the others of that kind stay whole.
"""

from __future__ import annotations

from autopar.ir.graph import Node
from autopar.ir.sharding import Factor, FactorKind, OpShardingRule
from autopar.primitives.notation import build, dim_factors, extreme_kind, letters, replicated, sum_kind
from autopar.primitives.record import (
    FIRST,
    NONLINEAR,
    Collective,
    JoinedBy,
    Linear,
    Order,
    Primitive,
    Rule,
    Traits,
    largest,
)


def _reduced(node: Node, axes: tuple[int, ...], kind: FactorKind) -> OpShardingRule:
    """Every operand of full rank loses ``axes``; operands of rank 0 are initial values."""
    shape = node.operand_types[0].shape
    names = letters(len(shape))
    factors = [
        Factor(name=n, size=s, kind=kind if d in axes else "pass")
        for d, (n, s) in enumerate(zip(names, shape, strict=True))
    ]
    full = tuple((n,) for n in names)
    kept = tuple((n,) for d, n in enumerate(names) if d not in axes)
    return build(
        factors,
        tuple(full if t.shape == shape else ((),) * len(t.shape) for t in node.operand_types),
        (kept,) * len(node.result_types),
    )


def _reduce_sum(node: Node) -> OpShardingRule:
    return _reduced(node, node.params["axes"], sum_kind(node.result_types[0].dtype))


def _reduce_max(node: Node) -> OpShardingRule:
    return _reduced(node, node.params["axes"], extreme_kind(node.operand_types[0].dtype, "max"))


def _reduce_min(node: Node) -> OpShardingRule:
    return _reduced(node, node.params["axes"], extreme_kind(node.operand_types[0].dtype, "min"))


def _reduce_and(node: Node) -> OpShardingRule:
    """Of booleans: a minimum. Of integers it works bit by bit, for which there is no collective."""
    return _reduced(node, node.params["axes"], "min" if node.operand_types[0].dtype == "bool" else "whole")


def _reduce_or(node: Node) -> OpShardingRule:
    return _reduced(node, node.params["axes"], "max" if node.operand_types[0].dtype == "bool" else "whole")


def _reduce_whole(node: Node) -> OpShardingRule:
    """reduce_prod, reduce_xor (no such collective), argmax, argmin (the index would need a second one)."""
    return _reduced(node, node.params["axes"], "whole")


def _reduce(node: Node) -> OpShardingRule:
    """A reduction by the user's own function."""
    return _reduced(node, node.params["dimensions"], "whole")


def _positional(kind: FactorKind) -> Rule:
    """psum, pmax, pmin over dimensions, as vmap leaves them."""

    def rule(node: Node) -> OpShardingRule:
        axes = node.params["axes"]
        if any(isinstance(a, str) for a in axes) or node.params.get("axis_index_groups") is not None:
            return replicated(node, f"collective over named axis {axes} outside shard_map")
        if len(node.operands) != 1:
            return replicated(node, f"{node.primitive} of several arrays over dimensions {axes}")
        dtype = node.result_types[0].dtype
        possible = sum_kind(dtype) if kind == "sum" else extreme_kind(dtype, kind)
        return _reduced(node, tuple(axes), possible)

    return rule


def _cumulative(node: Node) -> OpShardingRule:
    factors, dims = dim_factors(node.operand_types[0].shape, whole=(node.params["axis"],))
    return build(factors, (dims,), (dims,))


_FUSED = Traits(fusible=True, expensive=True, reads_memory=True, reduces=True)


def _reduces(
    name: str, rule: Rule, linear: Linear = NONLINEAR, order: Order | None = None, joined_by: JoinedBy | None = None
) -> Primitive:
    return Primitive(
        name=name, rule=rule, flops=largest, traits=_FUSED, linear=linear, order=order, joined_by=joined_by
    )


def _runs(name: str, rule: Rule, linear: Linear = NONLINEAR, collective: Collective | None = None) -> Primitive:
    """What goes over elements in an order, or by an operator, that compilers have a kernel for."""
    return Primitive(name=name, rule=rule, flops=largest, traits=Traits(), linear=linear, collective=collective)


def _all_reduce(reduction: str) -> Collective:
    return Collective(kind="all-reduce", axes="axes", reduction=reduction)


PRIMITIVES: tuple[Primitive, ...] = (
    _reduces("reduce_sum", _reduce_sum, FIRST, joined_by="add_any"),
    _reduces("reduce_max", _reduce_max, order="max", joined_by="max"),
    _reduces("reduce_min", _reduce_min, order="min", joined_by="min"),
    _reduces("reduce_and", _reduce_and, order="and"),
    _reduces("reduce_or", _reduce_or, order="or"),
    _reduces("reduce_prod", _reduce_whole),
    _reduces("reduce_xor", _reduce_whole),
    _runs("argmax", _reduce_whole),
    _runs("argmin", _reduce_whole),
    _runs("reduce", _reduce),
    _runs("psum", _positional("sum"), FIRST, _all_reduce("sum")),
    _runs("pmax", _positional("max"), collective=_all_reduce("max")),
    _runs("pmin", _positional("min"), collective=_all_reduce("min")),
    _runs("cumsum", _cumulative, FIRST),
    *(_runs(name, _cumulative) for name in ("cumlogsumexp", "cummax", "cummin", "cumprod")),
)
