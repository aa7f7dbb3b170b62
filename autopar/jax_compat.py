"""Every use of JAX's semi-public parts, and every branch on JAX's version.

Supported: jax 0.10 to 0.12. What is imported here is re-exported under one name each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from contextlib import contextmanager

import jax
from jax._src import config, source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var, jaxpr_as_fun
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
    "eqn_context",
    "equation_context",
    "fresh_var",
    "jaxpr_as_fun",
    "name_stack",
    "open_constants",
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


@contextmanager
def eqn_context(eqn: JaxprEqn) -> Iterator[None]:
    """The context in which ``eqn`` was traced: its name stack and source, and its settings, except for the mesh, which
    is that of the shard_map it is evaluated in."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack):
        ctx = eqn.ctx
        if (
            ctx.compute_type is None
            and not ctx.xla_metadata
            and ctx.threefry_partitionable == config.threefry_partitionable.value
        ):
            yield
            return
        mesh = config.abstract_mesh_context_manager.get_local()
        with ctx.manager:
            previous = config.abstract_mesh_context_manager.swap_local(mesh)
            try:
                yield
            finally:
                config.abstract_mesh_context_manager.set_local(previous)


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


@contextlib.contextmanager
def equation_context(eqn: JaxprEqn) -> Iterator[None]:
    """What is bound inside keeps ``eqn``'s source line, name stack and configuration."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def open_constants(jaxpr: Jaxpr) -> Jaxpr:
    """``jaxpr`` with its constants as leading inputs."""
    names = jaxpr.debug_info
    if names.arg_names is not None:
        names = names._replace(arg_names=("",) * len(jaxpr.constvars) + tuple(names.arg_names))
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], debug_info=names)


def remat_is_undone() -> bool:
    """True where XLA's CPU compiler merges a rematerialised computation with the first one again (jaxlib before 0.12:
    optimisation barriers are dropped before common-subexpression elimination)."""
    return tuple(int(n) for n in jax.__version__.split(".")[:2]) < (0, 12)
