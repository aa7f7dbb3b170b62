"""The driver's side of batches that workers draw on their own hosts (`feeder`): `RayLoader`.

The driver is told that a batch is there, and has handles of it. It asks about the next one before the step on this one,
so that nobody waits for an answer.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from autopar.data import position
from autopar.ir.errors import DataError, WorkerError
from autopar.runtime.batches import Batch, StepSource
from autopar.runtime.on_ray.arrays import RemoteArray, RemotePiece
from autopar.runtime.on_ray.gang import Gang
from autopar.runtime.on_ray.messages import DRAWN, Draw, Drawn, Open
from autopar.runtime.on_ray.shipping import pickled

ANSWER_S = 30.0
"""For what a worker does at once, and for its word beside what it waits for (chosen)."""


class RayLoader(Iterator[Any]):
    """An iterator of batches that lie on the workers of one step; `Step.loader` makes it. ``with`` closes it; so does
    its end. `next` raises DataError where a source failed, gave another tree or other shapes than the step takes, ended
    before others, or gave nothing by the deadline; WorkerError where a worker died."""

    def __init__(
        self, gang: Gang, number: int, batch: Batch, wanted: Mapping[int, tuple[int, ...]],
        handle: Callable[[int, tuple[RemotePiece, ...]], RemoteArray], fresh: Iterator[int], closing: list[int],
        source: StepSource, prefetch: int, start: Any, deadline_s: float,
    ) -> None:  # fmt: skip
        """`Step.loader` calls it.

        Args:
            gang: the workers.
            number: of the loader, for them.
            batch: what a source gives.
            wanted: worker → leaves that it is to keep, by number; others draw nothing.
            handle: of a leaf and its pieces.
            fresh: numbers that no array of the workers has.
            closing: loaders that nobody has any more, for the next step to close.
            source: as `Step.loader` takes it.
            prefetch: so many batches are ready on each worker.
            start: what `state` returned, or a number of batches.
            deadline_s: seconds for a batch to be there.
        """
        self._gang, self._number, self._batch, self._wanted = gang, number, batch, wanted
        self._handle, self._fresh, self._deadline_s = handle, fresh, deadline_s
        self._taken = position(start)
        self._over: BaseException | None = None

        def refusal(error: Exception) -> DataError:
            return DataError(
                f"source: it cannot be sent to the workers ({error}). Open files and connections inside the function"
            )

        shipped = pickled(source, refusal)
        orders = [
            (
                Open(
                    loader=number, source=shipped, argnums=batch.argnums, wanted=wanted[w], prefetch=prefetch,
                    start=self._taken, deadline_s=deadline_s,
                ),
            )
            if w in wanted else None
            for w in range(gang.workers)
        ]  # fmt: skip
        self._drop = weakref.finalize(self, closing.append, number)
        self._drop.atexit = False
        gang.collect(gang.send("open", orders), ANSWER_S)
        self._ahead: tuple[dict[int, RemoteArray], Any] = self._ask()

    def __iter__(self) -> RayLoader:
        return self

    def __next__(self) -> Any:
        """The next batch, which all workers have. At the end, and after an error, the same again.

        Raises:
            DataError: a source failed, gave another tree or other shapes than the step takes, ended before others, or
                gave nothing by the deadline; says of which worker, with its traceback.
            WorkerError: a worker died. The gang is closed.
        """
        if self._over is None:
            leaves, calls = self._ahead
            answers: list[list[Drawn]] = self._gang.collect(calls, self._deadline_s + ANSWER_S)
            self._over = self._verdict({(w, p): x for w, mine in enumerate(answers) for p, x in enumerate(mine)})
            if self._over is None:
                self._taken += 1
                self._ahead = self._ask()
                return self._batch.of(leaves)
            self._drop()
        raise self._over

    def state(self) -> dict[str, int]:
        """How many batches have been taken since the start of the source; see `Loader.state`."""
        return {"batch": self._taken}

    def close(self) -> None:
        """Ends the workers' threads, as `Loader.close` does."""
        if self._drop.detach() is None:
            return
        self._over = self._over or DataError("the loader was closed")
        self._ahead = {}, None
        if not self._gang.closed:
            closed = [(self._number,) if w in self._wanted else None for w in range(self._gang.workers)]
            with suppress(WorkerError):  # a gang that ended has no threads
                self._gang.collect(self._gang.send("shut", closed), ANSWER_S)

    def __enter__(self) -> RayLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self) -> tuple[dict[int, RemoteArray], Any]:
        """Handles of the next batch, and the calls that are answered when it is there."""
        numbers = dict(zip(self._batch.numbers, self._fresh, strict=False))
        order = Draw(loader=self._number, numbers=numbers)
        calls = self._gang.send("draw", [(order,) if w in self._wanted else None for w in range(self._gang.workers)])
        leaves = {
            a: self._handle(a, tuple(RemotePiece(w, DRAWN, n) for w, mine in self._wanted.items() if a in mine))
            for a, n in numbers.items()
        }
        return leaves, calls

    def _verdict(self, said: Mapping[tuple[int, int], Drawn]) -> BaseException | None:
        """What their answers come to; None: all have the batch."""
        for where, x in said.items():
            if x.error:
                error = DataError(f"the source of {self._gang.name(*where)} failed at batch {self._taken}: {x.error}")
                error.add_note(x.trace)
                return error
        ended, others = ([where for where, x in said.items() if x.over is over] for over in (True, False))
        if ended and others:
            return DataError(
                f"the source of {self._gang.name(*ended[0])} ended before batch {self._taken}, which that of "
                f"{self._gang.name(*others[0])} has. It has to give the same batches on every host"
            )
        return StopIteration() if ended else None


def keepers(batch: Batch, wanted: list[frozenset[int]]) -> dict[int, tuple[int, ...]]:
    """Worker → leaves of the batch that it is to keep. ``wanted``: arguments that each worker reads. Leaves that none
    reads are the first one's, for whoever asks for the handle's numbers."""
    found = {w: [a for a in batch.numbers if a in mine] for w, mine in enumerate(wanted)}
    first = next((w for w, mine in found.items() if mine), 0)
    found[first] += [a for a in batch.numbers if not any(a in mine for mine in wanted)]
    return {w: tuple(mine) for w, mine in found.items() if mine}


def numbers() -> Iterator[int]:
    """Numbers of arrays that are drawn: −1, −2, …; workers number the others themselves, from 0."""
    return itertools.count(-1, -1)
