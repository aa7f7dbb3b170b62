"""Who reads each value, and in what order; values that are read alike are listed once.

What happens to a value (its copies, the chains that reshard it, when each of those is made and last read) follows
from its class and from the classes of its readers, in order. A *pattern* is one such combination with all the
values that have it: counted once under a choice of strategies, however deep the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.intra_op.flatten import Flat
from autopar.intra_op.hashing import mixed, numbered


@dataclass(frozen=True, slots=True)
class Use:
    """``count`` operands: operand ``operand`` of the nodes of class ``user``, made as ``source`` (class, result) and
    resharded, if at all, in ``region``."""

    user: int
    operand: int
    source: tuple[int, int]
    region: int
    count: int


@dataclass(frozen=True, slots=True)
class Pattern:
    """Values of ``source`` (class, result) that ``readers`` (class, operand) read, in this order, from ``region``.
    ``starts`` is int64[values]: where the readers of each begin in `Uses.order`."""

    source: tuple[int, int]
    region: int
    readers: tuple[tuple[int, int], ...]
    starts: Any


@dataclass(frozen=True, slots=True)
class Uses:
    """``order`` is int64[operands that are not constants]: edges by value, region and time. ``user`` and ``value`` are
    int64[edges]: the planning node that an edge belongs to, and the value that it reads (−1: a constant). ``kinds`` are
    in order of their first occurrence."""

    order: Any
    user: Any
    value: Any
    kinds: tuple[Use, ...]
    patterns: tuple[Pattern, ...]
    maker: Any
    """int64[values]: the planning node that makes each."""
    made: tuple[tuple[int, int], ...]
    """(class, result) of all kinds of values."""
    made_as: Any
    """int64[values]: each value's row in ``made``."""
    stays: Any
    """bool[values]: arguments and carries, whose buffers last."""

    def edges(self, pattern: int, position: int) -> Any:
        """int64[values of a pattern]: the edge by which each one's reader at ``position`` reads it."""
        return self.order[self.patterns[pattern].starts + position]


def uses_of(flat: Flat, class_of: Any) -> Uses:
    """All uses of a flat graph's values; ``class_of`` is int64[planning nodes], as `fold` gives it."""
    at = flat.columns()
    user, value, region, maker = at.user, at.source, at.exec_region, at.maker
    first_edge, first_value = at.first_edge, at.first_value
    linked = np.flatnonzero(value >= 0)
    producer = maker[value[linked]]
    result = value[linked] - first_value[producer]
    operand = linked - first_edge[user[linked]]
    columns = (class_of[user[linked]], operand, class_of[producer], result, region[linked])
    kind, first = numbered(mixed(*columns))
    counts = np.bincount(kind, minlength=len(first))
    rows = zip(*(c[first].tolist() for c in columns), counts.tolist(), strict=True)
    kinds = tuple(Use(u, i, (p, r), where, count) for u, i, p, r, where, count in rows)

    by_value = np.lexsort((region[linked], value[linked]))  # stable: readers stay in order of time
    order, kind = linked[by_value], kind[by_value]
    fresh = np.ones(len(order), bool)
    fresh[1:] = (np.diff(value[order]) != 0) | (np.diff(region[order]) != 0)
    starts = np.flatnonzero(fresh)
    lengths = np.diff(np.append(starts, len(order)))
    position = np.arange(len(order)) - np.repeat(starts, lengths)
    alike, example = numbered(np.add.reduceat(mixed(kind, position), starts)) if len(starts) else (starts, starts)
    members = np.split(np.argsort(alike, kind="stable"), np.cumsum(np.bincount(alike))[:-1]) if len(starts) else []
    patterns: list[Pattern] = []
    for segment, group in zip(example.tolist(), members, strict=True):
        start = int(starts[segment])
        readers = [kinds[k] for k in kind[start : start + int(lengths[segment])].tolist()]
        patterns.append(
            Pattern(readers[0].source, readers[0].region, tuple((k.user, k.operand) for k in readers), starts[group])
        )
    made_as, first = numbered(mixed(class_of[maker], np.arange(len(maker)) - first_value[maker]))
    made = zip(class_of[maker[first]].tolist(), (first - first_value[maker[first]]).tolist(), strict=True)
    lasting = np.array([flat.kind[n] in ("arg", "carry") for n in flat.example])[at.key]
    return Uses(order, user, value, kinds, tuple(patterns), maker, tuple(made), made_as, lasting[maker])
