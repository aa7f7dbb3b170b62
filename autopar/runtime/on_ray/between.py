"""How a worker's arrays get to other processes (`runtime.interpreter.Transport`): those that cross in small pieces over
`transports.wire`, others over `transports.jax_transfer`.

Both ends number the pieces that cross in a step alike (`_Way`), so that neither has to tell the other: a large piece is
offered as edge (number, source device, target device), and the step's number stands for the chunk; a small one is
pushed under both numbers. What is offered may still be computed; a piece travels as a copy of its bytes (`_bytes_of`),
so the buffer that it was cut from may be donated or freed at once.

What is fetched is waited for before anything that reads it is dispatched. XLA's CPU client lets 32 programs be in
flight on a device, and who launches one more holds a thread while it waits (`xla::Semaphore::Acquire` in
`ExecuteLaunch`, seen in the stacks of a GPT's workers with 29 values in an exchange). Programs on two devices are
launched by the client's own threads: when all of these wait so, and what is in flight waits for pieces, pieces that
arrive find no thread to run their readers, for good. (jaxlib 0.10.2: so do 60 programs on two devices that read one
pending pull, without autopar.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from autopar.inter_op.update_rounds import Crossing
from autopar.ir.errors import ReshardingError
from autopar.ir.graph import TensorType
from autopar.ir.pipeline import PipelinePlan
from autopar.ir.program import Program
from autopar.ir.resharding import box_size
from autopar.jax_compat import from_host
from autopar.runtime.interpreter import Arrays
from autopar.runtime.meshes import crossing_routes, cut_routes
from autopar.runtime.moves import Move, Route
from autopar.runtime.pieces import data_type, key_implementation
from autopar.runtime.transports import Edge
from autopar.runtime.transports.jax_transfer import ACKNOWLEDGED, CHUNK_BITS, JaxTransfer
from autopar.runtime.transports.wire import SMALL_BYTES, Wire
from autopar.step_plan import partition_spec


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


_Coming: TypeAlias = jax.Array | int
"""Bytes of a large piece; the number of a small one's message."""


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
        devices: Mapping[int, jax.Device], transfer: JaxTransfer, wire: Wire, sent: frozenset[tuple[int, int]],
        crossings: Sequence[Crossing], types: Mapping[tuple[int, int], TensorType],
    ) -> None:  # fmt: skip
        self.worker, self.meshes, self.devices = worker, meshes, devices
        self.transfer, self.wire = transfer, wire
        self.step = 0
        self._mine: Arrays = {}
        """What this worker gave in the exchange that it is in."""
        self._coming: dict[tuple[int, int], list[tuple[_Way, list[list[_Coming]]]]] = {}
        """(transfer, microbatch) → what is on its way, of each target of a value its pieces."""
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

    def start(self, step: int) -> None:
        """Before step number ``step``."""
        self.step = step % ACKNOWLEDGED
        self._coming.clear()

    def send(self, transfer: int, microbatch: int, arrays: Arrays) -> None:
        """See `Transport.send`."""
        for way in self._cuts.get(transfer, ()):
            self._offer(way, way.first + (microbatch + 1) * way.stride, arrays[way.key])

    def expect(self, transfer: int, microbatch: int) -> None:
        """See `Transport.expect`."""
        ways = self._cuts.get(transfer, ())
        wanted = [(way, way.first + (microbatch + 1) * way.stride) for way in ways]
        self._coming[transfer, microbatch] = [(way, self._pull(way, number)) for way, number in wanted]

    def receive(self, transfer: int, microbatch: int) -> Arrays:
        """See `Transport.receive`."""
        return self._arrived(self._coming.pop((transfer, microbatch)))

    def arrived(self, transfer: int, microbatch: int) -> bool:
        """See `Transport.arrived`: others have processes of their own."""
        return True

    def give(self, group: int, number: int, worker: int, arrays: Arrays) -> None:
        """See `Transport.give`."""
        self._mine = arrays
        for way in self._exchanges.get(number, ()):
            if way.source == worker != way.target:
                self._offer(way, way.first, arrays[way.key])

    def given(self, group: int, number: int, worker: int) -> bool:
        """See `Transport.given`."""
        return True

    def taken(self, group: int, number: int, worker: int) -> Arrays:
        """See `Transport.taken`; what this worker gave itself moves inside the process."""
        mine = [way for way in self._exchanges.get(number, ()) if way.target == worker]
        out = {way.arrives: self._inside(way, self._mine[way.key]) for way in mine if way.source == worker}
        self._mine = {}
        return out | self._arrived([(way, self._pull(way, way.first)) for way in mine if way.source != worker])

    def _offer(self, way: _Way, number: int, x: jax.Array) -> None:
        route = way.route
        done: dict[int, jax.Array] = {}
        for i, cuts in enumerate(route.cut(x, self.devices)):
            for number_, (piece, data) in enumerate(zip(route.pieces[i], cuts, strict=True), number):
                if data is None:
                    continue
                if way.small:
                    self.wire.push(route.targets[i], self._message(number_), data)
                    continue
                if id(data) not in done:
                    done[id(data)] = _bytes_of(data)
                edge = Edge(number_, route.sources[piece.source], route.targets[i])
                self.transfer.offer(edge, self.step, done[id(data)])
            number += len(cuts)

    def _message(self, number: int) -> int:
        return number << CHUNK_BITS | self.step

    def _arrived(self, coming: Sequence[tuple[_Way, list[list[_Coming]]]]) -> Arrays:
        """Values made of the bytes of their pieces, which it waits for."""
        jax.block_until_ready([pieces for way, pieces in coming if not way.small])
        return {way.arrives: self._of_host(way, p) if way.small else self._of_device(way, p) for way, p in coming}

    def _of_device(self, way: _Way, coming: Sequence[Sequence[_Coming]]) -> jax.Array:
        """A value of the bytes of large pieces."""
        route, implementation = way.route, key_implementation(way.route.type)
        inner, dtype = data_type(route.type)
        tiles: list[jax.Array] = []
        for i, (pieces, arrived) in enumerate(zip(route.pieces, coming, strict=True)):
            if arrived:  # else it is another process's
                shapes = [(*(b - a for a, b in piece.box), *inner) for piece in pieces]
                parts = [_value_of(x, s, str(dtype), implementation) for x, s in zip(arrived, shapes, strict=True)]
                tiles.append(route.tile(i, parts))
        return route.array(tiles, self.meshes[way.stage])

    def _of_host(self, way: _Way, coming: Sequence[Sequence[_Coming]]) -> jax.Array:
        """A value of the messages that its pieces are."""
        route, implementation = way.route, key_implementation(way.route.type)
        inner, dtype = data_type(route.type)
        tiles: list[np.ndarray[Any, Any]] = []
        devices: list[jax.Device] = []
        for i, (pieces, numbers) in enumerate(zip(route.pieces, coming, strict=True)):
            if not numbers:
                continue
            parts: list[np.ndarray[Any, Any]] = []
            for piece, number in zip(pieces, numbers, strict=True):
                data = self.wire.take(number).view(dtype)  # type: ignore[arg-type]
                parts.append(data.reshape((*(b - a for a, b in piece.box), *inner)))
            tiles.append(parts[0] if len(parts) == 1 else _tile(route, i, parts))
            devices.append(self.devices[route.targets[i]])
        sharding = NamedSharding(self.meshes[way.stage], partition_spec(route.spec))
        out = from_host((*route.type.shape, *inner), sharding, tiles, devices)
        return out if implementation is None else jax.random.wrap_key_data(out, impl=implementation)

    def _pull(self, way: _Way, number: int) -> list[list[_Coming]]:
        """Of each target of this process its pieces, which are on their way; of others nothing."""
        route, out = way.route, list[list[_Coming]]()
        for target, pieces, sizes in zip(route.targets, route.pieces, way.sizes, strict=True):
            arrived: list[_Coming] = []
            for number_, piece in enumerate(pieces, number) if target in self.devices else ():
                if way.small:
                    arrived.append(self._message(number_))
                    continue
                edge = Edge(number_, route.sources[piece.source], target)
                arrived.append(self.transfer.fetch(edge, self.step, sizes[number_ - number]))
            number += len(pieces)
            out.append(arrived)
        return out

    def _inside(self, way: _Way, x: jax.Array) -> jax.Array:
        return Move(way.route, self.devices, self.meshes[way.stage])(x)


def _tile(route: Route, target: int, parts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """`Route.tile` in host memory."""
    box, first = route.boxes[target], parts[0]
    out = np.empty((*(b - a for a, b in box), *first.shape[len(box) :]), first.dtype)
    for piece, part in zip(route.pieces[target], parts, strict=True):
        out[tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(piece.box, box, strict=True))] = part
    return out


@jax.jit
def _bytes_of(x: jax.Array) -> jax.Array:
    """(bytes,), uint8, in memory of its own."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        raise ReshardingError(f"{x.dtype}{list(x.shape)} is to cross between processes; complex numbers cannot yet")
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else lax.bitcast_convert_type(x, jnp.uint8)
    return jnp.copy(x.reshape(-1))


def _values(x: jax.Array, shape: tuple[int, ...], dtype: str, implementation: str | None) -> jax.Array:
    of = jnp.dtype(dtype)
    if of == jnp.bool_:
        return x.reshape(shape).astype(of)
    wide = () if of.itemsize == 1 else (of.itemsize,)
    x = lax.bitcast_convert_type(x.reshape(*shape, *wide), of)
    return x if implementation is None else jax.random.wrap_key_data(x, impl=implementation)


_value_of = jax.jit(_values, static_argnums=(1, 2, 3))
