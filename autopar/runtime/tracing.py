"""What a real step does when: a `Timeline` like the simulator's, and what devices hold meanwhile.

A traced step waits for every task before its worker goes on, so that a task's time is its own; only transfers run
beside tasks. It takes longer than others by what dispatching then no longer hides, some 0.1 ms a task.

Memory. A device holds its live arrays, memory that several of them share counted once, and while a task runs what its
executable needs beside: temporaries, and results that take nothing's place. All arrays count, also those that are none
of the step's.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax

from autopar.inter_op.program.timeline import Event, LinkTimeline, Timeline, WorkerTimeline, chrome_trace
from autopar.ir.errors import ReshardingError
from autopar.ir.program import ONCE, Program
from autopar.ir.serde import replace_file
from autopar.ir.text import bytes_text, percent_text, seconds_text, table
from autopar.jax_compat import Device
from autopar.runtime.interpreter import Arrays
from autopar.runtime.pieces import shards_of

PLACED = "begin"
"""The event of a step's beginning: arguments and batch placed, versions of weights made."""


_LOOKING = threading.Lock()
"""Who looks at all arrays keeps them: another thread that looked meanwhile would count what its owner has let go of."""


def held_bytes(devices: Sequence[Device]) -> list[int]:
    """Bytes of live arrays on each device, memory that several share counted once."""
    with _LOOKING:
        return _held_bytes(devices)


def _held_bytes(devices: Sequence[Device]) -> list[int]:
    held = dict.fromkeys(devices, 0)
    seen: set[tuple[Device, int]] = set()
    for x in jax.live_arrays():
        if held.keys().isdisjoint(x.sharding.device_set):
            continue
        if not x.is_ready():  # on its way: memory of its own
            for device in x.sharding.device_set & held.keys():
                held[device] += x.dtype.itemsize * _count(x.sharding.shard_shape(x.shape))
            continue
        for shard in shards_of(x):
            at = (shard.device, shard.data.unsafe_buffer_pointer())
            if shard.device in held and at not in seen:
                seen.add(at)
                held[shard.device] += shard.data.nbytes
    return list(held.values())


