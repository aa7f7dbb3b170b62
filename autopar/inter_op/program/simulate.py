"""`simulate`: how long a program takes, and what it holds meanwhile, by discrete events.

In: any program; durations are those of its executables, transfers, groups and Accumulates. Out: a `Timeline`.

Compute. A worker's devices run one thing at a time, in the order of its instructions. What a Run, an Accumulate, a
Send, an AllReduce or a Free reads must have arrived; instructions themselves take no time.

Transfers. One starts when both sides have started it, those before it between the same two workers (in its direction)
are done, and, with ``sharing="endpoints"``, the outgoing side of its source and the incoming side of its target are
free: each mesh sends one transfer at a time and receives one at a time, as its links are what a transfer's time is of.
Waiting transfers take their turn in the order in which they could have started; one whose other side is busy is passed
over. With ``sharing="pairs"`` each pair of workers has links of its own, as in the closed formulas of the literature.
Sums over workers (scalars) use no links.

Blocking. With ``blocking=True`` a worker does one thing at a time, a run or one transfer, and a transfer keeps both of
its workers. Between two runs a worker does the transfers that its sends before and its next instruction's buffers ask
for, those with the lowest worker first, of two with the same worker the one to the higher number first: an order that
all workers share. Where a mesh works further ahead than 1F1B does, meshes may wait for each other for ever; that is an
error here.

Memory. A device holds its buffers: from the start of the Run that writes them or from their Recv, to the end of the Run
that they are donated to, or from their Free on when all sends of them are done. While a Run is under way, its
``transient_bytes`` too.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from typing import Literal, TypeAlias

from autopar.garbage import collection_paused
from autopar.inter_op.program.blocking import simulate_blocking
from autopar.inter_op.program.event_log import Record
from autopar.inter_op.program.timeline import Timeline
from autopar.ir.errors import ProgramError
from autopar.ir.program import Accumulate, AllReduce, Free, Program, Recv, Run, Send, reads

Sharing: TypeAlias = Literal["endpoints", "pairs"]


def simulate(program: Program, *, sharing: Sharing = "endpoints", blocking: bool = False) -> Timeline:
    """The timeline of a checked program; ``sharing`` and ``blocking`` as above (blocking ignores ``sharing``). Raises
    ProgramError where workers wait for ever."""
    with collection_paused():
        if blocking:
            return simulate_blocking(program)
        return _Engine(program, sharing).run()


_RUN, _TRANSFER, _SUM = range(3)


class _Engine:
    """Events are (time, number, kind, index of the worker, pair or sum)."""

    def __init__(self, program: Program, sharing: Sharing) -> None:
        self.program = program
        self.record = Record(program)
        self.events: list[tuple[float, int, int, int]] = []
        self.number = 0
        self.position = [0] * len(program.workers)
        self.absent = bytearray(len(program.buffers))
        self.waiting: dict[int, int] = {}  # buffer -> the worker that needs it
        self.pairs = self.record.pairs
        pairs = range(len(self.pairs))
        self.sends: list[deque[Send]] = [deque() for _ in pairs]
        self.receives: list[deque[Recv]] = [deque() for _ in pairs]
        self.busy = bytearray(len(self.pairs))
        self.ready: list[tuple[float, int] | None] = [None for _ in pairs]  # since when the first one could start
        workers = range(len(program.workers))
        self.sending, self.receiving = bytearray(len(workers)), bytearray(len(workers))
        self.rivals: list[list[int]] = [[] for _ in pairs]  # pairs that share a side with each
        if sharing == "endpoints":
            by_side: dict[tuple[str, int], list[int]] = defaultdict(list)
            for pair, (source, target) in enumerate(self.pairs):
                by_side["out", source].append(pair)
                by_side["in", target].append(pair)
            self.rivals = [
                sorted({*by_side["out", source], *by_side["in", target]} - {pair})
                for pair, (source, target) in enumerate(self.pairs)
            ]
        self.shared = sharing == "endpoints"
        self.rounds = [[0] * len(program.workers) for _ in program.groups]
        self.open_sums: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.sums: list[list[int]] = []  # buffers of sums under way

    def run(self) -> Timeline:
        """Goes from event to event."""
        record = self.record
        for worker in range(len(self.program.workers)):
            self._advance(worker, 0.0)
        now = 0.0
        while self.events:
            now, _, kind, index = heapq.heappop(self.events)
            if kind == _RUN:
                instruction = self.program.workers[index][self.position[index] - 1]
                if isinstance(instruction, Run):
                    record.ran(index, now, instruction)
                self._advance(index, now)
            elif kind == _TRANSFER:
                self._transferred(index, now)
            else:
                for buffer in self.sums[index]:
                    self._arrived(buffer, now)
        stuck = [
            f"worker {worker} at {self.program.describe(self.program.workers[worker][self.position[worker]])}"
            for worker in sorted(self.waiting.values())
        ]
        if stuck:
            raise ProgramError(f"workers wait for ever: {'; '.join(stuck)}")
        return record.timeline(now)

    def _push(self, time_s: float, kind: int, index: int) -> None:
        self.number += 1
        heapq.heappush(self.events, (time_s, self.number, kind, index))

    def _advance(self, worker: int, now: float) -> None:
        """Goes on with a worker's instructions until one takes time or waits."""
        record, absent = self.record, self.absent
        instructions = self.program.workers[worker]
        at = self.position[worker]
        while at < len(instructions):
            instruction = instructions[at]
            for buffer in reads(instruction):
                if absent[buffer]:
                    self.waiting[buffer] = worker
                    self.position[worker] = at
                    return
            at += 1
            match instruction:
                case Run() | Accumulate():
                    self._push(record.runs(worker, now, instruction), _RUN, worker)
                    break
                case Free():
                    record.free(instruction.buffer, now)
                case Send():
                    record.lend(instruction.buffer)
                    pair = record.pair_of[instruction.transfer]
                    self.sends[pair].append(instruction)
                    self._start(pair, now)
                case Recv():
                    record.add(instruction.buffer, now)
                    absent[instruction.buffer] = 1
                    pair = record.pair_of[instruction.transfer]
                    self.receives[pair].append(instruction)
                    self._start(pair, now)
                case AllReduce():
                    self._sum(worker, instruction, now)
        self.position[worker] = at

    def _sum(self, worker: int, instruction: AllReduce, now: float) -> None:
        """A worker comes to a sum; it ends some time after the last one came."""
        group, buffer = instruction.group, instruction.buffer
        self.absent[buffer] = 1
        key = (group, self.rounds[group][worker])
        self.rounds[group][worker] += 1
        self.open_sums[key].append(buffer)
        if len(self.open_sums[key]) == len(self.program.groups[group].workers):
            self.sums.append(self.open_sums.pop(key))
            self._push(now + self.program.groups[group].time_s, _SUM, len(self.sums) - 1)

    def _start(self, pair: int, now: float) -> None:
        """Starts the first transfer of a pair, if it may."""
        if self.busy[pair] or not self.sends[pair] or not self.receives[pair]:
            return
        if self.ready[pair] is None:
            self.number += 1
            self.ready[pair] = (now, self.number)
        source, target = self.pairs[pair]
        if self.shared:
            if self.sending[source] or self.receiving[target]:
                return
            self.sending[source] = self.receiving[target] = 1
        self.busy[pair] = 1
        self.ready[pair] = None
        send = self.sends[pair][0]
        stop = now + self.program.transfers[send.transfer].time_s
        self.record.transferred(now, stop, send)
        self._push(stop, _TRANSFER, pair)

    def _transferred(self, pair: int, now: float) -> None:
        send, receive = self.sends[pair].popleft(), self.receives[pair].popleft()
        source, target = self.pairs[pair]
        self.busy[pair] = self.sending[source] = self.receiving[target] = 0
        self.record.give_back(send.buffer, now)
        if self.sends[pair] and self.receives[pair]:
            self.number += 1
            self.ready[pair] = (now, self.number)
        if self.shared:
            since = [(at, p) for p in (pair, *self.rivals[pair]) if (at := self.ready[p]) is not None]
            for _, other in sorted(since):
                self._start(other, now)
        else:
            self._start(pair, now)
        self._arrived(receive.buffer, now)

    def _arrived(self, buffer: int, now: float) -> None:
        self.absent[buffer] = 0
        worker = self.waiting.pop(buffer, -1)
        if worker >= 0:
            self._advance(worker, now)
