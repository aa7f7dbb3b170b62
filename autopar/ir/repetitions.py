"""What repeats what came before, stored as that: rows of a graph's nodes, paths.

With o(n) the operands of node n, and m the last node before n of the same operator that follows the same operators
(`_Alike`), a node is a row

    (operator, o(n) − o(m))

and as layers follow one another at equal distances, the rows of the next are those of the last: after the first two,
``(−back, count)`` stands for ``count`` rows that are those from ``back`` rows before on (Lempel and Ziv, 1977):
`folded`, `unfolded`. Paths are stored without what the one before begins with, too: `shortened`, `spelled_out`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from autopar.ir.errors import VerifyError

_SEEN = 3
"""Rows, at least, for which one that repeats them stands."""
_CONTEXT = 12
"""Operators before a node by which it is told from others of its operator in the same layer."""


class _Alike:
    """Nodes so far, and which of them was the last like another: of its operator, after the same `_CONTEXT` operators;
    where there is none, of its operator."""

    def __init__(self) -> None:
        self._operators: list[int] = []
        self._last: dict[tuple[int, ...], Sequence[int]] = {}

    def before(self, operator: int) -> Sequence[int]:
        """Operands of the last node that is like the next, which is of that operator; () where none is."""
        self._operators.append(operator)
        found = self._last.get(tuple(self._operators[-1 - _CONTEXT :]))
        return self._last.get((operator,), ()) if found is None else found

    def append(self, operands: Sequence[int]) -> None:
        """The node whose operator was given has these operands."""
        self._last[tuple(self._operators[-1 - _CONTEXT :])] = self._last[self._operators[-1],] = operands


def folded(nodes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """``nodes``, operator and operands of each, as they are stored."""
    alike = _Alike()
    coded: list[tuple[int, ...]] = []
    for operator, *operands in nodes:
        before = alike.before(operator)
        coded.append(
            (operator, *(o - m for o, m in itertools.zip_longest(operands, before[: len(operands)], fillvalue=0)))
        )
        alike.append(operands)
    out: list[tuple[int, ...]] = []
    seen: dict[tuple[tuple[int, ...], ...], int] = {}
    at = 0
    while at < len(coded):
        start, count = seen.get(tuple(coded[at : at + _SEEN]), at), 0
        while start < at and at + count < len(coded) and coded[start + count] == coded[at + count]:
            count += 1
        again = count >= _SEEN
        out.append((start - at, count) if again else coded[at])
        for passed in range(at, at + (count if again else 1)):
            seen[tuple(coded[passed : passed + _SEEN])] = passed
        at += count if again else 1
    return tuple(out)


def unfolded(rows: Sequence[tuple[int, ...]], length: int, where: str) -> Iterator[tuple[int, ...]]:
    """Operator and operands of each node, as `folded` was given them: ``length`` of them. Raises VerifyError, which
    says ``where``, where rows are of nothing that there is."""
    alike = _Alike()
    coded: list[tuple[int, ...]] = []
    for row in rows:
        if not row:
            raise VerifyError(f"{where}, node {len(coded)}: no operator")
        back, count = (-row[0], row[1]) if row[0] < 0 and len(row) == 2 else (0, 1)
        if row[0] < 0 and not (0 < back <= len(coded) and 0 < count <= length - len(coded)):
            raise VerifyError(f"{where}, node {len(coded)}: no {row} of {len(coded)} rows, in {length}")
        for _ in range(count):
            coded.append(coded[-back] if back else row)
            operator, *differences = coded[-1]
            before = alike.before(operator)[: len(differences)]
            operands = [d + m for d, m in itertools.zip_longest(differences, before, fillvalue=0)]
            alike.append(operands)
            yield operator, *operands
    if len(coded) != length:
        raise VerifyError(f"{where}: {len(coded)} nodes, of {length}")


def shortened(paths: Sequence[str]) -> tuple[tuple[int, str], ...]:
    """Paths, each without what the one before begins with, too."""
    out: list[tuple[int, str]] = []
    for before, path in itertools.pairwise(["", *paths]):
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, path, strict=False)))
        out.append((same, path[same:]))
    return tuple(out)


def spelled_out(paths: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    """What `shortened` was given. Raises VerifyError where one begins with more than there is."""
    out: list[str] = []
    for number, (same, rest) in enumerate(paths):
        before = out[-1] if out else ""
        if not 0 <= same <= len(before):
            raise VerifyError(f"path {number} has {same} characters of {before!r}")
        out.append(before[:same] + rest)
    return tuple(out)
