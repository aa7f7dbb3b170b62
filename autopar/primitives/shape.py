"""Operators that only move elements: reshape, transpose, broadcast, slice, pad, concatenate and their kin.

In: a Node with static parameters. Out: dimensions that an element keeps its place in pass; those it moves in stay
whole. A reshape is factored by common prefixes of its dimensions: where a dimension is split or merged, its
major part can be sharded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.ir.graph import Node
from autopar.ir.sharding import Factor, OpShardingRule
from autopar.primitives.notation import Dims, build, dim_factors, letters, replicated
from autopar.primitives.record import ALL, BOTH, FIRST, NONLINEAR, ONE, Linear, Primitive, Rule, Traits


def reshape_factors(source: Sequence[int], target: Sequence[int]) -> tuple[tuple[Factor, ...], Dims, Dims]:
    """Factors of ``source`` reshaped to ``target`` (row major), and what both are made of.

    Walking both shapes from the left, each step takes the greatest common divisor of what is left of the two
    current dimensions as a shared factor; where neither divides the other, the rest of the block has no
    common loop and its dimensions get factors of their own, whole.
    """
    factors: list[Factor] = []
    ins: list[list[str]] = [[] for _ in source]
    outs: list[list[str]] = [[] for _ in target]
    if math.prod(source) == 0:
        return (), tuple(() for _ in source), tuple(() for _ in target)

    def add(size: int, whole: bool = False) -> str:
        name = letters(len(factors) + 1)[-1]
        factors.append(Factor(name=name, size=size, kind="whole" if whole else "pass"))
        return name

    def rest(dims: list[int], left: int, position: int, stop: int, names: list[list[str]]) -> None:
        for at in range(position, stop):
            size = left if at == position else dims[at]
            if size > 1:
                names[dims_at[id(dims)][at]].append(add(size, whole=True))

    a_dims, b_dims = [n for n in source if n != 1], [n for n in target if n != 1]
    dims_at = {
        id(a_dims): [d for d, n in enumerate(source) if n != 1],
        id(b_dims): [d for d, n in enumerate(target) if n != 1],
    }
    i = j = 0
    a, b = (a_dims[0], b_dims[0]) if a_dims else (1, 1)
    while i < len(a_dims):
        common = math.gcd(a, b)
        if common > 1:
            name = add(common)
            ins[dims_at[id(a_dims)][i]].append(name)
            outs[dims_at[id(b_dims)][j]].append(name)
        a, b = a // common, b // common
        if a > 1 and b > 1:  # no common loop up to the end of this block
            block_i, block_j = i + 1, j + 1
            left, right = a, b
            while left != right:
                if left < right:
                    left, block_i = left * a_dims[block_i], block_i + 1
                else:
                    right, block_j = right * b_dims[block_j], block_j + 1
            rest(a_dims, a, i, block_i, ins)
            rest(b_dims, b, j, block_j, outs)
            i, j, a, b = block_i, block_j, 1, 1
        else:
            i, j = i + (a == 1), j + (b == 1)
        a = a_dims[i] if a == 1 and i < len(a_dims) else a
        b = b_dims[j] if b == 1 and j < len(b_dims) else b
    return tuple(factors), tuple(tuple(n) for n in ins), tuple(tuple(n) for n in outs)


def _reshape(node: Node) -> OpShardingRule:
    shape = node.operand_types[0].shape
    order: tuple[int, ...] = node.params.get("dimensions") or tuple(range(len(shape)))
    factors, ins, outs = reshape_factors([shape[d] for d in order], node.result_types[0].shape)
    operand: list[tuple[str, ...]] = [()] * len(shape)
    for names, d in zip(ins, order, strict=True):
        operand[d] = names
    return build(factors, (tuple(operand),), (outs,))


def _squeeze(node: Node) -> OpShardingRule:
    factors, dims = dim_factors(node.operand_types[0].shape)
    gone: tuple[int, ...] = node.params["dimensions"]
    return build(factors, (dims,), (tuple(dim for d, dim in enumerate(dims) if d not in gone),))


def _transpose(node: Node) -> OpShardingRule:
    factors, dims = dim_factors(node.operand_types[0].shape)
    permutation: tuple[int, ...] = node.params["permutation"]
    result = tuple(dims[d] for d in permutation)
    return build(factors, (dims,), (result,))


def _broadcast_in_dim(node: Node) -> OpShardingRule:
    shape = node.result_types[0].shape
    factors, dims = dim_factors(shape)
    source = node.operand_types[0].shape
    placed: tuple[int, ...] = node.params["broadcast_dimensions"]
    operand = tuple(dims[d] if n == shape[d] else () for n, d in zip(source, placed, strict=True))
    return build(factors, (operand, *_no_dims(node, 1)), (dims,))


def _no_dims(node: Node, start: int) -> tuple[Dims, ...]:
    return tuple(((),) * len(t.shape) for t in node.operand_types[start:])


def _slice(node: Node) -> OpShardingRule:
    """A dimension taken whole passes; so does one taken in even steps from end to end, in blocks of a step."""
    source, shape = node.operand_types[0].shape, node.result_types[0].shape
    strides = node.params["strides"] or (1,) * len(shape)
    factors: list[Factor] = []
    operand: list[tuple[str, ...]] = []
    result: list[tuple[str, ...]] = []
    for name, n, m, start, stride in zip(
        letters(len(shape)), source, shape, node.params["start_indices"], strides, strict=True
    ):
        if n == m:
            factors.append(Factor(name=name, size=n))
            operand.append((name,))
            result.append((name,))
        elif start < stride and m * stride == n:
            factors += [Factor(name=name, size=m), Factor(name=f"{name}s", size=stride, kind="whole")]
            operand.append((name, f"{name}s"))
            result.append((name,))
        else:
            operand.append(())
            result.append(())
    return build(factors, (tuple(operand),), (tuple(result),))


def _pad(node: Node) -> OpShardingRule:
    """Unpadded dimensions pass; so do those where each element becomes a block of the same length."""
    source = node.operand_types[0].shape
    factors: list[Factor] = []
    operand: list[tuple[str, ...]] = []
    result: list[tuple[str, ...]] = []
    for name, n, (low, high, interior) in zip(letters(len(source)), source, node.params["padding_config"], strict=True):
        if low == high == 0 and (interior == 0 or n <= 1):
            factors.append(Factor(name=name, size=n))
            operand.append((name,))
            result.append((name,))
        elif low >= 0 and high >= 0 and low + high == interior:
            factors += [Factor(name=name, size=n), Factor(name=f"{name}s", size=interior + 1, kind="whole")]
            operand.append((name,))
            result.append((name, f"{name}s"))
        else:
            operand.append(())
            result.append(())
    return build(factors, (tuple(operand), ()), (tuple(result),))


def _concatenate(node: Node) -> OpShardingRule:
    dim = node.params["dimension"]
    factors, dims = dim_factors(node.result_types[0].shape)
    dims = _without(dims, dim)
    factors = tuple(f for d, f in enumerate(factors) if d != dim)
    return build(factors, (dims,) * len(node.operands), (dims,))


def _without(dims: Dims, dim: int) -> Dims:
    return (*dims[:dim], (), *dims[dim + 1 :])


def _split(node: Node) -> OpShardingRule:
    axis = node.params["axis"]
    factors, dims = dim_factors(node.operand_types[0].shape)
    dims = _without(dims, axis)
    factors = tuple(f for d, f in enumerate(factors) if d != axis)
    return build(factors, (dims,), (dims,) * len(node.results))


def _stack(node: Node) -> OpShardingRule:
    axis = node.params["axis"]
    factors, dims = dim_factors(node.operand_types[0].shape)
    result = (*dims[:axis], (), *dims[axis:])
    return build(factors, (dims,) * len(node.operands), (result,))


def _unstack(node: Node) -> OpShardingRule:
    axis = node.params["axis"]
    shape = node.operand_types[0].shape
    factors, dims = dim_factors((*shape[:axis], *shape[axis + 1 :]))
    operand = (*dims[:axis], (), *dims[axis:])
    return build(factors, (operand,), (dims,) * len(node.results))


def _rev(node: Node) -> OpShardingRule:
    factors, dims = dim_factors(node.operand_types[0].shape, whole=node.params["dimensions"])
    return build(factors, (dims,), (dims,))


def _tile(node: Node) -> OpShardingRule:
    """Copies are the major part of a tiled dimension: they can be dealt out, the elements within one cannot."""
    factors, dims = dim_factors(node.operand_types[0].shape)
    copies = [Factor(name=f"{f.name}r", size=r) for f, r in zip(factors, node.params["reps"], strict=True)]
    result = tuple((c.name, *d) for c, d in zip(copies, dims, strict=True))
    return build((*copies, *factors), (dims,), (result,))


def _created(node: Node) -> OpShardingRule:
    """iota, empty: made in place."""
    if node.operands:
        return replicated(node, f"{node.primitive} of a dynamic shape")
    factors, dims = dim_factors(node.result_types[0].shape)
    return build(factors, (), (dims,))


_MOVES = Traits(fusible=True, moves=True)
_SAME_BUFFER = Traits(fusible=True, aliases=True)
_MADE = Traits(fusible=True, moves=True, generates=True)


def _moves(name: str, rule: Rule, linear: Linear = FIRST, traits: Traits = _MOVES) -> Primitive:
    return Primitive(name=name, rule=rule, flops=ONE, traits=traits, linear=linear)


PRIMITIVES: tuple[Primitive, ...] = (
    _moves("reshape", _reshape, traits=_SAME_BUFFER),
    _moves("squeeze", _squeeze, traits=_SAME_BUFFER),
    _moves("broadcast_in_dim", _broadcast_in_dim, traits=_MADE),
    *(_moves(name, _created, NONLINEAR, _MADE) for name in ("empty", "empty2", "iota")),
    _moves("concatenate", _concatenate, ALL, Traits(fusible=True, moves=True, reads_memory=True, expensive=True)),
    _moves("stack", _stack, ALL),
    _moves("pad", _pad, BOTH),
    _moves("rev", _rev),
    _moves("slice", _slice),
    _moves("split", _split),
    _moves("tile", _tile),
    _moves("transpose", _transpose),
    _moves("unstack", _unstack),
)
