"""The lower bound of any plan: bytes that must be received and sent, over bandwidth.

- Receiving: every target host receives each byte that it wants once, through the NICs of the devices that want it.
- Sending: the linear program of `senders`; without traffic the other way this is the density
  max_Q (bytes held only inside Q) / |Q| over sets Q of source hosts.
- A device receives what it wants through its NIC and its port together.

The model: a device sends what it holds or has received and receives what it wants (nothing is staged on devices that
need no copy), and what a host holds it does not fetch from another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.resharding.groups import Group
from autopar.resharding.senders import Crossing, Demand, aggregated, contended, send_and_relay, spread
from autopar.resharding.tiles import Work, sums_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The bounds in seconds: of what hosts receive, of what holders send, of what single devices receive."""

    receive_s: float
    send_s: float
    device_s: float

    @property
    def time_s(self) -> float:
        """The greatest of them."""
        return max(self.receive_s, self.send_s, self.device_s)


def bound_of(work: Work, groups: Sequence[Group]) -> Bound:
    """The lower bound of bringing all of ``work``'s values over; ``groups`` are its groups."""
    return Bound(receive_s=_receive_s(work, groups), send_s=_send_s(work, groups), device_s=_device_s(work))


def _receive_s(work: Work, groups: Sequence[Group]) -> float:
    demands, _ = aggregated([Demand(g.bytes, endpoints) for g in groups for _, endpoints in g.targets])
    return spread(demands, work.rate)[0]


def _send_s(work: Work, groups: Sequence[Group]) -> float:
    if contended(groups):
        crossings = [Crossing(g.bytes, g.holders, g.takers, len(g.targets)) for g in groups]
        return send_and_relay(crossings, work.rate, chains=False).time_s
    demands, _ = aggregated([Demand(g.bytes, g.holders) for g in groups])
    return spread(demands, work.rate)[0]


def _device_s(work: Work) -> float:
    wanted = np.zeros(len(work.host))
    for devices, size in zip(work.sets, sums_at(work.wanters, work.bytes, len(work.sets)), strict=True):
        wanted[list(devices)] += size
    return float((wanted / (work.rate[work.nic] + work.rate[work.nics :])).max(initial=0.0))
