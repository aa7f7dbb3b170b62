"""Reductions of one edge; all exact.

Each takes the Core and the edge's ends, and returns True where it changed something.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.intra_op.reduce.core import Core, Edge, Follows, join


def drop_unused(core: Core, u: int, v: int) -> bool:
    """Rows and columns of the matrix that no strategy is of any more go."""
    e = core.edges[u][v]
    used_rows = np.bincount(e.rows, minlength=e.matrix.shape[0]) > 0
    used_cols = np.bincount(e.cols, minlength=e.matrix.shape[1]) > 0
    if used_rows.all() and used_cols.all():
        return False
    new_row, new_col = np.cumsum(used_rows) - 1, np.cumsum(used_cols) - 1
    at = np.ix_(used_rows, used_cols)
    usages = tuple((held[at], spans) for held, spans in e.usages)
    core.put(u, v, Edge(new_row[e.rows], new_col[e.cols], e.matrix[at], usages))
    return True


def make_arc_consistent(core: Core, u: int, v: int) -> bool:
    """A strategy of one end that all of the other's forbid goes (arc consistency, Mackworth 1977)."""
    e = core.edges[u][v]
    finite = np.isfinite(e.matrix)
    if finite.all():
        return False
    rows, cols = finite.any(axis=1), finite.any(axis=0)
    if not rows.all():
        core.keep(u, rows[e.rows])
    if not cols.all():
        core.keep(v, cols[e.cols])
    return not (rows.all() and cols.all())


def move_minima(core: Core, u: int, v: int) -> bool:
    """What a row costs at least becomes its strategies' own cost, then the same for columns. A matrix that is a sum of
    row and column costs becomes zero. Needs every row and column to have an allowed entry."""
    e = core.edges[u][v]
    matrix = e.matrix
    low_rows = matrix.min(axis=1)
    if low_rows.any():
        matrix = matrix - low_rows[:, None]
        core.costs[u] = core.costs[u] + low_rows[e.rows]
    low_cols = matrix.min(axis=0)
    if low_cols.any():
        matrix = matrix - low_cols[None, :]
        core.costs[v] = core.costs[v] + low_cols[e.cols]
    if matrix is e.matrix:
        return False
    core.put(u, v, e._replace(matrix=matrix))
    core.dirty_nodes |= {u, v}
    return True


def group(core: Core, u: int, v: int) -> bool:
    """Equal rows are stored once, and equal columns. After `move_minima`: those equal up to a constant."""
    e = core.edges[u][v]
    rows = _same(e.matrix, [held for held, _ in e.usages])
    if rows is not None:
        first, of = rows
        e = Edge(of[e.rows], e.cols, e.matrix[first], tuple((held[first], spans) for held, spans in e.usages))
    turned = e.turned
    cols = _same(turned.matrix, [held for held, _ in turned.usages])
    if cols is not None:
        first, of = cols
        e = Edge(e.rows, of[e.cols], e.matrix[:, first], tuple((held[:, first], s) for held, s in e.usages))
    if rows is None and cols is None:
        return False
    core.put(u, v, e)
    return True


def _same(matrix: Any, held: list[Any]) -> tuple[Any, Any] | None:
    """(one row of each kind, the kind of each row); None where all differ."""
    if len(matrix) < 2:
        return None
    whole = np.ascontiguousarray(np.concatenate([matrix, *held], axis=1) if held else matrix)
    kinds: dict[bytes, int] = {}
    of = [kinds.setdefault(row.tobytes(), len(kinds)) for row in whole]
    if len(kinds) == len(of):
        return None
    numbers = np.array(of)
    return np.unique(numbers, return_index=True)[1], numbers


def drop_constant(core: Core, u: int, v: int) -> bool:
    """An edge of one row, or of one column, is a matter of one end alone, and goes. After `group`."""
    e = core.edges[u][v]
    if min(e.matrix.shape) > 1:
        return False
    if e.matrix.shape[0] == 1:
        u, v, e = v, u, e.turned
    core.costs[u] = core.costs[u] + e.matrix[:, 0][e.rows]
    for held, spans in e.usages:
        core.hold(u, spans, np.repeat(held[:, 0][e.rows][None, :], len(spans), axis=0))
    core.cut(u, v)
    return True


def contract(core: Core, u: int, v: int) -> bool:
    """Where every strategy of one end allows exactly one of the other, the other end follows, and the two become one
    node, its memory as exact as before."""
    for a, b in ((u, v), (v, u)):
        function = _function(core.edges[a][b])
        if function is not None:
            _merge(core, a, b, function)
            return True
    return False


def _function(e: Edge) -> Any:
    """int[strategies of u]: the one of v that each allows; None where it is not one."""
    finite = np.isfinite(e.matrix)
    if (finite.sum(axis=1) != 1).any():
        return None
    col = finite.argmax(axis=1)
    size = np.bincount(e.cols, minlength=e.matrix.shape[1])
    if (size[col] != 1).any():
        return None
    strategy = np.zeros(e.matrix.shape[1], np.int64)
    strategy[e.cols] = np.arange(len(e.cols))
    return strategy[col][e.rows]


def _merge(core: Core, u: int, v: int, function: Any) -> None:
    e = core.edges[u][v]
    core.costs[u] = core.costs[u] + core.costs[v][function] + e.matrix[e.rows, e.cols[function]]
    mine = core.memory[v]
    if len(mine.spans):
        core.hold(u, mine.spans, mine.bytes[:, function])
    for held, spans in e.usages:
        core.hold(u, spans, np.repeat(held[e.rows, e.cols[function]][None, :], len(spans), axis=0))
    whole = np.zeros(core.sizes[u], np.int64)
    whole[core.original[u]] = core.original[v][function]
    core.undo.append(Follows(v, u, whole))
    core.cut(u, v)
    for w, other in list(core.edges[v].items()):
        core.cut(v, w)
        join(core, u, w, other._replace(rows=other.rows[function]))
    core.remove(v)
    core.dirty_nodes.add(u)
