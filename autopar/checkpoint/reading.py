"""Complete checkpoints opened: their leaves, and slices of them, of those that Orbax wrote too.

Opening reads the descriptions and the shape of each leaf, no numbers.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autopar.checkpoint.folder import ARRAYS, TREE, digests, is_item, item_of, latest, no_checkpoint, read_json, steps
from autopar.checkpoint.leaf import Index, Key, Kind, Leaf, prefix_of, slices_of
from autopar.checkpoint.store import database, short, tensorstore
from autopar.ir.errors import CheckpointError

IN_FLIGHT_BYTES = 2**30
"""So much is read at the same time, in the memory of the host. Guessed."""

_EMPTY = ("None", "Dict", "List", "Tuple", "NamedTuple")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint, opened.

    Attributes:
        folder: of its pytree.
        leaves: by name, in the order of the tree.
        arrays: the open array of each that has one, by name.
    """

    folder: Path
    leaves: dict[str, Leaf]
    arrays: dict[str, Any]

    def leaf(self, path: tuple[Key, ...]) -> Leaf:
        """The leaf of a path.

        Args:
            path: into the pytree.

        Raises:
            CheckpointError: there is none; names those that are most alike.
        """
        wanted = Leaf(path=path)
        found = self.leaves.get(wanted.name)
        if found is not None:
            return found
        near = difflib.get_close_matches(wanted.name, self.leaves, n=3) or list(self.leaves)[:3]
        alike = ", ".join(self.leaves[name].where for name in near)
        raise CheckpointError(
            f"{self.folder}: leaf {wanted.where} is not in the checkpoint, which has {len(self.leaves)} leaves; most "
            f"alike: {alike or 'none'}. Restore into the tree that was saved, and fill in what is new afterwards"
        )


def open_checkpoint(root: str | os.PathLike[str], step: int | None = None) -> Checkpoint:
    """Opens a complete checkpoint: reads descriptions and shapes, no numbers.

    Args:
        root: folder of all checkpoints; without ``step`` it may also be the folder of one pytree (that has
            ``_METADATA``), such as Orbax's StandardCheckpointer makes.
        step: which; default: the last that is complete.

    Returns:
        The `Checkpoint`.

    Raises:
        CheckpointError: there is none, or it is damaged or of another kind.
    """
    item = Path(root).absolute() if step is None and is_item(root) else None
    if item is None:
        step = latest(root) if step is None else step
        if step is None:
            raise no_checkpoint(root)
        item = item_of(root, step)
    tree = read_json(item, TREE)
    key_impls = _key_impls(item)
    try:
        leaves = [_leaf(entry, key_impls) for entry in _in_order(tree["tree_metadata"])]
        zarr3 = bool(tree.get("use_zarr3", False))
        ocdbt = tree.get("use_ocdbt")
        ocdbt = (item / "manifest.ocdbt").exists() if ocdbt is None else bool(ocdbt)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{item / TREE}: not a description of a pytree as Orbax writes it ({type(error).__name__}: {error})"
        ) from error
    stored = [leaf for leaf in leaves if leaf.kind != "empty"]
    if ocdbt and stored and not (item / "manifest.ocdbt").exists():
        raise CheckpointError(f"{item}: manifest.ocdbt is missing: damaged. Complete steps: {list(steps(root))}")
    ts = tensorstore()
    context = ts.Context()
    base = database(item) if ocdbt else {"driver": "file", "path": f"{item}/"}
    arrays: dict[str, Any] = {}
    whole_leaves: dict[str, Leaf] = {}
    opening: dict[str, Any] = {}
    for leaf in stored:
        path = prefix_of(leaf.name) if ocdbt else f"{item}/{leaf.name}/"
        spec = {"driver": "zarr3" if zarr3 else "zarr", "kvstore": {**base, "path": path}}
        opening[leaf.name] = ts.open(spec, open=True, read=True, context=context)
    for leaf in leaves:
        if leaf.kind == "empty":
            whole_leaves[leaf.name] = leaf
            continue
        try:
            array = arrays[leaf.name] = opening[leaf.name].result()
        except (ValueError, OSError, RuntimeError) as error:
            raise _damaged(item, leaf, error) from error
        whole_leaves[leaf.name] = Leaf(
            path=leaf.path, kind=leaf.kind, key_impl=leaf.key_impl, shape=tuple(array.shape),
            dtype=array.dtype.name, chunk=tuple(array.chunk_layout.read_chunk.shape or ()),
        )  # fmt: skip
    return Checkpoint(folder=item, leaves=whole_leaves, arrays=arrays)


