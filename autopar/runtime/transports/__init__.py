"""How chunks get from device to device: one small interface, and what implements it.

A *giver* offers each chunk once to each *taker*, which fetches it; both name the same `Edge` and chunk. The order of
the two does not matter: a fetch waits for its offer. Neither waits for the bytes: a fetched array may still be on its
way, and be offered again as it is. So a relay is a fetch followed by an offer, and passes a chunk on while the next one
comes. Chunks are one-dimensional arrays of bytes on one device.

An offer does not say when its chunk was taken. The taker says so once for each edge (`acknowledge`), and until then
(`wait_acknowledged`) what the giver offered must neither be donated nor deleted.

After an acknowledged run the same edges and chunks may be used again. A new transport is a module here that passes
``tests/cpu8/test_transports.py``.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax

CHUNK_DTYPE = "uint8"
"""Chunks travel as bytes: every dtype is moved bit by bit, and those that a transport does not know as well."""


class Edge(NamedTuple):
    """One way of a transfer: from device ``giver`` to device ``taker``. A device gets a transfer over one edge only."""

    transfer: int
    giver: int
    taker: int

    def __str__(self) -> str:
        return f"transfer {self.transfer}, device {self.giver} -> {self.taker}"


class Transport(Protocol):
    """Moves chunks between devices; safe to use from several threads."""

    def offer(self, edge: Edge, chunk: int, data: jax.Array) -> None:
        """Lets the taker fetch ``data`` ((bytes,), uint8, on one device; possibly not yet there) as chunk ``chunk``."""

    def fetch(self, edge: Edge, chunk: int, size_bytes: int) -> jax.Array:
        """Chunk ``chunk`` on the taker's device, or another of its process that shares its memory: (size_bytes,),
        uint8, possibly not yet there.

        Raises:
            ReshardingTimeoutError: it was not offered within the transport's deadline (where the transport has one).
        """
        ...

    def acknowledge(self, edge: Edge) -> None:
        """Called by the taker when all chunks of ``edge`` have come."""

    def wait_acknowledged(self, edge: Edge) -> None:
        """Called by the giver: returns when the taker has all chunks of ``edge``.

        Raises:
            ReshardingTimeoutError: it has not within the transport's deadline (where the transport has one).
        """
