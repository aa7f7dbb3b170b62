"""A scan over layers in the forward → its turns one after another, each reading its rows of the stacked arguments.

A scan is a scan over layers if what it goes through includes stacked arguments that are trained (of a step that
only infers: any of rank above 1). Its turns become the
body's equations, in the order in which they run; rows of a stacked argument (or of what is elementwise made of it, a
cast) become values of their own, `ir.layers.Slice`. What else it goes through is sliced by equations. A scan stays
whole where a stacked argument is also read in another way: its gradient would be rows and a whole at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.frontend.layering.inputs import FROM_ARGUMENT, Input
from autopar.frontend.layering.sequence import work
from autopar.frontend.layering.surgery import Env, plain, renamed, replaced, without_constants
from autopar.frontend.microbatch.inline import flatten
from autopar.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, scan_counts, within_call
from autopar.primitives import record_of


@dataclass(frozen=True, kw_only=True)
class Row:
    """Variable ``var`` is row ``at`` of input ``of`` of the forward, its leading dimension of size 1 kept."""

    var: Var
    of: Var
    at: int


@dataclass(frozen=True, kw_only=True)
class Unrolled:
    """The forward without scans over layers. ``rows`` are inputs of it; ``numbering`` are equations whose results only
    say which turn it is (they are not part of what turns have in common)."""

    forward: Jaxpr
    rows: tuple[Row, ...]
    numbering: frozenset[int]
    eqns: tuple[JaxprEqn, ...] = ()
    """Keeps ``numbering``'s ids."""


def opened(forward: Jaxpr) -> Jaxpr:
    """``forward`` with a rematerialised body inlined that holds most of the work: a `jax.checkpoint` around the whole
    loss would leave nothing to cut, and what a layer keeps is for planning to choose."""
    while True:
        amounts = [work(e) for e in forward.eqns]
        most = max(range(len(amounts)), key=amounts.__getitem__, default=-1)
        if most < 0 or amounts[most] <= 0.5 * sum(amounts):
            return forward
        eqn = forward.eqns[most]
        if eqn.primitive.name not in ("remat2", "checkpoint") or len(eqn.params["jaxpr"].eqns) < 2:
            return forward
        body = without_constants(*flatten(eqn.params["jaxpr"], [], markers=True))
        env: Env = dict(zip(body.invars, eqn.invars, strict=True))
        inner = [within_call(e, eqn) for e in renamed(body.eqns, env)]
        outs = {v: env.get(a, a) if isinstance(a, Var) else a for v, a in zip(eqn.outvars, body.outvars, strict=True)}
        eqns = [*forward.eqns[:most], *inner, *(replaced(e, outs) for e in forward.eqns[most + 1 :])]
        results = [outs.get(v, v) if isinstance(v, Var) else v for v in forward.outvars]
        forward = plain(forward, forward.invars, results, eqns)


def unroll(forward: Jaxpr, inputs: Sequence[Input]) -> Unrolled:
    """``forward`` with its scans over layers replaced by their turns; ``inputs``: where its inputs come from, in
    order."""
    source = dict(zip(forward.invars, inputs, strict=True))
    infers = not any(s.trained for s in inputs)
    makers = {v: e for e in forward.eqns for v in e.outvars}
    uses = _uses(forward)
    chosen: dict[int, dict[int, list[Var]]] = {}
    for i, eqn in enumerate(forward.eqns):
        if eqn.primitive.name != "scan" or eqn.effects:
            continue
        consts, carry = scan_counts(eqn)
        roots = {
            k: found
            for k, atom in enumerate(eqn.invars[consts + carry :])
            if (found := _stacked(atom, eqn.params["length"], source, makers)) is not None
        }
        if any(source[v].trained or (infers and v.aval.ndim > 1) for found in roots.values() for v in found):
            chosen[i] = roots
    chosen = {i: roots for i, roots in chosen.items() if _read_by_rows_only(forward, chosen, roots, uses)}
    if not chosen:
        return Unrolled(forward=forward, rows=(), numbering=frozenset())
    return _Unroller(forward, chosen, makers).run()


