"""Forced methods on devices: the compiled program is the plan's, and the values are the plain step's."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import autopar
from autopar.verify.hlo_collectives import instruction_counts, parse_collectives
from tests.clusters import SLOW_8
from tests.compare import assert_close, assert_same_collectives
from tests.models import build


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("data_parallel", marks=pytest.mark.full),
        pytest.param("zero2", marks=pytest.mark.full),
        "zero3",
        pytest.param("tensor_parallel", marks=pytest.mark.full),
    ],
)
def test_a_forced_method_runs_as_planned(method: str) -> None:
    model = build("gpt_tied", "float32")
    step: Any = autopar.parallelize(model.step, mesh=(2, 4), cluster=SLOW_8, method=method, **model.kwargs)
    executable = step.lower(*model.args).compile()
    assert_same_collectives(step.plan(*model.args), executable.as_text())
    kinds = +instruction_counts(parse_collectives(executable.as_text()))
    if method == "data_parallel":
        assert set(kinds) == {"all-reduce"}
    if method.startswith("zero"):
        assert set(kinds) <= {"all-gather", "reduce-scatter"}
    loss = executable(*jax.device_put(model.fresh_args(), executable.input_shardings[0]))[1]
    assert_close(loss, jax.jit(model.step)(*model.fresh_args())[1], 1e-4)
