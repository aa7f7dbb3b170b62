"""Strategies: unit tasks → streams. One interface, `STRATEGIES`.

send_recv           every device that wants a slice gets its own copy, from the holder that has sent least
scatter_all_gather  devices of a host that want the same tile get a part each and gather it there; where no dimension
                    divides, as send_recv
broadcast           a chain over the hosts for each slice, from its first holder
broadcast_greedy    the same in a good order: each time the slice and holder that can start first
split_broadcast     shares of slices, see `split`

The first four are those that Zhuang et al., "On Optimizing the Communication of Model Parallelism" (MLSys 2023),
compare and propose; they are what the benchmark measures the last against, and it may still be one of them that needs
the fewest hops for little data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from autopar.resharding.groups import Group
from autopar.resharding.split import split_streams
from autopar.resharding.streams import Piece, Stream, Way, stream_of
from autopar.resharding.tiles import Work

GREEDY_TRIES = 32
"""Random orders that `broadcast_greedy` compares (guessed), for at most `GREEDY_UNITS` unit tasks; else one."""
GREEDY_UNITS = 128
"""See `GREEDY_TRIES`."""
GREEDY_PAIRS = 4_000_000
"""Pairs of (unit task, sender) and unit task up to which `STRATEGIES` has `broadcast_greedy` tried unasked: an order
takes them all (measured: 0.4 s for 1024 unit tasks, 154 s for 16384)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Streams in the order in which a strategy that sends one thing at a time sends them; ``staged``: copies inside
    hosts begin when the network is done."""

    streams: tuple[Stream, ...]
    staged: bool = False


Strategy = Callable[[Work, Sequence[Group]], Planned]
"""(unit tasks, their groups) → streams."""


def _tiles(work: Work) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """(devices that want it, its unit tasks) of each destination tile, in row-major order."""
    keys = zip(work.value.tolist(), work.wanters.tolist(), strict=True)
    for (_, wanters), members in groupby(enumerate(keys), key=lambda item: item[1]):
        yield work.sets[wanters], [unit for unit, _ in members]


class _Senders:
    """Holders by load."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.sent = [0] * len(work.host)

    def least(self, unit: int, device: int, elements: int) -> int:
        """The holder that has sent the fewest elements, on the device's own host if one is there."""
        by_host = self.work.hosts_of_set[int(self.work.holders[unit])]
        holders = by_host.get(self.work.host_list[device]) or self.work.sets[int(self.work.holders[unit])]
        sender = min(holders, key=lambda d: self.sent[d])
        self.sent[sender] += elements
        return sender


def _send_recv(work: Work, groups: Sequence[Group]) -> Planned:
    senders = _Senders(work)
    streams = [s for wanters, units in _tiles(work) for s in _sent_to_each(work, senders, wanters, units)]
    return Planned(streams=tuple(streams))


def _sent_to_each(work: Work, senders: _Senders, wanters: tuple[int, ...], units: list[int]) -> list[Stream]:
    out: list[Stream] = []
    for device in wanters:
        for unit in units:
            elements = int(work.elements[unit])
            sender = senders.least(unit, device, elements)
            out.append(stream_of(work, [Piece(unit, 0, elements, sender, (Way(device, -1),))]))
    return out


def _scatter_all_gather(work: Work, groups: Sequence[Group]) -> Planned:
    senders = _Senders(work)
    parts: list[tuple[tuple[int, ...], int, int, int, int, tuple[int, ...]]] = []
    for wanters, units in _tiles(work):
        boxes = np.array([work.box(u) for u in units], np.int64).reshape(len(units), -1, 2)
        low: list[int] = boxes[:, :, 0].min(0, initial=np.iinfo(np.int64).max).tolist()
        high: list[int] = boxes[:, :, 1].max(0, initial=0).tolist()
        by_host: dict[int, list[int]] = {}
        for device in wanters:
            by_host.setdefault(work.host_list[device], []).append(device)
        value = int(work.value[units[0]])
        for devices in by_host.values():
            count = len(devices)
            dim = next((d for d in range(len(low)) if (high[d] - low[d]) % count == 0), None)
            if dim is None:
                for j, device in enumerate(devices):
                    for unit in units:
                        parts.append(((value, *low), j, unit, 0, int(work.elements[unit]), (device,)))
                continue
            step = (high[dim] - low[dim]) // count
            for unit, box in zip(units, boxes, strict=True):
                row = int(work.elements[unit]) // int(box[dim, 1] - box[dim, 0])
                for j, device in enumerate(devices):
                    first = low[dim] + j * step
                    start, stop = np.clip([first, first + step], box[dim, 0], box[dim, 1]) - box[dim, 0]
                    if start < stop:
                        corner = (value, *low[:dim], first, *low[dim + 1 :])
                        copies = (*devices[j + 1 :], *devices[:j])
                        parts.append((corner, j, unit, int(start) * row, int(stop) * row, (device, *copies)))
    streams: list[Stream] = []
    for _, _, unit, start, stop, (device, *copies) in sorted(parts, key=lambda part: (part[0], part[5][0], part[2])):
        sender = senders.least(unit, device, stop - start)
        streams.append(stream_of(work, [Piece(unit, start, stop, sender, (Way(device, -1, tuple(copies)),))]))
    return Planned(streams=tuple(streams), staged=True)


