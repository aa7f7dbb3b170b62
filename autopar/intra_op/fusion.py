"""Which operators a platform's compiler makes one kernel of, and what is written to memory.

In: flat planning nodes, and how the compiler fuses (`Fusion`). Out: kernels, and the values that they write (`Fused`).

A *kernel* is what one written result is made by: the operator, and all that it computes on the fly, which reads no
memory but what is written                                                                               `_kernels`.
Kernels that go over the same elements at the same level, and read one value of that size or read what the other writes,
are one, as XLA's multi-output fusion makes them: an optimizer's update reads each gradient once, and writes three
values. A level ends at products, at what does not fuse, and at reductions, but for those over the last dimension where
the compiler keeps rows on the chip (a softmax, a norm)                                              `_levels`, `_join`.
What a kernel makes for itself alone is not written                                                           `_leaves`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.intra_op.flatten import CONSTANT, Flat
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
        one_hot: True where a scatter of one element a row into what is made out of nothing is a comparison with its
            index, which fuses: the gradient of picked logits.
        into_products: True where products compute their operands on the fly, and the first kernel that reads a
            product's result is part of it.
        launch_s: from one kernel to the next.
        in_place: True where an all-reduce leaves its result where its operand was, and a donated argument that is read
            late is not copied.
    """

    joins: bool = False
    rows: bool = False
    recomputes: bool = False
    one_hot: bool = False
    into_products: bool = False
    launch_s: float = 0.0
    in_place: bool = False


FUSIONS: Mapping[Platform, Fusion] = {
    "cpu": Fusion(),
    "gpu": Fusion(joins=True, rows=True, launch_s=2e-6, in_place=True),
    "tpu": Fusion(
        joins=True, rows=True, recomputes=True, one_hot=True, into_products=True, launch_s=5e-7, in_place=True
    ),
}
"""As compiled programs of jax 0.10.2 have it (`python -m benchmarks.fidelity`): on GPUs Triton fusions of softmax and
norms, on TPUs fusions around products, of which the rows of a softmax are a part. Launches are guesses: of CUDA graphs,
of a TPU's next operator."""


@dataclass(frozen=True, slots=True)
class Fused:
    """``written`` is bool per value: True where a kernel writes it. ``makers``: of each planning node the kernels that
    compute it, none of what is no kernel's; a kernel is known by a planning node whose result it writes, products by
    themselves. ``at``: when the last kernel runs that computes a planning node."""

    flat: Flat
    fusion: Fusion
    written: list[bool]
    makers: list[frozenset[int]]
    at: list[int]
    fuses: list[bool]
    heavy: list[bool]
    base: list[int]
    """The value that each operand is, of a reshape what that is made from; CONSTANT for a constant."""
    of_products: frozenset[tuple[int, int]]
    """(kernel, value) where a kernel is part of the product whose result it reads."""
    filled: list[bool]
    """Planning nodes whose results are filled in where they are read: a mask's, a gradient's zeros."""

    def on_the_fly(self, n: int) -> bool:
        """True for operators whose results are made by their readers alone."""
        first, stop = self.flat.first_value[n], self.flat.first_value[n + 1]
        return self.fuses[n] and not any(self.written[value] for value in range(first, stop))


def fused(flat: Flat, fusion: Fusion, turn: int | None = None, written: list[bool] | None = None) -> Fused:
    """Kernels of a flat graph.

    Args:
        turn: planning nodes from there on are a program of their own; None: none are.
        written: per value, what is known to be written, where kernels do not become one.
    """
    return _Run(flat, fusion, len(flat.kind) if turn is None else turn, written).run()


