"""`simulate`: how long a program takes, and what it holds meanwhile, by discrete events.

In: any program; durations are those of its executables, transfers, groups and Accumulates. Out: a `Timeline`.

Compute. A worker's devices run one thing at a time, in the order of its instructions. What a Run, an Accumulate, a
Send, an AllReduce or a Free reads must have arrived; instructions themselves take no time.

Transfers. One starts when both sides have started it and those before it between the same two workers (in its
direction) are done. With ``sharing="endpoints"`` transfers that are under way divide what they all need, as connections
of a network do: the outgoing side of each source, the incoming side of each target, and both directions of each host's
NICs (`CutTransfer.hosts`, for the part of its time that a transfer keeps them busy). Rates are max-min fair
(`_Links._share`): all grow alike until something is full, those that need it stay as they are, the others grow on; at
rate 1 a transfer takes its ``time_s``. With ``sharing="pairs"`` each pair of workers has links of its own, as in the
closed formulas of the literature. Sums over workers (scalars) use no links.

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
        self.links = _Links(program, sharing)
        self.moving: dict[int, tuple[float, Send]] = {}  # pair -> when its transfer started, what
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
        if pair in self.moving or not self.sends[pair] or not self.receives[pair]:
            return
        send = self.sends[pair][0]
        self.moving[pair] = (now, send)
        self.links.start(pair, send.transfer, now)
        self._next_transfer()

    def _next_transfer(self) -> None:
        """The transfer that will end first, as far as is known now."""
        if (found := self.links.first()) is not None:
            self._push(found[0], _TRANSFER, self.links.changes)

    def _transferred(self, changes: int, now: float) -> None:
        """A transfer ends, unless others came or went since that was said."""
        if changes != self.links.changes:
            return
        found = self.links.first()
        assert found is not None
        pair = found[1]
        self.links.end(pair, now)
        send, receive = self.sends[pair].popleft(), self.receives[pair].popleft()
        self.record.transferred(self.moving.pop(pair)[0], now, send)
        self.record.give_back(send.buffer, now)
        self._start(pair, now)
        self._next_transfer()
        self._arrived(receive.buffer, now)

    def _arrived(self, buffer: int, now: float) -> None:
        self.absent[buffer] = 0
        worker = self.waiting.pop(buffer, -1)
        if worker >= 0:
            self._advance(worker, now)


class _Links:
    """Transfers under way, at most one of each pair, and how they divide what they need."""

    def __init__(self, program: Program, sharing: Sharing) -> None:
        self.changes = 0
        """How often a transfer has started or ended."""
        self._time_s = [t.time_s for t in program.transfers]
        self._needs: list[dict[tuple[str, int], float]] = [{} for _ in program.transfers]
        if sharing == "endpoints":
            for needs, t in zip(self._needs, program.transfers, strict=True):
                needs["out", t.source] = needs["in", t.target] = 1.0
                for use in t.hosts:
                    needs.update({("sends", use.host): use.sends} if use.sends else {})
                    needs.update({("receives", use.host): use.receives} if use.receives else {})
        self._now = 0.0
        self._left: dict[int, float] = {}
        """Of each pair's transfer the seconds alone that are left,"""
        self._rate: dict[int, float] = {}
        """and how fast they pass."""
        self._what: dict[int, int] = {}
        """Its number."""

    def start(self, pair: int, transfer: int, now: float) -> None:
        """A transfer of a pair starts."""
        self._pass(now)
        self._left[pair], self._what[pair] = self._time_s[transfer], transfer
        self._share()

    def end(self, pair: int, now: float) -> None:
        """The transfer of a pair has ended."""
        self._pass(now)
        del self._left[pair], self._what[pair], self._rate[pair]
        self._share()

    def first(self) -> tuple[float, int] | None:
        """(when the next transfer ends, its pair)."""
        if not self._left:
            return None
        return min((self._now + left / self._rate[pair], pair) for pair, left in self._left.items())

    def _pass(self, now: float) -> None:
        passed = now - self._now
        if passed:
            for pair, rate in self._rate.items():
                self._left[pair] = max(0.0, self._left[pair] - rate * passed)
        self._now = now

    def _share(self) -> None:
        """Max-min fair rates, at most 1."""
        self.changes += 1
        growing, level = dict.fromkeys(self._what, 0), 0.0
        left: dict[tuple[str, int], float] = {}
        while growing:
            wanted: dict[tuple[str, int], float] = {}
            for pair in growing:
                for what, part in self._needs[self._what[pair]].items():
                    wanted[what] = wanted.get(what, 0.0) + part
            room = {what: left.setdefault(what, 1.0) / part for what, part in wanted.items()}
            step = min([1.0 - level, *room.values()])
            full = {what for what, most in room.items() if most <= step * (1 + 1e-12)}
            level += step
            for what, part in wanted.items():
                left[what] -= part * step
            if level >= 1.0 - 1e-12:
                done = list(growing)
            else:
                done = [pair for pair in growing if full & self._needs[self._what[pair]].keys()]
            for pair in done:
                del growing[pair]
                self._rate[pair] = level
