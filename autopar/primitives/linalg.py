"""Linear algebra and fft: leading batch dimensions split; matrices and transformed dimensions stay whole.

The right-hand sides of a triangular or tridiagonal solve are independent and split as well. Solves are linear in
their right-hand side, and fft is linear.
"""

from __future__ import annotations

import math

from autopar.ir.graph import Node
from autopar.ir.sharding import OpShardingRule
from autopar.primitives.control import whole
from autopar.primitives.factors import RuleBuilder
from autopar.primitives.record import FIRST, NONLINEAR, ONE, Flops, Linear, Primitive, Rule, Traits

_WHY = "no batch dimension, and a single {} is not divided"


def _add_batch(node: Node, build: RuleBuilder, rank: int) -> None:
    """Adds the first ``rank`` dimensions, which all operands and results share."""
    operands, results = range(len(node.operand_types)), range(len(node.result_types))
    for d in range(rank):
        build.add(node.operand_types[0].shape[d], dict.fromkeys(operands, d), dict.fromkeys(results, d))


def _batched(core_rank: int) -> Rule:
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
    return build.rule(why=_WHY.format("solve"))


def _tridiagonal_solve(node: Node) -> OpShardingRule:
    rank = len(node.operand_types[3].shape)  # operands: three diagonals [..., m], b [..., m, n]
    build = RuleBuilder(node)
    _add_batch(node, build, rank - 2)
    build.add(node.operand_types[3].shape[-1], {3: rank - 1}, {0: rank - 1})
    return build.rule(why=_WHY.format("solve"))


def _fft(node: Node) -> OpShardingRule:
    build = RuleBuilder(node)
    _add_batch(node, build, len(node.operand_types[0].shape) - len(node.params["fft_lengths"]))
    return build.rule(why=_WHY.format("transform"))


def decomposition_flops(node: Node) -> float:
    """2 n FLOPs for each element of the largest operand, n the largest of the operands' last dimensions."""
    n = max((t.shape[-1] for t in node.operand_types if t.shape), default=1)
    return 2.0 * n * max(t.size for t in node.operand_types)


def fft_flops(node: Node) -> float:
    """5 log2 n FLOPs for each element of the result, of transforms of n elements: 5 n log2 n each."""
    n = math.prod(node.params["fft_lengths"])
    return 5.0 * node.result_types[0].size * max(1.0, math.log2(max(2, n)))


def _library(name: str, rule: Rule, flops: Flops = decomposition_flops, linear: Linear = NONLINEAR) -> Primitive:
    return Primitive(name=name, rule=rule, flops=flops, traits=Traits(), linear=linear)


PRIMITIVES: tuple[Primitive, ...] = (
    *(
        _library(name, _batched(2))
        for name in """cholesky eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd
        symmetric_product tridiagonal""".split()
    ),
    _library("cholesky_update", whole("its kernel takes no batch, and a single matrix is not divided"), ONE),
    _library("lu_pivots_to_permutation", _batched(1), ONE),
    _library("triangular_solve", _triangular_solve, linear=Linear(groups=((1,),))),
    _library("tridiagonal_solve", _tridiagonal_solve, ONE, Linear(groups=((3,),))),
    _library("fft", _fft, fft_flops, FIRST),
)
