"""A jaxpr → the same with ``jit`` bodies, branches by platform and gradient markers inlined, unused equations dropped.

Two traces of one function are then compared equation by equation, with no call boundaries in between.
Bodies of scan, while, cond, remat and custom rules stay; `analyse` inlines them when it gets there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.frontend.gradient import expand_marker, grad_p
from autopar.frontend.opened_calls import platform_branch
from autopar.jax_compat import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    dce,
    fresh_var,
    with_constants,
    within_call,
)

CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
"""Primitives replaced by their body → the parameter that holds it."""


def flatten(jaxpr: Jaxpr, consts: list[Any], *, markers: bool, checkpoints: bool = False) -> tuple[Jaxpr, list[Any]]:
    """(the inlined jaxpr, values of its constants); with ``markers`` gradient markers are inlined too, with
    ``checkpoints`` what is under `jax.checkpoint`, but for bodies of loops. ``consts``: ``jaxpr``'s. Raises
    LoweringError where a branch by platform has none for the one that is planned for."""
    constvars = list(jaxpr.constvars)
    values = list(consts)
    eqns: list[JaxprEqn] = []

    def body_of(eqn: JaxprEqn) -> ClosedJaxpr | None:
        if eqn.primitive is grad_p and markers:
            return expand_marker(eqn)
        if checkpoints and eqn.primitive.name in ("remat2", "checkpoint"):
            return ClosedJaxpr(eqn.params["jaxpr"], [])
        parameter = CALLS.get(eqn.primitive.name)
        return eqn.params[parameter] if parameter is not None else platform_branch(eqn)

    def run(inner: Jaxpr, env: dict[Var, Any], call: JaxprEqn | None = None) -> list[Any]:
        def read(atom: Any) -> Any:
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in inner.eqns:
            operands = [read(a) for a in eqn.invars]
            if call is not None:
                eqn = within_call(eqn, call)
            body = body_of(eqn)
            if body is not None:
                scope: dict[Var, Any] = dict(zip(body.jaxpr.invars, operands, strict=True))
                for var, value in zip(body.jaxpr.constvars, body.consts, strict=True):
                    scope[var] = fresh_var(var)
                    constvars.append(scope[var])
                    values.append(value)
                outs = run(body.jaxpr, scope, eqn)
                env.update(zip(eqn.outvars, outs, strict=True))
                continue
            results = [fresh_var(v) for v in eqn.outvars]
            env.update(zip(eqn.outvars, results, strict=True))
            eqns.append(eqn.replace(invars=operands, outvars=results))
        return [read(a) for a in inner.outvars]

    outvars = run(jaxpr, {v: v for v in (*jaxpr.constvars, *jaxpr.invars)})
    flat = with_constants(jaxpr, constvars, values, eqns=eqns, outvars=outvars, debug_info=_unnamed(jaxpr))
    return dce(flat), values


def _unnamed(jaxpr: Jaxpr) -> Any:
    return jaxpr.debug_info._replace(result_paths=None)


def holds_marker(jaxpr: Jaxpr) -> bool:
    """True if a gradient marker is anywhere inside."""
    return any(True for _ in markers(jaxpr, lambda _: True))


def markers(jaxpr: Jaxpr, enter: Callable[[JaxprEqn], bool]) -> Any:
    """Yields gradient markers in program order, those in bodies of equations that ``enter`` is true for included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is grad_p:
            yield eqn
        elif enter(eqn):
            for body in bodies(eqn):
                yield from markers(body, enter)


def bodies(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs among an equation's parameters."""
    found: list[Jaxpr] = []
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found
