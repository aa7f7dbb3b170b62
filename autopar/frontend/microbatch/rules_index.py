"""Kinds through contractions, convolutions, windows, indexing and linear algebra: rules as in `rules_shape`."""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.frontend.microbatch.kinds import Coupled, Kind, Max, Min, Rows, Same, Sum, merge_rows
from autopar.frontend.microbatch.rules_shape import Rule
from autopar.frontend.microbatch.view import LocalIndex, View, combinable


def _bilinear(v: View) -> Kind:
    """A product of which at most one side is a sum over the batch."""
    sums = sum(isinstance(k, Sum) for k in v.kinds)
    if sums == 1 and v.only(Sum, Same):
        return Sum()
    if v.rows():
        merged = v.merged()
        return merged if isinstance(merged, Coupled) else v.fail("pairs examples with one another")
    return v.fail("is not linear in a sum over the batch")


def dot_general(v: View) -> Kind:
    """Batch and free dimensions keep the rows; contracting the batch gives a sum over it."""
    if not v.rows():
        return _bilinear(v)
    if not v.only(Rows, Same):
        return _bilinear(v)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = v.params["dimension_numbers"]
    contract, shared = (lhs_contract, rhs_contract), (lhs_batch, rhs_batch)
    places: list[tuple[str, int, Rows]] = []
    for side in (0, 1):
        kind = v.kinds[side]
        if not isinstance(kind, Rows):
            continue
        if kind.dim in contract[side]:
            places.append(("contract", list(contract[side]).index(kind.dim), kind))
        elif kind.dim in shared[side]:
            places.append(("batch", list(shared[side]).index(kind.dim), kind))
        else:
            free = [d for d in range(len(v.shape(side))) if d not in contract[side] and d not in shared[side]]
            out = len(shared[0]) + free.index(kind.dim)
            if side == 1:
                out += len(v.shape(0)) - len(contract[0]) - len(shared[0])
            places.append(("free", out, kind))
    roles = {role for role, _, _ in places}
    if roles == {"free"} and len(places) == 1:
        return places[0][2].at(places[0][1])
    merged = merge_rows([rows.at(0) for _, _, rows in places])
    if len(places) == 2 and len({p[:2] for p in places}) == 1 and merged is not None and roles != {"free"}:
        return Sum() if roles == {"contract"} else merged.at(places[0][1])
    return v.fail("multiplies examples with one another (a product over pairs of examples, as contrastive losses do)")


def conv(v: View) -> Kind:
    """Rows in the batch dimension of the input alone."""
    if not v.rows():
        return _bilinear(v)
    numbers, lhs = v.params["dimension_numbers"], v.kinds[0]
    if (
        isinstance(lhs, Rows)
        and isinstance(v.kinds[1], Same)
        and lhs.dim == numbers.lhs_spec[0]
        and v.params["batch_group_count"] == 1
    ):
        return lhs.at(numbers.out_spec[0])
    return v.fail("convolves along or across the batch dimension")


def window(linear: bool) -> Rule:
    """Windows that do not extend along the batch."""

    def rule(v: View) -> Kind:
        if linear and v.only(Sum):
            return Sum()
        if not v.rows():
            return v.fail("is not linear in a sum over the batch")
        merged = v.merged()
        if not isinstance(merged, Rows):
            return merged
        d = merged.dim
        plain = v.params["window_dimensions"][d] == 1 and tuple(v.params["padding"][d]) == (0, 0)
        for key in ("window_strides", "base_dilation", "window_dilation"):
            plain = plain and (v.params.get(key) or (1,) * (d + 1))[d] == 1
        return merged if plain else v.fail("slides a window along the batch dimension")

    return rule


