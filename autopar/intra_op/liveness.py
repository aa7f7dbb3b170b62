"""When each planning node's results are live, and which of them stand in memory at all.

Time is the position in the flat list of planning nodes (bodies inlined, so a loop's body is one stretch of
time). The model is of what XLA's fusion and buffer assignment do with a step in program order:

- arguments are live throughout; a donated argument's new value takes its buffer;
- a cheap elementwise operator is computed again in every reader that fuses it: it never stands in memory if all do,
  and what it reads is needed until the last of them; for those that do not, it is computed when the first needs it.
  One of several operands of full size is not computed again if it must stand anyway;
- an expensive operator is computed once, and stands unless a single reader takes it in;
- matrix products, convolutions, gathers and the like read from memory, so what they read stands; a reduction takes
  in the arithmetic right before it, and what that reads stands (a broadcast included);
- a transposed copy that a convolution or a matrix product makes of an operand takes in what makes that operand; one
  that several matrix products read lives from the first to the last of them;
- of matrix products and convolutions that read one value and do not depend on each other (the gradients towards an
  input and towards a weight), any may run first: all need what they read until the last has run;
- one whose result is read only after a loop may run after that loop: what it reads is needed until then;
- a donated argument that is read by something which its new value does not depend on is copied: the order of the
  two is not known when the compiler decides on copies;
- a reshape is its operand's buffer under another shape: who reads the one holds the other;
- a loop's carry is one buffer for the whole loop; its new value takes it unless the old one is still needed;
- a slice of a scanned input is computed in what fuses it, as a cheap operator is;
- a stacked result is live from its loop's start; a scanned input and a loop constant until its end;
- an elementwise result may take the buffer of an operand that dies there.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

from autopar.cost.memory import workspace
from autopar.cost.roofline import CHEAP_TRANSCENDENTALS, is_fusible
from autopar.intra_op.flatten import HEAVY, Flat, Link

Interval = tuple[int, int]
Readers = list[tuple[int, int]]

_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod".split())
_GENERATORS = frozenset(("iota", "broadcast_in_dim"))
_DATA_MOVEMENT = frozenset("transpose concatenate pad rev sort split stack unstack slice dynamic_slice".split())
_OTHER_LAYOUT = _DATA_MOVEMENT | _GENERATORS
"""Fusible primitives whose result cannot take an operand's buffer."""
_READ_MEMORY = _REDUCTIONS | frozenset(("concatenate", "optimization_barrier", "random_bits"))
"""Fusible primitives whose operands must stand nevertheless."""
_EXPENSIVE = CHEAP_TRANSCENDENTALS | _READ_MEMORY
_TAKEN_IN = frozenset("mul add add_any sub neg square integer_pow".split())
"""What a reduction takes in."""
_ALIASES = frozenset(
    "reshape squeeze expand_dims bitcast_convert_type copy stop_gradient name optimization_barrier".split()
)
"""Primitives whose result is its operand's buffer under another shape."""


@dataclass(slots=True)
class Liveness:
    """``intervals[n][r]`` is result r's time in memory, None where it never stands there by itself."""

    horizon: int
    intervals: list[list[Interval | None]]
    ends: list[int]
    """The time until which planning node n needs what it reads."""
    workspaces: dict[int, list[tuple[int, float, int]]]
    """Planning node → (operand, weight, end) of what it needs beside operands and results, from its own time to an end.
    See `autopar.cost.memory`."""
    loose: dict[int, tuple[int, int, Readers]]
    """Donated argument → (time of its new value, its first reader, (reader, operand) on which the new value does not
    depend)."""


def liveness(flat: Flat) -> Liveness:
    """Intervals of every planning node's results, which do not depend on the choice of strategies."""
    return _Run(flat).run()


