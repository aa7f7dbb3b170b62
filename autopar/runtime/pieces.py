"""Pieces of tiles as bytes: cutting chunks out of the tiles that a device holds, and landing them in those it wants.

Host memory is what is read and written: on CPU a tile is seen in place and a landed tile becomes an array without a
copy; from and to other devices whole tiles are copied. All dtypes are moved as their bytes (`element_bytes`), typed
keys as those of their data.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar.ir.graph import TensorType
from autopar.ir.resharding import Box, Transfer, box_size
from autopar.jax_compat import Device, FromHost

ALIGNMENT_BYTES = 64
"""What XLA's CPU client wants of memory that it takes over without a copy (measured, jaxlib 0.10 and 0.12)."""


def key_implementation(type: TensorType) -> str | None:
    """The name of a key type's implementation (``threefry2x32``); None for types of numbers."""
    if not type.dtype.startswith("key<"):
        return None
    names = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}
    tag = type.dtype[len("key<") : -1]
    return names.get(tag, tag)


def data_type(type: TensorType) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape after each element, and the dtype, of what is moved: () and the type's own for numbers, (2,) and uint32
    for threefry keys."""
    implementation = key_implementation(type)
    if implementation is None:
        return (), jax.numpy.dtype(type.dtype)
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=implementation)))
    return data.shape, np.dtype(data.dtype)


_SHARDS = threading.Lock()
"""An array keeps its parts once it has been asked for them; a second thread that asks meanwhile may get some of them
only (seen with JAX 0.10). Workers that take the same scalar in an exchange do so."""


def shards_of(x: jax.Array) -> Sequence[Any]:
    """An array's shards on devices of this process; safe where several threads ask."""
    with _SHARDS:
        return x.addressable_shards


def dtype_of(value_type: TensorType) -> Any:
    """JAX's dtype of a type, of random keys their own."""
    implementation = key_implementation(value_type)
    if implementation is None:
        return jax.numpy.dtype(value_type.dtype)
    return jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype


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


class HeldTile:
    """A tile to cut chunks from: ``array`` on one device, which holds ``box`` of a value."""

    def __init__(self, array: jax.Array, box: Box) -> None:
        (self.device,) = array.devices()
        self._box = box
        self._bytes = element_bytes(host_of(array), len(box))

    def chunk(self, transfer: Transfer, index: int) -> jax.Array:
        """Chunk ``index`` of ``transfer``: (bytes,), uint8, on the tile's device."""
        view = self._bytes[_within(transfer.box, self._box)]
        parts = [view[s].reshape(-1) for s in stretches(view.shape[:-1], *transfer.chunk(index))]
        return jax.device_put(parts[0] if len(parts) == 1 else np.concatenate(parts), self.device)


class WantedTile:
    """Memory for a tile that comes in chunks: ``box`` of a value of ``type``."""

    def __init__(self, type: TensorType, box: Box) -> None:
        self._shape = tuple(stop - start for start, stop in box)
        self._box = box
        self._inner, self._dtype = data_type(type)
        self._type = type
        self.element_bytes = math.prod(self._inner) * self._dtype.itemsize
        self._memory = aligned(box_size(box) * self.element_bytes)
        self._bytes = self._memory.reshape(*self._shape, self.element_bytes)

    def land(self, transfer: Transfer, index: int, data: jax.Array) -> None:
        """Writes chunk ``index`` of ``transfer`` to its place; waits for ``data``, (bytes,), uint8."""
        view, flat, at = self._bytes[_within(transfer.box, self._box)], np.asarray(data), 0
        for s in stretches(view.shape[:-1], *transfer.chunk(index)):
            part = view[s]
            part[...] = flat[at : at + part.size].reshape(part.shape)
            at += part.size

    def array(self, device: Device) -> jax.Array:
        """The tile on ``device``; on CPU it is this memory, which nothing writes to from now on."""
        host = self._memory.view(self._dtype).reshape((*self._shape, *self._inner))
        return array_of(self._type, host, device)


def aligned(size: int) -> np.ndarray[Any, Any]:
    """(size,), uint8: memory that XLA's CPU client takes over without a copy."""
    memory = np.empty(size + ALIGNMENT_BYTES, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[first : first + size]


def host_of(array: jax.Array) -> np.ndarray[Any, Any]:
    """An array in host memory, for keys their data; on CPU it is the array's own memory."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


def array_of(type: TensorType, host: np.ndarray[Any, Any], where: Device | jax.sharding.Sharding) -> jax.Array:
    """``host``, for keys their data, as an array of ``type``'s dtype on a device or with a sharding. On CPU aligned
    memory becomes the array's own: nothing may write to it any more."""
    implementation = key_implementation(type)
    with jax.enable_x64(True):  # 64-bit dtypes stay what they are
        out = put(host, where)
        return out if implementation is None else jax.random.wrap_key_data(out, impl=implementation)


def put(x: Any, where: Device | jax.sharding.Sharding) -> jax.Array:
    """``x`` on a device or with a sharding, as `jax.device_put`. Where other processes have some of the devices each of
    these calls this: with all of ``x``, and then nobody is asked, or with an array that they share."""
    if not isinstance(where, jax.sharding.Sharding):
        return jax.device_put(x, where)
    if where.is_fully_addressable:
        if not isinstance(x, np.ndarray) or x.dtype.itemsize > 4:  # wide ones may have to become narrow
            return jax.device_put(x, where)
        indices = where.addressable_devices_indices_map(x.shape)
        return FromHost(x.shape, x.dtype, where, list(indices))([x[index] for index in indices.values()])
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(put(jax.random.key_data(x), where), impl=jax.random.key_impl(x))
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, where)  # a program of all these processes
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, where, lambda index: host[index])


def whole_here(x: Any) -> Any:
    """All of a value, of which this process may have a part only, on one device of its own; all processes that have
    some call this."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return x
    assert isinstance(x.sharding, NamedSharding)
    return put(x, NamedSharding(x.sharding.mesh, PartitionSpec())).addressable_data(0)


def element_bytes(host: np.ndarray[Any, Any], rank: int) -> np.ndarray[Any, Any]:
    """``host``'s bytes: uint8, its first ``rank`` dimensions, then one of the bytes of an element."""
    shape = host.shape[:rank]
    width = math.prod(host.shape[rank:]) * host.dtype.itemsize
    return np.ascontiguousarray(host).reshape(-1).view(np.uint8).reshape(*shape, width)


def digest(host: np.ndarray[Any, Any]) -> str:
    """SHA-256 (hex) of an array's bytes in row-major order."""
    return hashlib.sha256(np.ascontiguousarray(host).reshape(-1).view(np.uint8).data).hexdigest()


def _within(box: Box, tile: Box) -> tuple[slice, ...]:
    return tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(box, tile, strict=True))
