"""A memory limit that data parallel exceeds leads to a plan that shards what it must, and the compiled program fits."""

from __future__ import annotations

import pytest

from benchmarks.zero import Row, measure, mlp8
from tests.models import build
from tests.models.base import Model

PARTS = (0.7, 0.4, 0.25)


def within(model: Model, mesh: tuple[int, ...], part: float, peak_bytes: int) -> Row:
    """The plan under a part of data parallel's peak, which must exist and fit."""
    row = measure(model, mesh, limit_bytes=int(part * peak_bytes))
    assert not row.refusal
    assert row.limit_bytes is not None
    assert row.peak_bytes <= row.limit_bytes
    assert row.compiled_bytes <= row.limit_bytes
    return row


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(8,), (2, 4)])
def test_limits_below_data_parallel_lead_to_zero(mesh: tuple[int, ...]) -> None:
    model = mlp8()
    parallel = measure(model, mesh, method="data_parallel")
    assert parallel.params_part == parallel.state_part == 1.0
    assert parallel.all_reduced_part >= 1.0
    rows = [within(model, mesh, part, parallel.peak_bytes) for part in PARTS]
    assert all(row.state_part < 1.0 for row in rows)
    assert rows[-1].params_part < 0.2
    assert rows[-1].all_reduced_part < 0.2
    assert rows[0].step_s <= rows[1].step_s * 1.01 <= rows[2].step_s * 1.01**2


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(8,), (2, 4)])
@pytest.mark.parametrize("name", ["gpt", "gpt_scan"])
def test_what_a_method_fits_is_not_refused(name: str, mesh: tuple[int, ...]) -> None:
    model = build(name, "float32", large=True)
    for method in ("zero2", "zero3"):
        row = measure(model, mesh, method=method)
        limited = measure(model, mesh, limit_bytes=row.peak_bytes)
        assert not limited.refusal
        assert limited.peak_bytes <= row.peak_bytes
        assert limited.step_s <= row.step_s * (1 + 1e-9)
