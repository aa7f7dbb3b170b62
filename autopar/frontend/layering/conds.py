"""Branches of the update that hold all parameters → one `cond` for each group of results that belong together.

`optax.apply_if_finite` and `MultiSteps` put the whole optimizer into one `lax.cond`, which would tie the updates of all
layers to one another. Its results fall into groups that share no large value in any branch; each group becomes a cond
of its own on the same predicate, with what it needs of the branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.frontend.layering.surgery import plain, without_constants
from autopar.frontend.microbatch.inline import flatten
from autopar.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var, dce


def split_conds(jaxpr: Jaxpr) -> Jaxpr:
    """``jaxpr`` with each cond replaced by one for each group of its results; those with effects stay."""
    if not any(e.primitive.name == "cond" for e in jaxpr.eqns):
        return jaxpr
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        eqns += _apart(eqn) if eqn.primitive.name == "cond" and not eqn.effects else [eqn]
    return plain(jaxpr, jaxpr.invars, jaxpr.outvars, eqns)


def _apart(eqn: JaxprEqn) -> list[JaxprEqn]:
    branches = [without_constants(*flatten(b.jaxpr, list(b.consts), markers=True)) for b in eqn.params["branches"]]
    groups = _groups(branches, eqn.outvars)
    if len(groups) < 2:
        return [eqn]
    out: list[JaxprEqn] = []
    for group in groups:
        parts = [dce(b.replace(outvars=[b.outvars[i] for i in group], debug_info=_unnamed(b))) for b in branches]
        read = sorted({b.invars.index(v) for b in parts for v in _read(b)})
        bodies = tuple(ClosedJaxpr(plain(b, [b.invars[i] for i in read], b.outvars, b.eqns), []) for b in parts)
        out.append(
            eqn.replace(
                invars=[eqn.invars[0], *(eqn.invars[1 + i] for i in read)],
                outvars=[eqn.outvars[i] for i in group],
                params={**eqn.params, "branches": bodies},
            )
        )
    return out


def _unnamed(jaxpr: Jaxpr) -> Any:
    return jaxpr.debug_info._replace(arg_names=None, result_paths=None)


def _read(jaxpr: Jaxpr) -> set[Var]:
    """Inputs that are used."""
    used = {v for e in jaxpr.eqns for v in e.invars if isinstance(v, Var)}
    used |= {v for v in jaxpr.outvars if isinstance(v, Var)}
    return used & set(jaxpr.invars)


def _groups(branches: Sequence[Jaxpr], outvars: Sequence[Any]) -> list[list[int]]:
    """Results that hang together, by way of large values of any branch; scalar results are one group."""
    parent: dict[Any, Any] = {}

    def root(key: Any) -> Any:
        while parent.setdefault(key, key) != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    for branch in branches:
        operand = {v: ("operand", i) for i, v in enumerate(branch.invars)}
        for e in branch.eqns:
            large = [operand.get(v, v) for v in (*e.invars, *e.outvars) if isinstance(v, Var) and _is_large(v)]
            for v in large[1:]:
                parent[root(v)] = root(large[0])
        for i, v in enumerate(branch.outvars):
            if isinstance(v, Var) and _is_large(v):
                parent[root(("result", i))] = root(operand.get(v, v))
    found: dict[Any, list[int]] = {}
    for i, v in enumerate(outvars):
        found.setdefault(root(("result", i)) if _is_large(v) else "scalar", []).append(i)
    return list(found.values())


def _is_large(var: Any) -> bool:
    return getattr(var.aval, "size", 1) > 1
