"""Branches of the update that hold all parameters → one `cond` for each group of results that belong together.

`optax.apply_if_finite` and `MultiSteps` put the whole optimizer into one `lax.cond`, which would tie the updates of all
layers to one another. Its results fall into groups that share no large value in any branch; each group becomes a cond
of its own on the same predicate, with what it needs of the branches. Scalars that are made of several groups' values,
as the norm of all gradients by which a branch clips, are computed before the conds whichever branch is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.frontend.layering.surgery import Env, fresh_var, plain, renamed, without_constants
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
    groups = _Groups(branches, eqn.outvars)
    if len(groups.of_large()) < 2:
        return [eqn]
    ahead, operands, branches = _hoisted(groups, eqn.invars[1:])
    out: list[JaxprEqn] = ahead
    for group in _Groups(branches, eqn.outvars).found():
        parts = [dce(b.replace(outvars=[b.outvars[i] for i in group], debug_info=_unnamed(b))) for b in branches]
        read = sorted({b.invars.index(v) for b in parts for v in _read(b)})
        bodies = tuple(ClosedJaxpr(plain(b, [b.invars[i] for i in read], b.outvars, b.eqns), []) for b in parts)
        out.append(
            eqn.replace(
                invars=[eqn.invars[0], *(operands[i] for i in read)],
                outvars=[eqn.outvars[i] for i in group],
                params={**eqn.params, "branches": bodies},
            )
        )
    return out


def _hoisted(groups: _Groups, operands: Sequence[Any]) -> tuple[list[JaxprEqn], list[Any], list[Jaxpr]]:
    """Equations that make, outside, what branches make of several groups' values; the operands with these scalars
    behind; the branches, which take them."""
    ahead: list[JaxprEqn] = []
    given: list[tuple[int, Var, Any]] = []  # (branch, its scalar, the one outside)
    for number, branch in enumerate(groups.branches):
        shared = groups.shared(number)
        if not shared:
            continue
        env: Env = dict(zip(branch.invars, operands, strict=True))
        needed = dce(plain(branch, branch.invars, shared, branch.eqns))
        ahead += renamed(needed.eqns, env)
        given += [(number, v, env[v]) for v in shared]
    out: list[Jaxpr] = []
    for number, branch in enumerate(groups.branches):
        mine = {v for k, v, _ in given if k == number}
        extra = [v if k == number else fresh_var(v) for k, v, _ in given]
        eqns = [e for e in branch.eqns if mine.isdisjoint(e.outvars)]
        out.append(plain(branch, [*branch.invars, *extra], branch.outvars, eqns))
    return ahead, [*operands, *(atom for _, _, atom in given)], out


def _unnamed(jaxpr: Jaxpr) -> Any:
    return jaxpr.debug_info._replace(arg_names=None, result_paths=None)


def _read(jaxpr: Jaxpr) -> set[Var]:
    """Inputs that are used."""
    used = {v for e in jaxpr.eqns for v in e.invars if isinstance(v, Var)}
    used |= {v for v in jaxpr.outvars if isinstance(v, Var)}
    return used & set(jaxpr.invars)


class _Groups:
    """Results that hang together, by way of large values of any branch."""

    def __init__(self, branches: Sequence[Jaxpr], outvars: Sequence[Any]) -> None:
        self.branches, self.outvars = branches, outvars
        self.parent: dict[Any, Any] = {}
        self.operand = [{v: ("operand", i) for i, v in enumerate(b.invars)} for b in branches]
        for branch, operand in zip(branches, self.operand, strict=True):
            for e in branch.eqns:
                large = [operand.get(v, v) for v in (*e.invars, *e.outvars) if isinstance(v, Var) and _is_large(v)]
                for v in large[1:]:
                    self.parent[self._root(v)] = self._root(large[0])
            for i, v in enumerate(branch.outvars):
                if isinstance(v, Var) and _is_large(v):
                    self.parent[self._root(("result", i))] = self._root(operand.get(v, v))
        self.made_of = [self._made_of(number) for number in range(len(branches))]

    def _root(self, key: Any) -> Any:
        while self.parent.setdefault(key, key) != key:
            self.parent[key] = self.parent[self.parent[key]]
            key = self.parent[key]
        return key

    def _made_of(self, number: int) -> dict[Any, frozenset[Any]]:
        """Variable of a branch → the groups whose large values it is made of."""
        operand = self.operand[number]

        def of(v: Any) -> frozenset[Any]:
            if not isinstance(v, Var):
                return frozenset()
            return frozenset([self._root(operand.get(v, v))]) if _is_large(v) else out.get(v, frozenset())

        out: dict[Any, frozenset[Any]] = {}
        for e in self.branches[number].eqns:
            read = frozenset[Any]().union(*map(of, e.invars))
            out.update((v, of(v) if _is_large(v) else read) for v in e.outvars)
        return out

    def shared(self, number: int) -> list[Var]:
        """Scalars of a branch that are made of several groups' values, as far as others or results are made of them."""
        branch, made_of = self.branches[number], self.made_of[number]
        several = {v for v, of in made_of.items() if len(of) > 1 and not _is_large(v)}
        read = {v for e in branch.eqns if several.isdisjoint(e.outvars) for v in e.invars if isinstance(v, Var)}
        read |= {v for v in branch.outvars if isinstance(v, Var)}
        return [v for e in branch.eqns for v in e.outvars if v in several and v in read]

    def of_large(self) -> set[Any]:
        """The groups that large results, or what scalar results are made of, are in."""
        found = {self._root(("result", i)) for i, v in enumerate(self.outvars) if _is_large(v)}
        return found.union(*(of for made in self.made_of for of in made.values()))

    def found(self) -> list[list[int]]:
        """Results by groups; a scalar goes with the group that it is made of, those of none or several are one more."""
        out: dict[Any, list[int]] = {}
        for i, var in enumerate(self.outvars):
            of = frozenset([self._root(("result", i))]) if _is_large(var) else frozenset()
            for branch, made_of in zip(self.branches, self.made_of, strict=True):
                atom = branch.outvars[i]
                of |= made_of.get(atom, frozenset()) if isinstance(atom, Var) and not _is_large(var) else frozenset()
            out.setdefault(next(iter(of)) if len(of) == 1 else "scalar", []).append(i)
        return list(out.values())


def _is_large(var: Any) -> bool:
    return getattr(var.aval, "size", 1) > 1
