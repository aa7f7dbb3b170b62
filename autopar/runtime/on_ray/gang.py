"""The actors of one step: messages to all of them at once, each to be answered within a deadline.

A worker whose mesh lies on several hosts is as many processes, an actor each, which are told the same and join a
`jax.distributed` group of their own.

An actor that dies, fails or does not answer ends the gang: all are killed and reaped by Ray, and `WorkerError` says
which one it was, where it was and why. Nothing is repaired. The watchdog is here, in the driver, as transfers between
workers have no deadline of their own: it knows a worker that is slow, which says where it is, from one that stalls.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autopar.ir.errors import WorkerError
from autopar.runtime.on_ray.live_nodes import silent_nodes
from autopar.runtime.on_ray.messages import Failed
from autopar.runtime.on_ray.process import Process, lacks_kind, no_room
from autopar.runtime.on_ray.worker import Worker, identity

START_S = 180.0
"""For actors' processes to start (chosen; 3 s on an idle machine, more than 60 on a busy one)."""
ROOM_S = 60.0
"""For the cluster to have room for the actors (chosen)."""
CAUSE_S = 0.5
"""When one worker reports an error, how long the driver looks whether another died and is its cause (chosen)."""
LOST_S = 10.0
"""The same where it has lost another: Ray may be slower to notice that than a connection is (chosen)."""
LOOK_S = 0.2
"""So often the driver looks whether a worker failed while it waits for all: asking for one answer after the other takes
longer than small steps do (chosen)."""
ASK_S = 1.0
"""For a worker to say where it is (chosen)."""
PULSE_S, SILENT_S = 5.0, 60.0
"""So often one that is waited for is asked that; one that does not answer for so long stalls, whatever the deadline of
what it does (chosen: longer than any one call keeps a worker's Python from running)."""
BESIDE = {"draw": 4, "shut": 1, "fetch": 1, "write": 2, "where": 1}
"""Threads of an actor's own for what it does beside its work: so many loaders of it are waited for at once, and so many
checkpoints written (chosen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Calls of ``method`` under way: ``waiting``: reference of the answer → index of the actor."""

    method: str
    waiting: Mapping[Any, int]


