"""A tape plays what was noted, on other arrays, and lets go of each at its last use."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from autopar.runtime.tape import Tape


class Number:
    """An array, as far as a tape knows."""

    def __init__(self, value: float) -> None:
        self.value = value


def plus(*xs: Number) -> list[Number]:
    return [Number(sum(x.value for x in xs))]


def test_it_plays_what_was_noted() -> None:
    noted: list[Any] = []

    def interpret(given: dict[int, dict[Any, Any]], tape: Tape) -> dict[int, dict[Any, Any]]:
        noted.append(given)
        [total] = tape.call(plus, [given[0]["a"], given[0]["b"], given[3]["a"]], 1)
        tape.call(lambda x: (), [total], 0)
        both = tape.call(lambda x: [x, Number(2 * x.value)], [total], 2)
        tape.call(plus, [total], 1)  # nobody reads it
        return {7: {"total": total, "twice": both[1]}, 0: {"b": given[0]["b"], "same": both[0]}}

    initial = {0: {"a": Number(1), "b": Number(2)}, 3: {"a": Number(3)}}
    tape = Tape(initial, interpret)
    for _ in range(2):
        found = tape.play(initial)
        values = {b: {key: x.value for key, x in arrays.items()} for b, arrays in found.items()}
        assert values == {7: {"total": 6, "twice": 12}, 0: {"b": 2, "same": 6}}
    initial[3]["a"] = Number(10)
    assert tape.play(initial)[7]["twice"].value == 26
    assert len(noted) == 1
    with pytest.raises(AssertionError, match="a step of other arrays"):
        tape.play({0: initial[0]})


def test_nothing_is_held_past_its_last_use() -> None:
    alive: list[weakref.ref[Number]] = []

    def make() -> list[Number]:
        made = [Number(1), Number(2)]
        alive.extend(map(weakref.ref, made))
        return made

    def see(x: Number) -> list[Number]:
        seen.append([ref() is not None for ref in alive])
        return [x]

    def interpret(given: dict[int, dict[Any, Any]], tape: Tape) -> dict[int, dict[Any, Any]]:
        one, two = tape.call(make, (), 2)
        [other] = tape.call(plus, [one, two], 1)
        tape.call(see, [other], 1)
        [last] = tape.call(plus, [one], 1)
        tape.call(see, [last], 1)
        return {0: {"last": last}}

    seen: list[list[bool]] = []
    Tape({}, interpret).play({})
    assert seen == [[True, False], [False, False]]


def test_it_says_where_it_is() -> None:
    def fail() -> list[Number]:
        raise ZeroDivisionError

    def interpret(given: dict[int, dict[Any, Any]], tape: Tape) -> dict[int, dict[Any, Any]]:
        for at, run in enumerate([lambda: (), fail, lambda: ()]):
            tape.timer(at)
            tape.call(run, (), 0)
        return {}

    tape = Tape({}, interpret)
    with pytest.raises(ZeroDivisionError):
        tape.play({})
    assert tape.at == 1


def test_a_call_gives_what_was_noted() -> None:
    tape = Tape({}, lambda given, tape: {0: dict(enumerate(tape.call(lambda: [Number(1)], (), 2)))})
    with pytest.raises(AssertionError, match="more or fewer arrays"):
        tape.play({})
