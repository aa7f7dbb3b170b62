"""Cost and live bytes of a choice of strategies, fast enough to be asked thousands of times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.intra_op.ilp import MemoryRow
from autopar.ir.strategy import Problem


class Evaluator:
    """Evaluates choices of one Problem. Usages of all nodes are flattened to arrays of intervals."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.horizon = len(problem.fixed_bytes)
        self.fixed = np.asarray(problem.fixed_bytes, float)
        self.usages = [(v, usage) for v, n in enumerate(problem.nodes) for usage, _ in n.usages]
        spans = [np.array(s, np.int64).reshape(-1, 2) for n in problem.nodes for _, s in n.usages]
        self.owner = np.repeat(np.arange(len(spans)), [len(s) for s in spans])
        joined = np.concatenate(spans) if spans else np.zeros((0, 2), np.int64)
        self.start, self.stop = joined[:, 0], np.minimum(joined[:, 1], self.horizon)
        self.of_node: dict[int, list[int]] = {}
        for k, (v, _) in enumerate(self.usages):
            self.of_node.setdefault(v, []).append(k)
        self._touch: dict[int, Any] = {}

    def objective(self, choice: Sequence[int]) -> float:
        """Seconds of a choice; inf where it uses a forbidden pair."""
        total = sum(float(n.costs_s[choice[v]]) for v, n in enumerate(self.problem.nodes))
        for e in self.problem.edges:
            total += float(e.costs_s[e.rows[choice[e.a]], e.cols[choice[e.b]]])
        return total

    def live_bytes(self, choice: Sequence[int]) -> Any:
        """float64[times]: live bytes under a choice."""
        if not self.horizon:
            return np.zeros(0)
        sizes = np.array([usage[choice[v]] for v, usage in self.usages])[self.owner] if self.usages else np.zeros(0)
        delta = np.bincount(self.start, sizes, self.horizon + 1) - np.bincount(self.stop, sizes, self.horizon + 1)
        return self.fixed + np.cumsum(delta)[: self.horizon]

    def over(self, choice: Sequence[int]) -> float:
        """Bytes by which a choice exceeds the limit; 0 where it fits."""
        if self.problem.limit_bytes is None or not self.horizon:
            return 0.0
        return max(0.0, float(self.live_bytes(choice).max()) - self.problem.limit_bytes)

    def change(self, v: int, old: int, new: int) -> Any:
        """float64[times]: what moving node v from one strategy to another adds to the live bytes."""
        out = np.zeros(self.horizon)
        for k in self.of_node.get(v, ()):
            usage = self.usages[k][1]
            if usage[new] != usage[old]:
                out += (usage[new] - usage[old]) * self._presence(k)
        return out

    def _presence(self, k: int) -> Any:
        found = self._touch.get(k)
        if found is None:
            mine = self.owner == k
            delta = np.bincount(self.start[mine], minlength=self.horizon + 1) - np.bincount(
                self.stop[mine], minlength=self.horizon + 1
            )
            found = self._touch[k] = np.cumsum(delta)[: self.horizon].astype(np.int16)
        return found

    def row(self, t: int) -> MemoryRow:
        """The memory constraint at time t."""
        assert self.problem.limit_bytes is not None
        count = np.bincount(self.owner[(self.start <= t) & (t < self.stop)], minlength=len(self.usages))
        terms: dict[int, Any] = {}
        for k in np.flatnonzero(count):
            v, usage = self.usages[k]
            terms[v] = terms.get(v, 0.0) + count[k] * usage
        return MemoryRow(time=t, terms=terms, room=self.problem.limit_bytes - float(self.fixed[t]))

    def violated(self, choice: Sequence[int], have: set[int], most: int) -> list[MemoryRow]:
        """Rows for the most violated times, spread out so that they are not all of one peak."""
        live = self.live_bytes(choice)
        assert self.problem.limit_bytes is not None
        picked: list[int] = []
        apart = max(1, self.horizon // 60)
        for t in np.argsort(-live, kind="stable"):
            if live[t] <= self.problem.limit_bytes or len(picked) >= most:
                break
            if int(t) not in have and all(abs(int(t) - p) >= apart for p in picked):
                picked.append(int(t))
        return [self.row(t) for t in picked]

    def least_peak(self) -> float:
        """A lower bound on every choice's peak: each usage at its least, at the worst time."""
        sizes = np.array([float(np.min(usage)) for _, usage in self.usages])[self.owner]
        delta = np.bincount(self.start, sizes, self.horizon + 1) - np.bincount(self.stop, sizes, self.horizon + 1)
        return float((self.fixed + np.cumsum(delta)[: self.horizon]).max(initial=0.0))
