"""The value of an index that depends on no input: ``arange`` and what ``x[arange(batch), labels]`` makes of it.

A little evaluator in numpy (planning starts no JAX backend), for the operations that jax.numpy indexing emits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.frontend.algebra import evaluated
from autopar.jax_compat import JaxprEqn, Literal
from autopar.primitives import record_of

LIMIT_ELEMENTS = 1 << 24
"""Larger constants are not evaluated (guessed: a tenth of a second)."""


class Constants:
    """Evaluates constants of one body; ``producers``: variable → the equation that makes it."""

    def __init__(self, producers: dict[Any, JaxprEqn]) -> None:
        self.producers = producers
        self.known: dict[Any, np.ndarray | None] = {}

    def component(self, atom: Any, component: int | None) -> np.ndarray | None:
        """``atom``'s value, or with ``component`` that entry of its last dimension; None where that depends on an
        input, or is not evaluated (`value`)."""
        if component is None:
            return self.value(atom)
        eqn = None if isinstance(atom, Literal) else self.producers.get(atom)
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
        eqn = None if isinstance(atom, Literal) else self.producers.get(atom)
        if eqn is not None and eqn.primitive.name in ("broadcast_in_dim", "reshape", "squeeze", "copy"):
            return self.scalar(eqn.invars[0])
        if eqn is None or atom.aval.shape == ():
            value = self.value(atom)
            return None if value is None or value.shape else value.reshape(1)[0]
        scalars = [self.scalar(a) for a in eqn.invars] if record_of(eqn.primitive.name).traits.elementwise else []
        known = [x for x in scalars if x is not None]
        value = evaluated(eqn, known) if known and len(known) == len(scalars) else None
        return None if value is None or np.issubdtype(value.dtype, np.inexact) else value.reshape(1)[0]

    def is_line(self, atom: Any) -> bool:
        """True where ``atom``, of integers, is 0, 1, 2, …."""
        eqn = None if isinstance(atom, Literal) else self.producers.get(atom)
        if eqn is None or len(atom.aval.shape) != 1 or not np.issubdtype(atom.aval.dtype, np.integer):
            return False
        if atom.aval.size > np.iinfo(atom.aval.dtype).max:
            return False
        if eqn.primitive.name in ("convert_element_type", "copy"):
            return self.is_line(eqn.invars[0])
        return eqn.primitive.name == "iota"

    def value(self, atom: Any) -> np.ndarray | None:
        """``atom``'s value; None where it depends on an input, is too large (`LIMIT_ELEMENTS`), or NumPy would not give
        what the backend does."""
        if isinstance(atom, Literal):
            return np.asarray(atom.val)
        if atom not in self.known:
            self.known[atom] = None
            eqn = self.producers.get(atom)
            if eqn is not None and len(eqn.outvars) == 1 and atom.aval.size <= LIMIT_ELEMENTS:
                self.known[atom] = self._evaluate(eqn)
        return self.known[atom]

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
                expanded = [1] * len(shape)
                for d, size in zip(params["broadcast_dimensions"], operands[0].shape, strict=True):
                    expanded[d] = size
                return np.broadcast_to(operands[0].reshape(expanded), shape)
            case "reshape" | "squeeze":
                return operands[0].reshape(shape)
            case "transpose":
                return operands[0].transpose(params["permutation"])
            case "concatenate":
                return np.concatenate(operands, axis=params["dimension"])
            case _:
                traits = record_of(primitive).traits
                rounds = traits.casts or traits.expensive  # floats: as the backend does it
                exact = not rounds or not any(np.issubdtype(x.dtype, np.inexact) for x in operands)
                return evaluated(eqn, operands) if exact else None
