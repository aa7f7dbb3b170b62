"""Restores a pytree into other shardings than it was saved with: each process reads what its devices hold.

The tree given says what is wanted, leaf by leaf:

- a `jax.Array` or `jax.ShapeDtypeStruct` with a sharding: an array of that shape, dtype and sharding;
- what stands for an array of a step on a cluster: one that its workers have read;
- an `autopar.Array`, whose pieces may be `jax.ShapeDtypeStruct`s: one with the same pieces;
- a `jax.sharding.Sharding`: an array of the shape and dtype stored, of that sharding;
- a `jax.ShapeDtypeStruct` without a sharding, or a numpy array: a numpy array of that shape and dtype;
- a Python number: one of that type;
- None, or an empty container: itself.

Nothing is converted: another shape or dtype is an error.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar.arrays import Array, keys_of
from autopar.checkpoint.elsewhere import Kept, by_keeper
from autopar.checkpoint.folder import is_item, latest, no_checkpoint, steps
from autopar.checkpoint.leaf import Index, Leaf, np_dtype, whole
from autopar.checkpoint.reading import Checkpoint, open_checkpoint, read_slices
from autopar.checkpoint.tree import (
    boxes_of,
    flatten,
    is_empty,
    is_key_dtype,
    is_scalar,
    key_impl,
    scalar_dtype,
    words_shape,
)
from autopar.ir.errors import AutoparError, CheckpointError
from autopar.jax_compat import Device
from autopar.processes import decided, processes

AS_STORED = object()
"""In the place of a tree: all that is there."""

AGREE_S = 300.0
"""How long processes wait for each other to choose a step. Guessed."""
LAG_S = 60.0
"""For a shared file system to show a checkpoint to all hosts (chosen: what NFS keeps attributes for at the most)."""

_Wanted = tuple[list[tuple[Leaf, Index]], Callable[[list[np.ndarray]], Any]]
"""The boxes to read, and what makes the leaf of their numbers."""


def restore(
    path: str | os.PathLike[str], like: Any = AS_STORED, *, step: int | None = None, partial: bool = False
) -> Any:
    """The tree that `save`, or Orbax, stored.

    Several processes call it together. Nothing is converted.

    Args:
        path: root of the checkpoints; or the folder of one pytree, such as Orbax's StandardCheckpointer makes.
        like: the tree that is wanted. Of its leaves `jax.Array`, and `jax.ShapeDtypeStruct` with a sharding, give an
            array of that shape, dtype and sharding; `autopar.Array` one with the same pieces; a `jax.sharding.Sharding`
            the stored shape and dtype in that sharding; a `jax.ShapeDtypeStruct` without a sharding, or a numpy array,
            a numpy array of that shape and dtype; a Python number one of that type; None itself. `Step.abstract` makes
            it for a step. Default: all that is stored, as numpy arrays in dictionaries and lists.
        step: which checkpoint; default: the last that is complete, the same in all processes.
        partial: True: ``like`` may leave out leaves that are stored.

    Returns:
        A pytree as ``like``.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or a leaf is missing, left out, or has another
            shape or dtype (the message names it).
        WorkerError: workers that are to have leaves are gone.
    """
    if step is None and not is_item(path):
        step = agreed_step(path)
        if step is None:
            raise no_checkpoint(path)
    checkpoint = open_checkpoint(path, step)
    if like is AS_STORED:
        return _as_stored(checkpoint)
    entries, structure = flatten(like, lambda x: isinstance(x, jax.sharding.Sharding))
    wanted = [_wanted(checkpoint, checkpoint.leaf(path), value) for path, value in entries]
    extra = set(checkpoint.leaves) - {Leaf(path=path).name for path, _ in entries}
    if extra and not partial:
        some = ", ".join(leaf.where for name, leaf in checkpoint.leaves.items() if name in extra)[:300]
        raise CheckpointError(
            f"{checkpoint.folder}: {len(extra)} stored leaves are not in the tree given: {some}. "
            "partial=True restores without them"
        )
    values = [value for _, value in entries]
    far: dict[int, Any] = {}
    for keeper, mine in by_keeper(values):
        leaves = [(checkpoint.leaf(entries[i][0]), values[i]) for i in mine]
        far.update(zip(mine, keeper.restore(checkpoint.folder, leaves), strict=True))
    numbers = iter(read_slices(checkpoint, (box for boxes, _ in wanted for box in boxes)))
    made = [make([next(numbers) for _ in boxes]) for boxes, make in wanted]
    return jax.tree.unflatten(structure, [far.get(i, x) for i, x in enumerate(made)])


def restore_pieces(item: Path, leaves: Sequence[tuple[Leaf, Array]]) -> list[Array]:
    """Pieces that this process is to have of leaves of the pytree in folder ``item``: what a worker of a pipeline
    calls. The arrays given say where the pieces are to be; they need not be all of their leaves.

    Raises CheckpointError as `restore`.
    """
    checkpoint = open_checkpoint(item)
    wanted = [_on_meshes(checkpoint, checkpoint.leaf(leaf.path), value) for leaf, value in leaves]
    numbers = iter(read_slices(checkpoint, (box for boxes, _ in wanted for box in boxes)))
    return [make([next(numbers) for _ in boxes]) for boxes, make in wanted]


def agreed_step(path: str | os.PathLike[str], decide: Callable[[], int | None] | None = None) -> int | None:
    """The step that all processes go on from: the last that is complete as process 0 sees it (a shared file system may
    show others an older state), or what ``decide`` says there. All processes call this; it returns where this one sees
    the step too. None: there is none.

    Raises CheckpointError where a process does not call it, or does not see the step within a minute, and in all
    processes what ``decide`` raises in process 0.
    """
    group, decide = processes(), decide or (lambda: latest(path))
    try:
        said = decided(group, f"autopar/step/{Path(path).absolute()}", lambda: json.dumps(decide()), AGREE_S)
    except TimeoutError as error:
        raise CheckpointError(
            f"{path}: processes do not agree which step to go on from: {error}. All of them call restore, or give step="
        ) from None
    except AutoparError:
        raise
    except RuntimeError as error:
        raise CheckpointError(f"{path}: {error}") from error
    step: int | None = json.loads(said)
    stop_s = time.monotonic() + LAG_S
    while group.index and step is not None and step not in steps(path) and time.monotonic() < stop_s:
        time.sleep(0.1)  # `item_of` says so where it never comes
    return step


def _wanted(checkpoint: Checkpoint, leaf: Leaf, value: Any) -> _Wanted:
    if isinstance(value, jax.sharding.Sharding):
        return _sharded(checkpoint, leaf, value, *_stored_type(checkpoint, leaf))
    if is_empty(value) or leaf.kind == "empty":
        if not is_empty(value) or leaf.kind != "empty":
            raise _differs(checkpoint, leaf, _said(value))
        return [], lambda _: value
    if is_scalar(value):
        if leaf.shape or leaf.dtype != scalar_dtype(value):
            raise _differs(checkpoint, leaf, f"a Python {type(value).__name__}")
        return [(leaf, ())], lambda read: read[0].item()
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise CheckpointError(
            f"leaf {leaf.where}: a {type(value).__name__} says nothing about what to restore; expected an array, a "
            "jax.ShapeDtypeStruct, a sharding, a number or None"
        )
    shape, dtype = tuple(value.shape), value.dtype
    keys = is_key_dtype(dtype)
    stored = _stored_type(checkpoint, leaf) if not keys or leaf.kind == "key" else None
    if stored != (shape, dtype):
        raise _differs(checkpoint, leaf, _said(value))
    if isinstance(value, Kept):
        return [], lambda _: None
    if isinstance(value, Array):
        return _on_meshes(checkpoint, leaf, value)
    sharding = getattr(value, "sharding", None)
    if sharding is not None:
        return _sharded(checkpoint, leaf, sharding, shape, dtype)
    if keys:
        return [(leaf, whole(leaf.shape))], lambda read: _keys(leaf, read[0])
    if isinstance(value, np.generic):
        return [(leaf, ())], lambda read: read[0][()]
    return [(leaf, whole(leaf.shape))], lambda read: read[0]


def _stored_type(checkpoint: Checkpoint, leaf: Leaf) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of what is stored, as JAX sees it."""
    match leaf.kind:
        case "empty":
            raise _differs(checkpoint, leaf, "an array")
        case "key":
            assert leaf.key_impl is not None
            try:
                one = jax.eval_shape(lambda: jax.random.key(0, impl=leaf.key_impl))
            except (ValueError, TypeError) as error:
                raise CheckpointError(
                    f"{checkpoint.folder}: leaf {leaf.where}: random keys of the implementation {leaf.key_impl!r}, "
                    f"which JAX does not know: {error}"
                ) from error
            return leaf.shape[: len(leaf.shape) - len(words_shape((), one.dtype))], one.dtype
        case _:
            return leaf.shape, np_dtype(leaf.dtype)


