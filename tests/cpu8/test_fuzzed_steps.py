"""Fuzzed steps, planned and run: equal to plain `jax.jit`. A failure prints the program, which is Python."""

from __future__ import annotations

import pytest

from tests import fuzz
from tests.outcome import EQUAL, outcome_within
from tests.worker import Worker

PARTS = 6


def _check(count: int, seed: int) -> None:
    with Worker("tests.fuzz:run") as worker:
        found = [(job, outcome_within(worker, job, fuzz.LIMIT_S)) for job in fuzz.drawn(count, seed)]
    assert len(found) == count
    faults = [f"{job}: {what.kind}\n{what.detail}" for job, what in found if what.kind != EQUAL]
    assert not faults, "\n\n".join(faults)


def test_some() -> None:
    _check(10, seed=0)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_many(part: int) -> None:
    _check(300 // PARTS, seed=1 + part)
