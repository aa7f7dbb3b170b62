"""Batches for a step: each host draws its own part from any Python iterator, ahead of the step, in a thread.

    loader = shard_loader(batches, sharding)
    for batch in loader:
        state, loss = step(state, batch)
        autopar.save(path, {"state": state, "data": loader.state()}, step=…)

A batch is a pytree of numpy arrays: this process's rows of each leaf. Processes compare, batch by batch, what they have
drawn (`processes.py`; the thread waits, not the step), so that all end after the same batch, and parts of unequal
shapes are an error instead of a step that hangs. A pipeline's step makes its own loader (`Step.loader`), by
`read_ahead`.
"""

from __future__ import annotations

import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from autopar.ir.errors import AutoparError, DataError
from autopar.processes import Alone, Processes, processes

Source = Iterable[Any] | Callable[[int], Iterable[Any]]

DEADLINE_S = 1800.0
"""How long a process waits for another's batch. Guessed: a slow source that starts up."""
_POLL_S = 0.1
_JOIN_S = 5.0
"""How long `close` waits for the source's current batch. Guessed."""
_END = "end"


def shard_loader(
    source: Source, sharding: Any, *, prefetch: int = 2, start: Any = 0, name: str = "batches",
    deadline_s: float = DEADLINE_S,
) -> Loader:  # fmt: skip
    """Batches of `jax.Array` from this process's parts.

    Args:
        source: gives pytrees of numpy arrays, this process's rows of each leaf; where it is a function, it is called
            with the number of batches to leave out and returns what gives the rest (cheaper than drawing and dropping
            them, which is what happens otherwise).
        sharding: one for all leaves, or a pytree of them (a prefix of the batch's).
        prefetch: so many batches are ready on the devices beside the one in use.
        start: what `Loader.state` returned, or a number of batches.
        name: different for loaders at the same time, the same in all processes.
        deadline_s: how long a process waits for another's batch, in seconds.

    Returns:
        A `Loader` of global arrays.

    Raises:
        DataError: ``start`` or ``prefetch`` is not such a number; later, where a batch is taken, what is wrong with it:
            leaves that are no numbers, do not fit their sharding or differ between processes, or a process that gives
            none.
    """
    at = position(start)
    number = _NUMBERS[name] = _NUMBERS.get(name, -1) + 1
    key, place = f"autopar/data/{name}/{number}", partial(_global, sharding=sharding)
    return Loader(_Feed(source, _numbers, place, at, key, deadline_s, _queue(prefetch)), processes())


def read_ahead(
    source: Source, read: Callable[[Any, int], Any], *, prefetch: int, start: Any, deadline_s: float | None
) -> Loader:
    """What ``read`` makes of each of the source's batches and its number, in this process alone, whatever others there
    are.

    Args:
        source, prefetch, start: `shard_loader`'s.
        deadline_s: for a batch to be there, in seconds; None: for ever.

    Raises:
        DataError: as `shard_loader`.
    """
    feed = _Feed(source, read, lambda batch, _: batch, position(start), "", DEADLINE_S, _queue(prefetch))
    return Loader(feed, Alone(), math.inf if deadline_s is None else deadline_s)


def position(start: Any) -> int:
    """The number of batches before ``start``: what `Loader.state` returned, or that number. Raises DataError for
    anything else."""
    at = start.get("batch") if isinstance(start, dict) and start.keys() == {"batch"} else start
    if isinstance(at, bool) or not isinstance(at, int | np.integer) or at < 0:
        raise DataError(f"start={start!r}: expected what Loader.state() returned, or a number of batches")
    return int(at)


def _queue(prefetch: int) -> queue.Queue[_Batch | _Over]:
    if prefetch < 1:
        raise DataError(f"prefetch={prefetch}: expected 1 or more")
    return queue.Queue(prefetch)


@dataclass(frozen=True, slots=True)
class _Batch:
    value: Any


@dataclass(frozen=True, slots=True)
class _Over:
    """No more batches; ``error`` says why, unless the source ended."""

    error: BaseException | None


@dataclass(slots=True)
class _Feed:
    """What the thread and the loader share. The thread holds no loader, so that one that is dropped is closed.

    ``read``: batch and number → arrays in memory of their own; ``place``: these and the number → the loader's batch.
    """

    source: Source
    read: Callable[[Any, int], Any]
    place: Callable[[Any, int], Any]
    start: int
    key: str
    deadline_s: float
    ready: queue.Queue[_Batch | _Over]
    x64: bool = field(default_factory=lambda: jax.dtypes.canonicalize_dtype(np.float64) == np.float64)  # as this thread
    stop: threading.Event = field(default_factory=threading.Event)


