"""What a plan takes for granted is in it and shown: the length of while loops, the FLOPs of opaque kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import autopar
from autopar.ir.pretty import plan_facts, plan_text
from tests.clusters import SLOW_8

TRIPS = 8


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def plan_of(step: Any, *args: Any, **options: Any) -> Any:
    return autopar.parallelize(step, cluster=SLOW_8, mesh=(8,), **options).plan(*args).data


def loop_step(w: jax.Array, x: jax.Array) -> jax.Array:
    """Contracts over a split dimension in every turn of a loop whose length depends on values."""
    return jax.lax.while_loop(lambda x: jnp.sum(x) < 1e6, lambda x: jnp.tanh(x @ w) + 1, x)


def test_collectives_in_a_while_loop_count_the_trips_that_are_costed() -> None:
    pins = {"args[0]": jax.sharding.PartitionSpec("x", None), "args[1]": jax.sharding.PartitionSpec(None, "x")}
    plan = plan_of(loop_step, array(64, 64), array(64, 64), constraints=pins)
    inside = [c for c in plan.sharding.collectives if c.trips_assumed]
    assert inside
    assert {c.trips for c in inside} == {TRIPS}
    once = plan_of(lambda w, x: jnp.tanh(x @ w) + 1, array(64, 64), array(64, 64), method="data_parallel")
    assert not [c for c in once.sharding.collectives if c.trips_assumed]
    facts = plan_facts(plan)
    assert {c["trips"] for c in facts["collectives"] if c["trips_assumed"]} == {TRIPS}
    assert "  ~ : some run in a loop of unknown length, counted with the trips assumed below" in plan_text(plan)


def test_the_assumed_length_of_a_while_loop_is_in_the_plan() -> None:
    plan = plan_of(loop_step, array(64, 64), array(64, 64))
    (row,) = plan.sharding.assumptions
    assert (row.primitive, row.assumed, row.count) == ("while", f"{TRIPS} trips", 1)
    assert row.source.startswith("test_assumptions.py:")
    text = plan_text(plan)
    assert "assumed, for the step does not say it\n" in text
    assert f"while         1  {TRIPS} trips  {row.source}" in text


def test_a_step_without_loops_assumes_nothing() -> None:
    plan = plan_of(lambda w, x: x @ w, array(64, 64), array(64, 64))
    assert plan.sharding.assumptions == ()
    assert "assumed" not in plan_text(plan)
