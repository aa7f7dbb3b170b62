"""A traced jaxpr → the jaxpr that is planned and run: what XLA would simplify is simplified already.

``jit``, ``custom_jvp``, ``custom_vjp`` and autopar's own gradient marker are inlined, scans of length 0 and 1, and what
no rule describes but other operators make up (`opened_calls`); repeated equations are merged, unused ones dropped and
trivial ones removed (`algebra`). XLA would do all of it, and the
reshardings of values that it finds equal would become one: its collectives would differ from the plan's. ``scan``,
``while``, ``cond`` and ``remat`` keep their bodies, normalised likewise.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.core
import numpy as np

from autopar.frontend.algebra import Known, full, reshape, simplify
from autopar.frontend.hoist import hoist_constants, hoist_invariants
from autopar.frontend.layer_boundary import boundary_p
from autopar.frontend.loops import without_dead_carries
from autopar.frontend.opened_calls import BODIES, INLINED, known_primitives, opened
from autopar.ir.errors import TraceError
from autopar.jax_compat import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    dce,
    fresh_var,
    scalar_literal,
    scan_counts,
    within_call,
    zeros,
)

COMMUTATIVE = {n: n for n in ("add", "mul", "max", "min", "and", "or", "xor", "eq", "ne")} | {"add_any": "add"}
"""Operators of two operands whose order does not matter → what the compiler calls them."""

HOISTED = {
    "scan": hoist_invariants,
    "while": hoist_invariants,
    "remat2": hoist_constants,
    "checkpoint": hoist_constants,
}
"""Primitives with bodies → what moves equations before them."""


def normalise(closed: ClosedJaxpr, expand: Any, keep_remat: bool) -> tuple[ClosedJaxpr, list[Any]]:
    """The normalised jaxpr and its constants; ``expand`` and ``keep_remat`` as `trace.trace` takes them. Raises
    LoweringError as `trace.trace` does."""
    consts: dict[Any, tuple[Var, Any]] = {}
    inliner = _Inliner(expand, consts, keep_remat, known_primitives())
    jaxpr = dce(closed.jaxpr)
    scope = _Scope()
    env: dict[Var, Any] = {v: inliner.const(v, c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True)}
    env.update({v: v for v in jaxpr.invars})
    outs = inliner.run(jaxpr, env, scope)
    constvars = [v for v, _ in consts.values()]
    values = [c for _, c in consts.values()]
    inner = _needed(jaxpr.replace(constvars=[], invars=[*constvars, *jaxpr.invars], outvars=outs, eqns=scope.eqns))
    used = {v for e in inner.eqns for v in e.invars if isinstance(v, Var)}
    used |= {v for v in inner.outvars if isinstance(v, Var)}
    keep = [i for i, v in enumerate(constvars) if v in used]
    kept = [values[i] for i in keep]
    return ClosedJaxpr(inner.replace(constvars=[constvars[i] for i in keep], invars=list(jaxpr.invars)), kept), kept


@dataclass
class _Scope:
    """One body as far as it is written. ``found`` maps what an equation computes to its results; ``renamed`` the
    variables of equations that were moved here from a loop to what they became."""

    eqns: list[JaxprEqn] = field(default_factory=list)
    found: dict[Any, list[Any]] = field(default_factory=dict)
    renamed: dict[Var, Any] = field(default_factory=dict)
    known: Known = field(default_factory=Known)

    def add(self, eqn: JaxprEqn, invars: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
        """The results of ``eqn`` on ``invars``: simplified, found, or of a new equation."""
        simple = simplify(eqn, invars, self.known, self.find, self.add)
        if simple is not None:
            return simple
        key = None if eqn.effects or eqn.primitive.name in BODIES else _key(eqn, invars)
        if key is not None and key in self.found:
            return self.found[key]
        outvars: list[Any] = [fresh_var(v) for v in eqn.outvars]
        new = eqn.replace(invars=list(invars), outvars=outvars, params=eqn.params if params is None else params)
        if eqn.primitive.name in HOISTED:
            before, new = HOISTED[eqn.primitive.name](new, _stays, self.find)
            for moved in before:
                results = self.add(moved, [self.renamed.get(v, v) if isinstance(v, Var) else v for v in moved.invars])
                self.renamed.update(zip(moved.outvars, results, strict=True))
            new = new.replace(invars=[self.renamed.get(v, v) if isinstance(v, Var) else v for v in new.invars])
        self.eqns.append(new)
        self.known.learn(new)
        if key is not None:
            self.found[key] = outvars
        return outvars

    def find(self, eqn: JaxprEqn, invars: Sequence[Any]) -> list[Any] | None:
        """The results of ``eqn`` on ``invars`` if they are there."""
        return self.found.get(_key(eqn, invars))


@dataclass
class _Inliner:
    expand: Any
    consts: dict[Any, tuple[Var, Any]]
    keep_remat: bool
    known: Container[str]
    """Primitives that are planned as they are, whatever they are made of."""

    def const(self, var: Var, value: Any) -> Any:
        """The variable that stands for a closed-over array; equal small arrays share one."""
        if isinstance(value, jax.core.Tracer):
            raise TraceError(
                f"a derivative rule holds a {value.aval} of the trace around it, which is gone where the gradient is "
                "taken of what was traced: autopar.value_and_grad and stages need rules that are given all they use "
                "(jaxopt's implicit differentiation: take that gradient by jax.value_and_grad)"
            )
        key: Any = id(value)
        small = getattr(value, "nbytes", 1 << 20) < 1 << 16 and hasattr(value, "__array__")
        if small and not jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.prng_key):
            key = (str(var.aval), np.asarray(value).tobytes())
        if key not in self.consts:
            self.consts[key] = (fresh_var(var), value)
        return self.consts[key][0]

    def body(
        self, eqn: JaxprEqn | None, jaxpr: Jaxpr, consts: Sequence[Any], given: Sequence[Any], known: Known
    ) -> Jaxpr:
        """A body of ``eqn``, normalised; arrays that it closed over become array literals. ``given`` are the values
        that its first inputs always have, and ``known`` is what is known of those."""
        env: dict[Var, Any] = {v: v for v in jaxpr.invars}
        env.update({v: Literal(c, v.aval) for v, c in zip(jaxpr.constvars, consts, strict=True)})
        scope = _Scope()
        first: dict[Var, Var] = {}
        for v, atom in zip(jaxpr.invars, given, strict=False):
            assert eqn is not None
            scalar = known.scalar(atom)
            if scalar is not None:
                literal = scalar_literal(np.asarray(scalar.val, v.aval.dtype), v.aval)
                env[v] = scope.add(full(eqn, literal, v), [literal])[0] if v.aval.shape else literal
            elif isinstance(atom, Var):
                env[v] = first.setdefault(atom, v)
        inner = replace(self, consts={})
        outs = inner.run(jaxpr, env, scope)
        eqns = scope.eqns
        if inner.consts:
            literal_of = {v: Literal(c, v.aval) for v, c in inner.consts.values()}
            eqns = [
                e.replace(invars=[literal_of.get(v, v) if isinstance(v, Var) else v for v in e.invars]) for e in eqns
            ]
            outs = [literal_of.get(v, v) if isinstance(v, Var) else v for v in outs]
        return _needed(jaxpr.replace(constvars=[], outvars=outs, eqns=eqns))

    def run(self, jaxpr: Jaxpr, env: dict[Var, Any], scope: _Scope, call: JaxprEqn | None = None) -> list[Any]:
        """Adds ``jaxpr``'s equations to ``scope``, inlined; returns its outputs. ``call``: whose body it is."""

        def read(atom: Any) -> Any:
            return env[atom] if isinstance(atom, Var) else atom

        for eqn in jaxpr.eqns:
            invars = [read(a) for a in eqn.invars]
            eqn = _anywhere(eqn if call is None else within_call(eqn, call))
            inner = self._inlined(eqn)
            if eqn.primitive is boundary_p:
                results = invars
            elif inner is not None:
                results = self._call(eqn, inner, invars, scope)
            elif eqn.primitive.name == "scan" and eqn.params["length"] <= 1:
                results = (self._once if eqn.params["length"] else self._never)(eqn, invars, scope)
            else:
                results = scope.add(eqn, invars, self._params(eqn, invars, scope.known))
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def _call(self, eqn: JaxprEqn, closed: ClosedJaxpr, invars: Sequence[Any], scope: _Scope) -> list[Any]:
        body, consts = closed.jaxpr, closed.consts
        env = dict(zip(body.invars, invars, strict=True))
        env.update({v: self.const(v, c) for v, c in zip(body.constvars, consts, strict=True)})
        return self.run(body, env, scope, eqn)

    def _never(self, eqn: JaxprEqn, invars: Sequence[Any], scope: _Scope) -> list[Any]:
        """The results of a scan of length 0: its carry as it came, and nothing stacked."""
        consts, carry = scan_counts(eqn)
        stacked = jax.make_jaxpr(lambda: [zeros(y.aval) for y in eqn.outvars[carry:]])()
        return [*invars[consts : consts + carry], *self._call(eqn, stacked, [], scope)]

    def _once(self, eqn: JaxprEqn, invars: Sequence[Any], scope: _Scope) -> list[Any]:
        """The results of a scan of length 1, its body inlined."""
        body = eqn.params["jaxpr"]
        consts, carry = scan_counts(eqn)
        whole = consts + carry

        def reshaped(atom: Any, like: Any) -> Any:
            return scope.add(reshape(eqn, atom, like), [atom])[0]

        rows = [reshaped(x, v) for x, v in zip(invars[whole:], body.jaxpr.invars[whole:], strict=True)]
        outs = self._call(eqn, body, [*invars[:whole], *rows], scope)
        return [*outs[:carry], *(reshaped(y, v) for y, v in zip(outs[carry:], eqn.outvars[carry:], strict=True))]

    def _inlined(self, eqn: JaxprEqn) -> ClosedJaxpr | None:
        name = eqn.primitive.name
        if name in INLINED:
            return eqn.params[INLINED[name]]
        if name in ("remat2", "checkpoint") and not (self.keep_remat and eqn.params.get("differentiated", True)):
            return ClosedJaxpr(eqn.params["jaxpr"], [])
        marked = self.expand(eqn) if self.expand is not None else None
        return opened(eqn, self.known) if marked is None else marked

    def _params(self, eqn: JaxprEqn, invars: Sequence[Any], known: Known) -> dict[str, Any]:
        """The equation's parameters, its bodies normalised."""
        if eqn.primitive.name not in BODIES:
            return eqn.params
        params = dict(eqn.params)
        for name, given in _given(eqn, invars).items():
            value = params[name]
            if isinstance(value, Jaxpr):
                params[name] = self.body(eqn, value, [], given, known)
            elif isinstance(value, ClosedJaxpr):
                params[name] = ClosedJaxpr(self.body(eqn, value.jaxpr, value.consts, given, known), [])
            else:
                bodies = (self.body(eqn, b.jaxpr, b.consts, given, known) for b in value)
                params[name] = tuple(ClosedJaxpr(b, []) for b in bodies)
        return params


