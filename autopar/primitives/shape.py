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
from autopar.primitives.kinds import Kind, Rows, Same
from autopar.primitives.notation import Dims, build, dim_factors, letters, replicated
from autopar.primitives.record import (
    ALL,
    BOTH,
    FIRST,
    NONLINEAR,
    ONE,
    Linear,
    Primitive,
    Rule,
    Touches,
    Traits,
    a_part,
    all_of_it,
)
from autopar.primitives.view import BatchRule, View


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


def _broadcast_batch(v: View) -> Kind:
    """Dimensions of the operand placed among new ones."""
    kind, changed = v.kinds[0], v.differing()
    if isinstance(kind, Rows):
        return kind.at(v.params["broadcast_dimensions"][kind.dim])
    return v.uniform(changed[0]) if len(changed) == 1 else v.fail("repeats a value for every example")


def _reshape_batch(v: View) -> Kind:
    """Row-major change of shape; the batch factor must stay whole."""
    kind = v.kinds[0]
    if not isinstance(kind, Rows):
        return kind
    if v.params.get("dimensions") is not None:
        return v.fail("reshapes in a permuted order")
    out = reshaped(kind, v.shape(0), v.out_shape(), v.batch)
    if out is not None:
        return out
    return v.fail(
        f"splits or groups the batch dimension, {v.shape(0)} to {v.out_shape()}: a microbatch must hold whole groups"
    )