def _uses(forward: Jaxpr) -> dict[Any, list[tuple[int, int]]]:
    """Variable → (equation, operand) that read it; the results count as an equation after the last."""
    uses: dict[Any, list[tuple[int, int]]] = {}
    for i, eqn in enumerate(forward.eqns):
        for k, v in enumerate(eqn.invars):
            if isinstance(v, Var):
                uses.setdefault(v, []).append((i, k))
    for k, v in enumerate(forward.outvars):
        if isinstance(v, Var):
            uses.setdefault(v, []).append((len(forward.eqns), k))
    return uses


def _row_by_row(eqn: JaxprEqn) -> bool:
    """True where a row of the result is made of that row of the operands. (A sharding is that of all rows.)"""
    traits = record_of(eqn.primitive.name).traits
    return traits.elementwise and not traits.placement


def _stacked(atom: Any, length: int, source: dict[Any, Input], makers: dict[Any, JaxprEqn]) -> list[Var] | None:
    """The arguments of which ``atom`` is made row by row, or None where it is not."""
    if not isinstance(atom, Var) or not atom.aval.shape or atom.aval.shape[0] != length:
        return None
    if atom in source:
        found = source[atom]
        return [atom] if found.source == FROM_ARGUMENT and found.rows is None else None
    eqn = makers[atom]
    if not _row_by_row(eqn):
        return None
    out: list[Var] = []
    for operand in eqn.invars:
        if isinstance(operand, Literal) and not operand.aval.shape:
            continue
        found = _stacked(operand, length, source, makers)
        if found is None or operand.aval.shape != atom.aval.shape:
            return None
        out += found
    return out


def _read_by_rows_only(
    forward: Jaxpr,
    chosen: dict[int, dict[int, list[Var]]],
    roots: dict[int, list[Var]],
    uses: dict[Any, list[tuple[int, int]]],
) -> bool:
    """True if the stacked arguments of a scan are read by scans over layers alone."""

    def fine(v: Var) -> bool:
        for i, k in uses.get(v, ()):
            if i == len(forward.eqns):
                return False
            eqn = forward.eqns[i]
            if i in chosen:
                consts, carry = scan_counts(eqn)
                if k - consts - carry in chosen[i]:
                    continue
                return False
            if not _row_by_row(eqn) or not all(fine(r) for r in eqn.outvars):
                return False
        return True

    return all(fine(v) for found in roots.values() for v in found)


