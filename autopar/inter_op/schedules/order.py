"""Orders of tasks that the schedules share.

All of them alternate: some forward tasks (the warm-up, the one before the first backward task included), then one
backward task and one forward task in turn, then the backward tasks that are left. Schedules differ in the warm-up, in
which stages a mesh has, and in when weight gradients come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.ir.errors import ScheduleError
from autopar.ir.pipeline import Schedule, Task, TaskPhase


def check_sizes(name: str, num_meshes: int, num_microbatches: int) -> None:
    """Raises ScheduleError unless there is a mesh and a microbatch at least."""
    if num_meshes < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"{name}: {num_meshes} meshes and {num_microbatches} microbatches; give at least one of each"
        )


def tasks_of(stage: int, num_microbatches: int, phase: TaskPhase) -> list[Task]:
    """The stage's tasks of one phase, by microbatch."""
    return [Task(stage=stage, microbatch=j, phase=phase) for j in range(num_microbatches)]


def alternate(forwards: Sequence[Task], backwards: Sequence[Task], warm_up: int) -> list[Task]:
    """``warm_up`` forward tasks; then backward and forward tasks in turn; then the tasks that are left."""
    tasks = list(forwards[:warm_up])
    for i, backward in enumerate(backwards):
        tasks.append(backward)
        tasks += forwards[warm_up + i : warm_up + i + 1]
    return tasks


def delay_weight_grads(tasks: Sequence[Task], delay: int) -> list[Task]:
    """``tasks`` with a weight gradient after each input gradient: that of the input gradient ``delay`` before it. The
    last ``delay`` weight gradients come at the end."""
    out: list[Task] = []
    waiting: list[Task] = []
    for task in tasks:
        out.append(task)
        if task.phase == "input_grad":
            waiting.append(Task(stage=task.stage, microbatch=task.microbatch, phase="weight_grad"))
            if len(waiting) > delay:
                out.append(waiting.pop(0))
    return out + waiting


def one_stage_per_mesh(
    name: str,
    num_meshes: int,
    num_microbatches: int,
    *,
    in_flight: tuple[int, ...],
    warm_up: Callable[[int], int] | None = None,
    weight_grad_delay: Callable[[int], int] | None = None,
) -> Schedule:
    """The schedule whose stage s does ``warm_up(s)`` forward tasks first (None: as many as it has in flight) and, where
    the backward pass is split, each weight gradient ``weight_grad_delay(s)`` input gradients after its own.

    In flight are the warm-up's microbatches and those whose weight gradients wait, all microbatches at most: when
    the first is let go of, warm_up(s) + delay(s) forward tasks are done; from then on each forward task follows the
    last task of another microbatch. Raises ScheduleError without meshes or microbatches.
    """
    check_sizes(name, num_meshes, num_microbatches)
    tasks: list[tuple[Task, ...]] = []
    for s in range(num_meshes):
        forwards, first = tasks_of(s, num_microbatches, "forward"), warm_up(s) if warm_up else in_flight[s]
        if weight_grad_delay is None:
            order = alternate(forwards, tasks_of(s, num_microbatches, "backward"), first)
        else:
            order = alternate(forwards, tasks_of(s, num_microbatches, "input_grad"), first)
            order = delay_weight_grads(order, weight_grad_delay(s))
        tasks.append(tuple(order))
    return Schedule(
        name=name,
        num_microbatches=num_microbatches,
        mesh_of_stage=tuple(range(num_meshes)),
        tasks=tuple(tasks),
        in_flight=in_flight,
    )