class _Run:
    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        count = self.count = len(flat.kind)
        self.names = [node.primitive if node is not None else "" for node in flat.node]
        fusible = {name for name in set(self.names) if is_fusible(name) and name not in _READ_MEMORY}
        self.alias = [
            name in _ALIASES and isinstance(node.operands[0], int)  # type: ignore[union-attr]
            for name, node in zip(self.names, flat.node, strict=True)
        ]
        self.fuses = [name in fusible for name in self.names]
        self.readers: list[list[Readers]] = [[[] for _ in types] for types in flat.result_types]
        self.reshaped: set[int] = set()
        """Planning nodes with a reshape among their readers."""
        self.old_value_read = [0] * count
        """The last planning node of its body that reads a carry."""
        for n, links in enumerate(flat.links):
            for i, link in enumerate(links):
                if link is not None:
                    self.readers[link[0]][link[1]].append((n, i))
                    if self.alias[n]:
                        self.reshaped.add(link[0])
                    if flat.kind[link[0]] == "carry" and flat.kind[n] != "loop_out":
                        self.old_value_read[link[0]] = max(self.old_value_read[link[0]], n)
        self.until = list(range(1, count + 1))
        """The time until which n needs its operands: n + 1, or later where n is computed again."""
        last: dict[tuple[Link, int], int] = {}
        heavy = [n for n, name in enumerate(self.names) if name in HEAVY]
        for n in heavy:
            for link in flat.links[n]:
                if link is not None:
                    last[self._base(link), flat.depth[n]] = n
        for n in heavy:
            self.until[n] = 1 + max(
                (last[self._base(link), flat.depth[n]] for link in flat.links[n] if link is not None), default=n
            )
        self.once = [True] * count
        """True where n is computed in one place."""
        spans = {(flat.regions[region].parent, *span) for region, span in flat.span.items()}
        self.loops: dict[int, tuple[list[int], list[int]]] = {}
        """Region → starts and ends of the loops in it, in order."""
        for parent, start, end in sorted(spans):
            starts, ends = self.loops.setdefault(parent, ([], []))
            starts.append(start)
            ends.append(end)
        self.stands = [False] * count
        """True where all readers of a cheap operator read it from memory."""
        self.start = list(range(count))
        """The time at which n's result, where it stands, is computed."""
        self.first = list(range(count))
        """The time at which n must have been computed for the first time."""
        self.into_reduction = [False] * count
        self.workspaces = self._workspaces()
        self.copied = {(n, t) for n, spaces in self.workspaces.items() if self.names[n] in HEAVY for t, _, _ in spaces}
        """(planning node, operand) of which the node makes a copy."""

    def run(self) -> Liveness:
        """Readers before what they read, then every result's interval."""
        flat = self.flat
        intervals: list[list[Interval | None]] = [[] for _ in range(self.count)]
        for n in reversed(range(self.count)):
            kind = flat.kind[n]
            if self.alias[n]:
                if n in self.reshaped:
                    self.readers[n] = [self._through(readers) for readers in self.readers[n]]
                self.until[n] = max((self._needs(n, u, i) for u, i in self.readers[n][0]), default=n + 1)
            elif kind in ("const_in", "xs"):
                if n in self.reshaped:
                    self.readers[n] = [self._through(readers) for readers in self.readers[n]]
                self.until[n] = self._loop_end(n)
            elif kind == "branch_in":
                self.until[n] = max((self._needs(n, u, i) for u, i in self.readers[n][0]), default=n + 1)
            else:
                if n in self.reshaped:
                    self.readers[n] = [self._through(readers) for readers in self.readers[n]]
                if kind == "op":
                    if self.names[n] in HEAVY:
                        self.until[n] = max(self.until[n], self._past_loops(n))
                    self._place(n)
            intervals[n] = [self._interval(n, r) for r in range(len(self.readers[n]))]
        return Liveness(self.count, intervals, self.until, self.workspaces, self._loose())

    def _workspaces(self) -> dict[int, list[tuple[int, float, int]]]:
        out: dict[int, list[tuple[int, float, int]]] = {}
        shared: dict[Any, tuple[int, int]] = {}
        for n, node in enumerate(self.flat.node):
            if self.names[n] in _REDUCTIONS and (count := self._broadcasts(n)):
                out[n] = [(0, float(count), n + 1)]
            for t, weight in workspace(node) if node is not None else ():
                link = self.flat.links[n][t] if t < len(self.flat.links[n]) else None
                if self.names[n] == "dot_general" and link is not None:
                    key = (link, self.flat.region[n], tuple(node.params["dimension_numbers"][1][t]))  # type: ignore[union-attr]
                    if key in shared:
                        first, slot = shared[key]
                        out[first][slot] = (*out[first][slot][:2], n + 1)
                        continue
                    shared[key] = (n, len(out.get(n, ())))
                out.setdefault(n, []).append((t, weight, n + 1))
        return out

    def _through(self, readers: Readers) -> Readers:
        """Readers, with those of a reshape in its place."""
        out: dict[tuple[int, int], None] = {}
        for u, i in readers:
            out.update(dict.fromkeys(self.readers[u][0] or [(u, i)]) if self.alias[u] else {(u, i): None})
        return list(out)

    def _base(self, link: Link) -> Link:
        """What a reshape, and a reshape of that, is made from."""
        while link is not None and self.alias[link[0]]:
            link = self.flat.links[link[0]][0]
        return link

    def _loop_end(self, n: int) -> int:
        """End of the loop that entry node n belongs to; n itself outside loops."""
        return self.flat.span.get(self.flat.region[n], (n, n))[1]

    def _past_loops(self, n: int) -> int:
        """The end of the last loop that runs between operator n and its first reader; 0 for none."""
        starts, ends = self.loops.get(self.flat.region[n], ((), ()))
        first = min((self._first(n, u, i) for readers in self.readers[n] for u, i in readers), default=0)
        i = bisect.bisect_right(ends, first) - 1
        return ends[i] if i >= 0 and starts[i] > n else 0

    def _first(self, n: int, u: int, i: int) -> int:
        """The time at which reader u first needs n."""
        return self.count if u < n else self.first[u] if self._takes_in(n, u, i) else u

    def _broadcasts(self, n: int) -> int:
        """How many operands of what reduction n takes in are broadcast, which makes them stand in full size."""
        link = self._base(self.flat.links[n][0])
        if link is None or self.names[link[0]] not in _TAKEN_IN:
            return 0
        size = self.flat.result_types[link[0]][0].size
        return sum(
            1 < t.size < size and operand is not None
            for operand, t in zip(self.flat.links[link[0]], self.flat.operand_types[link[0]], strict=True)
        )

    def _loose(self) -> dict[int, tuple[int, int, Readers]]:
        """Sets of arguments, as bits of an integer, whose new values depend on a planning node: readers first."""
        flat = self.flat
        leads_to = [0] * self.count
        news: dict[int, int] = {}
        for bit, arg in enumerate(flat.args):
            new = flat.links[arg][0] if flat.links[arg] else None
            if new is not None and new[0] != arg:
                news[arg] = new[0]
                leads_to[new[0]] |= 1 << bit
        for n in reversed(range(self.count)):
            if flat.kind[n] != "arg" and (bits := leads_to[n]):
                for link in flat.links[n]:
                    if link is not None:
                        leads_to[link[0]] |= bits
        out: dict[int, tuple[int, int, Readers]] = {}
        for bit, arg in enumerate(flat.args):
            if arg in news:
                loose = [(u, i) for u, i in self.readers[arg][0] if not leads_to[u] >> bit & 1 and flat.kind[u] == "op"]
                if loose:
                    out[arg] = (news[arg], min(u for u, _ in self.readers[arg][0]), loose)
        return out

    def _takes_in(self, n: int, u: int, i: int) -> bool:
        """True where reader u computes n, its operand i, on the fly."""
        if (u, i) in self.copied:
            return True
        if self.flat.kind[u] != "op" or self.alias[u]:
            return False
        if self.into_reduction[u]:
            return self.names[n] in _TAKEN_IN and len(self.readers[n][0]) == 1
        return self.fuses[u] or (self.names[u] in _REDUCTIONS and self.names[n] in _TAKEN_IN)

    def _place(self, n: int) -> None:
        """Where operator n is computed."""
        if not self.fuses[n] or len(self.readers[n]) != 1:
            return
        inside, standing = self._split(n)
        if self.names[n] in _EXPENSIVE:
            if standing or len(inside) != 1 or not self.once[next(iter(inside))]:
                return
        elif standing and self._full_operands(n) > 1:
            self.stands[n] = True
            return
        self.start[n] = max(n, min(standing)) if standing else n
        until, first, once = self.start[n] + 1, self.count, len(inside) + len(standing) <= 1
        taken_in = self.names[n] in _TAKEN_IN
        for u in inside:
            until, first, once = max(until, self.until[u]), min(first, self.first[u]), once and self.once[u]
            if taken_in and (self.into_reduction[u] or self.names[u] in _REDUCTIONS):
                self.into_reduction[n] = True
        for u in standing:
            if u > n:
                first = min(first, u)
        self.until[n], self.once[n] = until, once
        self.first[n] = first if inside or standing else n

    def _split(self, n: int) -> tuple[set[int], set[int]]:
        """The readers that compute n on the fly, and the others."""
        inside: set[int] = set()
        standing: set[int] = set()
        for u, i in self.readers[n][0]:
            (inside if self._takes_in(n, u, i) else standing).add(u)
        return inside, standing - inside

    def _full_operands(self, n: int) -> int:
        """Operands as large as the result that are not made out of nothing."""
        flat = self.flat
        made = [
            i for i, link in enumerate(flat.links[n]) if link is not None and self.names[link[0]] not in _GENERATORS
        ]
        if len(made) < 2:
            return len(made)
        size, types = flat.result_types[n][0].size, flat.operand_types[n]
        return sum(types[i].size >= size for i in made)

    def _needs(self, n: int, user: int, i: int) -> int:
        """The time until which ``user`` needs its operand i, made by n."""
        kind = self.flat.kind[user]
        if kind == "arg":
            return n
        if kind == "ys" or (kind == "carry" and i == 1):
            return n + 1
        until = self.until[user]
        if kind == "op" and until == user + 1 and self._in_place(user):
            return user
        return until

    def _in_place(self, n: int) -> bool:
        return self.fuses[n] and self.names[n] not in _OTHER_LAYOUT

    def _interval(self, n: int, r: int) -> Interval | None:
        flat, readers = self.flat, self.readers[n][r]
        kind = flat.kind[n]
        if kind == "arg":
            return (0, self.count)
        if kind in ("const_in", "branch_in", "out", "pred"):
            return None
        if kind == "carry":
            return (n, self._loop_end(n))
        last = n + 1 if not readers else 0
        for u, i in readers:
            last = max(last, self._needs(n, u, i))
        if kind == "ys":
            start = n if flat.links[n][0] is None else flat.span.get(flat.exec_region[n][0], (n, n))[0]
            return (start, self._horizon(readers, max(last, n + 1)))
        if kind == "xs":
            standing = [(u, i) for u, i in readers if not self._takes_in(n, u, i)]
            return (n, max(self._needs(n, u, i) for u, i in standing)) if standing else None
        if kind in ("branch_out", "loop_out"):
            return (n, self._horizon(readers, max(last, n + 1)))
        return self._operator(n, readers, last)

    def _horizon(self, readers: Readers, last: int) -> int:
        return self.count if any(self.flat.kind[u] == "out" for u, _ in readers) else last

    def _operator(self, n: int, readers: Readers, last: int) -> Interval | None:
        if self.alias[n]:
            return None
        if not readers:
            return (n, n + 1)
        kind, others = self.flat.kind, 0
        carry = -1
        for u, i in readers:
            k = kind[u]
            if k == "out":
                return (n, self.count)
            if k == "carry" and i == 1:
                if self.old_value_read[u] > n:
                    return (n, max(last, self._loop_end(u)))
                carry = u
            elif k != "arg" and k != "ys":
                others += 1
        if not others:
            return None if self.fuses[n] or carry < 0 else (n, n + 1)
        if not self.fuses[n]:
            return (n, max(last, n + 1))
        if others < len(readers) and self._in_place(n):
            return None  # it takes the buffer of the argument, the carry or the stack that it becomes
        if self.stands[n]:
            return (n, max(last, n + 1))
        if self.names[n] in _EXPENSIVE:
            inside, standing = self._split(n)
            alone = len(inside) == 1 and not standing and self.once[readers[0][0]]
            return None if alone else (n, max(last, n + 1))
        start = stop = self.start[n]
        for u, i in readers:
            if kind[u] not in ("arg", "ys") and (kind[u] != "carry" or i != 1) and not self._takes_in(n, u, i):
                stop = max(stop, start + 1, self._needs(n, u, i))
        return (start, stop) if stop > start else None
