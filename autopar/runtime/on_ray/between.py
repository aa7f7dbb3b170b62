"""How a worker's arrays get to other processes (`runtime.interpreter.Transport`): those that cross in small pieces over
`transports.wire`, others over `transports.jax_transfer`.

Both ends number the pieces that cross in a step alike (`_Way`), so that neither has to tell the other: a large piece is
offered as edge (number, source device, target device), and the step's number stands for the chunk; a small one is
pushed under both numbers. What is offered may still be computed; a piece travels as a copy of its bytes (`bytes_of`),
so the buffer that it was cut from may be donated or freed at once.

What is fetched is waited for before anything that reads it is dispatched. XLA's CPU client lets 32 programs be in
flight on a device, and who launches one more holds a thread while it waits (`xla::Semaphore::Acquire` in
`ExecuteLaunch`, seen in the stacks of a GPT's workers with 29 values in an exchange). Programs on two devices are
launched by the client's own threads: when all of these wait so, and what is in flight waits for pieces, pieces that
arrive find no thread to run their readers, for good. (jaxlib 0.10.2: so do 60 programs on two devices that read one
pending pull, without autopar.)
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autopar.inter_op.update_rounds import Crossing
from autopar.ir.errors import ReshardingError
from autopar.ir.graph import TensorType
from autopar.ir.pipeline import PipelinePlan
from autopar.ir.program import Program
from autopar.ir.resharding import box_size
from autopar.jax_compat import Device, FromHost
from autopar.runtime.interpreter import Arrays
from autopar.runtime.meshes import crossing_routes, cut_routes
from autopar.runtime.moves import Move, Moves, Route
from autopar.runtime.on_ray.device_bytes import bytes_of, value_of
from autopar.runtime.partition_specs import partition_spec
from autopar.runtime.pieces import data_type, key_implementation
from autopar.runtime.tape import Call, at_once
from autopar.runtime.tracing import TransferWatch
from autopar.runtime.transports import Edge
from autopar.runtime.transports.jax_transfer import ACKNOWLEDGED, CHUNK_BITS, JaxTransfer
from autopar.runtime.transports.wire import SMALL_BYTES, Wire


@dataclass(frozen=True, kw_only=True)
class _Way:
    """A value's way to another process: its pieces have numbers ``first`` up, of each microbatch ``stride`` more.
    ``key``: what the arrays are called at ``source``; ``arrives``: at the target, on stage ``stage``'s mesh."""

    route: Route
    key: Any
    arrives: Any
    source: int
    target: int
    stage: int
    first: int
    stride: int

    def number(self, microbatch: int) -> int:
        """Of the first piece in a microbatch."""
        return self.first + (microbatch + 1) * self.stride

    @cached_property
    def sizes(self) -> list[list[int]]:
        """Bytes of each target's pieces."""
        inner, dtype = data_type(self.route.type)
        of_element = math.prod(inner) * dtype.itemsize
        return [[box_size(piece.box) * of_element for piece in pieces] for pieces in self.route.pieces]

    @cached_property
    def small(self) -> bool:
        """It goes over the wire."""
        return all(size <= SMALL_BYTES for sizes in self.sizes for size in sizes)


