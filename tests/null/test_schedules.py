"""Pipeline schedules: every one over a table of sizes, and every fault that the check knows."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autopar.inter_op.check_schedule import check_schedule, peak_in_flight
from autopar.inter_op.schedules import SCHEDULES, make_schedule, overlap_depth
from autopar.ir.errors import ScheduleError, VerifyError
from autopar.ir.pipeline import Schedule, Task

SIZES = [(p, m) for p in range(1, 9) for m in (*range(1, 13), 16, 23)]
OPTIONS: dict[str, list[dict[str, int]]] = {
    "eager_1f1b": [{"depth": k} for k in range(4)],
    "interleaved_1f1b": [{"chunks": v} for v in (2, 3, 4)],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_checks(name: str) -> None:
    """Complete, free of deadlocks, and in_flight is exactly what is held."""
    for options in OPTIONS.get(name, [{}]):
        for p, m in SIZES:
            schedule = make_schedule(name, p, m, **options)
            check_schedule(schedule, inference=not SCHEDULES[name].trains)
            assert schedule.in_flight == peak_in_flight(schedule)
            phases = {task.phase for tasks in schedule.tasks for task in tasks}
            assert ("weight_grad" in phases) == SCHEDULES[name].splits_backward
            assert (schedule.num_stages > p) == SCHEDULES[name].chunked


def test_in_flight_is_the_reference_s() -> None:
    p, m = 4, 16
    flight = {name: make_schedule(name, p, m).in_flight for name in SCHEDULES}
    assert flight["gpipe"] == (16, 16, 16, 16)
    assert flight["1f1b"] == (4, 3, 2, 1)
    assert flight["eager_1f1b"] == (7, 5, 3, 1)
    assert flight["zb_h1"] == (4, 4, 4, 4)
    assert flight["zb_h2"] == (7, 7, 7, 7)
    assert flight["inference"] == (1, 1, 1, 1)
    assert make_schedule("eager_1f1b", p, m, depth=0).in_flight == flight["1f1b"]
    assert make_schedule("eager_1f1b", p, m, depth=2).in_flight == (10, 7, 4, 1)


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_interleaved_holds_the_reference_s_chunks_per_mesh(p: int, v: int) -> None:
    """2(p−s−1) + (v−1)p + 1 over all chunks of mesh s, and the first forward tasks are the chunks' in turn."""
    schedule = make_schedule("interleaved_1f1b", p, 3 * p, chunks=v)
    for s, tasks in enumerate(schedule.tasks):
        now = peak = 0
        for task in tasks:
            now += 1 if task.phase == "forward" else -1
            peak = max(peak, now)
        assert peak == 2 * (p - s - 1) + (v - 1) * p + 1
        assert [task.stage for task in tasks[: v * p] if task.phase == "forward"] == sorted(
            task.stage for task in tasks[: v * p] if task.phase == "forward"
        )


