"""Two transports as one: between devices of this process the one, to and from other processes the other."""

from __future__ import annotations

from collections.abc import Container

import jax

from autopar.runtime.transports import Edge, Transport


class ByProcess:
    """``inside`` for edges between devices ``here`` (the plan's ids of this process's), ``between`` for the others."""

    def __init__(self, here: Container[int], inside: Transport, between: Transport) -> None:
        self._here = here
        self._inside = inside
        self._between = between

    def offer(self, edge: Edge, chunk: int, data: jax.Array) -> None:
        """See `Transport.offer`."""
        self._of(edge).offer(edge, chunk, data)

    def fetch(self, edge: Edge, chunk: int, size_bytes: int) -> jax.Array:
        """See `Transport.fetch`."""
        return self._of(edge).fetch(edge, chunk, size_bytes)

    def acknowledge(self, edge: Edge) -> None:
        """See `Transport.acknowledge`."""
        self._of(edge).acknowledge(edge)

    def wait_acknowledged(self, edge: Edge) -> None:
        """See `Transport.wait_acknowledged`."""
        self._of(edge).wait_acknowledged(edge)

    def _of(self, edge: Edge) -> Transport:
        return self._inside if edge.giver in self._here and edge.taker in self._here else self._between
