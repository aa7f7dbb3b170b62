"""``while`` equations: how often they run, where that follows from constants, and carries that nobody needs.

XLA finds the same. A loop's turns are known where a counter goes by equal steps to a bound, or by trying out up to
`TRIED` turns (a scan says its length itself). A carried value that neither the predicate, turn after turn, nor anything
after the loop follows from is dropped, as JAX does with a scan's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.frontend.algebra import evaluated
from autopar.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, unnamed

TRIED = 128
"""Turns that are evaluated one by one (XLA's number)."""


def known_trips(eqn: JaxprEqn) -> int | None:
    """The number of turns; None where it depends on values, or takes too long to find."""
    first, second = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    test, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
    known = [_scalar(v) for v in eqn.invars]
    needed = _needed(test, body, first, second - first)
    if any(known[second + i] is None for i in needed):
        return None
    turns, test_eqns = _slice(body, [body.outvars[i] for i in needed]), _slice(test, test.outvars)
    state = {i: known[second + i] for i in needed}
    for trip in range(TRIED + 1):
        (holds,) = _run(test, test_eqns, [*known[:first], *_carry(test, first, state)], test.outvars)
        if holds is None:
            return None
        if not holds:
            return trip
        if trip < 2:
            steady = _steady(test, test_eqns, body, turns, known, state, first, second)
            if steady is not None:
                return trip + steady
        given = [*known[first:second], *_carry(body, second - first, state)]
        state = dict(zip(needed, _run(body, turns, given, [body.outvars[i] for i in needed]), strict=True))
    return None


def without_dead_carries(jaxpr: Jaxpr) -> Jaxpr:
    """``jaxpr`` with its ``while`` loops carrying what is needed."""
    if not any(e.primitive.name == "while" for e in jaxpr.eqns):
        return jaxpr
    used = {v for v in jaxpr.outvars if isinstance(v, Var)}
    eqns: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name == "while" and not eqn.effects:
            eqn = _live(eqn, used)
        used.update(v for v in eqn.invars if isinstance(v, Var))
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns[::-1])


def _live(eqn: JaxprEqn, used: set[Var]) -> JaxprEqn:
    """A loop that carries what its predicate and ``used`` results follow from, and reads no constant for nothing."""
    params = eqn.params
    first, count = params["cond_nconsts"], params["body_nconsts"]
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    live = set(_needed(test.jaxpr, body.jaxpr, first, count))
    fresh = {i for i, v in enumerate(eqn.outvars) if v in used}
    while fresh - live:
        live |= fresh
        fresh = _read(body.jaxpr, [body.jaxpr.outvars[i] for i in live], count)
    keep = sorted(live)
    less_test, test_consts = _fewer(test, first, keep, test.jaxpr.outvars)
    less_body, body_consts = _fewer(body, count, keep, [body.jaxpr.outvars[i] for i in keep])
    if len(keep) == len(eqn.outvars) and len(test_consts) + len(body_consts) == first + count:
        return eqn
    places = [*test_consts, *(first + i for i in body_consts), *(first + count + i for i in keep)]
    counts = {"cond_nconsts": len(test_consts), "body_nconsts": len(body_consts)}
    return eqn.replace(
        invars=[eqn.invars[i] for i in places],
        outvars=[eqn.outvars[i] for i in keep],
        params={**params, **counts, "cond_jaxpr": less_test, "body_jaxpr": less_body},
    )


def _fewer(closed: ClosedJaxpr, consts: int, keep: Sequence[int], outs: Sequence[Any]) -> tuple[ClosedJaxpr, list[int]]:
    """A body without what ``outs`` do not follow from, and which of its constants it still reads."""
    jaxpr = closed.jaxpr
    eqns = _slice(jaxpr, outs)
    read = {v for e in eqns for v in e.invars if isinstance(v, Var)} | {v for v in outs if isinstance(v, Var)}
    kept = [i for i, v in enumerate(jaxpr.invars[:consts]) if v in read]
    invars = [*(jaxpr.invars[i] for i in kept), *(jaxpr.invars[consts + i] for i in keep)]
    return ClosedJaxpr(unnamed(jaxpr).replace(invars=invars, outvars=list(outs), eqns=eqns), closed.consts), kept


def _steady(
    test: Jaxpr, test_eqns: Sequence[JaxprEqn], body: Jaxpr, turns: Sequence[JaxprEqn], known: Sequence[Any],
    state: dict[int, Any], first: int, second: int,
) -> int | None:  # fmt: skip
    """Turns from ``state`` on, of a counter that goes up by a number to below a bound."""
    if len(state) != 1 or len(test_eqns) != 1 or len(turns) != 1 or test_eqns[0].primitive.name != "lt":
        return None
    ((i, value),) = state.items()
    if value.dtype.kind not in "iu":
        return None
    left, right = test_eqns[0].invars
    bounds = dict(zip(test.invars[:first], known[:first], strict=True))
    bound = np.asarray(right.val) if isinstance(right, Literal) else bounds.get(right)
    if left is not test.invars[first + i] or bound is None or turns[0].primitive.name != "add":
        return None
    given = [*known[first:second], *_carry(body, second - first, state)]
    (after,) = _run(body, turns, given, [body.outvars[i]])
    counter = body.invars[second - first + i]
    if after is None or counter not in turns[0].invars or turns[0].invars[0] is turns[0].invars[1]:
        return None
    step = int(after) - int(value)
    return max(0, -(-(int(bound) - int(value)) // step)) if step > 0 else None


def _scalar(atom: Any) -> Any:
    number = isinstance(atom, Literal) and np.ndim(atom.val) == 0 and isinstance(atom.aval.dtype, np.dtype)
    return np.asarray(atom.val, atom.aval.dtype) if number else None


def _carry(jaxpr: Jaxpr, consts: int, state: dict[int, Any]) -> list[Any]:
    return [state.get(i) for i in range(len(jaxpr.invars) - consts)]


def _needed(test: Jaxpr, body: Jaxpr, test_consts: int, body_consts: int) -> list[int]:
    """The carried values that the predicate follows from, turn after turn."""
    found: set[int] = set()
    fresh = _read(test, test.outvars, test_consts)
    while fresh - found:
        found |= fresh
        fresh = _read(body, [body.outvars[i] for i in found], body_consts)
    return sorted(found)


def _read(jaxpr: Jaxpr, outs: Sequence[Any], consts: int) -> set[int]:
    """Positions among the carried values of those that ``outs`` follow from."""
    needed = {v for e in _slice(jaxpr, outs) for v in e.invars if isinstance(v, Var)}
    needed |= {v for v in outs if isinstance(v, Var)}
    return {i for i, v in enumerate(jaxpr.invars[consts:]) if v in needed}


def _slice(jaxpr: Jaxpr, outs: Sequence[Any]) -> list[JaxprEqn]:
    """The equations that ``outs`` follow from."""
    needed = {v for v in outs if isinstance(v, Var)}
    eqns: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            needed.update(v for v in eqn.invars if isinstance(v, Var))
            eqns.append(eqn)
    return eqns[::-1]


def _run(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], given: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    """``outs`` as NumPy scalars; None for what is not known."""
    env: dict[Var, Any] = dict(zip(jaxpr.invars, given, strict=True))

    def read(atom: Any) -> Any:
        return _scalar(atom) if isinstance(atom, Literal) else env.get(atom)

    for eqn in eqns:
        values = [read(a) for a in eqn.invars]
        if len(eqn.outvars) == 1 and None not in [v if v is None else 0 for v in values]:
            env[eqn.outvars[0]] = evaluated(eqn, values)
    return [read(a) for a in outs]
