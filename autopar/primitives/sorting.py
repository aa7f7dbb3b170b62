"""Rules of sort, top_k and approx_top_k: the dimension that is ordered stays whole, all others split.

The argsort forms are sorts with an iota among their operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.ir.graph import Node
from autopar.ir.sharding import OpShardingRule
from autopar.primitives.factors import RuleBuilder

_WHY = "the only dimension is the one that is ordered, and each place depends on all others"


def _ordered(param: str) -> Callable[[Node], OpShardingRule]:
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


RULES: dict[str, Callable[[Any], OpShardingRule]] = {
    "sort": _ordered("dimension"),
    "top_k": _ordered("axis"),
    "approx_top_k": _ordered("reduction_dimension"),
}
