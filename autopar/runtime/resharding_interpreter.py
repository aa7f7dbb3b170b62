"""The interpreter of Send, Recv and Relay: one process's part of a resharding, over any transport.

Each stream is a thread that goes through its transfers in the plan's order and, inside one, chunk by chunk through
this process's devices, from the sender on. Offers and fetches do not wait for bytes: a relay offers what it has just
asked for. What limits a stream is its window: chunk k is asked for when chunk k − `WINDOW` has landed, across the
boundaries of transfers. So receivers set the pace. A sender runs at most one transfer of a stream ahead of what was
acknowledged, which bounds the copies that it holds; when `run_streams` returns, all that was offered has been taken.

It ends, over all processes. Take the threads of a stream that stand at its earliest transfer not yet done. One waits
for a chunk from another that has offered it, or waits itself for an earlier one, at last for the sender, which waits
for nothing inside a transfer. Or it waits for an acknowledgement of an earlier transfer; before that it lands all it
has asked for, so of two that wait for each other each has acknowledged.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax

from autopar.ir.errors import ReshardingError, ReshardingTimeoutError
from autopar.ir.resharding import ReshardingPlan, tile_box
from autopar.ir.resharding_program import Instruction, Recv, Relay, Send
from autopar.jax_compat import Device
from autopar.runtime.pieces import HeldTile, WantedTile
from autopar.runtime.transports import Edge, Transport

WINDOW = 4
"""Chunks of a stream that are asked for at a time (chosen: 1 MB over 1 Gbit/s takes 8 ms, asking for it about 1 ms)."""

TileKey: TypeAlias = tuple[int, int]
"""(value, device id)."""


class _Step(NamedTuple):
    """``instruction`` on ``device``."""

    device: int
    instruction: Instruction


class _Landing(NamedTuple):
    tile: WantedTile
    edge: Edge
    chunk: int
    data: jax.Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A process's part: ``devices``, plan id → device, and the instructions of each."""

    plan: ReshardingPlan
    instructions: Mapping[int, Sequence[Instruction]]
    devices: Mapping[int, Device]


def run_streams(
    part: Part, tiles: Mapping[TileKey, jax.Array], transport: Transport, deadline_s: float
) -> dict[TileKey, jax.Array]:
    """Runs a process's part.

    Args:
        tiles: (value, device) → the source tile there, an array on that device alone. Tiles may be empty and of
            different shapes; see `tile_box`.
        deadline_s: when it gives up. Threads that are stuck in a transport without a deadline are left behind then.

    Returns: (value, device) → the destination tile, for all of ``part.devices`` that want one.

    Raises:
        ReshardingError: a tile is missing or not of its type, or the instructions do not fit the plan.
        ReshardingTimeoutError: it is not done after ``deadline_s``.
    """
    held = _held(part, tiles)
    wanted = {
        (v, d): WantedTile(value.type, tile_box(value.type, value.dst_spec, part.plan.meshes[value.dst].mesh, i))
        for v, value in enumerate(part.plan.values)
        for i, d in enumerate(part.plan.meshes[value.dst].mesh.device_ids)
        if d in part.devices
    }
    streams = [_Stream(steps, part.plan, held, wanted, transport) for steps in _by_stream(part)]
    _all([stream.run for stream in streams], deadline_s)
    return {(v, d): tile.array(part.devices[d]) for (v, d), tile in wanted.items()}


def _held(part: Part, tiles: Mapping[TileKey, jax.Array]) -> dict[TileKey, HeldTile]:
    out: dict[TileKey, HeldTile] = {}
    for v, value in enumerate(part.plan.values):
        mesh = part.plan.meshes[value.src].mesh
        for i, d in enumerate(mesh.device_ids):
            if d not in part.devices:
                continue
            box = tile_box(value.type, value.src_spec, mesh, i)
            shape = tuple(stop - start for start, stop in box)
            tile = tiles.get((v, d))
            if tile is None:
                raise ReshardingError(f"value {v} ({value.type}): no tile is given for device {d}")
            if (tile.shape, str(tile.dtype)) != (shape, value.type.dtype) or tile.devices() != {part.devices[d]}:
                raise ReshardingError(
                    f"value {v} ({value.type}), tile of device {d}: got {tile.dtype}{list(tile.shape)} on "
                    f"{tile.devices()}, expected {value.type.dtype}{list(shape)} on {part.devices[d]}"
                )
            out[v, d] = HeldTile(tile, box)
    return out


