"""sort, top_k and approx_top_k: the dimension that is ordered stays whole, all others split.

The argsort forms are sorts with an iota among their operands.
"""

from __future__ import annotations

import math

from autopar.ir.graph import Node
from autopar.ir.sharding import OpShardingRule
from autopar.primitives import in_order
from autopar.primitives.batch import rows_through
from autopar.primitives.factors import RuleBuilder
from autopar.primitives.kinds import Kind
from autopar.primitives.record import Primitive, Rule, Traits
from autopar.primitives.view import View

_WHY = "the only dimension is the one that is ordered, and each place depends on all others"


def _ordered(param: str) -> Rule:
    def rule(node: Node) -> OpShardingRule:
        shape, results = node.operand_types[0].shape, node.result_types
        ordered = node.params[param] % len(shape)
        build = RuleBuilder(node)
        for d, n in enumerate(shape):
            if d != ordered:
                build.add(n, dict.fromkeys(range(len(node.operand_types)), d), dict.fromkeys(range(len(results)), d))
            elif all(r.shape[d] == n for r in results):
                places = dict.fromkeys(range(len(node.operand_types)), d), dict.fromkeys(range(len(results)), d)
                build.add(n, *places, kind="whole")
            else:
                build.add(n, dict.fromkeys(range(len(node.operand_types)), d), kind="whole")
        return build.rule(why=_WHY)

    return rule


def _sort_batch(v: View) -> Kind | list[Kind]:
    """Rows that are sorted by a key of their own: each microbatch sorts its own; other sorts within each row."""
    found = in_order.sort_batch(v)
    return rows_through(v, _sort(v.full)) if found is None else found


def sort_flops(node: Node) -> float:
    """log2 n comparisons for each element of the first operand; n is the size of its last dimension, whichever is
    ordered."""
    operand = node.operand_types[0]
    n = operand.shape[-1] if operand.shape else 1
    return operand.size * max(1.0, math.log2(max(2, n)))


_sort = _ordered("dimension")


def _picks(name: str, param: str) -> Primitive:
    return Primitive(name=name, rule=_ordered(param), flops=sort_flops, traits=Traits(orders=True))


PRIMITIVES: tuple[Primitive, ...] = (
    Primitive(
        name="sort", rule=_sort, flops=sort_flops, traits=Traits(orders=True), batch=_sort_batch,
        sorted_batch=in_order.sorted_sort,
    ),
    _picks("top_k", "axis"),
    _picks("approx_top_k", "reduction_dimension"),
)  # fmt: skip
