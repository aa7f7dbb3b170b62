"""What a driver has of a step's arrays on Ray: `RemoteArray`, an `autopar.Array` whose pieces lie on workers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from autopar.arrays import Array
from autopar.ir.errors import WorkerError
from autopar.ir.graph import TensorType
from autopar.runtime.on_ray.gang import Gang
from autopar.runtime.on_ray.keeper import RayKeeper
from autopar.runtime.on_ray.messages import Rows, Tiles
from autopar.runtime.pieces import array_of, dtype_of, key_implementation

FETCH_S = 120.0
"""For arrays to come to the driver (chosen)."""


class RemotePiece(NamedTuple):
    """Rows of a value that worker ``worker`` keeps as array ``number``."""

    worker: int
    rows: Rows
    number: int

    @property
    def start(self) -> int:
        """The first row."""
        return self.rows[1]

    @property
    def stop(self) -> int:
        """The row after the last one; 0: it is all of the value."""
        return self.rows[2]


class RemoteArray(Array):
    """A leaf of what a step on Ray takes and gives. Its numbers are there: a step returns when they are.

    It goes back into the step without moving, and is fetched when its numbers are asked for. Where nobody has it any
    more, workers let go of its arrays with the next step.
    """

    pieces: tuple[RemotePiece, ...]  # pyright: ignore[reportIncompatibleVariableOverride] - with workers for stages

    def __init__(
        self, gang: Gang, value_type: TensorType, pieces: tuple[RemotePiece, ...], dropped: list[Any],
        keeper: RayKeeper,
    ) -> None:  # fmt: skip
        super().__init__(value_type.shape, dtype_of(value_type), pieces)  # pyright: ignore[reportArgumentType] - as above
        self.gang, self.type, self.keeper = gang, value_type, keeper
        self.deleted = False
        self._drop = weakref.finalize(self, dropped.extend, pieces)
        self._drop.atexit = False

    def whole(self) -> Any:
        """The value: a NumPy array, for keys one of JAX. Raises WorkerError as a step does, and where a step that
        donates it has run."""
        host = self.host()
        return host if key_implementation(self.type) is None else array_of(self.type, host, jax.devices()[0])

    def host(self) -> np.ndarray[Any, Any]:
        """The value in host memory, for keys their data. Raises WorkerError as `whole`."""
        self.check()
        wanted = cast(tuple[RemotePiece, ...], self.once())
        numbers = [tuple(p.number for p in wanted if p.worker == w) for w in range(self.gang.workers)]
        answers = self.gang.ask_all("fetch", [(n,) for n in numbers], FETCH_S, late_ends=False)
        found = {
            (w, n): _together(parts)
            for w, mine in enumerate(numbers)
            for n, parts in zip(mine, zip(*answers[w], strict=True), strict=True)
        }
        parts = [found[piece.worker, piece.number] for piece in wanted]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @property
    def shardings(self) -> tuple[jax.sharding.Sharding, ...]:
        """Shardings of its pieces, on abstract meshes, as this process does not have the workers' devices. Raises
        WorkerError as `whole`."""
        self.check()
        numbers = [tuple(p.number for p in self.pieces if p.worker == w) for w in range(self.gang.workers)]
        answers = self.gang.ask("shardings", [(n,) for n in numbers], FETCH_S, late_ends=False)
        found = {(w, n): x for w, mine in enumerate(numbers) for n, x in zip(mine, answers[w], strict=True)}
        return tuple(found[p.worker, p.number] for p in self.pieces)

    def find(self, stage: int, start: int, stop: int, sharding: jax.sharding.Sharding) -> None:
        """None: no piece is on a mesh of this process."""

    def __copy__(self) -> RemoteArray:
        return self  # its pieces are let go of with it

    def block_until_ready(self) -> RemoteArray:
        """Itself: a step returns when its numbers are there."""
        return self

    def check(self) -> None:
        """Raises WorkerError where it was donated or deleted."""
        if self.deleted:
            raise WorkerError(f"{self!r} was donated to a step, or deleted, and is gone")

    def is_deleted(self) -> bool:
        """True where a step that donates it has run, or it was deleted."""
        return self.deleted

    def delete(self) -> None:
        """Has the workers let go of its memory, with the next step."""
        self.deleted = True
        self._drop()

    def donated(self) -> None:
        """Notes that a step has taken its memory: workers are not told to let go of it."""
        self.deleted = True
        self._drop.detach()

    def __repr__(self) -> str:
        return f"autopar.Array({self.dtype}{list(self.shape)} on workers {sorted({p.worker for p in self.pieces})})"


def _together(parts: Sequence[np.ndarray[Any, Any] | Tiles]) -> np.ndarray[Any, Any]:
    """An array from what the processes of a worker have of it."""
    first = parts[0]
    if not isinstance(first, Tiles):
        return first
    tiles = [tile for part in parts if isinstance(part, Tiles) for tile in part.tiles]
    data = tiles[0][1]
    out = np.empty((*first.shape, *data.shape[len(first.shape) :]), data.dtype)
    for index, tile in tiles:
        out[index] = tile
    return out
