"""Flat planning nodes → `StrategyGraph`: the choices that the ILP makes, with their costs.

With the clusters k of classes, members n(c) and executions t(c) of a class c, and strategies s_c(x_k) that follow from
the state x_k of its cluster, costs are                                                                      `_assemble`

    c_k[x]     = Σ_{c in k} n(c) t(c) cost_c[s_c(x)]  +  reshardings between classes of k
    C_kl[x, y] = Σ over uses of a result of k in l (and of l in k), executions · seconds(code made, code wanted)

Three reductions come before any solver:

1. Equal nodes are folded into classes (`fold`).
2. A cheap operator (elementwise, reduction, transpose, …) whose strategy follows from the sharding of one of its
   operands joins that operand's *cluster*: one choice for the whole group (`_join_operand`). An operator that
   makes values from (almost) nothing (a broadcast, an iota, random bits) joins its only user's cluster
   (`_join_user`).
3. A value that several clusters read gets a copy class: it is resharded once for all of them, or
   not at all (`_copy`). Without it equal reshardings would be paid once per reader, while the compiled
   program, which merges them, pays once.

What a member cannot follow exactly stays a cluster of its own, so nothing is forced to replicate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autopar.cost.kernels import memory_bytes_per_s
from autopar.cost.on_chip import LARGEST, ON_CHIP_BYTES
from autopar.cost.products import family
from autopar.intra_op.flatten import Flat
from autopar.intra_op.fold import fold
from autopar.intra_op.overlap import SHARES, aside
from autopar.intra_op.specs import Mesh
from autopar.intra_op.strategies import Signature, op_signature, spec_signature
from autopar.intra_op.traffic import Traffic
from autopar.intra_op.uses import Uses, uses_of
from autopar.ir.graph import Node
from autopar.primitives import record_of, rule_for

Pinner = Callable[[Node], Any]
"""Operator → what its first result is pinned to (`strategies.pinned`), None for nothing."""


@dataclass(slots=True)
class Class:
    """Planning nodes that share one decision. ``members`` are theirs (empty for a copy class), ``trips`` how often
    each executes. ``inputs[i]`` maps (producer class, result) → (number of links, executions of each). ``follow`` is
    int64[states of its cluster]: the strategy that follows from each. ``copy_of``: the (class, result) of which a copy
    class is the copy. ``moved_s`` is float64[strategies]: seconds to read what its members read from memory and to
    write what they write, of one of them in the mean (`traffic`)."""

    signature: Signature
    members: list[int]
    trips: int
    inputs: list[dict[tuple[int, int], tuple[int, int]]]
    cluster: int = -1
    follow: Any = None
    copy_of: tuple[int, int] | None = None
    moved_s: Any = 0.0

    @property
    def compute_s(self) -> Any:
        """float64[strategies]: seconds of one execution of a member, without collectives."""
        return self.signature.compute_s + self.moved_s

    @property
    def cost_s(self) -> Any:
        """float64[strategies]: seconds of one execution of a member."""
        return self.signature.cost_s + self.moved_s


@dataclass(slots=True)
class Edge:
    """``matrix[rows[i], cols[j]]`` (float64): seconds between state i of one cluster and state j of another, inf where
    a resharding needs a forbidden collective. ``rows`` and ``cols`` are int64[states]."""

    rows: Any
    cols: Any
    matrix: Any


@dataclass(slots=True)
class StrategyGraph:
    """``class_of``: planning node → class. ``roots[k]`` is the class whose strategies are cluster k's states, and
    ``costs[k]`` float64[states], the seconds of all of the cluster's classes. ``edges``: (cluster, later cluster) →
    `Edge`. ``uses`` says who reads what; ``hideable`` is bool[operands]: what may be resharded beside compute;
    ``combined`` likewise: what is resharded together with others."""

    mesh: Mesh
    flat: Flat
    class_of: list[int]
    classes: list[Class]
    uses: Uses
    combined: Any
    hideable: Any
    roots: list[int] = field(default_factory=list)
    costs: list[Any] = field(default_factory=list)
    edges: dict[tuple[int, int], Edge] = field(default_factory=dict)

    def strategy(self, index: int, choice: Any) -> int:
        """Class ``index``'s strategy under a choice, a state per cluster."""
        c = self.classes[index]
        return int(c.follow[choice[c.cluster]])


