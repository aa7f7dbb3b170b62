"""Rules of matrix products: batch and free dimensions pass, the contracted ones leave partial sums.

In: a `dot_general` or `ragged_dot_general` Node. Out: factors b (batch), i (left), j (right), k (contracted).
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.ir.graph import Node
from autopar.ir.sharding import Factor, FactorKind, OpShardingRule
from autopar.primitives.notation import Dims, build, linear_in, numbered, replicated, sum_kind


def _free(rank: int, *used: tuple[int, ...]) -> tuple[int, ...]:
    taken = {d for dims in used for d in dims}
    return tuple(d for d in range(rank) if d not in taken)


def _dims(rank: int, *named: tuple[tuple[int, ...], tuple[str, ...]]) -> Dims:
    out: list[tuple[str, ...]] = [()] * rank
    for positions, names in named:
        for d, name in zip(positions, names, strict=True):
            out[d] = (name,)
    return tuple(out)


def _dot_general(node: Node) -> OpShardingRule:
    (lhs_k, rhs_k), (lhs_b, rhs_b) = node.params["dimension_numbers"]
    lhs, rhs = (t.shape for t in node.operand_types[:2])
    lhs_i, rhs_j = _free(len(lhs), lhs_k, lhs_b), _free(len(rhs), rhs_k, rhs_b)
    b, i, j, k = (numbered(c, len(d)) for c, d in (("b", lhs_b), ("i", lhs_i), ("j", rhs_j), ("k", lhs_k)))
    factors = [
        *_sized(b, lhs, lhs_b), *_sized(i, lhs, lhs_i), *_sized(j, rhs, rhs_j),
        *_sized(k, lhs, lhs_k, sum_kind(node.result_types[0].dtype)),
    ]  # fmt: skip
    return build(
        factors,
        (
            _dims(len(lhs), (lhs_b, b), (lhs_i, i), (lhs_k, k)),
            _dims(len(rhs), (rhs_b, b), (rhs_j, j), (rhs_k, k)),
        ),
        (tuple((name,) for name in (*b, *i, *j)),),
        linear=linear_in(node, (0,), (1,)),
    )


def _sized(
    names: tuple[str, ...], shape: tuple[int, ...], dims: tuple[int, ...], kind: FactorKind = "pass"
) -> list[Factor]:
    return [Factor(name=n, size=shape[d], kind=kind) for n, d in zip(names, dims, strict=True)]


def _ragged_dot_general(node: Node) -> OpShardingRule:
    """lhs rows belong to groups by their position, so the ragged dimension and the groups stay whole.

    Ragged rows (i): (i k)(g k j) → (i j). Ragged contraction (k): (i k)(k j) → (g i j), where k stays whole.
    """
    numbers = node.params.get("ragged_dot_dimension_numbers")
    if numbers is None or len(node.operands) != 3:
        return replicated(node, "ragged dot in a form that is not understood")
    lhs_k: tuple[int, ...]
    (lhs_k, rhs_k), (lhs_b, rhs_b) = numbers["dot_dimension_numbers"]
    ragged: int
    (ragged,) = numbers["lhs_ragged_dimensions"]
    groups: tuple[int, ...] = tuple(numbers["rhs_group_dimensions"])
    lhs, rhs, sizes = (t.shape for t in node.operand_types)
    if len(sizes) != 1 or ragged in lhs_b:
        return replicated(node, "ragged dot with group sizes per batch: not understood")
    lhs_i, rhs_j = _free(len(lhs), lhs_k, lhs_b), _free(len(rhs), rhs_k, rhs_b, groups)
    b, i, j, k = (numbered(c, len(d)) for c, d in (("b", lhs_b), ("i", lhs_i), ("j", rhs_j), ("k", lhs_k)))
    summed = sum_kind(node.result_types[0].dtype)
    factors = [*_sized(b, lhs, lhs_b), *_sized(j, rhs, rhs_j)]
    factors += [
        Factor(name=n, size=lhs[d], kind="whole" if d == ragged else "pass") for n, d in zip(i, lhs_i, strict=True)
    ]
    factors += [
        Factor(name=n, size=lhs[d], kind="whole" if ragged in lhs_k else summed) for n, d in zip(k, lhs_k, strict=True)
    ]
    result = tuple((name,) for name in (*b, *i, *j))
    return build(
        factors,
        (
            _dims(len(lhs), (lhs_b, b), (lhs_i, i), (lhs_k, k)),
            _dims(len(rhs), (rhs_b, b), (rhs_j, j), (rhs_k, k)),
            ((),),
        ),
        (result if ragged not in lhs_k else ((), *result),),
        linear=linear_in(node, (0,), (1,)),
    )


RULES: dict[str, Callable[[Node], OpShardingRule]] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot_general,
}
