"""What a resharding takes in the model, by simulation, and in that of the prior art: what plans are held against.

`chunked_s` follows every chunk of a plan's transfers. A hop may send a chunk when its giver has all of it and α after
it was requested; with n chunks in flight chunk k is requested when chunk k − n has arrived (and chunk k is there).
Links are fluid: each NIC and each port divides its bandwidth, out and in separately, between the chunks on it in
proportion to their streams' chunk size, and what one cannot use the others get (`_rates`).

`serial_s` is the model of the prior art: a host sends or receives one thing at a time, in the given order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autopar.ir.resharding import Network, ReshardingPlan, Transfer
from autopar.resharding.streams import Piece, Stream, Way, copies_s, edges_of
from autopar.resharding.tiles import Floats, Work, sums_at, work_of

TOGETHER = 0.02
"""Chunks that end within this part of the shortest chunk's time are taken to end together, when the last does (chosen:
few events; it makes the result too long by at most as much)."""
ROUNDS = 3
"""How often free bandwidth is handed out anew."""


def serial_s(work: Work, streams: Sequence[Stream], *, staged: bool = False) -> float:
    """Seconds with one transfer at a time on a host; each starts, in order, when all of its hosts are free. ``staged``:
    copies inside hosts come last, all at the same time."""
    free: dict[int, float] = {}
    hosts = work.at_host.tolist()
    for stream in streams:
        edges = edges_of(work, stream.pieces[0])
        ends = [end for edge in edges for end in edge]
        if all(end >= work.nics for end in ends):
            busy = set(ends[:2])  # inside a host: its ports
        else:
            busy = {-1 - hosts[end] for end in ends if end < work.nics}
        rate = min(work.rate[end] for end in ends if end < work.nics or min(busy) >= 0)
        stop = max(free.get(b, 0.0) for b in busy) + stream.bytes / rate
        free.update((b, stop) for b in busy)
    end = max(free.values(), default=0.0)
    return end + (copies_s(work, streams) if staged else 0.0)


def chunked_s(plan: ReshardingPlan, network: Network, *, in_flight: int = 2) -> float:
    """Seconds until the last chunk of a plan's transfers has arrived at the last device that wants it, with
    ``in_flight`` chunks of a stream requested at one time on each hop. Raises ReshardingError where ``network`` does
    not have the plan's hosts and NICs."""
    work = work_of(plan.values, plan.meshes, network)
    return _Chunks(work, plan, in_flight).run()