def build(
    flat: Flat,
    mesh: Mesh,
    user_rules: Mapping[str, str] | None = None,
    pin_of: Pinner | None = None,
    fold_above: int | None = None,
    moved: Traffic | None = None,
) -> StrategyGraph:
    """Signatures, classes, clusters, copies and costs of a flattened graph.

    Args:
        user_rules: primitive or ffi target → text of its sharding rule.
        fold_above: the most planning nodes that are not folded; None: `fold.UNFOLDED_NODES`.
        moved: what operators read and write.

    Raises:
        RuleError: a user's rule is malformed or does not fit its operator.
        Whatever ``pin_of`` raises.
    """
    table = [_signature(flat, n, mesh, user_rules, pin_of) for n in flat.example]
    folded = fold(flat) if fold_above is None else fold(flat, fold_above)
    uses = uses_of(flat, folded)
    classes = _classes(flat, folded, uses, table)
    if moved is not None:
        _price_traffic(flat, mesh, classes, folded, moved)
    combined, hideable = aside(flat, mesh.logical.device.platform)
    graph = StrategyGraph(
        mesh=mesh, flat=flat, class_of=folded.tolist(), classes=classes, uses=uses, combined=combined, hideable=hideable
    )
    _Clusters(graph).run()
    _assemble(graph, SHARES[mesh.logical.device.platform])
    return graph


def _signature(
    flat: Flat, n: int, mesh: Mesh, user_rules: Mapping[str, str] | None, pin_of: Pinner | None
) -> Signature:
    """The strategies of planning node n, one object for equal nodes of all graphs on a mesh: layers share most of
    them, and so do a layer's rematerialisations."""
    node, key = flat.node[n], flat.keys[flat.key[n]]
    pin = None if node is None or pin_of is None else pin_of(node)
    known = (key, flat.operand_types[n], flat.result_types[n], pin, tuple(sorted((user_rules or {}).items())))
    found: Signature | None = mesh.signatures.get(known)
    if found is None:
        if node is None:
            found = spec_signature(mesh, flat.kind[n], key, flat.operand_types[n], flat.result_types[n])
        else:
            found = op_signature(mesh, node, rule_for(node, user_rules), pin)
        mesh.signatures[known] = found
    return found


def _classes(flat: Flat, class_of: Any, uses: Uses, table: list[Signature]) -> list[Class]:
    by_class = np.split(np.argsort(class_of, kind="stable"), np.cumsum(np.bincount(class_of))[:-1])
    classes: list[Class] = []
    for members in by_class:
        n = int(members[0])
        signature = table[flat.key[n]]
        inputs: list[Any] = [{} for _ in signature.operand_types]
        classes.append(Class(signature, members.tolist(), flat.regions[flat.region[n]].trips, inputs))
    for use in uses.kinds:
        count, _ = classes[use.user].inputs[use.operand].get(use.source, (0, 0))
        classes[use.user].inputs[use.operand][use.source] = (count + use.count, flat.regions[use.region].trips)
    return classes


def _price_traffic(flat: Flat, mesh: Mesh, classes: list[Class], class_of: Any, moved: Traffic) -> None:
    """Fills `Class.moved_s`. What operators hand to each other may stay on the chip (`cost.on_chip`)."""
    columns = flat.columns()
    device = mesh.logical.device
    rate, chip_bytes = memory_bytes_per_s(device), LARGEST * ON_CHIP_BYTES.get(family(device), 0)
    members = np.bincount(class_of)
    edge_class, edge_at = class_of[columns.user], np.arange(len(columns.user)) - columns.first_edge[columns.user]
    value_class, value_at = class_of[columns.maker], np.arange(len(columns.maker)) - columns.first_value[columns.maker]
    widest = 1 + int(max(edge_at.max(initial=0), value_at.max(initial=0)))

    def per_class(place: Any, weights: Any) -> Any:
        return np.bincount(place, weights, len(classes) * widest).reshape(-1, widest)

    edges, values = edge_class * widest + edge_at, value_class * widest + value_at
    reads, writes = per_class(edges, moved.reads), per_class(values, moved.writes)
    passing_reads = per_class(edges, moved.reads * moved.passing[0])
    passing_writes = per_class(values, moved.writes * moved.passing[1])
    kernels = np.bincount(class_of, moved.kernels, len(classes))
    for c in np.flatnonzero(reads.any(1) | writes.any(1) | (kernels > 0)).tolist():
        signature, bytes_moved = classes[c].signature, 0.0
        for i, (t, codes) in enumerate(zip(signature.operand_types, signature.operands, strict=True)):
            if codes is not None and reads[c, i]:
                size = t.size_bytes / mesh.space(t).shards[codes]
                bytes_moved = bytes_moved + (reads[c, i] - passing_reads[c, i] * (size <= chip_bytes)) * size
        for r, size in enumerate(signature.usage):
            bytes_moved = bytes_moved + (writes[c, r] - passing_writes[c, r] * (size <= chip_bytes)) * size
        classes[c].moved_s = (bytes_moved / rate + kernels[c] * moved.fusion.launch_s) / members[c]


