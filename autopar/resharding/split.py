"""Split broadcast: every byte is received once by every host that wants it, from senders whose shares are balanced.

1. Hosts with several NICs receive each group through them in balanced shares (rails); a group's line is cut where the
   NIC of any target changes (`_cells`).
2. Holders' shares come from the linear program of `senders`, and where targets also hold something, so does what they
   pass on (`_sources`, `_trees`). Each share becomes a stretch of the line.
3. Stretches that take the same NICs form one stream: a chain over the targets, or where the program needs it a tree.
4. On each device level the least loaded device that holds, or wants, the stretch is taken (`Devices`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from autopar.resharding.groups import Group
from autopar.resharding.senders import Crossing, Demand, Sent, aggregated, contended, send_and_relay, spread
from autopar.resharding.streams import Piece, Stream, Way, stream_of
from autopar.resharding.tiles import Floats, Work

NEGLIGIBLE = 1e-6
"""Chains are kept where trees would gain no more than this part (guessed: about a solver's tolerance)."""
SLIVER = 1e-9
"""Stretches below this part of a line are rounding."""


class Cell(NamedTuple):
    """The stretch ``start`` to ``stop`` (bytes of the line) of group ``group``, received through ``takers``: one
    endpoint per target."""

    group: int
    start: float
    stop: float
    takers: tuple[int, ...]


class Route(NamedTuple):
    """A sender's endpoint, and for every hop (its endpoint, the hop it gets its chunks from, −1 the sender)."""

    sender: int
    hops: tuple[tuple[int, int], ...]


class Cut(NamedTuple):
    """The stretch ``start`` to ``stop`` (bytes of the line) of group ``group``, with its route."""

    group: int
    start: float
    stop: float
    route: Route


def split_streams(work: Work, groups: Sequence[Group]) -> tuple[Stream, ...]:
    """The streams of a split broadcast of all ``groups`` of ``work``, one per route."""
    cells = _cells(work, groups)
    cuts = _trees(work, groups, cells) if contended(groups) else _sources(work, groups, cells)
    devices = Devices(work)
    by_route: dict[Route, list[Piece]] = {}
    of_group: list[list[Cut]] = [[] for _ in groups]
    for cut in cuts:
        of_group[cut.group].append(cut)
    for group, parts in zip(groups, of_group, strict=True):
        places = [0.0, *(cut.stop for cut in parts)]
        for cut, stretch in zip(parts, group.cut(work, places), strict=True):
            pieces = by_route.setdefault(cut.route, [])
            pieces += [devices.piece(unit, start, stop, cut.route) for unit, start, stop in stretch]
    return tuple(stream_of(work, pieces) for pieces in by_route.values() if pieces)


def _lay(sizes: Sequence[float], shares: Floats) -> list[list[tuple[float, int]]]:
    """Lays ``shares`` along items of ``sizes``, which they sum to: for each item (end inside the item, index of the
    share), ends ascending, the last at the item's size."""
    out: list[list[tuple[float, int]]] = []
    order = [i for i, share in enumerate(shares) if share > 0] or [0]
    at, left = 0, float(shares[order[0]])
    total = float(sum(sizes))
    for size in sizes:
        parts: list[tuple[float, int]] = []
        done = 0.0
        while at < len(order) - 1 and left < size - done:
            if left > SLIVER * total:
                done += left
                parts.append((done, order[at]))
            at += 1
            left = float(shares[order[at]])
        left -= size - done
        parts.append((size, order[at]))
        out.append(parts)
    return out


def _laid(demands: Sequence[Demand], rate: Floats) -> list[list[tuple[float, int]]]:
    """For each demand (end inside it, endpoint), balanced over all of them."""
    joint, place = aggregated(demands)
    shares = spread(joint, rate)[1]
    out: list[list[tuple[float, int]]] = [[] for _ in demands]
    members: list[list[int]] = [[] for _ in joint]
    for index, at in enumerate(place):
        members[at].append(index)
    for demand, share, indices in zip(joint, shares, members, strict=True):
        for index, parts in zip(indices, _lay([demands[i].bytes for i in indices], share), strict=True):
            out[index] = [(end, demand.options[option]) for end, option in parts]
    return out


def _cells(work: Work, groups: Sequence[Group]) -> list[Cell]:
    demands = [Demand(g.bytes, endpoints) for g in groups for _, endpoints in g.targets]
    laid = iter(_laid(demands, work.rate))
    out: list[Cell] = []
    for index, group in enumerate(groups):
        parts = [next(laid) for _ in group.targets]
        places = [0.0]
        for end in sorted(end for part in parts for end, _ in part):
            if places[-1] + SLIVER * group.bytes < end < group.bytes * (1 - SLIVER):
                places.append(end)
        for start, stop in pairwise([*places, group.bytes]):
            middle = (start + stop) / 2
            takers = tuple(next(endpoint for end, endpoint in part if end >= middle) for part in parts)
            out.append(Cell(index, start, stop, takers))
    return out


def _chain(sender: int, takers: Sequence[int]) -> Route:
    return Route(sender, tuple((endpoint, i - 1) for i, endpoint in enumerate(takers)))


def _sources(work: Work, groups: Sequence[Group], cells: Sequence[Cell]) -> list[Cut]:
    """Chains from balanced senders."""
    laid = _laid([Demand(c.stop - c.start, groups[c.group].holders) for c in cells], work.rate)
    out: list[Cut] = []
    for cell, parts in zip(cells, laid, strict=True):
        start = cell.start
        for index, (end, sender) in enumerate(parts):
            stop = cell.stop if index == len(parts) - 1 else cell.start + end
            out.append(Cut(cell.group, start, stop, _chain(sender, cell.takers)))
            start = stop
    return out


def _trees(work: Work, groups: Sequence[Group], cells: Sequence[Cell]) -> list[Cut]:
    """Chains, or trees where they are faster than chains and receiving, from balanced senders over balanced targets."""
    crossings = [Crossing(c.stop - c.start, groups[c.group].holders, c.takers, len(c.takers)) for c in cells]
    best, chains = (send_and_relay(crossings, work.rate, chains=chains) for chains in (False, True))
    received = np.zeros(len(work.rate))
    for cell in cells:
        received[list(cell.takers)] += cell.stop - cell.start
    needed_s = max(best.time_s, float((received / work.rate).max(initial=0.0)))
    use_chains = chains.time_s <= needed_s * (1 + NEGLIGIBLE)
    sent: Sent = chains if use_chains else best
    out: list[Cut] = []
    for cell, crossing, shares, relayed in zip(cells, crossings, sent.sent, sent.relayed, strict=True):
        parts = _chain_parts(crossing, relayed) if use_chains else _tree_parts(crossing, relayed)
        senders = _lay([length * copies for length, copies, _ in parts], shares)
        start = cell.start
        for (_, copies, hops), ends in zip(parts, senders, strict=True):
            begin = start
            for end, option in ends:
                stop = begin + end / copies
                out.append(Cut(cell.group, start, stop, Route(crossing.holders[option], hops)))
                start = stop
        out[-1] = out[-1]._replace(stop=cell.stop)
    return out


Part = tuple[float, int, tuple[tuple[int, int], ...]]
"""(bytes, copies that holders send of them, hops)."""


def _chain_parts(crossing: Crossing, relayed: Floats) -> list[Part]:
    """Chains that end at each target for what it does not pass on."""
    takers = crossing.takers
    if len(takers) == 1:
        return [(crossing.bytes, 1, _chain(0, takers).hops)]
    ends = np.maximum(crossing.bytes - relayed, 0.0)
    ends *= crossing.bytes / ends.sum()
    return [
        (float(length), 1, _chain(0, [*takers[t + 1 :], *takers[: t + 1]]).hops)
        for t, length in enumerate(ends)
        if length > SLIVER * crossing.bytes
    ]


def _tree_parts(crossing: Crossing, relayed: Floats) -> list[Part]:
    """What each target passes on to all others, and what holders send to all."""
    takers = crossing.takers
    if len(takers) == 1:
        return [(crossing.bytes, 1, _chain(0, takers).hops)]
    parts: list[Part] = []
    left = crossing.bytes
    for t, passed in enumerate(relayed):
        length = min(left, float(passed) / (len(takers) - 1))
        if length > SLIVER * crossing.bytes:
            others = [*takers[t + 1 :], *takers[:t]]
            parts.append((length, 1, ((takers[t], -1), *((other, 0) for other in others))))
            left -= length
    if left > SLIVER * crossing.bytes or not parts:
        parts.append((left, len(takers), tuple((taker, -1) for taker in takers)))
    return parts


class Devices:
    """Chooses devices for the endpoints of a route: the one with the least bytes so far."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.sent = [0.0] * len(work.host)
        self.received = [0.0] * len(work.host)
        self.item = work.item_bytes[work.value].tolist()
        self.holders, self.wanters = work.holders.tolist(), work.wanters.tolist()

    def piece(self, unit: int, start: int, stop: int, route: Route) -> Piece:
        """The stretch ``start`` to ``stop`` (elements) of a unit task along a route, its bytes added to the loads of
        the devices that are chosen."""
        size = (stop - start) * self.item[unit]
        holders = self.work.sets[self.holders[unit]]
        sender = self._least(self.sent, self._at(holders, route.sender))
        self.sent[sender] += size
        by_host = self.work.hosts_of_set[self.wanters[unit]]
        ways: list[Way] = []
        for endpoint, source in route.hops:
            if endpoint >= self.work.nics:
                ways.append(Way(endpoint - self.work.nics, source))
                continue
            there = by_host[int(self.work.at_host[endpoint])]
            head = self._least(self.received, self._at(there, endpoint))
            self.received[head] += size
            at = there.index(head)
            ways.append(Way(head, source, (*there[at + 1 :], *there[:at])))
        return Piece(unit, start, stop, sender, tuple(ways))

    def _at(self, devices: tuple[int, ...], endpoint: int) -> list[int]:
        if endpoint >= self.work.nics:
            return [endpoint - self.work.nics]
        return [d for d in devices if self.work.nic_list[d] == endpoint]

    @staticmethod
    def _least(load: list[float], devices: list[int]) -> int:
        return devices[0] if len(devices) == 1 else min(devices, key=lambda d: (load[d], d))
