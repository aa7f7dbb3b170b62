"""How pieces get from process to process: one small interface, and what implements it.

A *message* is one leg of a transfer (`ir.resharding.Leg`) in one microbatch of one step. Both ends know its number, its
chunks and each other beforehand, from the plan: nothing is asked for by name. The giver *offers* it, from a `Source`
whose numbers may still be computed; the taker *fetches* it into a `Target`, and each chunk that has landed there is
passed on to the messages that *relay* it while the next one comes. Small messages (`SMALL_BYTES`) are sent without
asking; larger ones when the taker has fetched them, so that nothing takes memory before the program has made room.

Completion: `Arrival.wait` returns when all of a fetch has landed (relays may still be under way: what landed is not
written to again), `Transport.flush` when all that was offered and relayed has left. Failure: both raise what went
wrong, `PeerLostError` where another process ended; nothing waits on for a peer that is gone.

A new transport is a module here that passes ``tests/cpu8/test_transports.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from autopar.ir.errors import ReshardingError

SMALL_BYTES = 64 * 2**10
"""Larger messages are better asked for (chosen: those of a step together stay below what its arrays take)."""


def is_small(sizes: Sequence[int]) -> bool:
    """True for chunks of a message that is sent without asking."""
    return sum(sizes) <= SMALL_BYTES


class PeerLostError(ReshardingError):
    """The other end of a connection is gone."""


class Source(Protocol):
    """What is offered, chunk by chunk."""

    sizes: Sequence[int]
    """Bytes of each chunk."""

    def is_ready(self) -> bool:
        """True where reading does not wait."""
        ...

    def wait(self) -> None:
        """Returns when it is ready; raises what kept it from being computed."""
        ...

    def read(self, chunk: int) -> np.ndarray[Any, Any]:
        """A chunk in host memory: (bytes,), uint8."""
        ...

    def array(self, chunk: int) -> jax.Array:
        """A chunk on its device: (bytes,), uint8."""
        ...


class Target(Protocol):
    """Where what is fetched lands, chunk by chunk, in any order."""

    sizes: Sequence[int]
    """Bytes of each chunk."""

    device: Any
    """One that arrays are to land on."""

    def room(self, chunk: int) -> np.ndarray[Any, Any] | None:
        """Host memory of a chunk to land in, (bytes,), uint8; None where it is not in one place."""
        ...

    def write(self, chunk: int, data: np.ndarray[Any, Any]) -> None:
        """Lands a chunk, (bytes,), uint8."""
        ...

    def read(self, chunk: int) -> np.ndarray[Any, Any]:
        """A chunk that has landed: (bytes,), uint8."""
        ...

    def put(self, chunk: int, data: jax.Array) -> None:
        """Lands a chunk that is on `device`, (bytes,), uint8, perhaps not yet there."""
        ...


@dataclass(frozen=True, slots=True)
class Offer:
    """Message ``number`` to process ``peer`` (its address)."""

    number: int
    peer: str
    source: Source


@dataclass(frozen=True, slots=True)
class Fetch:
    """Message ``number`` from process ``peer``, passed on as messages ``relays``: (number, address)."""

    number: int
    peer: str
    target: Target
    relays: Sequence[tuple[int, str]] = ()


class Arrival(Protocol):
    """What was fetched together."""

    def wait(self) -> None:
        """Returns when all has landed. Raises what went wrong."""
        ...


class Transport(Protocol):
    """Moves messages between processes; offers and fetches come from one thread, and none of them waits."""

    address: str
    """Of this process, for others."""

    sent: dict[str, int]
    """Address of a process → payload bytes that this one has sent it, relayed ones too."""

    def offer(self, offers: Sequence[Offer]) -> None:
        """Sends what is offered when it is there and wanted."""
        ...

    def fetch(self, fetches: Sequence[Fetch]) -> Arrival:
        """Asks for messages, and relays them."""
        ...

    def flush(self) -> None:
        """Returns when all that was offered and relayed has left. Raises what went wrong."""
        ...