def _needed(jaxpr: Jaxpr) -> Jaxpr:
    """``jaxpr`` without what nothing uses."""
    jaxpr = dce(jaxpr)
    fewer = without_dead_carries(jaxpr)
    return jaxpr if fewer is jaxpr else dce(fewer)


def _stays(eqn: JaxprEqn) -> bool:
    """True for what is not moved out of a loop: a rematerialised body is computed where it is asked for."""
    return eqn.primitive.name in ("remat2", "checkpoint")


def _anywhere(eqn: JaxprEqn) -> JaxprEqn:
    """``eqn`` without a sharding of its result that the mesh in context gave it; the plan has its own."""
    noted = [k for k in ("sharding", "out_sharding") if eqn.params.get(k) is not None]
    if not noted or eqn.primitive.name == "sharding_constraint":
        return eqn
    return eqn.replace(params={**eqn.params, **dict.fromkeys(noted)})


def _given(eqn: JaxprEqn, invars: Sequence[Any]) -> dict[str, list[Any]]:
    """Parameter that holds a body → the operands that its first inputs always are."""
    match eqn.primitive.name:
        case "scan":
            return {"jaxpr": list(invars[: scan_counts(eqn)[0]])}
        case "while":
            n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            return {"cond_jaxpr": list(invars[:n]), "body_jaxpr": list(invars[n : n + m])}
        case "cond":
            return {"branches": list(invars[1:])}
        case _:
            return {BODIES[eqn.primitive.name][0]: list(invars)}


def _key(eqn: JaxprEqn, invars: Sequence[Any]) -> Any:
    """A hashable identity of what ``eqn`` computes; None where a parameter cannot be hashed."""
    name = eqn.primitive.name
    operands = tuple(_atom_key(v) for v in invars)
    if name in COMMUTATIVE:
        key = (COMMUTATIVE[name], frozenset(operands), len(operands))
    else:
        key = (eqn.primitive, operands, tuple(eqn.params.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _atom_key(atom: Any) -> Any:
    if isinstance(atom, Var):
        return atom
    value = np.asarray(atom.val) if not hasattr(atom.val, "dtype") or np.ndim(atom.val) == 0 else None
    if value is None:
        return ("array", id(atom.val))
    return (str(atom.aval), value.tobytes())
