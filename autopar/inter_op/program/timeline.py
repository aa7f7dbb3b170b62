"""What happens when in a program: the simulator's result, as a trace for Perfetto and as text for terminals."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.serde import JsonData


@dataclass(frozen=True, slots=True)
class Event:
    """Something on a worker's devices or on a channel, from ``start_s`` to ``stop_s``."""

    start_s: float
    stop_s: float
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTimeline:
    """One worker: what its devices run, one event after the other, ``busy_s`` in all; and ``memory``, the bytes that a
    device holds from each time on, ``peak_bytes`` at most, within an instant too."""

    events: tuple[Event, ...]
    busy_s: float
    memory: tuple[tuple[float, float], ...]
    peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimeline:
    """The channel from worker ``source`` to ``target``: its transfers, one after the other, ``busy_s`` in all."""

    source: int
    target: int
    events: tuple[Event, ...]
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A step, from 0 to ``makespan_s``, when the last task and the last transfer are done."""

    makespan_s: float
    workers: tuple[WorkerTimeline, ...]
    links: tuple[LinkTimeline, ...]

    def bubble(self, worker: int) -> float:
        """The part of the step in which a worker's devices run nothing; 0 for a step that takes no time."""
        return 1 - self.workers[worker].busy_s / self.makespan_s if self.makespan_s else 0.0


def chrome_trace(timelines: Timeline | Mapping[str, Timeline]) -> dict[str, JsonData]:
    """The trace event format (JSON's types) that Perfetto and chrome://tracing read, times in microseconds: a thread
    for each worker and for each channel, and a counter of each worker's bytes. Several timelines stand one below the
    other, each by its name."""
    events: list[JsonData] = []

    def thread(pid: int, tid: int, name: str, content: Sequence[Event]) -> None:
        events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}})
        for event in content:
            times = {"ts": 1e6 * event.start_s, "dur": 1e6 * (event.stop_s - event.start_s)}
            events.append({"ph": "X", "pid": pid, "tid": tid, "name": event.what, **times})

    named = {"": timelines} if isinstance(timelines, Timeline) else timelines
    for number, (title, timeline) in enumerate(named.items()):
        first = 2 * number
        for pid, name in enumerate(("workers", "links"), first):
            about: JsonData = {"name": f"{title}: {name}" if title else name}
            events.append({"ph": "M", "pid": pid, "name": "process_name", "args": about})
            events.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})
        for tid, worker in enumerate(timeline.workers):
            thread(first, tid, f"worker {tid}", worker.events)
            for time_s, held in worker.memory:
                counter: dict[str, JsonData] = {"name": f"bytes of worker {tid}", "args": {"bytes": held}}
                events.append({"ph": "C", "pid": first, "ts": 1e6 * time_s, **counter})
        for tid, link in enumerate(timeline.links):
            thread(first + 1, tid, f"{link.source} to {link.target}", link.events)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def ascii_timeline(timeline: Timeline, width: int = 100) -> str:
    """One row per worker, ``width`` columns for the whole step. Each column shows what ran for most of its time, by the
    first letter of its name (F forward, B backward, I input gradient, W weight gradient, g gradients reduced, u
    update, + gradients added), or · for nothing; then the part of the step in which the worker ran nothing."""
    label = max((len(str(w)) for w in range(len(timeline.workers))), default=1)
    rows: list[str] = []
    for number, worker in enumerate(timeline.workers):
        cells: list[dict[str, float]] = [{} for _ in range(width)]
        column_s = timeline.makespan_s / width
        for event in worker.events:
            if event.stop_s == event.start_s:
                continue
            first = min(width - 1, int(event.start_s / column_s))
            last = min(width - 1, int(event.stop_s / column_s))
            for column in range(first, last + 1):
                shared = min(event.stop_s, (column + 1) * column_s) - max(event.start_s, column * column_s)
                letter = event.what[0]
                cells[column][letter] = cells[column].get(letter, 0.0) + shared
        line = ""
        for cell in cells:
            idle_s = column_s - sum(cell.values())
            line += max([("·", idle_s), *cell.items()], key=lambda item: item[1])[0]
        rows.append(f"{number:>{label}} {line} {100 * timeline.bubble(number):.0f} % idle")
    return "\n".join(rows) + "\n"


def timelines_of(trace: Any) -> dict[str, Timeline]:
    """The timelines that `chrome_trace` wrote, by name; memory is left out. Raises ValueError for anything else."""
    try:
        rows: list[Any] = trace["traceEvents"]
        threads: dict[tuple[int, int], str] = {}
        processes: dict[int, str] = {}
        events: dict[tuple[int, int], list[Event]] = {}
        for row in rows:
            match row:
                case {"ph": "M", "name": "process_name", "pid": int(pid), "args": {"name": str(name)}}:
                    processes[pid] = name
                case {"ph": "M", "name": "thread_name", "pid": int(pid), "tid": int(tid), "args": {"name": str(name)}}:
                    threads[pid, tid] = name
                case {"ph": "X", "pid": int(pid), "tid": int(tid), "name": str(name), "ts": ts, "dur": dur}:
                    start_s = float(ts) / 1e6
                    stop_s = start_s + float(dur) / 1e6
                    events.setdefault((pid, tid), []).append(Event(start_s, stop_s, name))
                case _:
                    pass
    except (TypeError, KeyError) as fault:
        raise ValueError(f"is no trace of a step: {fault}") from None
    found: dict[str, tuple[list[WorkerTimeline], list[LinkTimeline]]] = {}
    for (pid, tid), name in threads.items():
        title, _, kind = processes.get(pid, "").rpartition(": ")
        mine = tuple(events.get((pid, tid), ()))
        busy_s = sum(event.stop_s - event.start_s for event in mine)
        workers, links = found.setdefault(title or "simulated", ([], []))
        if kind == "workers":
            workers.append(WorkerTimeline(events=mine, busy_s=busy_s, memory=(), peak_bytes=0.0))
        elif kind == "links" and (between := re.fullmatch(r"(\d+) to (\d+)", name)):
            links.append(LinkTimeline(source=int(between[1]), target=int(between[2]), events=mine, busy_s=busy_s))
    if not any(workers for workers, _ in found.values()):
        raise ValueError("is no trace of a step: it has no workers")
    return {
        title: Timeline(
            makespan_s=max((e.stop_s for part in (*workers, *links) for e in part.events), default=0.0),
            workers=tuple(workers), links=tuple(links),
        )
        for title, (workers, links) in found.items()
    }  # fmt: skip
