"""Small operations on jaxprs: variables renamed, constants put in place, equations copied."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from autopar.jax_compat import Jaxpr, JaxprEqn, Literal, Var, fresh_var, primitives, scalar_literal

Env: TypeAlias = "dict[Var, Any]"
"""Variable → the atom that takes its place."""


def replaced(eqn: JaxprEqn, env: Env) -> JaxprEqn:
    """``eqn`` with the operands that ``env`` has in place of its own."""
    if not any(isinstance(v, Var) and v in env for v in eqn.invars):
        return eqn
    return eqn.replace(invars=[env.get(v, v) if isinstance(v, Var) else v for v in eqn.invars])


def renamed(eqns: Sequence[JaxprEqn], env: Env) -> list[JaxprEqn]:
    """Copies of ``eqns`` with fresh variables for results; ``env`` replaces operands and learns the new results."""
    out: list[JaxprEqn] = []
    for eqn in eqns:
        invars = [env.get(v, v) if isinstance(v, Var) else v for v in eqn.invars]
        outvars = [fresh_var(v) for v in eqn.outvars]
        env.update(zip(eqn.outvars, outvars, strict=True))
        out.append(eqn.replace(invars=invars, outvars=outvars))
    return out


def rewired(jaxpr: Jaxpr, invars: Sequence[Var], env: Env, outvars: Sequence[Any]) -> Jaxpr:
    """``jaxpr`` with inputs ``invars`` and results ``outvars``, what ``env`` has in place of variables; without
    constants."""
    return plain(
        jaxpr,
        invars,
        [env.get(v, v) if isinstance(v, Var) else v for v in outvars],
        [replaced(e, env) for e in jaxpr.eqns],
    )


def plain(jaxpr: Jaxpr, invars: Sequence[Var], outvars: Sequence[Any], eqns: Sequence[JaxprEqn]) -> Jaxpr:
    """A jaxpr of these inputs, equations and results, without constants and without names of inputs and results; the
    rest is ``jaxpr``'s."""
    names = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    effects = frozenset().union(*(e.effects for e in eqns)) if any(e.effects for e in eqns) else frozenset()
    return jaxpr.replace(
        constvars=[], invars=list(invars), outvars=list(outvars), eqns=list(eqns), effects=effects, debug_info=names
    )


def soonest(jaxpr: Jaxpr, soon: Callable[[JaxprEqn], bool]) -> Jaxpr:
    """``jaxpr`` with the equations for which ``soon`` holds as early as what they read allows, the others in their
    order, as those that have effects are; itself where that is so already."""
    maker = {v: p for p, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    after: list[list[int]] = [[] for _ in jaxpr.eqns]
    waits = [0] * len(jaxpr.eqns)
    effectful = -1
    for p, eqn in enumerate(jaxpr.eqns):
        ahead = {maker[v] for v in eqn.invars if isinstance(v, Var) and v in maker}
        if eqn.effects:
            ahead |= {effectful} - {-1}
            effectful = p
        waits[p] = len(ahead)
        for q in ahead:
            after[q].append(p)
    turn = [(not soon(eqn), p) for p, eqn in enumerate(jaxpr.eqns)]
    ready = [turn[p] for p, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, p = heapq.heappop(ready)
        order.append(p)
        for q in after[p]:
            waits[q] -= 1
            if not waits[q]:
                heapq.heappush(ready, turn[q])
    if order == sorted(order):
        return jaxpr
    return plain(jaxpr, jaxpr.invars, jaxpr.outvars, [jaxpr.eqns[p] for p in order])


def without_constants(jaxpr: Jaxpr, consts: Sequence[Any]) -> Jaxpr:
    """``jaxpr`` with its constants as literals."""
    env: Env = {v: Literal(c, v.aval) for v, c in zip(jaxpr.constvars, consts, strict=True)}
    return rewired(jaxpr, jaxpr.invars, env, jaxpr.outvars)


def zeros(result: Var, like: JaxprEqn) -> JaxprEqn:
    """An equation that makes ``result`` zeros, at the source line of ``like``."""
    return like.replace(
        primitive=primitives.broadcast_in_dim_p,
        invars=[scalar_literal(np.zeros((), result.aval.dtype), result.aval)],
        outvars=[result],
        params={"shape": result.aval.shape, "broadcast_dimensions": (), "sharding": None},
        effects=frozenset(),
    )
