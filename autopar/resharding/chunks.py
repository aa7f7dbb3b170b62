"""How many chunks: latency and the filling of chains against each other.

A chain over A hosts in K chunks takes t·(1 + (A − 1)/K) and A − 1 latencies α more until its last host has the first
chunk. With one chunk in flight each further chunk costs its latency too, and the best K is `best_chunks`. With two in
flight (`CHUNKS_IN_FLIGHT`) the latency of a chunk passes while the one before is sent, as long as that takes α or more;
then more chunks cost nothing, and K is chosen so that filling takes `FILL` of the time.

All streams of a plan get the same K: they share NICs in proportion to their chunks' bytes, so all go at the pace at
which all end together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.errors import OptionError
from autopar.resharding.streams import Piece, Stream, edges_of
from autopar.resharding.tiles import Work

CHUNKS_IN_FLIGHT = 2
"""Chunks of a stream that are requested at one time on each hop."""
FILL = 0.01
"""Part of the time that filling chains may take (chosen: a fifth of what emitted chunks may lose)."""
PACE_CHUNKS = 16
"""Chunks of a stream beside others at least, and as many as any has pieces: only so are chunks' bytes in proportion to
streams' (chosen: rates are then off by a sixteenth at most)."""
MAX_CHUNKS = 256
"""Chunks of a stream at most (chosen: keeps what a runtime has to do for each chunk bounded)."""
LARGE_CHUNK_BYTES = 1 << 20
"""Chunks are larger only where there would be more than `MAX_CHUNKS`, or latency would show: a chunk is written to its
tile when all of it has come (measured: one chunk of 64 MB got 83 % of a link of 1 Gbit/s, chunks of 1 MB 94 %)."""
MIN_CHUNK_BYTES = 16 * 1024
"""Smaller chunks are not worth their handling (guessed)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunking:
    """How to cut streams into chunks: how many of a stream are ``in_flight`` on each hop, how many a stream has at
    most, how small they get. ``chunk_bytes`` forces a size."""

    in_flight: int = CHUNKS_IN_FLIGHT
    max_chunks: int = MAX_CHUNKS
    min_chunk_bytes: float = MIN_CHUNK_BYTES
    chunk_bytes: float | None = None

    def verify(self) -> None:
        """Raises OptionError where chunks in flight, their largest number or forced bytes are not positive."""
        if self.in_flight < 1 or self.max_chunks < 1 or (self.chunk_bytes is not None and self.chunk_bytes <= 0):
            raise OptionError(f"chunks in flight, their number and their bytes must be positive, got {self}")


def best_chunks(hops: int, transfer_s: float, latency_s: float) -> float:
    """K* = √((A − 1)·t / α): the best number of chunks of a stream that takes t = ``transfer_s`` over A = ``hops``
    hosts, with α = ``latency_s`` and one chunk in flight; not below 1."""
    return max(1.0, math.sqrt((hops - 1) * transfer_s / latency_s))


def depth_of(work: Work, piece: Piece) -> float:
    """How many chunk times after the first hop's the last device gets a chunk; copies count by their link's rate over
    the hop's."""
    depths: list[float] = []
    out = 0.0
    for device, source, copies in piece.hops:
        at = 0.0 if source < 0 else depths[source] + 1.0
        depths.append(at)
        giver = piece.sender if source < 0 else piece.hops[source].device
        port = work.nics + device
        hop = port if work.host_list[giver] == work.host_list[device] else work.nic[device]
        inside = work.rate[hop] / work.rate[port]
        out = max(out, at + len(copies) * min(1.0, inside))
    return float(out)


def latency_of(work: Work, piece: Piece) -> float:
    """Seconds of latency until a piece is at its last device: the greatest sum over hops and copies."""
    arrival: dict[int, float] = {}
    edges = iter(edges_of(work, piece))
    out = 0.0
    for hop, (_, source, copies) in enumerate(piece.hops):
        total = 0.0 if source < 0 else arrival[source]
        giver, taker = next(edges)
        total += max(work.latency_s[giver], work.latency_s[taker])
        arrival[hop] = total
        for _ in copies:
            giver, _ = next(edges)
            total += work.latency_s[giver]
        out = max(out, total)
    return float(out)


def chunk_bytes_of(work: Work, streams: Sequence[Stream], fluid_s: float, chunking: Chunking) -> list[float]:
    """Bytes of a chunk of each stream; ``fluid_s``: seconds that all take together without latency."""
    if chunking.chunk_bytes is not None:
        return [chunking.chunk_bytes] * len(streams)
    count = 1.0
    pieces = max((len(stream.pieces) for stream in streams), default=1)
    together = max(PACE_CHUNKS, pieces) if len(streams) > 1 else 1
    for stream in streams:
        piece = stream.pieces[0]
        depth = depth_of(work, piece)
        latency_s = max(work.latency_s[end] for edge in edges_of(work, piece)[:1] for end in edge)
        if chunking.in_flight == 1:
            wanted = best_chunks(1 + math.ceil(depth), fluid_s, latency_s)
        else:
            wanted = min(max(depth / FILL, together, stream.bytes / LARGE_CHUNK_BYTES), fluid_s / latency_s)
        count = max(count, wanted)
    count = min(math.ceil(count), chunking.max_chunks)
    return [max(stream.bytes / count, min(stream.bytes, chunking.min_chunk_bytes)) for stream in streams]


def time_of(work: Work, streams: Sequence[Stream], chunk_bytes: Sequence[float], fluid_s: float) -> float:
    """Seconds until the last chunk of the last stream has arrived: ``fluid_s``, and what filling its way takes. A chunk
    takes as long as one chunk of every stream at the busiest endpoint that it passes."""
    ways = [edges_of(work, stream.pieces[0]) for stream in streams]
    giving, taking = np.zeros(len(work.rate)), np.zeros(len(work.rate))
    for way, size in zip(ways, chunk_bytes, strict=True):
        for giver, taker in way:
            giving[giver] += size
            taking[taker] += size
    pace = np.maximum(giving, taking) / work.rate
    out = fluid_s
    for stream, way, size in zip(streams, ways, chunk_bytes, strict=True):
        piece = stream.pieces[0]
        chunk_s = min(float(pace[list(way[0])].max()), fluid_s * min(1.0, size / stream.bytes))
        out = max(out, fluid_s + depth_of(work, piece) * chunk_s + latency_of(work, piece))
    return float(out)
