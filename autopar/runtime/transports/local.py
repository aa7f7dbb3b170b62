"""Chunks between devices of one process: `jax.device_put` to one device each, which does not wait for the bytes.

Between CPU devices, which share memory, a chunk is handed over as it is: who fetches it copies it to its tile anyway.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax

from autopar.ir.errors import ReshardingTimeoutError
from autopar.jax_compat import Device
from autopar.runtime.transports import Edge

T = TypeVar("T")


class LocalTransport:
    """A transport inside one process. ``devices``: the plan's device id → the device; ``deadline_s``: how long a fetch
    waits for its offer, and a giver for an acknowledgement."""

    def __init__(self, devices: Mapping[int, Device], deadline_s: float) -> None:
        self._devices = devices
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._offers: dict[tuple[Edge, int], jax.Array] = {}
        self._acknowledged: set[Edge] = set()

    def offer(self, edge: Edge, chunk: int, data: jax.Array) -> None:
        """See `Transport.offer`."""
        with self._changed:
            self._offers[edge, chunk] = data
            self._changed.notify_all()

    def fetch(self, edge: Edge, chunk: int, size_bytes: int) -> jax.Array:
        """See `Transport.fetch`."""
        data = self._wait_for(lambda: self._offers.pop((edge, chunk), None), f"chunk {chunk} of {edge} was not offered")
        taker = self._devices[edge.taker]
        (giver,) = data.devices()
        return data if giver.platform == taker.platform == "cpu" else jax.device_put(data, taker)

    def acknowledge(self, edge: Edge) -> None:
        """See `Transport.acknowledge`."""
        with self._changed:
            self._acknowledged.add(edge)
            self._changed.notify_all()

    def wait_acknowledged(self, edge: Edge) -> None:
        """See `Transport.wait_acknowledged`."""

        def taken() -> bool | None:
            if edge not in self._acknowledged:
                return None
            self._acknowledged.remove(edge)
            return True

        self._wait_for(taken, f"{edge} was not acknowledged")

    def _wait_for(self, look: Callable[[], T | None], what: str) -> T:
        stop_s = time.monotonic() + self._deadline_s
        with self._changed:
            while (found := look()) is None:
                if not self._changed.wait(stop_s - time.monotonic()):
                    raise ReshardingTimeoutError(
                        f"{what} within {self._deadline_s:g} s: the giver failed, or its instructions lack the send"
                    )
        return found
