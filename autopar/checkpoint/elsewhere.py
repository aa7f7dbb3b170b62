"""Leaves whose numbers other processes have, and write and read themselves: the arrays of a pipeline on a cluster.

The process that calls `save` and `restore` sees handles (`Kept`), all those of one step with the same `Keeper`. It
makes the folder and commits; the numbers never come to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from autopar.checkpoint.leaf import Index, Leaf


class Keeper(Protocol):
    """The processes that hold some leaves. All methods raise CheckpointError, or `WorkerError` where one is gone."""

    def boxes(self, values: Sequence[Any]) -> list[list[Index]]:
        """Boxes of each value that together are it once, as they will be written (of random keys, without their
        words)."""
        ...

    def snapshot(self, leaves: Sequence[tuple[Leaf, Any]]) -> str:
        """Fetches the numbers to the hosts' memory; the arrays may be donated when it returns. Returns the snapshot's
        name."""
        ...

    def write(self, name: str, folder: Path, deadline_s: float) -> list[str]:
        """Writes a snapshot into a checkpoint's folder, in any thread; returns the writers' names when it is on the
        disk."""
        ...

    def restore(self, item: Path, leaves: Sequence[tuple[Leaf, Any]]) -> list[Any]:
        """Reads leaves of the pytree in folder ``item``; each comes back as its value wants it."""
        ...


@runtime_checkable
class Kept(Protocol):
    """A leaf, or what one is to become: of any class that has these."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def keeper(self) -> Keeper:
        """Who has its numbers: one object for all leaves of one step."""
        ...


def by_keeper(values: Sequence[Any]) -> list[tuple[Keeper, list[int]]]:
    """The keepers of ``values``, each with the positions of those that it has."""
    found: dict[int, tuple[Keeper, list[int]]] = {}
    for position, value in enumerate(values):
        if isinstance(value, Kept):
            keeper = value.keeper
            found.setdefault(id(keeper), (keeper, []))[1].append(position)
    return list(found.values())
