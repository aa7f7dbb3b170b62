"""What is stored of one leaf of a pytree: its path, shape, dtype, and the chunks that it is cut into."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from autopar.ir.errors import CheckpointError

Index = tuple[tuple[int, int], ...]
"""A box of an array: (start, stop) in each dimension."""

Kind = Literal["array", "scalar", "key", "empty"]
"""scalar: a Python number. key: random keys, stored as their words. empty: None or a container without leaves."""

CHUNK_BYTES = 8 * 2**20
"""A chunk is what one read returns at least. Guessed: large enough for a disk to stream, small enough that a slice
of other bounds reads little beside itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One step of a path into a pytree.

    Attributes:
        name: the key, field or attribute; of a sequence the index, as text.
        sequence: True for an element of a sequence.
    """

    name: str
    sequence: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """What is stored of a leaf.

    Attributes:
        path: into the pytree.
        kind: ``array``; ``scalar``, a Python number; ``key``, random keys, stored as their words; ``empty``, None or a
            container without leaves.
        shape: of the numbers stored: for random keys, of their words (uint32, one dimension more than the keys).
        dtype: of the numbers stored.
        chunk: of the numbers stored, with a positive size for each dimension of ``shape``.
        key_impl: ``threefry2x32``, …, for kind key, and for no other.
        empty: None, Dict, List or Tuple, as Orbax names it, for kind empty, and for no other.
    """

    path: tuple[Key, ...]
    kind: Kind = "array"
    shape: tuple[int, ...] = ()
    dtype: str = ""
    chunk: tuple[int, ...] = ()
    key_impl: str | None = None
    empty: str | None = None

    @property
    def name(self) -> str:
        """The name in the database, as Orbax makes it of the path."""
        return ".".join(key.name for key in self.path)

    @property
    def where(self) -> str:
        """The path as messages show it (``['layers'][0]``)."""
        return "".join(f"[{k.name}]" if k.sequence else f"[{k.name!r}]" for k in self.path) or "(the whole tree)"

    def chunk_keys(self) -> Iterator[str]:
        """Yields the database's key of each chunk."""
        if 0 in self.shape:
            return
        counts = (range(-(-size // chunk)) for size, chunk in zip(self.shape, self.chunk))
        for at in product(*counts):
            yield prefix_of(self.name) + "/".join(("c", *map(str, at)))


def prefix_of(name: str) -> str:
    """The prefix, in the database, of the keys of leaf ``name``."""
    return f"{name}/" if name else ""


def whole(shape: Sequence[int]) -> Index:
    """The box that is all of an array."""
    return tuple((0, size) for size in shape)


def index_of(slices: Sequence[slice], shape: Sequence[int]) -> Index:
    """The box of a tuple of slices of step 1, as `jax.sharding` makes them."""
    return tuple((s.start or 0, size if s.stop is None else s.stop) for s, size in zip(slices, shape, strict=True))


def slices_of(index: Index) -> tuple[slice, ...]:
    """The inverse of `index_of`."""
    return tuple(slice(start, stop) for start, stop in index)


def chunk_of(
    shape: Sequence[int], dtype: str, boxes: Iterable[Index], limit_bytes: int = CHUNK_BYTES
) -> tuple[int, ...]:
    """A chunk such that no two writers share one: each of their boxes consists of whole chunks. All writers of a leaf
    must get the same.

    Args:
        shape: of the leaf.
        dtype: its name.
        boxes: of all writers.
        limit_bytes: of a chunk, at most, where the boxes allow it.

    Returns:
        The chunk's size in each dimension.

    Raises:
        CheckpointError: the dtype is unknown.
    """
    chunk: list[int] = []
    divides: list[bool] = []
    boxes = list(boxes)
    for dim, size in enumerate(shape):
        inner = {at for box in boxes for at in box[dim]} - {0, size}
        chunk.append(math.gcd(*inner) if inner else max(size, 1))
        divides.append(bool(inner))
    item_bytes = np.dtype(np_dtype(dtype)).itemsize
    while math.prod(chunk) * item_bytes > limit_bytes and max(chunk) > 1:
        dim = max(range(len(chunk)), key=chunk.__getitem__)
        factor = _smallest_factor(chunk[dim]) if divides[dim] else 2
        chunk[dim] = -(-chunk[dim] // factor)
    return tuple(chunk)


def _smallest_factor(n: int) -> int:
    for factor in range(2, math.isqrt(n) + 1):
        if n % factor == 0:
            return factor
    return n


def np_dtype(name: str) -> np.dtype:
    """numpy's dtype of a name, ml_dtypes' (bfloat16, float8_*, int4) included. Raises CheckpointError for a name that
    neither knows."""
    import ml_dtypes

    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        raise CheckpointError(f"dtype {name!r} is not one that numpy and ml_dtypes know") from None
