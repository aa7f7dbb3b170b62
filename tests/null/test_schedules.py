"""Pipeline schedules: every one's record and golden, every one over a table of sizes, every fault that the check knows;
and that nobody elsewhere knows one by its name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.inter_op.check_schedule import check_schedule, peak_in_flight
from autopar.inter_op.schedules import SCHEDULES, ScheduleRecord, make_schedule, plain_schedule
from autopar.inter_op.schedules.eager_1f1b import EAGER_1F1B, overlap_depth
from autopar.inter_op.schedules.gpipe import GPIPE, gpipe
from autopar.inter_op.schedules.inference import INFERENCE
from autopar.inter_op.schedules.interleaved_1f1b import INTERLEAVED_1F1B
from autopar.inter_op.schedules.one_f_one_b import ONE_F_ONE_B
from autopar.inter_op.schedules.zero_bubble import ZB_H1
from autopar.ir.errors import ScheduleError, VerifyError
from autopar.ir.pipeline import Schedule, Task
from tests.null.pipelines import chain, pipeline, stage_cost

SIZES = [(p, m) for p in range(1, 9) for m in (*range(1, 13), 16, 23)]
GOLDENS = Path(__file__).parents[1] / "golden" / "schedules"


def variants(record: ScheduleRecord) -> list[dict[str, int]]:
    """Options that a schedule is tried with."""
    chunked = [(("chunks", v),) for v in record.chunks]
    return [dict(options) for options in chunked or dict.fromkeys((*record.tried(5), *record.distinct(5)))]


# Records ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_record_verifies(name: str) -> None:
    SCHEDULES[name].verify()
    assert SCHEDULES[name].name == name


def _golden_text(record: ScheduleRecord) -> str:
    """The record, what is tried with it, and its tasks on 3 meshes."""
    lines = [str(record)]
    for what, listed in (("tried", record.tried(5)), ("distinct", record.distinct(5))):
        if record.options and not record.chunked:
            texts = (" ".join(f"{k} {v}" for k, v in options) or "default" for options in listed)
            lines.append(f"  {what} of 5 microbatches: {', '.join(texts)}")
    made = record.build(3, 5)
    lines.append(f"3 meshes, 5 microbatches; in flight: {' '.join(map(str, made.in_flight))}")
    lines += (f"  {mesh}: {' '.join(map(str, tasks))}" for mesh, tasks in enumerate(made.tasks))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_match_their_goldens(name: str, regen_goldens: bool) -> None:
    text, path = _golden_text(SCHEDULES[name]), GOLDENS / f"{name}.txt"
    if regen_goldens:
        path.write_text(text)
    assert text == path.read_text()


def test_goldens_are_of_schedules() -> None:
    assert {path.stem for path in GOLDENS.iterdir()} == set(SCHEDULES)


def test_one_schedule_of_each_kind_runs_a_single_stage() -> None:
    assert [(r.name, r.trains) for r in SCHEDULES.values() if r.on_one_stage] == [("1f1b", True), ("inference", False)]
    assert plain_schedule(trains=True) is ONE_F_ONE_B
    assert plain_schedule(trains=False) is INFERENCE


def test_none_holds_fewer_than_the_plain_one_nor_than_on_a_single_stage() -> None:
    """What the planner says that a cut needs at least."""
    for record in SCHEDULES.values():
        for (p, m), options in ((size, o) for size in SIZES for o in variants(record) if not record.chunked):
            plain = plain_schedule(trains=record.trains).in_flight(p, m)
            (alone,) = record.in_flight(1, m, **options)
            held = record.in_flight(p, m, **options)
            assert all(h >= max(alone, least) for h, least in zip(held, plain, strict=True))


@pytest.mark.parametrize(
    ("record", "wrong", "text"),
    [
        (GPIPE, {"hides": 1.5}, "schedule gpipe: hides is 1.5, not from 0 to 1"),
        (INTERLEAVED_1F1B, {"chunks": (1, 2)}, "chunks are (1, 2); 2 or more, ascending"),
        (INTERLEAVED_1F1B, {"chunks": (3, 2)}, "chunks are (3, 2); 2 or more, ascending"),
        (INTERLEAVED_1F1B, {"chunks": ()}, "that have the option chunks, and of no others"),
        (GPIPE, {"chunks": (2,)}, "that have the option chunks, and of no others"),
        (INTERLEAVED_1F1B, {"on_one_stage": True}, "a single stage runs it, but a mesh has several"),
        (EAGER_1F1B, {"tried": EAGER_1F1B.distinct}, "tried(1) does not begin with the default, ()"),
        (EAGER_1F1B, {"options": ()}, "depth is none of its options (there are none)"),
        (EAGER_1F1B, {"options": ("deep", "wide")}, "depth is none of its options (deep, wide)"),
        (ONE_F_ONE_B, {"build": gpipe}, "that of 1 meshes and 1 microbatches is named gpipe"),
        (GPIPE, {"in_flight": ONE_F_ONE_B.in_flight}, "says (1,), that of 1 meshes and 2 microbatches says (2,)"),
        (GPIPE, {"splits_backward": True}, "that of 1 meshes and 1 microbatches has tasks of phases backward, forward"),
        (ZB_H1, {"splits_backward": False}, "has tasks of phases forward, input_grad, weight_grad"),
        (INFERENCE, {"trains": True}, "that of 1 meshes and 1 microbatches has tasks of phases forward"),
        (GPIPE, {"trains": False}, "has tasks of phases backward, forward"),
        (GPIPE, {"in_flight_by_stages_after": False}, "by_stages_after is False, but in_flight says otherwise"),
        (ZB_H1, {"in_flight_by_stages_after": True}, "by_stages_after is True, but in_flight says otherwise"),
    ],
)
def test_records_that_contradict_what_they_build(record: ScheduleRecord, wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(VerifyError, match=re.escape(text)):
        replace(record, **wrong).verify()


def test_a_record_of_as_many_stages_as_it_does_not_build() -> None:
    def two(p: int, m: int, *, chunks: int) -> Schedule:
        return INTERLEAVED_1F1B.build(p, m, chunks=2)

    def held(p: int, m: int, *, chunks: int = 2) -> tuple[int, ...]:
        return INTERLEAVED_1F1B.in_flight(p, m, chunks=2)

    with pytest.raises(VerifyError, match="that of 1 meshes and 1 microbatches, chunks 3 has 2 stages on 1 meshes"):
        replace(INTERLEAVED_1F1B, build=two, in_flight=held).verify()


def test_which_depths_suit_a_plan() -> None:
    """What hides the slowest transfer, twice that, and all microbatches; 1 at least."""

    def depths(transfer_s: float, m: int, forward_s: float = 1.0) -> list[dict[str, int]]:
        cost = stage_cost(forward_s=forward_s, input_grad_s=forward_s, weight_grad_s=forward_s)
        plan = pipeline(make_schedule("eager_1f1b", 3, m), cost, chain(3, transfer_s))
        return [dict(options) for options in EAGER_1F1B.suited(plan)]

    assert depths(2.0, 16) == [{"depth": 2}, {"depth": 4}, {"depth": 16}]
    assert depths(2.0, 3) == [{"depth": 2}, {"depth": 3}]
    assert depths(0.0, 4) == [{"depth": 1}, {"depth": 4}]
    assert depths(1.0, 4, forward_s=0.0) == [{"depth": 1}, {"depth": 2}, {"depth": 4}]


def _literals(path: Path) -> Iterator[ast.Constant]:
    """Strings that are no docstrings, those inside f-strings too."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node


