"""Exact elimination of nodes with at most two neighbours, with the means to undo it.

A node v without memory of its own and with neighbours u and w is replaced by one edge

    cost[u, w][i, j]  +=  min_s ( cost[v][s] + cost[u, v][i, s] + cost[v, w][s, j] )

(bucket elimination, Dechter 1999); a node with one neighbour becomes a node cost of that neighbour. The
optimum of what remains is the optimum of the whole; `Eliminated.restore` finds v's strategy from its neighbours'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.ir.strategy import Problem

MAX_TABLE = 60_000
"""Largest edge that an elimination may make, in grouped entries."""


@dataclass(slots=True)
class Core:
    """A problem being reduced: ``edges[u][v]`` is (groups of u's strategies, groups of v's, matrix), stored in both
    directions."""

    costs: list[Any]
    edges: list[dict[int, tuple[Any, Any, Any]]]
    alive: set[int]
    undo: list[tuple[int, list[tuple[int, Any, Any, Any]]]] = field(default_factory=list)
    constant_s: float = 0.0
    """What eliminated nodes without neighbours cost."""

    def restore(self, choice: dict[int, int]) -> None:
        """Adds the eliminated nodes' strategies to ``choice``, last eliminated first."""
        for v, neighbours in reversed(self.undo):
            total = self.costs[v].copy()
            for u, rows, cols, matrix in neighbours:
                total += matrix[rows[choice[u]]][cols]
            choice[v] = int(np.argmin(total))


def core_of(problem: Problem, allowed: Sequence[Any] | None = None) -> Core:
    """The problem as adjacency, nothing eliminated. Forbidden pairs get a price that no plan is worth, so that sums
    stay finite. ``allowed[v]`` (indices) restricts node v to some of its strategies, renumbered."""
    finite = [
        float(np.max(m[np.isfinite(m)], initial=0.0))
        for m in (*(n.costs_s for n in problem.nodes), *(e.costs_s for e in problem.edges))
    ]
    price = 10.0 * max(sum(finite), 1e-9)
    keep = [slice(None)] * len(problem.nodes) if allowed is None else list(allowed)
    edges: list[dict[int, tuple[Any, Any, Any]]] = [{} for _ in problem.nodes]
    for e in problem.edges:
        matrix = np.where(np.isfinite(e.costs_s), e.costs_s, price)
        rows, cols = e.rows[keep[e.a]], e.cols[keep[e.b]]
        edges[e.a][e.b] = (rows, cols, matrix)
        edges[e.b][e.a] = (cols, rows, matrix.T)
    return Core([n.costs_s[k] for n, k in zip(problem.nodes, keep, strict=True)], edges, set(range(len(problem.nodes))))


def eliminate(core: Core, keep: frozenset[int]) -> None:
    """Eliminates nodes of degree at most 2 that are not in ``keep``, until none is left."""
    queue = sorted(core.alive - keep, key=lambda v: (len(core.edges[v]), len(core.costs[v]), v))
    while queue:
        waiting: set[int] = set()
        for v in queue:
            if v not in core.alive or len(core.edges[v]) > 2:
                continue
            neighbours = sorted(core.edges[v])
            if len(neighbours) == 2 and not _join(core, v, *neighbours):
                continue
            if not neighbours:
                core.constant_s += float(core.costs[v].min())
            if len(neighbours) == 1:
                _fold(core, v, neighbours[0])
            core.undo.append((v, [(u, *core.edges[u][v]) for u in neighbours]))
            for u in neighbours:
                del core.edges[u][v]
                waiting.add(u)
            core.alive.discard(v)
        queue = sorted(waiting & core.alive - keep)


def _fold(core: Core, v: int, u: int) -> None:
    rows, cols, matrix = core.edges[u][v]
    best = _group_min(core.costs[v], cols, matrix.shape[1])
    core.costs[u] = core.costs[u] + (matrix + best[None, :]).min(axis=1)[rows]


def _join(core: Core, v: int, u: int, w: int) -> bool:
    rows_u, cols_u, left = core.edges[u][v]
    rows_w, cols_w, right = core.edges[w][v]
    if left.shape[0] * right.shape[0] > MAX_TABLE:
        return False
    pairs, inverse = np.unique(np.stack([cols_u, cols_w]), axis=1, return_inverse=True)
    best = _group_min(core.costs[v], inverse.ravel(), pairs.shape[1])
    a, b = left[:, pairs[0]] + best[None, :], right[:, pairs[1]]
    table = np.empty((len(a), len(b)))
    for i in range(len(a)):
        table[i] = (a[i][None, :] + b).min(axis=1)
    add_edge(core, u, w, rows_u, rows_w, table)
    return True


def _group_min(costs: Any, groups: Any, count: int) -> Any:
    out = np.full(count, np.inf)
    np.minimum.at(out, groups, costs)
    return out


def add_edge(core: Core, u: int, w: int, rows: Any, cols: Any, table: Any) -> None:
    """Adds a coupling of u and w to the one that is there."""
    if w in core.edges[u]:
        old_rows, old_cols, old = core.edges[u][w]
        row_keys, rows2 = np.unique(np.stack([rows, old_rows]), axis=1, return_inverse=True)
        col_keys, cols2 = np.unique(np.stack([cols, old_cols]), axis=1, return_inverse=True)
        table = table[np.ix_(row_keys[0], col_keys[0])] + old[np.ix_(row_keys[1], col_keys[1])]
        rows, cols = rows2.ravel(), cols2.ravel()
    core.edges[u][w] = (rows, cols, table)
    core.edges[w][u] = (cols, rows, table.T)
