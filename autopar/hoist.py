"""Loop-invariant equations of a scan, moved before it.

XLA moves them anyway, and the resharding of their results with them; a plan that counts those once per
iteration would be wrong about time. What makes more bytes than it reads stays inside (`INFLATION`): kept
for the whole loop, it would cost memory that recomputing it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from autopar.jax_compat import ClosedJaxpr, JaxprEqn, Literal, Var, fresh_var, scan_counts, with_scan_consts

INFLATION = 2.0
"""Largest ratio of bytes made to bytes read that is hoisted (guessed: a conversion to a wider type is fine)."""
SMALL_BYTES = 1 << 12
"""Results of at most so many bytes are hoisted whatever they are made from."""
IOTA_BYTES = 1 << 22
"""The same for what is made from nothing (iotas, of which masks are made)."""


def hoist_invariants(eqn: JaxprEqn, keep: Callable[[JaxprEqn], bool]) -> tuple[list[JaxprEqn], JaxprEqn]:
    """(equations to run before, the scan without them). ``keep`` says which equations must not move."""
    body = eqn.params["jaxpr"].jaxpr
    consts, _ = scan_counts(eqn)
    outer: dict[Var, Any] = dict(zip(body.invars[:consts], eqn.invars[:consts], strict=True))
    moved: list[JaxprEqn] = []
    stay: list[JaxprEqn] = []
    for inner in body.eqns:
        invariant = all(isinstance(v, Literal) or v in outer for v in inner.invars)
        constant = _is_full(inner)
        if constant or not invariant or inner.effects or keep(inner) or _inflates(inner):
            stay.append(inner)
            if not constant:
                continue  # a constant is made in both places, wherever it is read
        results = [fresh_var(v) for v in inner.outvars]
        moved.append(
            inner.replace(invars=[v if isinstance(v, Literal) else outer[v] for v in inner.invars], outvars=results)
        )
        outer.update(zip(inner.outvars, results, strict=True))
    if not moved:
        return [], eqn
    made = {v for e in body.eqns if not _is_full(e) for v in e.outvars} & set(outer)
    needed = [v for e in stay for v in e.invars if isinstance(v, Var)] + [v for v in body.outvars if isinstance(v, Var)]
    fresh = list(dict.fromkeys(v for v in needed if v in made))
    invars = [*body.invars[:consts], *fresh, *body.invars[consts:]]
    closed = ClosedJaxpr(body.replace(invars=invars, eqns=stay), [])
    params = with_scan_consts({**eqn.params, "jaxpr": closed}, len(fresh))
    operands = [*eqn.invars[:consts], *(outer[v] for v in fresh), *eqn.invars[consts:]]
    return moved, eqn.replace(invars=operands, params=params)


def _is_full(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "broadcast_in_dim" and isinstance(eqn.invars[0], Literal)


def _inflates(eqn: JaxprEqn) -> bool:
    read, made = (sum(_bytes(v.aval) for v in side) for side in (eqn.invars, eqn.outvars))
    return made > max(INFLATION * read, SMALL_BYTES if eqn.invars else IOTA_BYTES)


def _bytes(aval: Any) -> int:
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", None)
    return int(np.prod(shape, dtype=np.int64)) * getattr(dtype, "itemsize", 8)
