"""gather, the scatter family, dynamic_slice and dynamic_update_slice.

An indexed dimension of which each index takes one row can be split. A read (gather, dynamic_slice)
then leaves partial sums: each device contributes the rows that it holds and zero elsewhere (of booleans:
False, and an all-reduce takes the maximum). A write (scatter, dynamic_update_slice) needs no communication:
each device drops what falls outside its rows.
The update positions of a scatter are split as its combiner allows: scatter-add leaves partial sums,
scatter-max and scatter-min are combined by an all-reduce, the others stay whole, for their result depends
on the order of all updates or counts the operand once. The index-vector dimension stays whole, as do windows
of more than one row that are not the full dimension: they may straddle shards.
Semantics: https://openxla.org/stablehlo/spec#gather and #scatter.
"""

from __future__ import annotations

import math

from autopar.ir.graph import Node
from autopar.ir.sharding import FactorKind, OpShardingRule
from autopar.primitives.factors import RuleBuilder
from autopar.primitives.notation import extreme_kind, replicated, sum_kind
from autopar.primitives.random import KEYS_WHY
from autopar.primitives.record import BOTH, FIRST, NONLINEAR, ONE, Linear, Primitive, Rule, Traits, largest


def _gather(node: Node) -> OpShardingRule:
    if node.operand_types[0].is_key:
        return replicated(node, KEYS_WHY)
    numbers, sizes = node.params["dimension_numbers"], node.params["slice_sizes"]
    operand, indices = (t.shape for t in node.operand_types)
    rank = len(node.result_types[0].shape)
    offset_dims = numbers["offset_dims"]
    batch_dims = [d for d in range(rank) if d not in offset_dims]
    batching = dict(zip(numbers["start_indices_batching_dims"], numbers["operand_batching_dims"], strict=True))
    out_dim_of = dict(
        zip(
            [d for d in range(len(operand)) if d not in numbers["collapsed_slice_dims"] and d not in batching.values()],
            offset_dims,
            strict=True,
        )
    )
    masked = sum_kind(node.operand_types[0].dtype) if node.params.get("mode") != "ONE_HOT" else "whole"
    build = RuleBuilder(node)
    for d, out in enumerate(batch_dims):
        places = {0: batching[d], 1: d} if d in batching else {1: d}
        build.add(indices[d], places, {0: out})
    for d, n in enumerate(operand):
        if d in batching.values():
            continue
        if sizes[d] == n and d in out_dim_of:
            build.add(n, {0: d}, {0: out_dim_of[d]})
        elif sizes[d] == 1 and d in numbers["start_index_map"] and masked != "whole":
            build.add(n, {0: d}, kind=masked)
    return build.rule()


def _fill_adds_up(node: Node) -> bool:
    """True where a sum of gathers, each with its own fill values, is the gather of the sum."""
    if node.params.get("mode") != "FILL_OR_DROP":
        return True
    fill = node.params.get("fill_value")
    return isinstance(fill, (int, float)) and (fill == 0 or math.isnan(fill))


def _scatter(updates_kind: FactorKind) -> Rule:
    def rule(node: Node) -> OpShardingRule:
        if node.operand_types[0].is_key:
            return replicated(node, KEYS_WHY)
        numbers = node.params["dimension_numbers"]
        operand, indices, updates = (t.shape for t in node.operand_types)
        inserted, batched = numbers["inserted_window_dims"], numbers["operand_batching_dims"]
        scattered = numbers["scatter_dims_to_operand_dims"] if node.params.get("mode") != "ONE_HOT" else ()
        window_dims: tuple[int, ...] = numbers["update_window_dims"]
        update_batch_dims = [d for d in range(len(updates)) if d not in window_dims]
        batching = dict(zip(numbers["scatter_indices_batching_dims"], batched, strict=True))
        update_dim_of = dict(
            zip([d for d in range(len(operand)) if d not in inserted and d not in batched], window_dims, strict=True)
        )
        dtype = node.operand_types[0].dtype
        kind = sum_kind(dtype) if updates_kind == "sum" else extreme_kind(dtype, updates_kind)
        build = RuleBuilder(node)
        for d, update_dim in enumerate(update_batch_dims):
            if d in batching:
                build.add(indices[d], {0: batching[d], 1: d, 2: update_dim}, {0: batching[d]})
            else:
                build.add(indices[d], {1: d, 2: update_dim}, kind=kind)
        for d, n in enumerate(operand):
            if d in batched:
                continue
            window = updates[update_dim_of[d]] if d in update_dim_of else 1
            if window == n and d in update_dim_of:
                build.add(n, {0: d, 2: update_dim_of[d]}, {0: d})
            elif window == 1 and d in scattered:
                build.add(n, {0: d}, {0: d})
        return build.rule()

    return rule


def _dynamic_slice(node: Node) -> OpShardingRule:
    if node.operand_types[0].is_key:
        return replicated(node, KEYS_WHY)
    build, masked = RuleBuilder(node), sum_kind(node.operand_types[0].dtype)
    for d, (n, size) in enumerate(zip(node.operand_types[0].shape, node.params["slice_sizes"], strict=True)):
        if size == n:
            build.add(n, {0: d}, {0: d})
        elif size == 1 and masked != "whole":
            build.add(n, {0: d}, kind=masked)
    return build.rule()


def _dynamic_update_slice(node: Node) -> OpShardingRule:
    if node.operand_types[0].is_key:
        return replicated(node, KEYS_WHY)
    build = RuleBuilder(node)
    operand, update = node.operand_types[0].shape, node.operand_types[1].shape
    for d, (n, size) in enumerate(zip(operand, update, strict=True)):
        if size == n:
            build.add(n, {0: d, 1: d}, {0: d})
        elif size == 1:
            build.add(n, {0: d}, {0: d})
    return build.rule()


_WITH_UPDATES = Linear(groups=((0, 2),))


def _writes(name: str, updates_kind: FactorKind, linear: Linear, looks_up: bool = False) -> Primitive:
    return Primitive(
        name=name, rule=_scatter(updates_kind), flops=largest, traits=Traits(looks_up=looks_up), linear=linear
    )


PRIMITIVES: tuple[Primitive, ...] = (
    Primitive(
        name="gather", rule=_gather, flops=ONE, traits=Traits(looks_up=True),
        linear=Linear(groups=((0,),), when=_fill_adds_up),
    ),
    _writes("scatter", "whole", _WITH_UPDATES),
    _writes("scatter-add", "sum", _WITH_UPDATES, looks_up=True),
    _writes("scatter-sub", "sum", _WITH_UPDATES),
    _writes("scatter-mul", "whole", FIRST),
    _writes("scatter-min", "min", NONLINEAR),
    _writes("scatter-max", "max", NONLINEAR),
    Primitive(
        name="dynamic_slice", rule=_dynamic_slice, flops=ONE,
        traits=Traits(looks_up=True, fusible=True, moves=True), linear=FIRST,
    ),
    Primitive(name="dynamic_update_slice", rule=_dynamic_update_slice, flops=ONE, traits=Traits(), linear=BOTH),
)  # fmt: skip
