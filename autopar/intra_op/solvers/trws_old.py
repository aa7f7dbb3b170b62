"""Sequential tree-reweighted message passing: a lower bound and good choices, without an LP solver.

TRW-S (Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", PAMI 2006). Messages
reparametrise the problem: with θ_v = cost_v + Σ_u m_(u→v), the cost of any choice x is

    Σ_v θ_v(x_v)  +  Σ_(u,v) ( cost_uv(x_u, x_v) − m_(u→v)(x_v) − m_(v→u)(x_u) )

Each pass visits the nodes in order, forwards then backwards, and shares θ_v out over the edges that lie ahead;
what normalisation takes away in a backward pass sums to a lower bound on the cost of every choice.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from autopar.intra_op.simplify import Core


class _Half:
    """One direction of an edge, v → w: ``to_groups`` folds a vector over v's strategies to the edge's rows.
    ``incoming`` and ``outgoing`` are the places of the messages w → v and v → w in `Messages.sent`."""

    __slots__ = ("cols", "incoming", "matrix", "order", "outgoing", "rows", "starts", "w")

    def __init__(self, w: int, rows: Any, cols: Any, matrix: Any, incoming: int, outgoing: int) -> None:
        self.w, self.rows, self.cols, self.matrix = w, rows, cols, matrix
        self.incoming, self.outgoing = incoming, outgoing
        self.order = np.argsort(rows, kind="stable")
        self.starts = np.searchsorted(rows[self.order], np.arange(matrix.shape[0]))

    def to_groups(self, x: Any) -> Any:
        return np.minimum.reduceat(x[self.order], self.starts)


class Messages:
    """The state of message passing on the live part of a Core."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.nodes = sorted(core.alive)
        self.place = {v: k for k, v in enumerate(self.nodes)}
        self.costs = {v: core.costs[v] for v in self.nodes}
        self.halves: dict[int, list[_Half]] = {v: [] for v in self.nodes}
        self.sent: list[Any] = []
        """Messages, each over the receiver's groups."""
        self.used: list[tuple[int, int, _Half, _Half, Any]] = []
        """(v, w, both halves, the groups that occur) of every edge."""
        for v in self.nodes:
            for w, (rows, cols, matrix) in sorted(core.edges[v].items()):
                if v < w:
                    used_rows, r = np.unique(rows, return_inverse=True)
                    used_cols, c = np.unique(cols, return_inverse=True)
                    part = np.ascontiguousarray(matrix[np.ix_(used_rows, used_cols)])
                    to_v, to_w = len(self.sent), len(self.sent) + 1
                    self.sent += [np.zeros(len(used_rows)), np.zeros(len(used_cols))]
                    there = _Half(w, r.ravel(), c.ravel(), part, to_v, to_w)
                    back = _Half(v, c.ravel(), r.ravel(), part.T.copy(), to_w, to_v)
                    self.used.append((v, w, there, back, np.ix_(used_rows, used_cols)))
                    self.halves[v].append(there)
                    self.halves[w].append(back)
        self.share = {}
        for v in self.nodes:
            ahead = sum(h.w > v for h in self.halves[v])
            self.share[v] = 1.0 / max(1, ahead, len(self.halves[v]) - ahead)

    def use(self, core: Core) -> None:
        """Goes on with other costs of the same nodes and edges; messages stay."""
        for v in self.nodes:
            self.costs[v] = core.costs[v]
        for v, w, there, back, groups in self.used:
            matrix = core.edges[v][w][2]
            if matrix is not self.core.edges[v][w][2]:
                there.matrix = np.ascontiguousarray(matrix[groups])
                back.matrix = there.matrix.T.copy()
        self.core = core

    def theta(self, v: int) -> Any:
        """float64[strategies of v]: its cost and all messages to it."""
        total = self.costs[v].copy()
        for h in self.halves[v]:
            total += self.sent[h.incoming][h.rows]
        return total

    def sweep(self, forwards: bool) -> float:
        """One pass; returns the bound that a backward pass gives."""
        bound = 0.0
        for v in self.nodes if forwards else reversed(self.nodes):
            theta = self.theta(v)
            low = theta.min()
            bound += low
            theta = (theta - low) * self.share[v]
            for h in self.halves[v]:
                if (h.w > v) == forwards:
                    message = ((h.to_groups(theta) - self.sent[h.incoming])[:, None] + h.matrix).min(axis=0)
                    low = message.min()
                    bound += low
                    self.sent[h.outgoing] = message - low
        return float(bound)

    def decode(self) -> dict[int, int]:
        """A choice made node by node in order: what is decided counts as it is, what is not by its message."""
        choice: dict[int, int] = {}
        for v in self.nodes:
            total = self.costs[v].copy()
            for h in self.halves[v]:
                total += self._term(h, choice)
            choice[v] = int(np.argmin(total))
        return choice

    def _term(self, h: _Half, choice: dict[int, int]) -> Any:
        if h.w in choice:
            return h.matrix[:, h.cols[choice[h.w]]][h.rows]
        return self.sent[h.incoming][h.rows]


def solve_trws(
    core: Core, deadline: float, max_passes: int = 200, gap: float = 1e-4
) -> tuple[dict[int, int], float, Messages]:
    """Passes until the gap closes, progress stops or time is up; returns (best choice, bound, messages)."""
    messages = Messages(core)
    best: dict[int, int] = {}
    best_cost, bound, stalled = np.inf, -np.inf, 0
    for n in range(max_passes):
        messages.sweep(True)
        now = messages.sweep(False)
        if n % 4 == 0 or n == max_passes - 1:
            choice = messages.decode()
            improve(core, choice)
            cost = core_cost(core, choice)
            if cost < best_cost:
                best, best_cost = choice, cost
        stalled = stalled + 1 if now <= bound + 1e-5 * abs(bound) else 0
        bound = max(bound, now)
        if best_cost - bound <= gap * best_cost or stalled >= 8 or time.perf_counter() > deadline:
            break
    return best, bound, messages


def core_cost(core: Core, choice: dict[int, int]) -> float:
    """Seconds of a choice of the live nodes."""
    total = sum(float(core.costs[v][choice[v]]) for v in core.alive)
    for v in core.alive:
        for w, (rows, cols, matrix) in core.edges[v].items():
            if v < w:
                total += float(matrix[rows[choice[v]], cols[choice[w]]])
    return total


def local_costs(core: Core, costs: Any, choice: dict[int, int], v: int) -> Any:
    """float64[strategies of v]: what each costs with v's neighbours as they are in ``choice``."""
    total = costs[v].copy()
    for w, (rows, cols, matrix) in core.edges[v].items():
        total += matrix[:, cols[choice[w]]][rows]
    return total


def improve(core: Core, choice: dict[int, int], costs: Any = None, sweeps: int = 6) -> None:
    """Improves a choice of the live nodes one node at a time, in place (iterated conditional modes, Besag 1986)."""
    costs = core.costs if costs is None else costs
    for _ in range(sweeps):
        changed = False
        for v in sorted(core.alive):
            total = local_costs(core, costs, choice, v)
            best = int(np.argmin(total))
            if total[best] < total[choice[v]] * (1 - 1e-12):
                choice[v], changed = best, True
        if not changed:
            return