class _Unroller:
    def __init__(self, forward: Jaxpr, chosen: dict[int, Any], makers: dict[Any, JaxprEqn]) -> None:
        self.forward = forward
        self.chosen = chosen
        self.makers = makers
        self.rows: dict[tuple[Var, int], Row] = {}
        self.numbering: list[JaxprEqn] = []
        self.eqns: list[JaxprEqn] = []
        self.row_of: dict[tuple[Var, int], Any] = {}
        self.moves: dict[Any, ClosedJaxpr] = {}

    def run(self) -> Unrolled:
        env: Env = {}
        for i, eqn in enumerate(self.forward.eqns):
            if i in self.chosen:
                env.update(self._turns(replaced(eqn, env), self.chosen[i]))
            else:
                self.eqns.append(replaced(eqn, env))
        outs = [env.get(v, v) if isinstance(v, Var) else v for v in self.forward.outvars]
        invars = [*self.forward.invars, *(r.var for r in self.rows.values())]
        return Unrolled(
            forward=plain(self.forward, invars, outs, self.eqns),
            rows=tuple(self.rows.values()),
            numbering=frozenset(map(id, self.numbering)),
            eqns=tuple(self.numbering),
        )

    def _turns(self, eqn: JaxprEqn, roots: dict[int, list[Var]]) -> dict[Var, Any]:
        """Adds the turns of a scan; returns what its results are."""
        consts, num_carry = scan_counts(eqn)
        closed, length = eqn.params["jaxpr"], eqn.params["length"]
        body = without_constants(*flatten(closed.jaxpr, list(closed.consts), markers=True))
        body = body.replace(eqns=[within_call(e, eqn) for e in body.eqns])
        fixed, xs = list(eqn.invars[:consts]), eqn.invars[consts + num_carry :]
        carry = list(eqn.invars[consts : consts + num_carry])
        stacked: list[list[Any]] = [[None] * length for _ in eqn.outvars[num_carry:]]
        turns = range(length)
        read = {v for e in body.eqns for v in e.invars if isinstance(v, Var)} | {
            v for v in body.outvars if isinstance(v, Var)
        }
        for t in reversed(turns) if eqn.params["reverse"] else turns:
            given = [
                self._element(eqn, x, t, k in roots) if body.invars[consts + num_carry + k] in read else x
                for k, x in enumerate(xs)
            ]
            env: Env = dict(zip(body.invars, [*fixed, *carry, *given], strict=True))
            self.eqns += renamed(body.eqns, env)
            outs = [env.get(v, v) if isinstance(v, Var) else v for v in body.outvars]
            carry = outs[:num_carry]
            for kept, y in zip(stacked, outs[num_carry:], strict=True):
                kept[t] = y
        found: dict[Var, Any] = dict(zip(eqn.outvars[:num_carry], carry, strict=True))
        used = _uses(self.forward)
        for v, ys in zip(eqn.outvars[num_carry:], stacked, strict=True):
            if v in used:
                found[v] = self._add(eqn, lambda *parts: jnp.stack(parts), ys)
        return found

    def _element(self, eqn: JaxprEqn, x: Any, t: int, by_rows: bool) -> Any:
        """Row ``t`` of what the scan goes through, without its leading dimension."""
        if by_rows:
            row = self._row(x, t)
        else:
            before = len(self.eqns)
            row = self._add(eqn, lambda a: lax.slice_in_dim(a, t, t + 1), [x], key=("slice", t))
            self.numbering += self.eqns[before:]
        return self._add(eqn, lambda a: lax.squeeze(a, (0,)), [row], key="squeeze")

    def _row(self, v: Var, t: int) -> Any:
        if v not in self.makers:
            if (v, t) not in self.rows:
                aval = v.aval
                self.rows[v, t] = Row(var=Var(aval.update(shape=(1, *aval.shape[1:]))), of=v, at=t)
            return self.rows[v, t].var
        if (v, t) not in self.row_of:
            eqn = self.makers[v]
            operands = [a if isinstance(a, Literal) else self._row(a, t) for a in eqn.invars]
            out = Var(v.aval.update(shape=(1, *v.aval.shape[1:])))
            self.eqns.append(eqn.replace(invars=operands, outvars=[out]))
            self.row_of[v, t] = out
        return self.row_of[v, t]

    def _add(self, like: JaxprEqn, fun: Callable[..., Any], operands: Sequence[Any], key: Any = None) -> Any:
        """Adds ``fun`` on ``operands``, at the source line of ``like``; returns its result."""
        types = tuple((a.aval.shape, a.aval.dtype) for a in operands)
        closed = self.moves.get((key, types)) if key is not None else None
        if closed is None:
            closed = jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(*t) for t in types))
            self.moves[key, types] = closed
        jaxpr = without_constants(*flatten(closed.jaxpr, list(closed.consts), markers=True))
        env: Env = dict(zip(jaxpr.invars, operands, strict=True))
        for made in renamed(jaxpr.eqns, env):
            self.eqns.append(made.replace(source_info=like.source_info))
        (out,) = (env.get(v, v) if isinstance(v, Var) else v for v in jaxpr.outvars)
        return out
