"""Why an operator, or an argument, is sharded as it is: what every other way would add: `explained`.

A way w of a class of operators adds what the best plan with it takes beyond the plan,

    adds(w) = min { step_s(x) : x allowed, s_c(x) = w, peak(x) ≤ limit }  −  step_s(plan),           `_Question.tried`

which is found by solving again with w pinned. It says through which others: where the two plans spend their seconds,
operator by operator and collective by collective (`parts`). What is tried first is what costs least if all others stay
as they are, an upper bound of what it adds (`_Question.beside`). Of a pipeline's layer what it takes from other layers
and gives them stays as planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.explain.changes import changes, spent_on
from autopar.explain.names import Named
from autopar.explain.posed import Posed, Refused
from autopar.intra_op.decisions import axes_of, collective_s
from autopar.intra_op.extract import collectives
from autopar.intra_op.mesh_problem import Candidate
from autopar.intra_op.places import Places
from autopar.ir.sharding import ShardingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to run the operators of a class: mesh axes by factor, specs of operands and results; of an argument how
    it lies, as a result."""

    split: tuple[tuple[str, tuple[str, ...]], ...]
    operands: tuple[ShardingSpec, ...]
    results: tuple[ShardingSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Strategy ``number`` of the class. ``adds_s`` a step, on the best plan with this way; None: no plan that has it is
    known, and ``refused`` says why. ``peak_bytes`` of that plan. ``compute_s`` of the operators themselves, a step.
    ``through``: where the plans spend more (less: below 0), in words, the most first."""

    number: int
    way: Way
    compute_s: float
    adds_s: float | None
    refused: Refused | None = None
    peak_bytes: float = 0.0
    through: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """``named`` is sharded as ``way``, of ``ways`` that there are. Seconds a step: ``compute_s`` of the operators,
    ``brought_s`` of collectives that bring them operands, ``made_s`` of those that reshard what they make. ``step_s``
    and ``peak_bytes`` of the problem they are in. ``follows``: the operator whose strategy theirs follows, "" for none;
    ``alternatives``: the cheapest first, of the ``ways`` those that were tried."""

    named: Named
    way: Way
    ways: int
    follows: str
    compute_s: float
    brought_s: float
    made_s: float
    step_s: float
    peak_bytes: float
    alternatives: tuple[Alternative, ...]


def explained(named: Named, tries: int | None = 8) -> Explained:
    """Why what is ``named`` is sharded as it is, beside at most ``tries`` other ways (None: all)."""
    return _Question(named).answer(tries)


def parts(posed: Posed, candidate: Candidate) -> dict[str, float]:
    """What a plan spends its seconds on (`spent_on`)."""
    out, graph, flat = candidate.out, posed.problem.graph, posed.problem.flat
    rows: list[tuple[str, str, float]] = []
    for this, s in zip(graph.classes, out.strategy, strict=True):
        node = flat.node[this.members[0]] if this.members else None
        if node is not None:
            rows.append((node.called, node.source, float(this.compute_s[s]) * this.trips * len(this.members)))
    return spent_on(rows, collectives(out))


class _Question:
    def __init__(self, named: Named) -> None:
        self.named, self.posed, self.c = named, named.posed, named.c
        self.problem, self.chosen = named.posed.problem, named.posed.chosen
        self.graph, self.mesh = self.problem.graph, self.problem.mesh
        self.this = self.graph.classes[self.c]

    def answer(self, tries: int | None) -> Explained:
        s = self.chosen.out.strategy[self.c]
        others = self.others(s)
        base = parts(self.posed, self.chosen)
        tried = [self.tried(k, base) for k in others[:tries]]
        tried.sort(key=lambda a: (a.adds_s is None, a.adds_s or 0.0))
        brought, made = self.moved()
        root, classes = self.graph.roots[self.this.cluster], self.graph.classes
        if (source := classes[root].copy_of) is not None:
            root = source[0]
        return Explained(
            named=self.named, way=self.way(s), ways=len(others) + 1,
            follows="" if root == self.c else Places(self.graph).text(classes[root].members[0]),
            compute_s=self.compute_s(s), brought_s=brought, made_s=made, step_s=self.chosen.step_s,
            peak_bytes=float(self.chosen.peak), alternatives=tuple(tried),
        )  # fmt: skip

    def others(self, chosen: int) -> list[int]:
        """Other strategies that the class can have, the one that costs least beside all others as they are first."""
        cluster = self.this.cluster
        allowed = np.ones(len(self.this.follow), bool)
        for masks in (self.posed.allowed, self.posed.held):
            allowed = allowed & masks.get(cluster, True)
        beside = self.beside(cluster)
        best: dict[int, float] = {}
        for state in np.flatnonzero(allowed).tolist():
            s = int(self.this.follow[state])
            if s != chosen:
                best[s] = min(best.get(s, np.inf), beside[state])
        return sorted(best, key=lambda s: (best[s], s))

    def beside(self, cluster: int) -> Any:
        """float64[states]: what the problem costs with each state of a cluster, all others as they are."""
        problem, choice = self.problem.problem, self.chosen.choice
        total = problem.nodes[cluster].costs_s.astype(float)
        for e in problem.edges:
            if e.a == cluster:
                total = total + e.costs_s[e.rows, e.cols[choice[e.b]]]
            elif e.b == cluster:
                total = total + e.costs_s[e.rows[choice[e.a]], e.cols]
        return total

    def tried(self, s: int, base: dict[str, float]) -> Alternative:
        """The best plan in which the class has strategy s."""
        found = self.posed.solved({self.this.cluster: self.this.follow == s})
        if isinstance(found, str):
            return Alternative(number=s, way=self.way(s), compute_s=self.compute_s(s), adds_s=None, refused=found)
        through = changes(base, parts(self.posed, found))
        return Alternative(
            number=s, way=self.way(s), compute_s=self.compute_s(s), adds_s=found.step_s - self.chosen.step_s,
            peak_bytes=float(found.peak), through=through,
        )  # fmt: skip

    def compute_s(self, s: int) -> float:
        return float(self.this.compute_s[s]) * self.this.trips * len(self.this.members)

    def moved(self) -> tuple[float, float]:
        """Seconds of collectives for operands of the class, and of those for what it makes."""
        out, patterns = self.chosen.out, self.graph.uses.patterns
        brought = made = 0.0
        for what, count in out.counted.items():
            seconds = collective_s(out, what) * count
            spot = what.spot
            if spot.kind == "pattern":
                brought += seconds if patterns[spot.number].readers[spot.position][0] == self.c else 0.0
                made += seconds if patterns[spot.number].source[0] == self.c else 0.0
            elif (spot.number if spot.kind == "class" else self.graph.class_of[spot.number]) == self.c:
                brought += seconds
        return brought, made

    def way(self, s: int) -> Way:
        signature, mesh = self.this.signature, self.mesh
        factors = axes_of(mesh, signature, s) if signature.rule is not None else {}

        def specs(types: Sequence[Any], every: Sequence[Any]) -> tuple[ShardingSpec, ...]:
            return tuple(
                mesh.spec(t, int(codes[s])) for t, codes in zip(types, every, strict=True) if codes is not None
            )

        return Way(
            split=tuple((f, tuple(mesh.names[a] for a in axes)) for f, axes in sorted(factors.items())),
            operands=specs(signature.operand_types, signature.operands) if self.named.phase else (),
            results=specs(signature.result_types, signature.results),
        )
