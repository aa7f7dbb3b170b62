"""Published runs beside their predictions, and statistics of these (`benchmarks.published`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.published_rows import Run

GROUP_ROWS, APART = 4, 0.05
"""Rows from which on a group is looked at, and how much further apart than that its pairs are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came of a case: figures, or ``why`` there are none. ``facts``: JSON of `published_facts`."""

    step_s: float = math.nan
    peak_bytes: float = math.nan
    seconds: float = 0.0
    why: str = ""
    facts: str = "null"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A run with its prediction."""

    run: Run
    found: Found

    @property
    def error(self) -> float:
        """ln(predicted / measured); nan where there is one of them at most."""
        measured = self.run.step_s
        return math.log(self.found.step_s / measured) if measured and self.found.step_s > 0 else math.nan


def summary_of(errors: Iterable[float]) -> tuple[float, float, float]:
    """(median of |.|, 90th percentile of |.|, median); nan of none."""
    signed = sorted(errors)
    sizes = sorted(map(abs, signed))
    return quantile(sizes, 0.5), quantile(sizes, 0.9), quantile(signed, 0.5)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of ascending numbers, between the two nearest; nan of none."""
    if not ordered:
        return math.nan
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def ordered(compared: Iterable[Compared]) -> tuple[int, int]:
    """(pairs that are ordered right, pairs): of runs of one group whose measured times are further apart than
    `APART`."""
    groups: dict[tuple[str, ...], list[Compared]] = {}
    for each in compared:
        groups.setdefault(each.run.group, []).append(each)
    right = pairs = 0
    for rows in groups.values():
        for a, b in itertools.combinations(rows, 2) if len(rows) >= GROUP_ROWS else ():
            assert a.run.step_s is not None and b.run.step_s is not None
            measured = math.log(a.run.step_s / b.run.step_s)
            if abs(measured) > math.log1p(APART):
                pairs += 1
                right += measured * (a.found.step_s - b.found.step_s) > 0
    return right, pairs
