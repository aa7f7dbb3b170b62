"""Programs of pipelines: what is emitted, and every fault that verify and the check know."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from autopar.inter_op.program.check import check_program
from autopar.inter_op.program.emit import ScalarExchange, emit
from autopar.inter_op.schedules import SCHEDULES, make_schedule
from autopar.ir.cluster import LinkSpec, LogicalMesh, MeshAxis
from autopar.ir.errors import PlanFormatError, ProgramError, VerifyError
from autopar.ir.graph import TensorType
from autopar.ir.pipeline import CutValue, Transients
from autopar.ir.program import (
    ONCE,
    Accumulate,
    AllReduce,
    Buffer,
    CutTransfer,
    Executable,
    Free,
    Group,
    Instruction,
    Program,
    Recv,
    Run,
    Send,
)
from autopar.ir.serde import from_json, to_json
from autopar.ir.sharding import ShardingSpec
from tests.null.pipelines import DEVICE, chain, cut, pipeline, stage_cost

COST = stage_cost(forward_s=1, input_grad_s=1, weight_grad_s=1, activation_bytes=10, state_bytes=100)


def tied(exchange: ScalarExchange | None = None) -> Program:
    """Two stages, one microbatch; both train one parameter."""
    cuts = (*chain(2, 0.5, 2), cut(1, 0, "gradient", 0.25, 6), cut(0, 1, "update", 0.25, 6))
    return emit(pipeline(make_schedule("1f1b", 2, 1), COST, cuts), exchange=exchange)


def small() -> Program:
    """Two stages, two microbatches."""
    return emit(pipeline(make_schedule("1f1b", 2, 2), COST, chain(2, 0.5, 2)))


def test_a_step_as_text() -> None:
    exchange = ScalarExchange(compute_s=(0.0, 0.0), reduce_s=0.0, device_bytes=4)
    assert tied(exchange).text() == (
        "worker 0\n"
        "  run F0.0 (b0) -> b4, b5\n"
        "  send b5 to worker 1 (t0.0)\n"
        "  free b5\n"
        "  recv b6 from worker 1 (t1.0)\n"
        "  recv b7 from worker 1 (t2)\n"
        "  run B0.0 (b0, b4*, b6*, b1*) -> b1\n"
        "  run grad_sync 0 (b1*) -> b1\n"
        "  accumulate b1 += b7\n"
        "  free b7\n"
        "  run norm 0 (b1) -> b8\n"
        "  all-reduce b8 over workers 0, 1\n"
        "  run update 0 (b8, b0*, b1*) -> b0, b1, b9\n"
        "  send b9 to worker 1 (t3)\n"
        "  free b9\n"
        "  free b8\n"
        "worker 1\n"
        "  recv b10 from worker 0 (t0.0)\n"
        "  run F1.0 (b2, b10*) -> b11\n"
        "  run B1.0 (b2, b11*, b3*) -> b3, b12\n"
        "  send b12 to worker 0 (t1.0)\n"
        "  free b12\n"
        "  recv b15 from worker 0 (t3)\n"
        "  run grad_sync 1 (b3*) -> b3, b13\n"
        "  send b13 to worker 0 (t2)\n"
        "  free b13\n"
        "  run norm 1 (b3) -> b14\n"
        "  all-reduce b14 over workers 0, 1\n"
        "  run update 1 (b14, b2*, b3*) -> b2, b3\n"
        "  free b14\n"
    )


def test_adding_gradients_takes_what_the_memory_takes() -> None:
    added = [i for i in tied().workers[0] if isinstance(i, Accumulate)]
    assert [i.time_s for i in added] == [3 * 6 / DEVICE.memory_bytes_per_s]


def test_a_split_backward_pass_leaves_its_weight_context() -> None:
    program = emit(pipeline(make_schedule("zb_h1", 1, 1), COST, ()))
    assert [program.describe(i) for i in program.workers[0][:3]] == [
        "run F0.0 (b0) -> b2, b3",
        "run I0.0 (b0, b3, b2*) -> b4",
        "run W0.0 (b0, b3*, b4*, b1*) -> b1",
    ]
    assert [program.buffers[i].kind for i in (2, 3, 4)] == ["activation", "weight_kept", "weight_context"]


def test_a_fused_stage_runs_both_tasks_at_once() -> None:
    """What its forward pass keeps is memory beside its buffers, and what it received stays until both are done."""
    beside = Transients(forward_bytes=3, backward_bytes=5, input_grad_bytes=4, weight_grad_bytes=0, fused_bytes=2,
                        fused_input_grad_bytes=9, received_bytes=6, update_bytes=0)  # fmt: skip
    cost = stage_cost(beside, forward_s=1, input_grad_s=2, weight_grad_s=4, activation_bytes=10, weight_context_bytes=7,
                      weight_kept_bytes=6, state_bytes=100, transient_bytes=5)  # fmt: skip

    def second(name: str) -> tuple[Program, list[str]]:
        program = emit(pipeline(make_schedule(name, 2, 1), cost, chain(2, 0.5, 2), fused=[1]))
        check_program(program)
        return program, [program.describe(i) for i in program.workers[1]][:4]

    program, text = second("1f1b")
    assert text[1:] == ["run FB1.0 (b2, b7*, b3*) -> b3, b8", "send b8 to worker 0 (t1.0)", "free b8"]
    [both] = [e for e in program.executables if e.phase == "forward_backward"]
    assert (both.time_s, both.forward_s, both.transient_bytes) == (7, 1, 10 - 6 + 2)
    program, text = second("zb_h1")
    assert text[1:3] == ["run FI1.0 (b2, b9*) -> b10, b11, b12", "send b12 to worker 0 (t1.0)"]
    assert [program.buffers[i].kind for i in (10, 11, 12)] == ["weight_kept", "weight_context", "message"]
    [both] = [e for e in program.executables if e.phase == "forward_input_grad"]
    assert (both.time_s, both.forward_s, both.transient_bytes) == (3, 1, 9)


@pytest.mark.parametrize(("stage", "name"), [(0, "1f1b"), (1, "gpipe")])
def test_stages_that_cannot_be_fused(stage: int, name: str) -> None:
    """One that sends activations, one whose backward tasks come later."""
    plan = pipeline(make_schedule(name, 2, 2), COST, chain(2, 0.5), fused=[stage])
    assert not plan.can_fuse(stage)
    with pytest.raises(VerifyError, match=f"stage {stage} is fused, but sends activations or"):
        plan.verify()


def test_skips_are_cuts_like_others_and_cuts_of_one_mesh_are_runs() -> None:
    schedule = make_schedule("interleaved_1f1b", 2, 2)
    cuts = (*chain(4, 0.5), cut(0, 2, "forward", 0.25, 3), cut(0, 3, "forward", 0.125, 4))
    program = emit(pipeline(schedule, COST, cuts))
    check_program(program)
    first = [program.describe(i) for i in program.workers[0]]
    at = next(i for i, text in enumerate(first) if text.startswith("run F0.0"))
    assert [re.sub(r"b\d+", "b", text) for text in first[at : at + 6]] == [
        "run F0.0 (b) -> b, b, b, b",
        "send b to worker 1 (t0.0)",
        "free b",
        "run reshard 0.0 (b*) -> b",
        "send b to worker 1 (t6.0)",
        "free b",
    ]
    assert next(e.time_s for e in program.executables if e.phase == "reshard") == 0.25
    third = next(i for i in program.workers[0] if program.describe(i).startswith("run F2.0"))
    assert isinstance(third, Run)
    assert sorted(program.buffers[b].device_bytes for b in third.donate) == [0, 3]  # from stage 1, from stage 0


def test_messages_count_their_parts_on_the_source_mesh() -> None:
    value = CutValue(
        value=0,
        name="x", type=TensorType(shape=(8, 3), dtype="float32"),
        src_spec=ShardingSpec(dims=(("x",), ())), dst_spec=ShardingSpec(dims=((), ())),
    )  # fmt: skip
    forward = replace(cut(0, 1, "forward", 0.5, 96), values=(value,))
    plan = pipeline(make_schedule("inference", 2, 1), COST, (forward,))
    mesh = LogicalMesh(
        axes=(MeshAxis(name="x", size=2, link=LinkSpec(latency_s=1.0, bytes_per_s=1.0)),),
        device_ids=(7, 8),
        device=DEVICE,
    )
    plan = replace(plan, stages=(replace(plan.stages[0], mesh=mesh), plan.stages[1]))
    assert [b.device_bytes for b in emit(plan).buffers if b.kind == "message"] == [48, 96]


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_s_program_checks(name: str, ahead: int) -> None:
    trains = SCHEDULES[name].trains
    for p in (1, 2, 3, 4):
        for m in (1, 2, 5, 8):
            schedule = make_schedule(name, p, m)
            count = schedule.num_stages
            cuts = [*chain(count, 0.5, 2, trains=trains)]
            if count > 2:
                cuts.append(cut(0, count - 1, "forward", 0.5, 3))
            if count > 2 and trains:
                cuts += [cut(count - 1, 0, "backward", 0.5, 3), cut(count - 1, 0, "gradient", 0.5, 5)]
                cuts += [cut(0, count - 1, "update", 0.5, 5), cut(0, 1, "update", 0.5, 5)]
            exchange = ScalarExchange(compute_s=(1.0,) * count, reduce_s=0.1, device_bytes=4.0)
            check_program(emit(pipeline(schedule, COST, cuts), receive_ahead=ahead, exchange=exchange))


def test_receives_are_posted_no_earlier_than_asked_for() -> None:
    """Never more than ``ahead`` receives of a cut before the task that reads the one before them."""
    plan = pipeline(make_schedule("1f1b", 3, 12), COST, chain(3, 0.5))
    for ahead in (0, 1, 2, 3):
        for worker, instructions in enumerate(emit(plan, receive_ahead=ahead).workers):
            open_by_cut: dict[int, set[int]] = {}
            of: dict[int, int] = {}
            most = 0
            for i in instructions:
                if isinstance(i, Recv):
                    open_by_cut.setdefault(i.transfer, set()).add(i.buffer)
                    of[i.buffer] = i.transfer
                    most = max(most, len(open_by_cut[i.transfer]))
                elif isinstance(i, Run):
                    for buffer in i.donate:
                        open_by_cut.get(of.get(buffer, -1), set()).discard(buffer)
            assert most <= ahead + 1
            assert most == ahead + 1 or worker == 0  # cotangents alone, of no more microbatches than are in flight


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_no_receive_is_posted_before_what_it_is_made_from(name: str) -> None:
    """A cotangent after the stage's own forward pass; what comes to a later stage of a mesh after the earlier ones. But
    for those that stand in front of such a one in the order of the sends."""
    plan = pipeline(schedule := make_schedule(name, 3, 6), COST, chain(0, 0.5))
    plan = replace(plan, cuts=chain(schedule.num_stages, 0.5, trains=SCHEDULES[name].trains))
    program, late = emit(plan), 0
    for instructions in program.workers:
        ran: set[tuple[str, int, int]] = set()
        last: dict[int, Recv] = {}  # of each source, since the last task
        for i in instructions:
            if isinstance(i, Recv):
                last[program.transfers[i.transfer].source] = i
            if not isinstance(i, Run):
                continue
            for receive in last.values():
                about = plan.cuts[program.transfers[receive.transfer].cut]
                mine = [s for s, at in enumerate(schedule.mesh_of_stage) if at == schedule.mesh_of_stage[about.target]]
                if about.phase == "forward":
                    wanted = {("forward", s, receive.microbatch) for s in mine if s < about.target}
                else:
                    wanted = {("forward", s, receive.microbatch) for s in mine}
                assert wanted <= ran
                late += len(wanted)
            last.clear()
            ran.add((program.executables[i.executable].phase, program.executables[i.executable].stage, i.microbatch))
    assert late or name == "inference"


def test_what_cannot_be_emitted() -> None:
    plan = pipeline(make_schedule("1f1b", 2, 2), COST, chain(2, 0.5))
    with pytest.raises(ProgramError, match="receive_ahead is -1; give at least 0"):
        emit(plan, receive_ahead=-1)
    with pytest.raises(ProgramError, match="1 times of scalars for 2 stages"):
        emit(plan, exchange=ScalarExchange(compute_s=(1.0,), reduce_s=0.0, device_bytes=4))
    with pytest.raises(ProgramError, match=r"cut 1 -> 0 is of phase backward, but schedule inference has no backward"):
        emit(replace(plan, schedule=make_schedule("inference", 2, 2)))
    with pytest.raises(VerifyError, match="2 stages, the schedule has 3"):
        emit(replace(plan, schedule=make_schedule("1f1b", 3, 2)))


def test_programs_are_written_and_read() -> None:
    program = tied(ScalarExchange(compute_s=(0.0, 0.0), reduce_s=0.5, device_bytes=4))
    assert from_json(Program, to_json(program)) == program
    with pytest.raises(PlanFormatError, match=r"\.workers\[0\]\[3\]"):
        from_json(Program, to_json(program).replace('"type":"Recv"', '"type":"Fetch"', 1))


# The check --------------------------------------------------------------------------------------------


def find(program: Program, worker: int, text: str) -> int:
    """The place of the first instruction that reads so."""
    return next(i for i, x in enumerate(program.workers[worker]) if re.match(text, program.describe(x)))


def edited(program: Program, worker: int, at: int, put: Sequence[Instruction], drop: int = 1) -> Program:
    """``put`` in place of ``drop`` instructions."""
    rows = list(program.workers)
    rows[worker] = (*rows[worker][:at], *put, *rows[worker][at + drop :])
    return replace(program, workers=tuple(rows))


def faulty(program: Program, text: str) -> None:
    with pytest.raises(ProgramError, match=text):
        check_program(program)


def test_a_read_before_the_write_is_found() -> None:
    program = small()
    at = find(program, 0, "run F0.0")
    faulty(edited(program, 0, at, ()), r"worker 0, instruction 0, send b\d+ .*: buffer b\d+ was never written")
    at = find(program, 1, "recv")
    faulty(edited(program, 1, at, ()), r"run F1\.0 .*: buffer b\d+ was never written")


def test_a_read_after_the_free_is_found() -> None:
    program = small()
    at = find(program, 0, "send")
    swapped = (program.workers[0][at + 1], program.workers[0][at])
    faulty(edited(program, 0, at, swapped, 2), r"send (b\d+) .*: buffer \1 is gone since free \1")


def test_a_read_after_the_donation_is_found() -> None:
    program = small()
    at = find(program, 0, r"run B0\.0")
    run = program.workers[0][at]
    assert isinstance(run, Run)
    faulty(edited(program, 0, at, (run, run)), r"run B0\.0 .*: buffer b\d+ is gone since run B0\.0")


def test_a_second_free_is_found() -> None:
    program = small()
    at = find(program, 0, "free")
    free = program.workers[0][at]
    faulty(edited(program, 0, at, (free, free)), r"free (b\d+): buffer \1 is gone since free \1")


def test_what_nobody_frees_is_found() -> None:
    program = small()
    faulty(edited(program, 0, find(program, 0, "free"), ()), r"worker 0: buffer b\d+ \(message\) is never freed")
    at = find(program, 0, "run B0.1")
    run = program.workers[0][at]
    assert isinstance(run, Run)
    kept = replace(run, donate=tuple(b for b in run.donate if program.buffers[b].kind != "activation"))
    faulty(edited(program, 0, at, (kept,)), r"worker 0: buffer b\d+ \(activation\) is never freed")


def test_what_is_to_stay_and_goes_is_found() -> None:
    program = small()
    end = len(program.workers[1])
    state = next(i for i, b in enumerate(program.buffers) if b.worker == 1 and b.kind == "state")
    faulty(edited(program, 1, end, (Free(buffer=state),)), rf"buffer b{state} \(state\) is not there at the end")


def test_a_write_over_what_is_there_is_found() -> None:
    program = small()
    a, b = (program.workers[0][find(program, 0, f"run F0.{j}")] for j in (0, 1))
    assert isinstance(a, Run) and isinstance(b, Run)
    faulty(
        edited(program, 0, find(program, 0, "run F0.1"), (replace(b, outs=a.outs),)),
        r"run F0\.1 .*: buffer b\d+ is there already and would be lost",
    )


def test_a_change_of_what_is_being_sent_is_found() -> None:
    program = small()
    at = find(program, 0, "free")
    free = program.workers[0][at]
    assert isinstance(free, Free)
    run = Run(executable=0, microbatch=0, ins=(free.buffer,), outs=(), donate=(free.buffer,))
    faulty(edited(program, 0, at, (run,)), r"run F0\.0 .*: buffer b\d+ is being sent; free it instead")
    changed = replace(run, outs=(free.buffer,))
    faulty(edited(program, 0, at, (changed, free)), r"buffer b\d+ is being sent")


def test_sends_without_receives_and_receives_without_sends_are_found() -> None:
    program = small()
    at = find(program, 0, r"send .* \(t0\.1\)")
    faulty(
        edited(program, 0, at, ()), "from worker 0 to worker 1: transfer 0 of microbatch 1 is received, but not sent"
    )
    at = find(program, 1, r"recv .* \(t0\.1\)")
    receive = program.workers[1][at]
    assert isinstance(receive, Recv)
    run = Run(executable=0, microbatch=1, ins=(), outs=(receive.buffer,), donate=())
    faulty(edited(program, 1, at, (run,)), "transfer 0 of microbatch 1 is sent, but not received")
    at = find(program, 0, r"send .* \(t0\.1\)")
    send = program.workers[0][at]
    faulty(edited(program, 0, at, (send, send)), "transfer 0 of microbatch 1 is sent twice")


def test_another_order_on_the_other_side_is_found() -> None:
    program = small()
    at = find(program, 1, "recv")
    swapped = (program.workers[1][at + 1], program.workers[1][at])
    faulty(
        edited(program, 1, at, swapped, 2),
        "number 0 to be sent is transfer 0 of microbatch 0, to be received transfer 0 of microbatch 1",
    )


def test_workers_that_wait_for_each_other_are_found() -> None:
    """Worker 0 wants the cotangent before it sends the activations that it comes of."""
    program = small()
    at, backward = find(program, 0, r"send .* \(t0\.1\)"), find(program, 0, r"run B0\.1")
    instructions = program.workers[0]
    moved = (*instructions[at + 2 : backward + 1], *instructions[at : at + 2])
    faulty(
        edited(program, 0, at, moved, backward + 1 - at),
        r"workers wait for each other: worker 0 at run B0\.1 .* waits for worker 1 to send it; "
        r"worker 1 at run F1\.1 .* waits for worker 0 to send it",
    )


def test_sums_that_not_all_come_to_are_found() -> None:
    program = tied(ScalarExchange(compute_s=(0.0, 0.0), reduce_s=0.0, device_bytes=4))
    check_program(program)
    at = find(program, 1, "all-reduce")
    faulty(edited(program, 1, at, ()), "worker 0 at run update 0 .* waits for all of workers 0, 1 to add to it")
    alone = Program(
        buffers=tuple(Buffer(worker=w, kind="scalar", device_bytes=4, initial=True, final=True) for w in (0, 1)),
        executables=(),
        transfers=(),
        groups=(Group(workers=(0, 1), time_s=0.0),),
        workers=((AllReduce(group=0, buffer=0),), ()),
    )
    faulty(alone, "group 0: 1 of 2 workers start a sum that never ends")


def test_a_free_of_what_never_comes_is_found() -> None:
    """A Free waits for what is on its way, as a read does."""
    program = Program(
        buffers=tuple(Buffer(worker=w, kind="message", device_bytes=1, initial=not w) for w in (0, 1)),
        executables=(),
        transfers=(CutTransfer(cut=0, source=0, target=1, time_s=1.0),),
        groups=(),
        workers=(
            (Send(transfer=0, microbatch=ONCE, buffer=0), Free(buffer=0)),
            (Recv(transfer=0, microbatch=ONCE, buffer=1), Free(buffer=1)),
        ),
    )
    check_program(program)
    faulty(replace(program, workers=(program.workers[0][1:], program.workers[1])), "received, but not sent")


# verify -----------------------------------------------------------------------------------------------

_RUN: dict[str, Any] = {"executable": 0, "microbatch": 0, "ins": (), "outs": (), "donate": ()}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"buffers": (Buffer(worker=9, kind="state", device_bytes=0),)}, "worker of buffer 0: 9 does not exist"),
        ({"buffers": (Buffer(worker=0, kind="state", device_bytes=-1),)}, "device_bytes of buffer 0 is -1"),
        (
            {"executables": (Executable(phase="update", stage=0, time_s=float("inf"), transient_bytes=0),)},
            "time_s of executable 0 is inf",
        ),
        (
            {"executables": (Executable(phase="update", stage=0, time_s=0, transient_bytes=-2),)},
            "transient_bytes of executable 0 is -2",
        ),
        (
            {"executables": (Executable(phase="forward_backward", stage=0, time_s=1, transient_bytes=0, forward_s=2),)},
            "forward_s of executable 0 is 2, of 1",
        ),
        ({"transfers": (CutTransfer(cut=0, source=0, target=5, time_s=0),)}, "worker of transfer 0: 5 does not exist"),
        (
            {"transfers": (CutTransfer(cut=0, source=1, target=1, time_s=0),)},
            "transfer 0 leads from worker 1 to itself",
        ),
        ({"transfers": (CutTransfer(cut=0, source=0, target=1, time_s=-1),)}, "time_s of transfer 0 is -1"),
        ({"groups": (Group(workers=(0, 7), time_s=0),)}, "worker of group 0: 7 does not exist"),
        ({"groups": (Group(workers=(0, 1, 0), time_s=0),)}, "group 0 names a worker twice"),
        ({"groups": (Group(workers=(0, 1), time_s=-1),)}, "time_s of group 0 is -1"),
    ],
)
def test_verify_of_the_tables(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(VerifyError, match=text):
        replace(small(), **changes).verify()


@pytest.mark.parametrize(
    ("instruction", "text"),
    [
        (Run(**{**_RUN, "executable": 99}), "executable: 99 does not exist"),
        (Run(**{**_RUN, "ins": (0, 0)}), "a buffer twice"),
        (Run(**{**_RUN, "ins": (0,), "donate": (1,)}), "donates 1, which it does not read"),
        (Run(**{**_RUN, "ins": (0,), "outs": (0,)}), "overwrites 0, which it reads; donate it"),
        (Run(**{**_RUN, "ins": (2,)}), "buffer 2 is worker 1's"),
        (Run(**{**_RUN, "outs": (2,)}), "buffer 2 is worker 1's"),
        (Send(transfer=9, microbatch=0, buffer=0), "transfer: 9 does not exist"),
        (Send(transfer=1, microbatch=0, buffer=0), "sends for worker 1"),
        (Recv(transfer=9, microbatch=0, buffer=0), "transfer: 9 does not exist"),
        (Recv(transfer=0, microbatch=0, buffer=0), "receives for worker 1"),
        (Recv(transfer=1, microbatch=0, buffer=2), "buffer 2 is worker 1's"),
        (Accumulate(dst=0, src=0, time_s=0.0), "adds buffer 0 to itself"),
        (Accumulate(dst=0, src=1, time_s=-1.0), "time_s is -1.0"),
        (AllReduce(group=0, buffer=0), "group: 0 does not exist; there are 0"),
        (Free(buffer=999), "buffer: 999 does not exist"),
    ],
)
def test_verify_of_instructions(instruction: Instruction, text: str) -> None:
    with pytest.raises(VerifyError, match=f"worker 0, instruction 0: {text}"):
        edited(small(), 0, 0, (instruction,), 0).verify()


def test_verify_of_a_group_s_members() -> None:
    program = replace(small(), groups=(Group(workers=(1,), time_s=0.0),))
    with pytest.raises(VerifyError, match="worker 0 is not in group 0"):
        edited(program, 0, 0, (AllReduce(group=0, buffer=0),), 0).verify()


def test_equal_plans_give_equal_programs() -> None:
    a, b = (emit(pipeline(make_schedule("1f1b", 2, 2), COST, chain(2, 0.5))) for _ in range(2))
    assert a == b
