"""The sharding problem with rematerialisation in it: one more node per group of values, with the states keep and
recompute.

With g ∈ {0, 1} of group G, s of a cluster of operators and the usages of the sharding problem as they are:

    seconds   Σ_G g · resharded_s(G)   +   Σ_{G, cluster k} g · seconds_{G, k}(s_k)
    bytes(t)  as before  −  Σ_{G, v freed by G, t in its gap} g · bytes_v(s)  +  Σ_{G, v held longer} g · bytes_v(s)

so that seconds and bytes of recomputation follow the shardings exactly, on edges between groups and clusters. g_G ≤ g_H
where G needs H (forbidden pairs). A value made again that all its readers take resharded (a copy) is resharded again:
that hangs on three choices, the value's, the copy's and g, and gets a node of its own, with the states *not* and *to
each code* of the copy, so that pairs say it all:

    g = 0 ⇔ not;   to c only where the copy has c;   seconds(s → c)

Taken at the reference plan are: the reshardings that recomputation repeats inside a block, and what two groups hold or
do not hold together (both would be questions of three choices). What is short-lived inside a block is left out. So the
joint problem decides; the plan that follows is made, and counted, on the rewritten graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.intra_op.decisions import Decisions
from autopar.intra_op.liveness import Interval
from autopar.intra_op.remat.joint_groups import Choices, Held
from autopar.ir.strategy import Problem, ProblemEdge, ProblemNode


class Joint:
    """A joint problem: ``problem``'s nodes are the clusters, the groups of all regions in order, and what is resharded
    again for them."""

    def __init__(self, problem: Problem, again: Sequence[_Again]) -> None:
        self.problem, self._again = problem, tuple(again)

    def completed(self, choice: Sequence[int]) -> tuple[int, ...]:
        """States of clusters and groups → a choice of the problem."""
        rest = (a.states[choice[a.copy]] if choice[a.group] else 0 for a in self._again)
        return (*(int(s) for s in choice), *(int(s) for s in rest))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Again:
    """What node ``group`` (among the problem's) reshards again: ``states[s]`` where cluster ``copy`` has state s."""

    group: int
    copy: int
    states: Any


def joint_problem(problem: Problem, out: Decisions, regions: Sequence[Choices]) -> Joint:
    """``problem`` (with usages) and the groups of all ``regions``; ``out`` is the reference plan."""
    build = _Build(problem, out)
    firsts = [build.add(choices) for choices in regions]
    for choices, first in zip(regions, firsts, strict=True):
        build.reshard_again(choices, first)
    return Joint(build.problem(), build.again)


class _Build:
    def __init__(self, problem: Problem, out: Decisions) -> None:
        self.base, self.out, self.graph = problem, out, out.graph
        self.nodes: list[ProblemNode] = list(problem.nodes)
        self.edges: list[ProblemEdge] = list(problem.edges)
        self.again: list[_Again] = []
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

    def add(self, choices: Choices) -> int:
        """Adds one region's groups; returns the first one's node."""
        first = len(self.nodes)
        trips = self.graph.flat.regions[choices.region].trips
        for k, group in enumerate(choices.groups):
            seconds: dict[int, Any] = {}
            total = 0.0
            for n in group.nodes:
                this = self.graph.classes[self.graph.class_of[n]]
                own = trips * this.cost_s[this.follow]
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
        return first

    def reshard_again(self, choices: Choices, first: int) -> None:
        """Adds what the groups of a region, nodes from ``first`` on, reshard a second time."""
        trips = self.graph.flat.regions[choices.region].trips
        for k, group in enumerate(choices.groups):
            for n in group.nodes:
                c, late = self.graph.class_of[n], choices.found[n].late
                for r in (r for r in late if (c, r) in self.copies):
                    self._reshard_again(first + k, c, r, trips)

    def _reshard_again(self, group: int, c: int, r: int, trips: int) -> None:
        """Result r of class c, which is resharded again for node ``group``."""
        this, copy = self.graph.classes[c], self.graph.classes[self.copies[c, r]]
        have, to = this.signature.results[r][this.follow], copy.signature.results[0][copy.follow]
        codes = np.unique(to)
        place = 1 + np.searchsorted(codes, to)
        at = len(self.nodes)
        self.nodes.append(ProblemNode(costs_s=np.zeros(1 + len(codes))))
        self.again.append(_Again(group=group, copy=copy.cluster, states=place))
        value_type = this.signature.result_types[r]
        costs = trips * self.graph.mesh.costs(value_type)[np.ix_(have, codes)]
        only = np.full((len(to), 1 + len(codes)), np.inf)
        only[:, 0] = only[np.arange(len(to)), place] = 0.0
        agree = np.full((2, 1 + len(codes)), np.inf)
        agree[0, 0] = agree[1, 1:] = 0.0
        costs = np.hstack([np.zeros((len(have), 1)), costs])
        for other, matrix in ((this.cluster, costs), (copy.cluster, only), (group, agree)):
            rows, cols = (np.arange(size) for size in matrix.shape)
            self.edges.append(ProblemEdge(a=other, b=at, rows=rows, cols=cols, costs_s=matrix))

    def _state(self, cluster: int) -> int:
        """The cluster's state in the reference plan."""
        return self.out.strategy[self.graph.roots[cluster]]

    def _holder(self, n: int, r: int) -> tuple[int, int]:
        """(class, result) of what is held in place of the value while it waits: its copy, where all late readers take
        that. An argument is held itself."""
        c = self.graph.class_of[n]
        if self.graph.flat.kind[n] == "arg":
            return c, r
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
