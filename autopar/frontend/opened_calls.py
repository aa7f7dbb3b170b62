"""What of a jaxpr is inlined, what keeps its bodies, and what is opened: replaced by the equations it is made of.

`opened` is asked of every equation. Three kinds are opened:

operators of JAX and of other packages that no rule describes, but whose implementation is made of operators that JAX
    can trace: linear solves (`jax.lax.custom_linear_solve`, lineax), sparse products, calls with a batching rule of
    their own, equinox's primitives. Their lowering is that implementation, so the numbers are the same; traced here, no
    mesh is in context yet. (Some re-trace Python, and compare what they find with what they saw: lineax.)
while loops with a predicate for each example, as `jax.vmap` makes them: one predicate, for all together, and a carry
    of which each example keeps the old where its own predicate no longer holds. JAX does the same when it compiles.
branches by platform (`jax.lax.platform_dependent`): the one for the platform that is `planned_for`, where it is known.
    The others need not run there.
"""

from __future__ import annotations

import functools
import logging
from collections import ChainMap
from collections.abc import Container, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from jax import lax

from autopar.frontend.user_rules import registered_rules
from autopar.ir.errors import LoweringError
from autopar.jax_compat import (
    ClosedJaxpr,
    JaxprEqn,
    compiler_platform,
    implementation,
    jaxpr_as_fun,
    source_line,
)
from autopar.primitives import PRIMITIVES

log = logging.getLogger("autopar")

INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
"""Primitives whose body replaces them → the parameter that holds it."""

BODIES = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
}
"""Primitives kept with their bodies → the parameters that hold them."""


def known_primitives() -> Container[str]:
    """Primitives that are planned as they are, whatever they are made of: those that have a record or a rule by name,
    and those with bodies."""
    described = (name for name, primitive in PRIMITIVES.items() if not primitive.opened)
    return ChainMap(dict.fromkeys(described), dict.fromkeys(BODIES), dict.fromkeys(registered_rules()))


_platform: ContextVar[str | None] = ContextVar("platform", default=None)


@contextmanager
def planned_for(platform: str | None) -> Iterator[None]:
    """Within it, steps are for devices of ``platform``: ``cpu``, ``gpu`` or ``tpu``; None: any."""
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)


def opened(eqn: JaxprEqn, known: Container[str]) -> ClosedJaxpr | None:
    """What ``eqn`` computes, by other equations; None where it is to stay as it is.

    Args:
        known: primitives that stay, whatever they are made of.

    Raises:
        LoweringError: it has no branch for the platform that is planned for.
    """
    name = eqn.primitive.name
    branch = platform_branch(eqn)
    if branch is not None:
        return branch
    if name == "while":
        return _with_one_predicate(eqn) if eqn.params["cond_jaxpr"].out_avals[0].shape else None
    if name in known:
        return None
    run = implementation(eqn.primitive)
    if run is None:
        return None
    try:
        closed = jax.make_jaxpr(functools.partial(run, **eqn.params))(*map(_struct, eqn.invars))
    except Exception as error:  # noqa: BLE001 - it runs on values, which a package's code may say by any exception
        log.debug("%s is not made of other operators: %s: %s", name, type(error).__name__, error)
        return None
    return None if any(e.primitive is eqn.primitive for e in closed.jaxpr.eqns) else closed


def platform_branch(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The branch of ``eqn`` that is taken on the platform that is planned for, as a function of all its operands; None
    where it does not choose by platform, or none is planned for. Raises LoweringError where there is no such branch."""
    platform = _platform.get()
    if platform is None or eqn.params.get("branches_platforms") is None:
        return None
    name = compiler_platform(platform)
    branches = zip(eqn.params["branches_platforms"], eqn.params["branches"], strict=True)
    branch = next((b for platforms, b in branches if platforms is None or name in platforms), None)
    if branch is None:
        raise LoweringError(
            f"{source_line(eqn)}: jax.lax.platform_dependent has no branch for {name} here, and no default"
        )
    run = jaxpr_as_fun(branch)
    return jax.make_jaxpr(lambda _, *operands: run(*operands))(*map(_struct, eqn.invars))


def _struct(atom: Any) -> jax.ShapeDtypeStruct:
    aval = atom.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _with_one_predicate(eqn: JaxprEqn) -> ClosedJaxpr:
    """A while loop whose predicate has dimensions, those that lead in every carried value."""
    test, body = jaxpr_as_fun(eqn.params["cond_jaxpr"]), jaxpr_as_fun(eqn.params["body_jaxpr"])
    first, second = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]

    def run(*operands: Any) -> list[Any]:
        def holds(carry: list[Any]) -> Any:
            (predicate,) = test(*operands[:first], *carry)
            return predicate

        def turn(carry: list[Any]) -> list[Any]:
            mine = holds(carry)
            new = body(*operands[first:second], *carry)
            return [
                lax.select(lax.broadcast_in_dim(mine, x.shape, range(mine.ndim)), y, x)
                for x, y in zip(carry, new, strict=True)
            ]

        def any_holds(carry: list[Any]) -> Any:
            mine = holds(carry)
            return lax.reduce_or(mine, tuple(range(mine.ndim)))

        return lax.while_loop(any_holds, turn, list(operands[second:]))

    return jax.make_jaxpr(run)(*map(_struct, eqn.invars))