def _in_order(tree: dict[str, Any]) -> list[tuple[tuple[Key, ...], dict[str, Any]]]:
    found: list[tuple[tuple[Key, ...], dict[str, Any]]] = []
    for text, entry in tree.items():
        if text != str(tuple(str(key["key"]) for key in entry["key_metadata"])):
            raise ValueError(f"path {text[:200]} does not agree with its parts")
        path = tuple(Key(name=str(key["key"]), sequence=key["key_type"] == 1) for key in entry["key_metadata"])
        found.append((path, entry["value_metadata"]))
    return found


def _leaf(entry: tuple[tuple[Key, ...], dict[str, Any]], key_impls: dict[str, str]) -> Leaf:
    path, value = entry
    leaf = Leaf(path=path)
    if value["value_type"] in _EMPTY:
        return Leaf(path=path, kind="empty", empty=value["value_type"])
    if value["value_type"] not in ("np.ndarray", "jax.Array", "scalar"):
        raise ValueError(f"leaf {leaf.where} is of the unknown kind {value['value_type']!r}")
    impl = key_impls.get(leaf.name)
    kind: Kind = "key" if impl else "scalar" if value["value_type"] == "scalar" else "array"
    return Leaf(path=path, kind=kind, key_impl=impl)


def _key_impls(item: Path) -> dict[str, str]:
    """Name of a leaf of random keys → their implementation; in Orbax's, of all processes."""
    said = {item / name for name in digests(item.parent) if name != TREE}  # one that is missing is an error
    files = sorted(said | set((item / ARRAYS).parent.glob("process_*")))
    found: dict[str, str] = {}
    for file in files:
        try:
            for entry in read_json(item, f"{file.parent.name}/{file.name}")["array_metadatas"]:
                about = entry["array_metadata"]
                if (about["ext_metadata"] or {}).get("random_key_impl"):
                    found[about["param_name"]] = about["ext_metadata"]["random_key_impl"]
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file}: not a description of arrays as Orbax writes it: {error!r}") from error
    return found


def read_slices(checkpoint: Checkpoint, wanted: Iterable[tuple[Leaf, Index]]) -> list[np.ndarray]:
    """The numbers of boxes; chunks that no box touches are not read.

    Args:
        checkpoint: that `open_checkpoint` opened.
        wanted: of each box its leaf, and (start, stop) in each dimension.

    Returns:
        A numpy array for each box, in order.

    Raises:
        CheckpointError: a box is not in its leaf, or data is damaged.
    """
    results: list[Any] = []
    oldest, in_flight = 0, 0
    for leaf, index in wanted:
        array = checkpoint.arrays[leaf.name]
        if len(index) != len(leaf.shape) or any(not 0 <= a <= b <= n for (a, b), n in zip(index, leaf.shape)):
            raise CheckpointError(f"{checkpoint.folder}: leaf {leaf.where} of shape {leaf.shape} has no slice {index}")
        results.append((leaf, array[slices_of(index)].read()))
        in_flight += _box_bytes(array, index)
        while in_flight > IN_FLIGHT_BYTES and oldest < len(results):
            results[oldest] = _taken(checkpoint, *results[oldest])
            in_flight -= results[oldest].nbytes
            oldest += 1
    return [r if isinstance(r, np.ndarray) else _taken(checkpoint, *r) for r in results]


def _box_bytes(array: Any, index: Index) -> int:
    items = 1
    for start, stop in index:
        items *= stop - start
    return items * array.dtype.numpy_dtype.itemsize


def _taken(checkpoint: Checkpoint, leaf: Leaf, future: Any) -> np.ndarray:
    try:
        return future.result()
    except (ValueError, OSError, RuntimeError) as error:
        raise _damaged(checkpoint.folder, leaf, error) from error


def _damaged(item: Path, leaf: Leaf, error: Exception) -> CheckpointError:
    others = [step for step in steps(item.parent.parent) if str(step) != item.parent.name]
    return CheckpointError(
        f"{item}: leaf {leaf.where}: its data is missing or damaged: {short(error)}. "
        f"Restore another step: {others or 'there is none'}"
    )
