"""Rules of linear algebra and of fft: leading batch dimensions split; matrices and transformed dimensions stay whole.

The right-hand sides of a triangular or tridiagonal solve are independent and split as well. Solves are linear in
their right-hand side, and fft is linear.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.ir.graph import Node
from autopar.ir.sharding import OpShardingRule
from autopar.primitives.factors import RuleBuilder
from autopar.primitives.notation import replicated

_WHY = "no batch dimension, and a single {} is not divided"


def _add_batch(node: Node, build: RuleBuilder, rank: int) -> None:
    """Adds the first ``rank`` dimensions, which all operands and results share."""
    operands, results = range(len(node.operand_types)), range(len(node.result_types))
    for d in range(rank):
        build.add(node.operand_types[0].shape[d], dict.fromkeys(operands, d), dict.fromkeys(results, d))


def _batched(core_rank: int) -> Callable[[Node], OpShardingRule]:
    """Rule of an operator whose first operand has ``core_rank`` dimensions beside those of the batch."""

    def rule(node: Node) -> OpShardingRule:
        build = RuleBuilder(node)
        _add_batch(node, build, len(node.operand_types[0].shape) - core_rank)
        return build.rule(why=_WHY.format("decomposition"))

    return rule


def _triangular_solve(node: Node) -> OpShardingRule:
    rank = len(node.operand_types[1].shape)  # operands: a [..., m, m], b [..., m, n] or [..., n, m]
    free = rank - 1 if node.params["left_side"] else rank - 2
    build = RuleBuilder(node)
    _add_batch(node, build, rank - 2)
    build.add(node.operand_types[1].shape[free], {1: free}, {0: free})
    return build.rule((1,), why=_WHY.format("solve"))


def _tridiagonal_solve(node: Node) -> OpShardingRule:
    rank = len(node.operand_types[3].shape)  # operands: three diagonals [..., m], b [..., m, n]
    build = RuleBuilder(node)
    _add_batch(node, build, rank - 2)
    build.add(node.operand_types[3].shape[-1], {3: rank - 1}, {0: rank - 1})
    return build.rule((3,), why=_WHY.format("solve"))


def _fft(node: Node) -> OpShardingRule:
    build = RuleBuilder(node)
    _add_batch(node, build, len(node.operand_types[0].shape) - len(node.params["fft_lengths"]))
    return build.rule((0,), why=_WHY.format("transform"))


def _whole(why: str) -> Callable[[Node], OpShardingRule]:
    def rule(node: Node) -> OpShardingRule:
        return replicated(node, why)

    return rule


RULES: dict[str, Callable[[Any], OpShardingRule]] = {
    "cholesky": _batched(2),
    "cholesky_update": _whole("its kernel takes no batch, and a single matrix is not divided"),
    "eig": _batched(2),
    "eigh": _batched(2),
    "fft": _fft,
    "geqp3": _batched(2),
    "geqrf": _batched(2),
    "hessenberg": _batched(2),
    "householder_product": _batched(2),
    "lu": _batched(2),
    "lu_pivots_to_permutation": _batched(1),
    "ormqr": _batched(2),
    "qr": _batched(2),
    "schur": _batched(2),
    "svd": _batched(2),
    "symmetric_product": _batched(2),
    "triangular_solve": _triangular_solve,
    "tridiagonal": _batched(2),
    "tridiagonal_solve": _tridiagonal_solve,
}
