"""What drawing random bits costs a device: its part where bits can be drawn in parts, all of them where they cannot."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.cost.roofline import flops
from tests.clusters import SLOW_8
from tests.compare import graph_of

SHAPE = (512, 64)
KEY = jax.eval_shape(lambda: jax.random.key(0))


def noise(key: Any, x: Any) -> Any:
    return jnp.sin(x) * jax.random.bits(key, SHAPE, "uint32").astype(jnp.float32)


def drawn(partitionable: bool) -> tuple[Any, float]:
    """The plan of a step whose result is split 8 ways, and the FLOPs of its draw."""
    args = (KEY, jax.ShapeDtypeStruct(SHAPE, jnp.float32))
    with jax.threefry_partitionable(partitionable):
        step = autopar.parallelize(noise, cluster=SLOW_8, mesh=(8,), constraints={"args[1]": P("x"), "out": P("x")})
        plan = step.plan(*args).data
        (node,) = [n for n in graph_of(noise, *args).nodes if n.primitive == "random_bits"]
    return plan, flops(node)


def test_a_part_is_drawn_at_its_own_cost() -> None:
    plan, bits = drawn(True)
    assert bits / 8 < plan.predictions.flops < 1.3 * bits / 8


def test_without_partitionable_threefry_every_device_draws_all() -> None:
    plan, bits = drawn(False)
    assert bits < plan.predictions.flops < 1.1 * bits
    device = SLOW_8.groups[0].device
    assert plan.predictions.compute_s >= bits / device.peak_flops_per_s("float32")


def test_it_also_needs_the_memory_of_all() -> None:
    words = 4 * SHAPE[0] * SHAPE[1]
    parts, whole = (drawn(on)[0].predictions.peak_memory_bytes for on in (True, False))
    assert parts < 2 * words
    assert whole > 5 * words  # two words of state in and out for each, and all of the bits


@pytest.mark.parametrize("partitionable", [True, False])
def test_plans_of_the_two_are_not_mixed_up(partitionable: bool) -> None:
    plan, _ = drawn(partitionable)
    other, _ = drawn(not partitionable)
    assert plan.fingerprint != other.fingerprint
