"""Sequential tree-reweighted message passing: lower bounds and good choices, without an LP solver.

TRW-S (Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", PAMI 2006). Messages
reparametrise the problem: with θ_v = cost_v + Σ_u m_(u→v), the cost of any choice x is

    Σ_v θ_v(x_v)  +  Σ_(u,v) ( cost_uv(x_u, x_v) − m_(u→v)(x_v) − m_(v→u)(x_u) )

Each pass visits the nodes in order, forwards then backwards, and shares θ_v out over the edges that lie ahead;
what normalisation takes away in a pass sums to a lower bound on the cost of every choice. When node v is visited,
θ_v(s) − min θ_v is by how much every choice with strategy s exceeds the bound at least (`Passing.excess`).

Everything is in flat arrays. Large problems are passed over by numba where it is installed, others, and all where it is
not, by numpy, node by node; both give the same up to rounding.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

from autopar.intra_op.reduce.core import Core

COMPILED_EDGES = 50
"""From so many edges on numba pays its import (measured: 0.3 s a process, and 5 s of compiling once an installation; a
pass of numpy takes 12 µs an edge and direction, and a step's layers some hundred passes)."""
COMPILED_VISITS = 15_000
"""After so many edges passed, numba takes over (measured: by then 0.2 s of numpy; some layers took it up to 4 s)."""


class Passing:
    """Messages on the live part of a Core; ``nodes`` in order of their ids. Choices are int64[nodes] in that order.
    ``compiled``: True passes by numba from the start, False never; None decides by the number of edges."""

    def __init__(self, core: Core, compiled: bool | None = None) -> None:
        self.nodes = sorted(core.alive)
        place = {v: k for k, v in enumerate(self.nodes)}
        self.edges = [(v, w) for v in self.nodes for w in sorted(core.edges[v]) if place[v] < place[w]]
        installed = importlib.util.find_spec("numba") is not None
        self.compiled = len(self.edges) >= COMPILED_EDGES and installed if compiled is None else compiled
        self._visits = COMPILED_VISITS if installed and compiled is None else -1
        """Edges that numpy passes before numba goes on; negative: all."""
        sizes = np.array([len(core.costs[v]) for v in self.nodes], np.int64)
        self.at = _offsets(sizes)
        self.free_costs = np.concatenate([core.costs[v] for v in self.nodes]) if self.nodes else np.zeros(0)
        self.costs = self.free_costs
        self.ends = np.array([(place[v], place[w]) for v, w in self.edges], np.int64).reshape(-1, 2)
        found = [core.edges[v][w] for v, w in self.edges]
        self.shapes = np.array([e.matrix.shape for e in found], np.int64).reshape(-1, 2)
        self.free_matrix, self.free_at = _stored(found)
        """Edges' own costs, equal ones stored once, and where each edge's are."""
        self.matrix, self.matrix_at = self.free_matrix, self.free_at
        """The same with prices: what edges pay is behind the rest."""
        self._priced: set[int] = set()
        self._stale: set[int] = set()
        groups = [g for e in found for g in (e.rows, e.cols)]
        self.groups = np.concatenate(groups).astype(np.int64) if groups else np.zeros(0, np.int64)
        self.groups_at = _offsets([len(g) for g in groups])
        self.messages_at = _offsets(self.shapes.ravel())
        self.messages = np.zeros(int(self.messages_at[-1]))
        half = self.ends.T.ravel()
        code = np.concatenate([2 * np.arange(len(found)), 2 * np.arange(len(found)) + 1])
        by_node = np.argsort(half, kind="stable")
        self.halves = code[by_node].astype(np.int64)
        """Node by node: twice an edge's number, plus one where the node is its second end."""
        self.halves_at = np.searchsorted(half[by_node], np.arange(len(self.nodes) + 1)).astype(np.int64)
        ahead = np.bincount(self.ends[:, 0], minlength=len(self.nodes))
        behind = np.bincount(self.ends[:, 1], minlength=len(self.nodes))
        self.share = 1.0 / np.maximum(1, np.maximum(ahead, behind))
        self.excess = np.zeros(len(self.costs))
        self._views: list[Any] | None = None
        self._dearest: float | None = None

    @property
    def graph(self) -> Any:
        """The arrays that say how nodes and edges lie in the flat arrays, as the kernels take them."""
        return (
            self.at, self.ends, self.shapes, self.matrix_at, self.groups, self.groups_at, self.messages_at, self.halves,
            self.halves_at,
        )  # fmt: skip

    def sweep(self, forwards: bool) -> float:
        """One pass; returns the bound that it gives."""
        if self.compiled:
            from autopar.intra_op.solvers import kernels

            return float(
                kernels.sweep(forwards, self.costs, self.matrix, self.messages, self.share, self.excess, *self.graph)
            )
        self._visits -= len(self.edges)
        self.compiled = self._visits + len(self.edges) >= 0 > self._visits
        return self._swept(forwards)

    def both(self, times: int = 1) -> float:
        """Passes forwards and backwards; returns the best bound."""
        return max(max(self.sweep(True), self.sweep(False)) for _ in range(times))

    def _swept(self, forwards: bool) -> float:
        bound = 0.0
        for v in range(len(self.nodes)) if forwards else reversed(range(len(self.nodes))):
            theta = self.costs[self.at[v] : self.at[v + 1]].copy()
            mine = self._halves()[v]
            for h in mine:
                theta += h.incoming[h.groups]
            low = theta.min()
            bound += low
            theta -= low
            self.excess[self.at[v] : self.at[v + 1]] = theta
            theta *= self.share[v]
            for h in mine:
                if h.first == forwards:
                    message = ((h.folded(theta) - h.incoming)[:, None] + h.matrix).min(axis=0)
                    low = message.min()
                    bound += low
                    h.outgoing[:] = message - low
        return float(bound)

    def _halves(self) -> list[list[_Half]]:
        if self._views is None:
            self._views = [
                [_Half(self, int(h)) for h in self.halves[a:b]]
                for a, b in zip(self.halves_at[:-1], self.halves_at[1:], strict=True)
            ]
        elif self._stale:
            for e in self._stale:
                for v in self.ends[e]:
                    for h in self._views[v]:
                        if h.edge == e:
                            h.look(self)
        self._stale = set()
        return self._views

    def price(self, costs: Any, more: Mapping[int, Any]) -> None:
        """Goes on with other costs (float64[strategies of all nodes]) and with ``more`` (float64[cells]) on top of some
        edges' own; messages stay."""
        self.costs = costs
        if not more and self.matrix is self.free_matrix:
            return
        if self._views is not None:
            self._stale |= set(more) | self._priced
        self._priced = set(more)
        self.matrix_at = self.free_at.copy()
        parts, total = [self.free_matrix], len(self.free_matrix)
        for e, extra in more.items():
            at, size = self.free_at[e], len(extra)
            parts.append(self.free_matrix[at : at + size] + extra)
            self.matrix_at[e] = total
            total += size
        self.matrix = np.concatenate(parts) if more else self.free_matrix

    def decode(self, polish: int = 10) -> Any:
        """int64[nodes]: a choice made node by node: what is decided counts as it is, the rest by its message; then
        improved a node at a time, at most ``polish`` times (iterated conditional modes, Besag 1986)."""
        choice, decided = np.zeros(len(self.nodes), np.int64), np.zeros(len(self.nodes), np.bool_)
        for _ in range(1 + polish):
            if not self._decided(choice, decided):
                break
        return choice

    def improve(self, choice: Any, polish: int = 10) -> Any:
        """int64[nodes]: ``choice`` improved a node at a time, at the present prices, at most ``polish`` times."""
        choice = choice.copy()
        decided = np.ones(len(self.nodes), np.bool_)
        for _ in range(polish):
            if not self._decided(choice, decided):
                break
        return choice

    def _decided(self, choice: Any, decided: Any) -> int:
        if self.compiled:
            from autopar.intra_op.solvers import kernels

            return int(kernels.decode(choice, decided, self.costs, self.matrix, self.messages, *self.graph))
        changed = 0
        for v, mine in enumerate(self._halves()):
            theta = self.costs[self.at[v] : self.at[v + 1]].copy()
            for h in mine:
                theta += (h.matrix[:, h.others[choice[h.w]]] if decided[h.w] else h.incoming)[h.groups]
            best = int(np.argmin(theta))
            if decided[v] and theta[best] >= theta[choice[v]]:
                best = int(choice[v])
            changed += not decided[v] or best != choice[v]
            choice[v], decided[v] = best, True
        return changed

    def pair_excess(self, e: int) -> Any:
        """float64[rows, cols]: up to a constant, by how much every choice with such a pair on edge e exceeds the bound
        at least: what the pair costs beside its messages, and its ends' shares of their excess."""
        rows, cols = self.shapes[e]
        matrix = self.matrix[self.matrix_at[e] : self.matrix_at[e] + rows * cols].reshape(rows, cols)
        ends = []
        for h, v in ((2 * e, self.ends[e, 0]), (2 * e + 1, self.ends[e, 1])):
            least = np.full(self.shapes[e, h % 2], np.inf)
            groups = self.groups[self.groups_at[h] : self.groups_at[h + 1]]
            np.minimum.at(least, groups, self.share[v] * self.excess[self.at[v] : self.at[v + 1]])
            ends.append(least - self.messages[self.messages_at[h] : self.messages_at[h + 1]])
        return ends[0][:, None] + matrix + ends[1][None, :]

    def cost(self, choice: Any, free: bool = False) -> float:
        """What a choice costs with prices, or ``free`` of them; inf where it is forbidden."""
        matrix, matrix_at = (self.free_matrix, self.free_at) if free else (self.matrix, self.matrix_at)
        total = float((self.free_costs if free else self.costs)[self.at[:-1] + choice].sum())
        if not len(self.ends):
            return total
        rows = self.groups[self.groups_at[:-1:2] + choice[self.ends[:, 0]]]
        cols = self.groups[self.groups_at[1::2] + choice[self.ends[:, 1]]]
        return total + float(matrix[matrix_at + rows * self.shapes[:, 1] + cols].sum())

    def dearest(self) -> float:
        """An upper bound on what any allowed choice costs without prices."""
        if self._dearest is None:
            nodes = np.maximum.reduceat(self.free_costs, self.at[:-1]).sum() if self.nodes else 0.0
            cells = np.where(np.isfinite(self.free_matrix), self.free_matrix, -np.inf)
            starts, of = np.unique(self.free_at, return_inverse=True)
            edges = np.maximum.reduceat(cells, starts)[of].sum() if len(starts) else 0.0
            self._dearest = float(nodes + edges)
        return self._dearest


class _Half:
    """One end of an edge, for numpy: ``incoming`` and ``outgoing`` are views of the messages, ``matrix`` has this end's
    rows."""

    __slots__ = ("edge", "first", "groups", "incoming", "matrix", "order", "others", "outgoing", "starts", "w")

    def __init__(self, all_: Passing, h: int) -> None:
        e, self.first = h // 2, h % 2 == 0
        self.edge = e
        other = h + 1 if self.first else h - 1
        self.w = int(all_.ends[e, 1 if self.first else 0])
        self.groups = all_.groups[all_.groups_at[h] : all_.groups_at[h + 1]]
        self.others = all_.groups[all_.groups_at[other] : all_.groups_at[other + 1]]
        self.incoming = all_.messages[all_.messages_at[h] : all_.messages_at[h + 1]]
        self.outgoing = all_.messages[all_.messages_at[other] : all_.messages_at[other + 1]]
        self.order = np.argsort(self.groups, kind="stable")
        self.starts = np.searchsorted(self.groups[self.order], np.arange(len(self.incoming)))
        self.look(all_)

    def look(self, all_: Passing) -> None:
        """Takes the edge's costs as they are now."""
        shape, at = all_.shapes[self.edge], all_.matrix_at[self.edge]
        matrix = all_.matrix[at : at + shape[0] * shape[1]].reshape(shape)
        self.matrix = matrix if self.first else np.ascontiguousarray(matrix.T)

    def folded(self, theta: Any) -> Any:
        """float64[groups]: the least of each group's strategies."""
        return np.minimum.reduceat(theta[self.order], self.starts)


def _offsets(sizes: Any) -> Any:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _stored(edges: list[Any]) -> tuple[Any, Any]:
    """Matrices in one array and where each starts. Equal ones are stored once: equal layers have equal edges."""
    places: dict[Any, int] = {}
    parts: list[Any] = []
    at, total = [], 0
    for e in edges:
        flat = np.ascontiguousarray(e.matrix).ravel()
        key = (e.matrix.shape, flat.tobytes())
        if key not in places:
            places[key] = total
            at.append(total)
            parts.append(flat)
            total += flat.size
        else:
            at.append(places[key])
    return (np.concatenate(parts) if parts else np.zeros(0)), np.array(at, np.int64)
