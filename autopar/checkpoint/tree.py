"""Pytrees as checkpoints see them: which leaves there are, how they are named, what is stored of each.

A path's parts are named as Orbax names them: the index in a sequence, a dictionary's key as a string, a field's or
attribute's name. None and containers without leaves are stored too, as what they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.arrays import Array, Piece
from autopar.checkpoint.leaf import Index, Key, Leaf, chunk_of, index_of, whole
from autopar.ir.errors import CheckpointError
from autopar.jax_compat import Device

INT64 = np.iinfo(np.int64)
_SCALARS = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}
"""Python's types, and the dtypes that Orbax stores them in."""


def is_scalar(value: Any) -> bool:
    """True for a Python number."""
    return type(value) in _SCALARS


def scalar_dtype(value: Any) -> str:
    """The name of the dtype that a Python number is stored in."""
    return _SCALARS[type(value)]


def is_key_dtype(dtype: Any) -> bool:
    """True for the dtypes of random keys."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def flatten(tree: Any, stop: Callable[[Any], bool] = lambda _: False) -> tuple[list[tuple[tuple[Key, ...], Any]], Any]:
    """The leaves of ``tree`` with their paths, empty containers included, and its structure; what ``stop`` says yes to
    is a leaf.

    Raises CheckpointError where two leaves would have the same name, or a path has a part of an unknown kind.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: is_empty(x) or stop(x))
    entries = [(tuple(map(_key, path)), value) for path, value in flat]
    names: dict[str, tuple[Key, ...]] = {}
    for path, _ in entries:
        leaf = Leaf(path=path)
        if leaf.name in names:
            raise CheckpointError(
                f"leaves {Leaf(path=names[leaf.name]).where} and {leaf.where} would both be called {leaf.name!r} "
                "in the checkpoint. Rename a key"
            )
        names[leaf.name] = path
    return entries, structure


def _key(part: Any) -> Key:
    match part:
        case jax.tree_util.SequenceKey(idx=idx):
            return Key(name=str(idx), sequence=True)
        case jax.tree_util.FlattenedIndexKey(key=key):
            return Key(name=str(key), sequence=True)
        case jax.tree_util.DictKey(key=key):
            return Key(name=str(key))
        case jax.tree_util.GetAttrKey(name=name):
            return Key(name=str(name))
        case _:
            raise CheckpointError(f"a path of the tree has a part {part!r} of a kind that checkpoints do not know")


def is_empty(value: Any) -> bool:
    """True for None and for containers with nothing in them."""
    one = jax.tree_util.default_registry.flatten_one_level(value)
    return one is not None and not list(one[0])


def _empty_name(value: Any) -> str:
    match value:
        case tuple() if hasattr(value, "_fields"):
            return "None"  # as Orbax does for a named tuple without fields
        case list():
            return "List"
        case tuple():
            return "Tuple"
        case Mapping():
            return "Dict"
        case _:
            return "None"


def words_shape(shape: tuple[int, ...], dtype: Any) -> tuple[int, ...]:
    """The shape of the words (uint32) of random keys of ``shape`` and key type ``dtype``: one dimension more."""
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
    return tuple(words.shape)


def key_impl(dtype: Any) -> str:
    """The name of the implementation of random keys of ``dtype``."""
    said: list[str] = []
    jax.eval_shape(lambda key: said.append(str(jax.random.key_impl(key))), jax.ShapeDtypeStruct((), dtype))
    return said[0]


def boxes_of(sharding: jax.sharding.Sharding, shape: tuple[int, ...], row: int = 0) -> dict[Index, list[Device]]:
    """The distinct boxes of an array of ``shape``, in order, and the devices of all processes that hold each. ``row``:
    the array's first row in the value that it is a part of."""
    boxes: dict[Index, list[Device]] = {}
    for device, slices in sharding.devices_indices_map(shape).items():
        boxes.setdefault(shifted(index_of(slices, shape), row), []).append(device)
    return dict(sorted(boxes.items()))


def shifted(box: Index, row: int) -> Index:
    """``box`` of an array whose first row is row ``row`` of a value, as a box of the value."""
    return ((box[0][0] + row, box[0][1] + row), *box[1:]) if row else box


def pieces_of(value: Any) -> tuple[Piece, ...]:
    """The pieces that together are an array of any kind once; none of one that has no sharding."""
    if isinstance(value, Array):
        return value.once()
    return (Piece(0, 0, 0, value),) if getattr(value, "sharding", None) is not None else ()


def leaf_of(path: tuple[Key, ...], value: Any, boxes: Sequence[Index] | None = None) -> Leaf:
    """What is stored of ``value``: an array, or a jax.ShapeDtypeStruct of one, a number, None or an empty container.
    ``boxes``: those that it will be written as, where its keeper says so.

    Raises CheckpointError for anything else, for dtypes that cannot be stored and for integers beyond 64 bits.
    """
    where = Leaf(path=path).where
    if is_empty(value):
        return Leaf(path=path, kind="empty", empty=_empty_name(value))
    if is_scalar(value):
        if type(value) is int and not INT64.min <= value <= INT64.max:
            raise CheckpointError(f"leaf {where}: {value} does not fit 64 bits. Store it as an array of its parts")
        return Leaf(path=path, kind="scalar", dtype=scalar_dtype(value))
    if boxes is None and not isinstance(value, jax.Array | Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        raise CheckpointError(
            f"leaf {where}: a {type(value).__name__} cannot be stored; expected an array, a number or None. "
            "Take it out of the tree (static parts belong to the code)"
        )
    shape, dtype = tuple(value.shape), value.dtype
    if boxes is None:
        boxes = [box for p in pieces_of(value) for box in boxes_of(p.array.sharding, tuple(p.array.shape), p.start)]
    boxes = boxes or [whole(shape)]
    if is_key_dtype(dtype):
        words = words_shape(shape, dtype)
        boxes = [(*box, *whole(words[len(shape) :])) for box in boxes]
        return Leaf(path=path, kind="key", shape=words, dtype="uint32", chunk=chunk_of(words, "uint32", boxes),
                    key_impl=key_impl(dtype))  # fmt: skip
    name = np.dtype(dtype).name
    if name in ("object", "void", "float0") or np.dtype(dtype).kind in "USOMm" or math.prod(shape) < 0:
        raise CheckpointError(f"leaf {where}: arrays of dtype {dtype} cannot be stored")
    return Leaf(path=path, shape=shape, dtype=name, chunk=chunk_of(shape, name, boxes))


def leaves_of(tree: Any) -> tuple[list[Leaf], Any]:
    """All leaves of a tree as a checkpoint has them: what a driver tells its workers, and `commit`.

    Args:
        tree: pytree of arrays, or of `jax.ShapeDtypeStruct` with the shardings that they will be written with.

    Returns:
        The leaves in order, and the tree's structure.

    Raises:
        CheckpointError: a leaf cannot be stored, or two would have one name.
    """
    entries, structure = flatten(tree)
    return [leaf_of(path, value) for path, value in entries], structure
