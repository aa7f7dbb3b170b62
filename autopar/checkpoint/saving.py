"""Saves a pytree: its numbers are fetched to the host at once, and written by a thread.

Every process calls `save` with the same tree (of global arrays). Each writes boxes that it holds; those that several
hold are dealt out among them, so that replicated leaves do not all fall to process 0. Process 0 makes the folder, waits
for the others, and commits.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.core
import numpy as np

from autopar.arrays import Array, Piece
from autopar.checkpoint.elsewhere import Keeper, Kept, by_keeper
from autopar.checkpoint.folder import begin, keep_last, of_step, step_number
from autopar.checkpoint.leaf import Index, Leaf, whole
from autopar.checkpoint.store import Slices, commit, tensorstore, write_slices
from autopar.checkpoint.tree import boxes_of, flatten, is_key_dtype, is_scalar, leaf_of, pieces_of
from autopar.ir.errors import AutoparError, CheckpointError
from autopar.processes import Processes, processes

DEADLINE_S = 1800.0
"""How long processes wait for each other. Guessed: a large state on a slow shared disk."""

_log = logging.getLogger(__name__)


class Save:
    """A save under way; `autopar.save` returns it.

    Attributes:
        root: the folder of all checkpoints.
        step: the number that this one is saved under.
    """

    def __init__(self, root: Path, step: int) -> None:
        self.root = root
        self.step = step
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._told = False

    def done(self) -> bool:
        """True when it has ended, well or not."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> Path:
        """Waits until all processes' slices are in the checkpoint.

        Args:
            timeout_s: seconds to wait; None: for as long as it takes.

        Returns:
            The folder of the complete checkpoint.

        Raises:
            CheckpointError: the save failed.
            WorkerError: workers that have leaves are gone.
            TimeoutError: it goes on after ``timeout_s``.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"{self.root}: step {self.step} is still being saved after {timeout_s:g} s")
        self._told = True
        if self._error is not None:
            raise self._error
        return self.root / str(self.step)

    def _ends(self, error: BaseException | None) -> None:
        if error is not None:
            _log.error("autopar: step %d was not saved: %s", self.step, error)
        self._error = error
        self._done.set()


@dataclass(slots=True)
class _Root:
    """What was last saved to a root by this process. A save's ``number`` is the same in all processes."""

    last: Save | None = None
    numbers: itertools.count[int] = field(default_factory=itertools.count)


_ROOTS: dict[Path, _Root] = {}
_LOCK = threading.Lock()


def save(
    path: str | os.PathLike[str], tree: Any, *, step: int, keep: int | None = None, deadline_s: float = DEADLINE_S,
    take_over: bool = False,
) -> Save:  # fmt: skip
    """Writes ``tree`` as the checkpoint of ``step`` under the root ``path``, and returns when its numbers are on the
    host: the arrays may then be donated. The rest happens in a thread; `Save.wait` waits for it.

    The save before (to this path) is waited for first, and if it failed and nobody has been told, its error is raised
    here.

    The root is this process's from then on (of several processes: the first's): another driver is refused until this
    one ends, or calls `autopar.checkpoint.release`.

    Args:
        path: folder of all checkpoints, on a file system that all processes see and that renames folders atomically.
        tree: pytree whose leaves are arrays of any sharding and dtype that JAX has, random keys, numpy arrays,
            `autopar.Array`, those of a step on a cluster, Python numbers or None; those that lie on no devices are
            written by process 0.
        step: number of the checkpoint, 0 or more.
        keep: older checkpoints than the last ``keep`` are removed when this one is complete; what cannot be removed
            stays, with a warning. None: all stay.
        deadline_s: how long processes wait for each other, in seconds.
        take_over: True: a driver of another host that left the root without a word is known to be gone.

    Returns:
        A `Save`, to wait for.

    Raises:
        CheckpointError: a leaf cannot be stored, ``step`` is no number, ``keep`` is below 1, the step is there already
            (with several processes `Save.wait` raises it), or tensorstore is not installed. What goes wrong later
            `Save.wait` raises.
        WorkerError: workers that have leaves are gone.
    """
    tensorstore()
    step = step_number(step)
    if keep is not None and keep < 1:
        raise CheckpointError(f"keep={keep}: expected 1 or more, or None to keep all")
    root = Path(path).absolute()
    with _LOCK:
        state = _ROOTS.setdefault(root, _Root())
    if state.last is not None:
        if state.last._told:
            state.last._done.wait()
        else:
            state.last.wait()
    group = processes()
    number = next(state.numbers)
    if group.count == 1 and of_step(root, step) is not None:
        begin(root, step)  # raises, here rather than in the thread
    started_ns = time.time_ns()
    leaves, slices, kept = _snapshot(tree, group)
    state.last = handle = Save(root, step)
    job = _Job(
        root,
        step,
        keep,
        deadline_s,
        started_ns,
        leaves,
        slices,
        kept,
        group,
        f"autopar/save/{root}/{number}",
        take_over,
    )
    previous = f"autopar/save/{root}/{number - 2}"  # that all have read: they have all begun the one after it
    threading.Thread(target=_run, args=(job, handle, previous), name=f"autopar-save-{step}").start()
    return handle


