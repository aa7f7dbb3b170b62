"""Faults of JAX and XLA that planned programs meet and that a plain `jax.shard_map` has too: each with its reproducer.

autopar goes around most. A run is laid to one of the others only by its sign; everything else that goes wrong is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.worker import CallEndedError, Worker


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a run showed: the differences or the traceback, and whether it is equal but for NaNs that plain JAX gives
    operator by operator."""

    wrong: bool
    detail: str
    equal_with_nans: Callable[[], bool]


@dataclass(frozen=True, kw_only=True)
class UpstreamFault:
    """``shows()``: True where plain JAX still has it. ``sign``: None where autopar goes around it."""

    name: str
    shows: Callable[[], bool]
    sign: Callable[[Seen], bool] | None = None


def upstream_fault(seen: Seen) -> str:
    """The fault's name; "" where it is none of them."""
    return next((f.name for f in UPSTREAM_FAULTS if f.sign is not None and f.sign(seen)), "")


def _split(fun: Callable[..., Any], out_spec: P) -> Callable[..., Any]:
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    return jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=P("x"), out_specs=out_spec))


def _fails(fun: Callable[..., Any], text: str, *args: Any) -> bool:
    try:
        jax.block_until_ready(fun(*args))
    except jax.errors.JaxRuntimeError as error:
        return text in str(error)
    return False


_MULHI = "Unable to convert MHLO to StableHLO"
_FFT = "IsMonotonicWithDim0Major"


def _mulhi_shows() -> bool:
    x = jnp.arange(8)
    return _fails(_split(lambda x: lax.mulhi(x, x), P("x")), _MULHI, x)


def _fft_shows() -> bool:
    x = np.ones((8, 4, 8), np.complex64)
    return _fails(_split(lambda x: lax.all_gather(jnp.fft.fft(x), "x", axis=1, tiled=True), P("x")), _FFT, x)


def _max_shows() -> bool:
    x = np.arange(8.0)
    x[3] = np.nan
    return not np.isnan(_split(lambda x: lax.pmax(x, "x"), P())(x)).all()


def _jit_shows() -> bool:
    gradient = jax.grad(lambda x: lax.reduce_max(x, (0,)))
    x = np.array([1, np.nan], np.float32)
    return not np.array_equal(jax.jit(gradient)(x), gradient(x), equal_nan=True)


def complex_constant(_: Any) -> Any:
    """The sum of complex constants over devices; XLA's CPU compiler aborts."""
    return np.asarray(_split(lambda x: lax.psum(jnp.full(8, 1j), "x"), P())(np.arange(8)))


def _complex_sum_shows() -> bool:
    with Worker("tests.upstream:complex_constant") as worker:
        try:
            worker.call(None, 60.0)
        except CallEndedError as error:
            return "crashed" in str(error)
    return False


UPSTREAM_FAULTS = (
    UpstreamFault(name="a sum of complex constants over devices aborts the process", shows=_complex_sum_shows),
    UpstreamFault(name="`lax.mulhi` does not compile under a mesh", shows=_mulhi_shows),
    UpstreamFault(name="`fft` before an all-gather along a dimension > 0 fails on CPU", shows=_fft_shows),
    UpstreamFault(name="`pmax` and `pmin` drop NaN on CPU", shows=_max_shows),
    UpstreamFault(
        name="`jax.jit` on CPU gives 0 where the operators one by one give NaN",
        shows=_jit_shows,
        sign=lambda seen: seen.wrong and seen.equal_with_nans(),
    ),
)