def _on_meshes(checkpoint: Checkpoint, leaf: Leaf, value: Array) -> _Wanted:
    """What several meshes have in common is read once."""
    parts = [
        _sharded(checkpoint, leaf, p.array.sharding, tuple(p.array.shape), value.dtype, p.start) for p in value.pieces
    ]
    boxes = list(dict.fromkeys(box for wanted, _ in parts for box in wanted))

    def make(read: list[np.ndarray]) -> Array:
        found = {index: numbers for (_, index), numbers in zip(boxes, read, strict=True)}
        made = [make([found[index] for _, index in wanted]) for wanted, make in parts]
        pieces = tuple(replace(p, array=x) for p, x in zip(value.pieces, made, strict=True))
        return Array(value.shape, value.dtype, pieces)

    return boxes, make


def _sharded(
    checkpoint: Checkpoint, leaf: Leaf, sharding: jax.sharding.Sharding, shape: tuple[int, ...], dtype: Any,
    row: int = 0,
) -> _Wanted:  # fmt: skip
    """An array of ``shape``: of all of the leaf, or of its rows from ``row``."""
    keys = is_key_dtype(dtype)
    if not keys and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise CheckpointError(
            f"{checkpoint.folder}: leaf {leaf.where}: {leaf.dtype} needs JAX's 64-bit types. Set jax_enable_x64, or "
            "restore it as a numpy array (a jax.ShapeDtypeStruct without sharding)"
        )
    try:
        sharding.shard_shape(shape)
        boxes = boxes_of(sharding, shape, row)
    except ValueError as error:
        raise CheckpointError(
            f"{checkpoint.folder}: leaf {leaf.where}: shape {shape} cannot have the sharding {sharding}: {error}"
        ) from error
    here = jax.process_index()
    local = {box: [d for d in devices if d.process_index == here] for box, devices in boxes.items()}
    local = {box: devices for box, devices in local.items() if devices}
    tail = whole(leaf.shape[len(shape) :]) if keys else ()

    def make(read: list[np.ndarray]) -> jax.Array:
        parts: dict[Device, jax.Array] = {}
        for value, devices in zip(read, local.values(), strict=True):
            for device in devices:
                part = jax.device_put(value, device)
                parts[device] = jax.random.wrap_key_data(part, impl=leaf.key_impl) if keys else part
        ordered = [parts[device] for device in sharding.addressable_devices_indices_map(shape)]
        return jax.make_array_from_single_device_arrays(shape, sharding, ordered, dtype=None if parts else dtype)

    return [(leaf, (*box, *tail)) for box in local], make


