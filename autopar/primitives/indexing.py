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

import numpy as np

from autopar.ir.graph import Node
from autopar.ir.sharding import FactorKind, OpShardingRule
from autopar.primitives.factors import RuleBuilder
from autopar.primitives.in_order import sorted_gather, sorted_scatter
from autopar.primitives.kinds import Coupled, Kind, Max, Min, Rows, Same, Sum, merge_rows, name
from autopar.primitives.notation import extreme_kind, replicated, sum_kind
from autopar.primitives.random import KEYS_WHY
from autopar.primitives.record import (
    BOTH,
    FIRST,
    NONLINEAR,
    ONE,
    Linear,
    Primitive,
    Rule,
    Traits,
    a_part,
    in_place,
    largest,
)
from autopar.primitives.view import BatchRule, LocalIndex, View


def whole_rows(node: Node) -> bool:
    """True for a gather that looks up, or a scatter that updates, along the last dimension of what it indexes."""
    if node.primitive != "gather" and not node.primitive.startswith("scatter"):
        return False
    numbers = node.params["dimension_numbers"]
    single = numbers["collapsed_slice_dims" if node.primitive == "gather" else "inserted_window_dims"]
    return len(node.operand_types[0].shape) - 1 not in (*single, *numbers["operand_batching_dims"])


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


def _dynamic_slice_batch(v: View) -> Kind:
    kind = v.kinds[0]
    if not all(isinstance(k, Same) for k in v.kinds[1:]):
        return v.fail("slices at a place that depends on the batch")
    if isinstance(kind, Rows) and v.params["slice_sizes"][kind.dim] != v.shape(0)[kind.dim]:
        return v.fail("picks examples by their position in the batch")
    return kind


def _dynamic_update_slice_batch(v: View) -> Kind:
    if not all(isinstance(k, Same) for k in v.kinds[2:]):
        return v.fail("writes at a place that depends on the batch")
    if not all(isinstance(k, Rows) for k in v.kinds[:2]):
        return v.fail("writes a value per example into one that has no batch dimension, or the other way round")
    merged = v.merged()
    if isinstance(merged, Rows) and v.shape(0)[merged.dim] != v.shape(1)[merged.dim]:
        return v.fail("writes to some examples by their position in the batch")
    return merged


def _own_row(v: View, operand: int, component: int, dim: int) -> bool:
    """True if component ``component`` of the index operand is known to be the example's own number."""
    found = v.constant(operand, component)
    if found is None or dim >= found.ndim:
        return False
    own = np.arange(found.shape[dim], dtype=np.int64).reshape([-1] + [1] * (found.ndim - dim - 1))
    return np.array_equal(found, np.broadcast_to(own, found.shape))


def _index_rows(v: View, operand: int) -> Rows | None | Coupled:
    """The batch dimension of the index operand (None: it has none)."""
    kind = v.kinds[operand]
    if isinstance(kind, Same):
        return None
    if isinstance(kind, Rows):
        if kind.dim == len(v.shape(operand)) - 1:
            return v.fail("has the batch among the components of its indices")
        return kind
    return v.fail("indexes by a value that depends on the whole batch")


def _gather_batch(v: View) -> Kind:
    """Rows of the indices, of a batching dimension, or of a dimension taken whole; or each example's own row."""
    numbers: dict[str, tuple[int, ...]] = v.params["dimension_numbers"]
    index = _index_rows(v, 1)
    source = v.kinds[0]
    if isinstance(index, Coupled):
        return index
    places = [d for d in range(len(v.out_shape())) if d not in numbers["offset_dims"]]
    if not isinstance(source, Rows):
        if index is not None and isinstance(source, Same):
            return index.at(places[index.dim])
        return v.fail(f"reads a {name(source)} per example")
    d, size = source.dim, v.shape(0)[source.dim]
    batching = list(numbers["operand_batching_dims"])
    if d in batching:
        k = numbers["start_indices_batching_dims"][batching.index(d)]
        merged = merge_rows([source.at(0), index.at(0)]) if index is not None and index.dim == k else None
        return merged.at(places[k]) if merged is not None else v.fail("pairs examples with one another")
    if d in numbers["collapsed_slice_dims"]:
        if index is None:
            return v.fail("picks examples by their position in the batch")
        component = list(numbers["start_index_map"]).index(d)
        alike = source.pre == index.pre == 1 and source.post == index.post
        if alike and v.shape(1)[index.dim] == size and _own_row(v, 1, component, index.dim):
            v.action = LocalIndex(operand=1, component=component, unit=index.post)
            return Rows(dim=places[index.dim], post=index.post)
        return v.fail("picks examples by an index")
    if v.params["slice_sizes"][d] != size:
        return v.fail("picks examples by their position in the batch")
    if index is not None:
        return v.fail("reads every example for every example")
    kept = [i for i in range(len(v.shape(0))) if i not in numbers["collapsed_slice_dims"] and i not in batching]
    return source.at(numbers["offset_dims"][kept.index(d)])