class Loader(Iterator[Any]):
    """An iterator of batches; `shard_loader` and `Step.loader` make it. ``with`` closes it; so does its end. `next`
    raises what the source raised, at the batch where it did, and then again; DataError for a batch that cannot be used,
    and where the loader was closed."""

    def __init__(self, feed: _Feed, group: Processes, limit_s: float = math.inf) -> None:
        self._feed, self._limit_s = feed, limit_s
        self._taken = feed.start
        self._over: _Over | None = None
        self._thread = threading.Thread(target=_draw, args=(feed, group), name="autopar-data", daemon=True)
        self._thread.start()
        weakref.finalize(self, feed.stop.set)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Any:
        """The next batch. Raises what the source raised, at the batch where it did, and then again."""
        stop_s = time.monotonic() + self._limit_s
        while self._over is None:
            if self._feed.stop.is_set():
                self._over = _Over(DataError("the loader was closed"))
                break
            try:
                got = self._feed.ready.get(timeout=_POLL_S)
            except queue.Empty:
                if time.monotonic() >= stop_s:
                    raise DataError(
                        f"batch {self._taken}: the source gave none within {self._limit_s:g} s (deadline_s=)"
                    ) from None
                continue
            if isinstance(got, _Batch):
                self._taken += 1
                return got.value
            self._over = got
        if self._over.error is not None:
            raise self._over.error
        raise StopIteration

    def state(self) -> dict[str, int]:
        """How many batches have been taken since the start of the source: goes into a checkpoint, and then into
        ``start``. Batches that were drawn ahead do not count."""
        return {"batch": self._taken}

    def close(self, wait_s: float = _JOIN_S) -> None:
        """Ends the thread, after the batch that its source is at. A source that never returns keeps its thread, which
        does not hold up the end of the program.

        Args:
            wait_s: seconds to wait for that batch.
        """
        self._feed.stop.set()
        with suppress(queue.Empty):
            while True:
                self._feed.ready.get_nowait()
        self._thread.join(wait_s)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_NUMBERS: dict[str, int] = {}
"""How many loaders of each name this process has made: the same in all processes."""


def _draw(feed: _Feed, group: Processes) -> None:
    """Puts batches into the queue until the source ends, fails, or the loader is closed."""
    try:
        batches = _from(feed)
        number = feed.start
        while not feed.stop.is_set():
            local, error, shape = None, None, _END
            try:
                local = next(batches)
            except StopIteration:
                pass
            except BaseException as caught:  # noqa: BLE001 - raised where the batch is taken
                error, shape = caught, f"error {type(caught).__name__}: {caught}"
            else:
                try:
                    local = feed.read(local, number)
                    shape = f"batch {_shapes(local)}"
                except DataError as caught:
                    error, shape = caught, f"error {caught}"
            more = _agreed(feed, group, number, shape)
            if error is not None:
                raise error
            if not more:
                _put(feed, _Over(None))
                return
            with jax.enable_x64(feed.x64):
                batch = feed.place(local, number)
            _put(feed, _Batch(batch))
            number += 1
            del local, batch
        if group.count > 1:
            _agreed(feed, group, number, _END)  # closed here: the others end too
    except BaseException as error:  # noqa: BLE001 - raised where the batch is taken
        _put(feed, _Over(error))


def _from(feed: _Feed) -> Iterator[Any]:
    if callable(feed.source):
        return iter(feed.source(feed.start))
    batches = iter(feed.source)
    for number in range(feed.start):
        if feed.stop.is_set():
            break
        try:
            next(batches)
        except StopIteration:
            raise DataError(
                f"start is batch {feed.start}, but the source ends after {number}. Give the source that the state is of"
            ) from None
    return batches


def _put(feed: _Feed, item: _Batch | _Over) -> None:
    while not feed.stop.is_set():
        try:
            feed.ready.put(item, timeout=_POLL_S)
        except queue.Full:
            continue
        return


def _numbers(batch: Any, number: int) -> Any:
    """Copies: sources use their buffers again, and arrays on CPU may lie in numpy's memory."""

    return jax.tree_util.tree_map_with_path(lambda path, leaf: copied(leaf, where_of(path, number)), batch)


