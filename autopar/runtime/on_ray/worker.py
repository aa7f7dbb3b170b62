"""What an actor does: `Worker` runs one worker's instructions of a plan on all devices of its process. A worker whose
mesh has devices of several hosts is as many actors, which dispatch the same in the same order.

The step is traced here, from the function and the shapes that the driver ships, and what comes out has to be the plan's
step. Arrays stay here between steps, under numbers that the driver knows.
"""

from __future__ import annotations

import os
import resource
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import numpy as np
import ray
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from ray import cloudpickle

from autopar.arrays import Array, Piece
from autopar.frontend.layering.source import Source
from autopar.ir.errors import CheckpointError, PlanMismatchError
from autopar.ir.plan import OneProgram
from autopar.jax_compat import Device
from autopar.runtime.on_ray.archive import Archive, Read, Snapshot, Wanted
from autopar.runtime.on_ray.compiled import Programs
from autopar.runtime.on_ray.feeder import Feeder
from autopar.runtime.on_ray.group import join, meeting_place
from autopar.runtime.on_ray.messages import (
    Draw,
    Drawn,
    Failed,
    Job,
    Live,
    Loaded,
    Made,
    Make,
    Open,
    Others,
    Rows,
    Step,
    Stepped,
    Tiles,
    unpacked,
)
from autopar.runtime.on_ray.step_part import Here, StepPart, Watch
from autopar.runtime.on_ray.worker_program import WorkerProgram
from autopar.runtime.on_ray.worker_stages import WorkerStages
from autopar.runtime.part import leaf_rows
from autopar.runtime.pieces import array_of, host_of, key_implementation
from autopar.runtime.tracing import Seen, TransferWatch, WorkerWatch
from autopar.runtime.transports import PeerLostError


