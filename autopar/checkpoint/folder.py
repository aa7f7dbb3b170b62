"""The folders of a root: which checkpoints are complete, and how one comes to be.

Nothing is ever written into a complete checkpoint. One that is being written lies in a folder of its own, whose name
Orbax takes for unfinished too; each file in it is on the disk before the marker is, the marker before the folder is
renamed.
"""

from __future__ import annotations

import json
import logging
import operator
import os
import re
import secrets
import shutil
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from autopar.checkpoint.owner import own
from autopar.ir import files
from autopar.ir.errors import CheckpointError

ITEM = "default"
"""The one item of a checkpoint, as CheckpointManager names it."""
UNFINISHED = ".orbax-checkpoint-tmp"
"""In the names of folders that are not checkpoints; Orbax's mark."""
MARKER = "commit_success.txt"
ABOUT = "_CHECKPOINT_METADATA"
TREE = "_METADATA"
ARRAYS = "array_metadatas/process_0"
_DIGESTS = "autopar_sha256 "
_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"

_log = logging.getLogger(__name__)


def steps(root: str | os.PathLike[str]) -> tuple[int, ...]:
    """The steps of the complete checkpoints in a root, ascending.

    Args:
        root: folder of all checkpoints; it need not be there.
    """
    root = Path(root)
    if not root.is_dir():
        return ()
    found = (path for path in root.iterdir() if is_number(path.name) and path.is_dir())
    return tuple(sorted({int(path.name) for path in found if is_complete(path)}))


def latest(root: str | os.PathLike[str]) -> int | None:
    """The last step that is complete.

    Args:
        root: folder of all checkpoints; it need not be there.

    Returns:
        Its number; None where there is no complete checkpoint.
    """
    return max(steps(root), default=None)


def is_complete(folder: Path) -> bool:
    """True where the marker is there, or (what older versions of Orbax write) the time at which it was committed."""
    if (folder / MARKER).is_file():
        return True
    try:
        about = files.parsed(files.read(folder / ABOUT))
    except (OSError, files.DamagedError):
        return False
    return isinstance(about, dict) and bool(about.get("commit_timestamp_nsecs"))


def item_of(root: str | os.PathLike[str], step: int) -> Path:
    """The folder of a complete checkpoint's pytree.

    Args:
        root: folder of all checkpoints.
        step: number of the checkpoint.

    Raises:
        CheckpointError: there is no complete one.
    """
    folder = of_step(Path(root), step)
    if folder is not None and is_complete(folder):
        return folder / ITEM
    there = ", ".join(map(str, steps(root))) or "none"
    half = sorted(path.name for path in Path(root).glob(f"{step}{UNFINISHED}*"))
    why = f"; its writing was interrupted ({half[0]})" if half else "; its marker is missing" if folder else ""
    raise CheckpointError(f"{root}: no complete checkpoint of step {step}{why}. Complete steps: {there}")


def is_item(folder: str | os.PathLike[str]) -> bool:
    """True where ``folder`` is that of a finished pytree, not a root."""
    return (Path(folder) / TREE).is_file() and UNFINISHED not in str(Path(folder).absolute())


def no_checkpoint(root: str | os.PathLike[str]) -> CheckpointError:
    """The error to raise for a root without a complete checkpoint."""
    return CheckpointError(
        f"{root}: no complete checkpoint there (folders named by a step, with {MARKER}). "
        "autopar.latest(path) is None in this case"
    )


def is_number(name: str) -> bool:
    """True for the names of steps' folders."""
    return name.isascii() and name.isdigit()