def _keys(leaf: Leaf, words: np.ndarray) -> jax.Array:
    assert leaf.key_impl is not None
    return keys_of(leaf.key_impl, words)


def _said(value: Any) -> str:
    if is_empty(value):
        return "None or an empty container"
    if is_key_dtype(getattr(value, "dtype", None)):
        return f"random keys ({key_impl(value.dtype)}) of shape {tuple(value.shape)}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return f"{dtype} of shape {tuple(shape)}" if shape is not None else f"a Python {type(value).__name__}"


def _differs(checkpoint: Checkpoint, leaf: Leaf, wanted: str) -> CheckpointError:
    match leaf.kind:
        case "empty":
            got = f"nothing ({leaf.empty})"
        case "key":
            got = f"random keys ({leaf.key_impl}), as words of shape {leaf.shape}"
        case _:
            got = f"{leaf.dtype} of shape {leaf.shape}"
    return CheckpointError(
        f"{checkpoint.folder}: leaf {leaf.where}: the tree given wants {wanted}, the checkpoint has {got}. "
        "Restore what is stored (the leaf's sharding alone, or no tree at all), then convert it"
    )


def _as_stored(checkpoint: Checkpoint) -> Any:
    """Numpy arrays, numbers and keys in dictionaries and lists, by the paths stored."""
    made: dict[str, Any] = {}
    empties = {"Dict": dict, "List": list, "Tuple": tuple}
    for name, leaf in checkpoint.leaves.items():
        match leaf.kind:
            case "empty":
                made[name] = empties.get(leaf.empty or "", lambda: None)()
            case "key":
                (words,) = read_slices(checkpoint, [(leaf, whole(leaf.shape))])
                made[name] = _keys(leaf, words)
            case _:
                (read,) = read_slices(checkpoint, [(leaf, whole(leaf.shape))])
                made[name] = read.item() if leaf.kind == "scalar" else read
    tree: dict[str, Any] = {}
    for name, leaf in checkpoint.leaves.items():
        at: dict[str, Any] = tree
        for key in leaf.path[:-1]:
            at = at.setdefault(key.name, {})
        if not leaf.path:
            return made[name]
        at[leaf.path[-1].name] = made[name]
    sequences = {tuple(k.name for k in leaf.path[:n]) for leaf in checkpoint.leaves.values()
                 for n, key in enumerate(leaf.path) if key.sequence}  # fmt: skip
    return _with_lists(tree, (), sequences)


def _with_lists(tree: Any, at: tuple[str, ...], sequences: set[tuple[str, ...]]) -> Any:
    if not isinstance(tree, dict) or not tree:
        return tree
    inner = {name: _with_lists(value, (*at, name), sequences) for name, value in tree.items()}
    return list(inner.values()) if at in sequences else inner