class Between:
    """Worker ``worker``'s transfers.

    Args:
        meshes: of this worker, by stage.
        devices: the plan's device id → the device, of this process.
        sent: (cut, value): what stages send of what the plan has in its cuts.
        types: of what crosses in exchanges, by value and source stage.
    """

    def __init__(
        self, plan: PipelinePlan, program: Program, worker: int, meshes: Mapping[int, Mesh],
        devices: Mapping[int, Device], transfer: JaxTransfer, wire: Wire, sent: frozenset[tuple[int, int]],
        crossings: Sequence[Crossing], types: Mapping[tuple[int, int], TensorType],
    ) -> None:  # fmt: skip
        self.worker, self.meshes, self.devices = worker, meshes, devices
        self.transfer, self.wire = transfer, wire
        self.step = 0
        self._mine: Arrays = {}
        """What this worker gave in the exchange that it is in."""
        self._call: Call = at_once
        self.watch: TransferWatch | None = None
        """Of a step that is traced: of small messages it sees when they have left, of others when they have come."""
        self._coming: dict[int, list[list[jax.Array]]] = {}
        """Number of a large value's first piece → what is on its way: of each target its pieces, as bytes."""
        count = 0
        self._cuts: dict[int, list[_Way]] = {}
        """Transfer → what crosses."""
        times = plan.schedule.num_microbatches + 1
        for number, t in enumerate(program.transfers):
            for value, key, route in cut_routes(plan, t.cut):
                if (t.cut, value) not in sent:
                    continue
                size = sum(map(len, route.pieces))
                way = _Way(
                    route=route, key=("send", value, t.cut), arrives=key, source=t.source, target=t.target,
                    stage=plan.cuts[t.cut].target, first=count, stride=size,
                )  # fmt: skip
                self._cuts.setdefault(number, []).append(way)
                count += size * times
        self._exchanges: dict[int, list[_Way]] = {}
        """Round → what crosses."""
        for (after, target), rows in sorted(crossing_routes(plan, crossings, types).items()):
            for key, source, stage, route in rows:
                way = _Way(
                    route=route, key=key, arrives=key, source=source, target=target, stage=stage, first=count, stride=0
                )
                self._exchanges.setdefault(after, []).append(way)
                count += sum(map(len, route.pieces))

    def start(self, step: int, call: Call = at_once) -> None:
        """Called before step number ``step``, or before steps are noted: forgets what an earlier one expected. ``call``
        dispatches, or notes what is to be."""
        self.step, self._call = step % ACKNOWLEDGED, call
        self._coming.clear()

    def send(self, transfer: int, microbatch: int, arrays: Arrays) -> None:
        """See `Transport.send`."""
        start_s = time.perf_counter()
        for way in self._cuts.get(transfer, ()):
            self._call(self._offered(way, way.number(microbatch)), [arrays[way.key]], 0)
        if self.watch is not None:
            self.watch.begun(transfer, microbatch, start_s, ())

    def expect(self, transfer: int, microbatch: int) -> None:
        """See `Transport.expect`."""
        coming = [(way, way.number(microbatch)) for way in self._cuts.get(transfer, ()) if not way.small]
        start_s = time.perf_counter()
        self._expected(coming)
        if self.watch is not None and coming:
            self.watch.begun(transfer, microbatch, start_s, [self._coming[number] for _, number in coming])

    def receive(self, transfer: int, microbatch: int) -> Arrays:
        """See `Transport.receive`."""
        return self._taken([(way, way.number(microbatch)) for way in self._cuts.get(transfer, ())])

    def arrived(self, transfer: int, microbatch: int) -> bool:
        """See `Transport.arrived`: others have processes of their own."""
        return True

    def give(self, group: int, number: int, worker: int, arrays: Arrays) -> None:
        """See `Transport.give`."""
        self._mine = arrays
        for way in self._exchanges.get(number, ()):
            if way.source == worker != way.target:
                self._call(self._offered(way, way.first), [arrays[way.key]], 0)

    def given(self, group: int, number: int, worker: int) -> bool:
        """See `Transport.given`."""
        return True

    def taken(self, group: int, number: int, worker: int) -> Arrays:
        """See `Transport.taken`; what this worker gave itself moves inside the process."""
        mine = [way for way in self._exchanges.get(number, ()) if way.target == worker]
        inside = [way for way in mine if way.source == worker]
        moves = Moves([Move(way.route, self.devices, self.meshes[way.stage]) for way in inside])
        moved = self._call(moves, [self._mine[way.key] for way in inside], len(inside)) if inside else ()
        self._mine = {}
        others = [(way, way.first) for way in mine if way.source != worker]
        self._expected(others)
        return dict(zip([way.arrives for way in inside], moved, strict=True)) | self._taken(others)

    def _expected(self, coming: Sequence[tuple[_Way, int]]) -> None:
        """Asks for the large ones; small ones are pushed."""
        for way, number in coming:
            if not way.small:
                self._call(partial(self._pull, way, number), (), 0)

    def _taken(self, coming: Sequence[tuple[_Way, int]]) -> Arrays:
        """Values made of the bytes of their pieces, which it waits for."""
        out: Arrays = {}
        for way, number in coming:
            make = _OfHost(way, number, self) if way.small else partial(self._of_device, way, number)
            [out[way.arrives]] = self._call(make, (), 1)
        return out

    def _offered(self, way: _Way, number: int) -> Callable[[jax.Array], tuple[()]]:
        return _ToHost(way, number, self) if way.small else partial(self._offer, way, number)

    def _offer(self, way: _Way, number: int, x: jax.Array) -> tuple[()]:
        route = way.route
        done: dict[int, jax.Array] = {}
        for i, cuts in enumerate(route.cut(x, self.devices)):
            for number_, (piece, data) in enumerate(zip(route.pieces[i], cuts, strict=True), number):
                if data is None:
                    continue
                if id(data) not in done:
                    done[id(data)] = bytes_of(data)
                edge = Edge(number_, route.sources[piece.source], route.targets[i])
                self.transfer.offer(edge, self.step, done[id(data)])
            number += len(cuts)
        return ()

    def _pull(self, way: _Way, number: int) -> tuple[()]:
        """Of each target of this process its pieces, which are on their way; of others nothing."""
        route, first = way.route, number
        coming: list[list[jax.Array]] = []
        for target, pieces, sizes in zip(route.targets, route.pieces, way.sizes, strict=True):
            arrived: list[jax.Array] = []
            for number_, (piece, size) in enumerate(zip(pieces, sizes, strict=True), number):
                if target in self.devices:
                    edge = Edge(number_, route.sources[piece.source], target)
                    arrived.append(self.transfer.fetch(edge, self.step, size))
            number += len(pieces)
            coming.append(arrived)
        self._coming[first] = coming
        return ()

    def _of_device(self, way: _Way, number: int) -> list[jax.Array]:
        """A value of the bytes of large pieces."""
        route, implementation = way.route, key_implementation(way.route.type)
        inner, dtype = data_type(route.type)
        try:
            coming = jax.block_until_ready(self._coming.pop(number))
        except jax.errors.JaxRuntimeError as error:
            raise ReshardingError(f"what worker {way.source} sent did not come: {error}") from error
        tiles: list[jax.Array] = []
        for i, (pieces, arrived) in enumerate(zip(route.pieces, coming, strict=True)):
            if arrived:  # else it is another process's
                shapes = [(*(b - a for a, b in piece.box), *inner) for piece in pieces]
                parts = [value_of(x, s, str(dtype), implementation) for x, s in zip(arrived, shapes, strict=True)]
                tiles.append(route.tile(i, parts))
        return [route.array(tiles, self.meshes[way.stage])]


