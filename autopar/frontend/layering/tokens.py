"""What equations and layers compute, as keys that compare: equal keys, equal programs.

Equality is Python's own, of primitives, parameters, types and literals; nothing is hashed down, so nothing collides.
Callables among the parameters count by identity, except for derivative rules: those of `custom_jvp` and `custom_vjp`
are closures made anew by every call, and are compared by what they trace to.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import numpy as np

from autopar.frontend.layering.surgery import plain
from autopar.frontend.traced_apart import traced_apart
from autopar.ir.errors import TraceError
from autopar.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var, dce, jaxpr_as_fun
from autopar.primitives import record_of

log = logging.getLogger(__name__)
_RULES = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})


class Tokens:
    """Numbers for equations and programs: two that compute the same have one number, by the same `Tokens`."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}
        self._kept: list[Any] = []
        """Objects that are told apart by identity, so that nothing else gets their ids."""
        self._known_rules: dict[Any, Any] = {}
        self._inside_rule = False
        """A derivative is not differentiated again: rules inside it do not count."""

    def number(self, key: Any) -> int:
        """The number of ``key``, a hashable: that of an equal key before, else the next."""
        return self._known.setdefault(key, len(self._known))

    def aval(self, aval: Any) -> Any:
        """A key of an abstract value: shape, dtype, whether weakly typed."""
        return getattr(aval, "shape", None), getattr(aval, "dtype", None), getattr(aval, "weak_type", False)

    def atom(self, atom: Any) -> Any:
        """A key of an operand: its type, of a literal also its value."""
        if isinstance(atom, Var):
            return self.aval(atom.aval)
        return (*self.aval(atom.aval), self._value(atom.val))

    def _value(self, value: Any) -> Any:
        """The key of a literal's or constant's value; large ones count by identity."""
        if hasattr(value, "dtype") and jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
            return ("array", self._identity(value))
        array = np.asarray(value)
        if array.nbytes > 1 << 16:
            return ("array", self._identity(value))
        return str(array.dtype), array.shape, array.tobytes()

    def eqn(self, eqn: JaxprEqn) -> int:
        """The number of what ``eqn`` computes, whatever its operands are called."""
        with_rules = eqn.primitive.name in _RULES
        rules = self._rules_once(eqn) if with_rules and not self._inside_rule else None
        params = tuple(
            (k, self._param(v)) for k, v in sorted(eqn.params.items()) if not with_rules or k in ("call_jaxpr", "name")
        )
        settings = None
        if record_of(eqn.primitive.name).traits.random:
            settings = bool(eqn.ctx.threefry_partitionable)
        return self.number(
            (
                eqn.primitive,
                params,
                rules,
                settings,
                tuple(self.atom(v) for v in eqn.invars),
                tuple(self.aval(v.aval) for v in eqn.outvars),
            )
        )

    def jaxpr(
        self, invars: Sequence[Any], eqns: Sequence[JaxprEqn], outvars: Sequence[Any], numbers: Any = None
    ) -> int:
        """The number of a program without constants; ``numbers``: ``id`` of an equation → its number, of those that are
        known already."""
        place: dict[Any, int] = {v: i for i, v in enumerate(invars)}
        lines: list[Any] = []
        for eqn in eqns:
            operands = tuple(place[v] if isinstance(v, Var) else -1 for v in eqn.invars)
            for v in eqn.outvars:
                place[v] = len(place)
            token = numbers.get(id(eqn)) if numbers is not None else None
            lines.append((self.eqn(eqn) if token is None else token, operands))
        outs = tuple(place[v] if isinstance(v, Var) else self.atom(v) for v in outvars)
        return self.number(("program", tuple(self.aval(v.aval) for v in invars), tuple(lines), outs))

    def _param(self, value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return ("closed", self._body(value.jaxpr), tuple(map(self._value, value.consts)))
        if isinstance(value, Jaxpr):
            return ("jaxpr", self._body(value))
        if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
            return tuple(self._param(v) for v in value)
        if is_dataclass(value) and not isinstance(value, type):  # a kernel's grid, with jaxprs of its blocks
            return type(value), *(self._param(getattr(value, field.name)) for field in fields(value) if field.compare)
        if callable(value) and not isinstance(value, type):
            return ("callable", self._identity(value))
        try:
            hash(value)
        except TypeError:
            return repr(value)
        return type(value), value

    def _body(self, jaxpr: Jaxpr) -> int:
        return self.jaxpr([*jaxpr.constvars, *jaxpr.invars], jaxpr.eqns, jaxpr.outvars)

    def _identity(self, value: Any) -> int:
        self._kept.append(value)
        return id(value)

    def _rules_once(self, eqn: JaxprEqn) -> Any:
        """`_rules`, traced once for equations that come from one call of a function with rules, as those of a jitted
        block do wherever it is called. What inlining wraps anew differs in identity; the call's body does not, and
        neither do the trees of its results (`custom_vjp`)."""
        first: dict[Var, int] = {}
        operands = tuple(
            (first.setdefault(v, len(first)), self.atom(v)) if isinstance(v, Var) else (-1, self.atom(v))
            for v in eqn.invars
        )
        wrapped = ("fwd_jaxpr_thunk", "bwd") if "out_trees" in eqn.params else ()
        params = tuple((k, self._identity(v)) for k, v in eqn.params.items() if k not in wrapped)
        key = eqn.primitive, params, operands
        if key not in self._known_rules:
            self._known_rules[key] = self._rules(eqn)
        return self._known_rules[key]

    def _rules(self, eqn: JaxprEqn) -> Any:
        """The number of an equation's derivative. A rule of the user's that cannot be traced so (it asserts that some
        operand is not differentiated, or recurses too deep) is equal to no other: it is only not recognised again."""
        body = plain(eqn.params["call_jaxpr"].jaxpr, [v for v in eqn.invars if isinstance(v, Var)], eqn.outvars, [eqn])
        invars = list(dict.fromkeys(body.invars))
        run = jaxpr_as_fun(ClosedJaxpr(body.replace(invars=invars), []))
        wrt = [i for i, v in enumerate(invars) if _is_inexact(v.aval)]
        structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in invars]
        outs = [i for i, v in enumerate(eqn.outvars) if _is_inexact(v.aval)]

        def derivative(*operands: Any) -> Any:
            def chosen(*some: Any) -> Any:
                full = list(operands)
                for i, x in zip(wrt, some, strict=True):
                    full[i] = x
                results = run(*full)
                return [results[i] for i in outs]

            found, pullback = jax.vjp(chosen, *(operands[i] for i in wrt))
            return pullback([jax.numpy.ones_like(x) for x in found])

        try:
            closed = traced_apart(derivative, *structs)
        except TraceError as error:
            log.debug("%s is like no other: %s", eqn.primitive, error)
            return self._identity(eqn)
        self._inside_rule = True
        try:
            return self._body(dce(closed.jaxpr)), tuple(map(self._value, closed.consts))
        finally:
            self._inside_rule = False


def _is_inexact(aval: Any) -> bool:
    return jax.dtypes.issubdtype(aval.dtype, np.inexact)