@pytest.mark.slow
def test_no_schedule_is_named_outside_its_room() -> None:
    """Who needs to know something of a schedule asks its record."""
    package = Path(autopar.__file__).parent
    names = re.compile(rf"\b({'|'.join(map(re.escape, SCHEDULES))})\b")
    found = {
        (str(path.relative_to(package)), name)
        for path in sorted(package.rglob("*.py")) for literal in _literals(path)
        for name in names.findall(str(literal.value))
    }  # fmt: skip
    room = "inter_op/schedules/"
    assert {name for path, name in found if path.startswith(room)} == set(SCHEDULES)
    assert sorted((path, name) for path, name in found if not path.startswith(room)) == []


# Orders of tasks --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_checks(name: str) -> None:
    """Complete, free of deadlocks, and in_flight is exactly what is held."""
    for options in variants(SCHEDULES[name]):
        for p, m in SIZES:
            schedule = make_schedule(name, p, m, **options)
            check_schedule(schedule)
            assert schedule.in_flight == peak_in_flight(schedule)


def test_a_depth_of_0_is_1f1b() -> None:
    for p, m in SIZES:
        assert make_schedule("eager_1f1b", p, m, depth=0) == replace(make_schedule("1f1b", p, m), name="eager_1f1b")


def test_in_flight_is_the_reference_s() -> None:
    p, m = 4, 16
    flight = {name: make_schedule(name, p, m).in_flight for name in SCHEDULES}
    assert flight["gpipe"] == (16, 16, 16, 16)
    assert flight["1f1b"] == (4, 3, 2, 1)
    assert flight["eager_1f1b"] == (7, 5, 3, 1)
    assert flight["zb_h1"] == (4, 4, 4, 4)
    assert flight["zb_h2"] == (7, 7, 7, 7)
    assert flight["inference"] == (1, 1, 1, 1)
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


@pytest.mark.parametrize("name", [n for n, record in SCHEDULES.items() if record.trains])
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
        check_schedule(replace(make_schedule("1f1b", 1, 1), name="inference"))
    with pytest.raises(ScheduleError, match="has forward for microbatch 0; expected backward, forward or"):
        check_schedule(replace(make_schedule("inference", 1, 1), name="1f1b"))


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
                check_schedule(replace(schedule, in_flight=tuple(bounds)))


def test_a_schedule_of_the_user_s_may_state_more_than_it_holds() -> None:
    schedule = replace(make_schedule("1f1b", 2, 4), name="mine")
    check_schedule(replace(schedule, in_flight=(4, 4)))
    with pytest.raises(ScheduleError, match="mine: stage 0 has up to 2 microbatches in flight, in_flight says 1"):
        check_schedule(replace(schedule, in_flight=(1, 1)))


def test_a_schedule_of_the_user_s_trains_where_it_has_any_task_backwards() -> None:
    check_schedule(replace(make_schedule("inference", 2, 4), name="mine"))
    schedule = replace(make_schedule("1f1b", 2, 2), name="mine")
    with pytest.raises(ScheduleError, match="mine: stage 0 has forward for microbatch 1; expected backward, forward"):
        check_schedule(edited(schedule, 0, schedule.tasks[0][:-1]))
