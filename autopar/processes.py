"""What the processes of one `jax.distributed` group tell each other beside the training step: texts, not arrays.

They go through JAX's coordination service, from any thread, and use no device: a collective on devices from a thread of
its own would meet the training step's in another order in each process.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
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


_ROUNDS: dict[tuple[int, str], int] = {}
"""(process, key) → decisions that it has heard of."""


def decided(group: Processes, key: str, decide: Callable[[], str], timeout_s: float) -> str:
    """What process 0's ``decide`` returns, in all processes, once each has asked; ``decide`` is called in no other.

    A call that not all processes make ends as an error in those that do, and the next that all make is none the worse
    for it: an answer names those whom it is for.

    Raises TimeoutError where a process has not asked, or process 0 has not answered, within ``timeout_s`` seconds;
    RuntimeError in the others for what ``decide`` raises in process 0.
    """
    if group.count == 1:
        return decide()
    me = (group.index, key)
    if group.index == 0:
        at = f"{key}/{_ROUNDS.setdefault(me, 0)}"
        asking = [_asked(group, f"{at}/{other}", other, timeout_s) for other in range(1, group.count)]
        answer: dict[str, str] = {}
        try:
            answer["said"] = decide()
        except BaseException as error:
            answer["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            group.put(f"{at}/answer", json.dumps({"for": asking, **answer}))
            _ROUNDS[me] += 1
            group.forget(f"{key}/{_ROUNDS[me] - 2}")  # all have asked since, so all have read it
        return answer["said"]
    token = secrets.token_hex(8)
    while True:
        at = f"{key}/{_ROUNDS.setdefault(me, 0)}"
        group.put(f"{at}/{group.index}", token)
        try:
            answer = json.loads(group.get(f"{at}/answer", timeout_s))
        except BaseException:
            group.forget(f"{at}/{group.index}")
            raise
        _ROUNDS[me] += 1
        if token in answer["for"]:  # else of a round that this process had given up
            break
    if "error" in answer:
        raise RuntimeError(f"process 0: {answer['error']}")
    return answer["said"]


def _asked(group: Processes, key: str, other: int, timeout_s: float) -> str:
    try:
        return group.get(key, timeout_s)
    except TimeoutError:
        raise TimeoutError(f"process {other} did not ask within {timeout_s:g} s") from None


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
