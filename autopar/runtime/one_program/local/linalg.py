"""Local lowerings of linear algebra and fft: only batch dimensions and right-hand sides are split and no parameter
holds their sizes, so they bind unchanged on local operands. Two go around faults of XLA's CPU client."""

from __future__ import annotations

import math
from typing import Any

from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from autopar.jax_compat import bind
from autopar.runtime.one_program.local.context import LocalContext, LocalRule


def _fft(ctx: LocalContext, eqn: Any, x: Any) -> list[Any]:
    """XLA's CPU compiler takes the layout that a collective along a later dimension would like up to the fft, which
    then fails when it runs (``RET_CHECK … IsMonotonicWithDim0Major``)."""
    del ctx
    (result,) = bind(eqn, x)
    return [with_layout_constraint(result, Layout(tuple(range(result.ndim))))]


def _triangular_solve(ctx: LocalContext, eqn: Any, a: Any, b: Any) -> list[Any]:
    """On CPU devices one matrix after the other: LAPACK's kernel hands a batch to the pool that the devices themselves
    run on, and where the others wait in a collective, nobody is left to do it."""
    if not ctx.threads or math.prod(a.shape[:-2]) <= 1:
        return bind(eqn, a, b)
    each = lambda matrices: bind(eqn, *matrices)[0]
    flat = tuple(lax.reshape(x, (math.prod(x.shape[:-2]), *x.shape[-2:])) for x in (a, b))
    return [lax.reshape(lax.map(each, flat), b.shape)]


LOCAL: dict[str, LocalRule] = {"fft": _fft, "triangular_solve": _triangular_solve}
