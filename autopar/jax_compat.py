"""Every use of JAX's semi-public parts, and every branch on JAX's version.

Supported: jax 0.10 to 0.12. What is imported here is re-exported under one name each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.interpreters import partial_eval

__all__ = [
    "ClosedJaxpr",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "Primitive",
    "Var",
    "bind",
    "dce",
    "fresh_var",
    "name_stack",
    "scan_counts",
    "source_line",
]


def bind(eqn: JaxprEqn, *operands: Any, **param_overrides: Any) -> list[Any]:
    """Binds ``eqn``'s primitive on ``operands`` with its parameters, some of them replaced.

    ``get_bind_params`` returns a dictionary since jax 0.10 and (subfuns, dictionary) before.
    """
    bound = eqn.primitive.get_bind_params({**eqn.params, **param_overrides})
    if isinstance(bound, tuple):
        subfuns, params = bound
        out = eqn.primitive.bind(*subfuns, *operands, **params)
    else:
        out = eqn.primitive.bind(*operands, **bound)
    return list(out) if eqn.primitive.multiple_results else [out]


def dce(jaxpr: Jaxpr) -> Jaxpr:
    """``jaxpr`` without equations whose results nothing uses (those with effects stay); inputs stay."""
    out, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return out


def fresh_var(like: Var) -> Var:
    """A new variable of the same type."""
    return Var(like.aval)


def source_line(eqn: JaxprEqn) -> str:
    """``file.py:line`` of the user's code that made ``eqn``, or an empty string."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    if frame is None:
        return ""
    return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.start_line}"


def name_stack(eqn: JaxprEqn) -> str:
    """The equation's name stack, in which ``transpose(jvp(…))`` marks the backward pass."""
    return str(eqn.source_info.name_stack)


def backend_started() -> bool:
    """True once JAX has initialised any backend in this process."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def jax_version() -> str:
    """jax's version."""
    return jax.__version__


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """(number of constants, number of carried values) of a scan equation.

    jax 0.10 holds them as parameters; 0.12 as the lengths of ``ft_in``'s three parts.
    """
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = (len(list(part)) for part in eqn.params["ft_in"].unpack())
    return consts, carry
