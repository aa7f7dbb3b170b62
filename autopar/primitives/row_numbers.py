"""What elementwise operators make of the numbers of rows, 0, 1, …, known exactly without going through all of them.

Row e·post + q is the q-th of example e. Values are kept of the first example, of the second, and what is added with
each one after it; an operator whose result is not of this form is not followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"

_MONOTONE = frozenset({"lt", "le", "gt", "ge", "sign", "max", "min", "clamp"})
"""Rise or fall, perhaps not strictly, with one operand while the others stay."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowNumbers:
    """Of ``examples``, two at least: what is at (example, q) is ``first``[q], ``second``[q], and ``second``[q] plus
    ``step``[q] for each example after the second."""

    examples: int
    first: Array
    second: Array
    step: Array

    @classmethod
    def own(cls, size: int, post: int, dtype: str) -> RowNumbers:
        """The numbers themselves, of ``size`` rows, ``post`` to an example."""
        first = np.arange(post, dtype=dtype)
        return cls(examples=size // post, first=first, second=first + first.dtype.type(post), step=np.full(post, post))

    def each(self, of: Callable[[Array], Array]) -> RowNumbers:
        """What ``of`` makes of the values of each example."""
        return RowNumbers(examples=self.examples, first=of(self.first), second=of(self.second), step=of(self.step))

    @property
    def last(self) -> Array:
        """Values of the last example, as int64."""
        return self.second.astype(np.int64) + (self.examples - 2) * self.step

    def is_within(self, post: int) -> bool:
        """True where each number is that of a row of its own example, ``post`` to an example, at the same place in
        each."""
        inside = np.all((self.first >= 0) & (self.first < post))
        return bool(inside and np.all(self.second == self.first + post) and np.all(self.step == post))

    @property
    def everywhere(self) -> int | None:
        """The number that all have; None where they differ."""
        found = int(self.first[0])
        alike = np.all(self.first == found) and np.all(self.second == found) and not np.any(self.step)
        return found if alike else None

    @property
    def unit(self) -> int:
        """How many rows an example has, by the numbers of two that follow one another; at the first place."""
        return int(self.step[0])

    @property
    def is_own(self) -> bool:
        """True where each row has its own number."""
        return np.array_equal(self.first, np.arange(self.first.size)) and self.is_within(self.first.size)


def made_of(
    primitive: str, operands: Sequence[RowNumbers | np.generic], evaluated: Callable[[Sequence[Any]], Array | None]
) -> RowNumbers | None:
    """What an elementwise operator makes of numbers and constants; None where it is not known.

    Args:
        primitive: its name.
        operands: one of them numbers at least, all of as many rows.
        evaluated: its result of arrays, in its dtype; None where that is not known.
    """
    numbers = [x for x in operands if isinstance(x, RowNumbers)]
    first = evaluated([x.first if isinstance(x, RowNumbers) else x for x in operands])
    second = evaluated([x.second if isinstance(x, RowNumbers) else x for x in operands])
    if first is None or second is None or first.dtype.kind not in "iub" or first.shape != numbers[0].first.shape:
        return None
    step = _step(primitive, operands, second, evaluated)
    if step is None:
        return None
    found = RowNumbers(examples=numbers[0].examples, first=first, second=second, step=step)
    if np.any(step):
        info = np.iinfo(first.dtype)
        if np.any(found.last < info.min) or np.any(found.last > info.max):
            return None
    return found


def _step(
    primitive: str, operands: Sequence[Any], second: Array, evaluated: Callable[[Sequence[Any]], Array | None]
) -> Array | None:
    steps = [x.step if isinstance(x, RowNumbers) else np.zeros_like(second, np.int64) for x in operands]
    moving = [i for i, step in enumerate(steps) if np.any(step)]
    if not moving:
        return steps[0]
    x, others = operands[moving[0]], [y for i, y in enumerate(operands) if i != moving[0]]
    constant = len(moving) == 1 and not any(isinstance(y, RowNumbers) for y in others)
    match primitive:
        case "add" | "add_any":
            return steps[0] + steps[1]
        case "sub":
            return steps[0] - steps[1]
        case "neg":
            return -steps[0]
        case "convert_element_type" | "copy":
            return steps[0]
        case "mul" if constant:
            return x.step * int(others[0])
        case "div" | "rem" if constant and moving == [0]:
            by = int(others[0])
            exact = by > 0 and np.all(x.step % by == 0) and np.all(x.step >= 0) and np.all(x.second >= 0)
            return (x.step // by if primitive == "div" else np.zeros_like(x.step)) if exact else None
        case "select_n" if moving[0] > 0:
            which = operands[0].second if isinstance(operands[0], RowNumbers) else operands[0]
            return np.choose(np.broadcast_to(which, second.shape).astype(int), steps[1:])
        case name if name in _MONOTONE and constant:
            last = evaluated([y.last if isinstance(y, RowNumbers) else y for y in operands])
            if last is None:
                return None
            kept = (second == x.second) & (last == x.last) & (second.dtype.kind != "b")
            return np.where(kept, x.step, 0) if np.all(kept | (second == last)) else None
        case _:
            return None
