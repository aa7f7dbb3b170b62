"""Slices of named leaves into the database, and the commit that makes a checkpoint of what all processes wrote.

Each writer has a database of its own (OCDBT, in ``ocdbt.process_<writer>``), so writers need not speak to each other.
`commit` makes one of them by reference, checks that every chunk of every leaf is there, and writes the marker. Chunks
are not compressed (floats of a training state hardly shrink) and carry a CRC-32C, so damaged data is not restored.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autopar._version import __version__
from autopar.checkpoint.folder import ITEM, finish
from autopar.checkpoint.leaf import Index, Leaf, np_dtype, prefix_of, slices_of
from autopar.ir.errors import CheckpointError

Slices = tuple[Leaf, Sequence[tuple[Index, np.ndarray]]]
"""A leaf, and the boxes of it that the caller writes, with their numbers."""

_WRITER = "ocdbt.process_"
_CONFIG = {"max_decoded_node_bytes": 100_000_000, "max_inline_value_bytes": 1024}
"""Of the databases, as Orbax sets them: values up to 1 KiB lie in the index."""


def tensorstore() -> Any:
    """The module tensorstore.

    Raises CheckpointError where it is not installed.
    """
    try:
        import tensorstore
    except ImportError as error:
        raise CheckpointError(
            f"checkpoints need tensorstore, which cannot be imported ({error}). "
            "Install it: pip install 'autopar[checkpoint]'"
        ) from error
    return tensorstore


def database(folder: Path) -> dict[str, Any]:
    """tensorstore's description of the OCDBT database in ``folder``."""
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}, "config": _CONFIG}


def write_slices(folder: Path, writer: str, slices: Iterable[Slices]) -> int:
    """Writes this writer's slices, which are on the disk when it returns. Call it for all slices at once, or several
    times one after the other.

    Args:
        folder: from `begin`.
        writer: a name that no other process uses in this checkpoint: letters, digits and underscores.
        slices: leaves with the boxes of each that this writer has, and their numbers. Each box has to consist of whole
            chunks of its leaf (`chunk_of`), and no two calls may write the same.

    Returns:
        The bytes written.

    Raises:
        CheckpointError: ``folder`` is not there (a later `begin` removes it), a box is not made of whole chunks,
            numbers have another shape or dtype than their box, or writing fails.
    """
    ts = tensorstore()
    if not re.fullmatch(r"\w+", writer):
        raise CheckpointError(f"writer {writer!r}: letters, digits and underscores only")
    base = database(Path(folder) / ITEM / f"{_WRITER}{writer}")
    if not (Path(folder) / ITEM).is_dir():
        raise CheckpointError(f"{folder}: not there: begin() makes it, and a later begin() removes it")
    context = ts.Context()
    done: list[tuple[Leaf, Any]] = []
    written = 0
    try:
        (Path(folder) / ITEM / f"{_WRITER}{writer}").mkdir(exist_ok=True)  # a writer of nothing has one too
        opened = [
            (leaf, pieces, ts.open(_array(leaf, base), create=True, open=True, context=context))
            for leaf, pieces in slices
            if leaf.kind != "empty"
        ]
        for leaf, pieces, future in opened:
            array = future.result()
            for index, value in pieces:
                _check_slice(leaf, index, value)
                if 0 in value.shape:
                    continue
                write = array[slices_of(index)].write(value, can_reference_source_data_indefinitely=True)
                done.append((leaf, write.commit))
                written += value.nbytes
        for _, future in done:
            future.result()
    except (ValueError, OSError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder}: writer {writer}: {short(error)}") from error
    return written


def _array(leaf: Leaf, base: dict[str, Any]) -> dict[str, Any]:
    endian = {} if np_dtype(leaf.dtype).itemsize == 1 else {"configuration": {"endian": "little"}}
    return {
        "driver": "zarr3",
        "kvstore": {**base, "path": prefix_of(leaf.name)},
        "metadata": {
            "shape": list(leaf.shape),
            "data_type": leaf.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(leaf.chunk)}},
            "codecs": [{"name": "bytes", **endian}, {"name": "crc32c"}],
        },
        "store_data_equal_to_fill_value": True,
    }


