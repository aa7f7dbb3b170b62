"""The sharding problem with rematerialisation in it: one more node per group of values, with the states keep and
recompute.

With g ∈ {0, 1} of group G, s of a cluster of operators and the usages of the sharding problem as they are:

    seconds   Σ_G g · resharded_s(G)   +   Σ_{G, cluster k} g · seconds_{G, k}(s_k)
    bytes(t)  as before  −  Σ_{G, v freed by G, t in its gap} g · bytes_v(s)  +  Σ_{G, v held longer} g · bytes_v(s)

so that seconds and bytes of recomputation follow the shardings exactly, on edges between groups and clusters. g_G ≤ g_H
where G needs H (forbidden pairs). Taken at the reference plan are: the reshardings that recomputation repeats, and what
two groups hold or do not hold together (both would be questions of three choices). What is short-lived inside a block
is left out. So the joint problem decides; the plan that follows is made, and counted, on the rewritten graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.intra_op.extract import Decisions
from autopar.intra_op.liveness import Interval
from autopar.intra_op.remat.groups import Choices, Held
from autopar.ir.strategy import Problem, ProblemEdge, ProblemNode


def joint_problem(problem: Problem, out: Decisions, regions: Sequence[Choices]) -> Problem:
    """``problem`` (with usages) with one node of two states per group of all ``regions``, after its own, in order;
    ``out`` is the reference plan."""
    build = _Build(problem, out)
    for choices in regions:
        build.add(choices)
    return build.problem()


class _Build:
    def __init__(self, problem: Problem, out: Decisions) -> None:
        self.base, self.out, self.graph = problem, out, out.graph
        self.nodes: list[ProblemNode] = list(problem.nodes)
        self.edges: list[ProblemEdge] = list(problem.edges)
        self.copies = {this.copy_of: c for c, this in enumerate(self.graph.classes) if this.copy_of is not None}

    def problem(self) -> Problem:
        """What was built."""
        order = sorted(self.edges, key=lambda e: (e.a, e.b))
        return Problem(
            nodes=tuple(self.nodes),
            edges=tuple(order),
            fixed_bytes=self.base.fixed_bytes,
            limit_bytes=self.base.limit_bytes,
        )

    def add(self, choices: Choices) -> None:
        """Adds one region's groups."""
        first = len(self.nodes)
        trips = self.graph.flat.regions[choices.region].trips
        for k, group in enumerate(choices.groups):
            seconds: dict[int, Any] = {}
            total = 0.0
            for n in group.nodes:
                this = self.graph.classes[self.graph.class_of[n]]
                own = trips * this.signature.cost_s[this.follow]
                seconds[this.cluster] = seconds.get(this.cluster, 0.0) + own
                total += choices.found[n].cost_s - float(own[self._state(this.cluster)])
            held: dict[int, dict[tuple[int, int], list[tuple[float, Interval]]]] = defaultdict(dict)
            for sign, rows in ((-1.0, group.freed), (1.0, group.extra)):
                for n, r, span in rows:
                    c, result = self._holder(n, r)
                    held[self.graph.classes[c].cluster].setdefault((c, result), []).append((sign, span))
            self.nodes.append(ProblemNode(costs_s=np.array([0.0, max(0.0, total)])))
            for cluster in sorted(seconds.keys() | held.keys()):
                self._edge(cluster, first + k, seconds.get(cluster, 0.0), held.get(cluster, {}))
        self._between(choices, first)

    def _state(self, cluster: int) -> int:
        """The cluster's state in the reference plan."""
        return self.out.strategy[self.graph.roots[cluster]]

    def _holder(self, n: int, r: int) -> tuple[int, int]:
        """(class, result) of what stands for the value while it waits: its copy, where all late readers take that."""
        c = self.graph.class_of[n]
        copy = self.copies.get((c, r))
        return (c, r) if copy is None else (copy, 0)

    def _bytes(self, c: int, r: int) -> Any:
        this = self.graph.classes[c]
        return np.asarray(this.signature.usage[r], float)[this.follow]

    def _edge(self, cluster: int, group: int, seconds: Any, held: dict[tuple[int, int], Any]) -> None:
        count = len(self.base.nodes[cluster].costs_s)
        usages: list[tuple[Any, tuple[Interval, ...]]] = []
        for (c, r), rows in held.items():
            size = self._bytes(c, r)
            for sign in sorted({s for s, _ in rows}):
                spans = tuple(span for s, span in rows if s == sign and span[0] < span[1])
                if spans:
                    usages.append((np.stack([np.zeros(count), sign * size], axis=1), spans))
        costs = np.stack([np.zeros(count), np.broadcast_to(seconds, count)], axis=1)
        self.edges.append(
            ProblemEdge(
                a=cluster, b=group, rows=np.arange(count), cols=np.arange(2), costs_s=costs, usages=tuple(usages)
            )
        )

    def _between(self, choices: Choices, first: int) -> None:
        """Edges between groups: forbidden pairs, and what they do not hold if both are recomputed."""
        pairs: dict[tuple[int, int], tuple[Any, list[Held]]] = {}
        for k, group in enumerate(choices.groups):
            for other in sorted(group.needs):
                costs, _ = pairs.setdefault((min(k, other), max(k, other)), (np.zeros((2, 2)), []))
                costs[(1, 0) if k < other else (0, 1)] = np.inf
            for other, rows in group.beside.items():
                pairs.setdefault((min(k, other), max(k, other)), (np.zeros((2, 2)), []))[1].extend(rows)
        both = np.array([[0.0, 0.0], [0.0, 1.0]])
        for (a, b), (costs, rows) in sorted(pairs.items()):
            usages = tuple((-self._reference_bytes(n, r) * both, (span,)) for n, r, span in rows)
            self.edges.append(
                ProblemEdge(
                    a=first + a, b=first + b, rows=np.arange(2), cols=np.arange(2), costs_s=costs, usages=usages
                )
            )

    def _reference_bytes(self, n: int, r: int) -> float:
        c, result = self._holder(n, r)
        return float(np.asarray(self.graph.classes[c].signature.usage[result], float)[self.out.strategy[c]])
