"""What a running pipeline gives its driver of a value that no single mesh has: `Array`.

A tied parameter lies on each stage that reads it, stacked parameters of a scan lie by rows on the stages of their
layers. An `Array` says where; it is fetched on demand, and goes back into the step without moving. One whose pieces are
`jax.ShapeDtypeStruct`s with shardings stands for a value that is to be made or restored so.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar.ir.errors import ArgumentError


@dataclass(frozen=True)
class Piece:
    """A value, or rows of it, on the mesh of one stage.

    Attributes:
        stage: number of the stage.
        start: its first row, of the value's first dimension.
        stop: the row after its last; 0: it is all of the value.
        array: `jax.Array`, or `jax.ShapeDtypeStruct` with a sharding.
    """

    stage: int
    start: int
    stop: int
    array: Any


class Array(np.lib.mixins.NDArrayOperatorsMixin):
    """A value that lies on several meshes, in copies or by rows: a leaf of what a pipeline's step takes and gives.

    Operators, NumPy's functions and Python's numbers take it as its numbers in host memory. It is pickled, and copied
    deeply, as these.

    Args:
        shape: of the whole value.
        dtype: of the value, NumPy's or that of random keys.
        pieces: what is where.

    Attributes:
        shape: sizes of the whole value's dimensions.
        dtype: of the value.
        pieces: what is where, a tuple of `Piece`.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, pieces: tuple[Piece, ...]) -> None:
        self.shape, self.dtype, self.pieces = shape, dtype, pieces

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of one copy of the whole value."""
        return self.size * self.dtype.itemsize

    @property
    def shardings(self) -> tuple[jax.sharding.Sharding, ...]:
        """Shardings of its pieces."""
        return tuple(p.array.sharding for p in self.pieces)

    def whole(self) -> jax.Array | np.ndarray[Any, Any]:
        """The value in one piece: a copy of it, or its rows put together on the host.

        Returns:
            `jax.Array` of the one stage where a stage has all of it; else a NumPy array of ``shape``.

        Raises:
            ArgumentError: no stage has some of its rows.
        """
        once = self.once()
        return once[0].array if once[0].stop == 0 else np.concatenate([np.asarray(piece.array) for piece in once])

    def once(self) -> tuple[Piece, ...]:
        """Pieces that together have each element once: one copy, or one piece for each row.

        Raises:
            ArgumentError: no stage has some rows.
        """
        for piece in self.pieces:
            if piece.stop == 0:
                return (piece,)
        at, out = 0, list[Piece]()
        for piece in sorted(self.pieces, key=lambda p: (p.start, p.stop)):
            if piece.start == at:
                at = piece.stop
                out.append(piece)
        if at != self.shape[0]:
            raise ArgumentError(f"{self!r}: no stage has rows {at} to {self.shape[0]}")
        return tuple(out)

    def find(self, stage: int, start: int, stop: int, sharding: jax.sharding.Sharding) -> jax.Array | None:
        """The piece of one stage.

        Args:
            stage: number of the stage.
            start: the first row.
            stop: the row after the last; 0, and ``start`` 0: all of the value.
            sharding: how it is to lie.

        Returns:
            The `jax.Array`; None where there is no such piece.
        """
        for piece in self.pieces:
            if (piece.stage, piece.start, piece.stop) == (stage, start, stop) and piece.array.sharding == sharding:
                return piece.array
        return None

    def block_until_ready(self) -> Array:
        """Waits for all pieces; returns itself."""
        for piece in self.pieces:
            piece.array.block_until_ready()
        return self

    def is_deleted(self) -> bool:
        """True where a piece of it is gone: a step that donates it has run, or it was deleted."""
        return any(isinstance(piece.array, jax.Array) and piece.array.is_deleted() for piece in self.pieces)

    def delete(self) -> None:
        """Frees the memory of its pieces."""
        for piece in self.pieces:
            piece.array.delete()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        found = np.asarray(self.whole())
        return found if dtype is None or found.dtype == dtype else found.astype(dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: Any, **options: Any) -> Any:
        return getattr(ufunc, method)(*(np.asarray(x) if isinstance(x, Array) else x for x in operands), **options)

    def __getitem__(self, index: Any) -> np.ndarray[Any, Any]:
        return np.asarray(self)[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(np.asarray(self))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def __bool__(self) -> bool:
        return bool(np.asarray(self))

    def __float__(self) -> float:
        return float(np.asarray(self))

    def __int__(self) -> int:
        return int(np.asarray(self))

    def __complex__(self) -> complex:
        return complex(np.asarray(self))

    def __index__(self) -> int:
        return operator.index(np.asarray(self))

    def __format__(self, spec: str) -> str:
        return super().__format__(spec) if self.shape or self._is_key else format(np.asarray(self)[()], spec)

    def item(self) -> Any:
        """The only element, as Python's number."""
        return np.asarray(self).item()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        host = self.copy()
        return (keys_of, (str(jax.random.key_impl(host)), np.asarray(jax.random.key_data(host)))) if self._is_key else (
            np.asarray, (host,)
        )  # fmt: skip

    def copy(self) -> jax.Array | np.ndarray[Any, Any]:
        """The numbers in host memory, as of now; for keys an array of JAX."""
        return self.whole() if self._is_key else np.array(self.whole())

    @property
    def _is_key(self) -> bool:
        return jax.dtypes.issubdtype(self.dtype, jax.dtypes.prng_key)

    def __repr__(self) -> str:
        places = ", ".join(f"[{p.start}:{p.stop}]" if p.stop else "all" for p in self.pieces)
        return f"autopar.Array({self.dtype}{list(self.shape)} on {len(self.pieces)} meshes: {places})"


def keys_of(implementation: str, data: np.ndarray[Any, Any]) -> jax.Array:
    """Random keys from their words, uint32[…, words of a key]; ``implementation``: ``threefry2x32``, say."""
    return jax.random.wrap_key_data(data, impl=implementation)  # pyright: ignore[reportArgumentType] - numpy's too
