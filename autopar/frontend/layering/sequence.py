"""The forward's equations → the sequence that is cut into layers, and what is no layer's own.

Three kinds of equation are taken out of the sequence:

- *light* ones compute from arguments and literals alone, and cheaply (casts of parameters, masks, slices of a table):
  every layer that needs their results computes them itself, so that no weights cross from stage to stage;
- *early* ones make something small of what neither is trained nor carries the batch, or of no arguments at all where
  keys are concerned (the dropout key of each layer): they run once a step, before the layers, so that layers which
  differ in such a number only are equal;
- what depends on parameters alone but is not cheap is put before its first user.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar.cost.roofline import flops
from autopar.frontend.layering.inputs import FROM_INDEX, FROM_ROW, Input
from autopar.frontend.microbatch.inline import bodies
from autopar.frontend.to_graph import node_of
from autopar.jax_compat import Jaxpr, JaxprEqn, Var
from autopar.primitives import record_of

EARLY_BYTES = 256
"""Largest result of an early equation (a key has 16 bytes; guessed)."""


@dataclass(frozen=True, kw_only=True)
class Ordered:
    """``eqns``, in order, are cut; ``light`` maps variables to the light equations that make them; ``early`` are
    equations over ``before``'s inputs of the forward, in order, and ``early_results`` those that layers read.
    ``needs`` are variables of which cotangents are taken, inputs among them."""

    eqns: tuple[JaxprEqn, ...]
    light: dict[Var, JaxprEqn]
    early: tuple[JaxprEqn, ...]
    early_results: tuple[Var, ...]
    needs: frozenset[Var]


def order(forward: Jaxpr, inputs: Sequence[Input], numbering: frozenset[int] = frozenset()) -> Ordered:
    """Sorts the forward's equations into those three and the rest. Small results of the equations ``numbering`` (by
    id) are early even where they are made of literals alone."""
    source = dict(zip(forward.invars, inputs, strict=True))
    needs = _needs(forward, source)
    elsewhere = (FROM_INDEX, FROM_ROW)  # not there before the layers
    fixed = {v for v, s in source.items() if s.source not in elsewhere and s.rows is None and not s.trained}
    early = _early(forward, fixed, numbering)
    early_made = {v for eqn in early for v in eqn.outvars}
    light: dict[Var, JaxprEqn] = {}
    ready = set(forward.invars) | early_made
    without_batch = {v for v, s in source.items() if s.source != FROM_INDEX and s.rows is None}
    without_batch |= early_made
    is_early = {id(eqn) for eqn in early}
    rest: list[JaxprEqn] = []
    free: list[bool] = []
    for eqn in forward.eqns:
        if id(eqn) in is_early:
            continue
        operands = [v for v in eqn.invars if isinstance(v, Var)]
        if all(v in without_batch for v in operands):
            without_batch.update(eqn.outvars)
        if is_cheap(eqn) and all(v in ready or v in light for v in operands):
            light.update(dict.fromkeys(eqn.outvars, eqn))
            continue
        rest.append(eqn)
        free.append(all(v in without_batch for v in operands))
    eqns = _next_to_users(rest, free)
    read = {v for eqn in (*eqns, *light.values()) for v in eqn.invars if isinstance(v, Var)}
    results = tuple(v for eqn in early for v in eqn.outvars if v in read)
    return Ordered(eqns=eqns, light=light, early=tuple(early), early_results=results, needs=frozenset(needs))


def is_cheap(eqn: JaxprEqn) -> bool:
    """True for equations that may be computed again wherever their results are needed."""
    return record_of(eqn.primitive.name).light and not eqn.effects and not bodies(eqn)


def is_float(var: Any) -> bool:
    """True for what may have a cotangent."""
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, np.inexact)


def _needs(forward: Jaxpr, source: dict[Var, Input]) -> set[Var]:
    needs = {v for v, s in source.items() if s.trained}
    for eqn in forward.eqns:
        if record_of(eqn.primitive.name).tangent and any(isinstance(v, Var) and v in needs for v in eqn.invars):
            needs.update(v for v in eqn.outvars if is_float(v))
    return needs


def _early(forward: Jaxpr, fixed: set[Var], numbering: frozenset[int]) -> list[JaxprEqn]:
    """Equations whose results are small and depend on ``fixed`` inputs, or make keys; and what those need. What makes
    a result of the forward is left to the layers, and so is what needs that."""
    outs = {v for v in forward.outvars if isinstance(v, Var)}
    kinds: dict[Var, str] = dict.fromkeys(fixed, "fixed")
    maker: dict[Var, JaxprEqn] = {}
    wanted: list[JaxprEqn] = []
    for eqn in forward.eqns:
        operands = [kinds.get(v, "other") for v in eqn.invars if isinstance(v, Var)]
        small = all(_bytes(v) <= EARLY_BYTES for v in eqn.outvars)
        if "other" in operands or not small or eqn.effects or not outs.isdisjoint(eqn.outvars):
            continue
        keyed = any(_is_key(v) for v in (*eqn.invars, *eqn.outvars)) or "keyed" in operands
        kind = "keyed" if keyed else "fixed" if "fixed" in operands else "constant"
        for v in eqn.outvars:
            kinds[v], maker[v] = kind, eqn
        if kind != "constant" or id(eqn) in numbering:
            wanted.append(eqn)
    chosen: dict[int, JaxprEqn] = {}
    for eqn in reversed(wanted):
        todo = [eqn]
        while todo:
            e = todo.pop()
            if id(e) not in chosen:
                chosen[id(e)] = e
                todo += [maker[v] for v in e.invars if isinstance(v, Var) and v in maker]
    return [eqn for eqn in forward.eqns if id(eqn) in chosen]


def _is_key(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def _next_to_users(eqns: list[JaxprEqn], free: list[bool]) -> tuple[JaxprEqn, ...]:
    """``eqns`` with those that are ``free`` of the batch moved in front of their first user."""
    if not any(free):
        return tuple(eqns)
    at: dict[Var, int] = {}
    position = list(range(len(eqns)))
    for i in range(len(eqns) - 1, -1, -1):
        if free[i]:
            position[i] = min((at[v] for v in eqns[i].outvars if v in at), default=len(eqns))
        for v in eqns[i].invars:
            if isinstance(v, Var):
                at[v] = min(at.get(v, len(eqns)), position[i])
    return tuple(eqns[i] for i in sorted(range(len(eqns)), key=lambda i: (position[i], not free[i], i)))


# --- work and size ---------------------------------------------------------------------------------------------


def _bytes(var: Any) -> int:
    return nbytes(var.aval)


def nbytes(aval: Any) -> int:
    """Bytes of an abstract value; 16 an element for dtypes without an item size (keys), 0 for tokens."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return 0
    return math.prod(aval.shape) * getattr(dtype, "itemsize", 16)


def work(eqn: JaxprEqn) -> float:
    """FLOPs of an equation, well enough to balance layers: elementwise operators one an element, of a cond the dearest
    branch, of a while one turn."""
    if record_of(eqn.primitive.name).traits.contraction:
        return flops(node_of(eqn))
    inner = bodies(eqn)
    if inner:
        runs = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        return float(runs * max(sum(work(e) for e in body.eqns) for body in inner))
    return float(sum(math.prod(v.aval.shape) for v in eqn.outvars if hasattr(v.aval, "shape")))