class Worker:
    """One of a gang: process number ``process`` of a worker that is ``count`` of them. Every method answers `Failed`
    where it raises; `where` may be asked at any time. ``address``, ``settings``: see `Gang`."""

    def __init__(self, process: int, count: int, address: str, settings: Mapping[str, Any]) -> None:
        self._programs = Programs(settings)
        self._process, self._count = process, count
        self._address = address or ray.util.get_node_ip_address()
        self._at: str | StepPart = "idle"
        """What it is doing; while it runs a step, its part of that says it."""
        self._held: dict[int, tuple[Rows, jax.Array | np.ndarray[Any, Any]]] = {}
        """By number; what was drawn is in host memory."""
        self._next = 0
        self._archive = Archive(self._held)
        self._feeder = Feeder(self._held)

    def process(self) -> tuple[int, str]:
        """This process's number, and what else identifies it (`identity`)."""
        return os.getpid(), identity(os.getpid())

    def coordinator(self) -> str:
        """``address:port``, free now, where the processes of the worker meet; "" where it is one process."""
        return meeting_place(self._address) if self._count > 1 else ""

    def join(self, coordinator: str) -> None | Failed:
        """Joins the other processes of the worker."""
        return self._told("joining the other hosts of its mesh", lambda: self._join(coordinator))

    def _join(self, coordinator: str) -> None:
        if self._count > 1:
            join(coordinator, self._count, self._process)

    @ray.method(concurrency_group="where")
    def where(self) -> str:
        """What it is doing, in words."""
        return self._where()

    def _where(self) -> str:
        return self._at if isinstance(self._at, str) else self._at.where()

    def load(self, job: Job) -> Loaded | Failed:
        """Traces the step and compiles this worker's stages."""
        return self._told("tracing and compiling", lambda: self._load(job))

    def connect(self, others: Others) -> None | Failed:
        """Told what it has to know of the others, when all workers are loaded."""
        return self._told("connecting to the others", lambda: self._connect(others))

    def step(self, step: Step) -> Stepped | Failed:
        """Runs a step and waits for its numbers."""
        return self._told("placing arguments", lambda: self._step(step))

    @ray.method(concurrency_group="fetch")
    def fetch(self, numbers: tuple[int, ...]) -> list[np.ndarray[Any, Any] | Tiles] | Failed:
        """Arrays in host memory, for keys their data; of one that is on several hosts this one's part."""
        return self._told("fetching arrays", lambda: [_fetched(self._held[n][1]) for n in numbers], beside=True)

    def make(self, order: Make) -> tuple[Made, ...] | Failed:
        """Makes its part of a state, and keeps it."""
        return self._told("making a state", lambda: self._make(order))

    def shardings(self, numbers: tuple[int, ...]) -> list[jax.sharding.Sharding] | Failed:
        """Shardings of arrays that it keeps, on abstract meshes: those of devices cannot be pickled."""
        return self._told("looking at arrays", lambda: [_abstract(self._held[n][1]) for n in numbers])

    def open(self, order: Open) -> None | Failed:
        """Begins to draw batches."""
        return self._told("beginning to draw batches", lambda: self._feeder.open(order, self._part.signature))

    @ray.method(concurrency_group="draw")
    def draw(self, order: Draw) -> Drawn:
        """Waits for the next batch and keeps it, beside steps."""
        return self._feeder.draw(order)

    @ray.method(concurrency_group="shut")
    def shut(self, loader: int) -> None | Failed:
        """Ends a loader, whatever its source is at."""
        return self._told("ending a loader", lambda: self._feeder.close(loader, wait=True), beside=True)

    def live(self) -> Live | Failed:
        """What its process holds now."""
        return self._told("looking at its memory", self._live)

    def _live(self) -> Live:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        arrays = jax.live_arrays()
        return Live(
            arrays=len(arrays), bytes=sum(x.nbytes for x in arrays), resident_bytes=pages * resource.getpagesize()
        )

    def sent_bytes(self) -> Mapping[str, int]:
        """Address of another process → bytes of values that it has been sent so far."""
        return self._part.sent_bytes

    def boxes(self, numbers: tuple[int, ...]) -> list[Any] | Failed:
        """The boxes that each of these arrays will be written as in a checkpoint."""
        return self._told("looking at arrays", lambda: self._archive.boxes(numbers))

    def snapshot(self, order: Snapshot) -> None | Failed:
        """Fetches what it is to write of a checkpoint to host memory."""
        return self._told("fetching what it saves", lambda: self._archive.snapshot(order))

    @ray.method(concurrency_group="write")
    def write(self, name: str, writer: str, folder: str) -> tuple[str, str]:
        """Writes a snapshot, beside steps. Returns the writer's name, and what went wrong or ""."""
        writer = writer if self._count == 1 else f"{writer}_{self._process}"
        return writer, self._archive.write(name, writer, folder)

    def restore(self, item: str, wanted: tuple[Wanted, ...]) -> tuple[Read, ...] | str | Failed:
        """Reads what its stages want of a checkpoint; a text says what is wrong with that, and the worker lives on."""
        return self._told(f"reading {item}", lambda: self._restore(item, wanted))

    def _restore(self, item: str, wanted: tuple[Wanted, ...]) -> tuple[Read, ...] | str:
        try:
            found = self._archive.restore(item, wanted, self._part)
        except CheckpointError as error:
            self._next += sum(len(w.rows) + len(w.numbers) for w in wanted)  # as in other processes, which read theirs
            return str(error)
        return tuple(
            Read(position=w.position, rows=rows, number=self._hold(w.position, rows, x).number) for w, rows, x in found
        )

    def _told(self, at: str, work: Callable[[], Any], *, beside: bool = False) -> Any:
        """What ``work`` gives, or `Failed`. ``at``: what it is, for `where` too unless it is done beside others."""
        if not beside:
            self._at = at
        try:
            out = work()
        except Exception as error:  # noqa: BLE001 - told to the driver, which raises it
            return Failed(
                summary=f"{type(error).__name__}: {error}", where=at if beside else self._where(),
                trace=traceback.format_exc(), lost=isinstance(error, PeerLostError),
            )  # fmt: skip
        if not beside:
            self._at = "idle"
        return out

    def _load(self, job: Job) -> Loaded:
        started = time.perf_counter()
        self._programs.check()
        devices: dict[int, Device] = {}
        for process, ids in enumerate(job.processes):
            theirs = [d for d in jax.devices() if d.process_index == process]
            if len(theirs) != len(ids):
                raise PlanMismatchError(
                    f"worker {job.worker} is for {len(ids)} devices of the plan ({ids}); its process {process} sees "
                    f"{len(theirs)}: {theirs}"
                )
            devices.update(zip(ids, theirs, strict=True))
        self._local = {d: devices[d] for d in job.processes[self._process]}
        self._worker = job.worker
        here = Here(job=job, devices=devices, local=self._local, address=self._address)
        of: type[WorkerProgram | WorkerStages] = (
            WorkerProgram if isinstance(job.planned.body, OneProgram) else WorkerStages
        )
        source: Source = cloudpickle.loads(job.source)
        part: StepPart = of(source, here, partial(_check, job))
        self._part = part
        return Loaded(
            pid=os.getpid(),
            devices=tuple(map(str, self._local.values())),
            wanted={a: frozenset(rows) for a, rows in part.wanted.items()},
            offered=part.offered,
            seconds=time.perf_counter() - started,
            programs=self._programs.asked,
            cached=self._programs.read,
        )

    def _connect(self, others: Others) -> None:
        self._part.connect(others)

    def _step(self, step: Step) -> Stepped:
        zero_s, clock_s = time.perf_counter(), time.time()
        for loader in step.shut:
            self._feeder.close(loader, wait=False)
        for n in step.dropped:
            self._held.pop(n, None)
        part = self._part
        part.begin(step.number, self._values(step))
        stay = {n for a, numbers in step.held.items() if a not in part.consumed for n in numbers}
        for n in {n for numbers in step.held.values() for n in numbers} - stay:  # several arguments may be one array
            del self._held[n]
        self._at, seen = part, None
        if step.watch is None:
            pieces = part.run(None)
        else:
            worker = WorkerWatch(list(self._local.values()), zero_s, step.watch == "memory", nullcontext())
            watch = Watch(worker=worker, transfers=TransferWatch(zero_s))
            pieces = part.run(watch)
            watch.transfers.close()
            seen = Seen(zero_s=clock_s, worker=worker.timeline(), transfers=tuple(watch.transfers.events))
        self._at = f"waiting for the numbers of worker {self._worker}"
        jax.block_until_ready([piece.array for mine in pieces.values() for piece in mine])
        self._at = "waiting for what it sends to leave"
        part.sent()
        made = tuple(
            self._hold(j, (piece.stage, piece.start, piece.stop), piece.array)
            for j, mine in sorted(pieces.items())
            for piece in mine
        )
        return Stepped(made=made, seen=seen)

    def _values(self, step: Step) -> dict[int, Array]:
        values: dict[int, Array] = {}
        for a in step.given.keys() | step.held.keys():
            t = self._part.signature.types[a]
            pieces = [Piece(*rows, self._put(a, rows, host)) for rows, host in step.given.get(a, {}).items()]
            pieces += [Piece(*rows, x) for rows, x in (self._held[n] for n in step.held.get(a, ()))]
            values[a] = Array(t.shape, pieces[0].array.dtype, tuple(pieces))
        return values

    def _put(self, a: int, rows: Rows, host: np.ndarray[Any, Any]) -> jax.Array | np.ndarray[Any, Any]:
        """Rows that came from the driver, in memory of their own: Ray's is read-only, and a step may donate these. What
        is cut into microbatches stays on the host."""
        t, place = self._part.signature.types[a], self._part.place(a, rows)
        if isinstance(place, SingleDeviceSharding) and key_implementation(t) is None:
            return np.array(host)
        return array_of(t, np.array(host), place)

    def _make(self, order: Make) -> tuple[Made, ...]:
        args, kwargs = unpacked(order.given)
        places = [self._part.place(a, rows) for _, a, rows in order.spots]
        groups: dict[Any, list[int]] = {}  # those that one program can make
        for n, place in enumerate(places):
            devices = place.mesh.devices if isinstance(place, NamedSharding) else None
            on = None if devices is None else tuple(devices.flat)
            groups.setdefault(on, []).append(n)
        out: list[Made] = []
        for mine in groups.values():
            spots = [(i, start, stop) for i, _, (_, start, stop) in (order.spots[n] for n in mine)]
            arrays = leaf_rows(order.function, args, kwargs, spots, [places[n] for n in mine])
            out += [self._hold(order.spots[n][0], order.spots[n][2], x) for n, x in zip(mine, arrays, strict=True)]
        return tuple(out)

    def _hold(self, output: int, rows: Rows, x: jax.Array) -> Made:
        number, self._next = self._next, self._next + 1
        self._held[number] = (rows, x)
        return Made(output=output, rows=rows, number=number)


