"""The driver's side of checkpoints of a step on Ray: who writes and who reads which arrays (`checkpoint.elsewhere`).

`autopar.save` and `restore` find a `RayKeeper` at the handles of a step's arrays. Workers write and read the numbers
(`archive`); the driver sends them the leaves' descriptions, and commits.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autopar.checkpoint.leaf import Index, Leaf
from autopar.ir.errors import CheckpointError
from autopar.ir.graph import TensorType
from autopar.runtime.on_ray.archive import Read, Snapshot, Wanted
from autopar.runtime.on_ray.gang import Gang
from autopar.runtime.on_ray.messages import Loaded, Rows
from autopar.runtime.pieces import dtype_of

SNAPSHOT_S = 300.0
"""For workers to fetch their numbers to host memory (chosen)."""
RESTORE_S = 1800.0
"""For workers to read a checkpoint: a large state on a slow shared disk (guessed)."""

Where = tuple[int, Rows, int]
"""(worker, rows, number of the array there)."""


class RayTarget:
    """What argument ``argument`` of a step on Ray is to be restored as; `RayExecutor.abstract` makes them."""

    def __init__(self, keeper: RayKeeper, argument: int, value_type: TensorType) -> None:
        self.keeper, self.argument, self.type = keeper, argument, value_type
        self.shape, self.dtype = value_type.shape, dtype_of(value_type)

    def __repr__(self) -> str:
        return f"RayTarget({self.dtype}{list(self.shape)}, argument {self.argument})"


class RayKeeper:
    """The workers of one step, as the `checkpoint.elsewhere.Keeper` of its arrays.

    Args:
        loaded: what each worker has said of itself.
        make: (type, pieces) → a handle of arrays that workers keep.
    """

    def __init__(
        self, gang: Gang, loaded: Sequence[Loaded], make: Callable[[TensorType, tuple[Where, ...]], Any]
    ) -> None:
        self.gang, self.loaded, self._make = gang, loaded, make

    def wanted(self, argument: int) -> list[tuple[int, tuple[Rows, ...]]]:
        """Which workers read an argument, and which rows."""
        return [(w, tuple(sorted(x.wanted[argument]))) for w, x in enumerate(self.loaded) if x.wanted.get(argument)]

    def boxes(self, values: Sequence[Any]) -> list[list[Index]]:
        """See `Keeper`."""
        chosen = [self._once(i, x) for i, x in enumerate(values)]
        asked: list[list[int]] = [[] for _ in self.loaded]
        for pieces in chosen:
            for w, _, number in pieces:
                asked[w].append(number)
        answers: list[list[list[Index]]] = self.gang.ask("boxes", [(tuple(n),) for n in asked], SNAPSHOT_S)
        found = {(w, n): box for w, mine in enumerate(asked) for n, box in zip(mine, answers[w], strict=True)}
        return [[box for w, _, number in pieces for box in found[w, number]] for pieces in chosen]

    def snapshot(self, leaves: Sequence[tuple[Leaf, Any]]) -> str:
        """See `Keeper`."""
        mine: list[list[tuple[Leaf, int, int]]] = [[] for _ in self.loaded]
        for i, (leaf, x) in enumerate(leaves):
            for w, _, number in self._once(i, x):
                mine[w].append((leaf, number, i))
        name = secrets.token_hex(8)
        orders: list[tuple[Snapshot]] = []
        for rows in mine:
            of, numbers, turns = (tuple(x) for x in zip(*rows, strict=True)) if rows else ((), (), ())
            orders.append((Snapshot(name=name, leaves=of, numbers=numbers, turns=turns),))
        self.gang.ask("snapshot", orders, SNAPSHOT_S)
        return name

    def write(self, name: str, folder: Path, deadline_s: float) -> list[str]:
        """See `Keeper`. Raises CheckpointError where a worker cannot write its part, WorkerError where one is gone."""
        messages = [(name, f"{name}_{w}", str(folder)) for w in range(len(self.loaded))]
        writers: list[str] = []
        for w, said in enumerate(self.gang.ask_all("write", messages, deadline_s, late_ends=False)):
            for writer, error in said:
                if error:
                    raise CheckpointError(f"worker {w} could not write its part: {error}")
                writers.append(writer)
        return writers

    def restore(self, item: Path, leaves: Sequence[tuple[Leaf, Any]]) -> list[Any]:
        """See `Keeper`. Raises CheckpointError where a handle was donated or a worker cannot read what it wants,
        WorkerError where one is gone."""
        wanted: list[list[Wanted]] = [[] for _ in self.loaded]
        for i, (leaf, x) in enumerate(leaves):
            if isinstance(x, RayTarget):
                for w, rows in self.wanted(x.argument):
                    wanted[w].append(
                        Wanted(position=i, leaf=leaf, type=x.type, argument=x.argument, rows=rows, numbers=())
                    )
                continue
            if x.deleted:
                raise CheckpointError(f"leaf {leaf.where}: {x!r} was donated. Restore into step.abstract(…)")
            for w in sorted({piece[0] for piece in x.pieces}):
                numbers = tuple(number for worker, _, number in x.pieces if worker == w)
                wanted[w].append(Wanted(position=i, leaf=leaf, type=x.type, argument=-1, rows=(), numbers=numbers))
        answers: list[list[tuple[Read, ...] | str]] = self.gang.ask_all(
            "restore", [(str(item), tuple(mine)) for mine in wanted], RESTORE_S
        )
        pieces: list[list[Where]] = [[] for _ in leaves]
        wrong: list[str] = []
        for w, mine in enumerate(answers):
            wrong += [f"worker {w}: {said}" for said in mine if isinstance(said, str)]
            for read in next((said for said in mine if not isinstance(said, str)), ()):
                pieces[read.position].append((w, read.rows, read.number))
        if wrong:
            for (_, x), mine in zip(leaves, pieces, strict=True):
                self._make(x.type, tuple(mine))  # nobody has it: workers let go of what they have read
            raise CheckpointError(wrong[0])
        return [self._make(x.type, tuple(mine)) for (_, x), mine in zip(leaves, pieces, strict=True)]

    def _once(self, turn: int, x: Any) -> list[Where]:
        """Pieces that together have each element once; of copies, the turn goes around among the workers."""
        whole = [piece for piece in x.pieces if piece.stop == 0]
        return [tuple(whole[turn % len(whole)])] if whole else [tuple(piece) for piece in x.once()]