class Gang:
    """Actors, spread over the hosts.

    It ends when it is closed, and when nobody has it any more: neither a step nor arrays of it.

    Args:
        processes: of each worker.
        settings: JAX's, for all of them.
        environment: variables beside those of `Process`.
        address: where they are reached; "": at their node's address.

    Raises:
        ClusterError: the cluster has no room for them, or no node with such devices.
        WorkerError: one did not start.
    """

    def __init__(
        self, processes: Sequence[Sequence[Process]], settings: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None, address: str = "",
    ) -> None:  # fmt: skip
        self.closed = False
        self.cause = ""
        """Why it was closed, where something failed."""
        self._sending = threading.Lock()
        """All are told in the same order, whichever threads ask."""
        self.workers = len(processes)
        self._members = [(w, p) for w, mine in enumerate(processes) for p in range(len(mine))]
        self.pids: list[int] = []
        self._identities: list[str] = []
        self._actors: list[Any] = []
        flat = [process for mine in processes for process in mine]
        if lacks_kind(flat, total := ray.cluster_resources()):
            raise no_room(flat, total, {}, 0.0)
        silent = silent_nodes()
        elsewhere = {"ray.io/node-id": f"!in({','.join(silent)})"} if silent else {}
        self._group = placement_group(
            [process.bundle for process in flat], strategy="SPREAD", bundle_label_selector=[elsewhere] * len(flat)
        )
        # in a thread of its own: a finalizer may run in one of Ray's, which does not wait for its own answer
        end = threading.Thread(target=remove_placement_group, args=(self._group,), daemon=True)
        self._drop = weakref.finalize(self, end.start)
        self._drop.atexit = False
        try:
            if not self._group.wait(ROOM_S):
                raise no_room(flat, ray.cluster_resources(), ray.available_resources(), ROOM_S)
            # one thread works: in the order in which it was told
            alone = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 1, "concurrency_groups": BESIDE}
            actor: Any = ray.remote(**alone)(Worker)  # pyright: ignore[reportCallIssue] - its types lack the groups
            for i, ((w, p), process) in enumerate(zip(self._members, flat, strict=True)):
                variables = {**(environment or {}), **process.variables}
                where = PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=i)
                options = actor.options(
                    **process.options, scheduling_strategy=where, runtime_env={"env_vars": variables}
                )
                self._actors.append(options.remote(p, len(processes[w]), address, settings or {}))
            found = [x for mine in self.ask_all("process", [()] * self.workers, START_S) for x in mine]
            self.pids, self._identities = [pid for pid, _ in found], [of for _, of in found]
            if len(self._members) > self.workers:
                meet = self.ask("coordinator", [()] * self.workers, START_S)
                self.ask("join", [(where,) for where in meet], START_S)
        except BaseException:
            self.close()
            raise

    def ask(
        self, method: str, messages: Sequence[tuple[Any, ...]], deadline_s: float, *, late_ends: bool = True
    ) -> list[Any]:
        """Calls each worker's ``method``; returns what the first process of each answers, when all have.

        Args:
            messages: arguments for each worker.
            deadline_s: for all answers, in seconds.
            late_ends: True: one that does not answer by the deadline ends the gang.

        Raises:
            WorkerError: a worker died, failed or was late, or the gang has ended.
        """
        return [answers[0] for answers in self.ask_all(method, messages, deadline_s, late_ends=late_ends)]

    def ask_all(
        self, method: str, messages: Sequence[tuple[Any, ...]], deadline_s: float, *, late_ends: bool = True
    ) -> list[list[Any]]:
        """As `ask`, with what all processes of each worker answer."""
        return self.collect(self.send(method, messages), deadline_s, late_ends=late_ends)

    def send(self, method: str, messages: Sequence[tuple[Any, ...] | None]) -> Calls:
        """Calls each worker's ``method`` and does not wait; those whose message is None are left out. Raises
        WorkerError where the gang has ended."""
        if self.closed:
            why = f"were ended: {self.cause}" if self.cause else "were shut down"
            raise WorkerError(
                f"the workers {why}; make the state again: step.init, or autopar.restore into step.abstract(…)"
            )
        assert len(messages) == self.workers
        waiting: dict[Any, int] = {}
        try:
            with self._sending:
                for i, (actor, (w, _)) in enumerate(zip(self._actors, self._members, strict=True)):
                    if (message := messages[w]) is not None:
                        waiting[getattr(actor, method).remote(*message)] = i
        except BaseException as error:
            if waiting or not isinstance(error, Exception):  # some have been told, and some have not
                self._end(error)
            raise
        return Calls(method=method, waiting=waiting)

    def collect(self, calls: Calls, deadline_s: float, *, late_ends: bool = True) -> list[list[Any]]:
        """The answers of all processes of each worker, as `ask` waits for them; none for workers that were not called.
        Raises WorkerError as `ask`."""
        method, waiting = calls.method, dict(calls.waiting)
        began_s = time.monotonic()
        stop_s, pulse = began_s + deadline_s, _Pulse(self._actors, began_s)
        answers: dict[int, Any] = {}
        late: WorkerError | None = None
        try:
            while waiting:
                left = max(0.0, stop_s - time.monotonic())
                done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=min(left, LOOK_S))
                if not done and left <= LOOK_S:
                    late = self._late(method, sorted(waiting.values()), deadline_s)
                    raise late
                if self.pids and (silent := pulse.silent(sorted(waiting.values()))):
                    late = self._late(method, silent, round(time.monotonic() - began_s))
                    raise late
                for call in done:
                    index = waiting.pop(call)
                    answer = self._answer(call)
                    if isinstance(answer, Failed | BaseException):
                        raise self._error(method, index, answer, waiting)
                    answers[index] = answer
        except BaseException as error:
            if late_ends or error is not late:
                self._end(error)
            raise
        of_worker = [[i for i, (of, _) in enumerate(self._members) if of == w] for w in range(self.workers)]
        return [[answers[i] for i in mine if i in answers] for mine in of_worker]

    def name(self, worker: int, process: int) -> str:
        """How errors name a worker's process."""
        return self._name(self._members.index((worker, process)))

    def _answer(self, call: Any) -> Any:
        try:
            return ray.get(call)
        except RayError as error:
            return error

    def _error(self, method: str, index: int, answer: Failed | BaseException, waiting: dict[Any, int]) -> WorkerError:
        """The error for a worker's failure; if another one died, or failed while this one only lost it, that is the
        cause; where another thread has ended the gang meanwhile, what it did that for."""
        stop_s = time.monotonic() + (LOST_S if isinstance(answer, Failed) and answer.lost else CAUSE_S)
        while not isinstance(answer, RayActorError) and waiting:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, stop_s - time.monotonic()))
            if not done:
                break
            other, found = waiting.pop(done[0]), self._answer(done[0])
            lost = isinstance(answer, Failed) and answer.lost
            if isinstance(found, RayActorError) or (lost and isinstance(found, Failed) and not found.lost):
                index, answer = other, found
                stop_s = min(stop_s, time.monotonic() + CAUSE_S)
        if isinstance(answer, RayActorError) and (first := self._members.index((self._members[index][0], 0))) != index:
            # the first process of a mesh is where its others meet: they end when they lose it, not the other way round
            done, _ = ray.wait([call := self._actors[first].where.remote()], timeout=CAUSE_S)
            if done and isinstance(found := self._answer(call), RayActorError):
                index, answer = first, found
        name = self._name(index)
        if isinstance(answer, RayActorError):
            if self.closed and self.cause:  # who is asked for did not die by itself
                return WorkerError(f"{method}: the workers were ended: {self.cause}")
            return WorkerError(f"{method}: {name} died; start again from what was saved. Ray says: {answer}")
        if isinstance(answer, Failed):
            error = WorkerError(f"{method}: {name} failed at {answer.where}: {answer.summary}")
            error.add_note(answer.trace)
            return error
        return WorkerError(f"{method}: {name}: {answer}")

    def _late(self, method: str, silent: Sequence[int], deadline_s: float) -> WorkerError:
        """The error for workers that have not answered; asks them where they are."""
        calls = {i: self._actors[i].where.remote() for i in silent}
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=ASK_S)
        places: list[str] = []
        for i, call in calls.items():
            done, _ = ray.wait([call], timeout=0)
            answer = self._answer(call) if done else None
            stalled = "does not answer at all: its process stalls, or its host cannot be reached"
            places.append(f"{self._name(i)} {f'is at {answer}' if isinstance(answer, str) else stalled}")
        return WorkerError(f"{method}: not done within {deadline_s:g} s: {'; '.join(places)}")

    def _name(self, index: int) -> str:
        worker, process = self._members[index]
        several = sum(w == worker for w, _ in self._members) > 1
        name = f"worker {worker}" + (f", host {process} of its mesh" if several else "")
        return f"{name} (process {self.pids[index]})" if self.pids else name

    def _end(self, error: BaseException) -> None:
        """Closes it for a reason, the first one."""
        self.cause = self.cause or str(error) or type(error).__name__
        self.close()

    def close(self) -> None:
        """Kills the actors; does nothing the second time."""
        self._drop.detach()
        before, self.closed = self.closed, True
        if before or not ray.is_initialized():
            return
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor, no_restart=True)
        for pid in self._local():  # one that is stopped does not heed Ray
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(RayError):
            remove_placement_group(self._group)

    def _local(self) -> list[int]:
        """Processes of actors on this host that still are what was started."""
        return [pid for pid, of in zip(self.pids, self._identities, strict=True) if of and identity(pid) == of]


class _Pulse:
    """Which of ``actors`` that are waited for since ``began_s`` have stalled."""

    def __init__(self, actors: Sequence[Any], began_s: float) -> None:
        self._actors, self._next_s = actors, began_s + PULSE_S
        self._asked: dict[int, tuple[Any, float]] = {}

    def silent(self, waiting: Sequence[int]) -> list[int]:
        """Those of ``waiting`` that have not said for `SILENT_S` where they are."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return []
        self._next_s = now_s + PULSE_S
        for i in waiting:
            if i not in self._asked or ray.wait([self._asked[i][0]], timeout=0)[0]:
                self._asked[i] = self._actors[i].where.remote(), now_s
        return [i for i in waiting if now_s - self._asked[i][1] > SILENT_S]
