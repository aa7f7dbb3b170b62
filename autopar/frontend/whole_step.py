"""A step as the user has it → one graph of all of it, microbatches and gradients included: `whole_step`."""

from __future__ import annotations

from typing import Any

import jax

from autopar.frontend.arguments import filled, within, without
from autopar.frontend.gradient import expand_marker, grad_p
from autopar.frontend.layering.source import Source
from autopar.frontend.microbatch import serial
from autopar.frontend.trace import Traced, trace
from autopar.ir.errors import TraceError
from autopar.jax_compat import JaxprEqn


def whole_step(source: Source, name: str, *, keep_remat: bool) -> tuple[Traced, Any]:
    """Traces a call of a step; ``source.layers`` is not looked at.

    Returns:
        What was traced, and the tree of its (positional arguments, keyword arguments), static ones left out.

    Raises:
        TraceError: the step cannot be traced.
        MicrobatchError: it is not exact in microbatches.
        LoweringError: there is no branch for the platform.
    """
    count, static = len(source.args), set(within(source.static_argnums, len(source.args)))
    statics = tuple((i, x) for i, x in enumerate(source.args) if i in static)
    dynamic = tuple(None if i in static else x for i, x in enumerate(source.args))
    kwargs = dict(source.kwargs)
    traced = trace(
        serial(filled(source.step, statics), source.num_microbatches, source.batch_argnums),
        *dynamic,
        donate_argnums=within(source.donate_argnums, count),
        expand=_expand,
        keep_remat=keep_remat,
        platform=source.platform,
        **kwargs,
    )
    if len(traced.graph.inputs) != len(traced.graph.arg_paths):  # jax made the value an argument of its own
        raise TraceError(
            f"{name} closes over a value of the jax.jit (or other transformation) that calls it: pass that value as an "
            "argument"
        )
    return traced, jax.tree_util.tree_structure((without(dynamic, statics), kwargs))


def _expand(eqn: JaxprEqn) -> Any:
    return expand_marker(eqn) if eqn.primitive is grad_p else None