class _ToHost:
    """Pushes the pieces of a value as messages ``number`` up."""

    def __init__(self, way: _Way, number: int, between: Between) -> None:
        self._between, self._route = between, way.route
        self._alone = len(way.route.sources) == 1 and all(p.box == p.tile for mine in way.route.pieces for p in mine)
        numbers = itertools.count(number)
        self._messages = [
            [(device, next(numbers) << CHUNK_BITS) for _ in pieces]
            for device, pieces in zip(way.route.targets, way.route.pieces, strict=True)
        ]
        """Of each target the pieces."""

    def __call__(self, x: jax.Array) -> tuple[()]:
        push, step = self._between.wire.push, self._between.step
        numbers = jax.random.key_data if self._route.keys else _same
        if self._alone:
            data = numbers(x)
            for [(device, message)] in self._messages:
                push(device, message | step, data)
            return ()
        for cuts, messages in zip(self._route.cut(x, self._between.devices), self._messages, strict=True):
            for data, (device, message) in zip(cuts, messages, strict=True):
                if data is not None:
                    push(device, message | step, numbers(data))
        return ()


class _OfHost:
    """Makes a value of messages ``number`` up."""

    def __init__(self, way: _Way, number: int, between: Between) -> None:
        route = way.route
        self._between, self._route = between, route
        inner, self._dtype = data_type(route.type)
        self._implementation = key_implementation(route.type)
        self._targets: list[tuple[int, list[tuple[int, tuple[int, ...]]]]] = []
        """Those of this process; of each the pieces' messages and shapes."""
        devices: list[Device] = []
        for i, (target, pieces) in enumerate(zip(route.targets, route.pieces, strict=True)):
            shapes = [(*(b - a for a, b in piece.box), *inner) for piece in pieces]
            if target in between.devices:
                mine = [(n << CHUNK_BITS, shape) for n, shape in enumerate(shapes, number)]
                self._targets.append((i, mine))
                devices.append(between.devices[target])
            number += len(pieces)
        sharding = NamedSharding(between.meshes[way.stage], partition_spec(route.spec))
        self._put = FromHost((*route.type.shape, *inner), self._dtype, sharding, devices)

    def __call__(self) -> list[jax.Array]:
        take, step = self._between.wire.take, self._between.step
        tiles: list[np.ndarray[Any, Any]] = []
        for i, messages in self._targets:
            parts = [take(message | step).view(self._dtype).reshape(shape) for message, shape in messages]
            tiles.append(parts[0] if len(parts) == 1 else _tile(self._route, i, parts))
        out = self._put(tiles)
        return [out if self._implementation is None else jax.random.wrap_key_data(out, impl=self._implementation)]


def _same(x: jax.Array) -> jax.Array:
    return x


def _tile(route: Route, target: int, parts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """`Route.tile` in host memory."""
    box, first = route.boxes[target], parts[0]
    out = np.empty((*(b - a for a, b in box), *first.shape[len(box) :]), first.dtype)
    for piece, part in zip(route.pieces[target], parts, strict=True):
        out[tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(piece.box, box, strict=True))] = part
    return out
