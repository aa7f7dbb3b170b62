"""Processes on hosts of this machine (`benchmarks.namespaces`) that bring values over as workers of a pipeline on Ray
do: with the runtime's own crossings, transport and interpreter; in the place of Ray's calls are pipes, in that of tasks
waits of their planned time.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from autopar.inter_op.crossing import cut_resharding
from autopar.inter_op.program.emit import emit
from autopar.ir.cluster import ClusterSpec
from autopar.ir.pipeline import PipelinePlan
from autopar.ir.program import Executable, Program, Run, Send
from autopar.ir.resharding import ReshardingPlan, tile_box
from autopar.runtime.transports.wire import SECRET_BYTES
from benchmarks.namespaces import NetworkHost

ROOT = Path(__file__).parent.parent
START_S = 120.0


Done = tuple[float, int, int]
"""Seconds of a task; or the number of a transfer, else −1, and its microbatch."""


class HostError(Exception):
    """A process failed; the message has what it printed."""


@dataclass(frozen=True, slots=True)
class Place:
    """A process: worker ``worker`` of the pipeline, its ``index``-th of ``count``, with the plan's ``devices``, on a
    host."""

    worker: int
    index: int
    count: int
    devices: tuple[int, ...]
    host: NetworkHost


class Workers:
    """A process for each of ``places``, connected to each other."""

    def __init__(self, places: Sequence[Place], prefix: tuple[str, ...] = ()) -> None:
        self.places = places
        secret = secrets.token_bytes(SECRET_BYTES)
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        self.children: list[subprocess.Popen[bytes]] = []
        try:
            for place in places:
                self.children.append(subprocess.Popen(
                    [*place.host.prefix, *prefix, sys.executable, "-m", "benchmarks.host_workers"], cwd=ROOT,
                    env={**environment, "JAX_NUM_CPU_DEVICES": str(len(place.devices))}, stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, start_new_session=True,
                ))  # fmt: skip
            meet = {p.worker: f"{p.host.address}:{29000 + p.worker}" for p in places if not p.index}
            self.addresses = self.ask("begin", [(place, secret, meet[place.worker]) for place in places])
            peers = {d: a for place, a in zip(places, self.addresses, strict=True) for d in place.devices}
            self.ask("connect", [(peers,)] * len(places))
        except BaseException:
            self.close()
            raise

    def ask(self, method: str, given: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What each process answers. Raises HostError where one fails."""
        for child, arguments in zip(self.children, given, strict=True):
            assert child.stdin is not None
            try:
                pickle.dump((method, arguments), child.stdin)
                child.stdin.flush()
            except BrokenPipeError:
                raise HostError(f"{method}: a process has ended with {child.wait()}") from None
        return [self._answer(method, child) for child in self.children]

    def all(self, method: str, *arguments: Any) -> list[Any]:
        """What each process answers to the same."""
        return self.ask(method, [arguments] * len(self.children))

    def _answer(self, method: str, child: subprocess.Popen[bytes]) -> Any:
        assert child.stdout is not None
        try:
            failed, answer = pickle.load(child.stdout)
        except EOFError:
            raise HostError(f"{method}: a process has ended with {child.wait()}") from None
        if failed:
            raise HostError(f"{method}: {answer}")
        return answer

    def close(self) -> None:
        """Ends all processes."""
        for child in self.children:
            child.kill()
        for child in self.children:
            child.wait()
            for pipe in (child.stdin, child.stdout):
                with contextlib.suppress(OSError):  # what was not sent
                    assert pipe is not None
                    pipe.close()


@contextmanager
def workers(places: Sequence[Place], prefix: tuple[str, ...] = ()) -> Iterator[Workers]:
    """Processes that end with the ``with``."""
    made = Workers(places, prefix)
    try:
        yield made
    finally:
        made.close()


def places_of(meshes: Sequence[Any], hosts: Sequence[NetworkHost]) -> list[Place]:
    """A process for each host of each mesh (`PlacedMesh`), mesh i being worker i's."""
    out: list[Place] = []
    for worker, placed in enumerate(meshes):
        by_host: dict[int, list[int]] = defaultdict(list)
        for device, host in zip(placed.mesh.device_ids, placed.hosts, strict=True):
            by_host[host].append(device)
        for index, (host, devices) in enumerate(sorted(by_host.items())):
            out.append(Place(worker, index, len(by_host), tuple(devices), hosts[host]))
    return out


