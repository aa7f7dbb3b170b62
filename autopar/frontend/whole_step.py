"""A step as the user has it → one graph of all of it, microbatches and gradients included: `whole_step`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from autopar.frontend.arguments import filled, within, without
from autopar.frontend.gradient import expand_marker, grad_p
from autopar.frontend.layering.source import Source
from autopar.frontend.microbatch import serial
from autopar.frontend.trace import Traced, trace
from autopar.ir.errors import TraceError
from autopar.jax_compat import JaxprEqn


@dataclass(frozen=True, kw_only=True)
class WholeStep:
    """A traced call of a step. ``in_tree`` is the tree of its (positional arguments, keyword arguments), static ones
    left out; ``marked`` says whether it takes gradients by `autopar.value_and_grad`."""

    traced: Traced
    in_tree: Any
    marked: bool


def whole_step(source: Source, name: str, *, keep_remat: bool) -> WholeStep:
    """Traces a call of a step; ``source.layers`` is not looked at.

    Raises:
        TraceError: the step cannot be traced.
        MicrobatchError: it is not exact in microbatches.
        LoweringError: there is no branch for the platform.
    """
    count, static = len(source.args), set(within(source.static_argnums, len(source.args)))
    statics = tuple((i, x) for i, x in enumerate(source.args) if i in static)
    dynamic = tuple(None if i in static else x for i, x in enumerate(source.args))
    kwargs = dict(source.kwargs)
    marked = source.num_microbatches > 1  # refused without

    def expand(eqn: JaxprEqn) -> Any:
        nonlocal marked
        marked |= eqn.primitive is grad_p
        return expand_marker(eqn) if eqn.primitive is grad_p else None

    traced = trace(
        serial(filled(source.step, statics), source.num_microbatches, source.batch_argnums),
        *dynamic,
        donate_argnums=within(source.donate_argnums, count),
        expand=expand,
        keep_remat=keep_remat,
        platform=source.platform,
        **kwargs,
    )
    if len(traced.graph.inputs) != len(traced.graph.arg_paths):  # jax made the value an argument of its own
        raise TraceError(
            f"{name} closes over a value of the jax.jit (or other transformation) that calls it: pass that value as an "
            "argument"
        )
    in_tree = jax.tree_util.tree_structure((without(dynamic, statics), kwargs))
    return WholeStep(traced=traced, in_tree=in_tree, marked=marked)