def _count(shape: Sequence[int]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


class WorkerWatch:
    """One worker's step: `call` runs every task.

    Args:
        zero_s: when the step began, of `time.perf_counter`.
        memory: True: look at what its devices hold before and after each task.
        turn: held while a task runs.
    """

    def __init__(
        self, devices: Sequence[Device], zero_s: float, memory: bool, turn: AbstractContextManager[Any]
    ) -> None:
        self.devices, self.zero_s, self.counts, self.turn = devices, zero_s, memory, turn
        self.events: list[Event] = []
        self.memory: list[tuple[float, float]] = []
        self.peak_bytes = 0.0

    def begun(self) -> None:
        """Notes that all is placed which the step starts from."""
        self.events.append(Event(0.0, time.perf_counter() - self.zero_s, PLACED))

    def call(self, what: str, more_bytes: int, taken: Any, run: Callable[[], Arrays]) -> Arrays:
        """Runs a task when ``taken`` is there, and waits for its results, which it returns.

        Args:
            what: the event's name.
            more_bytes: what a device holds beside live arrays meanwhile, its results included.
        """
        jax.block_until_ready(taken)
        self._look(more_bytes)
        with self.turn:
            start_s = time.perf_counter() - self.zero_s
            made = run()
            jax.block_until_ready(made)
            self.events.append(Event(start_s, time.perf_counter() - self.zero_s, what))
        self._look(0)
        return made

    def _look(self, more_bytes: int) -> None:
        if self.counts:
            held = float(max(held_bytes(self.devices)) + more_bytes)
            self.memory.append((time.perf_counter() - self.zero_s, held))
            self.peak_bytes = max(self.peak_bytes, held)

    def timeline(self) -> WorkerTimeline:
        """What was noted so far, in seconds from ``zero_s``."""
        busy_s = sum(e.stop_s - e.start_s for e in self.events)
        return WorkerTimeline(
            events=tuple(self.events), busy_s=busy_s, memory=tuple(self.memory), peak_bytes=self.peak_bytes
        )


class TransferWatch:
    """The transfers of one step, each from when it was started until its arrays are there."""

    def __init__(self, zero_s: float) -> None:
        self.zero_s = zero_s
        self.events: list[tuple[int, Event]] = []
        """(transfer, what)"""
        self._threads: list[threading.Thread] = []
        """One for each that is under way: they end in any order."""

    def begun(self, transfer: int, microbatch: int, start_s: float, arrays: Callable[[], None] | Arrays | None) -> None:
        """A transfer was started at ``start_s`` of `time.perf_counter`; it is done when ``arrays`` are there, or the
        call returns, and now where there are none."""
        name = f"{transfer}" if microbatch == ONCE else f"{transfer}.{microbatch}"

        def ended() -> None:
            self.events.append((transfer, Event(start_s - self.zero_s, time.perf_counter() - self.zero_s, name)))

        if not arrays:
            ended()
            return
        self._threads.append(threading.Thread(target=_when_there, args=([arrays], ended), daemon=True))
        self._threads[-1].start()

    def close(self) -> None:
        """Waits for all transfers that were started; no more may be."""
        for thread in self._threads:
            thread.join()


def _when_there(given: list[Any], call: Callable[[], None]) -> None:
    """Calls when what ``given`` holds is there, and keeps none of it then; does not where it fails: its readers raise
    that."""
    arrays = given.pop()
    try:
        arrays() if callable(arrays) else jax.block_until_ready(arrays)
    except (RuntimeError, ReshardingError):
        if callable(arrays) or not any(
            x.is_deleted() for x in jax.tree_util.tree_leaves(arrays)
        ):  # else it was there, and is donated
            return
    del arrays
    call()


def link_timelines(program: Program, transfers: Sequence[tuple[int, Event]]) -> tuple[LinkTimeline, ...]:
    """The timeline of each channel between two workers; ``transfers``: (number of the program's transfer, its
    event)."""
    ends = dict.fromkeys((t.source, t.target) for t in program.transfers)
    rows: dict[tuple[int, int], list[Event]] = {end: [] for end in ends}
    for number, event in transfers:
        transfer = program.transfers[number]
        what = event.what.replace(str(number), f"cut {transfer.cut}", 1)
        rows[transfer.source, transfer.target].append(Event(event.start_s, event.stop_s, what))
    return tuple(
        LinkTimeline(source=source, target=target, events=tuple(events), busy_s=_covered_s(events))
        for (source, target), events in rows.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a worker in a process of its own saw of a step, in seconds from ``zero_s`` of its host's clock.

    Attributes:
        transfers: (transfer, from when this end began until it was done with it).
    """

    zero_s: float
    worker: WorkerTimeline
    transfers: tuple[tuple[int, Event], ...]


def put_together(program: Program | None, seen: Sequence[Seen]) -> Timeline:
    """All workers' steps as one; ``program`` None: nothing crosses between them. A transfer takes from when its giver
    began until both ends were done; between hosts, times are as right as their clocks."""
    first_s = min(mine.zero_s for mine in seen)
    workers: list[WorkerTimeline] = []
    ends: dict[tuple[int, str], Event] = {}
    for w, mine in enumerate(seen):
        more_s = mine.zero_s - first_s
        workers.append(_later(mine.worker, more_s))
        for number, event in mine.transfers:
            start_s, stop_s = event.start_s + more_s, event.stop_s + more_s
            other = ends.get((number, event.what))
            if other is not None:
                assert program is not None
                start_s = start_s if program.transfers[number].source == w else other.start_s
                stop_s = max(start_s, stop_s, other.stop_s)
            ends[number, event.what] = Event(start_s, stop_s, event.what)
    transfers = sorted(((number, event) for (number, _), event in ends.items()), key=lambda found: found[1].start_s)
    return _whole(workers, () if program is None else link_timelines(program, transfers))


def _later(worker: WorkerTimeline, more_s: float) -> WorkerTimeline:
    return replace(
        worker,
        events=tuple(Event(e.start_s + more_s, e.stop_s + more_s, e.what) for e in worker.events),
        memory=tuple((at_s + more_s, held) for at_s, held in worker.memory),
    )


def _whole(workers: Sequence[WorkerTimeline], links: Sequence[LinkTimeline]) -> Timeline:
    events = [e for row in (*workers, *links) for e in row.events]
    return Timeline(makespan_s=max((e.stop_s for e in events), default=0.0), workers=tuple(workers), links=tuple(links))


def _covered_s(events: Sequence[Event]) -> float:
    """Seconds in which at least one of them is under way."""
    total_s = end_s = 0.0
    for event in sorted(events, key=lambda e: e.start_s):
        total_s += max(0.0, event.stop_s - max(end_s, event.start_s))
        end_s = max(end_s, event.stop_s)
    return total_s


class StepWatch:
    """One step of workers in this process: a `WorkerWatch` each, and the transfers. ``devices``: each worker's;
    ``alone``: True: one task at a time."""

    def __init__(self, devices: Sequence[Sequence[Device]], memory: bool, alone: bool) -> None:
        zero_s = time.perf_counter()
        turn = threading.Lock() if alone else nullcontext()
        self.workers = [WorkerWatch(mine, zero_s, memory, turn) for mine in devices]
        self.transfers = TransferWatch(zero_s)
        self.zero_s = zero_s

    def begun(self) -> None:
        """Notes that all is placed which the step starts from."""
        for worker in self.workers:
            worker.begun()

    def timeline(self, program: Program | None = None) -> Timeline:
        """The step's timeline; ``program`` says which workers have a channel."""
        links = () if program is None else link_timelines(program, self.transfers.events)
        return _whole([w.timeline() for w in self.workers], links)


@dataclass
class Traced:
    """Steps that were traced, and the step as the plan has it.

    Attributes:
        simulated: the plan's step.
        steps: the real ones.
        memory: as `Step.trace` was told.
        alone: as `Step.trace` was told.
    """

    simulated: Timeline
    memory: bool
    alone: bool
    steps: list[Timeline] = field(default_factory=list)

    def timelines(self) -> Mapping[str, Timeline]:
        """All timelines by name (``simulated``, ``step 0``, …), for `program.timeline.chrome_trace`."""
        return {"simulated": self.simulated, **{f"step {n}": step for n, step in enumerate(self.steps)}}

    def __str__(self) -> str:
        """The last step beside the plan's."""
        if not self.steps:
            return "no step was traced"
        real, plan = self.steps[-1], self.simulated
        lines = [f"step {seconds_text(real.makespan_s)}, simulated {seconds_text(plan.makespan_s)}"]
        rows = [["worker", "busy", "bubble", "simulated", "peak memory", "simulated"]]
        for w, (mine, its) in enumerate(zip(real.workers, plan.workers, strict=True)):
            rows.append([
                str(w), seconds_text(mine.busy_s), percent_text(real.bubble(w), 1), percent_text(plan.bubble(w), 1),
                bytes_text(mine.peak_bytes) if self.memory else "not looked at", bytes_text(its.peak_bytes),
            ])  # fmt: skip
        lines += table(rows, right=range(6))
        if real.links:
            links = [["from", "to", "transfers", "busy", "simulated"]]
            for mine, its in zip(real.links, plan.links, strict=True):
                links.append([
                    str(mine.source), str(mine.target), str(len(mine.events)), seconds_text(mine.busy_s),
                    seconds_text(its.busy_s),
                ])  # fmt: skip
            lines += table(links, right=range(5))
        return "\n".join(lines)


class Observed(Protocol):
    """What runs steps, and notes what runs when where it is told to."""

    observed: Traced | None


@contextmanager
def tracing(what: Observed, traced: Traced, path: str | os.PathLike[str] | None) -> Iterator[Traced]:
    """Within it steps of ``what`` are noted in ``traced``; where it ends well its timelines are written to ``path`` for
    Perfetto. Raises PlanFormatError where they cannot be."""
    what.observed = traced
    try:
        yield traced
    finally:
        what.observed = None
    if path is not None:
        replace_file(path, json.dumps(chrome_trace(traced.timelines())))
