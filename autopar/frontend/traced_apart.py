"""Derivatives traced apart from the step that they are of: `traced_apart`.

Stages differentiate each layer by itself, and microbatches look at the derivative rules of single operators. The rules
are the user's or a package's, and need not bear it: they may hold values of the trace around them, or assert which
operands are differentiated. Such a step is right as it is; only what asked for the trace cannot be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from autopar.ir.errors import AutoparError, TraceError
from autopar.jax_compat import ClosedJaxpr


def traced_apart(derivative: Callable[..., Any], *structs: Any) -> ClosedJaxpr:
    """The jaxpr of ``derivative`` at pytrees of `jax.ShapeDtypeStruct`. Raises TraceError, with the reason, for
    whatever the rules in it raise."""
    try:
        return jax.make_jaxpr(derivative)(*structs)
    except AutoparError:
        raise
    except Exception as error:  # whatever a user's rule raises
        said = ": ".join((type(error).__name__, *str(error).splitlines()[:1]))
        raise TraceError(f"a derivative rule cannot be traced apart from the step: {said}") from error
