"""Loop-invariant equations of a scan or a while loop, and constants of a rematerialised body, moved before it.

XLA moves them anyway, and the resharding of their results with them; a plan that counts those once per
iteration would be wrong about time. What makes more bytes than it reads stays inside (`INFLATION`): kept
for the whole loop, it would cost memory that recomputing it does not; unless the same is there before the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autopar.jax_compat import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    bodies_of,
    fresh_var,
    scan_counts,
    with_scan_consts,
)

INFLATION = 2.0
"""Largest ratio of bytes made to bytes read that is hoisted (guessed: a conversion to a wider type is fine)."""
SMALL_BYTES = 1 << 12
"""Results of at most so many bytes are hoisted whatever they are made from."""
IOTA_BYTES = 1 << 22
"""The same for what is made from nothing (iotas, of which masks are made)."""


Find = Callable[[JaxprEqn, Sequence[Any]], Any]


def hoist_invariants(eqn: JaxprEqn, keep: Callable[[JaxprEqn], bool], find: Find) -> tuple[list[JaxprEqn], JaxprEqn]:
    """(equations to run before, the loop without them), of a scan or a while.

    Args:
        keep: True for equations that must not move.
        find: (equation, its operands outside) → the results of an equal one that is already there, or None.
    """
    scans = eqn.primitive.name == "scan"
    name = "jaxpr" if scans else "body_jaxpr"
    before = 0 if scans else eqn.params["cond_nconsts"]
    consts = scan_counts(eqn)[0] if scans else eqn.params["body_nconsts"]
    body, given = eqn.params[name].jaxpr, eqn.invars[: before + consts]
    outer: dict[Var, Any] = dict(zip(body.invars[:consts], given[before:], strict=True))

    def stays(e: JaxprEqn, operands: Sequence[Any]) -> bool:
        if not scans and bodies_of(e):  # the loop may make no turn, and this no end
            return True
        return bool(e.effects) or keep(e) or (_inflates(e) and find(e, operands) is None)

    moved, stay, outer = _moved(body.eqns, outer, stays)
    if not moved:
        return [], eqn
    fresh = _needed(body, stay, outer)
    invars = [*body.invars[:consts], *fresh, *body.invars[consts:]]
    params = {**eqn.params, name: ClosedJaxpr(body.replace(invars=invars, eqns=stay), [])}
    params = with_scan_consts(params, len(fresh)) if scans else {**params, "body_nconsts": consts + len(fresh)}
    operands = [*given, *(outer[v] for v in fresh), *eqn.invars[before + consts :]]
    return moved, eqn.replace(invars=operands, params=params)


def hoist_constants(eqn: JaxprEqn, keep: Callable[[JaxprEqn], bool], find: Find) -> tuple[list[JaxprEqn], JaxprEqn]:
    """(equations to run before, the rematerialised body without them): what the body makes of nothing but literals. Its
    optimisation barrier holds back only what comes from outside, so the compiler would merge it with its equals."""
    del find
    body = eqn.params["jaxpr"]
    moved, stay, outer = _moved(body.eqns, {}, lambda e, _: bool(e.effects) or keep(e))
    if not moved:
        return [], eqn
    fresh = _needed(body, stay, outer)
    params = {**eqn.params, "jaxpr": body.replace(invars=[*body.invars, *fresh], eqns=stay)}
    return moved, eqn.replace(invars=[*eqn.invars, *(outer[v] for v in fresh)], params=params)


def _moved(
    eqns: Sequence[JaxprEqn], outer: dict[Var, Any], keep: Callable[[JaxprEqn, Sequence[Any]], bool]
) -> tuple[list[JaxprEqn], list[JaxprEqn], dict[Var, Any]]:
    """(copies of the equations that need literals and ``outer`` alone, the others, where all that they make is)."""
    moved: list[JaxprEqn] = []
    stay: list[JaxprEqn] = []
    for inner in eqns:
        constant = _is_full(inner)
        known = all(isinstance(v, Literal) or v in outer for v in inner.invars)
        operands = [v if isinstance(v, Literal) else outer[v] for v in inner.invars] if known else []
        if constant or not known or keep(inner, operands):
            stay.append(inner)
            if not constant:
                continue  # a constant is made in both places, wherever it is read
        results = [fresh_var(v) for v in inner.outvars]
        moved.append(inner.replace(invars=operands, outvars=results))
        outer.update(zip(inner.outvars, results, strict=True))
    return moved, stay, outer


def _needed(body: Any, stay: Sequence[JaxprEqn], outer: dict[Var, Any]) -> list[Var]:
    """What was moved out of a body, and is read there."""
    made = {v for e in body.eqns if not _is_full(e) for v in e.outvars} & set(outer)
    needed = [v for e in stay for v in e.invars if isinstance(v, Var)] + [v for v in body.outvars if isinstance(v, Var)]
    return list(dict.fromkeys(v for v in needed if v in made))


def _is_full(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "broadcast_in_dim" and isinstance(eqn.invars[0], Literal)


def _inflates(eqn: JaxprEqn) -> bool:
    read, made = (sum(_bytes(v.aval) for v in side) for side in (eqn.invars, eqn.outvars))
    return made > max(INFLATION * read, SMALL_BYTES if eqn.invars else IOTA_BYTES)


def _bytes(aval: Any) -> int:
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", None)
    return int(np.prod(shape, dtype=np.int64)) * getattr(dtype, "itemsize", 8)
