"""What each operator reads from a device's memory and writes to it, where compilers fuse operators.

In: flat planning nodes, what of them is materialised (`liveness`), and how the platform's compiler fuses (`Fusion`).
Out: weights: how often an operator reads each of its operands, and writes each of its results (`Traffic`). They do not
depend on how anything is sharded: seconds follow from the bytes of operands and results on a device
(`strategy_graph.Class.moved_s`).

A *kernel* is what one written result is made by: the operator, and all that it computes on the fly, which reads no
memory but what is written                                                                               `_kernels`.
Kernels that go over the same elements at the same level, and read one value of that size or read what the other writes,
are one, as XLA's multi-output fusion makes them: an optimizer's update reads each gradient once, and writes three
values. A level ends at products, at what does not fuse, and at reductions, but for those over the last dimension where
the compiler keeps rows on the chip (a softmax, a norm)                                              `_levels`, `_join`.
A kernel reads a value once, however often its operators do, and nothing that it makes itself; what several kernels
compute on the fly, each of them reads the operands of                                                          `_count`.
Products, attention and opaque calls are kernels of their own, whose seconds count their bytes already (`cost.kernels`).
All else reads its operands and writes its results, or the parts of them that `Primitive.touches` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.intra_op.flatten import CONSTANT
from autopar.intra_op.liveness import Liveness
from autopar.ir.cluster import Platform
from autopar.primitives import record_of
from autopar.primitives.record import Primitive


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """What a compiler fuses, beside arithmetic into what reads it.

    Attributes:
        joins: True where kernels become one.
        rows: True where a reduction over the last dimension, what it reads and what reads it are one.
        recomputes: True where costly functions are computed again by each reader.
        into_products: True where products compute their operands on the fly, and the first kernel that reads a
            product's result is part of it.
        launch_s: from one kernel to the next.
    """

    joins: bool = False
    rows: bool = False
    recomputes: bool = False
    into_products: bool = False
    launch_s: float = 0.0


FUSIONS: Mapping[Platform, Fusion] = {
    "cpu": Fusion(),
    "gpu": Fusion(joins=True, rows=True, launch_s=2e-6),
    "tpu": Fusion(joins=True, recomputes=True, into_products=True, launch_s=5e-7),
}
"""As compiled programs of jax 0.10.2 have it (`python -m benchmarks.fidelity`): on GPUs Triton fusions of softmax and
norms, on TPUs fusions around products. Launches are guesses: of CUDA graphs, of a TPU's next operator."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """``reads`` is float64[edges], how often each operand is read; ``writes`` float64[values], how often each result is
    written; ``kernels`` float64[planning nodes], how many kernels are counted there."""

    reads: Any
    writes: Any
    kernels: Any
    fusion: Fusion


def traffic(live: Liveness, fusion: Fusion) -> Traffic:
    """How often each operand is read from memory, and each result written, in one execution of its operator."""
    return _Run(live, fusion).run()


class _Run:
    def __init__(self, live: Liveness, fusion: Fusion) -> None:
        self.live, self.flat, self.fusion = live, live.flat, fusion
        flat = self.flat
        of_key: list[Primitive | None] = [
            record_of(node.primitive) if (node := flat.node[n]) is not None else None for n in flat.example
        ]
        self.records = [of_key[k] for k in flat.key]
        self.fuses = [r is not None and r.traits.fusible and not r.traits.aliases for r in self.records]
        self.heavy = [r is not None and r.traits.contraction for r in self.records]
        self.reduces = [r is not None and r.traits.reduces for r in self.records]
        self.base: list[int] = live.base.tolist()
        self.user: list[int] = flat.columns().user.tolist()
        self.readers: list[list[int]] = [[] for _ in flat.maker]
        """Value → the edges that read it, reshapes left out."""
        for e, value in enumerate(self.base):
            record = self.records[self.user[e]]
            if value >= 0 and not (record is not None and record.traits.aliases):
                self.readers[value].append(e)
        self.written: list[bool] = live.written.tolist() if not fusion.joins else self._written()
        self.kernels = self._kernels()
        self.parent: dict[int, int] = {}
        """Kernels that are one, as a forest; a kernel is known by the operator of a result that it writes."""

    def run(self) -> Traffic:
        if self.fusion.joins:
            self._join()
        return self._count()

    # --- what is written --------------------------------------------------------------------------------------------

    def _written(self) -> list[bool]:
        """What of the results of operators that fuse is written, before kernels are joined."""
        flat, out = self.flat, [True] * len(self.flat.maker)
        for n in reversed(range(len(flat.kind))):
            if self.fuses[n] and flat.first_value[n + 1] - flat.first_value[n] == 1:
                out[flat.first_value[n]] = self._needs_memory(n)
        return out

    def _needs_memory(self, n: int) -> bool:
        record, edges = self.records[n], self.readers[self.flat.first_value[n]]
        assert record is not None
        if not edges or not all(self._computes(e, n) for e in edges):
            return True
        if record.traits.reduces or len({self.user[e] for e in edges}) == 1:
            return record.traits.reduces
        if record.traits.expensive and not (self.fusion.recomputes and record.traits.elementwise):
            return True
        return self._full_operands(n) > 1

    def _computes(self, e: int, n: int) -> bool:
        """True where the reader of edge ``e`` computes n on the fly."""
        u = self.user[e]
        if n < self.live.turn <= u or self.flat.region[u] != self.flat.region[n]:
            return False
        return self.fuses[u] or (self.heavy[u] and self.fusion.into_products)

    def _full_operands(self, n: int) -> int:
        """Operands as large as the result that are not made out of nothing."""
        flat, size = self.flat, self.flat.result_types[n][0].size
        count = 0
        for i, t in enumerate(flat.operand_types[n]):
            value = self.base[flat.first_edge[n] + i]
            if value != CONSTANT and t.size >= size:
                record = self.records[flat.maker[value]]
                count += record is None or not record.traits.generates
        return count

    def _from_nothing(self, n: int) -> bool:
        """True for values that are filled in where they are read: a mask's, a gradient's zeros."""
        record = self.records[n]
        return record is not None and record.traits.generates and self._full_operands(n) == 0

    def _on_the_fly(self, n: int) -> bool:
        """True for operators whose results are made by their readers alone."""
        if self._from_nothing(n):
            return True
        first, stop = self.flat.first_value[n], self.flat.first_value[n + 1]
        return self.fuses[n] and not any(self.written[value] for value in range(first, stop))

    # --- kernels ----------------------------------------------------------------------------------------------------

    def _kernels(self) -> list[frozenset[int]]:
        """The kernels that compute each operator."""
        flat, none = self.flat, frozenset[int]()
        out = [none] * len(flat.kind)
        for n in reversed(range(len(flat.kind))):
            if not self.fuses[n] and not self.heavy[n]:
                continue
            if not self._on_the_fly(n):
                out[n] = frozenset((n,))
                continue
            found: set[int] = set()
            for value in range(flat.first_value[n], flat.first_value[n + 1]):
                for e in self.readers[value]:
                    found |= out[self.user[e]]
            out[n] = frozenset(found)
        return out

    def _levels(self) -> list[int]:
        """Of each planning node how often a kernel has to end on the longest way to it."""
        flat = self.flat
        level = [0] * len(flat.kind)
        for n in range(len(flat.kind)):
            for value in flat.source[flat.first_edge[n] : flat.first_edge[n + 1]]:
                if value >= 0:
                    level[n] = max(level[n], level[flat.maker[value]] + self._ends(flat.maker[value]))
        return level

    def _ends(self, n: int) -> bool:
        """True where what reads n's result is no part of the kernel that makes it."""
        record, node = self.records[n], self.flat.node[n]
        if record is None or node is None or record.traits.aliases:
            return False
        if not record.traits.fusible:
            return True
        rank = len(self.flat.operand_types[n][0].shape) if record.traits.reduces else 0
        return record.traits.reduces and not (self.fusion.rows and rank - 1 in node.params["axes"])

    def _join(self) -> None:
        flat, level = self.flat, self._levels()
        first: dict[tuple[int, int, int, int, bool], int] = {}
        for n, kernels in enumerate(self.kernels):
            if not self.fuses[n]:
                continue
            for i, t in enumerate(flat.operand_types[n]):
                value = self.base[flat.first_edge[n] + i]
                if value == CONSTANT or self._on_the_fly(flat.maker[value]):
                    continue
                made = flat.maker[value]
                for kernel in kernels:
                    if self.heavy[kernel]:
                        continue
                    size = self._elements(kernel)
                    where = size, flat.region[kernel], level[kernel], kernel >= self.live.turn
                    if t.size == size:
                        other = first.setdefault((value, *where), kernel)
                        self.parent[self._find(kernel)] = self._find(other)
                    there = flat.region[made], level[made], made >= self.live.turn
                    if self.fuses[made] and (self._elements(made), *there) == where:
                        self.parent[self._find(kernel)] = self._find(made)

    def _elements(self, n: int) -> int:
        """Over how many elements a kernel goes."""
        return (self.flat.operand_types if self.reduces[n] else self.flat.result_types)[n][0].size

    def _find(self, kernel: int) -> int:
        while (parent := self.parent.get(kernel, kernel)) != kernel:
            self.parent[kernel] = self.parent.get(parent, parent)
            kernel = parent
        return kernel

    # --- what they read and write -----------------------------------------------------------------------------------

    def _count(self) -> Traffic:
        flat = self.flat
        reads, writes = np.zeros(len(flat.source)), np.zeros(len(flat.maker))
        seen, counted = self._with_products(), set[int]()
        """Products that have read an operand's worth, which their own bytes are."""
        for n, record in enumerate(self.records):
            node = flat.node[n]
            if record is None or node is None or record.traits.aliases or self.heavy[n] or record.traits.opaque:
                continue
            parts, edges = dict(record.touches(node)), range(flat.first_edge[n], flat.first_edge[n + 1])
            mine = {self._find(k) for k in self.kernels[n]}
            for i, e in enumerate(edges):
                value = self.base[e]
                if value == CONSTANT or (self.fuses[n] and self._on_the_fly(flat.maker[value])):
                    continue
                if not self.fuses[n]:
                    reads[e] = parts.get(i, 1.0) + self._from_nothing(flat.maker[value])
                    continue
                fresh = {(k, value) for k in mine if not self._makes(k, value)} - seen
                seen |= fresh
                whole = flat.operand_types[n][i].size >= self._elements(n)
                count = sum(not (self.heavy[k] and whole and k not in counted) for k, _ in fresh)
                counted |= {k for k, _ in fresh if self.heavy[k] and whole}
                reads[e] = count * parts.get(i, 1.0)
            for r, value in enumerate(range(flat.first_value[n], flat.first_value[n + 1])):
                if not self.fuses[n] or (self.written[value] and self._leaves(value) and not self._from_nothing(n)):
                    writes[value] = parts.get(len(edges) + r, 1.0)
        kernels = np.array([self._is_kernel(n) for n in range(len(flat.kind))], float)
        return Traffic(reads, writes, kernels, self.fusion)

    def _with_products(self) -> set[tuple[int, int]]:
        """(kernel, value) of the first kernel that reads each product's result, where it is part of the product."""
        out: set[tuple[int, int]] = set()
        if not self.fusion.into_products:
            return out
        for n in (n for n, heavy in enumerate(self.heavy) if heavy):
            value, size = self.flat.first_value[n], self.flat.result_types[n][0].size
            found = [k for e in self.readers[value] for k in self.kernels[self.user[e]] if not self.heavy[k]]
            first = min((k for k in found if self._elements(k) == size), default=None)
            if first is not None:
                out.add((self._find(first), value))
        return out

    def _makes(self, kernel: int, value: int) -> bool:
        return self.fuses[self.flat.maker[value]] and self._find(self.flat.maker[value]) == kernel

    def _leaves(self, value: int) -> bool:
        """True where something reads a value that is no part of the kernel that makes it."""
        mine = self._find(self.flat.maker[value])
        for e in self.readers[value]:
            u = self.user[e]
            if not self.fuses[u] or any(self._find(k) != mine for k in self.kernels[u]):
                return True
        return not self.readers[value]

    def _is_kernel(self, n: int) -> bool:
        if self.fuses[n]:
            return not self._on_the_fly(n) and self._find(n) == n
        record = self.records[n]
        return record is not None and not (record.traits.aliases or self.heavy[n] or record.traits.opaque)
