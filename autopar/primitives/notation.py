"""Building blocks of the rules: factor names, and which groups of operands an operator is linear in.

In: a Node's shapes and dtypes. Out: `OpShardingRule`s in the notation of `ir/sharding.py`. Factors of size 0 or 1
never appear: `build` drops them, and their dimensions become ones that are never sharded.

Linearity is that of the numbers as they are stored: partial sums of integers wrap, so they may pass through
narrower types (a ring homomorphism) but not wider ones; partial sums of floats may pass through types at least as
precise; partial sums of 8-bit floats are not offered.

What a rule sums over a split factor, it sums as the dtype of its result can be (`sum_kind`): numbers by an all-reduce's
sum, booleans (whose sum is "or") by its maximum, narrow types not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from types import EllipsisType
from typing import TypeAlias

from autopar.ir.graph import Constant, Node, itemsize_bits
from autopar.ir.sharding import Factor, FactorKind, Halo, OpShardingRule, replicate_rule
from autopar.primitives.record import Group, Linear

Dims: TypeAlias = tuple[tuple[str, ...], ...]

_LETTERS = "ijklmnop"
SUMMABLE = frozenset({
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
})  # fmt: skip
"""Dtypes that an all-reduce can sum without changing them (bool becomes int32; 4- and 8-bit floats have none)."""
_MANTISSA_BITS = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52, "complex64": 23, "complex128": 52}


@cache
def letters(count: int, suffix: str = "") -> tuple[str, ...]:
    """``count`` factor names: i, j, k, … each with ``suffix``."""
    return tuple(
        (_LETTERS[d] if d < len(_LETTERS) else f"{_LETTERS[d % len(_LETTERS)]}{d // len(_LETTERS)}") + suffix
        for d in range(count)
    )


def numbered(prefix: str, count: int) -> tuple[str, ...]:
    """``b`` for one, ``b0, b1, …`` for several."""
    return (prefix,) if count == 1 else tuple(f"{prefix}{n}" for n in range(count))


def build(
    factors: Iterable[Factor],
    operands: Sequence[Dims],
    results: Sequence[Dims],
    halos: Sequence[Halo] = (),
) -> OpShardingRule:
    """The rule of these factors, dimensions and halos, without the factors of size 0 and 1."""
    factors = tuple(factors)
    kept = tuple(f for f in factors if f.size > 1)
    if len(kept) < len(factors):
        names = {f.name for f in kept}

        def strip(tensors: Sequence[Dims]) -> tuple[Dims, ...]:
            return tuple(tuple(tuple(n for n in dim if n in names) for dim in dims) for dims in tensors)

        operands, results = strip(operands), strip(results)
        halos = tuple(h for h in halos if h.factor in names)
    return OpShardingRule(factors=kept, operands=tuple(operands), results=tuple(results), halos=tuple(halos))


def replicated(node: Node, why: str) -> OpShardingRule:
    """The rule of a node that can only be replicated; ``why`` is shown to the user, "" where it is no loss."""
    return replicate_rule(
        tuple(len(t.shape) for t in node.operand_types), tuple(len(t.shape) for t in node.result_types), why
    )


def linear_in(node: Node, linear: Linear, identity: bool = False) -> tuple[tuple[int, ...], ...]:
    """Those of a record's groups that this node can use.

    A Constant 0 is a set of partial sums already and leaves its group (where nothing is left, the result is such a set
    too); any other Constant rules its group out, and so does a dtype that partial sums do not survive. ``identity``:
    result i is operand i, and of no other.
    """
    out: list[tuple[int, ...]] = []
    if linear.rounds or not linear.groups or not linear.when(node):
        return ()
    for group in linear.groups:
        live: list[int] = []
        for i in operands_of(group, len(node.operands)):
            operand = node.operands[i]
            if isinstance(operand, Constant):
                if operand.value is None or isinstance(operand.value, bool) or operand.value != 0:
                    break
                continue
            live.append(i)
        else:
            if all(
                sums_survive(node.operand_types[i].dtype, r.dtype)
                for i in live
                for r in (node.result_types[i : i + 1] if identity else node.result_types)
            ):
                out.append(tuple(live))
    return tuple(dict.fromkeys(out))


def operands_of(group: Group, count: int) -> tuple[int, ...]:
    """The operands that a record's group names, of a node with ``count``."""
    named = tuple(i for i in group if not isinstance(i, EllipsisType))
    return (*named, *range(named[-1] + 1, count)) if len(named) < len(group) else named


def sum_kind(dtype: str) -> FactorKind:
    """The kind of a factor that an operator sums over, given the dtype of its result."""
    return "sum" if dtype in SUMMABLE else "max" if dtype == "bool" else "whole"


def extreme_kind(dtype: str, kind: FactorKind) -> FactorKind:
    """``kind`` (max or min) where results of ``dtype`` can be combined so; complex and narrow numbers cannot."""
    ordered = dtype == "bool" or (dtype in SUMMABLE and not dtype.startswith("complex"))
    return kind if ordered else "whole"


@cache
def sums_survive(operand: str, result: str) -> bool:
    """True where adding results of dtype ``result`` is as good as adding operands of dtype ``operand``."""
    integers = _is_integer(operand), _is_integer(result)
    if all(integers):
        return itemsize_bits(result) <= itemsize_bits(operand)
    if any(integers) or operand not in _MANTISSA_BITS or result not in _MANTISSA_BITS:
        return False
    if operand == result:
        return True
    wider = _component_bits(result) > _component_bits(operand)
    return (wider or _MANTISSA_BITS[result] == _MANTISSA_BITS[operand]) and (
        _MANTISSA_BITS[result] >= _MANTISSA_BITS[operand]
    )


def _is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))


def _component_bits(dtype: str) -> int:
    return itemsize_bits(dtype) // (2 if dtype.startswith("complex") else 1)


def dim_factors(shape: Sequence[int], whole: Iterable[int] = (), suffix: str = "") -> tuple[tuple[Factor, ...], Dims]:
    """(one factor per dimension of ``shape``, those of the dimensions ``whole`` of that kind; the dimensions that they
    make up)."""
    names = letters(len(shape), suffix)
    held = frozenset(whole)
    factors = tuple(
        Factor(name=name, size=size, kind="whole" if d in held else "pass")
        for d, (name, size) in enumerate(zip(names, shape, strict=True))
    )
    return factors, tuple((name,) for name in names)
