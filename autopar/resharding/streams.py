"""Pieces and their ways before they become Transfers: streams, what they load, and what that takes.

Load. Between hosts a device sends and receives through its NIC, inside a host through its port to the others. Both are
full-duplex. A `Stream`'s pieces all take the same NICs or ports, copies apart.

Time without latency. A NIC divides its bandwidth between streams in proportion to their bytes. Raise all rates together
until a link is full: those streams end together, at load / bandwidth of that link; all others end earlier, also when
they take what is left free. So everything ends at the greatest load / bandwidth of any link (`Loads.time_s`), and a
plan whose links are all loaded within the bound reaches it, in whatever order pieces are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.resharding.tiles import Floats, Work, sums_at


class Way(NamedTuple):
    """A hop before it becomes a `Hop`: device indices; ``source`` is the hop it gets the piece from, −1 the sender."""

    device: int
    source: int
    copies: tuple[int, ...] = ()


class Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of a unit task, from device index ``sender`` along ``hops``."""

    unit: int
    start: int
    stop: int
    sender: int
    hops: tuple[Way, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Pieces that follow each other on one way; ``bytes`` of all of them."""

    pieces: tuple[Piece, ...]
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Bytes through every endpoint, ``out`` and ``into``: float[E]."""

    out: Floats
    into: Floats

    def busy_s(self, work: Work) -> Floats:
        """float[E]: seconds that the busier direction of each endpoint takes."""
        return np.maximum(self.out, self.into) / work.rate

    def time_s(self, work: Work) -> float:
        """Seconds until the last stream ends, see the module's docstring."""
        return float(self.busy_s(work).max(initial=0.0))


def stream_of(work: Work, pieces: Sequence[Piece]) -> Stream:
    """A stream of ``pieces``, with its bytes."""
    total = sum((p.stop - p.start) * work.item_bytes[work.value[p.unit]] for p in pieces)
    return Stream(pieces=tuple(pieces), bytes=float(total))


def edges_of(work: Work, piece: Piece) -> list[tuple[int, int]]:
    """(giving endpoint, taking endpoint) of every hop of a piece, copies after their hop: ports inside a host, NICs
    between hosts."""
    host, nic, nics = work.host_list, work.nic_list, work.nics
    out: list[tuple[int, int]] = []
    for device, source, copies in piece.hops:
        giver = piece.sender if source < 0 else piece.hops[source].device
        inside = host[giver] == host[device]
        out.append((nics + giver, nics + device) if inside else (nic[giver], nic[device]))
        out += [(nics + a, nics + b) for a, b in zip((device, *copies), copies)]
    return out


def loads_of(work: Work, streams: Sequence[Stream]) -> Loads:
    """Bytes that the streams send through every endpoint, in either direction."""
    giver, taker, size = list[int](), list[int](), list[float]()
    item, value = work.item_bytes.tolist(), work.value.tolist()
    for stream in streams:
        for piece in stream.pieces:
            for a, b in edges_of(work, piece):
                giver.append(a)
                taker.append(b)
                size.append((piece.stop - piece.start) * item[value[piece.unit]])
    endpoints = len(work.rate)
    return Loads(
        out=sums_at(np.array(giver, np.int64), size, endpoints),
        into=sums_at(np.array(taker, np.int64), size, endpoints),
    )


def concurrent_s(work: Work, streams: Sequence[Stream], *, staged: bool = False) -> float:
    """Seconds with all streams in flight, without latency. ``staged``: copies inside hosts come last."""
    loads = loads_of(work, streams)
    if not staged:
        return loads.time_s(work)
    return float(loads.busy_s(work)[: work.nics].max(initial=0.0)) + copies_s(work, streams)


def copies_s(work: Work, streams: Sequence[Stream]) -> float:
    """Seconds of what goes inside hosts."""
    return float(loads_of(work, streams).busy_s(work)[work.nics :].max(initial=0.0))