def _check(job: Job, found: str) -> None:
    """Raises PlanMismatchError unless what was traced is the plan's step."""
    if found != job.planned.fingerprint:
        raise PlanMismatchError(
            f"worker {job.worker} traced another step than the plan's ({found}, in the plan "
            f"{job.planned.fingerprint}): its versions of JAX or of the "
            f"step's libraries differ, or the step depends on something outside it"
        )


def identity(pid: int) -> str:
    """What tells process ``pid`` of this host from all others, also from one with its number later: boot, process
    namespace, number, start. "" where there is no such process."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot, open(f"/proc/{pid}/stat") as file:
            started = file.read().rpartition(")")[2].split()[19]
            return f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')} {pid} {started}"
    except OSError:
        return ""


def _fetched(x: jax.Array | np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | Tiles:
    if isinstance(x, np.ndarray):
        return x
    if x.is_fully_addressable:
        return np.array(host_of(x))
    mine = [shard for shard in x.addressable_shards if shard.replica_id == 0]
    return Tiles(shape=x.shape, tiles=tuple((shard.index, np.array(host_of(shard.data))) for shard in mine))


def _abstract(x: jax.Array | np.ndarray[Any, Any]) -> jax.sharding.Sharding:
    sharding = None if isinstance(x, np.ndarray) else x.sharding
    if not isinstance(sharding, NamedSharding):  # on one device, or none yet
        return NamedSharding(AbstractMesh((1,), ("device",)), PartitionSpec())
    return NamedSharding(AbstractMesh(sharding.mesh.axis_sizes, sharding.mesh.axis_names), sharding.spec)