# --- in the processes ------------------------------------------------------------------------------------------------


class _Waits:
    """Tasks as waits of their time; what they send are numbers made once (`runtime.interpreter.Executables`)."""

    def __init__(self, program: Program, worker: int, sends: Mapping[int, Any]) -> None:
        self._time_s = [e.time_s for e in program.executables]
        self._program = program
        leads = {i.buffer: i.transfer for i in program.workers[worker] if isinstance(i, Send)}
        self._outs = [
            [leads.get(b) for b in i.outs] for i in program.workers[worker] if isinstance(i, Run)
        ]  # fmt: skip
        self._sends, self._at = sends, 0

    def start(self) -> None:
        self._at = 0

    def run(self, executable: Executable, microbatch: int, given: Sequence[Any], gives: int) -> list[Any]:
        time.sleep(executable.time_s)
        self._at += 1
        return [{} if t is None else self._sends[t] for t in self._outs[self._at - 1]]

    def add(self, total: Any, part: Any) -> Any:
        return total


class _Process:
    """What the driver asks for."""

    def begin(self, place: Place, secret: bytes, meet: str) -> str:
        import jax

        from autopar.runtime.on_ray.group import join
        from autopar.runtime.transports.choice import chosen

        if place.count > 1:
            join(meet, place.count, place.index)
        self.place = place
        self.transport = chosen(place.host.address, secret, jax.local_devices())
        self.devices = dict(zip(place.devices, jax.local_devices(), strict=True))
        self.number = 0
        return self.transport.address

    def connect(self, peers: Mapping[int, str]) -> None:
        self.peers = peers

    def _mesh(self, mesh: Any) -> Any:
        """Of JAX, of this process's worker."""
        import jax
        from jax.sharding import Mesh

        return Mesh(np.array(jax.devices()).reshape(mesh.shape), mesh.axis_names)

    # One resharding ------------------------------------------------------------------------------------------------

    def load(self, plan: ReshardingPlan) -> None:
        """Values of the plan's sources, and what this process does for it."""
        from autopar.runtime.crossing import Crossing

        self.plan, self.got = plan, {}
        own = plan.meshes[self.place.worker].mesh
        jax_mesh = self._mesh(own)
        self.crossing = Crossing(plan, range(len(plan.values)), 0, self.devices, self.peers, jax_mesh)
        self.arrays = [
            _source(plan.values[v], v, own, jax_mesh) for v in self.crossing.leaving
        ]  # fmt: skip

    def cross(self) -> float:
        """Brings all over once; returns when that was done, by the clock of the machine."""
        self.number += 1
        coming = self.crossing.fetch(self.transport, self.number, 0)
        self.crossing.offer(self.transport, self.number, 0, self.arrays)
        self.got = dict(zip(self.crossing.arriving, self.crossing.make(coming), strict=True))
        done = time.monotonic()
        self.transport.flush()
        return done

    def check(self) -> bool:
        """Whether what came last is what was sent."""
        for v, x in self.got.items():
            for shard in x.addressable_shards:
                wanted = _contents(self.plan.values[v].type.shape, v, shard.index)
                if not np.array_equal(np.asarray(shard.data), wanted):
                    return False
        return True

    def sent(self) -> dict[str, int]:
        """Payload bytes to each other process so far."""
        return dict(self.transport.sent)

    # A pipeline ----------------------------------------------------------------------------------------------------

    def pipeline(
        self, plan: PipelinePlan, cluster: ClusterSpec, receive_ahead: int, order: Sequence[Sequence[Done]] | None
    ) -> None:
        """Makes ready to run a pipeline's tasks as waits. ``order``: of each worker, where transfers run beside none
        of its tasks."""
        from autopar.runtime.interpreter import Interpreter
        from autopar.runtime.on_ray.between import Between

        program = emit(plan, receive_ahead=receive_ahead, transfers_of=partial(cut_resharding, cluster=cluster))
        worker = self.place.worker
        home = plan.schedule.mesh_of_stage
        meshes = {s: self._mesh(plan.stages[s].mesh) for s, w in enumerate(home) if w == worker}
        sends: dict[int, Any] = {}
        for n, t in enumerate(program.transfers):
            if t.source == worker:
                cut = plan.cuts[t.cut]
                own = plan.stages[cut.source].mesh
                assert t.resharding is not None
                sends[n] = {
                    ("send", v.value, t.cut): _source(t.resharding.values[i], i, own, meshes[cut.source])
                    for i, v in enumerate(cut.values)
                }
        sent = frozenset((n, v.value) for n, cut in enumerate(plan.cuts) for v in cut.values)
        self.between = Between(
            plan, program, worker, meshes, self.devices, self.transport, self.peers, sent, ()
        )  # fmt: skip
        self.peer_of = {
            n: self.peers[plan.stages[home.index(t.target if t.source == worker else t.source)].mesh.device_ids[0]]
            for n, t in enumerate(program.transfers)
        }
        self.order, self.sends = None if order is None else order[worker], sends
        self.waits = _Waits(program, worker, sends)
        self.interpreter = Interpreter(program, worker, self.waits, self.between)
        self.initial = {b: {} for b, x in enumerate(program.buffers) if x.worker == worker and x.initial}

    def step(self) -> float:
        """Runs the pipeline once; returns when that was done."""
        self.number += 1
        self.waits.start()
        self.between.start(self.number)
        if self.order is None:
            self.interpreter.step(self.initial)
        else:
            self._in_turn(self.order)
        done = time.monotonic()
        self.transport.flush()
        return done

    def _in_turn(self, order: Sequence[Done]) -> None:
        """One thing at a time: who sends waits until the other one, a single process, has all."""
        from autopar.runtime.transports import Fetch, Offer

        for task_s, transfer, microbatch in order:
            if transfer < 0:
                time.sleep(task_s)
            elif transfer in self.sends:
                self.between.send(transfer, microbatch, self.sends[transfer])
                note = self._note(transfer, microbatch)
                self.transport.fetch([Fetch(note, self.peer_of[transfer], _Note())]).wait()
            else:
                self.between.expect(transfer, microbatch)
                self.between.receive(transfer, microbatch)
                self.transport.offer([Offer(self._note(transfer, microbatch), self.peer_of[transfer], _Note())])

    def _note(self, transfer: int, microbatch: int) -> int:
        return 1 << 62 | transfer << 40 | (microbatch + 1) << 20 | self.number


