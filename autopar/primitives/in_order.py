"""Rows of the batch in the order of a sort: how they come about, what may be done with them, how they come back.

Experts without a capacity sort their tokens by expert, multiply each group of rows by its expert's matrix (a ragged
product), and put the rows back:

    order = argsort(expert)           Numbers: the rows' own, sorted
    rows = x[order // k]              Sorted, where each row reads what is its example's; also
                                      x[line[order]] with line = repeat(arange(tokens), k)
    sizes = bincount(expert)          Sum; counts the key that was sorted (`View.counts`)
    out = ragged_dot(rows, w, sizes)  Sorted: each row meets the matrix of its own key, wherever it lies
    out[argsort(order)]               Rows, as is zeros.at[order].set(out), or zeros.at[order // k].add(out)

A microbatch sorts its own rows; no row sees another, so that together they give the batch's.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.ir.sharding import OpShardingRule
from autopar.primitives.kinds import COMBINED, Coupled, InOrder, Kind, Numbers, Rows, Same, Sorted, Sorting, Sum
from autopar.primitives.record import Primitive
from autopar.primitives.row_numbers import RowNumbers, made_of
from autopar.primitives.view import LocalIndex, View


def through(v: View, record: Primitive, rule: Callable[[], OpShardingRule]) -> Kind | list[Kind]:
    """The kinds of the results of an operator, one of whose operands is `Sorted` or `Numbers`."""
    if record.sorted_batch is not None:
        return record.sorted_batch(v)
    if len({k.sorting for k in v.kinds if isinstance(k, InOrder)}) > 1:
        return v.fail("pairs rows of the batch in two orders")
    if record.batch is not None and not record.traits.elementwise and len(v.kinds) > 1:
        return v.fail("takes rows of the batch in the order of a sort")
    if any(isinstance(k, Numbers) for k in v.kinds):
        return _numbers(v, record, rule())
    return _by_rule(v, rule())


def _by_rule(v: View, rule: OpShardingRule) -> Kind | list[Kind]:
    """One factor that all ordered operands share is a loop over rows, whose order does not matter."""
    factors = {f.name: f for f in rule.factors}
    halos = {h.factor for h in rule.halos}
    shared: set[str] = set()
    for i, kind in enumerate(v.kinds):
        if isinstance(kind, Sorted) or (isinstance(kind, Rows) and kind.uniform):
            names = rule.operands[i][kind.dim]
            if len(names) != 1 or factors[names[0]].kind == "whole" or names[0] in halos:
                return v.fail("runs along rows of the batch that are in the order of a sort")
            shared.add(names[0])
        elif not isinstance(kind, Same):
            return v.fail("pairs rows in the order of a sort with something else of the batch")
    if len(shared) != 1:
        return v.fail("pairs rows in the order of a sort with one another")
    (factor,) = shared
    if any(isinstance(k, Same) and any(factor in d for d in o) for k, o in zip(v.kinds, rule.operands, strict=True)):
        return v.fail("pairs rows in the order of a sort with a value that does not depend on the batch")
    sorting = next(k.sorting for k in v.kinds if isinstance(k, Sorted))
    out: list[Kind] = []
    for r, dims in enumerate(rule.results):
        at = next((d for d, names in enumerate(dims) if factor in names), None)
        if at is not None and dims[at] == (factor,):
            out.append(Sorted(sorting=sorting, dim=at))
        elif at is None and factors[factor].kind in COMBINED:
            out.append(COMBINED[factors[factor].kind]())
        else:
            out.append(v.fail(f"makes result {r} of all rows in the order of a sort together"))
    return out


def _numbers(v: View, record: Primitive, rule: OpShardingRule) -> Kind:
    """Functions of single numbers, and the same in another shape."""
    i, kind = next((i, k) for i, k in enumerate(v.kinds) if isinstance(k, Numbers))
    if record.traits.elementwise:
        numbers = [k for k in v.kinds if isinstance(k, Numbers)]
        operands = [k.values if isinstance(k, Numbers) else v.scalar(i) for i, k in enumerate(v.kinds)]
        known = [x for x in operands if x is not None]
        if len(known) == len(operands) and len({(k.dim, k.places) for k in numbers}) == 1:
            result = made_of(v.full.primitive, known, v.evaluated)
            if v.full.primitive == "select_n" and isinstance(known[0], RowNumbers):
                v.chosen = None if known[0].everywhere is None else 1 + known[0].everywhere
            if result is not None:
                return Numbers(sorting=kind.sorting, dim=kind.dim, values=result, places=kind.places)
        return v.fail("makes something else of the order of a sort than a number of each row")
    names = rule.operands[i][kind.dim]
    at = next((d for d, found in enumerate(rule.results[0]) if names and found == names), None)
    if at is None or len(v.kinds) > 1 or not (record.traits.moves or record.traits.aliases):
        return v.fail("makes something else of the order of a sort than a number of each row")
    return kind.at(at)


def sort_batch(v: View) -> Kind | list[Kind] | None:
    """Kinds of a sort along the rows of a batch, by one key; None for another sort."""
    key = v.kinds[0]
    if len(v.shape(0)) != 1 or v.params["num_keys"] != 1 or not isinstance(key, Rows) or key.pre != 1:
        return None
    which = None if v.params["is_stable"] else object()
    sorting = Sorting(key=v.variable(0), size=v.shape(0)[0], post=key.post, which=which)
    out: list[Kind] = []
    for i, kind in enumerate(v.kinds):
        if (line := _line(v, i, sorting)) is not None:
            out.append(_numbered(v, i, sorting, line))
        elif isinstance(kind, Rows) and (kind.uniform or (kind.pre, kind.post) == (1, key.post)):
            out.append(Sorted(sorting=sorting, dim=0))
        else:
            return None
    return out


def sorted_sort(v: View) -> Kind | list[Kind]:
    """Sorting the order itself: the places of the rows; and the places: the order."""
    order = v.kinds[0]
    if not isinstance(order, Numbers) or not order.values.is_own:
        return v.fail("sorts rows of the batch once more")
    if len(v.shape(0)) != 1 or v.params["num_keys"] != 1:
        return v.fail("sorts rows of the batch once more")
    out: list[Kind] = [v.fail("sorts the order of a sort")]
    for i in range(1, len(v.kinds)):
        if (line := _line(v, i, order.sorting)) is not None:
            out.append(_numbered(v, i, order.sorting, line, places=not order.places))
        else:
            out.append(v.fail("sorts rows of the batch by the order of a sort"))
    return out


def _line(v: View, operand: int, sorting: Sorting) -> RowNumbers | None:
    """What a constant has for each row that is sorted, if that numbers rows of the row's own example."""
    line = v.numbers(operand, sorting.size // sorting.post) if v.shape(operand) == (sorting.size,) else None
    return line if line is not None and line.is_within(line.unit) else None


def _numbered(v: View, operand: int, sorting: Sorting, line: RowNumbers, *, dim: int = 0, places: bool = False) -> Kind:
    """``line``, an operand, in the order of a sort, as a microbatch numbers its rows."""
    rows = v.kinds[operand]
    if isinstance(rows, Coupled):  # not hoisted: it does so by itself
        return Numbers(sorting=sorting, dim=dim, values=line, places=places)
    if v.action is not None or not isinstance(rows, Rows) or (rows.pre, rows.post) != (1, sorting.post):
        return v.fail("numbers rows of the batch in another way than they lie")
    v.action = LocalIndex(operand=operand, component=None, unit=line.unit)
    return Numbers(sorting=sorting, dim=dim, values=line, places=places)


def _same_example(kind: Numbers, rows: Rows, size: int) -> bool:
    """True where each row's number is that of one of its own example, in a dimension of ``size``."""
    fits = rows.pre == 1 and size == kind.values.examples * rows.post
    return fits and kind.values.is_within(rows.post)


def sorted_gather(v: View) -> Kind:
    """Rows read in the order of a sort, or back from it; or what a table has for a value of each row."""
    numbers: dict[str, tuple[int, ...]] = v.params["dimension_numbers"]
    source, index = v.kinds[0], v.kinds[1]
    single = len(numbers["start_index_map"]) == 1 and numbers["start_index_map"] == numbers["collapsed_slice_dims"]
    if not single or numbers["operand_batching_dims"] or not isinstance(index, InOrder):
        return v.fail("reads rows in the order of a sort by position")
    places = [d for d in range(len(v.out_shape())) if d not in numbers["offset_dims"]]
    (dim,) = numbers["start_index_map"]
    if index.dim >= len(places):
        return v.fail("has the order of a sort among the components of its indices")
    line = _line(v, 0, index.sorting)
    if line is not None and isinstance(index, Numbers) and index.values.is_own:
        return _numbered(v, 0, index.sorting, line, dim=places[index.dim], places=index.places)
    match source, index:
        case Same(), Sorted():
            return Sorted(sorting=index.sorting, dim=places[index.dim])
        case Rows(), Numbers(places=False) if source.dim == dim and _same_example(index, source, v.shape(0)[dim]):
            return Sorted(sorting=index.sorting, dim=places[index.dim])
        case Sorted(), Numbers(places=True, values=values) if values.is_own and source.dim == dim:
            if source.sorting != index.sorting:
                return v.fail("reads rows of the batch in another order than that of their places")
            return Rows(dim=places[index.dim], post=index.sorting.post)
        case _:
            return v.fail("reads other rows of the batch than each example's own")


def sorted_scatter(v: View) -> Kind:
    """Rows in the order of a sort written to their own places: each to one, or, where a sum or an extreme is made,
    several of an example to one."""
    numbers: dict[str, tuple[int, ...]] = v.params["dimension_numbers"]
    target, index, updates = v.kinds
    scattered = numbers["scatter_dims_to_operand_dims"]
    single = (
        len(scattered) == 1 and scattered == numbers["inserted_window_dims"] and not numbers["operand_batching_dims"]
    )
    places = [d for d in range(len(v.shape(2))) if d not in numbers["update_window_dims"]]
    if isinstance(index, Sorted) and v.full.primitive == "scatter-add" and isinstance(target, (Same, Sum)):
        along = updates.dim if isinstance(updates, Sorted) or (isinstance(updates, Rows) and updates.uniform) else None
        other = isinstance(updates, Sorted) and updates.sorting != index.sorting
        if along is None or other or places[index.dim : index.dim + 1] != [along]:
            return v.fail("adds up values per example at places per example in the order of a sort")
        v.mask_same(0)
        return Sum()
    if not (single and isinstance(index, Numbers) and not index.places):
        return v.fail("writes rows in the order of a sort by position")
    (dim,) = scattered
    size, sorting = v.shape(0)[dim], index.sorting
    each = v.full.primitive == "scatter" and index.values.is_own
    if each and size == sorting.size and (line := _line(v, 2, sorting)) is not None:
        return _numbered(v, 2, sorting, line, places=True)
    if not isinstance(updates, Sorted):
        return v.fail("writes rows in the order of a sort by position")
    own = isinstance(target, Rows) and target.uniform and target.dim == dim
    if not own or updates.sorting != sorting or places[index.dim : index.dim + 1] != [updates.dim]:
        return v.fail("writes rows in the order of a sort to something else of the batch")
    rows = Rows(dim=dim, post=max(1, size * sorting.post // sorting.size))
    if not _same_example(index, rows, size) or (v.full.primitive == "scatter" and not each):
        return v.fail("writes rows in the order of a sort to other places than each example's own")
    return rows


def sorted_ragged_dot(v: View) -> Kind:
    """Each row by the matrix of its group, which is the row's by its key."""
    numbers = v.params["ragged_dot_dimension_numbers"]
    (ragged,) = numbers["lhs_ragged_dimensions"]
    (contracted, _), (batch, _) = numbers["dot_dimension_numbers"]
    rows, weights, sizes = v.kinds
    if not isinstance(rows, Sorted) or rows.dim != ragged or ragged in contracted or not isinstance(weights, Same):
        return v.fail("pairs rows in the order of a sort with one another")
    if not isinstance(sizes, Sum) or not v.counts(2, rows.sorting.key):
        return v.fail(
            "has group sizes that are not known to count the keys that its rows were sorted by, in the order of the "
            "sort (jnp.bincount of what jnp.argsort sorts is)"
        )
    free = [d for d in range(len(v.shape(0))) if d not in contracted and d not in batch]
    return Sorted(sorting=rows.sorting, dim=len(batch) + free.index(ragged))
