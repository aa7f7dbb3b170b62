"""When each planning node's results are live, and which of them are materialised at all.

In: the flat list of planning nodes. Out: an interval [start, stop) of time for every value (`Liveness`), which does not
depend on the choice of strategies. Memory of a choice x at time t is then (`peak.live_bytes`)

    live(t) = Σ_{v : start_v ≤ t < stop_v} bytes_v(x) + workspaces, copies and buffers of reshardings at t

Time is the position in the list, bodies inlined, so a loop's body is one stretch of time. The model is of what XLA's
fusion and buffer assignment do with a step in program order:

- arguments are live throughout; a donated argument's new value takes its buffer, another's has one of its own, which
  stays                                                                                                    `_intervals`
- a cheap elementwise operator is fused into its readers, computed again in each: it is not materialised if all fuse it,
  and what it reads is needed until the last of them; for those that do not, it is computed when the first needs it.
  One of several operands of full size is not computed again if it is materialised anyway                      `_place`
- an expensive operator is computed once, and materialised unless it is fused into a single reader             `_place`
- matrix products, convolutions, gathers and the like read from memory; a reduction fuses the arithmetic right before
  it, and what that reads is materialised (a broadcast included)                            `_fuses_into`, `_broadcasts`
- a transposed copy that a convolution or a matrix product makes of an operand fuses what makes that operand; one that
  several matrix products read lives from the first to the last of them                                   `_workspaces`
- of matrix products and convolutions that read one value and do not depend on each other (the gradients towards an
  input and towards a weight), any may run first: all need what they read until the last has run        `_run_together`
- one whose result is read only after a loop may run after that loop                                      `_past_loops`
- a donated argument that is read by something which its new value does not depend on is copied: the order of the
  two is not known when the compiler decides on copies                                               `_loose`, `copied`
- a reshape is its operand's buffer under another shape: who reads the one holds the other                   `_through`
- a loop's carry is one buffer for the whole loop; its new value takes it unless the old one is still needed
  when it is made                                                                                     `_old_value_read`
- a slice of a scanned input is fused into its readers, as a cheap operator is
- a stacked result is live from its loop's start                                                         `_stack_start`
- a scanned input and a loop's constant are live until its end                                              `_loop_end`
- an elementwise result may take the buffer of an operand that dies there                                   `_in_place`
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.intra_op.flatten import CONSTANT, Flat
from autopar.intra_op.fusion import Fused
from autopar.intra_op.remat.rewrite import COPY
from autopar.primitives import record_of
from autopar.primitives.record import Primitive, Traits

Interval = tuple[int, int]
"""(start, stop), stop not included."""
Readers = list[tuple[int, int]]
"""(planning node, operand) of each."""

_KINDS = tuple("op arg out const_in carry xs ys branch_in branch_out pred loop_out recv send".split())


@dataclass(frozen=True, slots=True)
class Liveness:
    """``start`` and ``stop`` are int64[values]: each value's time in memory, equal where it is never materialised by
    itself."""

    flat: Flat
    start: Any
    stop: Any
    ends: Any
    """int64[planning nodes]: the time until which each needs what it reads."""
    workspaces: dict[int, list[tuple[int, float, int]]]
    """Planning node → (operand, weight, end) of what it needs beside operands and results, from its own time to an end.
    See `Primitive.workspace`."""
    loose: dict[int, tuple[int, int, Readers]]
    """Donated argument → (time of its new value, its first reader, (reader, operand) on which the new value does not
    depend)."""
    updates: dict[int, tuple[int, int]]
    """Donated argument with a new value → (its time, the argument's bit in ``leads_to``)."""
    leads_to: list[int]
    """Planning node → the arguments whose new values depend on it, as bits."""
    written: Any
    """bool[values]: True where memory has it at some time, in a buffer of its own or in that of what it becomes."""
    in_place: bool
    """True where an all-reduce leaves its result where its operand was."""

    @property
    def horizon(self) -> int:
        """The number of times, one per planning node."""
        return len(self.ends)

    def interval(self, n: int, r: int = 0) -> Interval | None:
        """Result r's time in memory, None where it is never materialised by itself."""
        value = self.flat.first_value[n] + r
        start, stop = int(self.start[value]), int(self.stop[value])
        return (start, stop) if stop > start else None

    def copied(self, arg: int, first: int, leads_to: int) -> Interval | None:
        """When a copy of an argument is held, were it read by one more operator, which leads to ``leads_to``; its first
        reader is ``first``. None where none is needed."""
        at, bit = self.updates.get(arg, (0, 0))
        return None if arg not in self.updates or leads_to >> bit & 1 else (first, at + 1)


def liveness(flat: Flat, turn: int | None = None, of: Fused | None = None) -> Liveness:
    """Intervals of every planning node's results.

    Args:
        turn: planning nodes from there on (None: none) are a program of their own: what they read of those before it
            is materialised, as it is.
        of: the kernels of a compiler that makes one of many operators; None: as XLA fuses for a CPU.
    """
    return _Run(flat, turn, of).run()


class _Run:
    """Readers are edges of the flat graph. What follows from the readers is decided node by node, last node first;
    intervals then for all values at once."""

    def __init__(self, flat: Flat, turn: int | None, of: Fused | None) -> None:
        self.flat, self.of = flat, of
        count = self.count = len(flat.kind)
        self.turn = count if turn is None else turn
        self.first_edge, self.first_value, self.maker = flat.first_edge, flat.first_value, flat.maker
        self.columns = flat.columns()
        self.user: list[int] = self.columns.user.tolist()
        by_value = np.argsort(self.columns.source, kind="stable")
        self.by_value: list[int] = by_value.tolist()
        """Edges by the value that they read, constants first."""
        values = np.arange(len(flat.maker) + 1)
        self.first_reader: list[int] = np.searchsorted(self.columns.source[by_value], values).tolist()
        self.examples = [flat.node[n] for n in flat.example]
        self.records: list[Primitive | None] = [
            record_of(node.primitive) if node is not None else None for node in self.examples
        ]
        """Of each key's operator."""
        aliases = [
            node is not None and record is not None and record.traits.aliases and isinstance(node.operands[0], int)
            for node, record in zip(self.examples, self.records, strict=True)
        ]
        self.alias = [aliases[k] for k in flat.key]
        self.fuses = self._which(lambda t: t.fusible and not t.reads_memory)
        self.reduces = self._which(lambda t: t.reduces)
        self.expensive = self._which(lambda t: t.expensive)
        self.generates = self._which(lambda t: t.generates)
        self.moves = self._which(lambda t: t.moves)
        self.reduction_fuses = self._which(lambda t: t.into_reduction)
        self.plainly = [fuses and not alias for fuses, alias in zip(self.fuses, self.alias, strict=True)]
        """True where n fuses whatever it alone reads; for the others it depends."""
        self.heavy = self._which(lambda t: t.contraction)
        self.reshaped = {
            self.maker[flat.source[self.first_edge[n]]]
            for n, alias in enumerate(self.alias)
            if alias and flat.source[self.first_edge[n]] >= 0
        }
        """Planning nodes with a reshape among their readers."""
        self.through: dict[int, list[int]] = {}
        """A value that a reshape reads → its readers, those of the reshape in its place."""
        self.until = list(range(1, count + 1))
        """The time until which n needs its operands: n + 1, or later where n is computed again; the end for an argument
        whose new value has a buffer of its own."""
        for n in (n for n in flat.args if n not in flat.donated):
            self.until[n] = count
        self._run_together()
        self.once = [True] * count
        """True where n is computed in one place."""
        spans = {(flat.regions[region].parent, *span) for region, span in flat.span.items()}
        self.loops: dict[int, tuple[list[int], list[int]]] = {}
        """Region → starts and ends of the loops in it, in order."""
        for parent, start, end in sorted(spans):
            starts, ends = self.loops.setdefault(parent, ([], []))
            starts.append(start)
            ends.append(end)
        self.materialised = [False] * count
        """True where all readers of a cheap operator read it from memory."""
        self.start = list(range(count))
        """The time at which n's result, where it is materialised, is computed."""
        self.first = list(range(count))
        """The time at which n must have been computed for the first time."""
        self.into_reduction = [False] * count
        self.for_results: set[int] = set()
        self.workspaces = self._workspaces()
        self.copied = {
            self.first_edge[n] + t for n, spaces in self.workspaces.items() if self.heavy[n] for t, _, _ in spaces
        }
        """Operands of which the node makes a copy."""

    def _which(self, asked: Callable[[Traits], bool]) -> list[bool]:
        """Which planning nodes are operators of such traits."""
        of_key = [record is not None and asked(record.traits) for record in self.records]
        return [of_key[k] for k in self.flat.key]

    def run(self) -> Liveness:
        """Readers before what they read, then every result's interval."""
        kinds, alias, heavy, fuses, until = self.flat.kind, self.alias, self.heavy, self.fuses, self.until
        for n in reversed(range(self.count)):
            kind = kinds[n]
            if n in self.reshaped and kind != "branch_in":
                for r in range(len(self.flat.result_types[n])):
                    self.through[self.first_value[n] + r] = self._through(self.readers(n, r))
            if kind == "op":
                if alias[n]:
                    until[n] = max((self._needs(n, e) for e in self.readers(n)), default=n + 1)
                elif heavy[n]:
                    until[n] = max(until[n], self._past_loops(n))
                elif self.of is not None and self.of.fuses[n]:
                    self._place_in(self.of, n)
                    if self._for_results(n):
                        self.until[n] = self.count
                elif fuses[n] and self.first_value[n + 1] - self.first_value[n] == 1:
                    self._place(n)
            elif kind in ("const_in", "xs"):
                until[n] = self._loop_end(n)
            elif kind == "branch_in":
                until[n] = max((self._needs(n, e) for e in self.readers(n)), default=n + 1)
        start, stop, becomes = self._intervals()
        loose, updates, leads_to = self._loose()
        in_place = self.of is not None and self.of.fusion.in_place
        if in_place:
            loose, updates = {}, {}
        return Liveness(
            self.flat, start, stop, np.array(until), self.workspaces, loose, updates, leads_to,
            (stop > start) | becomes, in_place,
        )  # fmt: skip

    def _for_results(self, n: int) -> bool:
        """True where nothing but results hangs on operator n, which a scheduler that hides collectives then runs last:
        a loss that is only reported."""
        edges = [e for r in range(self.first_value[n + 1] - self.first_value[n]) for e in self.readers(n, r)]
        late = all(self.flat.kind[u := self.user[e]] == "out" or u in self.for_results for e in edges)
        if late and edges and self.flat.region[n] == 0:
            self.for_results.add(n)
            return True
        return False

    def readers(self, n: int, r: int = 0) -> list[int]:
        """The edges that read planning node n's result r."""
        value = self.first_value[n] + r
        if value in self.through:
            return self.through[value]
        return self.by_value[self.first_reader[value] : self.first_reader[value + 1]]

    def _run_together(self) -> None:
        """Products of one depth in one body that read one value: all need what they read until the last has run. One in
        a remat body waits for the barrier before that, one of another program for that program."""
        flat, last = self.flat, dict[tuple[int, int, int, bool], int]()
        read: list[tuple[int, list[tuple[int, int, int, bool]]]] = []
        for n in (n for n, heavy in enumerate(self.heavy) if heavy):
            edges = range(self.first_edge[n], self.first_edge[n + 1])
            home = flat.depth[n], flat.region[n], n < self.turn
            keys = [(self._base(flat.source[e]), *home) for e in edges if flat.source[e] >= 0]
            last.update(dict.fromkeys(keys, n))
            read.append((n, keys))
        for n, keys in read:
            self.until[n] = 1 + max((last[key] for key in keys), default=n)

    def _workspaces(self) -> dict[int, list[tuple[int, float, int]]]:
        flat = self.flat
        weights = [
            record.workspace(node) if node is not None and record is not None else ()
            for node, record in zip(self.examples, self.records, strict=True)
        ]
        out: dict[int, list[tuple[int, float, int]]] = {}
        shared: dict[Any, tuple[int, int]] = {}
        for n, key in enumerate(flat.key):
            if self.of is None and self.reduces[n] and (count := self._broadcasts(n)):
                out[n] = [(0, float(count), n + 1)]
            if self.of is not None and self.of.fusion.into_products:
                continue  # products read operands however they lie
            for t, weight in weights[key]:
                edge = self.first_edge[n] + t
                source = flat.source[edge] if edge < self.first_edge[n + 1] else CONSTANT
                node, record = flat.node[n], self.records[key]
                if node is not None and record is not None and record.copy_key is not None and source >= 0:
                    shared_key = (source, flat.region[n], n < self.turn, record.copy_key(node, t))
                    if shared_key in shared:
                        first, slot = shared[shared_key]
                        out[first][slot] = (*out[first][slot][:2], n + 1)
                        continue
                    shared[shared_key] = (n, len(out.get(n, ())))
                out.setdefault(n, []).append((t, weight, n + 1))
        return out

    def _through(self, edges: list[int]) -> list[int]:
        """Readers, with those of a reshape in its place."""
        out: dict[int, None] = {}
        for e in edges:
            out.update(dict.fromkeys((self.alias[self.user[e]] and self.readers(self.user[e])) or (e,)))
        return list(out)

    def _base(self, value: int) -> int:
        """What a reshape, and a reshape of that, is made from."""
        while value >= 0 and self.alias[self.maker[value]]:
            value = self.flat.source[self.first_edge[self.maker[value]]]
        return value

    def _loop_end(self, n: int) -> int:
        """End of the loop that entry node n belongs to; n itself outside loops."""
        return self.flat.span.get(self.flat.region[n], (n, n))[1]

    def _past_loops(self, n: int) -> int:
        """The end of the last loop that runs between operator n and its first reader; 0 for none."""
        if self.flat.region[n] not in self.loops:
            return 0
        starts, ends = self.loops[self.flat.region[n]]
        results = range(len(self.flat.result_types[n]))
        first = min((self._first(n, e) for r in results for e in self.readers(n, r)), default=0)
        i = bisect.bisect_right(ends, first) - 1
        return ends[i] if i >= 0 and starts[i] > n else 0

    def _first(self, n: int, e: int) -> int:
        """The time at which reader e first needs n."""
        u = self.user[e]
        return self.count if u < n else self.first[u] if self._fuses_into(n, e, len(self.readers(n))) else u

    def _broadcasts(self, n: int) -> int:
        """How many operands of what reduction n fuses are broadcast, which materialises them in full size."""
        flat, value = self.flat, self._base(self.flat.source[self.first_edge[n]])
        if value < 0 or not self.reduction_fuses[self.maker[value]]:
            return 0
        made = self.maker[value]
        size = flat.result_types[made][0].size
        sources = flat.source[self.first_edge[made] : self.first_edge[made + 1]]
        types = flat.operand_types[made]
        return sum(1 < t.size < size and source >= 0 for source, t in zip(sources, types, strict=True))

    def _loose(self) -> tuple[dict[int, tuple[int, int, Readers]], dict[int, tuple[int, int]], list[int]]:
        """`Liveness.loose`, `Liveness.updates` and `Liveness.leads_to`, the last filled readers first."""
        flat, maker = self.flat, self.maker
        leads_to = [0] * self.count
        news: dict[int, int] = {}
        for bit, arg in enumerate(flat.args):
            new = flat.source[self.first_edge[arg]] if arg in flat.donated else CONSTANT
            if new >= 0 and maker[new] != arg:
                news[arg] = maker[new]
                leads_to[maker[new]] |= 1 << bit
        for n in reversed(range(self.count)):
            if (bits := leads_to[n]) and flat.kind[n] != "arg":
                for value in flat.source[self.first_edge[n] : self.first_edge[n + 1]]:
                    if value >= 0 and (before := leads_to[maker[value]]) is not bits:
                        leads_to[maker[value]] = before | bits if before else bits
        out: dict[int, tuple[int, int, Readers]] = {}
        for bit, arg in enumerate(flat.args):
            if arg in news:
                edges = self.readers(arg)
                users = [self.user[e] for e in edges]
                loose = [
                    (u, e - self.first_edge[u])
                    for u, e in zip(users, edges, strict=True)
                    if not leads_to[u] >> bit & 1 and flat.kind[u] == "op"
                ]
                loose += [(u, 0) for u in self._copies_of(arg) if not leads_to[u] >> bit & 1]
                if loose:
                    out[arg] = (news[arg], min(users), loose)
        bits = {arg: bit for bit, arg in enumerate(flat.args)}
        return out, {arg: (at, bits[arg]) for arg, at in news.items()}, leads_to

    def _copies_of(self, arg: int) -> list[int]:
        """Blocks' copies of an argument: what reads one of these, resharded or not, reads the argument when it does."""
        value = self.first_value[arg]
        users = (self.user[e] for e in self.by_value[self.first_reader[value] : self.first_reader[value + 1]])
        blocks = (u for u in users if self.flat.regions[self.flat.region[u]].kind == "remat")
        return [u for u in blocks if (node := self.flat.node[u]) is not None and node.primitive == COPY]

    def _fuses_into(self, n: int, e: int, count: int) -> bool:
        """True where reader e computes n, which has ``count`` readers, on the fly."""
        u = self.user[e]
        if self.of is not None:
            return self.of.on_the_fly(n)
        if n < self.turn <= u:
            return False
        if e in self.copied:
            return True
        if self.alias[u]:
            return False
        if self.into_reduction[u]:
            return self.reduction_fuses[n] and count == 1
        return self.fuses[u] or (self.reduces[u] and self.reduction_fuses[n])

    def _place(self, n: int) -> None:
        """Where operator n is computed."""
        edges, user = self.readers(n), self.user
        if len(edges) == 1:  # most have one reader: no sets for those
            u = user[edges[0]]
            fused = (self.plainly[u] and not n < self.turn <= u) or self._fuses_into(n, edges[0], 1)
            inside, from_memory = ((u,), ()) if fused else ((), (u,))
        else:
            inside = {user[e] for e in edges if self._fuses_into(n, e, len(edges))}
            from_memory = {user[e] for e in edges} - inside
        if self.expensive[n]:
            if from_memory or len(inside) != 1 or not self.once[next(iter(inside))]:
                return
        elif from_memory and self._full_operands(n) > 1:
            self.materialised[n] = True
            return
        start = max(n, min(from_memory)) if from_memory else n
        if n < self.turn <= start:
            start = n  # a result of its program, which computes it in its turn
        until, first, once = start + 1, self.count, len(inside) + len(from_memory) <= 1
        for u in inside:
            if self.until[u] > until:
                until = self.until[u]
            if self.first[u] < first:
                first = self.first[u]
            once = once and self.once[u]
            if self.reduction_fuses[n] and (self.into_reduction[u] or self.reduces[u]):
                self.into_reduction[n], self.plainly[n] = True, False
        for u in from_memory:
            if n < u < first:
                first = u if u < self.turn or n >= self.turn else n
        self.start[n], self.until[n], self.once[n] = start, until, once
        self.first[n] = first if edges else n

    def _place_in(self, of: Fused, n: int) -> None:
        """When the kernels run that compute operator n: the last of them, but for what reads a result before."""
        users = [self.user[e] for r in range(self.first_value[n + 1] - self.first_value[n]) for e in self.readers(n, r)]
        readers = [max(n, of.at[u] if of.fuses[u] else u) for u in users]
        self.until[n] = of.at[n] + 1
        self.start[n] = min([of.at[n], *readers])
        self.first[n] = min([of.at[n], *(self.first[u] for u in users if u > n)])

    def _full_operands(self, n: int) -> int:
        """Operands as large as the result that are not made out of nothing."""
        flat = self.flat
        sources = flat.source[self.first_edge[n] : self.first_edge[n + 1]]
        made = [i for i, value in enumerate(sources) if value >= 0 and not self.generates[self.maker[value]]]
        if len(made) < 2:
            return len(made)
        size, types = flat.result_types[n][0].size, flat.operand_types[n]
        return sum(types[i].size >= size for i in made)

    def _needs(self, n: int, e: int) -> int:
        """The time until which reader e needs what n makes."""
        u = self.user[e]
        kind, until = self.flat.kind[u], self.until[u]
        if kind == "arg" and u in self.flat.donated:
            return n
        if kind == "ys" or (kind == "carry" and e > self.first_edge[u]):
            return n + 1
        crosses = n < self.turn <= u
        return u if kind == "op" and until == u + 1 and self._in_place(u) and not crosses else until

    def _in_place(self, n: int) -> bool:
        return self.fuses[n] and not self.moves[n]

    def _pairs(self) -> tuple[Any, Any]:
        """int64[pairs] twice: values and the edges that read them, reshapes left out."""
        edge = np.array(self.by_value, np.int64)
        value = self.columns.source[edge]
        whole = value >= 0
        if self.through:
            whole &= ~np.isin(value, list(self.through))
        edges = [e for edges in self.through.values() for e in edges]
        values = np.repeat(list(self.through), [len(edges) for edges in self.through.values()])
        return np.append(value[whole], values.astype(np.int64)), np.append(edge[whole], np.array(edges, np.int64))

    def _old_value_read(self) -> Any:
        """int64[planning nodes]: the last of its body that reads a carry."""
        out = np.zeros(self.count, np.int64)
        for n in (n for n, kind in enumerate(self.flat.kind) if kind == "carry"):
            value = self.first_value[n]
            edges = self.by_value[self.first_reader[value] : self.first_reader[value + 1]]
            out[n] = max((u for e in edges if self.flat.kind[u := self.user[e]] != "loop_out"), default=0)
        return out

    def _intervals(self) -> tuple[Any, Any, Any]:
        """int64[values] twice: start and stop of each value's time in memory, equal where it is never materialised;
        bool[values]: whether it is some argument's new value, or a loop's."""
        flat, columns, count, values = self.flat, self.columns, self.count, len(self.maker)
        kind_of = np.array([_KINDS.index(flat.kind[n]) for n in flat.example])[columns.key]
        arg, op, carry, ys, xs, out, received = (
            kind_of == _KINDS.index(kind) for kind in ("arg", "op", "carry", "ys", "xs", "out", "recv")
        )
        joins = (kind_of == _KINDS.index("branch_out")) | (kind_of == _KINDS.index("loop_out"))
        alias, fuses, simple, reduces = map(np.array, (self.alias, self.fuses, self.reduction_fuses, self.reduces))
        in_place = fuses & ~np.array(self.moves)
        until, maker, node = np.array(self.until), columns.maker, np.arange(count)
        spans = [flat.span.get(region.id, (count, 0)) for region in flat.regions]
        loop_end = np.maximum(np.array([stop for _, stop in spans])[columns.region], node)

        value, edge = self._pairs()
        user, made = columns.user[edge], maker[value]
        next_carry = carry[user] & (edge > columns.first_edge[user])
        donated = np.isin(user, list(flat.donated))
        becomes = donated | ys[user] | next_carry
        """The reader is where the value goes, no use of it."""
        late = next_carry & (self._old_value_read()[user] > made)
        """The old value is still read."""
        crosses = (made < self.turn) & (user >= self.turn)
        """From one program to the next, which has it from its start on."""
        needs = np.where(~crosses & (op & in_place & (until == node + 1))[user], user, until[user])
        needs = np.where(donated, made, np.where(becomes, made + 1, needs))
        lone = np.bincount(value, minlength=values)[columns.first_value[made]] == 1
        takes = op[user] & ~alias[user]
        takes &= np.where(
            np.array(self.into_reduction)[user], simple[made] & lone, fuses[user] | (reduces[user] & simple[made])
        )
        takes |= np.isin(edge, list(self.copied))
        takes &= ~crosses
        if self.of is not None:
            takes = ~np.array(self.of.written)[value] & np.array(self.of.fuses)[made]  # filled in: by their readers

        def latest(pairs: Any, times: Any) -> Any:
            """int64[values]: the latest of some pairs' times, 0 where a value has none."""
            found = np.zeros(values, np.int64)
            np.maximum.at(found, value[pairs], times[pairs])
            return found

        def any_of(pairs: Any) -> Any:
            """bool[values]: whether a value has any of some pairs."""
            found = np.zeros(values, bool)
            found[value[pairs]] = True
            return found

        every = np.ones(len(value), bool)
        last = latest(every, needs)
        leaves = any_of(out[user] | (arg[user] & ~donated))
        past, uses = np.maximum(last, maker + 1), ~takes & ~becomes
        one_user = latest(every, user) == count - 1 - latest(every, count - 1 - user)
        alone = one_user & any_of(takes) & np.array(self.once)[latest(every, user)]
        placed = np.array(self.start)[maker]
        read_until = np.maximum(latest(uses, np.maximum(needs, placed[value] + 1)), placed)
        stack = maker.copy()
        for n in np.flatnonzero(ys).tolist():
            stack[self.first_value[n]] = self._stack_start(n)
        never, fuse, replaced = maker, fuses[maker], any_of(becomes)
        inside, costly = np.zeros(values, bool), np.array(self.expensive)
        if self.of is not None:  # what a kernel makes for itself; all else that it makes is written when it runs
            fuse, costly = np.array(self.of.fuses)[maker], np.zeros(count, bool)
            inside = fuse & ~np.array(self.of.written)
        cases = (
            (arg[maker], np.zeros_like(maker), np.full(values, count)),
            (carry[maker], maker, loop_end[maker]),
            (xs[maker], maker, np.maximum(latest(~takes, needs), maker)),
            (ys[maker], stack, np.where(leaves, count, past)),
            (joins[maker], maker, np.where(leaves, count, past)),
            (received[maker], maker, np.where(leaves, count, past)),
            (~op[maker] | alias[maker] | inside, maker, never),
            (~any_of(every), maker, maker + 1),
            (leaves, maker, np.full(values, count)),
            (any_of(late), maker, np.maximum(last, latest(late, loop_end[user]))),
            (~any_of(~becomes), maker, np.where(fuse | ~any_of(next_carry), never, maker + 1)),
            (~fuse, maker, past),
            (replaced & in_place[maker], maker, never),  # it takes the buffer of what it becomes
            (np.array(self.materialised)[maker], maker, past),
            (costly[maker], maker, np.where(alone, never, past)),
        )
        conditions, starts, stops = zip(*cases, strict=True)
        return np.select(conditions, starts, placed), np.select(conditions, stops, read_until), replaced

    def _stack_start(self, n: int) -> int:
        """The start of the loop that stacks planning node n; n itself for a constant."""
        edge = self.first_edge[n]
        if self.flat.source[edge] < 0:
            return n
        return self.flat.span.get(self.flat.exec_region[edge], (n, n))[0]
