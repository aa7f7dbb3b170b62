"""The loops of message passing over flat arrays, compiled by numba.

Imported only where numba is installed (``pip install 'autopar[solver]'``); `passing` says what the arrays are, and does
the same with numpy. Arguments of all: float64 costs of nodes and of edges, then the arrays of `Passing.graph`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

_N, _X = types.int64[::1], types.float64[::1]
_PAIRS = types.int64[:, ::1]
_GRAPH = (_N, _PAIRS, _PAIRS, *[_N] * 6)
"""Types are given so that what imports this has it compiled: a process that others are forked from does that once."""


@njit(types.float64(types.boolean, *[_X] * 5, *_GRAPH), cache=True, nogil=True)
def sweep(
    forwards: Any, costs: Any, matrix: Any, messages: Any, share: Any, excess: Any,
    at: Any, ends: Any, shapes: Any, matrix_at: Any, groups: Any, groups_at: Any, messages_at: Any, halves: Any,
    halves_at: Any,
) -> Any:  # fmt: skip
    """One pass, of ``messages`` and ``excess`` in place; returns its bound."""
    bound = 0.0
    count = len(at) - 1
    widest = 1
    for v in range(count):
        widest = max(widest, at[v + 1] - at[v])
    theta = np.empty(widest)
    biggest = 1
    for e in range(len(shapes)):
        biggest = max(biggest, shapes[e, 0], shapes[e, 1])
    inner, outer = np.empty(biggest), np.empty(biggest)
    for n in range(count):
        v = n if forwards else count - 1 - n
        size = at[v + 1] - at[v]
        for s in range(size):
            theta[s] = costs[at[v] + s]
        for k in range(halves_at[v], halves_at[v + 1]):
            h = halves[k]
            for s in range(size):
                theta[s] += messages[messages_at[h] + groups[groups_at[h] + s]]
        low = np.inf
        for s in range(size):
            low = min(low, theta[s])
        bound += low
        for s in range(size):
            theta[s] -= low
            excess[at[v] + s] = theta[s]
        for k in range(halves_at[v], halves_at[v + 1]):
            h = halves[k]
            first = h % 2 == 0
            if first != forwards:
                continue
            e = h // 2
            rows, cols = shapes[e, 0], shapes[e, 1]
            mine, other = (rows, cols) if first else (cols, rows)
            out = messages_at[h + 1] if first else messages_at[h - 1]
            for g in range(mine):
                inner[g] = np.inf
            for s in range(size):
                g = groups[groups_at[h] + s]
                inner[g] = min(inner[g], share[v] * theta[s])
            for g in range(mine):
                inner[g] -= messages[messages_at[h] + g]
            for j in range(other):
                outer[j] = np.inf
            base = matrix_at[e]
            if first:
                for g in range(mine):
                    value = inner[g]
                    for j in range(cols):
                        total = value + matrix[base + g * cols + j]
                        outer[j] = min(outer[j], total)
            else:
                for j in range(other):
                    best = np.inf
                    for g in range(cols):
                        best = min(best, inner[g] + matrix[base + j * cols + g])
                    outer[j] = best
            lowest = np.inf
            for j in range(other):
                lowest = min(lowest, outer[j])
            bound += lowest
            for j in range(other):
                messages[out + j] = outer[j] - lowest
    return bound


@njit(_X(types.int64, _N, types.boolean[::1], *[_X] * 3, *_GRAPH), cache=True, nogil=True)
def local_costs(
    v: Any, choice: Any, decided: Any, costs: Any, matrix: Any, messages: Any,
    at: Any, ends: Any, shapes: Any, matrix_at: Any, groups: Any, groups_at: Any, messages_at: Any, halves: Any,
    halves_at: Any,
) -> Any:  # fmt: skip
    """float64[strategies of v]: costs beside those neighbours that are decided, messages of the others."""
    theta = costs[at[v] : at[v + 1]].copy()
    for k in range(halves_at[v], halves_at[v + 1]):
        h = halves[k]
        e = h // 2
        first = h % 2 == 0
        w = ends[e, 1] if first else ends[e, 0]
        mine = groups_at[h]
        if not decided[w]:
            for s in range(len(theta)):
                theta[s] += messages[messages_at[h] + groups[mine + s]]
        elif first:
            cell = matrix_at[e] + groups[groups_at[h + 1] + choice[w]]
            for s in range(len(theta)):
                theta[s] += matrix[cell + groups[mine + s] * shapes[e, 1]]
        else:
            cell = matrix_at[e] + groups[groups_at[h - 1] + choice[w]] * shapes[e, 1]
            for s in range(len(theta)):
                theta[s] += matrix[cell + groups[mine + s]]
    return theta


@njit(types.int64(_N, types.boolean[::1], *[_X] * 3, *_GRAPH), cache=True, nogil=True)
def decode(
    choice: Any, decided: Any, costs: Any, matrix: Any, messages: Any,
    at: Any, ends: Any, shapes: Any, matrix_at: Any, groups: Any, groups_at: Any, messages_at: Any, halves: Any,
    halves_at: Any,
) -> Any:  # fmt: skip
    """Chooses node by node, in place; returns how many choices changed."""
    changed = 0
    for v in range(len(at) - 1):
        theta = local_costs(
            v, choice, decided, costs, matrix, messages, at, ends, shapes, matrix_at, groups, groups_at, messages_at,
            halves, halves_at,
        )  # fmt: skip
        best = choice[v] if decided[v] else 0
        for s in range(len(theta)):
            if theta[s] < theta[best]:
                best = s
        if not decided[v] or best != choice[v]:
            changed += 1
        choice[v] = best
        decided[v] = True
    return changed