def reshaped(rows: Rows, old: tuple[int, ...], new: tuple[int, ...], batch: int) -> Rows | None:
    """Where the batch factor lands when ``old`` becomes ``new``, or None where it is torn apart."""
    size = old[rows.dim]
    layouts = [(rows.pre, rows.post)]
    if rows.uniform and size % batch == 0:
        rest = size // batch
        layouts = [(p, rest // p) for p in range(1, rest + 1) if rest % p == 0]
    for pre, post in layouts:
        m = size // (pre * post)
        before = math.prod(old[: rows.dim]) * pre
        after = math.prod(old[rows.dim + 1 :]) * post
        for dim in range(len(new)):
            lead, tail = math.prod(new[:dim]), math.prod(new[dim + 1 :])
            if lead == 0 or tail == 0 or before % lead or after % tail:
                continue
            if (before // lead) * m * (after // tail) == new[dim] and new[dim] > 1:
                whole = (lead, tail) == (math.prod(old[: rows.dim]), math.prod(old[rows.dim + 1 :]))
                return Rows(dim=dim, pre=before // lead, post=after // tail, uniform=rows.uniform and whole)
    return None


def _slice_batch(v: View) -> Kind:
    """A static slice: the whole batch, or whole blocks of it where batches were concatenated."""
    kind = v.kinds[0]
    own = kind.dim if isinstance(kind, Rows) else -1
    for key in ("start_indices", "limit_indices", "strides"):
        pairs = enumerate(zip(v.params[key] or (), v.small.params[key] or (), strict=True))
        if any(a != b and d != own for d, (a, b) in pairs):
            return v.fail("slices at a place that depends on the batch size")
    if not isinstance(kind, Rows):
        return kind
    d, size = kind.dim, v.shape(0)[kind.dim]
    start, limit = v.params["start_indices"][d], v.params["limit_indices"][d]
    stride = (v.params["strides"] or (1,) * len(v.shape(0)))[d]
    if (start, limit, stride) == (0, size, 1):
        return kind
    block = size // kind.pre
    same_place = v.small.params["start_indices"][d] * size == start * v.small.operand_types[0].shape[d]
    if stride == 1 and start % block == 0 and limit % block == 0 and same_place:
        return Rows(dim=d, pre=(limit - start) // block, post=kind.post, uniform=kind.uniform)
    return v.fail("picks examples by their position in the batch")


def _pad_batch(v: View) -> Kind:
    kind = v.kinds[0]
    if not isinstance(kind, Rows) or not isinstance(v.kinds[1], Same):
        return v.fail("pads with a value that depends on the batch")
    if tuple(v.params["padding_config"][kind.dim]) == (0, 0, 0):
        return kind
    return v.fail("pads the batch dimension")


def _concatenate_batch(v: View) -> Kind:
    merged, rows = v.merged(), v.rows()
    axis: int = v.params["dimension"]
    if len(rows) == len(v.kinds) and all(r.dim == axis for r in rows):
        layouts = [r for r in rows if not r.uniform] or rows[:1]
        post, size = layouts[0].post, v.shape(v.kinds.index(layouts[0]))[axis]
        m = size // (layouts[0].pre * post)
        blocks = [v.shape(i)[axis] / (m * post) for i in range(len(rows))]
        if all(r.post == post for r in layouts) and all(b == int(b) for b in blocks):
            if all(r.uniform or r.pre == b for r, b in zip(rows, blocks, strict=True)):
                return Rows(dim=axis, pre=int(sum(blocks)), post=post)
        return v.fail("joins batches of different sizes or orders")
    if isinstance(merged, Rows) and merged.dim == axis:
        return v.fail("adds rows to the batch that are no examples")
    return merged


def _split_batch(v: View) -> Kind | list[Kind]:
    kind = v.kinds[0]
    if isinstance(kind, Rows) and kind.dim == v.params["axis"]:
        block = v.shape(0)[kind.dim] // kind.pre
        if all(s % block == 0 for s in v.params["sizes"]):
            return [Rows(dim=kind.dim, pre=s // block, post=kind.post, uniform=kind.uniform) for s in v.params["sizes"]]
        kind = v.fail("picks examples by their position in the batch")
    return kind


def _tile_batch(v: View) -> Kind:
    kind = v.kinds[0]
    if not isinstance(kind, Rows):
        return kind
    return Rows(dim=kind.dim, pre=kind.pre * v.params["reps"][kind.dim], post=kind.post, uniform=kind.uniform)


def _iota_batch(v: View) -> Kind:
    changed = v.differing()
    if len(changed) != 1 or changed[0] == v.params["dimension"]:
        return v.fail("numbers the examples of the batch")
    return v.uniform(changed[0])


def _empty_batch(v: View) -> Kind:
    changed = v.differing()
    return v.uniform(changed[0]) if len(changed) == 1 else v.fail("makes an array with several batch dimensions")


_MOVES = Traits(fusible=True, moves=True)
_SAME_BUFFER = Traits(fusible=True, aliases=True)
_MADE = Traits(fusible=True, moves=True, generates=True)
_JOINED = Traits(fusible=True, moves=True, reads_memory=True, expensive=True)


def _moves(
    name: str, rule: Rule, *sized: str, linear: Linear = FIRST, traits: Traits = _MOVES,
    batch: BatchRule | None = None, touches: Touches = all_of_it,
) -> Primitive:  # fmt: skip
    return Primitive(
        name=name, rule=rule, flops=ONE, traits=traits, linear=linear, batch=batch, sized=frozenset(sized),
        order=None if linear is NONLINEAR else "rising", touches=touches,
    )  # fmt: skip


PRIMITIVES: tuple[Primitive, ...] = (
    _moves("reshape", _reshape, "new_sizes", traits=_SAME_BUFFER, batch=_reshape_batch),
    _moves("squeeze", _squeeze, traits=_SAME_BUFFER),
    _moves("broadcast_in_dim", _broadcast_in_dim, "shape", traits=_MADE, batch=_broadcast_batch),
    _moves("iota", _created, "shape", linear=NONLINEAR, traits=_MADE, batch=_iota_batch),
    *(
        _moves(name, _created, "shape", linear=NONLINEAR, traits=_MADE, batch=_empty_batch)
        for name in ("empty", "empty2")
    ),
    _moves("concatenate", _concatenate, linear=ALL, traits=_JOINED, batch=_concatenate_batch),
    _moves("stack", _stack, linear=ALL),
    _moves("pad", _pad, linear=BOTH, batch=_pad_batch),
    _moves("rev", _rev),
    _moves("slice", _slice, "start_indices", "limit_indices", batch=_slice_batch, touches=a_part),
    _moves("split", _split, "sizes", batch=_split_batch),
    _moves("tile", _tile, batch=_tile_batch),
    _moves("transpose", _transpose),
    _moves("unstack", _unstack),
)
