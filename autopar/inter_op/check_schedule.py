"""`check_schedule`: a proof that a schedule can be run, does everything once, and holds what it says.

A task waits for others of its microbatch:

    forward of stage s       forward of s−1
    backward or input_grad   that of s+1 (either kind); its own forward
    weight_grad              its input_grad

A mesh runs its tasks in order. Whether all of them come about does not depend on how long they take, so one execution
without time is a proof: each mesh goes on until a task waits, and no order of the meshes gets further than another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from autopar.inter_op.schedules import SCHEDULES
from autopar.ir.errors import ScheduleError
from autopar.ir.pipeline import Schedule, Task, TaskPhase

_LAST = ("backward", "weight_grad")
"""Phases after which a stage holds nothing more of a microbatch."""


def check_schedule(schedule: Schedule) -> None:
    """Raises VerifyError where a task stands on another mesh than its stage's; ScheduleError where a task is missing or
    comes twice, where meshes wait for each other, and where more microbatches are in flight than ``in_flight`` says
    (for the schedules of `SCHEDULES` also where fewer are). Whether there is a backward pass says the record of its
    name; where there is none, any task of one."""
    schedule.verify()
    record = SCHEDULES.get(schedule.name)
    _check_complete(schedule, record.trains if record is not None else _trains(schedule))
    _check_ends(schedule)
    for stage, (stated, found) in enumerate(zip(schedule.in_flight, peak_in_flight(schedule), strict=True)):
        if found > stated or (record is not None and found < stated):
            raise ScheduleError(
                f"{schedule.name}: stage {stage} has up to {found} microbatches in flight, in_flight says {stated}"
            )


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most microbatches that each stage holds at a time, from the start of their forward task to the end of their
    last task there."""
    peak, now = [0] * schedule.num_stages, [0] * schedule.num_stages
    trains = _trains(schedule)
    for tasks in schedule.tasks:
        for task in tasks:
            if task.phase == "forward":
                now[task.stage] += 1
                peak[task.stage] = max(peak[task.stage], now[task.stage])
            if task.phase in _LAST or not trains:
                now[task.stage] -= 1
    return tuple(peak)


def _trains(schedule: Schedule) -> bool:
    return any(task.phase != "forward" for tasks in schedule.tasks for task in tasks)


def _check_complete(schedule: Schedule, trains: bool) -> None:
    seen: dict[tuple[int, int], set[TaskPhase]] = {}
    for tasks in schedule.tasks:
        for task in tasks:
            phases = seen.setdefault((task.stage, task.microbatch), set())
            if task.phase in phases:
                raise ScheduleError(f"{schedule.name}: {task} comes twice")
            phases.add(task.phase)
    wanted = ({"forward", "backward"}, {"forward", "input_grad", "weight_grad"}) if trains else ({"forward"},)
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            phases = seen.get((stage, microbatch), set())
            if phases not in wanted:
                raise ScheduleError(
                    f"{schedule.name}: stage {stage} has {_list(phases) or 'no task'} for microbatch {microbatch}; "
                    f"expected {' or '.join(_list(w) for w in wanted)}"
                )


def _list(phases: Collection[str]) -> str:
    return ", ".join(sorted(phases))


def _needs(task: Task, num_stages: int) -> Iterator[tuple[tuple[TaskPhase, ...], int]]:
    """(phases of which one must be done, the stage) for each thing that a task waits for."""
    if task.phase == "forward":
        if task.stage > 0:
            yield ("forward",), task.stage - 1
    elif task.phase == "weight_grad":
        yield ("input_grad",), task.stage
    else:
        yield ("forward",), task.stage
        if task.stage + 1 < num_stages:
            yield ("backward", "input_grad"), task.stage + 1


def _check_ends(schedule: Schedule) -> None:
    """Executes without time, and names the tasks that wait where it does not end."""
    done: set[tuple[TaskPhase, int, int]] = set()
    position = [0] * len(schedule.tasks)
    waiting: dict[tuple[int, int], list[int]] = {}  # (stage, microbatch) whose next task a mesh waits for
    going = list(range(len(schedule.tasks)))

    def missing(task: Task) -> tuple[tuple[TaskPhase, ...], int] | None:
        for phases, stage in _needs(task, schedule.num_stages):
            if not any((phase, stage, task.microbatch) in done for phase in phases):
                return phases, stage
        return None

    while going:
        mesh = going.pop()
        tasks = schedule.tasks[mesh]
        while position[mesh] < len(tasks):
            task = tasks[position[mesh]]
            need = missing(task)
            if need is not None:
                waiting.setdefault((need[1], task.microbatch), []).append(mesh)
                break
            position[mesh] += 1
            done.add((task.phase, task.stage, task.microbatch))
            going += waiting.pop((task.stage, task.microbatch), ())
    stuck: list[str] = []
    for mesh, tasks in enumerate(schedule.tasks):
        if position[mesh] < len(tasks):
            task = tasks[position[mesh]]
            need = missing(task)
            assert need is not None  # else it would have gone on
            awaited = Task(stage=need[1], microbatch=task.microbatch, phase=need[0][0])
            stuck.append(f"mesh {mesh} at {task}, which needs {awaited}")
    if stuck:
        raise ScheduleError(f"{schedule.name}: meshes wait for each other: {'; '.join(stuck)}")
