"""Unit tasks that go the same ways, taken together, and the lines that shares are cut from.

A `Group` joins unit tasks whose holders lie on the same NICs and which the same NICs of the same other hosts want:
to the network they are one. A host that holds what it wants does not get it through the network: there, holders and
wanters are ports inside the host, and every device is a target of its own.

A group's unit tasks, laid end to end, are a line of bytes. Shares of it are stretches of that line (`Group.cut`), each
rounded to whole elements once, so that no element is lost or sent twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from autopar.resharding.tiles import Floats, Ints, Work

Targets: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
"""(host, or −1 − device index; endpoints of the devices that want it) of each target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Unit tasks (``units`` int[n], ``unit_bytes`` float[n]), the endpoints of the devices that hold them, and the
    targets: for each other host that wants them its number and the NICs of the devices that want them there, or inside
    a host, for each device that wants them −1 − its index and its port."""

    units: Ints
    unit_bytes: Floats
    holders: tuple[int, ...]
    targets: Targets
    bytes: float

    @property
    def takers(self) -> tuple[int, ...]:
        """Endpoints of all targets."""
        return tuple(endpoint for _, endpoints in self.targets for endpoint in endpoints)

    def cut(self, work: Work, at: Sequence[float]) -> list[list[tuple[int, int, int]]]:
        """The stretches between neighbours of ``at`` (ascending places on the line, in bytes; the first is its start,
        the last its end), each as (unit, start, stop) in elements; a stretch below one element may be empty."""
        ends = np.cumsum(self.unit_bytes)
        starts = ends - self.unit_bytes
        counts = work.elements[self.units]
        places: list[tuple[int, int]] = [(0, 0)]
        for place in at[1:-1]:
            row = min(int(np.searchsorted(ends, place, side="right")), len(ends) - 1)
            inside = (place - starts[row]) / self.unit_bytes[row] * counts[row]
            spot = row, min(max(round(inside), 0), int(counts[row]))
            places.append(max(places[-1], spot))
        places.append((len(ends) - 1, int(counts[-1])))
        units, sizes = self.units.tolist(), counts.tolist()
        out: list[list[tuple[int, int, int]]] = []
        for (row, first), (last, stop) in pairwise(places):
            stretch: list[tuple[int, int, int]] = []
            while row < last:
                stretch.append((units[row], first, sizes[row]))
                row, first = row + 1, 0
            stretch.append((units[row], first, stop))
            out.append([s for s in stretch if s[1] < s[2]])
        return out


def groups_of(work: Work) -> tuple[Group, ...]:
    """The groups of all unit tasks, in the order in which they first occur."""
    nic, nics = work.nic_list, work.nics
    by_host = work.hosts_of_set
    nics_of = [{h: tuple(sorted({nic[d] for d in devices})) for h, devices in by.items()} for by in by_host]
    held = [tuple(sorted(n for own in by.values() for n in own)) for by in nics_of]
    units: dict[tuple[tuple[int, ...], Targets], list[int]] = {}
    for unit, (holders, wanters) in enumerate(zip(work.holders.tolist(), work.wanters.tolist(), strict=True)):
        own, wanted = by_host[holders], nics_of[wanters]
        targets = tuple((h, takers) for h, takers in wanted.items() if h not in own)
        if targets:
            units.setdefault((held[holders], targets), []).append(unit)
        for h in sorted(wanted.keys() & own.keys()):
            inside = tuple((-1 - d, (nics + d,)) for d in by_host[wanters][h])
            units.setdefault((tuple(nics + d for d in own[h]), inside), []).append(unit)
    out: list[Group] = []
    for (holders, targets), members in units.items():
        index = np.array(members, np.int64)
        size = work.bytes[index]
        out.append(Group(units=index, unit_bytes=size, holders=holders, targets=targets, bytes=float(size.sum())))
    return tuple(out)