@dataclass(frozen=True, slots=True)
class _Job:
    root: Path
    step: int
    keep: int | None
    deadline_s: float
    started_ns: int
    leaves: Sequence[Leaf]
    slices: Sequence[Slices]
    kept: Sequence[tuple[Keeper, str]]
    """Snapshots that others write."""
    group: Processes
    key: str
    take_over: bool


def _run(job: _Job, handle: Save, previous: str) -> None:
    try:
        if job.group.index == 0:
            _lead(job, previous)
        else:
            _follow(job)
        error = None
    except BaseException as caught:  # noqa: BLE001 - handed to whoever waits
        error = caught
    handle._ends(error)


def _lead(job: _Job, previous: str) -> None:
    group = job.group
    others = range(1, group.count)
    try:
        try:
            folder = begin(job.root, job.step, take_over=job.take_over)
        except BaseException:
            group.put(f"{job.key}/folder", "")  # there is none, and the outcome says why
            raise
        group.put(f"{job.key}/folder", str(folder))
        write_slices(folder, "0", job.slices)
        writers = list(map(str, range(group.count)))
        for keeper, name in job.kept:
            writers += keeper.write(name, folder, job.deadline_s)
        for other in others:
            said = _hear(job, f"{job.key}/written/{other}", f"process {other}")
            if said:
                raise CheckpointError(f"process {other} could not write step {job.step}: {said}")
        commit(folder, job.leaves, writers, started_ns=job.started_ns)
    except BaseException as error:
        if group.count > 1:
            group.put(f"{job.key}/outcome", f"{type(error).__name__}: {error}")
        raise
    if group.count > 1:
        group.put(f"{job.key}/outcome", "")
        group.forget(previous)
    if job.keep is not None:
        keep_last(job.root, job.keep)


def _follow(job: _Job) -> None:
    group = job.group
    folder = _hear(job, f"{job.key}/folder", "process 0")
    if folder:
        try:
            write_slices(Path(folder), str(group.index), job.slices)
        except BaseException as error:
            group.put(f"{job.key}/written/{group.index}", f"{type(error).__name__}: {error}")
            raise
        group.put(f"{job.key}/written/{group.index}", "")
    outcome = _hear(job, f"{job.key}/outcome", "process 0")
    if outcome:
        raise CheckpointError(f"process 0 could not commit step {job.step}: {outcome}")


def _hear(job: _Job, key: str, who: str) -> str:
    try:
        return job.group.get(key, job.deadline_s)
    except TimeoutError:
        raise CheckpointError(
            f"{job.root}: step {job.step}: {who} did not answer within {job.deadline_s:g} s (deadline_s=)"
        ) from None
    except AutoparError:
        raise
    except RuntimeError as error:
        raise CheckpointError(f"{job.root}: step {job.step}: lost {who}: {error}") from error