class _Run:
    def __init__(self, flat: Flat, fusion: Fusion, turn: int, written: list[bool] | None) -> None:
        self.flat, self.fusion, self.turn = flat, fusion, turn
        of_key: list[Primitive | None] = [
            record_of(node.primitive) if (node := flat.node[n]) is not None else None for n in flat.example
        ]
        self.records = [of_key[k] for k in flat.key]
        self.alias = [r is not None and r.traits.aliases for r in self.records]
        self.fuses = [r is not None and r.traits.fusible and not r.traits.aliases for r in self.records]
        self.heavy = [r is not None and r.traits.contraction for r in self.records]
        self.base = [self._base(value) for value in flat.source]
        self.user: list[int] = flat.columns().user.tolist()
        self.one_hot = [fusion.one_hot and self._is_one_hot(n) for n in range(len(flat.kind))]
        self.fuses = [a or b for a, b in zip(self.fuses, self.one_hot, strict=True)]
        self.readers: list[list[int]] = [[] for _ in flat.maker]
        """Value → the edges that read it, reshapes left out."""
        for e, value in enumerate(self.base):
            if value >= 0 and not self.alias[self.user[e]]:
                self.readers[value].append(e)
        self.filled = [record is not None and record.traits.generates and self._full_operands(n) == 0
                       for n, record in enumerate(self.records)]  # fmt: skip
        self.written = self._written() if written is None else list(written)
        self.kernels = self._kernels()
        self.parent: dict[int, int] = {}
        """Kernels that are one, as a forest."""

    def run(self) -> Fused:
        if self.fusion.joins:
            self._join()
        flat = self.flat
        for n, fuses in enumerate(self.fuses):
            for value in range(flat.first_value[n], flat.first_value[n + 1]) if fuses else ():
                self.written[value] = self.written[value] and not self.filled[n] and self._leaves(value)
        makers = [frozenset(map(self._find, kernels)) for kernels in self.kernels]
        runs = dict.fromkeys((k for kernels in makers for k in kernels), 0)
        for n, kernels in enumerate(self.kernels):
            if kernels == {n}:
                kernel = self._find(n)
                runs[kernel] = max(runs[kernel], n)
        at = [max((runs[k] for k in kernels), default=n) for n, kernels in enumerate(makers)]
        return Fused(
            flat, self.fusion, self.written, makers, at, self.fuses, self.heavy, self.base, self._of_products(),
            self.filled,
        )  # fmt: skip

    def _is_one_hot(self, n: int) -> bool:
        """True for a scatter of one element into each row of what is made out of nothing."""
        node, record = self.flat.node[n], self.records[n]
        if node is None or record is None or not node.primitive.startswith("scatter"):
            return False
        numbers, (into, _, updates) = node.params["dimension_numbers"], node.operand_types[:3]
        dims = numbers["scatter_dims_to_operand_dims"]
        if len(dims) != 1 or updates.size * into.shape[dims[0]] != into.size or not numbers["operand_batching_dims"]:
            return False
        value = self.base[self.flat.first_edge[n]]
        made = self.records[self.flat.maker[value]] if value != CONSTANT else None
        return value == CONSTANT or (made is not None and made.traits.generates)

    def _base(self, value: int) -> int:
        while value >= 0 and self.alias[self.flat.maker[value]]:
            value = self.flat.source[self.flat.first_edge[self.flat.maker[value]]]
        return value

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
        if n < self.turn <= u or self.flat.region[u] != self.flat.region[n]:
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
                count += record is None or not (record.traits.generates or self.one_hot[flat.maker[value]])
        return count

    def _on_the_fly(self, n: int) -> bool:
        """True for operators whose results are made by their readers alone."""
        first, stop = self.flat.first_value[n], self.flat.first_value[n + 1]
        return self.filled[n] or (self.fuses[n] and not any(self.written[value] for value in range(first, stop)))

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
        first: dict[tuple[int, tuple[int, int, int, bool, str]], int] = {}
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
                    where = self._place(kernel, level)
                    if t.size == size:
                        other = first.setdefault((value, where), kernel)
                        self.parent[self._find(kernel)] = self._find(other)
                    if self.fuses[made] and self._place(made, level) == where:
                        self.parent[self._find(kernel)] = self._find(made)

    def _place(self, kernel: int, level: list[int]) -> tuple[int, int, int, bool, str]:
        """Kernels of one place may be one: over as many elements, in one body, level, program and pass."""
        node = self.flat.node[kernel]
        phase = "" if node is None else node.phase
        return self._elements(kernel), self.flat.region[kernel], level[kernel], kernel >= self.turn, phase

    def _elements(self, n: int) -> int:
        """Over how many elements a kernel goes."""
        return (self.flat.operand_types if self._reduces(n) else self.flat.result_types)[n][0].size

    def _reduces(self, n: int) -> bool:
        record = self.records[n]
        return record is not None and record.traits.reduces

    def _find(self, kernel: int) -> int:
        while (parent := self.parent.get(kernel, kernel)) != kernel:
            self.parent[kernel] = self.parent.get(parent, parent)
            kernel = parent
        return kernel

    def _leaves(self, value: int) -> bool:
        """True where something reads a value that is no part of the kernel that makes it."""
        mine = self._find(self.flat.maker[value])
        for e in self.readers[value]:
            u = self.user[e]
            if not self.fuses[u] or any(self._find(k) != mine for k in self.kernels[u]):
                return True
        return not self.readers[value]

    def _of_products(self) -> frozenset[tuple[int, int]]:
        """The first kernel that reads each product's result, where it is part of the product."""
        out: set[tuple[int, int]] = set()
        for n in (n for n, heavy in enumerate(self.heavy) if heavy and self.fusion.into_products):
            value, size = self.flat.first_value[n], self.flat.result_types[n][0].size
            found = [k for e in self.readers[value] for k in self.kernels[self.user[e]] if not self.heavy[k]]
            first = min((k for k in found if self._elements(k) == size), default=None)
            if first is not None:
                out.add((self._find(first), value))
        return frozenset(out)
