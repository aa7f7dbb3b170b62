"""Arrays in host memory and on devices: their types, their bytes, typed keys as their data."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar.ir.graph import TensorType
from autopar.jax_compat import Device, FromHost


def key_implementation(type: TensorType) -> str | None:
    """The name of a key type's implementation (``threefry2x32``); None for types of numbers."""
    if not type.dtype.startswith("key<"):
        return None
    names = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}
    tag = type.dtype[len("key<") : -1]
    return names.get(tag, tag)


@lru_cache(maxsize=4096)
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
