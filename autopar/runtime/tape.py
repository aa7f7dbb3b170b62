"""A step as straight-line code: written down once, played in every step.

Which arrays a buffer holds, under which keys, and who takes them, is the same in every step. So the interpreter goes
through the instructions once with places instead of arrays, as JAX traces a function: what is to be called on arrays it
calls through `Tape.call`, which notes it and answers with the places of what will come out. A step then calls what was
noted on a list of arrays; one that is let go of at its last use has no other reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from autopar.runtime.interpreter import Arrays

Call: TypeAlias = Callable[[Callable[..., Sequence[Any]], Sequence[Any], int], Sequence[Any]]
"""(run, given, gives) → the ``gives`` arrays of ``run(*given)``, or their places."""


def at_once(run: Callable[..., Sequence[Any]], given: Sequence[Any], gives: int) -> Sequence[Any]:
    """`Call` without a tape."""
    return run(*given)


class Tape:
    """What ``interpret`` does with the arrays of ``initial``, by buffer and key; it makes its calls through the tape
    that it is given, and returns what is there after a step.

    Attributes:
        at: the position, among the worker's instructions, of the one that is noted or played.
    """

    def __init__(
        self, initial: Mapping[int, Arrays], interpret: Callable[[dict[int, Arrays], Tape], Mapping[int, Arrays]]
    ) -> None:
        self.at = 0
        self._places = 0
        self._calls: list[tuple[int, Callable[..., Sequence[Any]], tuple[int, ...], range]] = []
        self._initial = {b: tuple(arrays) for b, arrays in initial.items()}
        given = {b: dict(zip(keys, self._new(len(keys)), strict=True)) for b, keys in self._initial.items()}
        self._given = self._places
        self._final = {b: dict(arrays) for b, arrays in interpret(given, self).items()}
        self._lines = self._ended()

    def timer(self, at: int) -> None:
        """Notes that instruction number ``at`` makes the next calls."""
        self.at = at

    def call(self, run: Callable[..., Sequence[Any]], given: Sequence[int], gives: int) -> range:
        """Notes a call; returns the places of what it gives."""
        made = self._new(gives)
        self._calls.append((self.at, run, tuple(given), made))
        return made

    def play(self, initial: Mapping[int, Arrays]) -> dict[int, Arrays]:
        """One step: arrays that are there before it → those that are there after it, by buffer and key."""
        assert {b: tuple(arrays) for b, arrays in initial.items()} == self._initial, "a step of other arrays"
        arrays = [x for mine in initial.values() for x in mine.values()]
        arrays += [None] * (self._places - self._given)
        for at, run, given, first, stop, last in self._lines:
            self.at = at
            arrays[first:stop] = run(*[arrays[i] for i in given])
            for i in last:
                arrays[i] = None
        assert len(arrays) == self._places, "a call gave more or fewer arrays than it was noted to"
        return {b: {key: arrays[i] for key, i in places.items()} for b, places in self._final.items()}

    def _new(self, count: int) -> range:
        first = self._places
        self._places += count
        return range(first, self._places)

    def _ended(self) -> list[tuple[int, Callable[..., Sequence[Any]], tuple[int, ...], int, int, tuple[int, ...]]]:
        """Every call, with the places that nobody reads after it."""
        read = {i for places in self._final.values() for i in places.values()}
        out: list[tuple[int, Callable[..., Sequence[Any]], tuple[int, ...], int, int, tuple[int, ...]]] = []
        for at, run, given, made in reversed(self._calls):
            last = tuple(i for i in dict.fromkeys((*given, *made)) if i not in read)
            read.update(given)
            out.append((at, run, given, made.start, made.stop, last))
        return out[::-1]
