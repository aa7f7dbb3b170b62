"""What the simulators write down: plain lists while they run, a `Timeline` at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.inter_op.program.timeline import Event, LinkTimeline, Timeline, WorkerTimeline
from autopar.ir.program import ONCE, Accumulate, Program, Run, Send


class Record:
    """A program's runs and transfers as they happen, and the bytes on each worker's devices. All times are seconds from
    the start of the step; those that change one worker's bytes must not go back. ``pairs``: the (source, target) that
    have transfers; ``pair_of[t]``: the pair of transfer t, an index into these."""

    def __init__(self, program: Program) -> None:
        self.program = program
        workers = range(len(program.workers))
        self.bytes = [buffer.device_bytes for buffer in program.buffers]
        self.worker = [buffer.worker for buffer in program.buffers]
        self.level = [0.0 for _ in workers]
        for buffer in program.buffers:
            if buffer.initial:
                self.level[buffer.worker] += buffer.device_bytes
        self.memory: list[list[tuple[float, float]]] = [[(0.0, level)] for level in self.level]
        self.peak = list(self.level)
        self.lent: dict[int, int] = {}  # sends under way of a buffer
        self.to_free: set[int] = set()
        self.running: list[list[tuple[float, float, Run | Accumulate]]] = [[] for _ in workers]
        numbers: dict[tuple[int, int], int] = {}
        ends = [(transfer.source, transfer.target) for transfer in program.transfers]
        self.pair_of = [numbers.setdefault(end, len(numbers)) for end in ends]  # of each of the program's transfers
        self.pairs = list(numbers)
        self.moving: list[list[tuple[float, float, Send]]] = [[] for _ in numbers]

    # Bytes --------------------------------------------------------------------------------------------

    def _change(self, worker: int, change: float, now: float) -> None:
        if change:
            level = self.level[worker] = self.level[worker] + change
            history = self.memory[worker]
            if history[-1][0] == now:
                history[-1] = (now, level)
            else:
                history.append((now, level))
            if level > self.peak[worker]:
                self.peak[worker] = level

    def add(self, buffer: int, now: float) -> None:
        """Buffer ``buffer`` is allocated."""
        self._change(self.worker[buffer], self.bytes[buffer], now)

    def lend(self, buffer: int) -> None:
        """A send of the buffer was started: it is not freed before `give_back`."""
        self.lent[buffer] = self.lent.get(buffer, 0) + 1

    def give_back(self, buffer: int, now: float) -> None:
        """A send of the buffer is done; the last one frees it where `free` was called meanwhile."""
        self.lent[buffer] -= 1
        if not self.lent[buffer]:
            del self.lent[buffer]
            if buffer in self.to_free:
                self.to_free.remove(buffer)
                self._change(self.worker[buffer], -self.bytes[buffer], now)

    def free(self, buffer: int, now: float) -> None:
        """Frees a buffer, or has the last of its sends do so."""
        if buffer in self.lent:
            self.to_free.add(buffer)
        else:
            self._change(self.worker[buffer], -self.bytes[buffer], now)

    # Events -------------------------------------------------------------------------------------------

    def runs(self, worker: int, now: float, instruction: Run | Accumulate) -> float:
        """The instruction starts, its results and transient bytes are allocated; returns when it ends."""
        if isinstance(instruction, Accumulate):
            stop = now + instruction.time_s
        else:
            executable = self.program.executables[instruction.executable]
            stop = now + executable.time_s
            more = executable.transient_bytes
            for buffer in instruction.outs:
                if buffer not in instruction.donate:
                    more += self.bytes[buffer]
            self._change(worker, more, now)
        self.running[worker].append((now, stop, instruction))
        return stop

    def ran(self, worker: int, now: float, instruction: Run) -> None:
        """The Run ends: its transient bytes and what was donated to it are freed."""
        less = self.program.executables[instruction.executable].transient_bytes
        for buffer in instruction.donate:
            if buffer not in instruction.outs:
                less += self.bytes[buffer]
        self._change(worker, -less, now)

    def transferred(self, start: float, stop: float, send: Send) -> None:
        """What ``send`` sends crosses from ``start`` to ``stop``."""
        self.moving[self.pair_of[send.transfer]].append((start, stop, send))

    # Result -------------------------------------------------------------------------------------------

    def timeline(self, makespan_s: float) -> Timeline:
        """All that was recorded, of a step of ``makespan_s`` seconds."""
        executables, transfers = self.program.executables, self.program.transfers

        def of(start: float, stop: float, instruction: Run | Accumulate | Send) -> Sequence[Event]:
            match instruction:
                case Run(executable=executable, microbatch=microbatch):
                    return [Event(*row) for row in executables[executable].events(microbatch, start)]
                case Send(transfer=transfer, microbatch=microbatch):
                    number = "" if microbatch == ONCE else f".{microbatch}"
                    return [Event(start, stop, f"cut {transfers[transfer].cut}{number}")]
                case Accumulate(src=src):
                    return [Event(start, stop, f"+ b{src}")]

        def events(rows: Sequence[tuple[float, float, Run | Accumulate | Send]]) -> tuple[Event, ...]:
            return tuple([event for row in rows for event in of(*row)])

        workers = tuple(
            WorkerTimeline(
                events=events(running),
                busy_s=math.fsum(stop - start for start, stop, _ in running),
                memory=tuple(memory),
                peak_bytes=peak,
            )
            for running, memory, peak in zip(self.running, self.memory, self.peak, strict=True)
        )
        links = tuple(
            LinkTimeline(
                source=source,
                target=target,
                events=events(moved),
                busy_s=math.fsum(stop - start for start, stop, _ in moved),
            )
            for (source, target), moved in zip(self.pairs, self.moving, strict=True)
        )
        return Timeline(makespan_s=makespan_s, workers=workers, links=links)