def _check_slice(leaf: Leaf, index: Index, value: np.ndarray) -> None:
    fits = len(index) == len(leaf.shape) and all(
        0 <= start <= stop <= size and start % chunk == 0 and (stop % chunk == 0 or stop == size)
        for (start, stop), size, chunk in zip(index, leaf.shape, leaf.chunk)
    )
    if not fits:
        raise CheckpointError(
            f"leaf {leaf.where}: slice {index} is not made of whole chunks {leaf.chunk} of shape {leaf.shape}. "
            "Give chunk_of the boxes of all writers"
        )
    shape = tuple(stop - start for start, stop in index)
    if value.shape != shape or value.dtype != np_dtype(leaf.dtype):
        raise CheckpointError(
            f"leaf {leaf.where}: slice {index} got {value.dtype}{list(value.shape)}, expected {leaf.dtype}{list(shape)}"
        )


def commit(folder: Path, leaves: Sequence[Leaf], writers: Iterable[str], *, started_ns: int | None = None) -> Path:
    """Makes a complete checkpoint of what all ``writers`` have written; one process calls this, when all are done.

    Args:
        folder: from `begin`.
        leaves: all leaves of the tree, empty ones included, in the order of the tree (`leaves_of`).
        writers: names that were given to `write_slices`.
        started_ns: when the save began, in nanoseconds since 1970; default: now.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: two leaves have one name, a writer wrote nothing, or a chunk of a leaf was written by nobody;
            then there is no checkpoint.
    """
    ts = tensorstore()
    folder = Path(folder)
    item = folder / ITEM
    names = [leaf.name for leaf in leaves]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise CheckpointError(f"{folder}: several leaves have the name {twice[0]!r} in the checkpoint")
    context = ts.Context()
    try:
        parent = ts.KvStore.open(database(item), context=context).result()
        transaction = ts.Transaction(atomic=True)
        copies: list[Any] = []
        for writer in sorted(set(writers)):
            if not (item / f"{_WRITER}{writer}").is_dir():
                raise CheckpointError(f"{folder}: writer {writer} wrote nothing; the checkpoint is not complete")
            child = ts.KvStore.open(database(item / f"{_WRITER}{writer}"), context=context).result()
            copies.append(child.experimental_copy_range_to(parent.with_transaction(transaction)))
        for copy in copies:
            copy.result()
        transaction.commit_async().result()
        there = {key.decode() for key in parent.list().result()}
    except (ValueError, OSError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder}: cannot be committed: {short(error)}") from error
    for leaf in leaves:
        missing = [key for key in leaf.chunk_keys() if key not in there] if leaf.kind != "empty" else []
        if missing:
            raise CheckpointError(
                f"{folder}: leaf {leaf.where}: {len(missing)} chunks were written by no process, the first "
                f"{missing[0]!r}; the checkpoint is not complete"
            )
    return finish(folder, *_descriptions(leaves), started_ns=started_ns or time.time_ns())


def _descriptions(leaves: Sequence[Leaf]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Orbax's descriptions of a pytree and of its arrays.

    Arrays are said to be numpy's: then Orbax returns them as such where its caller names no sharding, and needs no
    devices of the names that they once lay on.
    """
    tree = {
        str(tuple(key.name for key in leaf.path)): {
            "key_metadata": [{"key": key.name, "key_type": 1 if key.sequence else 2} for key in leaf.path],
            "value_metadata": {
                "value_type": leaf.empty or ("scalar" if leaf.kind == "scalar" else "np.ndarray"),
                "skip_deserialize": leaf.kind == "empty",
            },
        }
        for leaf in leaves
    }
    arrays = [
        {
            "array_metadata": {
                "param_name": leaf.name,
                "write_shape": list(leaf.shape),
                "chunk_shape": list(leaf.chunk),
                "ext_metadata": {"random_key_impl": leaf.key_impl} if leaf.key_impl else None,
            }
        }
        for leaf in leaves
        if leaf.kind in ("array", "key")
    ]
    about = {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": {"autopar": __version__},
    }
    return about, {"array_metadatas": arrays}


def short(error: BaseException) -> str:
    """tensorstore's message without the description of the array that it appends."""
    return str(error).partition(" [tensorstore_spec=")[0].partition(" [source locations")[0]