class _Clusters:
    """Assigns each class a cluster, adding copy classes, in one pass forwards and one backwards."""

    def __init__(self, graph: StrategyGraph) -> None:
        self.graph = graph
        self.classes = graph.classes
        self.users: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for c, this in enumerate(self.classes):
            for i, sources in enumerate(this.inputs):
                for source in sources:
                    self.users.setdefault(source, []).append((c, i))
        self._unique: dict[tuple[int, int], Any] = {}

    def run(self) -> None:
        for c in range(len(self.classes)):
            this = self.classes[c]
            if self._widens(c) or not self._join_operand(c):
                self._root(c)
            if this.copy_of is None:
                for r in range(len(this.signature.results)):
                    self._copy(c, r)
        self._population = Counter(this.cluster for this in self.classes)
        for c in reversed(range(len(self.classes))):
            self._join_user(c)
        used = sorted({this.cluster for this in self.classes})
        renumber = {k: i for i, k in enumerate(used)}
        for this in self.classes:
            this.cluster = renumber[this.cluster]
        self.graph.roots = [self.graph.roots[k] for k in used]

    def _root(self, c: int) -> None:
        this = self.classes[c]
        this.cluster = len(self.graph.roots)
        this.follow = np.arange(this.signature.size)
        self.graph.roots.append(c)

    def _code(self, c: int, r: int) -> Any:
        this = self.classes[c]
        return this.signature.results[r][this.follow]

    def _cheap(self, c: int) -> bool:
        node = self.classes[c].signature.node
        return node is not None and record_of(node.primitive).traits.fusible and node.params.get("pin") is None

    def _joined(self, c: int, i: int, source: tuple[int, int]) -> Any:
        """The strategy of class ``c`` that follows from each state of its operand's cluster, or None."""
        this = self.classes[c]
        if not self._cheap(c) or len(this.inputs[i]) != 1:
            return None
        producer = self.classes[source[0]]
        if producer.cluster < 0 or producer.trips != this.trips or producer.signature.kind in ("const_in", "pred"):
            return None
        key = (id(this.signature), i)
        if key not in self._unique:
            self._unique[key] = _unique_by_operand(self.graph.mesh, this.signature, i)
        codes = self._code(*source)
        follow = self._unique[key][codes]
        value_type, wider = this.signature.operand_types[i], sum(t.size_bytes for t in this.signature.result_types)
        if self.graph.mesh.space(value_type).has_unreduced[codes].any():
            if wider > value_type.size_bytes or len(self.users[source]) > 1:
                return None  # partial sums are reduced before a conversion to a wider type, and once for all readers
        return follow if (follow >= 0).all() else None

    def _join_operand(self, c: int) -> bool:
        this = self.classes[c]
        if not self._cheap(c):
            return False
        order = sorted(
            (i for i, sources in enumerate(this.inputs) if sources),
            key=lambda i: (-this.signature.operand_types[i].size, i),
        )
        largest = max((this.signature.operand_types[i].size for i in order), default=0)
        for i in order:
            if this.signature.operand_types[i].size < largest:
                break
            source = next(iter(this.inputs[i]))
            follow = self._joined(c, i, source)
            if follow is not None:
                this.cluster, this.follow = self.classes[source[0]].cluster, follow
                return True
        return False

    def _copy(self, c: int, r: int) -> None:
        """Adds a copy class for result ``r`` of class ``c`` where several users cannot follow it, and for all users of
        what narrows and follows no operand: what moves is the result, not the operand."""
        this = self.classes[c]
        narrows = self._narrows(c) and self.graph.roots[this.cluster] == c
        value_type = this.signature.result_types[r]
        readers: list[tuple[int, int]] = []
        links = 0
        for user, i in self.users.get((c, r), ()):
            there = self.classes[user]
            count, trips = there.inputs[i][c, r]
            same_region = trips == this.trips and self._same_region(this, there, i)
            if same_region and (narrows or self._joined(user, i, (c, r)) is None):
                readers.append((user, i))
                links += count
        if links < (1 if narrows else 1.5) * max(1, len(this.members)) or value_type.size < 2 or value_type.is_key:
            return
        wanted = {self.classes[user].signature.operand_types[i] for user, i in readers}
        if len(wanted) == 1:
            (value_type,) = wanted
        sums = all(self._takes_sums(user, i) for user, i in readers)
        key = ("copy", value_type, sums)
        signature = spec_signature(self.graph.mesh, "copy", key, (value_type,), (value_type,))
        new = len(self.classes)
        copy = Class(signature, [], this.trips, [{(c, r): (max(1, len(this.members)), this.trips)}], copy_of=(c, r))
        self.classes.append(copy)
        self._root(new)
        for user, i in readers:
            there = self.classes[user]
            there.inputs[i][new, 0] = there.inputs[i].pop((c, r))
        self.users[new, 0] = readers
        self.users[c, r] = [u for u in self.users[c, r] if u not in readers] + [(new, 0)]

    def _same_region(self, producer: Class, user: Class, i: int) -> bool:
        flat = self.graph.flat
        home = flat.region[producer.members[0]]
        return bool(user.members) and flat.exec_region[flat.first_edge[user.members[0]] + i] == home

    def _takes_sums(self, user: int, i: int) -> bool:
        signature = self.classes[user].signature
        space = self.graph.mesh.space(signature.operand_types[i])
        return bool(space.has_unreduced[signature.operands[i]].any())

    def _widens(self, c: int) -> bool:
        """True for an operator that reads little and writes much: what it is made of moves, not its result."""
        this = self.classes[c]
        if not self._cheap(c) or len(this.signature.results) != 1:
            return False
        read = sum(t.size_bytes for t, s in zip(this.signature.operand_types, this.inputs, strict=True) if s)
        return 2 * read <= this.signature.result_types[0].size_bytes

    def _narrows(self, c: int) -> bool:
        """True for an operator on one operand that writes half its bytes or less, as many numbers."""
        signature = self.classes[c].signature
        if not self._cheap(c) or len(signature.results) != 1 or len(signature.operand_types) != 1:
            return False
        read, made = signature.operand_types[0], signature.result_types[0]
        return read.size == made.size and 2 * made.size_bytes <= read.size_bytes

    def _join_user(self, c: int) -> None:
        """Moves an operator that reads little and writes much into the cluster of its only user."""
        this = self.classes[c]
        if not self._widens(c) or self.graph.roots[this.cluster] != c:
            return
        readers = self.users.get((c, 0), [])
        clusters = {self.classes[u].cluster for u, _ in readers}
        if len(clusters) != 1 or this.cluster in clusters or self._population[this.cluster] != 1:
            return
        user, i = readers[0]
        there = self.classes[user]
        if there.trips != this.trips:
            return
        wanted = there.signature.operands[i][there.follow]
        follow = _unique_by_result(self.graph.mesh, this.signature)[wanted]
        if (follow >= 0).all():
            self._population[there.cluster] += 1
            this.cluster, this.follow = there.cluster, follow