def _scatter_batch(combined: type[Sum] | type[Max] | type[Min] | None) -> BatchRule:
    """Rows written to their own place; or updates per example combined in one table."""

    def scatter_batch(v: View) -> Kind:
        index, target, updates = _index_rows(v, 1), v.kinds[0], v.kinds[2]
        if isinstance(index, Coupled):
            return index
        places = [d for d in range(len(v.shape(2))) if d not in v.params["dimension_numbers"]["update_window_dims"]]
        pair = None
        if index is not None and isinstance(updates, Rows) and updates.dim == places[index.dim]:
            pair = index, updates
        if isinstance(target, Rows):
            return _written(v, target, pair, updates if index is None else None)
        if index is None:
            return v.fail("writes a value per example into one that has no batch dimension")
        if pair is None:
            return v.fail("writes a value without batch dimension at places per example")
        if combined is None or not isinstance(target, (Same, combined)):
            return v.fail("writes values per example into one table, so that the order of examples matters")
        if combined is Sum:
            v.mask_same(0)
        return combined()

    return scatter_batch


def _written(v: View, target: Rows, pair: tuple[Rows, Rows] | None, updates: Kind | None) -> Kind:
    """Rows of a scatter's operand: along a batching dimension, each its own by the number of the example (``pair``: the
    rows of indices and updates), or whole, under indices without rows (``updates``)."""
    numbers: dict[str, tuple[int, ...]] = v.params["dimension_numbers"]
    d, batching = target.dim, list(numbers["operand_batching_dims"])
    if pair is not None:
        index, update = pair
        merged = merge_rows([target, index.at(d), update.at(d)])
        if d in batching and index.dim == numbers["scatter_indices_batching_dims"][batching.index(d)]:
            if merged is not None:
                return Rows(dim=d, pre=merged.pre, post=merged.post)
        elif d in numbers["inserted_window_dims"] and v.shape(1)[index.dim] == v.shape(0)[d]:
            component = list(numbers["scatter_dims_to_operand_dims"]).index(d)
            if merged is not None and merged.pre == 1 and _own_row(v, 1, component, index.dim):
                v.action = LocalIndex(operand=1, component=component, unit=merged.post)
                return merged.at(d)
    elif isinstance(updates, Rows) and d not in numbers["inserted_window_dims"] and d not in batching:
        kept = [i for i in range(len(v.shape(0))) if i not in numbers["inserted_window_dims"] and i not in batching]
        merged = merge_rows([target, updates.at(d)])
        whole = v.shape(2)[updates.dim] == v.shape(0)[d]
        if whole and numbers["update_window_dims"][kept.index(d)] == updates.dim and merged is not None:
            return Rows(dim=d, pre=merged.pre, post=merged.post)
    return v.fail("writes to examples by an index")


_WITH_UPDATES = Linear(groups=((0, 2),))


def _writes(
    primitive: str,
    updates_kind: FactorKind,
    linear: Linear,
    combined: type[Sum] | type[Max] | type[Min] | None = None,
    looks_up: bool = False,
) -> Primitive:
    return Primitive(
        name=primitive,
        rule=_scatter(updates_kind),
        flops=largest,
        traits=Traits(looks_up=looks_up),
        touches=in_place(2),
        linear=linear,
        batch=_scatter_batch(combined),
        sorted_batch=sorted_scatter,
    )


PRIMITIVES: tuple[Primitive, ...] = (
    Primitive(
        name="gather", rule=_gather, flops=ONE, traits=Traits(looks_up=True), batch=_gather_batch,
        sorted_batch=sorted_gather, order="rising", linear=Linear(groups=((0,),), when=_fill_adds_up),
        sized=frozenset({"slice_sizes"}), touches=a_part,
    ),
    _writes("scatter", "whole", _WITH_UPDATES),
    _writes("scatter-add", "sum", _WITH_UPDATES, Sum, looks_up=True),
    _writes("scatter-sub", "sum", _WITH_UPDATES, Sum),
    _writes("scatter-mul", "whole", FIRST),
    _writes("scatter-min", "min", NONLINEAR, Min),
    _writes("scatter-max", "max", NONLINEAR, Max),
    Primitive(
        name="dynamic_slice", rule=_dynamic_slice, flops=ONE, linear=FIRST, batch=_dynamic_slice_batch, order="rising",
        sized=frozenset({"slice_sizes"}), traits=Traits(looks_up=True, fusible=True, moves=True), touches=a_part,
    ),
    Primitive(
        name="dynamic_update_slice", rule=_dynamic_update_slice, flops=ONE, traits=Traits(), linear=BOTH,
        batch=_dynamic_update_slice_batch, order="rising", touches=in_place(1),
    ),
)  # fmt: skip
