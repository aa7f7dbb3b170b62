"""How many FLOPs a Pallas kernel does, over all programs of its grid: what its loops and branches do goes by the number
of the program (causal attention passes over the blocks above the diagonal).

The body is followed once for all programs together: an integer that is a function of their numbers is the array of its
values. Of a branch that depends on anything else, a block of a mask, say, the dearest is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.frontend.algebra import evaluated
from autopar.frontend.pallas_grids import CALLS, Known
from autopar.jax_compat import Jaxpr, JaxprEqn, Literal, Var, bodies_of

PROGRAMS = 4096
"""Of a larger grid so many programs, drawn evenly, stand for all."""


class _UnknownError(Exception):
    """A loop runs as often as a value says."""


def kernel_flops(eqn: JaxprEqn, flops: Callable[[JaxprEqn], float]) -> float | None:
    """FLOPs of a ``pallas_call``; None where a loop of it runs as often as a value says, or its grid is a value.

    Args:
        flops: those of an equation without bodies.
    """
    mapping = eqn.params["grid_mapping"]
    if not all(isinstance(n, int) for n in mapping.grid):
        return None
    count = math.prod(mapping.grid)
    programs = np.arange(count) if count <= PROGRAMS else np.linspace(0, count - 1, PROGRAMS).round().astype(int)
    numbers = np.unravel_index(programs, mapping.grid) if mapping.grid else ()
    seen = [d for d in range(len(mapping.grid)) if d not in mapping.vmapped_dims]
    work = _Work(
        numbers=[numbers[d].astype(np.int32) for d in seen],
        sizes=[mapping.grid[d] for d in seen],
        weight=np.full(len(programs), count / max(1, len(programs))),
        flops=flops,
    )
    body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
    try:
        return work.run(body, [None] * len(body.invars))[0]
    except _UnknownError:
        return None


@dataclass(frozen=True, kw_only=True)
class _Work:
    """Counts what programs do. ``numbers`` and ``sizes``: of each axis of the grid; ``weight``: how often the body that
    is counted runs, by program."""

    numbers: list[np.ndarray]
    sizes: list[int]
    weight: np.ndarray
    flops: Callable[[JaxprEqn], float]

    def run(self, jaxpr: Jaxpr, given: Sequence[Known]) -> tuple[float, list[Known]]:
        """FLOPs of a body, and its results."""
        env: dict[Var, Known] = dict(zip(jaxpr.invars, given, strict=True))
        env.update(dict.fromkeys(jaxpr.constvars))
        total = 0.0
        for eqn in jaxpr.eqns:
            done, results = self.equation(eqn, [_read(a, env) for a in eqn.invars])
            total += done
            env.update(zip(eqn.outvars, results, strict=True))
        return total, [_read(a, env) for a in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, operands: list[Known]) -> tuple[float, list[Known]]:
        """FLOPs of an equation, and its results."""
        name = eqn.primitive.name
        unknown: list[Known] = [None] * len(eqn.outvars)
        if name == "program_id":
            return 0.0, [self.numbers[eqn.params["axis"]]]
        if name == "num_programs":
            return 0.0, [np.asarray(self.sizes[eqn.params["axis"]], np.int32)]
        inner = bodies_of(eqn)
        if name in CALLS and len(inner) == 1:
            return self.run(inner[0], operands)
        if name == "cond":
            return self._branches(operands[0], inner, operands[1:]), unknown
        if name == "scan":
            blank = [None] * len(inner[0].invars)
            return eqn.params["length"] * self.run(inner[0], blank)[0], unknown
        if name == "while":
            return self._loop(eqn, operands), unknown
        if inner:
            return sum(self.run(body, [None] * len(body.invars))[0] for body in inner), unknown
        known = [x for x in operands if x is not None]
        if operands and len(known) == len(operands):
            value = evaluated(eqn, np.broadcast_arrays(*known))
            if value is not None:
                return 0.0, [value]  # of scalars, that say where and how often
        return self.flops(eqn) * float(self.weight.sum()), unknown

    def _branches(self, index: Known, branches: Sequence[Jaxpr], operands: list[Known]) -> float:
        if index is None:
            return max(self.run(branch, operands)[0] for branch in branches)
        taken = np.clip(index.astype(int), 0, len(branches) - 1)
        parts = (replace(self, weight=self.weight * (taken == i)) for i in range(len(branches)))
        return sum(part.run(branch, operands)[0] for part, branch in zip(parts, branches, strict=True))

    def _loop(self, eqn: JaxprEqn, operands: list[Known]) -> float:
        """A counter that goes by equal steps to a bound, as `jax.lax.fori_loop` writes it."""
        first, second = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        test, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
        consts, carry = operands[first:second], operands[second:]
        fixed = [b is a for a, b in zip(body.invars[second - first :], body.outvars, strict=True)]
        known = dict(zip(test.invars, [*operands[:first], *carry], strict=True))
        turned = dict(
            zip(test.invars[first:], zip(body.invars[second - first :], body.outvars, strict=True), strict=True)
        )
        if len(test.eqns) != 1 or test.eqns[0].primitive.name != "lt" or test.outvars[0] is not test.eqns[0].outvars[0]:
            raise _UnknownError
        counter, bound = test.eqns[0].invars
        start, end = _read(counter, known), _read(bound, known)
        steps = [e for e in body.eqns if counter in turned and turned[counter][1] in e.outvars]
        if start is None or end is None or not steps or steps[0].primitive.name != "add":
            raise _UnknownError
        if bound in turned and turned[bound][0] is not turned[bound][1]:
            raise _UnknownError
        step = _read(steps[0].invars[1], {}) if steps[0].invars[0] is turned[counter][0] else None
        if step is None or not step > 0:
            raise _UnknownError
        turns = np.maximum(0, -(-(end.astype(int) - start) // int(step)))
        held = [x if same else None for x, same in zip(carry, fixed, strict=True)]
        return replace(self, weight=self.weight * turns).run(body, [*consts, *held])[0]


def _read(atom: Any, env: dict[Var, Known]) -> Known:
    if isinstance(atom, Literal):
        return np.asarray(atom.val) if np.ndim(atom.val) == 0 and hasattr(atom.aval, "dtype") else None
    return env.get(atom)
