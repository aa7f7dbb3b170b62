"""A user's shard_map inside a planned step: fixed specs on its own mesh, whole on any other, never nested."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal, jaxprs_in_params
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from autopar.ir.errors import LoweringError
from tests.clusters import SLOW_8
from tests.compare import assert_close, assert_same_collectives


def mesh_of(*names: str, shape: tuple[int, ...] = (2, 4)) -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)


def mlp(mesh: Mesh, rows: str, columns: str, check_vma: bool = True) -> Any:
    """Two layers, hand-sharded: rows over one axis, the hidden dimension over the other."""

    def body(x: Any, up: Any, down: Any) -> Any:
        return lax.psum(jnp.tanh(x @ up) @ down, columns)

    specs = (P(rows, None), P(None, columns), P(columns, None))
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(rows, None), check_vma=check_vma)


def train_step(layer: Any) -> Any:
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((layer(x, params["up"], params["down"]) * 2 - x) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def arguments() -> Any:
    rng = np.random.default_rng(0)
    shapes = {"up": (32, 64), "down": (64, 32)}
    return {n: 0.1 * rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}, rng.normal(
        size=(16, 32)
    ).astype(np.float32)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_shard_map_on_the_plans_mesh_keeps_its_specs(check_vma: bool) -> None:
    mesh = mesh_of("data", "model")
    step, args = train_step(mlp(mesh, "data", "model", check_vma)), arguments()
    planned = autopar.parallelize(step, cluster=SLOW_8, mesh=mesh)
    plan = planned.plan(*args)
    specs = {str(s.operands[0]) for s in plan.sharding.strategies if len(s.operands) == 3}
    assert "[data,_]" in specs
    assert not [r for r in plan.sharding.replicated if r.primitive == "shard_map"]
    assert [c for c in plan.sharding.collectives if " in shard_map (test_user_shard_maps.py:" in c.where]
    assert_same_collectives(plan, planned.lower(*args).compile().as_text())
    assert_close(planned(*args), jax.jit(step)(*args), 1e-5)


def test_it_costs_a_device_its_share() -> None:
    mesh, args = mesh_of("data", "model"), arguments()
    forward = mlp(mesh, "data", "model")
    options = {"cluster": SLOW_8}

    def step(params: Any, x: Any) -> Any:
        return forward(x, params["up"], params["down"])

    own = autopar.parallelize(step, mesh=mesh, **options).plan(*args)
    other = autopar.parallelize(step, mesh=(2, 4), **options).plan(*args)
    assert 7.9 < other.predictions.flops / own.predictions.flops < 8.1
    up_down = 2 * 2 * 16 * 32 * 64 / 8
    assert up_down < own.predictions.flops < 1.2 * up_down


def test_on_another_mesh_it_runs_whole_and_the_plan_says_why() -> None:
    step, args = train_step(mlp(mesh_of("data", "model"), "data", "model")), arguments()
    planned = autopar.parallelize(step, cluster=SLOW_8, mesh=(8,))
    rows = [r for r in planned.plan(*args).sharding.replicated if r.primitive == "shard_map"]
    assert rows and all(
        r.why == "a user's shard_map runs whole on every device: its mesh is data=2, model=4, the plan's x=8; give "
        "parallelize mesh= your jax.sharding.Mesh"
        for r in rows
    )
    assert_close(planned(*args), jax.jit(step)(*args), 1e-5)


def test_an_axis_of_the_plans_mesh_that_it_does_not_name_repeats_it() -> None:
    inner = mesh_of("model", shape=(4,))
    f = jax.shard_map(
        lambda x: x - lax.pmean(x, "model"), mesh=inner, in_specs=P(None, "model"), out_specs=P(None, "model")
    )
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    planned = autopar.parallelize(lambda x: 2 * f(x * x), cluster=SLOW_8, mesh=mesh_of("data", "model"))
    plan = planned.plan(x)
    assert not plan.sharding.replicated
    assert_same_collectives(plan, planned.lower(x).compile().as_text())
    assert_close(planned(x), 2 * jax.jit(f)(x * x), 1e-5)


def test_every_kind_of_collective_and_loops_in_the_body_are_counted() -> None:
    mesh = mesh_of("a", "b")

    def body(x: Any) -> Any:
        y = lax.all_gather(x, "b", axis=1, tiled=True)
        y = lax.psum_scatter(y * y, "b", scatter_dimension=1, tiled=True)
        y = lax.all_to_all(y, "b", split_axis=0, concat_axis=1, tiled=True)
        y = lax.ppermute(y, "a", [(0, 1), (1, 0)]) + lax.axis_index("b")
        y, _ = lax.scan(lambda c, _: (c / lax.pmax(jnp.abs(c), ("a", "b")), None), y, None, length=3)
        return lax.while_loop(lambda c: lax.psum(c[0, 0], "a") < 1, lambda c: c + lax.psum(c * c, "b"), y)

    f = jax.shard_map(body, mesh=mesh, in_specs=P("a", "b"), out_specs=P(("a",), "b"), check_vma=False)
    x = np.random.default_rng(0).uniform(1, 2, (16, 32)).astype(np.float32)
    planned = autopar.parallelize(lambda x: jnp.sin(f(x * 3)), cluster=SLOW_8, mesh=mesh)
    plan = planned.plan(x)
    assert {c.kind for c in plan.sharding.collectives} >= {
        "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
    }  # fmt: skip
    assert_same_collectives(plan, planned.lower(x).compile().as_text())
    assert_close(planned(x), jax.jit(lambda x: jnp.sin(f(x * 3)))(x), 1e-5)


@pytest.mark.parametrize(
    ("spec", "body", "why"),
    [
        (
            P(("b", "a")),
            lambda x: x,
            "in_specs[0] splits a dimension over b·a, against the order of the plan's mesh a, b",
        ),
        (
            P("b"),
            lambda x: lax.psum(x, "b", axis_index_groups=[[0, 1], [2, 3]]),
            "its body holds a psum over axis_index_groups",
        ),
    ],
)
def test_what_cannot_run_in_the_plan_runs_whole(spec: Any, body: Any, why: str) -> None:
    mesh = mesh_of("a", "b")
    f = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    planned = autopar.parallelize(lambda x: f(x) + 1, cluster=SLOW_8, mesh=mesh)
    x = np.arange(16, dtype=np.float32)
    if "groups" in why:  # vmap, by which all shards run, knows no groups
        with pytest.raises(
            LoweringError, match=r"(?s)shard_map \(.*runs whole.* its body holds a psum over axis_index_g"
        ):
            planned.plan(x)
        return
    (row,) = planned.plan(x).sharding.replicated
    assert row.why == f"a user's shard_map runs whole on every device: {why}"
    assert_close(planned(x), f(x) + 1, 1e-5)


def test_effects_in_a_planned_step_happen_once(capfd: pytest.CaptureFixture[str]) -> None:
    def step(x: Any, w: Any) -> Any:
        jax.debug.print("sum {}", x.sum())
        return x @ w

    ones = np.ones((16, 16), np.float32)
    jax.block_until_ready(autopar.parallelize(step, cluster=SLOW_8, mesh=(2, 4))(ones, ones))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("sum 256.0") == 1


def ring(x: Any, axis: str) -> Any:
    """Sum of all devices' parts, passed around in a loop; and the device's own, which is there before."""
    count = lax.axis_size(axis)

    def turn(carry: Any, _: None) -> Any:
        part, total = carry
        part = lax.ppermute(part, axis, [(i, (i + 1) % count) for i in range(count)])
        return (part, total + part), None

    return x * 2, lax.scan(turn, (x, x), None, length=count - 1)[0][1]


def _communicates(eqn: Any) -> bool:
    names = {"psum", "psum_invariant", "all_gather", "ppermute", "all_to_all", "reduce_scatter"}
    return eqn.primitive.name in names or any(
        _communicates(inside) for jaxpr in jaxprs_in_params(eqn.params) for inside in jaxpr.eqns
    )


def test_loops_in_it_and_collectives_around_it_wait_for_each_other() -> None:
    """XLA's CPU client aborts where two devices run them in two orders: between any two there is a path."""
    mesh = mesh_of("data", "model")
    spec = P("data", "model")
    around = jax.shard_map(lambda x: ring(x, "model"), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)

    def layer(x: Any, up: Any, down: Any) -> Any:
        own, total = around(x @ up)
        return jnp.tanh(own + total) @ down

    step, args = train_step(layer), arguments()
    planned = autopar.parallelize(step, mesh=mesh, constraints={"args[0]*": P("data", None)})
    assert_close(planned(*args), jax.jit(step)(*args), 1e-5)
    (whole,) = (e for e in jax.make_jaxpr(planned)(*args).jaxpr.eqns if e.primitive.name == "jit")
    (lowered,) = (e for e in whole.params["jaxpr"].eqns if e.primitive.name == "shard_map")
    behind: dict[Any, set[int]] = {}
    """Variable → positions of the collectives, and of loops with some, that it waits for."""
    waits: dict[int, set[int]] = {}
    eqns = lowered.params["jaxpr"].eqns
    for k, eqn in enumerate(eqns):
        before = {n for v in eqn.invars if not isinstance(v, Literal) for n in behind.get(v, ())}
        if _communicates(eqn):
            waits[k] = before
            before = {*before, k}
        behind |= dict.fromkeys(eqn.outvars, before)
    loops = [k for k in waits if eqns[k].primitive.name == "scan"]
    assert len(loops) == 2 and len(waits) > 4, "one forward, one backward, and the plan's collectives"
    for k in loops:
        assert [eqns[n].primitive.name for n in waits if n != k and n not in waits[k] and k not in waits[n]] == []
