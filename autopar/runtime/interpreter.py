"""The interpreter of a pipeline's instructions (`ir.program`), one for each worker: the same in every runtime.

It executes one worker's instructions in order and waits for nothing but what has not been sent yet: arrays of JAX are
there at once, their numbers later. Where several workers share a thread (`runtime.in_process`), it lets others go on
instead of waiting, and after each task. What a buffer holds are arrays by key (`runtime.stages`). What a `Run` does is
its `Executables`' affair, how arrays get to other workers its `Transport`'s.

A `Recv` starts to receive; the first instruction that reads its buffer takes that from the transport. An `AllReduce`
gives the worker what all workers have put in, and whoever reads it adds that up in the order of the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from autopar.ir.program import Accumulate, AllReduce, Executable, Free, Program, Recv, Run, Send, reads

Arrays: TypeAlias = dict[Any, Any]
"""Arrays by key."""
Steps: TypeAlias = Generator[bool, None, dict[int, Arrays]]
"""A step under way (`Interpreter.steps`)."""


class Transport(Protocol):
    """How arrays get to other workers. No method waits for numbers; `receive` and `taken` wait for another worker to
    have come so far, unless `arrived` and `given` say that it has."""

    def send(self, transfer: int, microbatch: int, arrays: Arrays) -> None:
        """Starts to send what crosses in a transfer, arrays by key as the sender names them."""
        ...

    def expect(self, transfer: int, microbatch: int) -> None:
        """Starts to receive what will be wanted of a transfer."""
        ...

    def arrived(self, transfer: int, microbatch: int) -> bool:
        """False where another worker, in this thread, has to come further before `receive`."""
        ...

    def receive(self, transfer: int, microbatch: int) -> Arrays:
        """What was sent and expected: arrays by key as the receiver names them, on its mesh."""
        ...

    def give(self, group: int, number: int, worker: int, arrays: Arrays) -> None:
        """What a worker gives all others of a group in their ``number``-th exchange."""
        ...

    def given(self, group: int, number: int, worker: int) -> bool:
        """False where others, in this thread, have to come further before `taken`."""
        ...

    def taken(self, group: int, number: int, worker: int) -> Arrays:
        """What all workers of a group gave, as far as this one wants it."""
        ...


class Executables(Protocol):
    """What one worker runs."""

    def run(self, executable: Executable, microbatch: int, given: Sequence[Arrays], gives: int) -> list[Arrays]:
        """Dispatches a `Run`.

        Args:
            given: the arrays in each of its buffers ``ins``.
            gives: how many buffers ``outs`` it has.

        Returns:
            The arrays in each of ``outs``.
        """
        ...

    def add(self, total: Arrays, part: Arrays) -> Arrays:
        """The sum of an `Accumulate`."""
        ...


class Interpreter:
    """Executes worker ``worker``'s instructions; ``timer`` is called before each, with its position."""

    def __init__(
        self, program: Program, worker: int, executables: Executables, transport: Transport,
        timer: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        self.program, self.worker = program, worker
        self.executables, self.transport, self.timer = executables, transport, timer
        self._instructions = [(instruction, reads(instruction)) for instruction in program.workers[worker]]

    def step(self, initial: Mapping[int, Arrays]) -> dict[int, Arrays]:
        """Runs one step in a thread of its own: buffers that are there before it → those that are there after it."""
        run = self.steps(initial)
        while True:
            try:
                assert next(run), "a worker in a thread of its own waits in its transport"
            except StopIteration as done:
                return done.value

    def steps(self, initial: Mapping[int, Arrays]) -> Steps:
        """`step` as a generator: yields True after each task, and False where another worker, in this thread, has to
        come further; returns the buffers that are there afterwards."""
        program, executables, transport = self.program, self.executables, self.transport
        buffers: dict[int, Arrays] = dict(initial)
        coming: dict[int, tuple[int, int]] = {}
        exchanged = [0] * len(program.groups)
        for at, (instruction, wanted) in enumerate(self._instructions):
            if self.timer is not None:
                self.timer(at)
            for b in wanted:
                if b in coming:
                    key = coming.pop(b)
                    while not transport.arrived(*key):
                        yield False
                    buffers[b] = transport.receive(*key)
            match instruction:
                case Run(executable=executable, microbatch=microbatch, ins=ins, outs=outs, donate=donate):
                    given = [buffers[b] for b in ins]
                    for b in donate:
                        del buffers[b]
                    made = executables.run(program.executables[executable], microbatch, given, len(outs))
                    buffers.update(zip(outs, made, strict=True))
                    yield True
                case Send(transfer=transfer, microbatch=microbatch, buffer=buffer):
                    transport.send(transfer, microbatch, buffers[buffer])
                case Recv(transfer=transfer, microbatch=microbatch, buffer=buffer):
                    transport.expect(transfer, microbatch)
                    coming[buffer] = (transfer, microbatch)
                case Accumulate(dst=dst, src=src):
                    buffers[dst] = executables.add(buffers[dst], buffers[src])
                case AllReduce(group=group, buffer=buffer):
                    turn = (group, exchanged[group], self.worker)
                    exchanged[group] += 1
                    transport.give(*turn, buffers[buffer])
                    while not transport.given(*turn):
                        yield False
                    buffers[buffer] = transport.taken(*turn)
                case Free(buffer=buffer):
                    del buffers[buffer]
        for b, key in coming.items():
            while not transport.arrived(*key):
                yield False
            buffers[b] = transport.receive(*key)
        return buffers


def in_turn(runs: Sequence[Steps]) -> list[dict[int, Arrays]]:
    """All workers' steps in this thread, a task of each at a time: none gets far ahead of those that wait for it, or
    for a place in the queue of its device."""
    done: dict[int, dict[int, Arrays]] = {}
    while len(done) < len(runs):
        went_on = False
        for w, run in enumerate(runs):
            if w in done:
                continue
            try:
                went_on |= next(run)
            except StopIteration as end:
                done[w], went_on = end.value, True
        assert went_on, "workers wait for each other"
    return [done[w] for w in range(len(runs))]
