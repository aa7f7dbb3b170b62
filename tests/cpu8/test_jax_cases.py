"""JAX's own cases of its primitives, planned and run in worker processes: equal to plain `jax.jit`, or refused."""

from __future__ import annotations

import pytest

from tests.outcome import EQUAL, FAULTS, REFUSED, UPSTREAM, outcome_within
from tests.worker import Worker

pytest.importorskip("jax._src.internal_test_util.test_harnesses")
pytest.importorskip("jax._src.internal_test_util.lax_test_util")

from tests.jax_cases.run import Run, counted_runs, shares

PARTS = 10
WHOLE_SAMPLE = 1000


def _check(part: int, parts: int, count: int, seed: int) -> None:
    with Worker("tests.jax_cases.run:run") as worker:
        found = list(counted_runs(shares(parts)[part], count, seed + part, worker))
    assert len(found) == count
    faults = [f"{job}: {what.kind}\n{what.detail}" for job, what in found if what.kind in FAULTS]
    assert not faults, "\n\n".join(faults)
    assert all(what.kind in (EQUAL, REFUSED, UPSTREAM) for _, what in found)


DEADLOCK = Run(
    group="qr", case="qr_multi_array_shape_complex64_2_200_100_fullmatrices_False", form="scan gradient", mesh=(8,),
    seed=33783, specials=False,
)  # fmt: skip
"""LAPACK's kernel for a batch of triangular systems waits for threads on which other devices wait for it."""


@pytest.mark.full
def test_devices_do_not_wait_for_each_others_threads() -> None:
    with Worker("tests.jax_cases.run:run") as worker:
        assert outcome_within(worker, DEADLOCK, 300.0).kind == EQUAL  # 5 s; beside four of its like 40


def test_a_sample() -> None:
    _check(0, 1, 8, seed=1)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_all_groups(part: int) -> None:
    _check(part, PARTS, WHOLE_SAMPLE // PARTS, seed=100)
