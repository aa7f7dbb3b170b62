"""A worker process of a `gang.Gang`: holds tiles on its devices and runs its part of a resharding.

    python -m benchmarks.pipe_gang.worker FD

FD is an inherited socket, over which it gets one message at a time and answers each with a `Done` or a `Failed`. It
ends when the other end is closed, also in the middle of a run: no worker outlives its driver.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any, assert_never

import jax

from autopar.ir.errors import ReshardingError
from autopar.runtime.pieces import array_of, digest, host_of
from autopar.runtime.resharding_interpreter import Part, TileKey, run_streams
from autopar.runtime.transports.by_process import ByProcess
from autopar.runtime.transports.jax_transfer import JaxTransfer
from autopar.runtime.transports.local import LocalTransport
from benchmarks.pipe_gang.messages import Collect, Done, Failed, Load, Message, Put, Run, Start


class _Worker:
    def __init__(self, start: Start) -> None:
        local = jax.local_devices()
        if len(local) < len(start.devices):
            raise ReshardingError(f"this process has {len(local)} devices, {len(start.devices)} are asked for")
        self._devices = dict(zip(start.devices, local, strict=False))
        self._between = JaxTransfer(self._devices, start.address)
        self.address = self._between.address
        self._part: Part | None = None
        self._tiles: dict[TileKey, jax.Array] = {}
        self._arrived: dict[TileKey, jax.Array] = {}

    def answer(self, message: Load | Put | Run | Collect) -> Any:
        if isinstance(message, Load):
            self._between.peers = message.peers
            self._part = Part(plan=message.plan, instructions=message.instructions, devices=self._devices)
            return None
        if self._part is None:
            raise ReshardingError(f"{type(message).__name__.lower()}: no plan was loaded")
        match message:
            case Put():
                values = self._part.plan.values
                self._tiles = {
                    (v, d): array_of(values[v].type, host, self._devices[d]) for (v, d), host in message.tiles.items()
                }
            case Run():
                self._arrived = {}  # its memory can be had again
                inside = LocalTransport(self._devices, message.deadline_s)
                transport = ByProcess(self._devices, inside, self._between)
                self._arrived = run_streams(self._part, self._tiles, transport, message.deadline_s)
            case Collect():
                hosts = {key: host_of(array) for key, array in self._arrived.items()}
                return {key: digest(host) for key, host in hosts.items()} if message.digests else hosts
            case _:
                assert_never(message)
        return None


def _serve(connection: Connection, messages: queue.SimpleQueue[Message]) -> None:
    worker: _Worker | None = None
    while True:
        message = messages.get()
        try:
            if isinstance(message, Start):
                worker = _Worker(message)
                reply: Done | Failed = Done(value=worker.address)
            else:
                assert worker is not None, "the first message is a Start"
                reply = Done(value=worker.answer(message))
        except Exception as error:  # noqa: BLE001 - told to the driver, which raises it
            reply = Failed(summary=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
        connection.send(reply)


def main(fd: int) -> None:
    """Serves the driver at the other end of ``fd`` until it closes it."""
    connection = Connection(fd)
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_serve, args=(connection, messages), name="serve", daemon=True).start()
    while True:
        try:
            messages.put(connection.recv())
        except (EOFError, ConnectionResetError):
            os._exit(0)  # threads may be stuck in a transfer: nothing to wait for


if __name__ == "__main__":
    main(int(sys.argv[1]))
