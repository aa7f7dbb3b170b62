"""Fuzzed steps, planned and run: equal to plain `jax.jit`. A failure prints the program, which is Python."""

from __future__ import annotations

import pytest

from tests import fuzz
from tests.fuzz import Block, Op, Program, Run
from tests.outcome import EQUAL, outcome_within
from tests.worker import Worker

PARTS = 6


def _check(count: int, seed: int) -> None:
    with Worker("tests.fuzz:run") as worker:
        found = [(job, outcome_within(worker, job, fuzz.LIMIT_S)) for job in fuzz.drawn(count, seed)]
    assert len(found) == count
    faults = [f"{job}: {what.kind}\n{what.detail}" for job, what in found if what.kind != EQUAL]
    assert not faults, "\n\n".join(faults)


NOTHING = (Op("unary", 0, 0, 0),)
SQUARE = ((8, 8), "float32")
FOUND = {
    "a part of a complex number": Run(
        program=Program(
            leaves=(((8, 2, 8), "bool"),),
            rows=6,
            body=(Op("cumulative", 0, 2, 1), Block("fori", 3, 5, ((Op("complex", 1, 2, 15),), NOTHING))),
            gradient=False,
            x64=False,
        ),
        mesh=(8,),
        seed=None,
    ),
    "a complex constant": Run(
        program=Program(
            leaves=(((8, 8), "complex64"),), rows=1, body=(Op("compare", 4, 1, 1),), gradient=True, x64=False
        ),
        mesh=(8,),
        seed=3,
    ),
    "a sum of a constant": Run(
        program=Program(leaves=(SQUARE,), rows=1, body=(Op("binary", 0, 0, 0),), gradient=True, x64=False),
        mesh=(8,),
        seed=None,
    ),
    "a loop of as many turns as a sum of nothing": Run(
        program=Program(
            leaves=(((0,), "int32"), ((), "float32"), ((8, 16), "float32")),
            rows=8,
            body=(Op("softmax", 0, 0, 3), Block("while", 2, 4, ((Op("transpose", 3, 3, 11),), NOTHING))),
            gradient=False,
            x64=False,
        ),
        mesh=(8,),
        seed=None,
    ),
}
"""What fuzzed steps have found, made small."""


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    what = fuzz.run(FOUND[name])
    assert what.kind == EQUAL, what


def test_some() -> None:
    _check(4, seed=0)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_many(part: int) -> None:
    _check(300 // PARTS, seed=1 + part)
