"""A problem being reduced: what is left of it, and how to get a choice of the whole back from a choice of the rest.

Strategies that are removed disappear from all arrays of their node; ``original`` says which ones the rest are. A node
that is removed leaves a step on the undo stack, in terms of original strategies, so that the order of reductions is
free (`Core.restore`). Costs stay floats: reductions change the cost of a choice by no more than their rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from autopar.ir.strategy import Problem


class Edge(NamedTuple):
    """Seen from node u to node v: strategies i and j cost ``matrix[rows[i], cols[j]]``, inf where forbidden. For each
    (bytes, spans) of ``usages`` they hold ``bytes[rows[i], cols[j]]`` at the times of ``spans``, int64[intervals, 2].
    ``rows`` is int64[strategies of u], ``cols`` int64[strategies of v]."""

    rows: Any
    cols: Any
    matrix: Any
    usages: tuple[tuple[Any, Any], ...] = ()

    @property
    def turned(self) -> Edge:
        """The same edge, seen from its other end."""
        return Edge(self.cols, self.rows, self.matrix.T, tuple((b.T, spans) for b, spans in self.usages))


class Usages(NamedTuple):
    """What a node holds: ``bytes[k]`` (float64[intervals, strategies]) at times ``spans[k]`` = start, stop
    (int64[intervals, 2]; stop not included)."""

    spans: Any
    bytes: Any


@dataclass(frozen=True, slots=True)
class Fixed:
    """Node ``v`` has one strategy left."""

    v: int
    strategy: int

    def restore(self, choice: dict[int, int]) -> None:
        """Adds v's original strategy to ``choice``, node → original strategy."""
        choice[self.v] = self.strategy


@dataclass(frozen=True, slots=True)
class Follows:
    """Node ``v``'s original strategy is ``function`` (int64[original strategies of u]) of node ``u``'s."""

    v: int
    u: int
    function: Any

    def restore(self, choice: dict[int, int]) -> None:
        """Adds v's original strategy to ``choice``, which has u's."""
        choice[self.v] = int(self.function[choice[self.u]])


@dataclass(frozen=True, slots=True)
class Cheapest:
    """Node ``v`` takes what is cheapest beside its neighbours. ``original`` (int64) and ``costs`` (float64) are of its
    strategies; ``neighbours``: node, row of its original strategies, column of v's strategies, matrix."""

    v: int
    original: Any
    costs: Any
    neighbours: tuple[tuple[int, Any, Any, Any], ...]

    def restore(self, choice: dict[int, int]) -> None:
        """Adds v's original strategy to ``choice``, which has those of all neighbours."""
        total = self.costs.copy()
        for u, rows, cols, matrix in self.neighbours:
            total += matrix[rows[choice[u]]][cols]
        choice[self.v] = int(self.original[np.argmin(total)])


@dataclass(slots=True)
class Core:
    """What is left of a problem: the nodes ``alive``, with ``costs[v]`` float64[strategies] that are left and
    ``original[v]`` int64[strategies], which they are. ``edges[u][v]`` is held in both directions. ``fixed``
    (float64[times]) is live whatever is chosen; usages of nodes and edges come on top, under ``limit``, in bytes.
    ``constant`` is what eliminated nodes cost."""

    costs: list[Any]
    edges: list[dict[int, Edge]]
    memory: list[Usages]
    original: list[Any]
    sizes: list[int]
    """How many strategies each node had at first."""
    fixed: Any
    limit: float
    alive: set[int]
    constant: float = 0.0
    undo: list[Fixed | Follows | Cheapest] = field(default_factory=list)
    replaced: list[tuple[int, dict[int, int]]] = field(default_factory=list)
    """Node, and for each of its strategies that went as dominated the one that is never worse; in order."""
    dirty_nodes: set[int] = field(default_factory=set)
    dirty_edges: set[tuple[int, int]] = field(default_factory=set)
    infeasible: bool = False
    """True where it is proven that no choice is allowed and fits."""

    def restore(self, choice: dict[int, int]) -> list[int]:
        """Original strategies of all nodes, from the current ones of the live nodes."""
        out = {v: int(self.original[v][s]) for v, s in choice.items()}
        for step in reversed(self.undo):
            step.restore(out)
        return [out[v] for v in range(len(self.costs))]

    def project(self, choice: Sequence[int]) -> dict[int, int] | None:
        """Current strategies of the live nodes that make a choice of all nodes, or one that is never worse; None where
        the choice was not allowed."""
        now = list(choice)
        for v, instead in self.replaced:
            now[v] = instead.get(now[v], now[v])
        out: dict[int, int] = {}
        for v in self.alive:
            at = np.flatnonzero(self.original[v] == now[v])
            if not len(at):
                return None
            out[v] = int(at[0])
        return out

    @property
    def pairs(self) -> int:
        """The number of grouped pairs of strategies on all edges: entries of their matrices."""
        return sum(e.matrix.size for u in self.alive for v, e in self.edges[u].items() if u < v)

    def touch(self, v: int) -> None:
        """Marks a node, its neighbours and its edges to be reduced again."""
        self.dirty_nodes.add(v)
        for w in self.edges[v]:
            self.dirty_nodes.add(w)
            self.dirty_edges.add((min(v, w), max(v, w)))

    def put(self, u: int, v: int, edge: Edge) -> None:
        """Replaces the edge between u and v."""
        self.edges[u][v] = edge
        self.edges[v][u] = edge.turned

    def cut(self, u: int, v: int) -> None:
        """Removes the edge between u and v."""
        del self.edges[u][v], self.edges[v][u]
        self.dirty_edges.discard((min(u, v), max(u, v)))
        self.dirty_nodes |= {u, v}

    def remove(self, v: int) -> None:
        """Takes out node v, which has no edges; the caller leaves a step in ``undo``."""
        self.alive.discard(v)
        self.dirty_nodes.discard(v)

    def keep(self, v: int, wanted: Any) -> None:
        """Keeps those strategies of node v that ``wanted`` (bool[strategies]) marks; ``infeasible`` where none is
        left."""
        self.costs[v] = self.costs[v][wanted]
        self.original[v] = self.original[v][wanted]
        spans, held = self.memory[v]
        self.memory[v] = Usages(spans, held[:, wanted])
        for w, e in list(self.edges[v].items()):
            self.put(v, w, e._replace(rows=e.rows[wanted]))
        if not len(self.costs[v]):
            self.infeasible = True
        self.touch(v)

    def hold(self, v: int, spans: Any, held: Any) -> None:
        """Adds usages to node v: ``spans`` and ``held`` as in `Usages`."""
        mine = self.memory[v]
        self.memory[v] = Usages(np.concatenate([mine.spans, spans]), np.concatenate([mine.bytes, held]))


