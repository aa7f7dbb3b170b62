"""The choice of a forest's nodes over flat arrays, compiled by numba.

Imported only where numba is installed (``pip install 'autopar[solver]'``); `forests` does the same with numpy. Arrays
are those of `Passing.graph`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def root(parent: Any, v: Any) -> Any:
    """The root of v's tree (union-find, paths halved); ``parent`` int64[nodes]."""
    while parent[v] != v:
        parent[v] = parent[parent[v]]
        v = parent[v]
    return v


@njit(cache=True, nogil=True)
def plant(order: Any, ends: Any, halves: Any, halves_at: Any) -> Any:
    """bool[nodes]: those that joined an induced forest, asked one by one in ``order``."""
    count = len(order)
    inside = np.zeros(count, np.bool_)
    parent = np.arange(count)
    seen = np.full(count, -1, np.int64)
    for v in order:
        joins = True
        for k in range(halves_at[v], halves_at[v + 1]):
            w = ends[halves[k] // 2, 1 - halves[k] % 2]
            if inside[w]:
                tree = root(parent, w)
                if seen[tree] == v:
                    joins = False
                    break
                seen[tree] = v
        if not joins:
            continue
        inside[v] = True
        for k in range(halves_at[v], halves_at[v + 1]):
            w = ends[halves[k] // 2, 1 - halves[k] % 2]
            if inside[w]:
                parent[root(parent, w)] = v
    return inside


@njit(cache=True, nogil=True)
def add_chosen(
    h: Any, strategy: Any, theta: Any, count: Any, matrix: Any, shapes: Any, matrix_at: Any, groups: Any, groups_at: Any
) -> None:
    """Adds to ``theta`` what the other end's ``strategy`` costs each of the ``count`` strategies of half h's end."""
    e, mine, other = h // 2, groups_at[h], groups_at[h + 1 - 2 * (h % 2)]
    if h % 2 == 0:
        cell, step = matrix_at[e] + groups[other + strategy], shapes[e, 1]
    else:
        cell, step = matrix_at[e] + groups[other + strategy] * shapes[e, 1], 1
    for s in range(count):
        theta[s] += matrix[cell + groups[mine + s] * step]


@njit(cache=True, nogil=True)
def choose_forest(
    choice: Any, order: Any, costs: Any, matrix: Any, at: Any, ends: Any, shapes: Any, matrix_at: Any, groups: Any,
    groups_at: Any, halves: Any, halves_at: Any,
) -> Any:  # fmt: skip
    """Chooses a forest's nodes anew, in place, the best there is beside the others' choices."""
    count = len(at) - 1
    inside = plant(order, ends, halves, halves_at)
    theta = costs.copy()
    for v in range(count):
        if inside[v]:
            for k in range(halves_at[v], halves_at[v + 1]):
                w = ends[halves[k] // 2, 1 - halves[k] % 2]
                if not inside[w]:
                    add_chosen(
                        halves[k], choice[w], theta[at[v] :], at[v + 1] - at[v], matrix, shapes, matrix_at, groups,
                        groups_at,
                    )  # fmt: skip
    above = np.full(count, -1, np.int64)  # half of each node on the edge to its parent
    sequence, stack, seen = np.empty(count, np.int64), np.empty(count, np.int64), np.zeros(count, np.bool_)
    done = 0
    for first in order:
        if not inside[first] or seen[first]:
            continue
        stack[0], height, seen[first] = first, 1, True
        while height:
            height -= 1
            v = stack[height]
            sequence[done] = v
            done += 1
            for k in range(halves_at[v], halves_at[v + 1]):
                h = halves[k]
                w = ends[h // 2, 1 - h % 2]
                if inside[w] and not seen[w]:
                    seen[w], above[w] = True, h + 1 - 2 * (h % 2)
                    stack[height] = w
                    height += 1
    biggest = 1
    for e in range(len(shapes)):
        biggest = max(biggest, shapes[e, 0], shapes[e, 1])
    inner, outer = np.empty(biggest), np.empty(biggest)
    for n in range(done - 1, -1, -1):  # leaves first: what a subtree costs beside each of its parent's strategies
        v = sequence[n]
        h = above[v]
        if h < 0:
            continue
        e, side = h // 2, h % 2
        rows, cols = shapes[e, 0], shapes[e, 1]
        mine, other = (cols, rows) if side else (rows, cols)
        inner[:mine] = np.inf
        for s in range(at[v + 1] - at[v]):
            g = groups[groups_at[h] + s]
            inner[g] = min(inner[g], theta[at[v] + s])
        outer[:other] = np.inf
        base = matrix_at[e]
        if side == 0:
            for g in range(rows):
                value = inner[g]
                for j in range(cols):
                    total = value + matrix[base + g * cols + j]
                    outer[j] = min(outer[j], total)
        else:
            for j in range(rows):
                best = np.inf
                for g in range(cols):
                    best = min(best, inner[g] + matrix[base + j * cols + g])
                outer[j] = best
        w = ends[e, 1 - side]
        back = groups_at[h + 1 - 2 * side]
        for s in range(at[w + 1] - at[w]):
            theta[at[w] + s] += outer[groups[back + s]]
    for n in range(done):  # roots first: each beside its parent's choice
        v = sequence[n]
        size = at[v + 1] - at[v]
        mine_theta = theta[at[v] : at[v + 1]]
        if above[v] >= 0:
            w = ends[above[v] // 2, 1 - above[v] % 2]
            add_chosen(above[v], choice[w], mine_theta, size, matrix, shapes, matrix_at, groups, groups_at)
        best_s = choice[v]
        for s in range(size):
            if mine_theta[s] < mine_theta[best_s]:
                best_s = s
        choice[v] = best_s
