"""Options two by two, in one process: results equal the step on one device, or there is a refusal whose reason is true
(`tests.option_pairs`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from autopar.ir.errors import InfeasibleError, ShardingError
from autopar.ir.plan import OneProgram
from tests.compare import assert_close
from tests.option_pairs import ONE, TWO, batch, create, rows, step_of, train
from tests.shares import each


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Numbers of 64 bits."""
    with jax.enable_x64(True):
        yield


def hold(step: Any, options: Mapping[str, Any]) -> None:
    """Two steps from a state that is made in place, beside those of one device."""
    plan = step.plan(jax.eval_shape(create), batch())
    want = create()
    got = step.init(create)
    for seed in range(2):
        got, loss = step(got, batch(seed))
        want, expected = jax.jit(train)(want, batch(seed))
        assert_close(jax.tree.map(np.asarray, (got, loss)), (want, expected), 1e-9)
    assert plan.data.config.num_microbatches == options["num_microbatches"] or options["num_microbatches"] == "auto"
    assert plan.predictions.peak_memory_bytes <= (options["memory_bytes"] or np.inf)


def numbers(values: Mapping[str, Any]) -> list[Any]:
    """Of the rows."""
    return each(3, range(len(rows(values))))


def is_free(options: Mapping[str, Any]) -> bool:
    """True where nothing asks for one program: what it cannot have, stages may."""
    return "method" not in options["how"] and all(options[name] is None for name in ("stages", "mesh", "batch_axis"))


def contradiction(options: Mapping[str, Any]) -> tuple[type[Exception], str] | None:
    """Why no plan of one program can have all of them. ZeRO gathers what it has split (the method ``zero2`` arguments,
    of which plain descent has no more than parameters), and so does data parallelism with parameters that are pinned to
    be; tensor parallelism gives every device all examples."""
    how, several = options["how"], options["num_microbatches"] != 1
    if how.get("method") == "tensor_parallel" and options["batch_axis"] is not None:
        return ShardingError, "does not split .* over batch_axis='x': leave one of them out"
    splits = how.get("method") == "zero3" or how.get("zero") == 3 or (how.get("zero") == 2 and several)
    pinned = options["constraints"] and (how.get("method") in ("data_parallel", "zero2") or "zero" in how)
    if (splits or pinned) and options["forbid"] == "all-gather" and not is_free(options):
        said = f"method='{how['method']}'; forbid=all-gather" if "method" in how else "forbid=all-gather.*; zero"
        return InfeasibleError, f"{said}.*Leave one of these out"
    return None


@pytest.mark.parametrize("number", numbers(ONE))
def test_one_program(number: int, tmp_path: Path) -> None:
    options = rows(ONE)[number]
    step = step_of(options, tmp_path)
    if (expected := contradiction(options)) is not None:
        with pytest.raises(expected[0], match=expected[1]):
            hold(step, options)
        return
    hold(step, options)
    assert isinstance(step.last_plan.data.body, OneProgram) or is_free(options)


@pytest.mark.parametrize("number", numbers(TWO))
def test_two_stages(number: int, tmp_path: Path) -> None:
    options = rows(TWO)[number]
    step = step_of(options, tmp_path)
    try:
        hold(step, options)
    except InfeasibleError as error:
        how = options["how"]
        splits = "method" in how or how.get("zero", 0) > 1  # what is gathered
        pinned = options["constraints"] and (options["whole_examples"] or options["batch_axis"] in ("x", 0))
        assert options["forbid"] == "all-gather" and (splits or pinned or "tensor" in how)
        assert "eave one of these out" in str(error) and "forbid=all-gather" in str(error)
        return
    assert len(step.last_plan.data.meshes) == 2
