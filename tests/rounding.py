"""Whether two results of one program differ by rounding only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core

ROUNDINGS = {16: 8.0, 32: 64.0, 64: 256.0}
"""Bits of a float → how many roundings of the largest value two programs of one function may be apart. A guess: more
is settled by another run in float64, see `tests.outcome`."""


def differences(got: Any, want: Any, *, least_norm: float = 0.0, inside: Any = None) -> list[str]:
    """A line for each leaf that differs: integers, booleans, keys and dtypes exactly, infinities and NaNs by their
    places, other floats to ROUNDINGS of their dtype (or of ``inside``, a narrower one that they were computed in) at
    the leaf's max-norm, or at ``least_norm`` where that is more."""
    got_leaves, got_tree = jax.tree_util.tree_flatten_with_path(got)
    want_leaves, want_tree = jax.tree_util.tree_flatten_with_path(want)
    if got_tree != want_tree:
        return [f"structure: {got_tree}, not {want_tree}"]
    lines = []
    for (path, g), (_, w) in zip(got_leaves, want_leaves, strict=True):
        problem = _difference(g, w, least_norm, inside)
        if problem:
            lines.append(f"result{jax.tree_util.keystr(path)}: {problem}")
    return lines


def narrowest_float(fun: Any, args: tuple[Any, ...]) -> Any:
    """The narrowest floating-point dtype of what ``fun`` computes, in its bodies too."""

    def found(jaxpr: Any) -> Iterator[Any]:
        for eqn in jaxpr.eqns:
            yield from (v.aval.dtype for v in eqn.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact))
            for body in core.jaxprs_in_params(eqn.params):
                yield from found(body)

    return min(found(jax.make_jaxpr(fun)(*args).jaxpr), key=lambda d: jnp.finfo(d).bits, default=np.dtype("float64"))


def _difference(got: Any, want: Any, least_norm: float, inside: Any) -> str:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
    if jax.dtypes.issubdtype(want.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        wrong = np.asarray(got) != np.asarray(want)
        return f"{wrong.sum()} of {wrong.size} elements of {want.dtype} differ" if wrong.any() else ""
    kind = max((jnp.finfo(d) for d in (want.dtype, inside) if d is not None), key=lambda kind: kind.eps)
    tolerance = ROUNDINGS.get(kind.bits, 2.0) * float(kind.eps)
    g, w = _parts(got), _parts(want)
    finite = np.isfinite(w)
    same = np.where(finite, np.isfinite(g), (g == w) | (np.isnan(g) & np.isnan(w)))
    if not same.all():
        k = np.unravel_index(np.argmin(same), same.shape)
        return f"{(~same).sum()} of {same.size} elements: {g[k]}, not {w[k]}"
    norm = max(least_norm, float(np.abs(w[finite]).max(initial=0.0)))
    error = float(np.abs(g[finite] - w[finite]).max(initial=0.0))
    return "" if error <= tolerance * norm else f"error {error:.3g} of max-norm {norm:.3g}, {want.dtype}"


def _parts(x: Any) -> np.ndarray:
    """float64; real and imaginary parts of complex numbers side by side."""
    x = np.asarray(x)
    if np.iscomplexobj(x):
        return np.stack([x.real, x.imag]).astype(np.float64)
    return x.astype(np.float64)
