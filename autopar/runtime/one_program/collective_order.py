"""Collectives of a step, one after the other on every device: what XLA's CPU client needs and does not see to.

Its devices are threads of one process that meet under the number of a collective, and JAX gives all the same. A loop
and a collective outside it that do not depend on each other run at the same time, on some devices in one order and on
others in the other; XLA then aborts the process (``Id can't be larger than the number of participating threads``). So a
loop is made to depend on the collectives before it, and those after it on the loop: by numbers that are zero, which
the compiler cannot know. Elsewhere collectives are queued in program order, and nothing of this is emitted but what
blocks that are computed again wait for on GPUs (`Order.after`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

NO_DEVICE = 20
"""Bits of a device's index along a mesh axis: shifted by so many, it is zero (axes have fewer than 2^20 devices)."""

OTHER = 3
"""What takes the place of a value if the zero is none: not a value that loops start with, or the choice would fold."""


def unknown_zero(axis: str) -> Any:
    """int32[], zero on every device along the mesh axis ``axis``, which the compiler cannot know."""
    return lax.shift_right_logical(lax.axis_index(axis), np.int32(NO_DEVICE))


class Order:
    """The order of collectives in one body. ``axis`` is a mesh axis to make the zero of, None to do nothing. Without
    ``in_turn`` collectives and loops do not wait for each other, only blocks that are computed again (`after`)."""

    @classmethod
    def on(cls, platform: str, axis: str | None) -> Order:
        """That of a platform. XLA's compiler for GPUs drops optimisation barriers before it schedules, and would begin
        blocks that are computed again as early as what they read is there."""
        return cls(axis if platform in ("cpu", "gpu") else None, in_turn=platform == "cpu")

    def __init__(self, axis: str | None, *, in_turn: bool = True) -> None:
        self.axis = axis
        self.in_turn = in_turn and axis is not None
        self.seen: list[Any] = []
        """Results of the collectives since the last loop."""
        self.gate: Any = None
        """A zero that is known once the last loop is done."""

    def body(self) -> Order:
        """The order inside a loop of this body."""
        return Order(self.axis, in_turn=self.in_turn)

    def inline(self) -> Order:
        """The order inside a body without loops, which runs as part of this one."""
        inside = Order(self.axis, in_turn=self.in_turn)
        inside.gate = self.gate
        return inside

    def ran(self, inside: Order, results: Sequence[Any]) -> None:
        """Notes the results of a body without loops."""
        if inside.seen:
            for small in _smallest(results):
                self.communicated(results[small])

    def after_loop(self, x: Any) -> Any:
        """``x``, not before the last loop is done."""
        return x if self.gate is None else _held(x, self.gate)

    def after(self, operands: Sequence[Any], held: Sequence[int], earlier: Sequence[Any], inside: Order) -> list[Any]:
        """``operands``, those at the positions ``held`` not before all of ``earlier`` is there; nor the collectives of
        ``inside``, which would else be merged with those of what is computed again."""
        operands = list(operands)
        zeros = [self._zero(x) for x in earlier if self.axis is not None and _can_hold(x)]
        if zeros:
            zero = functools.reduce(lax.bitwise_or, zeros)
            for i in held:
                operands[i] = _held(operands[i], zero) if _can_hold(operands[i]) else operands[i]
            inside.gate = zero if inside.gate is None else lax.bitwise_or(inside.gate, zero)
        return operands

    def communicated(self, result: Any) -> None:
        """Notes a result of a collective."""
        if self.in_turn and _can_hold(result):
            self.seen.append(result)

    def enter(self, operands: Sequence[Any], *, apart: bool = False) -> list[Any]:
        """The operands of a loop, one of them not before all collectives so far are done; all of them where the loop is
        ``apart``, somewhere in what reads them, and reads nobody knows which."""
        operands = list(operands)
        held = _numbers(operands) if apart else _smallest(operands)
        if held and (self.seen or self.gate is not None):
            zeros = [*map(self._zero, self.seen), *([] if self.gate is None else [self.gate])]
            zero = functools.reduce(lax.bitwise_or, zeros)
            for i in held:
                operands[i] = _held(operands[i], zero)
        return operands

    def leave(self, results: Sequence[Any], *, apart: bool = False) -> None:
        """Notes the results of a loop; ``apart``: True where some may be there before it is done."""
        found = _numbers(results) if apart else _smallest(results)
        if self.in_turn and found:
            self.seen, self.gate = [], functools.reduce(lax.bitwise_or, [self._zero(results[i]) for i in found])

    def _zero(self, x: Any) -> Any:
        first = x if not x.ndim else lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), range(x.ndim))
        if jnp.issubdtype(first.dtype, jnp.complexfloating):
            first = lax.real(first)
        assert self.axis is not None
        return lax.bitwise_and(lax.convert_element_type(first, np.int32), unknown_zero(self.axis))


def _held(x: Any, zero: Any) -> Any:
    """``x``, its weak type too, once ``zero`` is known."""
    return lax.select(lax.eq(zero, np.int32(0)), x, lax.full_like(x, True if x.dtype == np.bool_ else OTHER))


def _can_hold(x: Any) -> bool:
    """True for arrays of numbers; a literal is a Python number with a dtype, and no array."""
    return hasattr(x, "ndim") and bool(x.size) and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)


def _numbers(values: Sequence[Any]) -> list[int]:
    return [i for i, x in enumerate(values) if _can_hold(x)]


def _smallest(values: Sequence[Any]) -> list[int]:
    """The smallest number, if there is one; none that may count turns if there is another, for compilers want to know
    how many."""
    able = _numbers(values)
    counts = {i for i in able if jnp.issubdtype(values[i].dtype, jnp.integer) and not values[i].ndim}
    return sorted(able, key=lambda i: (i in counts, values[i].size))[:1]
