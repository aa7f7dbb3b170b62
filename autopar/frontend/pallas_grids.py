"""A Pallas kernel → the axes of its grid that can be split over devices: rules of kernels that nobody wrote one for.

A kernel runs once for each point of a grid, on blocks of its operands that index maps choose. Splitting axis a, of n
programs, over devices gives each of them n / d programs and the matching slices; the results are the same if

1. every block index is independent of the program's number p on axis a, or is p // c: then the array's dimension is
   n / c blocks, and is split too. Of an operand or result at most one dimension follows the axis;
2. every result that is used follows it: what does not would be summed up, or written by all programs;
3. the body does not depend on p, but for what is the same in every device's part (p % g, where parts are
   multiples of g programs): no use of `program_id` or `num_programs` on this axis escapes, into an index, a branch
   or a mask (causal attention uses the number of its query block, so it is split over batch and heads alone);
4. the body draws no random numbers, whose state goes from program to program.

p is followed by value: an integer that is a function of p alone is held as the array of its values for p = 0 … n - 1,
evaluated by NumPy; where it meets anything else it escapes, and then its values must repeat with a period that parts
are multiples of. Scratch memory that is carried from one program to the next of the axis would have to be initialised
by the first, which asks for p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from autopar.frontend.algebra import evaluated
from autopar.jax_compat import Jaxpr, JaxprEqn, Literal, Var, bodies_of

_RANDOM = frozenset({"prng_seed", "prng_random_bits", "prng_set_seed"})
CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"})
"""Calls in kernels, followed into."""

Known: TypeAlias = "np.ndarray | None"
"""Values for each p, or one for all (rank 0); None for what does not depend on p."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridAxis:
    """An axis of a kernel's grid that can be cut into up to ``parts`` equal parts. ``operands`` and ``results`` are
    (position, dimension) of what is cut with it."""

    axis: int
    parts: int
    operands: tuple[tuple[int, int], ...]
    results: tuple[tuple[int, int], ...]


class _WholeError(Exception):
    """The axis cannot be split."""


def split_axes(eqn: JaxprEqn, used: Sequence[bool]) -> tuple[GridAxis, ...]:
    """The axes of a ``pallas_call`` that can be split.

    Args:
        used: which of its results anything reads.
    """
    found: list[GridAxis] = []
    for axis, size in enumerate(eqn.params["grid_mapping"].grid):
        if isinstance(size, int) and size > 1:  # of others the size is a value
            try:
                found.append(_split(eqn, axis, used))
            except _WholeError:
                continue
    return tuple(a for a in found if a.parts > 1)