class _Chunks:
    """State over *edges*: hops of streams. An edge's chunks are its stream's, transfer after transfer."""

    def __init__(self, work: Work, plan: ReshardingPlan, in_flight: int) -> None:
        self.in_flight = in_flight
        self.rate = np.concatenate([work.rate, work.rate])  # out, then in
        endpoints = len(work.rate)
        index = {int(device): i for i, device in enumerate(work.device_ids)}
        by_stream: dict[int, list[Transfer]] = {}
        for transfer in plan.transfers:
            by_stream.setdefault(transfer.stream, []).append(transfer)
        givers, takers, before, streams = list[int](), list[int](), list[int](), list[int]()
        latency, self.tails = list[float](), list[float]()
        sizes: list[Floats] = []
        self.nominal_of: list[float] = []
        port_s = np.zeros(endpoints)
        for number, transfers in enumerate(by_stream.values()):
            own: list[float] = []
            first = len(givers)
            for transfer in transfers:
                item = float(work.item_bytes[transfer.value])
                own += [transfer.chunk_elements * item] * (transfer.chunks - 1)
                start, stop = transfer.chunk(transfer.chunks - 1)
                own.append((stop - start) * item)
                ways = tuple(Way(index[h.device], h.source, tuple(index[c] for c in h.copies)) for h in transfer.hops)
                edges = edges_of(work, Piece(0, 0, 0, index[transfer.sender], ways))
                at = 0
                for way in ways:
                    edge, *inside = edges[at : at + 1 + len(way.copies)]
                    at += 1 + len(way.copies)
                    for giver, _ in inside:
                        port_s[giver] += transfer.elements * item / work.rate[giver]
                    if transfer is not transfers[0]:
                        continue
                    givers.append(edge[0])
                    takers.append(edge[1] + endpoints)
                    before.append(first + way.source if way.source >= 0 else -1)
                    streams.append(number)
                    latency.append(max(work.latency_s[edge[0]], work.latency_s[edge[1]]))
                    port = work.nics + way.device
                    self.tails.append(len(way.copies) * (own[-1] / work.rate[port] + work.latency_s[port]))
            sizes.append(np.array(own))
            self.nominal_of.append(float(max(own)))
        self.port_s = float(port_s.max(initial=0.0))
        self.giver, self.taker = np.array(givers, np.int64), np.array(takers, np.int64)
        self.before, self.stream = np.array(before, np.int64), np.array(streams, np.int64)
        self.latency = np.array(latency)
        counts = np.array([len(s) for s in sizes], np.int64)
        self.size = np.concatenate(sizes) if sizes else np.zeros(0)
        self.first = (np.cumsum(counts) - counts)[self.stream] if sizes else np.zeros(0, np.int64)
        self.count = counts[self.stream] if sizes else np.zeros(0, np.int64)
        self.weight = np.array(self.nominal_of)[self.stream] if sizes else np.zeros(0)

    def run(self) -> float:
        """Seconds until all has arrived."""
        edges = len(self.giver)
        if not edges:
            return 0.0
        done = np.zeros(edges, np.int64)  # chunks that have arrived
        asked = np.zeros(edges, np.int64)  # chunks that were requested
        ready = np.full((edges, self.in_flight), np.inf)  # when chunk k may be sent: column k modulo chunks in flight
        sending = np.zeros(edges, bool)
        left = np.zeros(edges)
        rows = np.arange(edges)
        ended = np.zeros(edges)
        now = 0.0
        fastest = self.weight / np.minimum(self.rate[self.giver], self.rate[self.taker])
        slack = TOGETHER * float(fastest.min())
        while True:
            there = np.where(self.before < 0, self.count, done[self.before])
            while True:
                ask = (asked < there) & (asked < done + self.in_flight)
                if not ask.any():
                    break
                ready[rows[ask], asked[ask] % self.in_flight] = now + self.latency[ask]
                asked[ask] += 1
            starts = np.where(sending | (done >= asked), np.inf, ready[rows, done % self.in_flight])
            begin = starts <= now + 1e-15
            left[begin] = self.size[self.first[begin] + done[begin]]
            sending |= begin
            starts[begin] = np.inf
            rate = self._rates(sending)
            with np.errstate(divide="ignore", invalid="ignore"):
                ends = np.where(sending, left / rate, np.inf)
            until_end, until_start = float(ends.min()), float(starts.min()) - now
            if math.isinf(until_end) and math.isinf(until_start):
                break
            if until_end <= until_start:
                together = ends <= until_end + slack
                step = min(float(ends[together].max()), max(until_start, until_end))
            else:
                together, step = np.zeros(edges, bool), until_start
            now += step
            left = np.where(sending, left - rate * step, 0.0)
            over = sending & (ends <= step * (1 + 1e-12))
            done[over] += 1
            sending &= ~over
            ended[over] = now
        assert (done == self.count).all()  # every chunk has come
        return max(float((ended + np.array(self.tails)).max()), self.port_s)

    def _rates(self, sending: np.ndarray[tuple[int], np.dtype[np.bool]]) -> Floats:
        """float[edges]: bytes per second of each edge that sends."""
        out = np.zeros(len(sending))
        free = self.rate.copy()
        open_ = sending.copy()
        size = len(free)
        for _ in range(ROUNDS):
            at = np.flatnonzero(open_)
            if not len(at):
                break
            giver, taker, weight = self.giver[at], self.taker[at], self.weight[at]
            share = sums_at(giver, weight, size) + sums_at(taker, weight, size)
            with np.errstate(divide="ignore", invalid="ignore"):
                pace = free / share
            more = weight * np.minimum(pace[giver], pace[taker])
            out[at] += more
            free -= sums_at(giver, more, size) + sums_at(taker, more, size)
            full = free <= 1e-9 * self.rate
            open_[at] = ~(full[giver] | full[taker])
        return out
