"""Arrays as their bytes and back on the device that they are on, bit for bit, whatever their dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from autopar.ir.graph import TensorType
from autopar.runtime.device_bytes import bytes_of, value_of
from autopar.runtime.pieces import key_implementation

NARROW = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}
"""Dtypes of less than a byte: their bits."""
DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", *NARROW,
)  # fmt: skip
QUIETED = ("float8_e3m4", "float8_e4m3")
"""XLA's CPU client cuts and joins these as float16, by which NaNs lose their payload (jaxlib 0.10.2)."""
KEYS = ("key<fry>", "key<rbg>")
QUICK = ("bool", "bfloat16", "float64", "complex64", "complex128", "float8_e4m3", "int4", *KEYS)
"""One of each kind of dtype, as `bytes_of` tells them apart."""
REST = tuple(d for d in DTYPES if d not in QUICK)
SHAPES = ((3, 5), (), (4, 0))


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def host_of(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Random bits: NaNs of all kinds, infinities and numbers below the normal ones. For floats of 4 bytes and more
    these are put in, as they would hardly be drawn."""
    of = np.dtype(getattr(ml_dtypes, dtype, dtype))
    dice = np.random.default_rng(len(dtype))
    if dtype == "bool":
        return dice.integers(0, 2, shape).astype(bool)
    raw = dice.integers(0, 2 ** NARROW.get(dtype, 8), (*shape, of.itemsize), np.uint8)
    out = np.frombuffer(raw.tobytes(), of).reshape(shape).copy()
    if dtype in ("float32", "float64", "complex64", "complex128") and out.size:
        word = np.dtype(f"u{of.itemsize // (2 if of.kind == 'c' else 1)}")
        sign, payload = 1 << (8 * word.itemsize - 1), (np.inf, np.nan)
        of_word = np.dtype(f"f{word.itemsize}")
        infinity, quiet = (int(np.array(x, of_word).view(word)) for x in payload)
        odd = [sign, 0, infinity, infinity | sign, infinity | 1, infinity | sign | 5, quiet | 3, 1, sign | 1]
        words = out.reshape(-1).view(word)
        words[: len(odd)] = np.array(odd, word)[: words.size]
    return out


def arrays(dtype: str, shape: tuple[int, ...]) -> jax.Array:
    if dtype in KEYS:
        implementation = key_implementation(TensorType(shape=shape, dtype=dtype))
        return jax.random.wrap_key_data(np.asarray(jax.random.key_data(jax.random.split(
            jax.random.key(5, impl=implementation), shape))), impl=implementation)  # fmt: skip
    return jax.device_put(host_of(dtype, shape), jax.devices()[0])


def bits(x: jax.Array) -> tuple[str, tuple[int, ...], bytes]:
    """All that there is to an array; for keys the type's name stands for their implementation."""
    data = jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return str(x.dtype), x.shape, np.asarray(data).tobytes()


def test_the_dtypes_are_all_that_there_are() -> None:
    """A new dtype of JAX's fails here."""
    scalars = {str(np.dtype(x)) for x in vars(jax.numpy).values() if isinstance(x, type(jax.numpy.float32))}
    scalars -= {"int1", "uint1", "float6_e2m3fn", "float6_e3m2fn"}  # XLA has no arrays of these
    assert scalars <= {*DTYPES}, scalars - {*DTYPES}


@pytest.mark.parametrize("dtype", (*DTYPES, *KEYS))
def test_bytes_and_back(dtype: str) -> None:
    for shape in SHAPES:
        x = arrays(dtype, shape)
        found = bytes_of(x)
        assert (found.dtype, found.ndim) == (np.uint8, 1)
        assert np.asarray(found).tobytes() == bits(x)[2], "not NumPy's bytes"
        type_ = TensorType(shape=shape, dtype=dtype)
        implementation = key_implementation(type_)
        data = jax.random.key_data(x) if implementation else x
        back = value_of(found, data.shape, str(data.dtype), implementation)
        assert bits(back) == bits(x), shape
        where = found.unsafe_buffer_pointer()
        assert not x.size or dtype in KEYS or where != x.unsafe_buffer_pointer(), "the same memory"
