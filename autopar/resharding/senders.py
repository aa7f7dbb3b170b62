"""Who sends how much: linear programs over groups, and the lower bound that they prove.

A demand is b bytes that one of the endpoints H holds and A targets want. Let x_h be what endpoint h ∈ H sends of it to
anyone, and y_t what a target's endpoint t passes on. Every byte leaves its holders at least once, and A copies of it
are sent in all:

    minimise T   with   ∑_h x_h ≥ b,   ∑_h x_h + ∑_t y_t = A·b,   0 ≤ y_t ≤ (A − 1)·b   for every demand,
                        ∑ x + ∑ y ≤ rate_e · T                                          for every endpoint e   (`_sent`)

No plan sends faster, and trees of depth two send as fast: y_t / (A − 1) bytes go to t first, which passes them to the
A − 1 others, and the holders themselves send the rest to all (the uplink-sharing argument of Mundinger, Weber and
Weiss, "Optimal scheduling of peer-to-peer file dissemination", 2008). With ``chains`` instead, y_t ≤ b and ∑ x_h = b:
each piece then goes along a chain, and b − y_t of the bytes end at t. Where no endpoint both holds and wants something,
what targets pass on is never more than what they take in, y can be left out, and by duality the optimum is the greatest
density max_Q (bytes held only inside Q) / (rate of Q) over sets Q of endpoints (`spread`).

On the receiving side, b bytes must reach every target through its endpoints (`spread` again, one demand per target).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from scipy.sparse import coo_matrix  # pyright: ignore[reportMissingTypeStubs]

from autopar.resharding.groups import Group
from autopar.resharding.tiles import Floats, sums_at


class Demand(NamedTuple):
    """``bytes`` that any of the endpoints ``options`` may carry."""

    bytes: float
    options: tuple[int, ...]


class Crossing(NamedTuple):
    """``bytes`` that endpoints ``holders`` hold, and that ``targets`` targets with endpoints ``takers`` want."""

    bytes: float
    holders: tuple[int, ...]
    takers: tuple[int, ...]
    targets: int


class Sent(NamedTuple):
    """Optimum T in seconds; for each crossing, bytes sent by each holder and passed on by each taker."""

    time_s: float
    sent: list[Floats]
    relayed: list[Floats]


def spread(demands: Sequence[Demand], rate: Floats) -> tuple[float, list[Floats]]:
    """(the least T in seconds at which each demand's bytes can go through its options, the shares: bytes float[options]
    of each demand). ``rate`` float[E]: bytes per second of every endpoint."""
    if all(len(options) == 1 for _, options in demands):
        shares = [np.array([size]) for size, _ in demands]
    else:
        shares = _sent([Crossing(size, options, (), 1) for size, options in demands], rate, "sources").sent
    return _time_s(zip((options for _, options in demands), shares, strict=True), rate), shares


def send_and_relay(crossings: Sequence[Crossing], rate: Floats, *, chains: bool) -> Sent:
    """The linear program of the module's docstring with targets that pass on, along ``chains`` or else trees; ``rate``
    float[E]: bytes per second of every endpoint."""
    return _sent(crossings, rate, "chains" if chains else "trees")


def aggregated(demands: Sequence[Demand]) -> tuple[list[Demand], list[int]]:
    """(demands with equal options joined, index of each demand's joint one)."""
    index: dict[tuple[int, ...], int] = {}
    place = [index.setdefault(options, len(index)) for _, options in demands]
    sizes = sums_at(np.array(place, np.int64), [size for size, _ in demands], len(index))
    return [Demand(float(size), options) for size, options in zip(sizes, index, strict=True)], place


class _Entries(NamedTuple):
    """Entries of a sparse matrix."""

    rows: list[int]
    columns: list[int]
    factors: list[float]


class _Optimum(Protocol):
    """What `linprog` returns: scipy declares no types."""

    status: int
    message: str
    x: Floats


def _linprog(*args: Any, **kwargs: Any) -> _Optimum:
    """scipy's, which takes half a second to import: workers, that run plans, need none."""
    from scipy.optimize import linprog  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    return cast("Callable[..., _Optimum]", linprog)(*args, **kwargs)


def _sent(crossings: Sequence[Crossing], rate: Floats, relays: str) -> Sent:
    """``relays``: "sources" (none are counted), "chains" or "trees"."""
    unit = max((c.bytes for c in crossings), default=1.0)
    fastest = float(rate.max())
    column = 1  # column 0 is T
    upper: list[float] = [np.inf]
    loads, equal, least = _Entries([], [], []), _Entries([], [], []), _Entries([], [], [])
    totals: list[float] = []
    leaving: list[float] = []
    spans: list[tuple[int, int, int]] = []

    def add(entries: _Entries, row: int, columns: range, factor: float) -> None:
        entries.rows.extend([row] * len(columns))
        entries.columns.extend(columns)
        entries.factors.extend([factor] * len(columns))

    for size, holders, takers, targets in crossings:
        b = size / unit
        x = range(column, column + len(holders))
        y = range(x.stop, x.stop + (0 if relays == "sources" or targets == 1 else len(takers)))
        column = y.stop
        spans.append((x.start, x.stop, y.stop))
        upper += [b * (targets if relays == "trees" else 1)] * len(x)
        upper += [b * (targets - 1 if relays == "trees" else 1)] * len(y)
        loads.rows.extend((*holders, *takers[: len(y)]))
        loads.columns.extend((*x, *y))
        loads.factors.extend([1.0] * (len(x) + len(y)))
        if relays == "trees" and len(y):
            add(least, len(leaving), x, -1.0)
            leaving.append(-b)
            add(equal, len(totals), range(x.start, y.stop), 1.0)
            totals.append(targets * b)
        else:
            add(equal, len(totals), x, 1.0)
            totals.append(b)
            if len(y):
                add(equal, len(totals), y, 1.0)
                totals.append((targets - 1) * b)
    used = np.unique(loads.rows)
    rows = np.searchsorted(used, loads.rows)
    a_ub = coo_matrix(
        (
            [*loads.factors, *(-rate[used] / fastest), *least.factors],
            (
                [*rows, *range(len(used)), *(len(used) + r for r in least.rows)],
                [*loads.columns, *[0] * len(used), *least.columns],
            ),
        ),
        shape=(len(used) + len(leaving), column),
    )
    a_eq = coo_matrix((equal.factors, (equal.rows, equal.columns)), shape=(len(totals), column))
    cost = np.zeros(column)
    cost[0] = 1.0
    found = _linprog(
        cost,
        A_ub=a_ub.tocsr(),
        b_ub=np.concatenate([np.zeros(len(used)), leaving]),
        A_eq=a_eq.tocsr(),
        b_eq=np.array(totals),
        bounds=np.stack([np.zeros(column), upper], 1),
        method="highs",
    )
    assert found.status == 0, found.message  # sending everything from the first holders is feasible
    values = np.where(found.x > 1e-9, found.x, 0.0) * unit
    sent, relayed = list[Floats](), list[Floats]()
    for crossing, (x, y, stop) in zip(crossings, spans, strict=True):
        share, passed = values[x:y], values[y:stop]
        if not share.any():  # so few bytes that the program's tolerance hides them
            share[0] = crossing.bytes
        if relays != "trees" or stop == y:
            share = share * (crossing.bytes / share.sum())
        sent.append(share)
        relayed.append(passed)
    return Sent(float(found.x[0]) * unit / fastest, sent, relayed)


def _time_s(loads: Iterable[tuple[tuple[int, ...], Floats]], rate: Floats) -> float:
    total = np.zeros(len(rate))
    for options, shares in loads:
        np.add.at(total, list(options), shares)
    return float((total / rate).max(initial=0.0))


def contended(groups: Sequence[Group]) -> bool:
    """True where an endpoint holds something and passes something on: both compete for what it can send."""
    holders = {endpoint for group in groups for endpoint in group.holders}
    return any(endpoint in holders for group in groups if len(group.targets) > 1 for endpoint in group.takers)
