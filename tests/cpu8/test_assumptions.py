"""Loops of unknown length: the plan's collectives are the program's, and the values right."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from tests.clusters import SLOW_8
from tests.compare import assert_close, assert_same_collectives, plan_tally


def test_collectives_of_a_while_loop_equal_the_plans() -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Two loops, one in a scan: the length of neither is known."""

        def settle(x: jax.Array) -> jax.Array:
            return jax.lax.while_loop(lambda x: jnp.max(x) < 3, lambda x: jnp.tanh(x @ w) + x + 1, x)

        y, _ = jax.lax.scan(lambda c, _: (settle(c) / 4, None), x, None, length=3)
        return settle(x), y

    pins = {"args[0]": jax.sharding.PartitionSpec("x", "y"), "args[1]": jax.sharding.PartitionSpec(None, "x")}
    planned = autopar.parallelize(step, cluster=SLOW_8, mesh=(2, 4), constraints=pins)
    rng = np.random.default_rng(0)
    w, x = (0.1 * rng.normal(size=(64, 64)).astype(np.float32) for _ in range(2))
    plan = planned.plan(w, x)
    assert plan_tally(plan)[1]
    assert_same_collectives(plan, planned.lower(w, x).compile().as_text())
    assert_close(planned(w, x), jax.jit(step)(w, x), 1e-5)


def test_what_no_turn_changes_is_moved_once() -> None:
    """The loop's constant and what is made of it in the body are whole in one dimension each where they are read."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        turn = lambda x: jnp.tanh(x @ jnp.sin(w[::-1])) + x + 1
        out = jax.lax.while_loop(lambda x: jnp.max(x) < 3, turn, x) + jnp.sum(x)
        return out[None]  # another shape than x has: no new value of it, which would have to lie as x does

    pins = {"args[0]": jax.sharding.PartitionSpec("x", "y"), "args[1]": jax.sharding.PartitionSpec("x")}
    planned = autopar.parallelize(step, cluster=SLOW_8, mesh=(2, 4), constraints=pins)
    rng = np.random.default_rng(0)
    w, x = (0.1 * rng.normal(size=(64, 64)).astype(np.float32) for _ in range(2))
    plan = planned.plan(w, x)
    once = {(c.kind, c.where.partition(" (")[0]) for c in plan.sharding.collectives if c.trips == 1}
    assert once == {("all-gather", "constant of a loop, for dot_general"), ("all-to-all", "rev"), ("all-reduce", "add")}
    assert_same_collectives(plan, planned.lower(w, x).compile().as_text())
    assert_close(planned(w, x), jax.jit(step)(w, x), 1e-5)