def core_of(problem: Problem, suspected: bool = False) -> Core:
    """The problem as a Core, of which only strategies of infinite cost are removed. Parallel edges are summed.
    ``suspected``: True where suspected usages count too."""
    count = len(problem.nodes)
    limit = np.inf if problem.limit_bytes is None else float(problem.limit_bytes)
    horizon = len(problem.fixed_bytes)
    limited = limit < np.inf and horizon > 0
    core = Core(
        costs=[np.array(n.costs_s, float) for n in problem.nodes],
        edges=[{} for _ in range(count)],
        memory=[_usages(n.usages if limited else (), len(n.costs_s)) for n in problem.nodes],
        original=[np.arange(len(n.costs_s)) for n in problem.nodes],
        sizes=[len(n.costs_s) for n in problem.nodes],
        fixed=np.array(problem.fixed_bytes, float) if limited else np.zeros(0),
        limit=limit,
        alive=set(range(count)),
    )
    for e in problem.edges:
        usages = (*e.usages, *(e.suspected if suspected else ())) if limited else ()
        held = tuple((np.asarray(size, float), _spans(spans)) for size, spans in usages)
        join(core, e.a, e.b, Edge(np.asarray(e.rows), np.asarray(e.cols), np.asarray(e.costs_s, float), held))
    for v in core.alive:
        if not np.isfinite(core.costs[v]).all():
            core.keep(v, np.isfinite(core.costs[v]))
    core.dirty_nodes = set(core.alive)
    core.dirty_edges = {(u, v) for u in core.alive for v in core.edges[u] if u < v}
    return core


def restricted(core: Core, nodes: Sequence[int], wanted: Sequence[Any]) -> Core:
    """A copy of what is alive, ``nodes[k]`` as node k, over those of its strategies that ``wanted[k]`` marks."""
    place = {v: k for k, v in enumerate(nodes)}
    part = Core(
        costs=[core.costs[v] for v in nodes],
        edges=[{place[w]: e for w, e in core.edges[v].items()} for v in nodes],
        memory=[core.memory[v] for v in nodes],
        original=[np.arange(len(core.costs[v])) for v in nodes],
        sizes=[len(core.costs[v]) for v in nodes],
        fixed=core.fixed.copy(),
        limit=core.limit,
        alive=set(range(len(nodes))),
    )
    for k, mine in enumerate(wanted):
        if not mine.all():
            part.keep(k, mine)
    part.dirty_nodes = set(part.alive)
    part.dirty_edges = {(u, v) for u in part.alive for v in part.edges[u] if u < v}
    return part


def _spans(spans: Any) -> Any:
    return np.asarray(spans, np.int64).reshape(-1, 2)


def _usages(usages: Sequence[tuple[Any, Any]], size: int) -> Usages:
    spans, held = [np.zeros((0, 2), np.int64)], [np.zeros((0, size))]
    for bytes_, where in usages:
        intervals = _spans(where)
        intervals = intervals[intervals[:, 0] < intervals[:, 1]]
        spans.append(intervals)
        held.append(np.repeat(np.asarray(bytes_, float)[None, :], len(intervals), axis=0))
    return Usages(np.concatenate(spans), np.concatenate(held)) if len(spans) > 1 else Usages(spans[0], held[0])


def join(core: Core, u: int, v: int, edge: Edge) -> None:
    """Adds a coupling of u and v to the one that is there."""
    old = core.edges[u].get(v)
    if old is not None:
        r2, c2 = edge.matrix.shape
        row_keys, rows = np.unique(old.rows * r2 + edge.rows, return_inverse=True)
        col_keys, cols = np.unique(old.cols * c2 + edge.cols, return_inverse=True)
        first = np.ix_(row_keys // r2, col_keys // c2)
        second = np.ix_(row_keys % r2, col_keys % c2)
        usages = [(held[first], spans) for held, spans in old.usages]
        usages += [(held[second], spans) for held, spans in edge.usages]
        edge = Edge(rows, cols, old.matrix[first] + edge.matrix[second], tuple(usages))
    core.put(u, v, edge)
    core.dirty_edges.add((min(u, v), max(u, v)))
    core.dirty_nodes |= {u, v}