def _unique_by_operand(mesh: Mesh, signature: Signature, i: int) -> Any:
    """int[codes of operand i]: the one strategy that takes it so without letting another operand alone be
    unreduced; -1 where there is none, -2 where there are several."""
    out = np.full(len(mesh.space(signature.operand_types[i]).codes), -1, np.int64)
    linear = [n.startswith("+") for n in signature.names]
    groups = signature.rule.linear if signature.rule is not None else ()
    without = [is_linear and i not in groups[int(signature.names[n][1:])] for n, is_linear in enumerate(linear)]
    allowed = ~np.array(without, bool)[signature.options].any(axis=1)
    for s in np.flatnonzero(allowed):
        code = signature.operands[i][s]
        out[code] = s if out[code] == -1 else -2
    return out


def _unique_by_result(mesh: Mesh, signature: Signature) -> Any:
    """int[codes of result 0]: the one strategy that gives it so; -1 or -2 as above."""
    out = np.full(len(mesh.space(signature.result_types[0]).codes), -1, np.int64)
    for s in range(signature.size):
        code = signature.results[0][s]
        out[code] = s if out[code] == -1 else -2
    return out


def all_shown(graph: StrategyGraph) -> StrategyGraph:
    """The same with collectives that may run beside compute priced as if they did not: where there are more of them
    than compute, that is nearer to what they take (`overlap.exposed_s`)."""
    shown = replace(graph, costs=[], edges={})
    _assemble(shown, 1.0)
    return shown


