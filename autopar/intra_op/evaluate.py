"""Seconds and live bytes of choices of a `Problem`, without walking the plan that they lead to.

A *term* k is one usage of a node or of an edge: under a choice x it holds bytes_k(x) in each of its intervals, so that

    live(x, t) = fixed[t] + Σ_k  bytes_k(x) · |{intervals of k that hold t}|                      `Evaluator.live_bytes`

over the terms that count (``on``): those of sure usages, and the suspected ones that a full count of live bytes has
shown (`Evaluator.correct`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.ir.strategy import Problem

TIGHT = 0.9
"""Usages are corrected at times at which more than this part of the limit is live (guessed)."""


class Evaluator:
    """Evaluates choices of one Problem, a strategy per node; what `correct` learns counts in all later answers."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.horizon = len(problem.fixed_bytes)
        self.fixed = np.asarray(problem.fixed_bytes, float)
        self.limit = np.inf if problem.limit_bytes is None else float(problem.limit_bytes)
        self.edges = problem.edges
        node_terms = [(v, size, span) for v, n in enumerate(problem.nodes) for size, span in n.usages]
        edge_terms = [(k, size, span) for k, e in enumerate(problem.edges) for size, span in e.usages]
        self.sure = len(node_terms) + len(edge_terms)
        """Terms from here on are suspected."""
        edge_terms += [(k, size, span) for k, e in enumerate(problem.edges) for size, span in e.suspected]
        terms = (*node_terms, *edge_terms)
        self.count = len(terms)
        self.on = np.arange(self.count) < self.sure
        self.bytes, self.offset, sizes = _joined([size for _, size, _ in terms])
        self.node_terms = [(v, size) for (v, _, _), size in zip(node_terms, sizes, strict=False)]
        self.edge_terms = [(k, size) for (k, _, _), size in zip(edge_terms, sizes[len(node_terms) :], strict=True)]
        self._term_node = np.array([v for v, _ in self.node_terms], np.int64)
        self._term_edge = np.array([k for k, _ in self.edge_terms], np.int64)
        self._ends = np.array([(e.a, e.b) for e in problem.edges], np.int64).reshape(-1, 2)
        self._width = np.array([e.costs_s.shape[1] for e in problem.edges], np.int64)
        self._rows, self._row_of, _ = _joined([e.rows for e in problem.edges], np.int64)
        self._cols, self._col_of, _ = _joined([e.cols for e in problem.edges], np.int64)
        spans = [np.array(span, np.int64).reshape(-1, 2) for _, _, span in terms]
        self.owner = np.repeat(np.arange(self.count), [len(s) for s in spans])
        joined = np.concatenate(spans) if spans else np.zeros((0, 2), np.int64)
        self.start, self.stop = np.minimum(joined.T, self.horizon)
        self.terms_of: list[list[int]] = [[] for _ in problem.edges]
        """Edge → its terms, counted from the first of an edge."""
        for k, (e, _) in enumerate(self.edge_terms):
            self.terms_of[e].append(k)
        self._present: dict[int, Any] = {}

    def objective(self, choice: Sequence[int]) -> float:
        """Seconds of a choice; inf where it uses a forbidden pair."""
        total = sum(float(n.costs_s[choice[v]]) for v, n in enumerate(self.problem.nodes))
        for e in self.edges:
            total += float(e.costs_s[e.rows[choice[e.a]], e.cols[choice[e.b]]])
        return total

    def term_bytes(self, choice: Sequence[int]) -> Any:
        """float64[terms]: bytes of each term under a choice, of those that do not count too."""
        at = np.asarray(choice, np.int64)
        rows = self._rows[self._row_of + at[self._ends[:, 0]]]
        cells = rows * self._width + self._cols[self._col_of + at[self._ends[:, 1]]]
        return self.bytes[self.offset + np.concatenate([at[self._term_node], cells[self._term_edge]])]

    def live_bytes(self, choice: Sequence[int]) -> Any:
        """float64[times]: live bytes under a choice, of the terms that count."""
        return self._profile(self.term_bytes(choice) * self.on)

    def _profile(self, sizes: Any) -> Any:
        each = sizes[self.owner]
        delta = np.bincount(self.start, each, self.horizon + 1) - np.bincount(self.stop, each, self.horizon + 1)
        return self.fixed + np.cumsum(delta)[: self.horizon]

    def believed(self) -> Problem:
        """The problem as corrections have made it: suspected usages that count are sure ones, the others are left out,
        and fixed bytes are the corrected ones."""
        own = len(self.node_terms)
        edges = list(self.edges)
        for k, e in enumerate(self.edges):
            if e.suspected:
                terms = [own + t for t in self.terms_of[k] if own + t >= self.sure]
                shown = [usage for usage, t in zip(e.suspected, terms, strict=True) if self.on[t]]
                edges[k] = replace(e, usages=(*e.usages, *shown), suspected=())
        return replace(self.problem, edges=tuple(edges), fixed_bytes=self.fixed)

    def suspect_all(self) -> None:
        """Counts all suspected terms, and forgets other corrections: an estimate on the safe side."""
        self.on[:] = True
        self.fixed = np.asarray(self.problem.fixed_bytes, float)

    def correct(self, choice: Sequence[int], true: Any) -> None:
        """Learns from ``true``, a choice's live bytes counted in full (float64[times]): suspected terms that they show
        count from now on, and what is left beyond its ``live_bytes`` counts as fixed; earlier such corrections fade."""
        start = np.asarray(self.problem.fixed_bytes, float)
        before, self.fixed = self.fixed, start
        sizes = self.term_bytes(choice)
        missing = true - self.live_bytes(choice)
        tight = true > TIGHT * self.limit
        for k in range(self.sure, self.count):
            if sizes[k] and not self.on[k]:
                part = sizes[k] * self.presence(k)
                where = (part > 0) & tight
                if where.any() and (missing[where] >= 0.99 * part[where]).all():
                    self.on[k], missing = True, missing - part
        self.fixed = start + np.maximum(0.7 * (before - start), missing)

    def over(self, choice: Sequence[int]) -> float:
        """Bytes by which a choice exceeds the limit; 0 where it fits."""
        if self.limit == np.inf or not self.horizon:
            return 0.0
        return max(0.0, float(self.live_bytes(choice).max()) - self.limit)

    def presence(self, k: int) -> Any:
        """int16[times]: how many intervals of term k hold each time."""
        found = self._present.get(k)
        if found is None:
            mine = self.owner == k
            delta = np.bincount(self.start[mine], minlength=self.horizon + 1) - np.bincount(
                self.stop[mine], minlength=self.horizon + 1
            )
            found = self._present[k] = np.cumsum(delta)[: self.horizon].astype(np.int16)
        return found

    def least_peak(self) -> float:
        """A lower bound on every choice's peak, in bytes: each usage at its least, at the worst time."""
        least = np.array([float(np.min(size)) for _, size in (*self.node_terms, *self.edge_terms)])
        return float(self._profile(least * self.on).max(initial=0.0)) if self.horizon else 0.0


def _joined(parts: Sequence[Any], dtype: Any = float) -> tuple[Any, Any, list[Any]]:
    """Arrays in one flat array, the offset of each, and each as a view of it."""
    sizes = [p.size for p in parts]
    stops = np.cumsum(sizes, dtype=np.int64)
    flat = np.empty(int(stops[-1]) if parts else 0, dtype)
    views = [flat[stop - size : stop].reshape(p.shape) for p, size, stop in zip(parts, sizes, stops, strict=True)]
    for view, part in zip(views, parts, strict=True):
        view[...] = part
    return flat, stops - np.array(sizes, np.int64), views
