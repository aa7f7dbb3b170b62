"""Memory of choices of what is left of a problem: live bytes, prices, and rows at single times."""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.intra_op.reduce.core import Core


class Ledger:
    """The usages of a Core's live nodes and edges as flat arrays.

    A *term* is one interval of one node or edge; those of one edge's usage share its bytes. ``start`` and ``stop`` are
    int64[terms]. ``nodes`` is the order of nodes that choices (int64[nodes], current strategies) follow, ``edges`` the
    pairs of nodes, the one that comes first in that order first, and ``ends`` int64[edges, 2] their places in it.
    """

    def __init__(self, core: Core, nodes: list[int]) -> None:
        self.core, self.nodes = core, nodes
        self.horizon = len(core.fixed)
        self.fixed, self.limit = core.fixed, core.limit
        self.place = place = {v: k for k, v in enumerate(nodes)}
        self.neighbours = [[place[w] for w in core.edges[v]] for v in nodes]
        spans, held, owner = [np.zeros((0, 2), np.int64)], [], []
        for k, v in enumerate(nodes):
            mine = core.memory[v]
            if len(mine.spans):
                spans.append(mine.spans)
                held += list(mine.bytes)
                owner += [k] * len(mine.spans)
        self.node_terms = len(owner)
        self.owner = np.array(owner, np.int64)
        """int64[nodes' terms]: the place of each one's node. Edges' terms come behind them, ``edge_owner`` has the
        number of each one's edge."""
        self.edges: list[tuple[int, int]] = []
        edge_owner, part = [], list(range(len(owner)))
        for a, v in enumerate(nodes):
            for w in sorted(core.edges[v]):
                if a < place[w]:
                    for matrix, where in core.edges[v][w].usages:
                        spans.append(where)
                        part += [len(held)] * len(where)
                        held.append(np.ascontiguousarray(matrix).ravel())
                        edge_owner += [len(self.edges)] * len(where)
                    self.edges.append((v, w))
        self.edge_owner = np.array(edge_owner, np.int64)
        self.start, self.stop = np.concatenate(spans).T
        self.bytes, starts = _flat(held, float)
        self.part = np.array(part, np.int64)
        """Which usage, in all, each term is of: terms of one have the same bytes."""
        self._starts, self._sizes = starts, np.array([len(h) for h in held], np.int64)
        self._at = starts[self.part]
        self.ends = np.array([(place[v], place[w]) for v, w in self.edges], np.int64).reshape(-1, 2)
        self.has_edges = len(edge_owner) > 0
        holding = [core.edges[v][w] for v, w in (self.edges[k] for k in edge_owner)]
        self._rows, self._row_at = _flat([e.rows for e in holding], np.int64)
        self._cols, self._col_at = _flat([e.cols for e in holding], np.int64)
        self._width = np.array([e.matrix.shape[1] for e in holding], np.int64)

    def bytes_of(self, k: int) -> Any:
        """float64[strategies of its node, or rows × columns of its edge]: what term k holds."""
        return self.bytes_of_part(int(self.part[k]))

    def bytes_of_part(self, p: int) -> Any:
        """`bytes_of` for the terms of usage p."""
        return self.bytes[self._starts[p] : self._starts[p] + self._sizes[p]]

    def sizes(self, choice: Any) -> Any:
        """float64[terms]: bytes of each term under a choice."""
        cells = choice[self.owner]
        if self.has_edges:
            a, b = self.ends[self.edge_owner].T
            rows, cols = self._rows[self._row_at + choice[a]], self._cols[self._col_at + choice[b]]
            cells = np.concatenate([cells, rows * self._width + cols])
        return self.bytes[self._at + cells]

    def cost(self, choice: Any) -> float:
        """What a choice costs, the core's constant apart; inf where it is forbidden."""
        total = sum(float(self.core.costs[v][s]) for v, s in zip(self.nodes, choice, strict=True))
        for (u, v), (a, b) in zip(self.edges, self.ends.tolist(), strict=True):
            e = self.core.edges[u][v]
            total += float(e.matrix[e.rows[choice[a]], e.cols[choice[b]]])
        return total

    def live(self, choice: Any) -> Any:
        """float64[times]: live bytes under a choice, fixed ones included."""
        return self.profile(self.sizes(choice))

    def profile(self, sizes: Any) -> Any:
        """float64[times]: live bytes where terms hold ``sizes`` (float64[terms]), fixed ones included."""
        delta = np.bincount(self.start, sizes, self.horizon + 1) - np.bincount(self.stop, sizes, self.horizon + 1)
        return self.fixed + np.cumsum(delta)[: self.horizon]

    def over(self, choice: Any) -> float:
        """Bytes beyond the limit at the worst time; 0 where it fits."""
        return max(0.0, float(self.live(choice).max()) - self.limit) if self.horizon else 0.0

    def covered(self, prices: Any) -> Any:
        """float64[terms]: the prices (float64[times]) that each term pays, summed over its interval."""
        before = np.concatenate([[0.0], np.cumsum(prices)])
        return before[self.stop] - before[self.start]

    def at_time(self, t: int) -> Any:
        """int64[…]: the terms that are live at time t."""
        return np.flatnonzero((self.start <= t) & (t < self.stop))


def _flat(parts: list[Any], kind: Any) -> tuple[Any, Any]:
    """(all in one array, where each starts)."""
    starts = np.cumsum([0, *(len(p) for p in parts)])[:-1].astype(np.int64)
    return (np.concatenate(parts) if parts else np.zeros(0)).astype(kind), starts