def _by_stream(part: Part) -> list[list[list[_Step]]]:
    """Streams → transfers, in order → steps of this process, each after the one that it gets chunks from."""
    streams: dict[int, dict[int, list[_Step]]] = {}
    for device, instructions in sorted(part.instructions.items()):
        if device not in part.devices:
            raise ReshardingError(f"instructions are given for device {device}, which is none of {list(part.devices)}")
        for instruction in instructions:
            transfers = streams.setdefault(instruction.stream, {})
            transfers.setdefault(instruction.transfer, []).append(_Step(device, instruction))
    out: list[list[list[_Step]]] = []
    for _, transfers in sorted(streams.items()):
        stream: list[list[_Step]] = []
        for index, steps in sorted(transfers.items()):
            transfer = part.plan.transfers[index]
            place = {d: i for i, d in enumerate((transfer.sender, *transfer.receivers))}
            for device, instruction in steps:
                if device not in place or instruction.chunks != transfer.chunks:
                    raise ReshardingError(f"{instruction} on device {device} does not fit transfer {index}: {transfer}")
            stream.append(sorted(steps, key=lambda step: place[step.device]))
        out.append(stream)
    return out


class _Stream:
    def __init__(
        self,
        transfers: list[list[_Step]],
        plan: ReshardingPlan,
        held: Mapping[TileKey, HeldTile],
        wanted: Mapping[TileKey, WantedTile],
        transport: Transport,
    ) -> None:
        self._transfers = transfers
        self._plan = plan
        self._held = held
        self._wanted = wanted
        self._transport = transport
        self._coming: deque[list[_Landing]] = deque()
        """What was asked for and has not landed: chunk by chunk, for each of this process's devices."""

    def run(self) -> None:
        """Runs the stream to its end."""
        sent: list[Edge] = []
        for steps in self._transfers:
            before, sent = sent, list(_edges_out(steps))
            for chunk in range(steps[0].instruction.chunks):
                self._coming.append([*self._pass_on(steps, chunk)])
                while len(self._coming) > WINDOW:
                    self._land_one()
            self._acknowledged(before)
        self._acknowledged(sent)
        self._land_all()

    def _pass_on(self, steps: list[_Step], chunk: int) -> Iterator[_Landing]:
        for device, instruction in steps:
            transfer = self._plan.transfers[instruction.transfer]
            match instruction:
                case Send():
                    data = self._held[transfer.value, device].chunk(transfer, chunk)
                case Recv() | Relay():
                    tile = self._wanted[transfer.value, device]
                    edge = Edge(instruction.transfer, instruction.source, device)
                    start, stop = transfer.chunk(chunk)
                    data = self._transport.fetch(edge, chunk, (stop - start) * tile.element_bytes)
                    yield _Landing(tile, edge, chunk, data)
            if not isinstance(instruction, Recv):
                for taker in instruction.to:
                    self._transport.offer(Edge(instruction.transfer, device, taker), chunk, data)

    def _land_one(self) -> None:
        for tile, edge, chunk, data in self._coming.popleft():
            transfer = self._plan.transfers[edge.transfer]
            tile.land(transfer, chunk, data)
            if chunk == transfer.chunks - 1:
                self._transport.acknowledge(edge)

    def _land_all(self) -> None:
        while self._coming:
            self._land_one()

    def _acknowledged(self, edges: list[Edge]) -> None:
        if edges:
            self._land_all()  # others may wait for our acknowledgements before they give theirs
        for edge in edges:
            self._transport.wait_acknowledged(edge)


def _edges_out(steps: list[_Step]) -> Iterator[Edge]:
    for device, instruction in steps:
        if not isinstance(instruction, Recv):
            yield from (Edge(instruction.transfer, device, taker) for taker in instruction.to)


def _all(works: Sequence[Callable[[], None]], deadline_s: float) -> None:
    """Runs ``works`` at the same time; raises the first error at once, ReshardingTimeoutError after ``deadline_s``."""
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            done.put(error)
        else:
            done.put(None)

    stop_s = time.monotonic() + deadline_s
    for index, work in enumerate(works):
        threading.Thread(target=run, args=(work,), name=f"resharding stream {index}", daemon=True).start()
    for finished in range(len(works)):
        try:
            error: Any = done.get(timeout=max(0.0, stop_s - time.monotonic()))
        except queue.Empty:
            raise ReshardingTimeoutError(
                f"resharding: {finished} of {len(works)} streams were done after {deadline_s:g} s; a peer stalls, a "
                f"source array is still being computed, or the deadline is too short for the plan"
            ) from None
        if error is not None:
            raise error
