"""The interpreter of instructions, with tasks that only note what they were given; and the programs that it runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from autopar.inter_op.program.check import check_program
from autopar.inter_op.program.emit import emit
from autopar.inter_op.schedules import SCHEDULES, make_schedule
from autopar.ir.pipeline import ScalarExchange
from autopar.ir.program import Executable, Program
from autopar.runtime.interpreter import Arrays, Interpreter, in_turn
from tests.null.pipelines import chain, cut, pipeline, stage_cost

COST = stage_cost(forward_s=1, input_grad_s=1, weight_grad_s=1)
MESHES, MICROBATCHES = 3, 6


class Notes:
    """Tasks whose results say what all they were made of."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def run(self, executable: Executable, microbatch: int, given: Sequence[Arrays], gives: int) -> list[Arrays]:
        self.ran.append(executable.label(microbatch))
        made = frozenset[str]().union(*(g["from"] for g in given), [executable.label(microbatch)])
        return [{"from": made} for _ in range(gives)]

    def add(self, total: Arrays, part: Arrays) -> Arrays:
        return {"from": total["from"] | part["from"]}


class Mailbox:
    """A transport between threads, or between workers that share one."""

    def __init__(self, program: Program, shared: bool) -> None:
        self.program, self.shared = program, shared
        self.changed = threading.Condition()
        self.sent: dict[tuple[int, int], Arrays] = {}
        self.gave: dict[tuple[int, int], dict[int, Arrays]] = {}
        self.expected: set[tuple[int, int]] = set()

    def send(self, transfer: int, microbatch: int, arrays: Arrays) -> None:
        with self.changed:
            self.sent[transfer, microbatch] = arrays
            self.changed.notify_all()

    def expect(self, transfer: int, microbatch: int) -> None:
        self.expected.add((transfer, microbatch))

    def arrived(self, transfer: int, microbatch: int) -> bool:
        return not self.shared or (transfer, microbatch) in self.sent

    def receive(self, transfer: int, microbatch: int) -> Arrays:
        self.expected.remove((transfer, microbatch))
        with self.changed:
            assert self.changed.wait_for(lambda: (transfer, microbatch) in self.sent, 20)
            return self.sent.pop((transfer, microbatch))

    def give(self, group: int, number: int, worker: int, arrays: Arrays) -> None:
        with self.changed:
            self.gave.setdefault((group, number), {})[worker] = arrays
            self.changed.notify_all()

    def given(self, group: int, number: int, worker: int) -> bool:
        return not self.shared or len(self.gave[group, number]) == len(self.program.groups[group].workers)

    def taken(self, group: int, number: int, worker: int) -> Arrays:
        workers, mine = self.program.groups[group].workers, self.gave[group, number]
        with self.changed:
            assert self.changed.wait_for(lambda: len(mine) == len(workers), 20)
            return {"from": frozenset[str]().union(*(mine[w]["from"] for w in workers))}


def executed(program: Program, shared: bool) -> tuple[list[Notes], list[dict[int, Arrays]], Mailbox]:
    """``shared``: all workers in one thread."""
    check_program(program)
    mail, notes = Mailbox(program, shared), [Notes() for _ in program.workers]
    interpreters = [Interpreter(program, w, note, mail) for w, note in enumerate(notes)]
    initial: list[dict[int, Arrays]] = [
        {i: {"from": frozenset[str]()} for i, b in enumerate(program.buffers) if b.initial and b.worker == w}
        for w in range(len(notes))
    ]
    if shared:
        return notes, in_turn([x.steps(mine) for x, mine in zip(interpreters, initial, strict=True)]), mail
    with ThreadPoolExecutor(len(notes)) as threads:
        futures = [threads.submit(x.step, mine) for x, mine in zip(interpreters, initial, strict=True)]
        return notes, [f.result() for f in futures], mail


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_workers_run_the_schedule_and_keep_what_is_to_stay(name: str, rounds: int, shared: bool) -> None:
    kind = SCHEDULES[name]
    schedule = make_schedule(name, MESHES, MICROBATCHES, **({"chunks": 2} if kind.chunked else {}))
    cuts = chain(schedule.num_stages, 0.5, 2, trains=kind.trains)
    if kind.trains:
        last = schedule.num_stages - 1
        cuts = (*cuts, cut(last, 0, "gradient"), cut(0, last, "update"))
    program = emit(pipeline(schedule, COST, cuts), rounds=rounds)
    notes, after, mail = executed(program, shared)
    for w, (note, tasks) in enumerate(zip(notes, schedule.tasks, strict=True)):
        labels = [label for label in note.ran if not label.startswith("reshard")]
        assert labels[: len(tasks)] == [str(t) for t in tasks]
        assert sum(label.startswith("norm") for label in labels) == rounds
        assert sum(label.startswith("update") for label in labels) == schedule.mesh_of_stage.count(w)
        assert set(after[w]) == {i for i, b in enumerate(program.buffers) if b.final and b.worker == w}
    assert not mail.sent
    if kind.trains:
        state = next(i for i, b in enumerate(program.buffers) if b.kind == "state")
        made = after[0][state]["from"]
        wanted = {f"F{s}.{j}" for s in range(schedule.num_stages) for j in range(MICROBATCHES)}
        assert made >= wanted | {f"grad_sync {schedule.num_stages - 1}"}


def test_programs_that_are_simulated_have_one_exchange() -> None:
    """Without ``rounds`` nothing changes for those that plan."""
    plan = pipeline(make_schedule("1f1b", 2, 2), COST, chain(2, 0.5, 2))
    exchange = ScalarExchange(compute_s=(0.0, 0.0), reduce_s=1.0, device_bytes=4)
    assert "norm" not in emit(plan).text()
    assert emit(plan, exchange=exchange).text().count("norm") == 2
    assert emit(plan, exchange=exchange, rounds=3).text().count("norm") == 6
    check_program(emit(plan, exchange=exchange, rounds=3))
