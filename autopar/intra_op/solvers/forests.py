r"""Search by forests: a random half of the nodes and more are chosen anew at once, exactly, at prices on memory.

A set of nodes whose induced graph is a forest can be chosen at best beside the choices of the others by dynamic
programming (tree-structured blocks: Hamze and de Freitas, "From fields to trees", UAI 2004). Nodes join one by one in
random order where they close no cycle; in sparse problems most do. Memory counts through prices λ_t on bytes:

    cost  +  Σ_t λ_t live_t

``wander`` moves the prices after every forest along the violation, by a step as long as Polyak's rule says,

    λ_t  ←  max(0, λ_t + a |cost| / ‖g‖² · g_t / limit)        g_t = live_t / limit − 1

and so goes from one choice to the next on both sides of the limit; ``polish`` only takes what fits and is cheaper,
makes bytes dearer where a trial exceeded the limit, and else all a little cheaper.
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import numpy as np

from autopar.intra_op.solvers.prices import Pricing

FIRST_STEP, LAST_STEP = 0.003, 0.001
"""a of ``wander`` (measured on contest instances: 0.01 to 0.001 are alike)."""
DEARER, CHEAPER = 1e-5, 0.99
"""a, and the factor, of ``polish`` (measured on contest instances: 1e-4 to 1e-6 are alike)."""
WANDER, POLISH = 500, 250
"""Forests of a walk (guessed: by then few gain)."""


class Forests:
    """A search on the core of ``pricing``, whose costs it sets; choices are int64[nodes] in its ledger's order, prices
    float64[times], cost per byte. ``rng`` is a numpy Generator."""

    def __init__(self, pricing: Pricing, rng: Any) -> None:
        self.pricing, self.rng = pricing, rng
        self.compiled = importlib.util.find_spec("numba") is not None

    def walk(self, choice: Any, prices: Any, deadline: float) -> tuple[Any, Any]:
        """(the best choice found that fits, None where none was; its prices), from any choice."""
        best, prices = self.wander(choice, prices, WANDER, deadline)
        return (None, prices) if best is None else (self.polish(best, prices, POLISH, deadline), prices)

    def wander(self, choice: Any, prices: Any, steps: int, deadline: float) -> tuple[Any, Any]:
        """(the best choice on the way that fits, None where none does; its prices)."""
        pricing, ledger = self.pricing, self.pricing.ledger
        choice, prices = choice.copy(), prices.copy()
        best, best_cost, best_prices = None, np.inf, prices
        length = FIRST_STEP
        for _ in range(steps):
            if time.perf_counter() > deadline:
                break
            self.rechoose(choice, prices)
            cost, excess = pricing.cost(choice), ledger.live(choice) / ledger.limit - 1
            if excess.max(initial=-1.0) <= 0 and cost < best_cost:
                best, best_cost, best_prices = choice.copy(), cost, prices
            direction = np.where((excess < 0) & (prices <= 0), 0.0, excess)
            norm = float((direction * direction).sum())
            if norm > 0:
                prices = np.maximum(0.0, prices + length * abs(cost) / norm * direction / ledger.limit)
            length *= (LAST_STEP / FIRST_STEP) ** (1 / steps)
        return best, best_prices

    def polish(self, choice: Any, prices: Any, steps: int, deadline: float) -> Any:
        """A choice that fits, made cheaper by at most ``steps`` forests."""
        pricing, ledger = self.pricing, self.pricing.ledger
        best, cost = choice, pricing.cost(choice)
        for _ in range(steps):
            if time.perf_counter() > deadline:
                break
            trial = best.copy()
            self.rechoose(trial, prices)
            excess = np.maximum(0.0, ledger.live(trial) / ledger.limit - 1)
            norm = float((excess * excess).sum())
            if norm > 0:
                prices = prices + DEARER * abs(cost) / norm * excess / ledger.limit
                continue
            prices = CHEAPER * prices
            now = pricing.cost(trial)
            if now <= cost:  # equal ones too: they lead elsewhere
                best, cost = trial, now
        return best

    def rechoose(self, choice: Any, prices: Any) -> None:
        """Chooses the nodes of a random forest anew, in place."""
        self.pricing.charge(prices)
        passing = self.pricing.passing
        order = self.rng.permutation(len(choice))
        if self.compiled:
            from autopar.intra_op.solvers import forest_kernels

            forest_kernels.choose_forest(
                choice, order, passing.costs, passing.matrix, passing.at, passing.ends, passing.shapes,
                passing.matrix_at, passing.groups, passing.groups_at, passing.halves, passing.halves_at,
            )  # fmt: skip
        else:
            _choose_forest(choice, order, passing)


def _choose_forest(choice: Any, order: Any, passing: Any) -> None:
    """The same as the compiled one, node by node."""
    inside = _planted(order, passing)
    theta = [passing.costs[a:b].copy() for a, b in zip(passing.at[:-1], passing.at[1:], strict=True)]
    above: dict[int, tuple[int, int]] = {}
    sequence: list[int] = []
    for first in order.tolist():
        if first not in inside or first in above:
            continue
        above[first] = (-1, -1)
        stack = [first]
        while stack:
            v = stack.pop()
            sequence.append(v)
            for h, w in _halves(passing, v):
                if w not in inside:
                    theta[v] += _chosen(passing, h, choice[w])
                elif w not in above:
                    above[w] = (h ^ 1, v)
                    stack.append(w)
    for v in reversed(sequence):  # leaves first: what a subtree costs beside each of its parent's strategies
        h, w = above[v]
        if w >= 0:
            mine, other, matrix = _seen(passing, h)
            inner = np.full(len(matrix), np.inf)
            np.minimum.at(inner, mine, theta[v])
            theta[w] += (inner[:, None] + matrix).min(axis=0)[other]
    for v in sequence:  # roots first: each beside its parent's choice
        h, w = above[v]
        total = theta[v] if w < 0 else theta[v] + _chosen(passing, h, choice[w])
        best = int(np.argmin(total))
        if total[best] < total[choice[v]]:
            choice[v] = best


def _planted(order: Any, passing: Any) -> set[int]:
    """The nodes that join an induced forest, asked one by one."""
    tree: dict[int, list[int]] = {}
    for v in order.tolist():
        near = [tree[w] for _, w in _halves(passing, v) if w in tree]
        if len({id(t) for t in near}) == len(near):
            whole = [v, *(u for t in near for u in t)]
            tree.update(dict.fromkeys(whole, whole))
    return set(tree)


def _halves(passing: Any, v: int) -> list[tuple[int, int]]:
    """(half, other end) of the edges of v."""
    mine = passing.halves[passing.halves_at[v] : passing.halves_at[v + 1]]
    return list(zip(mine.tolist(), passing.ends[mine // 2, 1 - mine % 2].tolist(), strict=True))


def _seen(passing: Any, h: int) -> tuple[Any, Any, Any]:
    """(groups of half h's end, of the other, the matrix with this end's rows)."""
    e = h // 2
    rows, cols = passing.shapes[e]
    matrix = passing.matrix[passing.matrix_at[e] : passing.matrix_at[e] + rows * cols].reshape(rows, cols)
    mine = passing.groups[passing.groups_at[h] : passing.groups_at[h + 1]]
    other = passing.groups[passing.groups_at[h ^ 1] : passing.groups_at[(h ^ 1) + 1]]
    return mine, other, matrix.T if h % 2 else matrix


def _chosen(passing: Any, h: int, strategy: int) -> Any:
    """float64[strategies of half h's end]: what they cost beside the other end's ``strategy``."""
    mine, other, matrix = _seen(passing, h)
    return matrix[:, other[strategy]][mine]