def _assemble(graph: StrategyGraph, share: float) -> None:
    """Node costs and edge matrices of the clusters from their members'; ``share`` of what may run beside compute."""
    graph.costs = [np.zeros(graph.classes[r].signature.size) for r in graph.roots]
    terms: dict[tuple[int, int], list[tuple[Any, Any, Any, Any]]] = {}
    asides = _asides(graph, share)
    for c, this in enumerate(graph.classes):
        times = max(1, len(this.members)) * this.trips
        graph.costs[this.cluster] += times * this.cost_s[this.follow]
        for i, sources in enumerate(this.inputs):
            for (p, r), (count, trips) in sources.items():
                producer = graph.classes[p]
                combined, share = asides[c, i]
                matrix = share * graph.mesh.costs(this.signature.operand_types[i], combined)
                have = producer.signature.results[r][producer.follow]
                want = this.signature.operands[i][this.follow]
                if producer.cluster == this.cluster:
                    graph.costs[this.cluster] += count * trips * matrix[have, want]
                elif producer.cluster < this.cluster:
                    terms.setdefault((producer.cluster, this.cluster), []).append((have, want, matrix, count * trips))
                else:
                    terms.setdefault((this.cluster, producer.cluster), []).append((want, have, matrix.T, count * trips))
    for pair, parts in sorted(terms.items()):
        graph.edges[pair] = _edge(parts)


def _asides(graph: StrategyGraph, share: float) -> dict[tuple[int, int], tuple[bool, float]]:
    """(class, operand) → whether its resharding is combined with others, and which part of it shows. A copy is as all
    that read it would be."""
    out: dict[tuple[int, int], tuple[bool, float]] = {}
    copies: dict[int, tuple[bool, float]] = {}
    for c, this in enumerate(graph.classes):
        if this.copy_of is None:
            first_edge = [graph.flat.first_edge[n] for n in this.members]
            for i, sources in enumerate(this.inputs):
                edges = [first + i for first in first_edge]
                hidden = float(graph.hideable[edges].mean()) if sources else 0.0
                mine = bool(sources) and bool(graph.combined[edges].all()), share * hidden + 1 - hidden
                out[c, i] = mine
                for p, _ in sources:
                    known = copies.get(p, (True, 0.0))
                    copies[p] = known[0] and mine[0], max(known[1], mine[1])
    return out | {(c, 0): copies.get(c, (False, 1.0)) for c, x in enumerate(graph.classes) if x.copy_of is not None}


def _edge(parts: list[tuple[Any, Any, Any, Any]]) -> Edge:
    """The sum of several couplings of one pair of clusters, rows and columns of equal codes grouped."""
    rows, row_first = grouped([p[0] for p in parts])
    cols, col_first = grouped([p[1] for p in parts])
    matrix = np.zeros((len(row_first), len(col_first)))
    for have, want, cost, weight in parts:
        matrix += weight * cost[have[row_first][:, None], want[col_first]]
    return Edge(rows, cols, matrix)


def grouped(codes: Sequence[Any]) -> tuple[Any, Any]:
    """(the group of each place, the first place of each group): places with the same number in every one of ``codes``
    (int64[places], not negative), groups in order of these numbers."""
    joint = codes[0]
    for more in codes[1:]:
        joint = np.unique(joint * (int(more.max(initial=0)) + 1) + more, return_inverse=True)[1]
    groups = (np.cumsum(np.bincount(joint) > 0) - 1)[joint]
    return groups, first_of(groups)


def first_of(groups: Any) -> Any:
    """int64[groups]: the first place of each group; every number below the largest is one."""
    out = np.zeros(int(groups.max(initial=-1)) + 1, np.int64)
    out[groups[::-1]] = np.arange(len(groups))[::-1]
    return out
