"""Memory of choices of what is left of a problem: live bytes, prices, and rows at single times."""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.intra_op.reduce.core import Core


class Ledger:
    """The usages of a Core's live nodes and edges as flat arrays.

    A *term* is one interval of one node or edge. ``nodes`` is the order of nodes that choices (int64[nodes]) follow,
    ``edges`` the pairs of places in that order whose first is the smaller.
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
        """Node's place for each of the nodes' terms; for edges' terms their number in ``edges`` follows."""
        self.edges: list[tuple[int, int]] = []
        edge_owner = []
        for a, v in enumerate(nodes):
            for w in sorted(core.edges[v]):
                if a < place[w]:
                    for matrix, where in core.edges[v][w].usages:
                        spans.append(where)
                        held += [np.ascontiguousarray(matrix).ravel()] * len(where)
                        edge_owner += [len(self.edges)] * len(where)
                    self.edges.append((v, w))
        self.edge_owner = np.array(edge_owner, np.int64)
        self.start, self.stop = np.concatenate(spans).T
        sizes = np.array([len(h) for h in held], np.int64)
        self.at = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.bytes = np.concatenate(held) if held else np.zeros(0)
        self.ends = np.array([(place[v], place[w]) for v, w in self.edges], np.int64).reshape(-1, 2)
        self.edge_rows = [core.edges[v][w].rows for v, w in self.edges]
        self.edge_cols = [core.edges[v][w].cols for v, w in self.edges]
        self.has_edges = len(edge_owner) > 0

    def sizes(self, choice: Any) -> Any:
        """float64[terms]: bytes of each term."""
        own = self.bytes[self.at[: self.node_terms] + choice[self.owner]]
        if not self.has_edges:
            return own
        cells = [self._cell(k, choice) for k in self.edge_owner]
        return np.concatenate([own, self.bytes[self.at[self.node_terms : -1] + np.array(cells, np.int64)]])

    def _cell(self, k: int, choice: Any) -> int:
        a, b = self.ends[k]
        v, w = self.edges[k]
        width = self.core.edges[v][w].matrix.shape[1]
        return int(self.edge_rows[k][choice[a]]) * width + int(self.edge_cols[k][choice[b]])

    def cost(self, choice: Any) -> float:
        """What a choice costs, the core's constant apart; inf where it is forbidden."""
        total = sum(float(self.core.costs[v][s]) for v, s in zip(self.nodes, choice, strict=True))
        for (u, v), (a, b) in zip(self.edges, self.ends.tolist(), strict=True):
            e = self.core.edges[u][v]
            total += float(e.matrix[e.rows[choice[a]], e.cols[choice[b]]])
        return total

    def live(self, choice: Any) -> Any:
        """float64[times]: live bytes."""
        return self.profile(self.sizes(choice))

    def profile(self, sizes: Any) -> Any:
        """float64[times] of float64[terms]."""
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
