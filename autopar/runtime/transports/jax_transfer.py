"""Chunks between processes: `jax.experimental.transfer`, a server in each process and one connection to each peer.

Offers and pulls return at once, also for arrays that are still on their way. Nothing here has a deadline: the server
heeds none, and connecting to a port that nobody listens on may hang. Whoever starts the processes watches over them
(`gang.Gang`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import transfer

from autopar.ir.errors import ReshardingError
from autopar.jax_compat import Device
from autopar.runtime.transports import CHUNK_DTYPE, Edge

TRANSFER_BITS, CHUNK_BITS, DEVICE_BITS = 24, 20, 18
"""How an offer's 62-bit number is divided (chosen: 2^20 chunks of 1 MB are 1 TB)."""
ACKNOWLEDGED = (1 << CHUNK_BITS) - 1
"""The chunk that stands for "all have come"; it goes from taker to giver."""


class JaxTransfer:
    """This process's server and its connections.

    ``devices``: the plan's ids of this process's devices → the devices. ``host``: the address to bind to and to be
    reached at. ``peers`` has to be set, once all servers are up, to device id → the server address of its process.
    """

    def __init__(self, devices: Mapping[int, Device], host: str) -> None:
        self._devices = devices
        self._shardings = {i: jax.sharding.SingleDeviceSharding(d) for i, d in devices.items()}
        client = next(iter(devices.values())).client
        # Without transport addresses a pull aborts the process (jaxlib 0.10).
        self._server: Any = transfer.start_transfer_server(client, f"{host}:0", [f"{host}:0"])
        self._lock = threading.Lock()
        self._connections: dict[str, Any] = {}
        self._note = jax.device_put(np.zeros(1, CHUNK_DTYPE), next(iter(devices.values())))
        self.address: str = self._server.address()
        self.peers: Mapping[int, str] = {}

    def offer(self, edge: Edge, chunk: int, data: jax.Array) -> None:
        """See `Transport.offer`. Raises ReshardingError for more chunks, transfers or devices than an offer's number
        has room for."""
        if chunk >= ACKNOWLEDGED:
            raise ReshardingError(f"chunk {chunk} of {edge}: at most {ACKNOWLEDGED} chunks; give larger ones")
        self._server.await_pull(_number(edge, chunk), [data])

    def fetch(self, edge: Edge, chunk: int, size_bytes: int) -> jax.Array:
        """See `Transport.fetch`; it waits for its offer for ever. Raises ReshardingError where ``peers`` does not have
        the giver."""
        return self._pull(edge.giver, edge.taker, _number(edge, chunk), size_bytes)

    def acknowledge(self, edge: Edge) -> None:
        """See `Transport.acknowledge`."""
        self._server.await_pull(_number(edge, ACKNOWLEDGED), [self._note])

    def wait_acknowledged(self, edge: Edge) -> None:
        """See `Transport.wait_acknowledged`; it waits for ever. Raises ReshardingError where ``peers`` does not have
        the taker."""
        self._pull(edge.taker, edge.giver, _number(edge, ACKNOWLEDGED), 1).block_until_ready()

    def _pull(self, peer: int, here: int, number: int, size_bytes: int) -> jax.Array:
        address = self.peers.get(peer)
        if address is None:
            raise ReshardingError(f"no process is known that has device {peer}; known: {sorted(self.peers)}")
        with self._lock:
            if address not in self._connections:
                self._connections[address] = self._server.connect(address)
            connection = self._connections[address]
        like = jax.ShapeDtypeStruct((size_bytes,), np.dtype(CHUNK_DTYPE), sharding=self._shardings[here])
        return connection.pull(number, [like])[0]


def _number(edge: Edge, chunk: int) -> int:
    if edge.transfer >> TRANSFER_BITS or edge.taker >> DEVICE_BITS:
        raise ReshardingError(
            f"{edge}: transfers are numbered below 2^{TRANSFER_BITS} and devices below 2^{DEVICE_BITS} here"
        )
    return ((edge.transfer << CHUNK_BITS | chunk) << DEVICE_BITS) | edge.taker