def where_of(path: Any, number: int) -> str:
    """A leaf of batch ``number`` as errors name it."""
    return f"batch {number}: leaf {jax.tree_util.keystr(path) or '(the batch)'}"


def copied(leaf: Any, where: str) -> np.ndarray:
    """A leaf as a numpy array in memory of its own; ``where`` names it. Raises DataError where it is no array of
    numbers."""
    value = np.array(leaf)
    if value.dtype.kind in "OUSMm":
        raise DataError(f"{where}: {type(leaf).__name__} of dtype {value.dtype}; expected numbers")
    return value


def _shapes(batch: Any) -> str:
    flat, structure = jax.tree_util.tree_flatten_with_path(batch)
    text = ", ".join(f"{jax.tree_util.keystr(path)}: {leaf.dtype.name}{list(leaf.shape)}" for path, leaf in flat)
    return f"{structure} {text}" if not flat else text


def _agreed(feed: _Feed, group: Processes, number: int, mine: str) -> bool:
    """True where all processes have a batch, of the same shapes; False where one has come to its end.

    Raises DataError where one failed or shapes differ. Process 0 hears all and tells all what it found.
    """
    if group.count == 1:
        return mine != _END
    key = f"{feed.key}/{number}"
    if group.index:
        group.put(f"{key}/{group.index}", mine)
        verdict = _hear(feed, group, f"{key}/all", 0, number)
    else:
        said = [mine, *(_hear(feed, group, f"{key}/{other}", other, number) for other in range(1, group.count))]
        verdict = _verdict(said, number)
        group.put(f"{key}/all", verdict)
        if number > feed.start:
            # All have spoken of this batch, so all have read what was found about the one before.
            group.forget(f"{feed.key}/{number - 1}")
    if verdict not in ("", _END):
        raise DataError(verdict)
    return not verdict


def _verdict(said: list[str], number: int) -> str:
    failed = [(i, text) for i, text in enumerate(said) if text.startswith("error ")]
    if failed:
        return f"batch {number}: the source of process {failed[0][0]} failed: {failed[0][1].removeprefix('error ')}"
    if _END in said:
        return _END
    other = next((i for i, text in enumerate(said) if text != said[0]), None)
    if other is not None:
        return (
            f"batch {number}: the parts of processes differ: process 0 has {said[0].removeprefix('batch ')}, process "
            f"{other} has {said[other].removeprefix('batch ')}. "
            "Give each the same number of rows, or drop the last batch"
        )
    return ""


def _hear(feed: _Feed, group: Processes, key: str, who: int, number: int) -> str:
    """In short waits, so that a closed loader's thread ends."""
    waited_s = 0.0
    while not feed.stop.is_set():
        try:
            return group.get(key, 1.0)
        except TimeoutError:
            waited_s += 1.0
            if waited_s >= feed.deadline_s:
                raise DataError(
                    f"batch {number}: process {who} gave no batch within {feed.deadline_s:g} s (deadline_s=)"
                ) from None
        except AutoparError:
            raise
        except RuntimeError as error:
            raise DataError(f"batch {number}: lost process {who}: {error}") from error
    return _END


def _global(batch: Any, number: int, sharding: Any) -> Any:
    """Global arrays of which ``batch`` is this process's part."""
    shardings = _for_leaves(batch, sharding, number)

    def made(path: Any, leaf: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
        where = where_of(path, number)
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            raise DataError(f"{where}: {leaf.dtype} needs JAX's 64-bit types. Convert it, or set jax_enable_x64")
        try:
            return jax.make_array_from_process_local_data(sharding, leaf)
        except ValueError as error:
            raise DataError(
                f"{where}: this process's part has shape {leaf.shape}, which does not divide over its devices as "
                f"{sharding} says. Give a number of rows that does, or drop the last batch ({error})"
            ) from error

    return jax.tree_util.tree_map_with_path(made, batch, shardings)


def _for_leaves(batch: Any, sharding: Any, number: int) -> Any:
    """A sharding for each leaf of ``batch``."""
    if isinstance(sharding, jax.sharding.Sharding):
        return jax.tree.map(lambda _: sharding, batch)
    try:
        return jax.tree.map(
            lambda one, part: jax.tree.map(lambda _: one, part),
            sharding,
            batch,
            is_leaf=lambda x: isinstance(x, jax.sharding.Sharding),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"batch {number}: the shardings given do not fit the batch: {error}") from error
