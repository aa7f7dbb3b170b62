"""What mesh axes are for, in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.ir.errors import VerifyError
from autopar.ir.in_words import in_words, parallelism
from autopar.ir.plan import OneProgram, Plan
from autopar.ir.sharding_plan import AxisUse
from tests.null.handmade import handmade_plan, spec

PLAN = handmade_plan()


def used(x: dict[str, float], y: dict[str, float], **places: str) -> Plan:
    """The handmade plan with other uses of its axes; ``places``: role → the axis that splits its arguments, or ""."""
    assert isinstance(PLAN.body, OneProgram)
    uses = tuple(AxisUse(axis=a, flops=tuple(sorted(mine.items()))) for a, mine in (("x", x), ("y", y)))
    inputs = tuple(
        replace(a, places=(replace(a.places[0], spec=spec(places[a.role.split()[0]], "")),))
        if a.role.split()[0] in places
        else a
        for a in PLAN.inputs
    )
    sharding = replace(PLAN.body.sharding, uses=uses, collectives=())
    return replace(PLAN, inputs=inputs, body=OneProgram(sharding=sharding))


def test_what_splits_examples_is_data_parallel_or_zero() -> None:
    both = {"examples": 1.0}
    assert in_words(used(both, both, weights="", optimizer="")) == "data parallel over x·y, 4 microbatches"
    assert in_words(used(both, both, weights="", optimizer="x")).startswith("ZeRO-2 over x, data parallel over y")
    assert in_words(used(both, both, weights="xy", optimizer="xy")).startswith("ZeRO-3 over x·y")


def test_zero_1_reduces_sums_of_gradients_once() -> None:
    plan = used({"examples": 1.0}, {"features": 1.0}, weights="", optimizer="x")
    scatter = replace(
        PLAN.sharding.collectives[0], kind="reduce-scatter", axes=("x",), operand_bytes=1000, trips=1, count=1
    )
    for trips, word in ((1, "ZeRO-1"), (4, "ZeRO-2")):
        sharding = replace(plan.sharding, collectives=(replace(scatter, trips=trips),))
        assert in_words(replace(plan, body=OneProgram(sharding=sharding))).startswith(f"{word} over x, tensor parallel")


def test_what_else_an_axis_may_split() -> None:
    plan = used({"positions": 1.0}, {"experts": 0.8, "examples": 0.15, "features": 0.05}, weights="x")
    assert in_words(plan).startswith("sequence parallel with sharded weights over x, expert parallel and ")
    plan = used({"features": 3.0, "examples": 1.0}, {"nothing": 1.0}, weights="", optimizer="")
    assert in_words(plan).startswith("tensor parallel (75 %) and data parallel (25 %) over x, the same work over y")
    plan = used({}, {}, weights="x")
    assert in_words(plan).startswith("sharded over x, the same work over y")


def test_three_parts_are_a_list() -> None:
    plan = used({"features": 5.0, "examples": 3.0, "nothing": 2.0}, {"nothing": 1.0}, weights="", optimizer="")
    said = "tensor parallel (50 %), data parallel (30 %) and the same work (20 %) over x"
    assert in_words(plan).startswith(said)


@pytest.mark.parametrize(("dtype", "what"), [("float32", "features"), ("int32", "positions")])
def test_rows_of_a_batch_are_features_unless_they_are_tokens(dtype: str, what: str) -> None:
    """Work counts as it is before it is split."""

    def step(w: Any, x: jax.Array) -> jax.Array:
        hidden = w["embed"][x] if dtype == "int32" else x
        return jnp.sum(hidden @ w["up"])

    w = {"up": jax.ShapeDtypeStruct((2048, 4096), jnp.float32), "embed": jax.ShapeDtypeStruct((64, 2048), jnp.float32)}
    x = jax.ShapeDtypeStruct((8, 2048), jnp.dtype(dtype))
    split = P(None, "x")
    sharded = autopar.parallelize(step, cluster="cpu:8", mesh=8, batch_argnums=1, constraints={"args[1]": split})
    (use,) = sharded.plan(w, x).sharding.uses
    assert dict(use.flops) == {what: 2 * 8 * 2048 * 4096 * (2048 if dtype == "int32" else 1)}


def test_each_part_names_its_axes() -> None:
    words = parallelism(used({"examples": 1.0}, {"features": 1.0}, weights="", optimizer=""))
    assert [(w.axes, w.what) for w in words[0]] == [(("x",), "data parallel"), (("y",), "tensor parallel")]


@pytest.mark.parametrize(
    "axis, what, flops", [("z", "examples", 1.0), ("x", "rows", 1.0), ("x", "examples", -1.0)]
)  # fmt: skip
def test_verify_rejects(axis: str, what: str, flops: float) -> None:
    PLAN.verify()
    use = AxisUse(axis=axis, flops=((what, flops),))
    with pytest.raises(VerifyError, match="axis"):
        replace(PLAN, body=OneProgram(sharding=replace(PLAN.sharding, uses=(use,)))).verify()
    with pytest.raises(VerifyError, match="is 'guess', which is none of batch, weights"):
        replace(PLAN, inputs=(replace(PLAN.inputs[0], role="guess"), *PLAN.inputs[1:])).verify()