class _Note:
    """A message of one byte, at either end."""

    def __init__(self) -> None:
        self.sizes, self.data, self.device = (1,), np.zeros(1, np.uint8), None

    def is_ready(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def read(self, chunk: int) -> np.ndarray[Any, Any]:
        return self.data

    def room(self, chunk: int) -> np.ndarray[Any, Any]:
        return self.data

    def write(self, chunk: int, data: np.ndarray[Any, Any]) -> None:
        self.data[...] = data

    def array(self, chunk: int) -> Any:
        raise NotImplementedError

    def put(self, chunk: int, data: Any) -> None:
        raise NotImplementedError


def _contents(shape: tuple[int, ...], seed: int, index: Any) -> np.ndarray[Any, Any]:
    """Part of what a value holds: the number of each element, mixed."""
    numbers = np.arange(int(np.prod(shape)), dtype=np.uint32).reshape(shape)[index]
    return (numbers * np.uint32(2654435761) + np.uint32(seed)).view(np.int32)


def _source(value: Any, v: int, mesh: Any, jax_mesh: Any) -> Any:
    """A value on its source mesh."""
    import jax
    from jax.sharding import NamedSharding

    from autopar.runtime.partition_specs import partition_spec

    sharding = NamedSharding(jax_mesh, partition_spec(value.src_spec))
    assert tile_box(value.type, value.src_spec, mesh, 0) is not None
    if value.type.dtype == "int32":
        return jax.make_array_from_callback(value.type.shape, sharding, partial(_contents, value.type.shape, v))

    def zeros(index: Any) -> Any:
        return np.zeros([len(range(*s.indices(n))) for s, n in zip(index, value.type.shape, strict=True)], np.int8)

    host = jax.make_array_from_callback(value.type.shape, sharding, zeros)
    return jax.block_until_ready(jax.jit(lambda x: x.astype(value.type.dtype), out_shardings=sharding)(host))


def main() -> None:
    """Answers until its driver is gone."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else writes there
    process, parent = _Process(), os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    while True:
        try:
            method, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = False, getattr(process, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - told to the driver
            import traceback

            answer = True, f"{error}\n{traceback.format_exc()}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
