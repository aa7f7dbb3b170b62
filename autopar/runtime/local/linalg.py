"""Local lowerings of linear algebra and fft: only batch dimensions and right-hand sides are split and no parameter
holds their sizes, so they bind unchanged on local operands. What an fft gives is laid out as it is written."""

from __future__ import annotations

from typing import Any

from jax.experimental.layout import Layout, with_layout_constraint

from autopar.jax_compat import bind
from autopar.runtime.local.context import LocalContext, LocalRule


def _fft(ctx: LocalContext, eqn: Any, x: Any) -> list[Any]:
    """XLA's CPU compiler takes the layout that a collective along a later dimension would like up to the fft, which
    then fails when it runs (``RET_CHECK … IsMonotonicWithDim0Major``)."""
    del ctx
    (result,) = bind(eqn, x)
    return [with_layout_constraint(result, Layout(tuple(range(result.ndim))))]


LOCAL: dict[str, LocalRule] = {"fft": _fft}