def leading(trailing: int) -> Rule:
    """Linear algebra on the last ``trailing`` dimensions: rows anywhere before them."""

    def rule(v: View) -> list[Kind]:
        kind: Kind = v.fail("is not linear in a sum over the batch")
        if v.rows():
            kind = v.merged()
            if isinstance(kind, Rows) and kind.dim >= min(len(v.shape(i)) for i in range(len(v.kinds))) - trailing:
                kind = v.fail("works on matrices that span the batch dimension")
        return [kind] * len(v.full.outvars)

    return rule


def fft(v: View) -> Kind:
    kind = v.kinds[0]
    if isinstance(kind, Rows) and kind.dim >= len(v.shape(0)) - len(v.params["fft_lengths"]):
        return v.fail("transforms along the batch dimension")
    return kind if isinstance(kind, (Rows, Sum)) else v.fail("transforms a maximum or minimum over the batch")


def dynamic_slice(v: View) -> Kind:
    kind = v.kinds[0]
    if not all(isinstance(k, Same) for k in v.kinds[1:]):
        return v.fail("slices at a place that depends on the batch")
    if isinstance(kind, Rows) and v.params["slice_sizes"][kind.dim] != v.shape(0)[kind.dim]:
        return v.fail("picks examples by their position in the batch")
    return kind


def dynamic_update_slice(v: View) -> Kind:
    if not all(isinstance(k, Same) for k in v.kinds[2:]):
        return v.fail("writes at a place that depends on the batch")
    pair = v.kinds[:2]
    if all(isinstance(k, Rows) for k in pair):
        merged = v.merged()
        if isinstance(merged, Rows) and v.shape(0)[merged.dim] != v.shape(1)[merged.dim]:
            return v.fail("writes to some examples by their position in the batch")
        return merged
    kind = combinable(pair)
    if kind is not None and not v.rows():
        if kind is Sum:
            v.mask_same(0, 1)
        return kind()
    return v.fail("writes a value per example into one that has no batch dimension, or the other way round")


# --- gather and scatter --------------------------------------------------------------------------------------


def _own_row(v: View, operand: int, component: int, dim: int) -> bool:
    """True if component ``component`` of the index operand is known to be the example's own number."""
    found = v.constant(v.full.invars[operand], component)
    if found is None or dim >= found.ndim:
        return False
    return bool(np.all(found == np.arange(found.shape[dim]).reshape([-1] + [1] * (found.ndim - dim - 1))))


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


def gather(v: View) -> Kind:
    """Rows of the indices, of a batching dimension, or of a dimension taken whole; or each example's own row."""
    numbers: Any = v.params["dimension_numbers"]
    index = _index_rows(v, 1)
    source = v.kinds[0]
    if isinstance(index, Coupled):
        return index
    places = [d for d in range(len(v.out_shape())) if d not in numbers.offset_dims]
    if isinstance(source, (Same, Sum)):
        if index is None:
            return source
        if isinstance(source, Sum):
            return v.fail("reads a sum over the batch per example")
        return index.at(places[index.dim])
    if not isinstance(source, Rows):
        return v.fail("reads a maximum or minimum over the batch")
    d, size = source.dim, v.shape(0)[source.dim]
    batching = list(numbers.operand_batching_dims)
    if d in batching:
        k = numbers.start_indices_batching_dims[batching.index(d)]
        merged = merge_rows([source.at(0), index.at(0)]) if index is not None and index.dim == k else None
        return merged.at(places[k]) if merged is not None else v.fail("pairs examples with one another")
    if d in numbers.collapsed_slice_dims:
        if index is None:
            return v.fail("picks examples by their position in the batch")
        component = list(numbers.start_index_map).index(d)
        alike = source.pre == index.pre == 1 and source.post == index.post
        if alike and v.shape(1)[index.dim] == size and _own_row(v, 1, component, index.dim):
            v.action = LocalIndex(operand=1, component=component, unit=index.post)
            return Rows(dim=places[index.dim], post=index.post)
        return v.fail("picks examples by an index")
    if v.params["slice_sizes"][d] != size:
        return v.fail("picks examples by their position in the batch")
    if index is not None:
        return v.fail("reads every example for every example")
    kept = [i for i in range(len(v.shape(0))) if i not in numbers.collapsed_slice_dims and i not in batching]
    return source.at(numbers.offset_dims[kept.index(d)])


