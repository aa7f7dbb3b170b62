"""Where a sequence of equations is cut into layers.

Two ways. Repeated structure first (`repeated`): the period p with the most work in it, its cuts at the same place in
every repetition, where the fewest bytes cross. Otherwise a dynamic program (`balanced`), as Alpa clusters operators
(Zheng et al., OSDI 2022, section 5.2): over prefixes of the sequence,

    G[l, i] = min over j of  G[l−1, j] + cross[j] + τ·(work(j, i) / average − 1)²,   LEAST ≤ work(j, i) / average ≤ 1+ε

with cross[j] the bytes of distinct values made before position j and used after it (what skips over several layers
counts at every cut that it crosses), and τ small, so that balance decides between equals.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

EPSILON = 0.5
"""A layer's work is at most 1 + this times the average (Alpa's)."""
LEAST = 0.25
"""…and at least this share of the average: a cut before the last scalar is cheap, and no use (guessed)."""
MIN_COVERED = 0.5
"""Share of all work that repeated structure must hold (guessed)."""
CANDIDATES_PER_LAYER = 16
"""Places where the dynamic program may cut, per layer (guessed)."""
TIE = 1e-3
"""τ, as a share of the average crossing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """Equations ``start`` to ``start + count·period`` are ``count`` equal blocks."""

    start: int
    period: int
    count: int

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where blocks begin and the last one ends."""
        return tuple(self.start + k * self.period for k in range(self.count + 1))


def crossing(made: Sequence[int], last_use: Sequence[int], sizes: Sequence[int], length: int) -> Floats:
    """float64[length + 1]: bytes that cross each position, of values of ``sizes[k]`` bytes that equation ``made[k]``
    makes and ``last_use[k]`` uses last."""
    change = np.zeros(length + 2)
    np.add.at(change, np.asarray(made, np.int64) + 1, np.asarray(sizes, float))
    np.add.at(
        change, np.maximum(np.asarray(last_use, np.int64), np.asarray(made, np.int64)) + 1, -np.asarray(sizes, float)
    )
    return np.cumsum(change)[: length + 1]


def repeated(tokens: Ints, work: Floats, cross: Floats) -> Repeated | None:
    """The repeated blocks that hold the most work; None where they hold less than `MIN_COVERED` of it.

    Args:
        tokens: int64[equations], equal for equations that compute the same.
        work: float64[equations], FLOPs.
        cross: float64[equations + 1], bytes that cross each position.
    """
    n = len(tokens)
    total = np.concatenate([[0.0], np.cumsum(work)])
    best: tuple[float, int, int, int] | None = None
    for period in range(1, n // 2 + 1):
        start, stop = _longest(tokens[:-period] == tokens[period:], total, period)
        if stop - start < 2 * period:
            continue
        covered = total[stop] - total[start]
        if best is None or covered > best[0] * 1.05:
            best = (covered, period, start, stop)
    if best is None or best[0] < MIN_COVERED * total[-1]:
        return None
    _, period, start, stop = best
    choices: list[tuple[float, int, int]] = []
    for offset in range(period):
        count = (stop - start - offset) // period
        if count >= 2:
            at = start + offset + period * np.arange(count + 1)
            inner = at[1:-1] if count > 1 else at
            choices.append((float(np.max(cross[inner])), -count, offset))
    if not choices:
        return None
    least = min(c[0] for c in choices)
    most = min(c[1] for c in choices if c[0] <= least)
    offset = min(c[2] for c in choices if c[0] <= least and c[1] == most)
    return Repeated(start=start + offset, period=period, count=-most)


def named_blocks(scopes: Sequence[tuple[str, ...]]) -> tuple[int, ...]:
    """Positions where another block begins, by the user's names around each equation.

    Blocks are told apart at the shallowest depth at which the names differ; equations without a name there belong to
    what is before them, the first ones to what is after them.
    """
    depth = 0
    while True:
        names = [s[depth] if len(s) > depth else None for s in scopes]
        known = [k for k, name in enumerate(names) if name is not None]
        if not known:
            return ()
        changes = [b for a, b in itertools.pairwise(known) if names[a] != names[b]]
        if changes:
            return tuple(changes)
        depth += 1


def _longest(equal: NDArray[np.bool_], total: Floats, period: int) -> tuple[int, int]:
    """The stretch [start, stop) of the sequence that repeats after ``period``, by the work in it."""
    if not equal.any():
        return 0, 0
    edges = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]]).astype(np.int8)))
    starts, stops = edges[::2], edges[1::2] + period
    long_enough = stops - starts >= 2 * period
    if not long_enough.any():
        return 0, 0
    starts, stops = starts[long_enough], stops[long_enough]
    k = int(np.argmax(total[stops] - total[starts]))
    return int(starts[k]), int(stops[k])


def balanced(work: Floats, cross: Floats, layers: int, allowed: Sequence[int] | None = None) -> tuple[int, ...]:
    """Positions of the ``layers`` − 1 cuts (fewer where there are not as many places), ascending.

    Args:
        work: FLOPs of each equation.
        cross: bytes that cross each position, one longer than ``work``.
        layers: L.
        allowed: positions where a cut may be; all, if None.
    """
    n = len(work)
    total = np.concatenate([[0.0], np.cumsum(np.maximum(work, 1e-9))])
    places = _candidates(total, cross, layers) if allowed is None else np.asarray(sorted(allowed), np.int64)
    places = places[(places > 0) & (places < n)]
    layers = min(layers, len(places) + 1)
    if layers < 2:
        return ()
    at = np.concatenate([[0], places, [n]])
    upto = total[at]
    share = (upto[None, :] - upto[:, None]) * (layers / total[-1])  # [from, to], 1 is the average
    scale = float(np.mean(cross[places])) or 1.0
    step = np.where(at == 0, 0.0, cross[at])[:, None] / scale + TIE * (share - 1) ** 2
    epsilon, least = EPSILON, LEAST
    while True:
        cost = np.where((at[None, :] > at[:, None]) & (share <= 1 + epsilon) & (share >= least), step, np.inf)
        reach = np.full(len(at), np.inf)
        reach[0] = 0.0
        backs: list[Ints] = []
        for _ in range(layers):
            through = reach[:, None] + cost
            backs.append(np.argmin(through, axis=0))
            reach = np.min(through, axis=0)
        if np.isfinite(reach[-1]):
            break
        epsilon, least = 2 * epsilon, least / 2 if least > 1e-3 else 0.0  # one equation may be more than a share
    cuts: list[int] = []
    here = len(at) - 1
    for back in reversed(backs):
        here = int(back[here])
        cuts.append(int(at[here]))
    return tuple(sorted(c for c in cuts if c))


def _candidates(total: Floats, cross: Floats, layers: int) -> Ints:
    """Positions that few bytes cross, some in every stretch of the work."""
    n = len(total) - 1
    buckets = CANDIDATES_PER_LAYER * layers
    if n <= buckets:
        return np.arange(1, n, dtype=np.int64)
    bucket = np.minimum((total[1:n] / total[-1] * buckets).astype(np.int64), buckets - 1)
    positions = np.arange(1, n)
    order = np.lexsort((positions, cross[1:n], bucket))
    first = np.concatenate([[True], bucket[order][1:] != bucket[order][:-1]])
    return np.sort(positions[order][first])
