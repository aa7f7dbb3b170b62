"""`emit`: a PipelinePlan → the instructions of every worker.

One worker per mesh runs its tasks in the schedule's order. With a cut's values:

    forward       after the source's forward task, to the target's of the same microbatch
    backward      after the source's backward or input_grad task, likewise
    gradient      after the source's gradients are reduced over its mesh; added to the target's
    update        after the source's update; they take the place of the target's arguments

Of a fused stage (`Stage.fused`) a microbatch's forward task and the one after it are one `Run`, and what the forward
pass keeps is no buffer but memory that this needs beside them.

A skip over several stages is a cut as any other. A cut between two stages of one mesh is a `Run` of its own. What is to
be sent is sent at once and let go of when it is; what was received is donated to the task that reads it.

Receives are posted early, so that transfers run beside tasks, but not earlier than is of use, as each holds memory: of
each cut at most ``receive_ahead`` wait or are on their way while a task works on one before (one less where that is
fused, as what it reads stays until its end), and none before the worker's own tasks that it is made from. Between two
workers they stand in the order of the sends.

After its last task a worker reduces gradients over its mesh, sends and adds up what several stages train, exchanges
scalars where the update needs any, and updates.

Memory. `StageCost.state_bytes` (arguments and gradient sums) is one buffer of each stage; its gradient sums are another
of 0 bytes. A message on its way out counts its parts on the source mesh, and again for each cut that it is in.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeAlias

from autopar.garbage import collection_paused
from autopar.ir.errors import ProgramError
from autopar.ir.pipeline import Cut, CutPhase, PipelinePlan, ScalarExchange, Task
from autopar.ir.pretty import shard_bytes
from autopar.ir.program import (
    ONCE,
    Accumulate,
    AllReduce,
    Buffer,
    BufferKind,
    CutTransfer,
    Executable,
    Free,
    Group,
    Instruction,
    Program,
    Recv,
    Run,
    RunPhase,
    Send,
)
from autopar.ir.resharding import ReshardingPlan

TransfersOf: TypeAlias = Callable[[PipelinePlan, Cut], ReshardingPlan]
"""The transfers that bring a cut over."""
RECEIVE_AHEAD = 2
"""Receives of one cut beside the task that reads the one before (derived: one that arrives while one waits its turn;
eager 1F1B's sources are two microbatches ahead of its targets, 1F1B's one)."""
PASSES = 3
"""How often the bytes of what is added move between memory and chip: two reads and a write."""


def emit(
    plan: PipelinePlan,
    *,
    receive_ahead: int = RECEIVE_AHEAD,
    exchange: ScalarExchange | None = None,
    rounds: int | None = None,
    transfers_of: TransfersOf | None = None,
) -> Program:
    """The program of a verified plan. ``receive_ahead`` 0 posts each receive when its value is needed; ``transfers_of``
    is for what runs the program or counts its bytes (`crossing.cut_resharding`).

    ``rounds``: for what runs it, how often stages exchange values of the update (`inter_op.update_rounds`). Each is a
    ``norm`` that reads states, gradients and what was exchanged before, and an `AllReduce`; a step that infers has an
    ``update`` too. None, for what simulates it: once where there is an ``exchange``.

    Raises VerifyError where the plan breaks a constraint of its own; ProgramError where ``receive_ahead`` is negative,
    where ``exchange`` has not one time per stage, and where a plan without a backward pass has cuts of one."""
    plan.verify()
    if receive_ahead < 0:
        raise ProgramError(f"receive_ahead is {receive_ahead}; give at least 0")
    if exchange is not None and len(exchange.compute_s) != len(plan.stages):
        raise ProgramError(f"{len(exchange.compute_s)} times of scalars for {len(plan.stages)} stages")
    with collection_paused():
        emitter = _Emitter(plan, rounds is not None, transfers_of)
        for worker, tasks in enumerate(plan.schedule.tasks):
            for task in tasks:
                emitter.task(worker, task)
            if rounds is not None:
                emitter.finish(
                    worker,
                    exchange or ScalarExchange(compute_s=(0.0,) * len(plan.stages), reduce_s=0.0, device_bytes=0.0),
                    rounds,
                )
            elif emitter.trains:
                emitter.finish(worker, exchange, 0 if exchange is None else 1)
        emitter.receive(receive_ahead)
        return emitter.program()


_Pass: TypeAlias = tuple[int, bool]
"""A stage, and whether it is its forward pass."""


class _Emitter:
    """``steps[w]`` are groups of worker w's instructions, a task or a `Run` of the end in each."""

    def __init__(self, plan: PipelinePlan, runs: bool, transfers_of: TransfersOf | None) -> None:
        self.plan, self.runs, self.transfers_of = plan, runs, transfers_of
        self.mesh_of = plan.schedule.mesh_of_stage
        self.num_workers = len(plan.schedule.tasks)
        self.trains = any(task.phase != "forward" for tasks in plan.schedule.tasks for task in tasks)
        self.steps: list[list[list[Instruction]]] = [[] for _ in range(self.num_workers)]
        self.buffers: list[Buffer] = []
        self.executables: dict[Executable, int] = {}
        self.groups: list[Group] = []
        self.into: dict[tuple[int, CutPhase], list[int]] = defaultdict(list)
        self.out_of: dict[tuple[int, CutPhase], list[int]] = defaultdict(list)
        self.transfers: list[CutTransfer] = []
        self.transfer_of: dict[int, int] = {}  # of cuts between workers
        self.kept: dict[tuple[int, int, BufferKind], int] = {}  # (stage, microbatch, kind): what a later task reads
        self.splits = any(task.phase == "weight_grad" for tasks in plan.schedule.tasks for task in tasks)
        self.arriving: dict[tuple[int, int], int] = {}  # (cut, microbatch) -> the target's buffer
        self.read_at: dict[int, dict[int, int]] = defaultdict(dict)  # cut -> microbatch -> the target's step
        self.ran_at: dict[tuple[_Pass, int], int] = {}  # (pass, microbatch) -> its worker's step
        self.sent: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # workers -> (cut, microbatch)s
        self.message: list[tuple[Buffer, Buffer]] = []  # of each cut, at the source and at the target
        for index, cut in enumerate(plan.cuts):
            self._add_cut(index, cut)
        for stage, about in enumerate(plan.stages):
            self._keep(stage, ONCE, "state", about.cost.state_bytes)
            if self.trains:
                self._keep(stage, ONCE, "gradient", 0.0)

    def _add_cut(self, index: int, cut: Cut) -> None:
        if cut.phase != "forward" and not self.trains:
            raise ProgramError(
                f"cut {cut.source} -> {cut.target} is of phase {cut.phase}, but schedule {self.plan.schedule.name} has "
                f"no backward pass"
            )
        source, target = self.mesh_of[cut.source], self.mesh_of[cut.target]
        mesh = self.plan.stages[cut.source].mesh
        out_bytes = float(sum(shard_bytes(value.type, value.src_spec, mesh) for value in cut.values))
        self.message.append((
            Buffer(worker=source, kind="message", device_bytes=out_bytes),
            Buffer(worker=target, kind="message", device_bytes=cut.receive_bytes, final=cut.phase == "update"),
        ))  # fmt: skip
        self.out_of[cut.source, cut.phase].append(index)
        self.into[cut.target, cut.phase].append(index)
        if source != target:
            self.transfer_of[index] = len(self.transfers)
            planned = None if self.transfers_of is None else self.transfers_of(self.plan, cut)
            self.transfers.append(
                CutTransfer(
                    cut=index,
                    source=source,
                    target=target,
                    time_s=cut.time_s,
                    resharding=planned,
                    hosts=cut.hosts,
                    gather_s=cut.gather_s,
                )
            )

    # Buffers ------------------------------------------------------------------------------------------

    def _new(self, buffer: Buffer) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def _keep(self, stage: int, microbatch: int, kind: BufferKind, device_bytes: float) -> int:
        """A buffer for later tasks of the stage, of a microbatch or from step to step."""
        stays = microbatch == ONCE
        buffer = Buffer(worker=self.mesh_of[stage], kind=kind, device_bytes=device_bytes, initial=stays, final=stays)
        self.kept[stage, microbatch, kind] = index = self._new(buffer)
        return index

    def _arrival(self, cut: int, microbatch: int) -> int:
        """The target's buffer of a cut's values."""
        key = (cut, microbatch)
        if key not in self.arriving:
            self.arriving[key] = self._new(self.message[cut][1])
        return self.arriving[key]

    def _arrivals(self, worker: int, stage: int, phase: CutPhase, microbatch: int) -> list[int]:
        """Buffers of all that reaches a stage in a phase; the worker's next step reads them."""
        cuts = self.into[stage, phase]
        for cut in cuts:
            self.read_at[cut][microbatch] = len(self.steps[worker])
        return [self._arrival(cut, microbatch) for cut in cuts]

    # Instructions -------------------------------------------------------------------------------------

    def _run(
        self,
        worker: int,
        stage: int,
        phase: RunPhase,
        time_s: float,
        microbatch: int = ONCE,
        *,
        reads: Sequence[int] = (),
        takes: Sequence[int] = (),
        gives: Sequence[int] = (),
        sends: CutPhase | None = None,
    ) -> None:
        """A new step of one Run, which also makes what the cuts of phase ``sends`` bring away; then their sends. It
        reads ``reads``, and ``takes``, which are donated."""
        cuts = () if sends is None else self.out_of[stage, sends]
        leaving = [self._new(self.message[cut][0]) for cut in cuts]
        step: list[Instruction] = [
            Run(
                executable=self._executable(phase, stage, time_s),
                microbatch=microbatch,
                ins=(*reads, *takes),
                outs=(*gives, *leaving),
                donate=tuple(takes),
            )
        ]
        for cut, buffer in zip(cuts, leaving, strict=True):
            if cut in self.transfer_of:
                target = self.mesh_of[self.plan.cuts[cut].target]
                self.sent[worker, target].append((cut, microbatch))
                step.append(Send(transfer=self.transfer_of[cut], microbatch=microbatch, buffer=buffer))
                step.append(Free(buffer=buffer))
            else:
                step.append(
                    Run(
                        executable=self._executable("reshard", stage, self.plan.cuts[cut].time_s),
                        microbatch=microbatch,
                        ins=(buffer,),
                        outs=(self._arrival(cut, microbatch),),
                        donate=(buffer,),
                    )
                )
        self.steps[worker].append(step)

    def _executable(self, phase: RunPhase, stage: int, time_s: float) -> int:
        cost = self.plan.stages[stage].cost
        beside, forward_s = cost.transients, 0.0
        match phase:
            case "forward_backward":
                transient = cost.activation_bytes - beside.received_bytes + beside.fused_bytes
                forward_s = cost.forward_s
            case "forward_input_grad":
                transient = beside.fused_input_grad_bytes
                forward_s = cost.forward_s
            case "reshard" | "norm":
                transient = 0.0
            case "grad_sync" | "update":
                transient = beside.update_bytes
            case _:
                transient = beside.of(phase)
        executable = Executable(phase=phase, stage=stage, time_s=time_s, transient_bytes=transient, forward_s=forward_s)
        return self.executables.setdefault(executable, len(self.executables))

    def task(self, worker: int, task: Task) -> None:
        """A task of the schedule, and what it sends."""
        s, j = task.stage, task.microbatch
        fused = self.plan.stages[s].fused
        if fused and task.phase in ("backward", "input_grad"):
            return
        if task.phase != "weight_grad":
            self.ran_at[(s, task.phase == "forward"), j] = len(self.steps[worker])
        cost = self.plan.stages[s].cost
        state = self.kept[s, ONCE, "state"]
        match task.phase:
            case "forward" if fused:
                self.ran_at[(s, False), j] = len(self.steps[worker])
                given = self._arrivals(worker, s, "forward", j)
                if self.splits:
                    gives = [
                        self._keep(s, j, "weight_kept", cost.kept_bytes),
                        self._keep(s, j, "weight_context", cost.weight_context_bytes - cost.kept_bytes),
                    ]
                    self._run(
                        worker, s, "forward_input_grad", cost.forward_s + cost.input_grad_s, j,
                        reads=[state], takes=given, gives=gives, sends="backward",
                    )  # fmt: skip
                else:
                    gives = [self.kept[s, ONCE, "gradient"]]
                    self._run(
                        worker, s, "forward_backward", cost.forward_s + cost.backward_s, j,
                        reads=[state], takes=[*given, *gives], gives=gives, sends="backward",
                    )  # fmt: skip
            case "forward":
                given = self._arrivals(worker, s, "forward", j)
                kept: list[int] = []
                if self.trains:
                    later = cost.kept_bytes if self.splits else 0.0
                    kept = [self._keep(s, j, "activation", cost.activation_bytes - later)]
                    kept += [self._keep(s, j, "weight_kept", later)] if self.splits else []
                self._run(
                    worker, s, "forward", cost.forward_s, j, reads=[state], takes=given, gives=kept, sends="forward"
                )
            case "backward":
                gradient = self.kept[s, ONCE, "gradient"]
                used = [self.kept.pop((s, j, "activation")), *self._arrivals(worker, s, "backward", j), gradient]
                self._run(
                    worker, s, "backward", cost.backward_s, j,
                    reads=[state], takes=used, gives=[gradient], sends="backward",
                )  # fmt: skip
            case "input_grad":
                used = [self.kept.pop((s, j, "activation")), *self._arrivals(worker, s, "backward", j)]
                made = self._keep(s, j, "weight_context", cost.weight_context_bytes - cost.kept_bytes)
                self._run(
                    worker, s, "input_grad", cost.input_grad_s, j,
                    reads=[state, self.kept[s, j, "weight_kept"]], takes=used, gives=[made], sends="backward",
                )  # fmt: skip
            case "weight_grad":
                gradient = self.kept[s, ONCE, "gradient"]
                used = [self.kept.pop((s, j, "weight_kept")), self.kept.pop((s, j, "weight_context")), gradient]
                self._run(worker, s, "weight_grad", cost.weight_grad_s, j, reads=[state], takes=used, gives=[gradient])

    def finish(self, worker: int, exchange: ScalarExchange | None, rounds: int) -> None:
        """What follows a worker's last task."""
        stages = [s for s, mesh in enumerate(self.mesh_of) if mesh == worker]
        gradient = {s: self.kept[s, ONCE, "gradient"] for s in stages if self.trains}
        for s in gradient:
            cost, own = self.plan.stages[s].cost, [gradient[s]]
            self._run(worker, s, "grad_sync", cost.grad_sync_s, takes=own, gives=own, sends="gradient")
        for s in gradient:
            parts = self._arrivals(worker, s, "gradient", ONCE)
            if parts:
                self.steps[worker].append([i for part in parts for i in self._add(s, gradient[s], part)])
        scalar: list[int] = []
        for _ in range(rounds):
            assert exchange is not None
            time_s = math.fsum(exchange.compute_s[s] for s in stages)
            reads = [*gradient.values()]
            if self.runs:
                reads = [*(self.kept[s, ONCE, "state"] for s in stages), *reads, *scalar]
            scalar.append(self._new(Buffer(worker=worker, kind="scalar", device_bytes=exchange.device_bytes)))
            self._run(worker, stages[0], "norm", time_s, reads=reads, gives=scalar[-1:])
            if not self.groups:
                self.groups.append(Group(workers=tuple(range(self.num_workers)), time_s=exchange.reduce_s))
            self.steps[worker][-1].append(AllReduce(group=0, buffer=scalar[-1]))
        for s in stages:
            self._arrivals(worker, s, "update", ONCE)
            own = [self.kept[s, ONCE, "state"], *([gradient[s]] if self.trains else [])]
            update_s = self.plan.stages[s].cost.update_s
            self._run(worker, s, "update", update_s, reads=scalar, takes=own, gives=own, sends="update")
        self.steps[worker].append([Free(buffer=buffer) for buffer in scalar])

    def _add(self, stage: int, gradient: int, part: int) -> tuple[Instruction, ...]:
        rate = self.plan.stages[stage].mesh.device.memory_bytes_per_s
        time_s = PASSES * self.buffers[part].device_bytes / rate
        return Accumulate(dst=gradient, src=part, time_s=time_s), Free(buffer=part)

    def receive(self, ahead: int) -> None:
        """Puts receives before steps, for each pair of workers in the order of its sends."""
        wanted: dict[tuple[int, int], int] = {}  # (cut, microbatch) -> the step that its receive is to precede
        made_from = self._made_from()
        for cut, reads in self.read_at.items():
            at = list(reads.values())
            about = self.plan.cuts[cut]
            mine = [
                p for p in made_from.get((about.source, about.phase == "forward"), ())
                if self.mesh_of[p[0]] == self.mesh_of[about.target]
            ]  # fmt: skip
            beside = max(0, ahead - self.plan.stages[about.target].fused)
            for n, (microbatch, step) in enumerate(reads.items()):
                if microbatch == ONCE:
                    wanted[cut, microbatch] = max(0, step - ahead)
                else:
                    known = [self.ran_at[p, microbatch] + 1 for p in mine]
                    wanted[cut, microbatch] = max([at[n - beside] if n >= beside else 0, *known])
        before: list[dict[int, list[Instruction]]] = [defaultdict(list) for _ in range(self.num_workers)]
        for (_, target), sent in self.sent.items():
            step = len(self.steps[target])
            steps: list[int] = []
            for key in reversed(sent):
                step = min(step, wanted[key])
                steps.append(step)
            for (cut, microbatch), step in zip(sent, reversed(steps), strict=True):
                receive = Recv(
                    transfer=self.transfer_of[cut], microbatch=microbatch, buffer=self.arriving[cut, microbatch]
                )
                before[target][step].append(receive)
        for worker, receives in enumerate(before):
            for step, instructions in receives.items():
                self.steps[worker][step][:0] = instructions

    def _made_from(self) -> dict[_Pass, tuple[_Pass, ...]]:
        """Every stage's passes → those that must have run for the same microbatch before what they send is there."""
        out: dict[_Pass, tuple[_Pass, ...]] = {}
        stages = range(len(self.plan.stages))
        for one in [*((s, True) for s in stages), *((s, False) for s in reversed(stages) if self.trains)]:
            before = [
                (self.plan.cuts[c].source, one[1]) for c in self.into[one[0], "forward" if one[1] else "backward"]
            ]
            before += [] if one[1] else [(one[0], True)]
            out[one] = tuple(dict.fromkeys((*(p for b in before for p in out[b]), one)))
        return out

    def program(self) -> Program:
        """What was emitted."""
        return Program(
            buffers=tuple(self.buffers),
            executables=tuple(self.executables),
            transfers=tuple(self.transfers),
            groups=tuple(self.groups),
            workers=tuple(tuple(i for step in steps for i in step) for steps in self.steps),
        )