def test_orders_of_a_small_pipeline() -> None:
    def rows(name: str, p: int, m: int) -> list[str]:
        return [" ".join(map(str, tasks)) for tasks in make_schedule(name, p, m).tasks]

    assert rows("gpipe", 2, 2) == ["F0.0 F0.1 B0.0 B0.1", "F1.0 F1.1 B1.0 B1.1"]
    assert rows("1f1b", 2, 3) == ["F0.0 F0.1 B0.0 F0.2 B0.1 B0.2", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"]
    assert rows("zb_h1", 2, 3) == [
        "F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2",
        "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2",
    ]
    assert rows("interleaved_1f1b", 2, 2) == [
        "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1",
    ]
    assert rows("inference", 2, 2) == ["F0.0 F0.1", "F1.0 F1.1"]


def test_overlap_depth() -> None:
    assert [overlap_depth(1.0, 2.0, c) for c in (0.0, 0.1, 1.5, 1.6, 3.0, 3.1)] == [0, 1, 1, 2, 2, 3]
    assert overlap_depth(0.0, 0.0, 0.0) == 0
    with pytest.raises(ScheduleError, match=r"no warm-up hides transfers of 1.0 s"):
        overlap_depth(0.0, 0.0, 1.0)


def test_what_cannot_be_made() -> None:
    for arguments, options, text in (
        (("1f1c", 2, 2), {}, "no schedule '1f1c'; there are gpipe, 1f1b"),
        (("1f1b", 0, 2), {}, "1f1b: 0 meshes and 2 microbatches"),
        (("interleaved_1f1b", 2, 0), {}, "interleaved_1f1b: 2 meshes and 0 microbatches"),
        (("inference", 2, 0), {}, "inference: 2 meshes and 0 microbatches"),
        (("1f1b", 2, 2), {"chunks": 2}, "1f1b takes no option 'chunks'; it takes none"),
        (("eager_1f1b", 2, 2), {"chunks": 2}, "it takes depth"),
        (("eager_1f1b", 2, 2), {"depth": -1}, "depth is -1"),
        (("interleaved_1f1b", 2, 2), {"chunks": 1}, "1 chunks a mesh; with fewer than 2 take 1f1b"),
    ):
        with pytest.raises(ScheduleError, match=re.escape(text)):
            make_schedule(*arguments, **options)


# Faults -----------------------------------------------------------------------------------------------


def edited(schedule: Schedule, mesh: int, tasks: tuple[Task, ...]) -> Schedule:
    rows = list(schedule.tasks)
    rows[mesh] = tasks
    return replace(schedule, tasks=tuple(rows))


@pytest.mark.parametrize("name", [n for n in SCHEDULES if n != "inference"])
def test_any_dropped_or_repeated_task_is_found(name: str) -> None:
    schedule = make_schedule(name, 3, 4)
    for mesh, tasks in enumerate(schedule.tasks):
        for i, task in enumerate(tasks):
            with pytest.raises(ScheduleError, match=f"stage {task.stage} has .* for microbatch {task.microbatch}"):
                check_schedule(edited(schedule, mesh, tasks[:i] + tasks[i + 1 :]))
            with pytest.raises(ScheduleError, match=rf"{task} comes twice"):
                check_schedule(edited(schedule, mesh, (*tasks, task)))


def test_a_task_on_another_mesh_is_found() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    with pytest.raises(VerifyError, match=r"mesh 1 runs F0\.0"):
        check_schedule(edited(schedule, 1, (*schedule.tasks[1], schedule.tasks[0][0])))


def test_both_kinds_of_backward_pass_are_found() -> None:
    schedule = make_schedule("zb_h1", 1, 1)
    task = Task(stage=0, microbatch=0, phase="backward")
    with pytest.raises(ScheduleError, match="has backward, forward, input_grad, weight_grad for microbatch 0"):
        check_schedule(edited(schedule, 0, (*schedule.tasks[0], task)))


def test_the_backward_pass_may_be_split_for_some_microbatches() -> None:
    order = "F0.0 F0.1 B0.0 I0.1 W0.1"
    phases = {"F": "forward", "B": "backward", "I": "input_grad", "W": "weight_grad"}
    tasks = tuple(Task(stage=0, microbatch=int(t[3]), phase=phases[t[0]]) for t in order.split())  # type: ignore[arg-type]
    check_schedule(Schedule(name="mixed", num_microbatches=2, mesh_of_stage=(0,), tasks=(tasks,), in_flight=(2,)))


def test_a_backward_task_in_inference_is_found() -> None:
    with pytest.raises(ScheduleError, match="has backward, forward for microbatch 0; expected forward"):
        check_schedule(make_schedule("1f1b", 1, 1), inference=True)
    with pytest.raises(ScheduleError, match="has forward for microbatch 0; expected backward, forward or"):
        check_schedule(make_schedule("inference", 1, 1))


@pytest.mark.parametrize(
    ("swap", "text"),
    [
        ((0, 0, 2), "mesh 0 at B0.0, which needs F0.0; mesh 1 at F1.0, which needs F0.0"),
        ((1, 0, 1), "mesh 0 at B0.0, which needs B1.0; mesh 1 at B1.0, which needs F1.0"),
        ((0, 1, 4), "mesh 0 at B0.1, which needs F0.1; mesh 1 at F1.1, which needs F0.1"),
    ],
)
def test_deadlocks_name_the_tasks_that_wait(swap: tuple[int, int, int], text: str) -> None:
    schedule = make_schedule("1f1b", 2, 3)
    mesh, i, j = swap
    tasks = list(schedule.tasks[mesh])
    tasks[i], tasks[j] = tasks[j], tasks[i]
    with pytest.raises(ScheduleError, match=re.escape(f"1f1b: meshes wait for each other: {text}")):
        check_schedule(edited(schedule, mesh, tuple(tasks)))


def test_a_weight_gradient_before_its_input_gradient_is_found() -> None:
    schedule = make_schedule("zb_h1", 1, 1)
    forward, input_grad, weight_grad = schedule.tasks[0]
    with pytest.raises(ScheduleError, match=re.escape("mesh 0 at W0.0, which needs I0.0")):
        check_schedule(edited(schedule, 0, (forward, weight_grad, input_grad)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_wrong_bound_is_found(name: str) -> None:
    schedule = make_schedule(name, 3, 8)
    for stage, right in enumerate(schedule.in_flight):
        for wrong in (right - 1, right + 1):
            bounds = list(schedule.in_flight)
            bounds[stage] = wrong
            with pytest.raises(ScheduleError, match=f"stage {stage} has up to {right} .* says {wrong}"):
                check_schedule(replace(schedule, in_flight=tuple(bounds)), inference=name == "inference")


def test_a_schedule_of_the_user_s_may_state_more_than_it_holds() -> None:
    schedule = replace(make_schedule("1f1b", 2, 4), name="mine")
    check_schedule(replace(schedule, in_flight=(4, 4)))
    with pytest.raises(ScheduleError, match="mine: stage 0 has up to 2 microbatches in flight, in_flight says 1"):
        check_schedule(replace(schedule, in_flight=(1, 1)))
