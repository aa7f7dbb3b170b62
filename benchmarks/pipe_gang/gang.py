"""The driver of worker processes that reshard together: starts them, ships plans and tiles, and watches over them.

Each message goes to all workers at once, and each has to be answered within a deadline. A worker that dies, fails or
does not answer (its host stalls, its link is cut, it waits for another that does) ends the gang: the driver kills its
processes, reaps them and raises. Nothing is repaired: whoever drives restores from what it has and starts a new gang.
The watchdog is here because transfers between processes have no deadline of their own (`transports/jax_transfer.py`).
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from autopar.ir.errors import ReshardingError, ReshardingTimeoutError
from autopar.ir.resharding import ReshardingPlan
from autopar.resharding.emit import emit
from autopar.runtime.resharding_interpreter import TileKey
from benchmarks.pipe_gang.messages import Collect, Done, Failed, Load, Message, Put, Run, Start

_ROOT = str(Path(__file__).parents[2])
"""Where workers find the package that the driver runs."""
START_DEADLINE_S = 120.0
"""For processes to start, import JAX and listen (chosen; about 2 s on an idle machine)."""
DATA_DEADLINE_S = 120.0
"""For tiles to be shipped to the workers or collected (chosen)."""
CAUSE_S = 0.5
"""When one worker reports an error, how long the driver looks whether another died and is its cause (chosen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One worker: the plan's ``devices`` that it has, the ``address`` it listens at and is reached at (for tests
    loopback: whoever reaches it may pull tiles), and a command that starts it, ``ip netns exec NAME`` say."""

    devices: tuple[int, ...]
    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()


KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "NUMPY_MADVISE_HUGEPAGE": "0"}
"""Workers' environment, where the driver's says nothing else: glibc keeps freed memory, and the tiles of a run get that
of an earlier one. Fresh pages cost 4 to 6 µs per 4 KB here, half of all CPU time of a run, and huge ones up to a second
when the kernel compacts memory for them (measured: decision 014)."""


class _Gone(NamedTuple):
    """The connection to a worker broke."""


class Gang:
    """Worker processes, one for each of ``hosts``; use it in a ``with``, which ends them.

    Raises:
        ReshardingError: a process could not be started or a device is given twice.
        ReshardingTimeoutError: one was not ready after ``deadline_s``.
    """

    def __init__(self, hosts: Sequence[Host], *, deadline_s: float = START_DEADLINE_S) -> None:
        devices = [d for host in hosts for d in host.devices]
        if len(set(devices)) < len(devices) or not devices:
            raise ReshardingError(f"hosts share a device, or have none: {devices}")
        self._hosts = tuple(hosts)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._threads: list[threading.Thread] = []
        self._plan: ReshardingPlan | None = None
        self._closed = False
        try:
            for host in hosts:
                self._start(host)
            starts = [Start(devices=host.devices, address=host.address) for host in hosts]
            addresses = self._ask(starts, deadline_s)
        except BaseException:
            self.close()
            raise
        self._peers = {d: a for host, a in zip(hosts, addresses, strict=True) for d in host.devices}

    @property
    def pids(self) -> tuple[int, ...]:
        """The workers' processes, in the order of the hosts."""
        return tuple(process.pid for process in self._processes)

    def __enter__(self) -> Gang:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load(self, plan: ReshardingPlan, *, deadline_s: float = DATA_DEADLINE_S) -> None:
        """Ships each worker the plan and its instructions, once for any number of runs. Raises as `run`, and
        ReshardingError where no worker has a device of the plan."""
        missing = [d for mesh in plan.meshes for d in mesh.mesh.device_ids if d not in self._peers]
        if missing:
            raise ReshardingError(f"no worker has devices {missing} of the plan; there are {sorted(self._peers)}")
        todo = emit(plan)
        self._ask(
            [
                Load(plan=plan, instructions={d: todo[d] for d in host.devices if d in todo}, peers=self._peers)
                for host in self._hosts
            ],
            deadline_s,
        )
        self._plan = plan

    def put(self, tiles: Mapping[TileKey, np.ndarray[Any, Any]], *, deadline_s: float = DATA_DEADLINE_S) -> None:
        """Ships source tiles, (value, device) → host memory (keys as their data), to the workers. Raises as `run`."""
        self._ask(
            [Put(tiles={(v, d): t for (v, d), t in tiles.items() if d in host.devices}) for host in self._hosts],
            deadline_s,
        )

    def run(self, *, deadline_s: float) -> float:
        """Runs the plan once, which leaves the tiles of the last run behind. Returns the seconds that it took.

        Raises:
            ReshardingError: a worker died, or failed; the message says which one and why. The gang is closed.
            ReshardingTimeoutError: workers did not answer within ``deadline_s``; the message says which ones. The gang
                is closed.
        """
        started = time.perf_counter()
        self._ask([Run(deadline_s=2 * deadline_s)] * len(self._hosts), deadline_s)  # this side's watchdog comes first
        return time.perf_counter() - started

    def collect(self, *, deadline_s: float = DATA_DEADLINE_S) -> dict[TileKey, np.ndarray[Any, Any]]:
        """(value, device) → the tile that arrived there, in host memory. Raises as `run`."""
        return _merged(self._ask([Collect(digests=False)] * len(self._hosts), deadline_s))

    def digests(self, *, deadline_s: float = DATA_DEADLINE_S) -> dict[TileKey, str]:
        """(value, device) → the SHA-256 of the tile that arrived there (`pieces.digest`). Raises as `run`."""
        return _merged(self._ask([Collect(digests=True)] * len(self._hosts), deadline_s))

    def close(self) -> None:
        """Kills the workers and waits until they have ended; does nothing the second time."""
        self._closed = True
        for process in self._processes:
            _kill(process)
        for process in self._processes:
            process.wait()
        for thread in self._threads:  # their connections are broken now
            thread.join()
        for connection in self._connections:
            connection.close()

    def _start(self, host: Host) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._connections.append(Connection(ours.detach()))
            environment = {
                **KEEP_MEMORY,
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": str(len(host.devices)),
                "PYTHONPATH": os.pathsep.join(p for p in (_ROOT, os.environ.get("PYTHONPATH", "")) if p),
            }
            command = [*host.prefix, sys.executable, "-m", "benchmarks.pipe_gang.worker", str(theirs.fileno())]
            try:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,  # an interrupt at the terminal is the driver's alone
                    )
                )
            except OSError as error:
                raise ReshardingError(f"{' '.join(command)}: could not be started: {error}") from error

    def _ask(self, messages: Sequence[Message], deadline_s: float) -> list[Any]:
        """Sends each worker its message and returns their answers."""
        if self._closed:
            raise ReshardingError("the gang was closed, or ended by a failure; start another one")
        replies: queue.SimpleQueue[tuple[int, Done | Failed | _Gone]] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_ask_one, args=(i, self._connections[i], message, replies), daemon=True)
            for i, message in enumerate(messages)
        ]
        stop_s = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.start()
        answers: dict[int, Any] = {}
        try:
            while len(answers) < len(messages):
                try:
                    index, reply = replies.get(timeout=max(0.0, stop_s - time.monotonic()))
                except queue.Empty:
                    silent = [self._name(i) for i in range(len(messages)) if i not in answers]
                    raise ReshardingTimeoutError(
                        f"{type(messages[0]).__name__.lower()}: no answer from {', '.join(silent)} within "
                        f"{deadline_s:g} s; one of their hosts or links stalls, or the deadline is too short"
                    ) from None
                if not isinstance(reply, Done):
                    raise self._error(index, reply, replies)
                answers[index] = reply.value
        except BaseException:
            self.close()
            raise
        return [answers[i] for i in range(len(messages))]

    def _error(self, index: int, reply: Failed | _Gone, replies: queue.SimpleQueue[Any]) -> ReshardingError:
        """The error for a worker's failure; if another one died, that is the cause."""
        stop_s = time.monotonic() + CAUSE_S
        failed = reply
        while not isinstance(reply, _Gone):
            try:
                other, reply = replies.get(timeout=max(0.0, stop_s - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(reply, _Gone):
                index = other
        if isinstance(reply, _Gone):
            _kill(self._processes[index])  # whatever broke its connection: its exit status is known after this
            code = self._processes[index].wait()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
            return ReshardingError(f"{self._name(index)} died {how}; start another gang from what was saved")
        assert isinstance(failed, Failed)
        error = ReshardingError(f"{self._name(index)} failed: {failed.summary}")
        error.add_note(failed.trace)
        return error

    def _name(self, index: int) -> str:
        host = self._hosts[index]
        return f"worker {index} (process {self._processes[index].pid}, {host.address}, devices {list(host.devices)})"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a worker, and its prefix where that has started it as another process of its session."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _ask_one(index: int, connection: Connection, message: Message, replies: queue.SimpleQueue[Any]) -> None:
    try:
        connection.send(message)
        replies.put((index, connection.recv()))
    except (OSError, EOFError):
        replies.put((index, _Gone()))
    except Exception as error:  # noqa: BLE001 - what cannot be pickled, say: raised by the thread that asked
        replies.put((index, Failed(summary=f"{type(error).__name__}: {error}", trace=traceback.format_exc())))


def _merged(parts: Sequence[Mapping[TileKey, Any]]) -> dict[TileKey, Any]:
    return {key: value for part in parts for key, value in part.items()}
