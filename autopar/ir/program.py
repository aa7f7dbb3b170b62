"""A pipeline's step as instructions, for one worker per mesh.

A worker executes its instructions in order. `Run` and `Accumulate` keep its devices busy, one after the other; `Send`,
`Recv` and `AllReduce` only start something, and whoever reads a buffer waits until it has arrived. Buffers,
executables, transfers and groups are named by their index in the program; a microbatch is `ONCE` for what happens once
a step.

A `Send` and a `Recv` move a whole cut. What the devices of both meshes do for it are the transfers of the cut's
resharding, in chunks and relays (`ir.resharding`). Between the same two workers, cuts follow each other in the order of
the sends, which is that of the receives too. A pair has a channel in each direction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from autopar.ir.errors import VerifyError
from autopar.ir.pipeline import HostUse, TaskPhase
from autopar.ir.resharding import ReshardingPlan

ONCE = -1
"""The microbatch of what happens once a step."""

BufferKind: TypeAlias = Literal["state", "gradient", "activation", "weight_kept", "weight_context", "message", "scalar"]
"""``message``: what crosses, on either side."""

FusedPhase: TypeAlias = Literal["forward_backward", "forward_input_grad"]
"""Two tasks of a microbatch in one executable (`Stage.fused`)."""
RunPhase: TypeAlias = Literal[TaskPhase, FusedPhase, "grad_sync", "norm", "update", "reshard"]
"""``grad_sync``: gradients are reduced over the mesh; ``norm``: scalars of the gradients that all meshes need;
``reshard``: a cut between two stages of one mesh."""

_LETTERS: dict[RunPhase, str] = {
    "forward": "F",
    "backward": "B",
    "input_grad": "I",
    "weight_grad": "W",
    "forward_backward": "FB",
    "forward_input_grad": "FI",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Arrays of one worker, ``device_bytes`` on each of its devices. ``initial``: there before the first instruction.
    ``final``: there after the last one. Buffers of several microbatches that are alike may be one object, under an
    index each."""

    worker: int
    kind: BufferKind
    device_bytes: float
    initial: bool = False
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Executable:
    """What a `Run` runs: ``time_s`` each time, ``transient_bytes`` a device on top of its buffers while it runs.
    ``forward_s`` of the time goes to the first of two tasks that are fused."""

    phase: RunPhase
    stage: int
    time_s: float
    transient_bytes: float
    forward_s: float = 0.0

    def label(self, microbatch: int) -> str:
        """Phase, stage and microbatch: ``F3.7`` is the forward pass of stage 3 for microbatch 7."""
        name = f"{_LETTERS.get(self.phase, self.phase + ' ')}{self.stage}"
        return name if microbatch == ONCE else f"{name}.{microbatch}"

    def events(self, microbatch: int, start_s: float) -> tuple[tuple[float, float, str], ...]:
        """(start, stop, label) of what it runs from ``start_s`` on: two tasks, where they are fused."""
        label = self.label(microbatch)
        stop_s = start_s + self.time_s
        if self.phase not in get_args(FusedPhase):
            return ((start_s, stop_s, label),)
        then_s = start_s + self.forward_s
        return (start_s, then_s, f"F{label[2:]}"), (then_s, stop_s, label[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class CutTransfer:
    """What crosses from worker ``source`` to worker ``target`` for cut ``cut`` of the plan, in ``time_s`` alone on its
    links: once for each microbatch, or once a step. ``resharding`` has the transfers that bring it over, chunk by
    chunk, and takes ``time_s``; None in a program that is only simulated, without a cluster. ``hosts`` are those whose
    NICs it uses, ``gather_s`` what gathering takes of ``time_s`` where it has landed."""

    cut: int
    source: int
    target: int
    time_s: float
    resharding: ReshardingPlan | None = None
    hosts: tuple[HostUse, ...] = ()
    gather_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Workers that add up a buffer, in this order, in ``time_s`` from when the last of them has come."""

    workers: tuple[int, ...]
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Runs an executable on buffers ``ins``; ``outs`` are there when it is done. Those of ``donate``, all of them in
    ``ins``, are gone when it is done, unless they are in ``outs`` as well: then they are updated in place."""

    executable: int
    microbatch: int
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    donate: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Starts to send a buffer, which must stay as it is from here to its `Free`."""

    transfer: int
    microbatch: int
    buffer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recv:
    """Makes room for a buffer and starts to receive it."""

    transfer: int
    microbatch: int
    buffer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate:
    """Adds ``src`` to ``dst`` in place, in ``time_s``."""

    dst: int
    src: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """Starts to replace a buffer by its sum over the workers of a group, always added in the group's order. A worker's
    n-th for a group belongs to the n-th of the others."""

    group: int
    buffer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """Lets go of a buffer, when sends of it are done; what follows does not wait for these."""

    buffer: int


Instruction: TypeAlias = Run | Send | Recv | Accumulate | AllReduce | Free


def reads(instruction: Instruction) -> tuple[int, ...]:
    """Buffers that must have arrived before the instruction can start."""
    match instruction:
        case Run():
            return instruction.ins
        case Accumulate():
            return (instruction.dst, instruction.src)
        case Recv():
            return ()
        case Send() | AllReduce() | Free():
            return (instruction.buffer,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """``workers[w]`` are worker w's instructions."""

    buffers: tuple[Buffer, ...]
    executables: tuple[Executable, ...]
    transfers: tuple[CutTransfer, ...]
    groups: tuple[Group, ...]
    workers: tuple[tuple[Instruction, ...], ...]

    def verify(self) -> None:
        """Raises VerifyError where an index is of nothing, an instruction is on another worker than its buffer or its
        transfer's end, a figure is negative or infinite, a transfer stays on its worker, a group names a worker twice,
        or a Run gives a buffer twice, donates what it does not read, or overwrites what it only reads. What the
        instructions do together is `program.check`'s."""
        for index, buffer in enumerate(self.buffers):
            _index(buffer.worker, self.workers, f"worker of buffer {index}")
            _figure(buffer.device_bytes, f"device_bytes of buffer {index}")
        for index, executable in enumerate(self.executables):
            _figure(executable.time_s, f"time_s of executable {index}")
            _figure(executable.transient_bytes, f"transient_bytes of executable {index}")
            if not 0 <= executable.forward_s <= executable.time_s:
                raise VerifyError(f"forward_s of executable {index} is {executable.forward_s}, of {executable.time_s}")
        for index, transfer in enumerate(self.transfers):
            for worker in (transfer.source, transfer.target):
                _index(worker, self.workers, f"worker of transfer {index}")
            _figure(transfer.time_s, f"time_s of transfer {index}")
            planned = transfer.resharding
            _figure(transfer.gather_s, f"gather_s of transfer {index}")
            brought_s = transfer.time_s - transfer.gather_s
            if planned is not None and not math.isclose(planned.time_s, brought_s, rel_tol=1e-6, abs_tol=1e-12):
                raise VerifyError(f"transfer {index} takes {brought_s} s, its resharding {planned.time_s} s")
            if transfer.source == transfer.target:
                raise VerifyError(f"transfer {index} leads from worker {transfer.source} to itself")
        for index, group in enumerate(self.groups):
            for worker in group.workers:
                _index(worker, self.workers, f"worker of group {index}")
            _figure(group.time_s, f"time_s of group {index}")
            if len(set(group.workers)) != len(group.workers):
                raise VerifyError(f"group {index} names a worker twice: {group.workers}")
        for worker, instructions in enumerate(self.workers):
            for at, instruction in enumerate(instructions):
                try:
                    self._verify(worker, instruction)
                except VerifyError as fault:
                    raise VerifyError(f"worker {worker}, instruction {at}: {fault}") from None

    def _verify(self, worker: int, instruction: Instruction) -> None:
        buffers = reads(instruction)
        match instruction:
            case Run(executable=executable, ins=ins, outs=outs, donate=donate):
                _index(executable, self.executables, "executable")
                buffers += outs
                if len(set(ins)) != len(ins) or len(set(outs)) != len(outs) or len(set(donate)) != len(donate):
                    raise VerifyError(f"a buffer twice in {ins}, {outs} or {donate}")
                if not set(donate) <= set(ins):
                    raise VerifyError(f"donates {min(set(donate) - set(ins))}, which it does not read")
                if not set(outs) & set(ins) <= set(donate):
                    raise VerifyError(f"overwrites {min(set(outs) & set(ins))}, which it reads; donate it")
            case Send(transfer=transfer):
                _index(transfer, self.transfers, "transfer")
                if self.transfers[transfer].source != worker:
                    raise VerifyError(f"sends for worker {self.transfers[transfer].source}")
            case Recv(transfer=transfer, buffer=buffer):
                _index(transfer, self.transfers, "transfer")
                buffers += (buffer,)
                if self.transfers[transfer].target != worker:
                    raise VerifyError(f"receives for worker {self.transfers[transfer].target}")
            case Accumulate(dst=dst, src=src, time_s=time_s):
                _figure(time_s, "time_s")
                if dst == src:
                    raise VerifyError(f"adds buffer {dst} to itself")
            case AllReduce(group=group):
                _index(group, self.groups, "group")
                if worker not in self.groups[group].workers:
                    raise VerifyError(f"worker {worker} is not in group {group}")
            case Free():
                pass
        for buffer in buffers:
            _index(buffer, self.buffers, "buffer")
            if self.buffers[buffer].worker != worker:
                raise VerifyError(f"buffer {buffer} is worker {self.buffers[buffer].worker}'s")

    def describe(self, instruction: Instruction) -> str:
        """One instruction as text: ``run F1.0 (b2, b7*) -> b8``, * for what is donated."""
        match instruction:
            case Run(executable=executable, microbatch=microbatch, ins=ins, outs=outs, donate=donate):
                given = _names(ins, marked=donate)
                return f"run {self.executables[executable].label(microbatch)} ({given}) -> {_names(outs) or 'nothing'}"
            case Send(transfer=transfer, microbatch=microbatch, buffer=buffer):
                return f"send b{buffer} to worker {self.transfers[transfer].target} (t{_once(transfer, microbatch)})"
            case Recv(transfer=transfer, microbatch=microbatch, buffer=buffer):
                return f"recv b{buffer} from worker {self.transfers[transfer].source} (t{_once(transfer, microbatch)})"
            case Accumulate(dst=dst, src=src):
                return f"accumulate b{dst} += b{src}"
            case AllReduce(group=group, buffer=buffer):
                return f"all-reduce b{buffer} over workers {', '.join(map(str, self.groups[group].workers))}"
            case Free(buffer=buffer):
                return f"free b{buffer}"

    def text(self) -> str:
        """Every worker's instructions, one a line."""
        lines: list[str] = []
        for worker, instructions in enumerate(self.workers):
            lines.append(f"worker {worker}")
            lines += [f"  {self.describe(instruction)}" for instruction in instructions]
        return "\n".join(lines) + "\n"


def _names(buffers: Iterable[int], marked: tuple[int, ...] = ()) -> str:
    return ", ".join(f"b{b}*" if b in marked else f"b{b}" for b in buffers)


def _once(transfer: int, microbatch: int) -> str:
    return str(transfer) if microbatch == ONCE else f"{transfer}.{microbatch}"


def _index(index: int, of: tuple[object, ...], what: str) -> None:
    if not 0 <= index < len(of):
        raise VerifyError(f"{what}: {index} does not exist; there are {len(of)}")


def _figure(value: float, what: str) -> None:
    if not 0 <= value < math.inf:
        raise VerifyError(f"{what} is {value}")