def step_number(step: Any) -> int:
    """A step's number, of an integer of Python, NumPy or JAX. Raises CheckpointError where it is none from 0 on."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError(f"step={step!r}: expected a whole number, 0 or more")
    return number


def of_step(root: Path, step: int) -> Path | None:
    """The folder of a step that is named by its number, complete or not; the name may have leading zeros. None where
    there is none."""
    exact = root / str(step)
    if exact.is_dir():
        return exact
    if not root.is_dir():
        return None
    return next((path for path in sorted(root.iterdir()) if is_number(path.name) and int(path.name) == step), None)


def begin(root: str | os.PathLike[str], step: int, *, take_over: bool = False) -> Path:
    """An empty folder for a new checkpoint: one process calls this, which owns the root from then on (`own`), and tells
    the others.

    What interrupted saves left in ``root`` is removed, as far as it can be, so that a late writer of one of them fails
    instead of mixing its data into this one.

    Args:
        root: folder of all checkpoints.
        step: number of the new one, 0 or more.
        take_over: see `own`.

    Returns:
        The folder, for `write_slices` and `commit`.

    Raises:
        CheckpointError: the step is there, another driver owns the root, or the folder cannot be made.
    """
    step, root = step_number(step), Path(root).absolute()
    if of_step(root, step) is not None:
        raise CheckpointError(
            f"{root}: there is a checkpoint of step {step} already. Save under another step, or remove it first: "
            f"autopar.checkpoint.delete(path, {step})"
        )
    own(root, take_over=take_over)
    try:
        for old in root.glob(f"*{UNFINISHED}*"):
            _remove(old)
        folder = root / f"{step}{UNFINISHED}-{secrets.token_hex(4)}"
        (folder / ITEM).mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{root}: cannot begin a checkpoint: {error}") from error
    return folder


def finish(folder: Path, tree: dict[str, Any], arrays: dict[str, Any], started_ns: int) -> Path:
    """Writes the descriptions, then the marker, and gives ``folder`` (`begin`'s) its final name, which is returned.

    Args:
        tree: the description of the pytree, ``_METADATA``.
        arrays: that of the arrays, ``array_metadatas/process_0``.
        started_ns: when the save began, in nanoseconds since 1970.

    Raises:
        CheckpointError: a file cannot be written, or another run has made a checkpoint of this step meanwhile.
    """
    root, step = folder.parent, folder.name.partition(UNFINISHED)[0]
    item = folder / ITEM
    about = {
        "item_handlers": {ITEM: _HANDLER},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": started_ns,
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": {},
    }
    try:
        (item / ARRAYS).parent.mkdir()
        sums = {name: write_durably(item / name, value) for name, value in ((TREE, tree), (ARRAYS, arrays))}
        write_durably(folder / ABOUT, about)
        for inner in (item / ARRAYS).parent, item, folder:
            _sync_folder(inner)
        _write(folder / MARKER, f"complete\n{_DIGESTS}{json.dumps(sums)}\n".encode())
        _sync_folder(folder)
        final = root / step
        if final.exists():  # another run saves into this root: renaming onto an empty folder would succeed
            raise CheckpointError(f"{root}: somebody else made a checkpoint of step {step} meanwhile")
        folder.rename(final)
        _sync_folder(root)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot finish the checkpoint: {error}") from error
    return final


def delete(root: str | os.PathLike[str], step: int) -> None:
    """Removes one checkpoint: it is no longer complete before its first file goes.

    Args:
        root: folder of all checkpoints.
        step: number of the checkpoint.

    Raises:
        CheckpointError: there is none of that step, or it cannot be removed.
    """
    root = Path(root).absolute()
    folder = of_step(root, step)
    if folder is None:
        raise CheckpointError(f"{root}: no checkpoint of step {step}. Steps: {list(steps(root))}")
    try:
        shutil.rmtree(_set_aside(folder))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be removed: {error}") from error


def _set_aside(folder: Path) -> Path:
    """Gives ``folder`` a name that is no checkpoint's, and that no writer knows: one that still lives must not be able
    to finish what is being removed."""
    step = folder.name.partition(UNFINISHED)[0]
    old = folder.rename(folder.parent / f"{step}{UNFINISHED}-deleted-{secrets.token_hex(4)}")
    _sync_folder(folder.parent)
    return old


def _remove(folder: Path) -> None:
    """Of what nobody asked to be removed: where it cannot be, a warning says so, and it is tried again at the next
    save."""
    try:
        shutil.rmtree(_set_aside(folder))
    except OSError as error:
        _log.warning("autopar: %s cannot be removed, and takes room on the disk: %s", folder, error)


def keep_last(root: Path, keep: int) -> None:
    """Removes all complete checkpoints but the last ``keep``, 1 or more, as far as they can be."""
    for step in steps(root)[:-keep]:
        if (folder := of_step(root, step)) is not None:
            _remove(folder)


def read_json(item: Path, name: str) -> Any:
    """Description ``name`` in an item's folder.

    Raises CheckpointError where it is missing, cannot be read, is no JSON, or is not as the marker's digest says.
    """
    path = item / name
    try:
        data = files.read(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{item}: {name} is missing: not a pytree that autopar or Orbax wrote, or a damaged one"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    except files.DamagedError as error:
        raise CheckpointError(f"{path}: damaged: {error}. Use an earlier step") from None
    wanted = digests(item.parent).get(name)
    got = sha256(data).hexdigest()
    if wanted is not None and got != wanted:
        raise CheckpointError(f"{path}: damaged: its SHA-256 is {got}, the marker says {wanted}. Use an earlier step")
    try:
        return files.parsed(data)
    except files.DamagedError as error:
        raise CheckpointError(f"{path}: not JSON: {error}. Use an earlier step") from None


def digests(folder: Path) -> dict[str, str]:
    """Description → SHA-256 (hex), as the marker says; empty where it says none (Orbax writes none) or cannot be read.
    Raises CheckpointError where what it says is damaged."""
    try:
        text = files.read_text(folder / MARKER)
    except (OSError, files.DamagedError):
        return {}
    line = next((line for line in text.splitlines() if line.startswith(_DIGESTS)), None)
    if line is None:
        return {}
    try:
        found: Any = files.parsed(line.removeprefix(_DIGESTS))
    except files.DamagedError:
        found = None
    if isinstance(found, dict) and all(len(k) < 256 and re.fullmatch("[0-9a-f]{64}", str(v)) for k, v in found.items()):
        return found
    raise CheckpointError(f"{folder / MARKER}: damaged. Use an earlier step")


def write_durably(path: Path, value: Any) -> str:
    """Writes ``value`` as JSON, on the disk when this returns; returns its SHA-256 (hex)."""
    data = json.dumps(value).encode()
    _write(path, data)
    return sha256(data).hexdigest()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
