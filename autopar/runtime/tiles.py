"""Tiles of values, and the pieces of them that cross: `Window` says where a piece's chunks lie in a tile; `HeldTile`
and `WantedTile` are a tile that is sent from and one that is landed in (`transports.Source`, `transports.Target`).

On CPU a tile is seen in place, and a landed tile becomes an array without a copy: devices of one process that want the
same tile have the same memory. On accelerators chunks are cut and put together on the device, unless a transport asks
for host memory. All dtypes are moved as their bytes (`element_bytes`), typed keys as those of their data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.ir.graph import TensorType
from autopar.ir.resharding import Box, Transfer, box_size
from autopar.jax_compat import Device
from autopar.runtime.device_bytes import bytes_of, value_of
from autopar.runtime.pieces import data_type, element_bytes, key_implementation

ALIGNMENT_BYTES = 64
"""What XLA's CPU client wants of memory that it takes over without a copy (measured, jaxlib 0.10 and 0.12)."""


Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int, int]
"""A box's starts and shape in a tile, and which of its elements; −1: all, in the box's shape."""
PlacedBox: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]
"""A box's starts and shape in a tile, and of how many chunks it is made."""


def stretches(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """Elements ``start`` to ``stop`` of an array of ``shape`` in row-major order, as at most 2·rank − 1 boxes, each
    with its elements in that order, one after the other."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    (row, skipped), (last, rest) = divmod(start, inner), divmod(stop, inner)
    if row == last:
        yield from ((slice(row, row + 1), *s) for s in stretches(shape[1:], skipped, rest))
        return
    if skipped:
        yield from ((slice(row, row + 1), *s) for s in stretches(shape[1:], skipped, inner))
        row += 1
    if row < last:
        yield (slice(row, last), *(slice(0, n) for n in shape[1:]))
    yield from ((slice(last, last + 1), *s) for s in stretches(shape[1:], 0, rest))


def shape_of(box: Box) -> tuple[int, ...]:
    """Elements of a box in each dimension."""
    return tuple(stop - start for start, stop in box)


class Window:
    """Where the chunks of ``transfer``'s piece of a value of ``value_type`` lie in a tile that has ``tile``.

    Attributes:
        starts, shape: of the piece's box in the tile.
        chunks: (start, stop) of each, elements of the box in row-major order.
        sizes: bytes of each.
    """

    def __init__(self, value_type: TensorType, transfer: Transfer, tile: Box) -> None:
        inner, dtype = data_type(value_type)
        self._element_bytes = math.prod(inner) * dtype.itemsize
        self.starts = tuple(a - low for (a, _), (low, _) in zip(transfer.box, tile, strict=True))
        self.shape = shape_of(transfer.box)
        self.whole = transfer.chunks == 1 and transfer.elements == box_size(transfer.box)
        """The piece is its box, in one chunk."""
        self.chunks = tuple(map(transfer.chunk, range(transfer.chunks)))
        self.sizes = tuple((stop - start) * self._element_bytes for start, stop in self.chunks)
        which = ((-1, -1),) if self.whole else self.chunks
        self.places: tuple[Place, ...] = tuple((self.starts, self.shape, start, stop) for start, stop in which)
        """Of each chunk, for `cut`."""
        self._tile_shape = shape_of(tile)
        self._first = self._place()
        """The box's first byte in the tile where its elements lie there one after the other; else −1."""

    def _place(self) -> int:
        long = [d for d, n in enumerate(self.shape) if n > 1]
        rest = range((long[0] if long else len(self.shape)) + 1, len(self.shape))
        if any(self.shape[d] != self._tile_shape[d] for d in rest):
            return -1
        at = 0
        for n, start in zip(self._tile_shape, self.starts, strict=True):
            at = at * n + start
        return at * self._element_bytes

    def room(self, memory: np.ndarray[Any, Any], chunk: int) -> np.ndarray[Any, Any] | None:
        """A chunk in a tile's memory, both (bytes,), uint8; None where it is not in one place."""
        if self._first < 0:
            return None
        first = self._first + self.chunks[chunk][0] * self._element_bytes
        return memory[first : first + self.sizes[chunk]]

    def read(self, memory: np.ndarray[Any, Any], chunk: int) -> np.ndarray[Any, Any]:
        """A chunk of a tile's memory: a view, or a copy where it is not in one place."""
        found = self.room(memory, chunk)
        return np.concatenate([part.reshape(-1) for part in self._parts(memory, chunk)]) if found is None else found

    def write(self, memory: np.ndarray[Any, Any], chunk: int, data: np.ndarray[Any, Any]) -> None:
        """Puts a chunk where it belongs."""
        found, at = self.room(memory, chunk), 0
        for part in self._parts(memory, chunk) if found is None else (found,):
            part[...] = data[at : at + part.size].reshape(part.shape)
            at += part.size

    def _parts(self, memory: np.ndarray[Any, Any], chunk: int) -> Iterator[np.ndarray[Any, Any]]:
        tile = memory.reshape(*self._tile_shape, self._element_bytes)
        box = tile[tuple(slice(a, a + n) for a, n in zip(self.starts, self.shape, strict=True))]
        return (box[part] for part in stretches(self.shape, *self.chunks[chunk]))


def _cut(x: Any, places: tuple[Place, ...]) -> list[Any]:
    out: list[Any] = []
    for starts, shape, first, stop in places:
        box = lax.slice(x, starts, tuple(a + n for a, n in zip(starts, shape, strict=True)))
        out.append(box if first < 0 else box.reshape(-1)[first:stop])
    return out


cut: Any = jax.jit(_cut, static_argnums=1)
"""(tile, places of chunks) → the chunks, on the tile's device."""


def layout(windows: Sequence[Window]) -> tuple[tuple[PlacedBox, ...], list[tuple[int, int]]]:
    """How a tile is put together of the chunks of ``windows``, which cover it once: its boxes, for `assemble`, and in
    their order the chunks: (position in ``windows``, chunk)."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int, int]]] = {}
    for w, window in enumerate(windows):
        chunks = ((start, w, i) for i, (start, _) in enumerate(window.chunks))
        found.setdefault((window.starts, window.shape), []).extend(chunks)
    boxes = tuple((*place, len(chunks)) for place, chunks in found.items())
    return boxes, [(w, i) for chunks in found.values() for _, w, i in sorted(chunks)]


def _assembled(shape: tuple[int, ...], boxes: tuple[PlacedBox, ...], *parts: Any) -> Any:
    out, at = None, 0
    for starts, box, count in boxes:
        mine = [part.reshape(-1) if count > 1 else part for part in parts[at : at + count]]
        whole = (jnp.concatenate(mine) if count > 1 else mine[0]).reshape(box)
        at += count
        if box == shape:
            return whole
        out = jnp.zeros(shape, parts[0].dtype) if out is None else out
        out = lax.dynamic_update_slice(out, whole, starts)
    return out


assemble: Any = jax.jit(_assembled, static_argnums=(0, 1))
"""(shape, boxes, chunks) → the tile; see `layout`."""


class HeldTile:
    """A tile to send from, ``x`` on one device."""

    def __init__(self, x: jax.Array, rank: int) -> None:
        self.array, self._rank = x, rank
        keys = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        self.numbers: Any = jax.random.key_data(x) if keys else x
        """It, of keys their data."""

    @cached_property
    def memory(self) -> np.ndarray[Any, Any]:
        """Its bytes, one-dimensional; waits for them."""
        return element_bytes(np.asarray(self.numbers), self._rank).reshape(-1)


class Piece:
    """A piece of a tile that is offered (`transports.Source`)."""

    def __init__(self, tile: HeldTile, window: Window) -> None:
        self._tile, self._window = tile, window
        self.sizes: Sequence[int] = window.sizes

    def is_ready(self) -> bool:
        """See `Source`."""
        return self._tile.numbers.is_ready()

    def wait(self) -> None:
        """See `Source`."""
        self._tile.numbers.block_until_ready()

    def read(self, chunk: int) -> np.ndarray[Any, Any]:
        """See `Source`."""
        return self._window.read(self._tile.memory, chunk)

    def array(self, chunk: int) -> jax.Array:
        """See `Source`."""
        return bytes_of(cut(self._tile.array, (self._window.places[chunk],))[0])


class WantedTile:
    """A tile that comes in chunks: ``box`` of a value of ``value_type``, for ``devices``."""

    def __init__(self, value_type: TensorType, box: Box, devices: Sequence[Device]) -> None:
        self._type, self.devices = value_type, devices
        self.shape = shape_of(box)
        self.inner, self.dtype = data_type(value_type)
        self._size = box_size(box) * math.prod(self.inner) * self.dtype.itemsize
        self.on_device: dict[Window, dict[int, jax.Array]] = {}
        """Chunks that are on the device, by piece."""

    @cached_property
    def memory(self) -> np.ndarray[Any, Any]:
        """Its bytes, one-dimensional."""
        return aligned(self._size)

    def put(self, window: Window, chunk: int, data: jax.Array) -> None:
        """Lands a chunk that is on the device."""
        if self.devices[0].platform == "cpu":
            window.write(self.memory, chunk, np.asarray(data))
        else:
            self.on_device.setdefault(window, {})[chunk] = data

    def host(self) -> np.ndarray[Any, Any]:
        """All of it in host memory, for keys their data; nothing may be written to it from now on."""
        return self.memory.view(self.dtype).reshape((*self.shape, *self.inner))

    def arrays(self) -> list[jax.Array]:
        """It on each of its devices, where it landed on the device."""
        implementation = key_implementation(self._type)
        windows = list(self.on_device)
        boxes, order = layout(windows)
        parts: list[jax.Array] = []
        for w, chunk in order:
            start, stop = windows[w].chunks[chunk]
            data = self.on_device[windows[w]][chunk]
            parts.append(value_of(data, (stop - start, *self.inner), str(self.dtype), implementation))
        whole = assemble(self.shape, boxes, *parts)
        return [jax.device_put(whole, device) for device in self.devices]


class Room:
    """A piece of a tile that is fetched (`transports.Target`)."""

    def __init__(self, tile: WantedTile, window: Window) -> None:
        self._tile, self._window = tile, window
        self.sizes: Sequence[int] = window.sizes
        self.device: Any = tile.devices[0]

    def room(self, chunk: int) -> np.ndarray[Any, Any] | None:
        """See `Target`."""
        return self._window.room(self._tile.memory, chunk)

    def write(self, chunk: int, data: np.ndarray[Any, Any]) -> None:
        """See `Target`."""
        self._window.write(self._tile.memory, chunk, data)

    def read(self, chunk: int) -> np.ndarray[Any, Any]:
        """See `Target`."""
        return self._window.read(self._tile.memory, chunk)

    def put(self, chunk: int, data: jax.Array) -> None:
        """See `Target`."""
        self._tile.put(self._window, chunk, data)


def aligned(size: int) -> np.ndarray[Any, Any]:
    """(size,), uint8: memory that XLA's CPU client takes over without a copy."""
    memory = np.empty(size + ALIGNMENT_BYTES, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[first : first + size]