def scatter(v: View) -> Kind:
    """Rows written to their own place; or updates per example added into one table: a sum over the batch."""
    numbers: Any = v.params["dimension_numbers"]
    target, updates = v.kinds[0], v.kinds[2]
    index = _index_rows(v, 1)
    primitive = v.full.primitive.name
    if isinstance(index, Coupled):
        return index
    places = [d for d in range(len(v.shape(2))) if d not in numbers.update_window_dims]
    paired = index is not None and isinstance(updates, Rows) and updates.dim == places[index.dim]
    batching = list(numbers.operand_batching_dims)
    if isinstance(target, Rows):
        d = target.dim
        if d in batching:
            k = numbers.scatter_indices_batching_dims[batching.index(d)]
            if paired and index is not None and index.dim == k:
                merged = merge_rows([target, index.at(d), updates.at(d)])  # type: ignore[union-attr]
                if merged is not None:
                    return Rows(dim=d, pre=merged.pre, post=merged.post)
        elif d in numbers.inserted_window_dims:
            component = list(numbers.scatter_dims_to_operand_dims).index(d)
            if paired and index is not None and v.shape(1)[index.dim] == v.shape(0)[d]:
                merged = merge_rows([target, index.at(d), updates.at(d)])  # type: ignore[union-attr]
                if merged is not None and merged.pre == 1 and _own_row(v, 1, component, index.dim):
                    v.action = LocalIndex(operand=1, component=component, unit=merged.post)
                    return merged.at(d)
        elif index is None and isinstance(updates, Rows):
            kept = [i for i in range(len(v.shape(0))) if i not in numbers.inserted_window_dims and i not in batching]
            whole = v.shape(2)[updates.dim] == v.shape(0)[d]
            if whole and numbers.update_window_dims[kept.index(d)] == updates.dim:
                merged = merge_rows([target, updates.at(d)])
                if merged is not None:
                    return Rows(dim=d, pre=merged.pre, post=merged.post)
        return v.fail("writes to examples by an index")
    if index is not None:
        if not paired:
            return v.fail("writes a value without batch dimension at places per example")
        if primitive in ("scatter-add", "scatter_add") and isinstance(target, (Same, Sum)):
            v.mask_same(0)
            return Sum()
        if primitive in ("scatter-max", "scatter_max") and isinstance(target, (Same, Max)):
            return Max()
        if primitive in ("scatter-min", "scatter_min") and isinstance(target, (Same, Min)):
            return Min()
        return v.fail("writes values per example into one table, so that the order of examples matters")
    if isinstance(updates, Rows):
        return v.fail("writes a value per example into one that has no batch dimension")
    if combinable([target, updates]) is Sum and primitive in ("scatter", "scatter-add", "scatter_add"):
        v.mask_same(0, 2)
        return Sum()
    return v.fail("is not linear in a sum over the batch")


INDEX_RULES: dict[str, Rule] = {
    "dot_general": dot_general,
    "conv_general_dilated": conv,
    "reduce_window_sum": window(True),
    "reduce_window_max": window(False),
    "reduce_window_min": window(False),
    "reduce_window": window(False),
    "select_and_scatter_add": window(False),
    "select_and_gather_add": window(False),
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "gather": gather,
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter-max", "scatter_max",
         "scatter-min", "scatter_min", "scatter-sub", "scatter_sub"),
        scatter,
    ),
    **dict.fromkeys(
        ("cholesky", "eig", "eigh", "lu", "qr", "geqrf", "householder_product", "svd", "schur", "triangular_solve",
         "hessenberg", "tridiagonal", "tridiagonal_solve"),
        leading(2),
    ),
    "lu_pivots_to_permutation": leading(1),
    "fft": fft,
}  # fmt: skip
"""Primitive → rule."""
