"""Matrix products: batch and free dimensions pass, the contracted ones leave partial sums.

In: a `dot_general` or `ragged_dot_general` Node. Out: factors b (batch), i (left), j (right), k (contracted),
g (groups).
"""

from __future__ import annotations

import math

from autopar.ir.graph import Node
from autopar.ir.sharding import Factor, FactorKind, OpShardingRule
from autopar.primitives.batch import rows_through
from autopar.primitives.in_order import sorted_ragged_dot
from autopar.primitives.kinds import Kind, Rows, Same
from autopar.primitives.notation import Dims, build, numbered, replicated, sum_kind
from autopar.primitives.record import EITHER, Primitive, Traits, Weights
from autopar.primitives.view import View


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
    )


def _sized(
    names: tuple[str, ...], shape: tuple[int, ...], dims: tuple[int, ...], kind: FactorKind = "pass"
) -> list[Factor]:
    return [Factor(name=n, size=shape[d], kind=kind) for n, d in zip(names, dims, strict=True)]


def _ragged_dot_general(node: Node) -> OpShardingRule:
    """lhs rows belong to groups (g) by their position: a device that knows all sizes computes those of its rows (i; k
    where they are contracted) that are of its groups.

    Ragged rows: (i k)(g k j) → (i j), over split groups partial sums. Ragged contraction: (i k)(k j) → (g i j).
    """
    numbers = node.params.get("ragged_dot_dimension_numbers")
    if numbers is None or len(node.operands) != 3:
        return replicated(node, "ragged dot in a form that is not understood")
    lhs_k: tuple[int, ...]
    (lhs_k, rhs_k), (lhs_b, rhs_b) = numbers["dot_dimension_numbers"]
    (ragged,) = numbers["lhs_ragged_dimensions"]
    groups: tuple[int, ...] = tuple(numbers["rhs_group_dimensions"])
    lhs, rhs, sizes = (t.shape for t in node.operand_types)
    if len(sizes) != 1 or ragged in lhs_b:
        return replicated(node, "ragged dot with group sizes per batch: not understood")
    lhs_i, rhs_j = _free(len(lhs), lhs_k, lhs_b), _free(len(rhs), rhs_k, rhs_b, groups)
    b, i, j, k = (numbered(c, len(d)) for c, d in (("b", lhs_b), ("i", lhs_i), ("j", rhs_j), ("k", lhs_k)))
    summed = sum_kind(node.result_types[0].dtype)
    factors = [
        *_sized(b, lhs, lhs_b), *_sized(i, lhs, lhs_i), *_sized(j, rhs, rhs_j), *_sized(k, lhs, lhs_k, summed),
        Factor(name="g", size=sizes[0], kind=summed if groups else "pass"),
    ]  # fmt: skip
    result = tuple((name,) for name in (*b, *i, *j))
    return build(
        factors,
        (
            _dims(len(lhs), (lhs_b, b), (lhs_i, i), (lhs_k, k)),
            _dims(len(rhs), (rhs_b, b), (rhs_j, j), (rhs_k, k), (groups, ("g",) * len(groups))),
            ((),),
        ),
        (result if groups else (("g",), *result),),
    )


def _ragged_dot_general_batch(v: View) -> Kind | list[Kind]:
    """Examples along dimensions that are neither ragged nor groups: a row's place tells its group."""
    numbers = v.params["ragged_dot_dimension_numbers"]
    by_place = (numbers["lhs_ragged_dimensions"], numbers["rhs_group_dimensions"])
    if not isinstance(v.kinds[2], Same):
        return v.fail("takes rows by groups whose sizes depend on the batch")
    if any(isinstance(k, Rows) and k.dim in dims for k, dims in zip(v.kinds, by_place, strict=False)):
        return v.fail("takes rows of several examples by their position in the batch")
    return rows_through(v, _ragged_dot_general(v.full))


def dot_flops(node: Node) -> float:
    """2 m n k FLOPs, times the batch."""
    contract: tuple[int, ...]
    (contract, _), _ = node.params["dimension_numbers"]
    return 2.0 * node.result_types[0].size * math.prod(node.operand_types[0].shape[d] for d in contract)


def ragged_dot_flops(node: Node) -> float:
    """2 FLOPs for each element of the left operand and each column of its row's group; groups that devices share among
    them are taken to have as many rows each."""
    numbers = node.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers["dot_dimension_numbers"]
    one_each = {*contracted, *batch, *numbers["rhs_group_dimensions"]}
    columns = math.prod(n for d, n in enumerate(node.operand_types[1].shape) if d not in one_each)
    return 2.0 * node.operand_types[0].size * columns


def dot_workspace(node: Node) -> Weights:
    """A copy of each operand that is transposed: whose batch dimensions do not lead, or whose contracted ones do not
    lie together behind them or at the end."""
    contract, batch = node.params["dimension_numbers"]
    return tuple((i, 1.0) for i in (0, 1) if _scattered(len(node.operand_types[i].shape), contract[i], batch[i]))


def _scattered(rank: int, contract: tuple[int, ...], batch: tuple[int, ...]) -> bool:
    if tuple(batch) != tuple(range(len(batch))):
        return True
    ends = tuple(range(len(batch), len(batch) + len(contract))), tuple(range(rank - len(contract), rank))
    return tuple(sorted(contract)) not in ends


def _batch_of(node: Node, operand: int) -> tuple[int, ...]:
    """Which dimensions lead in a copy."""
    return tuple(node.params["dimension_numbers"][1][operand])


CONTRACTION = Traits(contraction=True)

PRIMITIVES: tuple[Primitive, ...] = (
    Primitive(
        name="dot_general", rule=_dot_general, flops=dot_flops, traits=CONTRACTION, linear=EITHER,
        workspace=dot_workspace, copy_key=_batch_of,
    ),
    Primitive(
        name="ragged_dot_general", rule=_ragged_dot_general, flops=ragged_dot_flops, traits=CONTRACTION, linear=EITHER,
        batch=_ragged_dot_general_batch, sorted_batch=sorted_ragged_dot,
    ),
)  # fmt: skip
