"""`check_program`: a proof that a program can be run, reads only what is there and leaves only what it should.

Each worker by itself: a buffer is written (by a Run, or a Recv that makes room for it) before it is read, not written
while it is there, not touched once it was freed or donated, and not changed between its Send and its Free. At the end
the ``final`` buffers are there, and no others.

All together: each Send has exactly its Recv, and between the same two workers both stand in the same order. Nobody
waits for ever: that does not depend on how long things take, so one execution without time is a proof. Like the
schedules' check, this one names who waits for what.
"""

from __future__ import annotations

from collections import defaultdict

from autopar.ir.errors import ProgramError
from autopar.ir.program import Accumulate, AllReduce, Free, Instruction, Program, Recv, Run, Send, reads


def check_program(program: Program) -> None:
    """Raises VerifyError where the program breaks a constraint of its own, ProgramError for any of the above."""
    program.verify()
    own: list[list[int]] = [[] for _ in program.workers]
    for index, buffer in enumerate(program.buffers):
        own[buffer.worker].append(index)
    for worker, buffers in enumerate(own):
        _check_buffers(program, worker, buffers)
    _check_pairs(program)
    _check_ends(program)


def _check_buffers(program: Program, worker: int, own: list[int]) -> None:
    there = {buffer for buffer in own if program.buffers[buffer].initial}
    gone: dict[int, Instruction] = {}  # and what took it away
    lent: set[int] = set()  # sent, not freed yet

    def fault(at: int, text: str) -> ProgramError:
        instruction = program.workers[worker][at]
        return ProgramError(f"worker {worker}, instruction {at}, {program.describe(instruction)}: {text}")

    for at, instruction in enumerate(program.workers[worker]):
        for buffer in reads(instruction):
            if buffer in gone:
                raise fault(at, f"buffer b{buffer} is gone since {program.describe(gone[buffer])}")
            if buffer not in there:
                raise fault(at, f"buffer b{buffer} was never written")
        written, changed, taken = _effects(instruction)
        for buffer in (*changed, *(() if isinstance(instruction, Free) else taken)):
            if buffer in lent:
                raise fault(at, f"buffer b{buffer} is being sent; free it instead, or change another")
        for buffer in taken:
            there.discard(buffer)
            lent.discard(buffer)
            gone[buffer] = instruction
        for buffer in written:
            if buffer in there:
                raise fault(at, f"buffer b{buffer} is there already and would be lost")
            there.add(buffer)
            gone.pop(buffer, None)
        if isinstance(instruction, Send):
            lent.add(instruction.buffer)
    for index in own:
        buffer = program.buffers[index]
        if buffer.final != (index in there):
            what = "is not there at the end, but is to be" if buffer.final else "is never freed"
            raise ProgramError(f"worker {worker}: buffer b{index} ({buffer.kind}) {what}")


def _effects(instruction: Instruction) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Buffers that come to be, that are changed in place, and that go."""
    match instruction:
        case Run(outs=outs, donate=donate):
            return (
                tuple(b for b in outs if b not in donate),
                tuple(b for b in outs if b in donate),
                tuple(b for b in donate if b not in outs),
            )
        case Recv(buffer=buffer):
            return (buffer,), (), ()
        case Accumulate(dst=dst):
            return (), (dst,), ()
        case AllReduce(buffer=buffer):
            return (), (buffer,), ()
        case Free(buffer=buffer):
            return (), (), (buffer,)
        case Send():
            return (), (), ()


def _check_pairs(program: Program) -> None:
    sends: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    receives: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for instructions in program.workers:
        for instruction in instructions:
            if isinstance(instruction, Send | Recv):
                transfer = program.transfers[instruction.transfer]
                side = sends if isinstance(instruction, Send) else receives
                side[transfer.source, transfer.target].append((instruction.transfer, instruction.microbatch))
    for pair in sorted({*sends, *receives}):
        sent, received = sends[pair], receives[pair]
        where = f"from worker {pair[0]} to worker {pair[1]}"
        for what, side, other in (("sent", sent, received), ("received", received, sent)):
            if len(set(side)) != len(side):
                raise ProgramError(f"{where}: {_named(next(k for k in side if side.count(k) > 1))} is {what} twice")
            missing = set(side) - set(other)
            if missing:
                raise ProgramError(
                    f"{where}: {_named(min(missing))} is {what}, but not {'received' if other is received else 'sent'}"
                )
        for n, (a, b) in enumerate(zip(sent, received, strict=True)):
            if a != b:
                raise ProgramError(f"{where}: number {n} to be sent is {_named(a)}, to be received {_named(b)}")


def _named(key: tuple[int, int]) -> str:
    return f"transfer {key[0]}" + (f" of microbatch {key[1]}" if key[1] >= 0 else "")


def _check_ends(program: Program) -> None:
    """Executes without time. A transfer has come when both sides have started it (their orders are the same, so those
    before it have come too); a sum when every worker of its group has started it."""
    position = [0] * len(program.workers)
    absent: dict[int, str] = {}  # buffers that are on their way, and what they wait for
    half: dict[tuple[int, int], int] = {}  # transfers started by one side: the buffer of the target, or -1
    rounds: list[list[int]] = [[0] * len(group.workers) for group in program.groups]
    open_sums: dict[tuple[int, int], list[int]] = defaultdict(list)  # (group, round) -> buffers
    waiting: dict[int, int] = {}  # buffer -> the worker that needs it
    going = list(range(len(program.workers)))

    def arrived(buffer: int) -> None:
        del absent[buffer]
        if buffer in waiting:
            going.append(waiting.pop(buffer))

    while going:
        worker = going.pop()
        instructions = program.workers[worker]
        while position[worker] < len(instructions):
            instruction = instructions[position[worker]]
            missing = next((b for b in reads(instruction) if b in absent), None)
            if missing is not None:
                waiting[missing] = worker
                break
            position[worker] += 1
            match instruction:
                case Send(transfer=transfer, microbatch=microbatch):
                    buffer = half.pop((transfer, microbatch), None)
                    if buffer is None:
                        half[transfer, microbatch] = -1
                    else:
                        arrived(buffer)
                case Recv(transfer=transfer, microbatch=microbatch, buffer=buffer):
                    if half.pop((transfer, microbatch), None) is None:
                        half[transfer, microbatch] = buffer
                        absent[buffer] = f"worker {program.transfers[transfer].source} to send it"
                case AllReduce(group=group, buffer=buffer):
                    member = program.groups[group].workers.index(worker)
                    key = (group, rounds[group][member])
                    rounds[group][member] += 1
                    open_sums[key].append(buffer)
                    absent[buffer] = f"all of workers {', '.join(map(str, program.groups[group].workers))} to add to it"
                    if len(open_sums[key]) == len(rounds[group]):
                        for part in open_sums.pop(key):
                            arrived(part)
                case Run() | Accumulate() | Free():
                    pass
    stuck = [
        f"worker {worker} at {program.describe(program.workers[worker][position[worker]])} waits for {absent[buffer]}"
        for buffer, worker in sorted(waiting.items(), key=lambda item: item[1])
    ]
    if stuck:
        raise ProgramError(f"workers wait for each other: {'; '.join(stuck)}")
    for (group, _), parts in open_sums.items():
        raise ProgramError(f"group {group}: {len(parts)} of {len(rounds[group])} workers start a sum that never ends")
