"""A worker's part of checkpoints: it writes the arrays that it keeps, and reads those that its stages want.

The driver's part is `keeper`. A save has two messages: `Archive.snapshot`, after which arrays may be donated, and
`Archive.write`, which runs beside steps in a thread of the actor's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from autopar.arrays import Array, Piece
from autopar.checkpoint.leaf import Index, Leaf
from autopar.checkpoint.restoring import restore_pieces
from autopar.checkpoint.saving import on_host, own_boxes
from autopar.checkpoint.store import Slices, write_slices
from autopar.checkpoint.tree import boxes_of
from autopar.ir.errors import CheckpointError
from autopar.ir.graph import TensorType
from autopar.runtime.on_ray.messages import Rows
from autopar.runtime.on_ray.step_part import StepPart
from autopar.runtime.pieces import dtype_of, put

SNAPSHOTS = 2
"""So many are kept: one being written, and one that came meanwhile. Of a save that failed before it wrote, the
snapshot is dropped so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a worker writes of a checkpoint: arrays by number, with their leaves. ``turns``: see `own_boxes`."""

    name: str
    leaves: tuple[Leaf, ...]
    numbers: tuple[int, ...]
    turns: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A leaf that a worker reads: the rows that it wants of it as argument ``argument`` of the step, or ``numbers`` of
    arrays that it keeps, in whose places the numbers go."""

    position: int
    leaf: Leaf
    type: TensorType
    argument: int
    rows: tuple[Rows, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A piece that was read: array ``number``."""

    position: int
    rows: Rows
    number: int


class Archive:
    """The checkpoints of one worker.

    Args:
        held: number → (rows, array) of all that it keeps.
    """

    def __init__(self, held: dict[int, tuple[Rows, Any]]) -> None:
        self._held = held
        self._snapshots: dict[str, list[Slices]] = {}

    def boxes(self, numbers: Sequence[int]) -> list[list[Index]]:
        """The boxes that each of these arrays will be written as, in its value."""
        found = (_kept(self._held, n) for n in numbers)
        return [list(boxes_of(x.sharding, x.shape, start)) for (_, start, _), x in found]

    def snapshot(self, order: Snapshot) -> None:
        """Fetches to host memory what this process writes; the arrays may be donated afterwards. Of more than
        `SNAPSHOTS` the oldest are dropped."""
        chosen: list[tuple[Leaf, list[tuple[Index, Any]]]] = []
        for leaf, number, turn in zip(order.leaves, order.numbers, order.turns, strict=True):
            rows, x = _kept(self._held, number)
            first = jax.process_index() == 0 or not x.is_fully_addressable  # what each process has is the first's
            chosen.append((leaf, own_boxes(leaf, Piece(*rows, x), turn, jax.process_index()) if first else []))
        for _, boxes in chosen:
            for _, data in boxes:
                data.copy_to_host_async()
        self._snapshots[order.name] = [(leaf, [(box, on_host(x)) for box, x in boxes]) for leaf, boxes in chosen]
        while len(self._snapshots) > SNAPSHOTS:
            del self._snapshots[next(iter(self._snapshots))]

    def write(self, name: str, writer: str, folder: str) -> str:
        """Writes snapshot ``name`` into a checkpoint's folder as ``writer``. Returns what went wrong, or "": the worker
        lives on."""
        slices = self._snapshots.pop(name, None)
        if slices is None:
            return f"no snapshot {name}: it was never made, or dropped for later ones"
        try:
            write_slices(Path(folder), writer, slices)
        except CheckpointError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - told to whoever saves
            return f"{type(error).__name__}: {error}"
        return ""

    def restore(self, item: str, wanted: Sequence[Wanted], part: StepPart) -> list[tuple[Wanted, Rows, jax.Array]]:
        """Reads leaves of the pytree in folder ``item``: (what was wanted, rows, the array that has them) for each
        piece. Raises CheckpointError as `restore_pieces`."""
        places = [(w.leaf, _places(self._held, w, part)) for w in wanted]
        found = restore_pieces(Path(item), places)
        return [(w, (p.stage, p.start, p.stop), p.array) for w, x in zip(wanted, found, strict=True) for p in x.pieces]


def _kept(held: dict[int, tuple[Rows, Any]], number: int) -> tuple[Rows, jax.Array]:
    """An array; what was drawn (`loader`) as one on a device."""
    rows, x = held[number]
    return rows, x if isinstance(x, jax.Array) else put(x, jax.local_devices()[0])


def _places(held: dict[int, tuple[Rows, Any]], wanted: Wanted, part: StepPart) -> Array:
    dtype = dtype_of(wanted.type)
    pieces: list[Piece] = []
    for n in wanted.numbers:
        rows, x = _kept(held, n)
        pieces.append(Piece(*rows, jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)))
    for rows in wanted.rows:
        _, start, stop = rows
        shape = (stop - start, *wanted.type.shape[1:]) if stop else wanted.type.shape
        sharding = part.place(wanted.argument, rows)
        pieces.append(Piece(*rows, jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)))
    return Array(wanted.type.shape, dtype, tuple(pieces))