def _snapshot(tree: Any, group: Processes) -> tuple[list[Leaf], list[Slices], list[tuple[Keeper, str]]]:
    """All leaves; on this host, the numbers of the boxes that this process writes; and snapshots of what others
    write."""
    entries, _ = flatten(tree)
    for path, value in entries:
        where = Leaf(path=path).where
        if isinstance(value, jax.core.Tracer):
            raise CheckpointError(f"leaf {where}: being traced. Save outside jax.jit")
        if isinstance(value, jax.ShapeDtypeStruct):
            raise CheckpointError(f"leaf {where}: a ShapeDtypeStruct has no numbers. Save arrays")
        if isinstance(value, jax.Array | Array) and value.is_deleted():
            raise CheckpointError(f"leaf {where}: its array was donated or deleted. Save the step's outputs")
        if isinstance(value, Kept) and not isinstance(value, Array):
            raise CheckpointError(f"leaf {where}: says where an array is to be, and has no numbers: {value!r}")
    values = [value for _, value in entries]
    keepers = by_keeper(values)
    theirs: dict[int, list[Index]] = {}
    for keeper, mine in keepers:
        theirs.update(zip(mine, keeper.boxes([values[i] for i in mine]), strict=True))
    leaves = [leaf_of(path, value, theirs.get(i)) for i, (path, value) in enumerate(entries)]
    chosen: list[tuple[Leaf, list[tuple[Index, Any]]]] = []
    for number, (leaf, (_, value)) in enumerate(zip(leaves, entries)):
        if number in theirs:
            continue
        if isinstance(value, jax.Array | Array):
            chosen.append((leaf, _own_boxes(leaf, value, number, group.index)))
        elif leaf.kind != "empty" and group.index == 0:
            number_ = np.asarray(value, leaf.dtype) if is_scalar(value) else value
            chosen.append((leaf, [(whole(leaf.shape), np.array(number_))]))
    for _, boxes in chosen:
        for _, data in boxes:
            if isinstance(data, jax.Array):
                data.copy_to_host_async()
    kept = [(keeper, keeper.snapshot([(leaves[i], values[i]) for i in mine])) for keeper, mine in keepers]
    return leaves, [(leaf, [(box, on_host(data)) for box, data in boxes]) for leaf, boxes in chosen], kept


def _own_boxes(leaf: Leaf, array: jax.Array | Array, number: int, process: int) -> list[tuple[Index, Any]]:
    """The boxes of ``array`` that this process writes: of each, the turn goes around among the processes that hold it.
    The data are arrays on one device each. Of copies on several meshes one is written."""
    return [x for piece in pieces_of(array) for x in own_boxes(leaf, piece, number, process)]


def own_boxes(leaf: Leaf, piece: Piece, number: int, process: int) -> list[tuple[Index, Any]]:
    """The boxes of a piece of a leaf that ``process`` writes, with arrays on one device each. ``number``: whose turn it
    is first among processes that hold the same.

    Raises CheckpointError where the piece is no array but says where one is to be.
    """
    part, own = piece.array, list[tuple[Index, Any]]()
    if not isinstance(part, jax.Array):
        raise CheckpointError(f"leaf {leaf.where}: says where an array is to be, and has no numbers: {part}")
    local = {shard.device: shard.data for shard in part.addressable_shards}
    for turn, (box, devices) in enumerate(boxes_of(part.sharding, part.shape, piece.start).items(), number):
        holders = sorted({device.process_index for device in devices})
        if holders[turn % len(holders)] != process:
            continue
        data = next(local[device] for device in devices if device in local)
        if is_key_dtype(part.dtype):
            data = jax.random.key_data(data)
            box = (*box, *whole(leaf.shape[len(part.shape) :]))
        own.append((box, data))
    return own


def on_host(data: Any) -> np.ndarray:
    """The numbers of an array on the host. On CPU they are a view of its memory, which JAX does not reuse while numpy
    looks at it, donated or not (tested)."""
    return np.asarray(data)