def _split(eqn: JaxprEqn, axis: int, used: Sequence[bool]) -> GridAxis:
    mapping = eqn.params["grid_mapping"]
    size, known = mapping.grid[axis], [d for d in range(len(mapping.grid)) if d not in mapping.vmapped_dims]
    follow = _Follow(size=size, axis=known.index(axis) if axis in known else -1)
    places = [_cut_dim(follow, block, axis) for block in mapping.block_mappings]
    body = _jaxpr(eqn.params["jaxpr"])
    follow.run(body, [None] * len(body.invars))
    first = len(eqn.invars) - mapping.num_inputs
    operands = tuple((first + i, d) for i, d in enumerate(places[: mapping.num_inputs]) if d is not None)
    results = tuple((i, d) for i, d in enumerate(places[mapping.num_inputs :]) if d is not None)
    if any(is_used and places[mapping.num_inputs + i] is None for i, is_used in enumerate(used)):
        raise _WholeError
    return GridAxis(axis=axis, parts=size // follow.unit, operands=operands, results=results)


def _cut_dim(follow: _Follow, block: Any, axis: int) -> int | None:
    """The dimension of an array that is cut with the grid's axis; None: the array stays whole."""
    jaxpr = _jaxpr(block.index_map_jaxpr)
    given: list[Known] = [None] * len(jaxpr.invars)
    given[axis] = np.arange(follow.size)
    found: list[int] = []
    for d, index in enumerate(follow.run(jaxpr, given)):
        repeats = _repeats(index)
        if not repeats:
            follow.escapes(index)
            continue
        rows = _rows(block.block_shape[d]) if len(block.block_shape) > d else None
        if rows is None or block.array_aval.shape[d] != rows * (follow.size // repeats):
            raise _WholeError
        follow.unit = math.lcm(follow.unit, repeats)
        found.append(d)
    if len(found) > 1:
        raise _WholeError
    return found[0] if found else None


def _rows(length: Any) -> int | None:
    """Rows of a block along a dimension whose index counts blocks; None where it counts anything else."""
    kind = type(length).__name__
    return 1 if kind == "Squeezed" else length.block_size if kind == "Blocked" else None


def _repeats(x: Known) -> int:
    """c where ``x`` is p // c for c of at least 1 and not 0 everywhere; else 0."""
    if x is None or not x.ndim or x[-1] == x[0]:
        return 0
    c = int(np.argmax(x != x[0]))
    return c if len(x) % c == 0 and np.array_equal(x, np.arange(len(x)) // c) else 0


def _jaxpr(body: Any) -> Jaxpr:
    return getattr(body, "jaxpr", body)


@dataclass(slots=True, kw_only=True)
class _Follow:
    """Follows the number of a program, of ``size``, through jaxprs. ``axis`` is what `program_id` calls it there (-1:
    an axis that vmap added, which bodies do not know). ``unit``: parts are multiples of so many programs."""

    size: int
    axis: int
    unit: int = 1
    """A divisor of ``size``."""

    def escapes(self, *values: Known) -> None:
        """What depends on p and is used where it cannot be followed: it has to repeat in every part."""
        for x in values:
            if x is not None and x.ndim:
                period = _period(x)
                if period == self.size:
                    raise _WholeError
                self.unit = math.lcm(self.unit, period)

    def run(self, jaxpr: Jaxpr, given: Sequence[Known]) -> list[Known]:
        """Results of a body."""
        env: dict[Var, Known] = dict(zip(jaxpr.invars, given, strict=True))
        env.update(dict.fromkeys(jaxpr.constvars))

        def read(atom: Any) -> Known:
            if isinstance(atom, Literal):
                return np.asarray(atom.val) if np.ndim(atom.val) == 0 and hasattr(atom.aval, "dtype") else None
            return env[atom]

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self.equation(eqn, [read(a) for a in eqn.invars]), strict=True))
        return [read(a) for a in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, operands: list[Known]) -> list[Known]:
        """Results of an equation."""
        name = eqn.primitive.name
        unknown: list[Known] = [None] * len(eqn.outvars)
        if name in _RANDOM:
            raise _WholeError
        if name == "program_id":
            return [np.arange(self.size) if eqn.params["axis"] == self.axis else None]
        if name == "num_programs" and eqn.params["axis"] == self.axis:
            raise _WholeError
        inner = bodies_of(eqn)
        if name in CALLS and len(inner) == 1:
            return self.run(inner[0], operands)
        known = [x for x in operands if x is not None]
        if len(known) == len(operands):
            value = evaluated(eqn, np.broadcast_arrays(*known) if known else [])
            if value is not None:
                return [value]
        if name == "cond":
            self.escapes(operands[0])
            for body in inner:
                self.escapes(*self.run(body, operands[1:]))
            return unknown
        self.escapes(*operands)
        for body in inner:
            self.escapes(*self.run(body, [None] * len(body.invars)))
        return unknown


def _period(x: np.ndarray) -> int:
    """The least divisor d of the length for which x[p + d] = x[p]."""
    n = len(x)
    return next(d for d in range(1, n + 1) if n % d == 0 and np.array_equal(x[d:], x[: n - d]))
