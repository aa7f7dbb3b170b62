"""The blocking mode of `simulate`: runs and transfers of a worker one after the other (its docstring has the model).

Nothing overlaps, so time is local: a transfer starts when both of its workers have come to it.
"""

from __future__ import annotations

from autopar.inter_op.program.event_log import Record
from autopar.inter_op.program.timeline import Timeline
from autopar.ir.errors import ProgramError
from autopar.ir.program import Accumulate, AllReduce, Free, Program, Recv, Run, Send, reads


def simulate_blocking(program: Program) -> Timeline:
    """The timeline of a checked program. Raises ProgramError where workers wait for ever, as they can in programs that
    would end if transfers overlapped with tasks."""
    return _Blocking(program).run()


class _Blocking:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.record = Record(program)
        workers = range(len(program.workers))
        self.clock = [0.0 for _ in workers]
        self.position = [0 for _ in workers]
        self.sends: list[list[Send]] = [[] for _ in workers]  # asked for, not done
        self.receives: list[list[Recv]] = [[] for _ in workers]
        self.queue: list[list[Send | Recv]] = [[] for _ in workers]  # to be done before the next instruction
        self.sums: dict[int, list[tuple[int, int]]] = {}  # group -> (worker, buffer) of those that have come

    def run(self) -> Timeline:
        """Goes on while any worker can."""
        going = True
        while going:
            going = False
            for worker in range(len(self.program.workers)):
                while self._step(worker):
                    going = True
        stuck = [
            f"worker {worker} at {self.program.describe((self.queue[worker] or instructions[at:])[0])}"
            for worker, (at, instructions) in enumerate(zip(self.position, self.program.workers, strict=True))
            if self.queue[worker] or at < len(instructions)
        ]
        if stuck:
            raise ProgramError(f"workers wait for ever when transfers block them: {'; '.join(stuck)}")
        return self.record.timeline(max(self.clock, default=0.0))

    def _step(self, worker: int) -> bool:
        """Does a worker's next thing; False where it waits or has ended."""
        if self.queue[worker]:
            return self._transfer(worker)
        instructions, at = self.program.workers[worker], self.position[worker]
        instruction = instructions[at] if at < len(instructions) else None
        if self._gather(worker, instruction):
            return True
        if instruction is None or any(worker == w for parts in self.sums.values() for w, _ in parts):
            return False
        self.position[worker] += 1
        match instruction:
            case Send():
                self.record.lend(instruction.buffer)
                self.sends[worker].append(instruction)
            case Recv():
                self.record.add(instruction.buffer, self.clock[worker])
                self.receives[worker].append(instruction)
            case Run() | Accumulate():
                self.clock[worker] = self.record.runs(worker, self.clock[worker], instruction)
                if isinstance(instruction, Run):
                    self.record.ran(worker, self.clock[worker], instruction)
            case Free():
                self.record.free(instruction.buffer, self.clock[worker])
            case AllReduce(group=group, buffer=buffer):
                self._sum(worker, group, buffer)
        return True

    def _gather(self, worker: int, instruction: object) -> bool:
        """Queues the transfers that come before ``instruction`` (None: the end); True where there are any."""
        sends, receives = self.sends[worker], self.receives[worker]
        transfers = self.program.transfers
        if isinstance(instruction, Send | Recv | Free):
            return False
        chosen: list[Recv] = list(receives)
        if isinstance(instruction, Run | Accumulate | AllReduce):
            needed = set(reads(instruction))
            last: dict[int, int] = {}  # peer -> the last receive that is needed; those before it come first
            for i, receive in enumerate(receives):
                if receive.buffer in needed:
                    last[transfers[receive.transfer].source] = i
            chosen = [r for i, r in enumerate(receives) if i <= last.get(transfers[r.transfer].source, -1)]

        def place(operation: Send | Recv) -> tuple[int, int]:
            transfer = transfers[operation.transfer]
            peer = transfer.source + transfer.target - worker
            return peer, transfer.source

        self.queue[worker] = sorted([*sends, *chosen], key=place)
        self.sends[worker] = []
        self.receives[worker] = [r for r in receives if r not in chosen]
        return bool(self.queue[worker])

    def _transfer(self, worker: int) -> bool:
        """The first transfer of the worker's queue, if the other side has come to it too."""
        mine = self.queue[worker][0]
        transfer = self.program.transfers[mine.transfer]
        peer = transfer.source + transfer.target - worker
        if not self.queue[peer]:
            return False
        theirs = self.queue[peer][0]
        if (theirs.transfer, theirs.microbatch) != (mine.transfer, mine.microbatch):
            return False
        start = max(self.clock[worker], self.clock[peer])
        stop = start + transfer.time_s
        self.clock[worker] = self.clock[peer] = stop
        del self.queue[worker][0], self.queue[peer][0]
        send = mine if isinstance(mine, Send) else theirs
        assert isinstance(send, Send)  # a transfer's two sides are one of each
        self.record.transferred(start, stop, send)
        self.record.give_back(send.buffer, stop)
        return True

    def _sum(self, worker: int, group: int, buffer: int) -> None:
        """A worker comes to a sum, and stays until all have come."""
        came = self.sums.setdefault(group, [])
        came.append((worker, buffer))
        about = self.program.groups[group]
        if len(came) == len(about.workers):
            stop = max(self.clock[w] for w, _ in came) + about.time_s
            for w, _ in self.sums.pop(group):
                self.clock[w] = stop
