"""Reductions of one node; all exact. Each returns True where it changed something."""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.intra_op.reduce.core import Cheapest, Core, Edge, Fixed, join

MAX_TABLE = 60_000
"""Largest edge that an elimination may make, in grouped entries (guessed)."""
CHUNK = 200_000
"""Most entries of an intermediate array."""
MAX_COMPARED = 20_000_000
"""Most sums that dominance takes at one node (measured: 0.1 s)."""


def is_free(core: Core, v: int) -> bool:
    """True where a node's strategies make no difference to memory."""
    return not len(core.memory[v].spans) and not any(e.usages for e in core.edges[v].values())


def absorb(core: Core, v: int) -> bool:
    """A node with one strategy becomes costs and usages of its neighbours."""
    if len(core.costs[v]) != 1:
        return False
    core.constant += float(core.costs[v][0])
    for (start, stop), (held,) in zip(*core.memory[v], strict=True):
        core.fixed[start:stop] += held
    for w, e in list(core.edges[v].items()):
        back = e.turned
        col = back.cols[0]
        core.costs[w] = core.costs[w] + back.matrix[back.rows, col]
        for held, spans in back.usages:
            core.hold(w, spans, np.repeat(held[back.rows, col][None, :], len(spans), axis=0))
        core.cut(v, w)
        if not np.isfinite(core.costs[w]).all():
            core.keep(w, np.isfinite(core.costs[w]))
    core.undo.append(Fixed(v, int(core.original[v][0])))
    core.remove(v)
    return True


def drop_dominated(core: Core, v: int) -> bool:
    """Strategy s goes where some t is never dearer whatever the neighbours do, and never holds more (Goldstein 1994):

    c[t] − c[s] + Σ_edges max_j ( C[t, j] − C[s, j] ) ≤ 0
    """
    size = len(core.costs[v])
    work = size * size + sum(e.matrix.shape[0] * e.matrix.size for e in core.edges[v].values())
    if size < 2 or work > MAX_COMPARED:
        return False
    worse = core.costs[v][:, None] - core.costs[v][None, :]
    for e in core.edges[v].values():
        worse = worse + _most(e.matrix)[e.rows][:, e.rows]
    better = worse <= 0
    np.fill_diagonal(better, False)
    if not better.any():
        return False
    for e in core.edges[v].values():
        for held, _ in e.usages:
            better &= (_most(held) <= 0)[e.rows][:, e.rows]
    at = np.nonzero(better)
    if len(core.memory[v].spans) and len(at[0]):
        held = core.memory[v].bytes
        better[at] = (held[:, at[0]] <= held[:, at[1]]).all(axis=0)
    better &= ~(better.T & (np.arange(size)[:, None] > np.arange(size)[None, :]))  # of two equal ones, the first stays
    dominated = better.any(axis=0)
    if not dominated.any():
        return False
    kept = np.flatnonzero(~dominated)
    name = core.original[v]
    core.replaced.append(
        (v, {int(name[s]): int(name[kept[np.argmax(better[kept, s])]]) for s in np.flatnonzero(dominated)})
    )
    core.keep(v, ~dominated)
    return True


def _most(matrix: Any) -> Any:
    """float64[rows, rows]: max_j (matrix[t, j] − matrix[s, j]) for rows t, s; what s forbids does not count."""
    count, width = matrix.shape
    finite = np.isfinite(matrix)
    whole = bool(finite.all())
    out = np.empty((count, count))
    step = max(1, CHUNK // max(1, count * width))
    zeros = matrix if whole else np.where(finite, matrix, 0.0)
    for at in range(0, count, step):
        worse = matrix[:, None, :] - zeros[None, at : at + step, :]
        if not whole:
            worse[:, ~finite[at : at + step]] = -np.inf
        out[:, at : at + step] = worse.max(axis=2)
    return out


def eliminate(core: Core, v: int) -> bool:
    """A node with at most two neighbours that makes no difference to memory goes; with neighbours u and w it leaves

        cost[u, w][i, j]  +=  min_s ( cost[v][s] + cost[u, v][i, s] + cost[v, w][s, j] )

    (bucket elimination, Dechter 1999), and with one a cost of that neighbour."""
    if len(core.edges[v]) > 2 or not is_free(core, v):
        return False
    neighbours = sorted(core.edges[v].items())
    if not neighbours:
        core.constant += float(core.costs[v].min())
    elif len(neighbours) == 1:
        (u, e) = neighbours[0]
        best = _least(core.costs[v], e.rows, e.matrix.shape[0])
        back = e.turned
        core.costs[u] = core.costs[u] + (back.matrix + best[None, :]).min(axis=1)[back.rows]
    else:
        (u, left), (w, right) = neighbours[0], neighbours[1]
        if left.matrix.shape[1] * right.matrix.shape[1] > MAX_TABLE:
            return False
        join(core, u, w, Edge(left.cols, right.cols, _table(core.costs[v], left, right)))
    undo = tuple((u, _by_original(core, u, e.cols), e.rows, e.matrix.T) for u, e in neighbours)
    core.undo.append(Cheapest(v, core.original[v], core.costs[v], undo))
    for u, _ in neighbours:
        core.cut(v, u)
    core.remove(v)
    return True


def _table(costs: Any, left: Edge, right: Edge) -> Any:
    """float64[columns of left, columns of right]: the cheapest strategy of the node between."""
    keys, of = np.unique(left.rows * right.matrix.shape[0] + right.rows, return_inverse=True)
    best = _least(costs, of, len(keys))
    a = (left.matrix[keys // right.matrix.shape[0]] + best[:, None]).T
    b = right.matrix[keys % right.matrix.shape[0]]
    out = np.empty((len(a), b.shape[1]))
    for i in range(len(a)):
        out[i] = (a[i][:, None] + b).min(axis=0)
    return out


def _least(costs: Any, groups: Any, count: int) -> Any:
    out = np.full(count, np.inf)
    np.minimum.at(out, groups, costs)
    return out


def _by_original(core: Core, u: int, rows: Any) -> Any:
    out = np.full(core.sizes[u], -1, np.int64)
    out[core.original[u]] = rows
    return out
