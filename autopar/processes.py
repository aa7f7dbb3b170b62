"""What the processes of one `jax.distributed` group tell each other beside the training step: texts, not arrays.

They go through JAX's coordination service, from any thread, and use no device: a collective on devices from a thread of
its own would meet the training step's in another order in each process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax

from autopar.ir.errors import AutoparError
from autopar.jax_compat import coordination_client


class Processes(Protocol):
    """Processes ``0 … count - 1``, of which this is ``index``."""

    @property
    def index(self) -> int:
        """This process's number, from 0."""
        ...

    @property
    def count(self) -> int:
        """How many processes there are."""
        ...

    def put(self, key: str, value: str) -> None:
        """Stores ``value`` under ``key`` for all processes. A key is put once, until it is forgotten."""

    def get(self, key: str, timeout_s: float) -> str:
        """The value under ``key``, as soon as a process has put it. Raises TimeoutError where none has after
        ``timeout_s`` seconds."""
        ...

    def forget(self, prefix: str) -> None:
        """Deletes ``prefix`` and all keys below it."""


@dataclass(frozen=True, slots=True)
class Alone:
    """A single process, which exchanges nothing."""

    index: int = 0
    count: int = 1

    def put(self, key: str, value: str) -> None:
        """Does nothing: no other process reads it."""

    def get(self, key: str, timeout_s: float) -> str:
        """Raises AssertionError: a bug, for no other process puts anything."""
        raise AssertionError(f"one process waits for itself: {key}")

    def forget(self, prefix: str) -> None:
        """Does nothing: nothing is stored."""


@dataclass(frozen=True, slots=True)
class Group:
    """The processes of this process's `jax.distributed.initialize`; ``client``: JAX's, of its coordination service."""

    index: int
    count: int
    client: Any

    def put(self, key: str, value: str) -> None:
        """See `Processes`."""
        self.client.key_value_set(key, value)

    def get(self, key: str, timeout_s: float) -> str:
        """See `Processes`."""
        try:
            return self.client.blocking_key_value_get(key, max(1, round(timeout_s * 1e3)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                raise TimeoutError(f"nothing within {timeout_s:g} s") from error
            raise

    def forget(self, prefix: str) -> None:
        """See `Processes`."""
        self.client.key_value_delete(prefix)


def processes() -> Processes:
    """The processes that this one belongs to; `Alone` for one.

    Raises AutoparError where there are several without JAX's coordination service.
    """
    count = jax.process_count()
    if count == 1:
        return Alone()
    client = coordination_client()
    if client is None:
        raise AutoparError(
            f"{count} processes without JAX's coordination service. Call jax.distributed.initialize first"
        )
    return Group(index=jax.process_index(), count=count, client=client)
