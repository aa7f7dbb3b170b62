"""Messages between devices of different processes: `jax.experimental.transfer`, a server in each process and one
connection to each peer. Chunks are arrays of their devices throughout; nothing is copied to host memory here.

Offers and pulls return at once, also for arrays that are still on their way: a relay offers what it has just asked for.
A message is asked for by pulling it, small or not. Nothing here has a deadline: the server heeds none, and connecting
to a port that nobody listens on may hang. Whoever starts the processes watches over them (`gang.Gang`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import transfer

from autopar.ir.errors import ReshardingError
from autopar.jax_compat import Device
from autopar.runtime.transports import Fetch, Offer, PeerLostError

CHUNK_BITS = 16
"""Of an offer's number (chosen: the planner makes at most some hundred chunks of a stream)."""


class JaxTransfer:
    """This process's server and its connections; see `Transport`.

    ``devices``: this process's. ``host``: the address to bind to and to be reached at.
    """

    def __init__(self, devices: Sequence[Device], host: str) -> None:
        # Without transport addresses a pull aborts the process (jaxlib 0.10).
        self._server: Any = transfer.start_transfer_server(devices[0].client, f"{host}:0", [f"{host}:0"])
        self._connections: dict[str, Any] = {}
        self._offered: list[jax.Array] = []
        self.address: str = self._server.address()
        self.sent: dict[str, int] = {}

    def offer(self, offers: Sequence[Offer]) -> None:
        """See `Transport.offer`. Raises ReshardingError for more chunks than an offer's number has room for."""
        for offer in offers:
            for chunk in range(len(offer.source.sizes)):
                self._offer(offer.number, offer.peer, chunk, offer.source.array(chunk))

    def fetch(self, fetches: Sequence[Fetch]) -> _Arrival:
        """See `Transport.fetch`."""
        coming: list[tuple[Fetch, list[jax.Array]]] = []
        for fetch in fetches:
            sharding = jax.sharding.SingleDeviceSharding(fetch.target.device)
            likes = [jax.ShapeDtypeStruct((n,), np.uint8, sharding=sharding) for n in fetch.target.sizes]
            connection = self._connected(fetch.peer)
            arrays = [connection.pull(_number(fetch.number, i), [like])[0] for i, like in enumerate(likes)]
            for number, peer in fetch.relays:
                for chunk, x in enumerate(arrays):
                    self._offer(number, peer, chunk, x)
            coming.append((fetch, arrays))
        return _Arrival(coming)

    def flush(self) -> None:
        """See `Transport.flush`: what is offered is an array of its own, which the server keeps until it is taken."""
        jax.block_until_ready(self._offered)
        self._offered.clear()

    def _offer(self, number: int, peer: str, chunk: int, x: jax.Array) -> None:
        self._server.await_pull(_number(number, chunk), [x])
        self._offered.append(x)
        self.sent[peer] = self.sent.get(peer, 0) + x.size

    def _connected(self, peer: str) -> Any:
        if peer not in self._connections:
            self._connections[peer] = self._server.connect(peer)
        return self._connections[peer]


class _Arrival:
    """Pulled chunks of messages."""

    def __init__(self, coming: Sequence[tuple[Fetch, list[jax.Array]]]) -> None:
        self._coming = coming

    def wait(self) -> None:
        try:
            jax.block_until_ready([arrays for _, arrays in self._coming])
        except jax.errors.JaxRuntimeError as error:
            raise PeerLostError(f"what another process sent did not come: {error}") from error
        for fetch, arrays in self._coming:
            for chunk, x in enumerate(arrays):
                fetch.target.put(chunk, x)


def _number(message: int, chunk: int) -> int:
    if chunk >> CHUNK_BITS:
        raise ReshardingError(f"chunk {chunk} of message {message}: at most {1 << CHUNK_BITS} chunks; give larger ones")
    return message << CHUNK_BITS | chunk
