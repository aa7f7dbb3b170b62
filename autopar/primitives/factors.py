"""A builder of `OpShardingRule` for operators whose tensors relate dimension by dimension.

In: a node, then its factors one by one. Out: the rule. A dimension that no factor was added to is never sharded.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import Node
from autopar.ir.sharding import Factor, FactorKind, Halo, OpShardingRule
from autopar.primitives.notation import letters


class RuleBuilder:
    """Collects the factors of one node; those of size 0 and 1 are left out, for they cannot be split."""

    def __init__(self, node: Node) -> None:
        self._factors: list[Factor] = []
        self._operands: list[list[tuple[str, ...]]] = [[()] * len(t.shape) for t in node.operand_types]
        self._results: list[list[tuple[str, ...]]] = [[()] * len(t.shape) for t in node.result_types]
        self._halos: list[Halo] = []

    def add(
        self,
        size: int,
        operands: Mapping[int, int] | None = None,
        results: Mapping[int, int] | None = None,
        kind: FactorKind = "pass",
        halo: tuple[int, int] = (0, 0),
    ) -> None:
        """Adds a factor to dimension ``operands[i]`` of operand i and ``results[i]`` of result i, as the minor one.
        ``halo``: rows of its first operand that a shard needs from before and from behind its own."""
        if size <= 1:
            return
        name = letters(len(self._factors) + 1)[-1]
        self._factors.append(Factor(name=name, size=size, kind=kind))
        if any(halo):
            operand, dim = next(iter((operands or {}).items()))
            self._halos.append(Halo(factor=name, operand=operand, dim=dim, low=halo[0], high=halo[1]))
        for tensors, places in ((self._operands, operands or {}), (self._results, results or {})):
            for tensor, dim in places.items():
                tensors[tensor][dim] = (*tensors[tensor][dim], name)

    def rule(self, why: str = "") -> OpShardingRule:
        """The finished rule; ``why`` is kept where nothing can be split."""
        return OpShardingRule(
            factors=tuple(self._factors),
            operands=tuple(tuple(t) for t in self._operands),
            results=tuple(tuple(t) for t in self._results),
            halos=tuple(self._halos),
            why="" if any(f.kind != "whole" for f in self._factors) else why,
        )
