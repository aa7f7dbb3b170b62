"""Simulated pipelines: the bubbles of the closed formulas, which the simulator knows nothing of, and properties."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.inter_op.lower_bounds import least_bytes
from autopar.inter_op.program.check import check_program
from autopar.inter_op.program.emit import ScalarExchange, emit
from autopar.inter_op.program.simulate import Sharing, simulate
from autopar.inter_op.program.timeline import Timeline, ascii_timeline, chrome_trace
from autopar.inter_op.schedules import SCHEDULES, make_schedule
from autopar.inter_op.schedules.eager_1f1b import overlap_depth
from autopar.ir.errors import ProgramError
from autopar.ir.pipeline import HostUse, PipelinePlan, Transients
from autopar.ir.program import ONCE, Buffer, CutTransfer, Executable, Free, Instruction, Program, Recv, Run, Send
from tests.null.pipelines import chain, cut, pipeline, stage_cost
from tests.shares import each

C = (0.0, 0.25, 0.5, 1.0)
FBW = ((1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 1, 0.5), (1.5, 1, 1), (1, 0.5, 1), (1, 1, 2))
"""Durations that binary fractions hold, so that sums are exact."""


def balanced(
    name: str, p: int, m: int, *, fbw: tuple[float, float, float] = (1, 1, 1), c: float = 0.0, ahead: int = 2,
    **options: int,
) -> Program:  # fmt: skip
    """Equal stages: forward, input gradient and weight gradient as given on each mesh, c for each transfer."""
    schedule = make_schedule(name, p, m, **options)
    chunks = schedule.num_stages // p
    forward_s, input_grad_s, weight_grad_s = (x / chunks for x in fbw)
    cost = stage_cost(forward_s=forward_s, input_grad_s=input_grad_s, weight_grad_s=weight_grad_s)
    cuts = chain(schedule.num_stages, c, trains=SCHEDULES[name].trains)
    return emit(pipeline(schedule, cost, cuts), receive_ahead=ahead)


def bubble(
    name: str, p: int, m: int, *, fbw: tuple[float, float, float] = (1, 1, 1), sharing: Sharing = "pairs",
    blocking: bool = False, c: float = 0.0, ahead: int = 2, **options: int,
) -> float:  # fmt: skip
    """Makespan without the work of one mesh."""
    program = balanced(name, p, m, fbw=fbw, c=c, ahead=ahead, **options)
    return simulate(program, sharing=sharing, blocking=blocking).makespan_s - m * sum(fbw)


# The table, p = 4, m = 16, F = B = W = 1 ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bubbles"),
    [
        ("1f1b", (9, 16, 23, 37)),
        ("eager_1f1b", (9, 10.5, 12, 15)),
        ("interleaved_1f1b", (4.5, 8, 11.5, 27.5)),
        ("zb_h1", (3, 6, 9, 23)),
    ],
)
def test_bubbles_of_the_table(name: str, bubbles: tuple[float, ...]) -> None:
    assert tuple(bubble(name, 4, 16, c=c) for c in C) == bubbles


@pytest.mark.parametrize("ahead", [0, 2])
def test_bubbles_of_blocking_transfers(ahead: int) -> None:
    """Posting receives early does nothing there."""
    assert tuple(bubble("1f1b", 4, 16, c=c, blocking=True, ahead=ahead) for c in C) == (9, 25.75, 42.5, 76)


def test_meshes_that_share_their_links_over_all_transfers_take_no_less() -> None:
    """Where a mesh sends to two others, forward and backward, and transfers are long, they are slower."""
    shared = {name: tuple(bubble(name, 4, 16, c=c, sharing="endpoints") for c in C) for name in SCHEDULES}
    assert shared["1f1b"] == (9, 16, 23, 37)
    assert shared["eager_1f1b"] == (9, 10.5, 12, 15)
    assert shared["interleaved_1f1b"] == (4.5, 8, 11.5, 46.5)
    assert shared["zb_h1"] == (3, 6.25, 9.5, 24)
    for name in SCHEDULES:
        for c, found in zip(C, shared[name], strict=True):
            assert found >= bubble(name, 4, 16, c=c)


# The formulas, in their domains -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("p", each(3, [1, 2, 3, 4, 6]))
@pytest.mark.parametrize("fbw", FBW)
def test_bubbles_of_the_formulas(p: int, fbw: tuple[float, float, float]) -> None:
    f, input_grad, w = fbw
    b = input_grad + w
    for m in (p, 2 * p, 5 * p):
        for c in (0.0, 0.25, 0.5, 1.0, 2.0):

            def found(name: str, m: int = m, c: float = c, **options: int) -> float:
                return bubble(name, p, m, fbw=fbw, c=c, **options)

            if c <= min(f, b):
                assert found("gpipe") == (p - 1) * (f + b + 2 * c)
            if m > p > 1 and c <= f + b:
                assert found("1f1b") == (p - 1) * (f + b) + 2 * c * ((p - 1) * m // p + p - 2)
            if c <= f + b:
                assert found("eager_1f1b", depth=overlap_depth(f, b, c)) == (p - 1) * (f + b + 2 * c)
            if c <= (f + b) / 2:
                assert found("eager_1f1b") == (p - 1) * (f + b + 2 * c)
            if c == 0:
                for v in (2, 4):  # v that divides durations exactly
                    assert found("interleaved_1f1b", chunks=v) == (p - 1) * (f + b) / v
                assert found("zb_h1") == (p - 1) * (f + max(0, input_grad - w))
            if m > p and w <= input_grad and c <= w / 2:
                assert found("zb_h1") == (p - 1) * (f + input_grad - w + 4 * c)
            if c <= f:
                assert found("inference") + m * b == (p - 1) * (f + c)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("fbw", FBW)
def test_zb_h2_waits_of_each_mesh(p: int, fbw: tuple[float, float, float]) -> None:
    for m in (2 * p - 1, 2 * p, 5 * p):
        timeline = simulate(balanced("zb_h2", p, m, fbw=fbw))
        for s, worker in enumerate(timeline.workers):
            tasks = [event for event in worker.events if event.what[0] in "FIW"]
            waits = tasks[-1].stop_s - tasks[0].start_s - m * sum(fbw)
            assert waits == (p - 1 - s) * max(0, fbw[0] + fbw[1] - 2 * fbw[2])


def test_eager_1f1b_of_a_greater_depth_hides_longer_transfers() -> None:
    """c = 2 > (f+b)/2: depth 1 leaves a stage waiting, depth 2 does not, with two receives ahead already."""
    assert overlap_depth(1, 2, 2) == 2
    assert bubble("eager_1f1b", 4, 16, c=2) > 21
    assert bubble("eager_1f1b", 4, 16, c=2, depth=2) == 21


@pytest.mark.parametrize("name", ["1f1b", "eager_1f1b", "zb_h1", "zb_h2"])
def test_fused_tasks_take_their_times_one_after_the_other(name: str) -> None:
    """The step and its events are those of a stage that is not fused."""
    cost = stage_cost(forward_s=1, input_grad_s=1, weight_grad_s=1, activation_bytes=10)
    apart, fused = (
        simulate(emit(pipeline(make_schedule(name, 4, 8), cost, chain(4, 0.25), fused=which))) for which in ([], [3])
    )
    assert [w.events for w in fused.workers] == [w.events for w in apart.workers]


# Memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, r in SCHEDULES.items() if r.trains and not r.chunked])
def test_memory_is_what_is_in_flight(name: str) -> None:
    schedule = make_schedule(name, 4, 12)
    cost = stage_cost(
        forward_s=1, input_grad_s=1, weight_grad_s=1, activation_bytes=10, weight_context_bytes=10, state_bytes=1000
    )
    timeline = simulate(emit(pipeline(schedule, cost, chain(4, 0.25))))
    both = SCHEDULES[name].splits_backward  # an input gradient has its activations and its weight context
    for worker, in_flight in zip(timeline.workers, schedule.in_flight, strict=True):
        assert worker.peak_bytes == 1000 + 10 * (in_flight + both)
        assert worker.memory[0] == (0.0, 1010.0 if worker is timeline.workers[0] else 1000.0)
        assert worker.memory[-1][1] == 1000


def test_receives_hold_memory_from_when_they_are_posted() -> None:
    schedule = make_schedule("inference", 2, 6)
    plan = pipeline(schedule, [stage_cost(forward_s=1), stage_cost(forward_s=4)], chain(2, 0.5, 7, trains=False))
    peaks = {ahead: simulate(emit(plan, receive_ahead=ahead)).workers[1].peak_bytes for ahead in (0, 1, 2, 3)}
    assert peaks == {0: 7, 1: 14, 2: 21, 3: 28}  # one that is read, the others ahead
    spans = {ahead: simulate(emit(plan, receive_ahead=ahead)).makespan_s for ahead in (0, 1, 2)}
    assert spans == {0: 1 + 6 * 4.5, 1: 1.5 + 6 * 4, 2: 1.5 + 6 * 4}


@pytest.mark.parametrize("blocking", [False, True])
def test_what_is_sent_is_held_until_it_has_left(blocking: bool) -> None:
    """Worker 0 frees at once, worker 1 comes to its receive after 3 s, and the transfer takes 2 s."""
    program = Program(
        buffers=(
            Buffer(worker=0, kind="message", device_bytes=8, initial=True),
            Buffer(worker=1, kind="message", device_bytes=6, final=True),
        ),
        executables=(Executable(phase="forward", stage=1, time_s=3, transient_bytes=0),),
        transfers=(CutTransfer(cut=0, source=0, target=1, time_s=2),),
        groups=(),
        workers=(
            (Send(transfer=0, microbatch=ONCE, buffer=0), Free(buffer=0)),
            (
                Run(executable=0, microbatch=0, ins=(), outs=(), donate=()),
                Recv(transfer=0, microbatch=ONCE, buffer=1),
            ),
        ),
    )
    check_program(program)
    timeline = simulate(program, blocking=blocking)
    assert [w.memory for w in timeline.workers] == [((0.0, 8.0), (5.0, 0.0)), ((0.0, 0.0), (3.0, 6.0))]
    assert timeline.makespan_s == 5


def test_transient_bytes_are_held_while_a_task_runs() -> None:
    plan = pipeline(make_schedule("inference", 1, 2), stage_cost(forward_s=1, transient_bytes=5), ())
    assert simulate(emit(plan)).workers[0].memory == ((0.0, 5.0), (1.0, 5.0), (2.0, 0.0))


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_every_phase_has_its_own_transients(name: str) -> None:
    """On one mesh nothing else is held: what its devices hold while a task runs is what that needs."""
    beside = Transients(
        forward_bytes=1, backward_bytes=32, input_grad_bytes=4, weight_grad_bytes=8, fused_bytes=33,
        fused_input_grad_bytes=5, received_bytes=0, update_bytes=16,
    )  # fmt: skip
    cost = stage_cost(
        beside, forward_s=1, input_grad_s=1, weight_grad_s=1, grad_sync_s=1, update_s=1, transient_bytes=32
    )
    timeline = simulate(emit(pipeline(make_schedule(name, 1, 2), cost, ())))
    [worker] = timeline.workers
    held = dict(worker.memory)
    needs = {"F": 1, "B": 32, "I": 4, "W": 8, "g": 16, "u": 16}
    assert {e.what[0] for e in worker.events} == set("FBgu" if name == "1f1b" else "FIWgu")
    assert [held.get(e.start_s) for e in worker.events] == [needs[e.what[0]] for e in worker.events]
    assert least_bytes(pipeline(make_schedule(name, 1, 2), cost, ())) == [32 if name == "1f1b" else 8]


# The end of a step ------------------------------------------------------------------------------------


def tied() -> PipelinePlan:
    """Two stages train a parameter together: the last one sends its part of the gradient, the first one updates."""
    cost = stage_cost(forward_s=1, input_grad_s=1, weight_grad_s=1, grad_sync_s=0.5, update_s=2)
    more = (cut(1, 0, "gradient", 0.25, 6), cut(0, 1, "update", 0.25, 6))
    return pipeline(make_schedule("1f1b", 2, 2), cost, (*chain(2, 0), *more))


def test_gradients_scalars_and_updates_follow_the_last_task() -> None:
    exchange = ScalarExchange(compute_s=(0.125, 0.25), reduce_s=0.0625, device_bytes=4)
    timeline = simulate(emit(tied(), exchange=exchange))
    rows = [[(e.what, e.start_s, e.stop_s) for e in w.events if e.what[0] not in "FB"] for w in timeline.workers]
    # adding 6 bytes at 1 byte/s moves 18; the sum of scalars starts when both workers have come to it
    part = rows[0][1][0]
    assert rows[0] == [
        ("grad_sync 0", 9.0, 9.5), (part, 9.5, 27.5), ("norm 0", 27.5, 27.625), ("update 0", 27.6875, 29.6875),
    ]  # fmt: skip
    assert part.startswith("+ ")
    assert rows[1] == [("grad_sync 1", 7.0, 7.5), ("norm 1", 7.5, 7.75), ("update 1", 27.6875, 29.6875)]
    assert [(e.what, e.start_s, e.stop_s) for e in timeline.links[0].events if e.what == "cut 3"] == [
        ("cut 3", 29.6875, 29.9375)
    ]
    assert timeline.makespan_s == 29.9375  # the last transfer counts
    assert timeline.links[1].busy_s == 0.25
    blocking = simulate(emit(tied(), exchange=exchange, receive_ahead=0), blocking=True)
    assert [e.what for e in blocking.workers[1].events] == [e.what for e in timeline.workers[1].events]
    starts = [e.start_s for w in blocking.workers for e in w.events if e.what.startswith("update")]
    ends = [e.stop_s for w in blocking.workers for e in w.events if e.what.startswith("norm")]
    assert starts == [max(ends) + 0.0625] * 2


# Properties -------------------------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> PipelinePlan:
    """Any schedule, stages and transfers of any length, skips and ties."""
    name = draw(st.sampled_from(list(SCHEDULES)))
    schedule = make_schedule(name, draw(st.integers(1, 4)), draw(st.integers(1, 6)))
    count, trains = schedule.num_stages, SCHEDULES[name].trains
    time = st.integers(0, 8).map(lambda k: k / 4)
    costs = [
        stage_cost(
            forward_s=draw(time), input_grad_s=draw(time), weight_grad_s=draw(time), update_s=draw(time),
            grad_sync_s=draw(time), activation_bytes=1, weight_context_bytes=1, state_bytes=draw(st.integers(0, 9)),
        )
        for _ in range(count)
    ]  # fmt: skip
    cuts = [*chain(count, draw(time), draw(st.integers(0, 3)), trains=trains)]
    stage = st.integers(0, count - 1)
    for a, b in draw(st.sets(st.tuples(stage, stage), max_size=4)):
        if abs(a - b) > 1 and (a < b or trains):
            cuts.append(cut(a, b, "forward" if a < b else "backward", draw(time), 1))
        if a != b and trains and draw(st.booleans()):
            cuts.append(cut(a, b, draw(st.sampled_from(["gradient", "update"])), draw(time), 1))
    return pipeline(schedule, costs, cuts)


def critical_path_s(plan: PipelinePlan) -> float:
    """The longest chain of tasks and transfers, tasks of a mesh in their order; links without limit."""
    done: dict[tuple[str, int, int], float] = {}
    clock, position = [0.0] * len(plan.schedule.tasks), [0] * len(plan.schedule.tasks)
    into: dict[tuple[int, str], list[tuple[int, float]]] = defaultdict(list)
    for c in plan.cuts:
        into[c.target, c.phase].append((c.source, c.time_s))
    total = sum(map(len, plan.schedule.tasks))
    while sum(position) < total:
        for mesh, tasks in enumerate(plan.schedule.tasks):
            while position[mesh] < len(tasks):
                task = tasks[position[mesh]]
                kind = {"input_grad": "backward"}.get(task.phase, task.phase)
                needs = [(done.get((kind, s, task.microbatch)), t) for s, t in into[task.stage, kind]]
                if any(at is None for at, _ in needs):
                    break
                start = max([clock[mesh], *(at + t for at, t in needs if at is not None)])
                clock[mesh] = start + getattr(plan.stages[task.stage].cost, f"{task.phase}_s")
                done[kind, task.stage, task.microbatch] = clock[mesh]
                position[mesh] += 1
    return max(clock)


def most_in_flight(timeline: Timeline, plan: PipelinePlan) -> tuple[int, ...]:
    """From the events: microbatches of a stage from the start of their forward task to the end of their last one."""
    peak = [0] * len(plan.stages)
    for stage in range(len(plan.stages)):
        last: dict[str, int] = {}
        order = [
            (event.what[0], event.what.split(".")[1])
            for worker in timeline.workers
            for event in worker.events
            if re.fullmatch(rf"[FBIW]{stage}\.\d+", event.what)
        ]
        last = {microbatch: i for i, (_, microbatch) in enumerate(order)}
        now = 0
        for i, (letter, microbatch) in enumerate(order):
            now += letter == "F"
            peak[stage] = max(peak[stage], now)
            now -= last[microbatch] == i
    return tuple(peak)


@pytest.mark.slow
@settings(max_examples=150, derandomize=True)
@given(plans(), st.integers(0, 3), st.sampled_from(["endpoints", "pairs"]))
def test_any_plan_is_emitted_checked_and_simulated(plan: PipelinePlan, ahead: int, sharing: Sharing) -> None:
    program = emit(plan, receive_ahead=ahead)
    check_program(program)
    timeline = simulate(program, sharing=sharing)
    for worker, about in enumerate(timeline.workers):
        work = [plan.stages[t.stage].cost for t in plan.schedule.tasks[worker]]
        bound = sum(getattr(c, f"{t.phase}_s") for c, t in zip(work, plan.schedule.tasks[worker], strict=True))
        assert timeline.makespan_s >= about.busy_s >= bound
        assert all(a.stop_s <= b.start_s for a, b in pairwise(about.events))
        assert about.peak_bytes >= max(held for _, held in about.memory)  # more within an instant
        kept = sum(b.device_bytes for b in program.buffers if b.worker == worker and b.final)
        assert about.memory[-1][1] == kept  # nothing is left over
    for link in timeline.links:
        assert all(a.stop_s <= b.start_s for a, b in pairwise(link.events))
        assert timeline.makespan_s >= link.busy_s
    assert timeline.makespan_s >= critical_path_s(plan)
    assert most_in_flight(timeline, plan) == plan.schedule.in_flight


@pytest.mark.slow
@settings(max_examples=60, derandomize=True)
@given(plans())
def test_transfers_divide_each_side(plan: PipelinePlan) -> None:
    """None is faster than alone, and together they are not faster than one after the other."""
    program = emit(plan)
    alone_s = {(t.source, t.target, f"cut {t.cut}"): t.time_s for t in program.transfers}
    timeline = simulate(program)
    for side in ("source", "target"):
        spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
        work_s: dict[int, float] = defaultdict(float)
        for link in timeline.links:
            for e in link.events:
                time_s = alone_s[link.source, link.target, e.what.partition(".")[0]]
                assert e.stop_s - e.start_s >= time_s - 1e-9
                spans[getattr(link, side)].append((e.start_s, e.stop_s))
                work_s[getattr(link, side)] += time_s
        for worker, mine in spans.items():
            covered_s, stop = 0.0, 0.0
            for start_s, stop_s in sorted(mine):
                covered_s += max(0.0, stop_s - max(start_s, stop))
                stop = max(stop, stop_s)
            assert covered_s >= work_s[worker] - 1e-9


def sharing(*hosts: tuple[HostUse, ...]) -> list[float]:
    """When transfers of 1 s from workers 0, 2, … to workers 1, 3, … end, all started at once."""
    count = 2 * len(hosts)
    buffers = tuple(
        Buffer(worker=w, kind="message", device_bytes=1.0, initial=not w % 2, final=True) for w in range(count)
    )
    transfers = tuple(
        CutTransfer(cut=i, source=2 * i, target=2 * i + 1, time_s=1.0, hosts=use) for i, use in enumerate(hosts)
    )
    workers: list[tuple[Instruction, ...]] = []
    for i in range(len(hosts)):
        workers.append((Send(transfer=i, microbatch=ONCE, buffer=2 * i),))
        workers.append((Recv(transfer=i, microbatch=ONCE, buffer=2 * i + 1),))
    program = Program(buffers=buffers, executables=(), transfers=transfers, groups=(), workers=tuple(workers))
    program.verify()
    return [link.events[0].stop_s for link in simulate(program).links]


def test_cuts_of_other_workers_divide_the_hosts_that_they_share() -> None:
    def use(host: int, sends: float, receives: float) -> HostUse:
        return HostUse(host=host, sends=sends, receives=receives)

    assert sharing((use(0, 1, 0),), (use(1, 1, 0),)) == [1, 1]
    assert sharing((use(0, 1, 0),), (use(0, 0, 1),)) == [1, 1]  # both directions
    assert sharing((use(0, 1, 0),), (use(0, 1, 0),)) == [2, 2]
    assert sharing((use(0, 0.5, 0),), (use(0, 0.5, 0),)) == [1, 1]  # each needs half of it
    # the second shares one host with the first and another with the third
    three = sharing((use(0, 1, 0),), (use(0, 1, 0), use(1, 1, 0)), (use(1, 1, 0),))
    assert three == pytest.approx([2, 2, 2])
    # relays send: the way back is slower
    assert sharing((use(0, 0.5, 1),), (use(0, 1, 0),)) == pytest.approx([1.5, 1.5])


@settings(max_examples=60, derandomize=True)
@given(plans())
def test_a_blocked_worker_does_one_thing_at_a_time(plan: PipelinePlan) -> None:
    try:
        timeline = simulate(emit(plan, receive_ahead=0), blocking=True)
    except ProgramError:
        return  # a rendezvous at each transfer is more than the schedule promises
    for worker, about in enumerate(timeline.workers):
        moved = [e for link in timeline.links if worker in (link.source, link.target) for e in link.events]
        spans = sorted((e.start_s, e.stop_s) for e in (*about.events, *moved) if e.stop_s > e.start_s)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_blocking_transfers_deadlock_where_a_mesh_works_ahead() -> None:
    """Mesh 0 has three forward tasks to do and send before it looks at the first cotangent."""
    with pytest.raises(
        ProgramError, match=r"worker 0 at send .* to worker 1 \(t0\.2\); worker 1 at send .* to worker 0"
    ):
        bubble("eager_1f1b", 2, 4, c=0.5, blocking=True)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "inference"])
def test_blocking_transfers_of_a_chain_do_not_deadlock(name: str) -> None:
    for p in range(1, 6):
        for m in (1, 2, 5, 8):
            assert bubble(name, p, m, c=0.5, blocking=True) >= bubble(name, p, m, c=0.5)


def test_a_program_that_waits_for_ever() -> None:
    program = balanced("1f1b", 2, 1)
    rest = tuple(i for i in program.workers[0] if "send" not in program.describe(i))
    broken = replace(program, workers=(rest, program.workers[1]))
    text = re.escape("workers wait for ever: worker 0 at run B0.0")
    with pytest.raises(ProgramError, match=text + r".*; worker 1 at run F1\.0"):
        simulate(broken)
    with pytest.raises(ProgramError, match="workers wait for ever when transfers block them"):
        simulate(broken, blocking=True)


# Drawings ---------------------------------------------------------------------------------------------


def test_ascii_timeline() -> None:
    assert ascii_timeline(simulate(balanced("1f1b", 2, 2)), width=9).splitlines() == [
        "0 FF··BB·BB 33 % idle",
        "1 ·FBBFBB·· 33 % idle",
    ]
    assert ascii_timeline(simulate(emit(tied())), width=40).splitlines() == [
        "0 FFF··BBB·BBBg++++++++++++++++++++++++uuu 11 % idle",
        "1 ·FFBBFFBBguuu··························· 71 % idle",
    ]
    assert ascii_timeline(simulate(balanced("inference", 1, 1, fbw=(0, 0, 0))), width=3) == "0 ··· 0 % idle\n"


def test_chrome_trace() -> None:
    timeline = simulate(balanced("1f1b", 2, 1, c=0.5))
    trace = chrome_trace(timeline)["traceEvents"]
    runs = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in trace if e["ph"] == "X"]
    assert (0, 0, "F0.0", 0.0, 1e6) in runs
    assert (1, 0, "cut 0.0", 1e6, 0.5e6) in runs
    assert (0, 1, "B1.0", 2.5e6, 2e6) in runs
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert names == {(0, 0): "worker 0", (0, 1): "worker 1", (1, 0): "0 to 1", (1, 1): "1 to 0"}
    counters = [e for e in trace if e["ph"] == "C"]
    assert len(counters) == sum(len(w.memory) for w in timeline.workers)
