"""The value of an index that depends on no input: ``arange`` and what ``x[arange(batch), labels]`` makes of it.

A little evaluator in numpy (planning starts no JAX backend), for the operations that jax.numpy indexing emits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from autopar.frontend.algebra import evaluated
from autopar.jax_compat import Jaxpr, JaxprEqn, Literal
from autopar.primitives import record_of
from autopar.primitives.kinds import InOrder, Kind, Sorting
from autopar.primitives.row_numbers import RowNumbers, made_of

LIMIT_ELEMENTS = 1 << 24
"""Larger constants are not evaluated (guessed: a tenth of a second)."""


class Constants:
    """Evaluates constants of one body, ``jaxpr``; ``outside``: what the first of its inputs always are in the body
    ``outer`` around it; ``kinds``: those of its variables, as far as the analysis has come."""

    def __init__(self, jaxpr: Jaxpr, outside: Sequence[Any] = (), outer: Constants | None = None) -> None:
        self.producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.outside = dict(zip(jaxpr.invars, outside, strict=False))
        self.outer = outer
        self.known: dict[Any, np.ndarray | None] = {}
        self.numbered: dict[Any, RowNumbers | None] = {}
        self.kinds: dict[Any, Kind] = {}

    def kind(self, atom: Any) -> Kind | None:
        """What ``atom`` is where it is made; None of a literal, or of a body's own input."""
        atom, _, scope = self.origin(atom)
        return None if isinstance(atom, Literal) else scope.kinds.get(atom)

    def sorts(self) -> Iterator[Sorting]:
        """In whose order something is, in this body and those around it, the last first."""
        yield from dict.fromkeys(kind.sorting for kind in reversed(self.kinds.values()) if isinstance(kind, InOrder))
        if self.outer is not None:
            yield from self.outer.sorts()

    def origin(self, atom: Any) -> tuple[Any, JaxprEqn | None, Constants]:
        """``atom`` in the body that makes it, the equation that does, if one does, and that body's constants."""
        scope = self
        while not isinstance(atom, Literal) and atom not in scope.producers and scope.outer is not None:
            atom, scope = scope.outside.get(atom, atom), scope.outer
        return atom, None if isinstance(atom, Literal) else scope.producers.get(atom), scope

    def component(self, atom: Any, component: int | None) -> np.ndarray | None:
        """``atom``'s value, or with ``component`` that entry of its last dimension; None where that depends on an
        input, or is not evaluated (`value`)."""
        if component is None:
            return self.value(atom)
        atom, eqn, _ = self.origin(atom)
        rank = len(atom.aval.shape)
        if eqn is not None and eqn.primitive.name == "concatenate" and eqn.params["dimension"] == rank - 1:
            for piece in eqn.invars:
                size = piece.aval.shape[-1]
                if component < size:
                    return self.component(piece, component)
                component -= size
        if eqn is not None and eqn.primitive.name == "convert_element_type":
            return self.component(eqn.invars[0], component)
        whole = self.value(atom)
        return None if whole is None else whole[..., component]

    def scalar(self, atom: Any) -> np.generic | None:
        """The number that is everywhere in ``atom``, of any size; None where it is not one, or not known."""
        atom, eqn, _ = self.origin(atom)
        if eqn is not None and eqn.primitive.name in ("broadcast_in_dim", "reshape", "squeeze", "copy"):
            return self.scalar(eqn.invars[0])
        if eqn is None or atom.aval.shape == ():
            value = self.value(atom)
            return None if value is None or value.shape else value.reshape(1)[0]
        scalars = [self.scalar(a) for a in eqn.invars] if record_of(eqn.primitive.name).traits.elementwise else []
        known = [x for x in scalars if x is not None]
        value = evaluated(eqn, known) if known and len(known) == len(scalars) else None
        return None if value is None or np.issubdtype(value.dtype, np.inexact) else value.reshape(1)[0]

    def numbers(self, atom: Any, examples: int) -> RowNumbers | None:
        """What ``atom`` is of the numbers of rows, of any size, its first dimension that of ``examples``; None where it
        is made of something else."""
        atom, eqn, scope = self.origin(atom)
        if eqn is None or not atom.aval.shape or atom.aval.shape[0] % examples:
            return None
        if (atom, examples) not in scope.numbered:
            scope.numbered[atom, examples] = scope._numbers(eqn, examples)
        return scope.numbered[atom, examples]

    def _numbers(self, eqn: JaxprEqn, examples: int) -> RowNumbers | None:
        shape, dtype = eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype
        match eqn.primitive.name:
            case "iota" if len(shape) == 1 and np.issubdtype(dtype, np.integer) and shape[0] <= np.iinfo(dtype).max:
                return RowNumbers.own(shape[0], shape[0] // examples, dtype)
            case "reshape" | "squeeze" if _keeps_order(eqn):
                return self.numbers(eqn.invars[0], examples)
            case "broadcast_in_dim" if eqn.params["broadcast_dimensions"][:1] == (0,):
                found, rows = self.numbers(eqn.invars[0], examples), shape[0] // examples
                of, to = (rows, *_expanded(eqn)[1:]), (rows, *shape[1:])
                return found and found.each(lambda x: np.broadcast_to(x.reshape(of), to).reshape(-1))
            case name if record_of(name).traits.elementwise:
                operands = [self.numbers(a, examples) or self.scalar(a) for a in eqn.invars]
                known = [x for x in operands if x is not None]
                numbered = len(known) == len(operands) and any(isinstance(x, RowNumbers) for x in known)
                return made_of(name, known, lambda values: evaluated(eqn, values)) if numbered else None
            case _:
                return None

    def value(self, atom: Any) -> np.ndarray | None:
        """``atom``'s value; None where it depends on an input, is too large (`LIMIT_ELEMENTS`), or NumPy would not give
        what the backend does."""
        atom, eqn, scope = self.origin(atom)
        if isinstance(atom, Literal):
            return np.asarray(atom.val)
        if atom not in scope.known:
            scope.known[atom] = None
            if eqn is not None and len(eqn.outvars) == 1 and atom.aval.size <= LIMIT_ELEMENTS:
                scope.known[atom] = scope._evaluate(eqn)
        return scope.known[atom]

    def _evaluate(self, eqn: JaxprEqn) -> np.ndarray | None:
        primitive, params = eqn.primitive.name, eqn.params
        shape = eqn.outvars[0].aval.shape
        if primitive == "iota":
            size = shape[params["dimension"]]
            line = np.arange(size).reshape([-1] + [1] * (len(shape) - params["dimension"] - 1))
            return np.broadcast_to(line, shape)
        values = [self.value(a) for a in eqn.invars]
        operands = [x for x in values if x is not None]
        if len(operands) < len(values):
            return None
        match primitive:
            case "broadcast_in_dim":
                return np.broadcast_to(operands[0].reshape(_expanded(eqn)), shape)
            case "reshape" | "squeeze":
                return operands[0].reshape(shape) if _keeps_order(eqn) else None
            case "transpose":
                return operands[0].transpose(params["permutation"])
            case "concatenate":
                return np.concatenate(operands, axis=params["dimension"])
            case _:
                traits = record_of(primitive).traits
                rounds = traits.casts or traits.expensive  # floats: as the backend does it
                exact = not rounds or not any(np.issubdtype(x.dtype, np.inexact) for x in operands)
                return evaluated(eqn, operands) if exact else None


def _expanded(eqn: JaxprEqn) -> list[int]:
    """The shape of a ``broadcast_in_dim``'s operand, with a 1 where the result has a dimension more."""
    expanded = [1] * len(eqn.outvars[0].aval.shape)
    for d, size in zip(eqn.params["broadcast_dimensions"], eqn.invars[0].aval.shape, strict=True):
        expanded[d] = size
    return expanded


def _keeps_order(eqn: JaxprEqn) -> bool:
    """False of a reshape that reads dimensions in another order."""
    return eqn.primitive.name != "reshape" or eqn.params["dimensions"] is None