def _chains(work: Work, unit: int, sender_host: int | None) -> list[Stream]:
    """A chain from ``sender_host`` (None: where the first holder is) over all other hosts that want a unit task, and
    copies on hosts that hold it."""
    holders = work.hosts_of_set[int(work.holders[unit])]
    wanters = work.hosts_of_set[int(work.wanters[unit])]
    elements = int(work.elements[unit])
    sender = next(iter(holders.values()))[0] if sender_host is None else holders[sender_host][0]
    remote = [devices for host, devices in wanters.items() if host not in holders]
    out: list[Stream] = []
    if remote:
        ways = tuple(Way(devices[0], i - 1, devices[1:]) for i, devices in enumerate(remote))
        out.append(stream_of(work, [Piece(unit, 0, elements, sender, ways)]))
    for host, devices in wanters.items():
        if host in holders:
            way = Way(devices[0], -1, devices[1:])
            out.append(stream_of(work, [Piece(unit, 0, elements, holders[host][0], (way,))]))
    return out


def _broadcast(work: Work, groups: Sequence[Group]) -> Planned:
    return Planned(streams=tuple(s for unit in range(work.num_units) for s in _chains(work, unit, None)))


def _broadcast_greedy(work: Work, groups: Sequence[Group]) -> Planned:
    random = np.random.default_rng(0)
    tries = GREEDY_TRIES if work.num_units <= GREEDY_UNITS else 1
    _, order = min((_greedy_order(work, None if n == 0 else random) for n in range(tries)), key=lambda found: found[0])
    return Planned(streams=tuple(s for unit, host in order for s in _chains(work, unit, host)))


def _greedy_order(work: Work, random: np.random.Generator | None) -> tuple[float, list[tuple[int, int]]]:
    """(end in seconds with one transfer at a time on a host, (unit, sender's host) in order): each time what can start
    first; among equals the largest, or with ``random`` any."""
    options = [(unit, host) for unit in range(work.num_units) for host in work.hosts_of_set[int(work.holders[unit])]]
    hosts = len(work.network.hosts)
    rate = np.array([host.nic.bytes_per_s for host in work.network.hosts])
    unit_of, host_of = np.array(options, np.int64).reshape(-1, 2).T
    busy = np.zeros((work.num_units, hosts), bool)
    for unit in range(work.num_units):
        holders = work.hosts_of_set[int(work.holders[unit])]
        busy[unit, [h for h in work.hosts_of_set[int(work.wanters[unit])] if h not in holders]] = True
    alive = np.ones(len(options), bool)
    free = np.zeros(hosts)
    order: list[tuple[int, int]] = []
    for _ in range(work.num_units):
        ready = np.where(busy, free, 0.0).max(axis=1)
        start = np.where(alive, np.maximum(ready[unit_of], free[host_of]), np.inf)
        first = np.flatnonzero(start <= start.min() * (1 + 1e-12))
        if random is None:
            pick = first[np.argmax(work.bytes[unit_of[first]])]
        else:
            pick = random.choice(first)
        unit, host = int(unit_of[pick]), int(host_of[pick])
        taking = np.flatnonzero(busy[unit])
        if len(taking):
            involved = [host, *taking.tolist()]
            free[involved] = start[pick] + work.bytes[unit] / rate[involved].min()
        alive[unit_of == unit] = False
        order.append((unit, host))
    return float(free.max(initial=0.0)), order


def _split_broadcast(work: Work, groups: Sequence[Group]) -> Planned:
    return Planned(streams=split_streams(work, groups))


def worth_trying(name: str, work: Work) -> bool:
    """False for a strategy that takes longer to plan than it may gain."""
    if name != "broadcast_greedy":
        return True
    options = sum(len(work.hosts_of_set[h]) for h in work.holders.tolist())
    return options * work.num_units <= GREEDY_PAIRS


STRATEGIES: dict[str, Strategy] = {
    "split_broadcast": _split_broadcast,
    "broadcast_greedy": _broadcast_greedy,
    "broadcast": _broadcast,
    "send_recv": _send_recv,
    "scatter_all_gather": _scatter_all_gather,
}
"""Name → strategy, those that need less bandwidth first."""
