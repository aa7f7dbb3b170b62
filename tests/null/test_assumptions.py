"""What a plan takes for granted is in it and shown: the length of while loops, the FLOPs of opaque kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType

import autopar
from autopar.cost.roofline import flops
from autopar.frontend.trace import trace
from autopar.frontend.user_rules import sharding_rule
from autopar.ir.errors import RuleError
from autopar.ir.graph import Node
from autopar.ir.plan_text import plan_facts, plan_text
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


# --- kernels ----------------------------------------------------------------------------------------------


def node_of(fun: Any, *args: Any, primitive: str) -> Node:
    (node,) = [n for n in trace(fun, *args).graph.nodes if n.primitive == primitive]
    return node


def _products(x_ref: Any, y_ref: Any, o_ref: Any) -> None:
    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += x_ref[...] @ y_ref[...]


def pallas_matmul(x: Any, y: Any, **options: Any) -> Any:
    """[16, 32] @ [32, 64] in 4 turns of 8 contracted rows: 2·16·32·64 FLOPs, and 16·64 in each turn to add up."""
    return pl.pallas_call(
        _products,
        out_shape=jax.ShapeDtypeStruct((16, 64), x.dtype),
        grid=(4,),
        in_specs=[pl.BlockSpec((16, 8), lambda i: (0, i)), pl.BlockSpec((8, 64), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((16, 64), lambda i: (0, 0)),
        interpret=True,
        **options,
    )(x, y)


MATMUL_FLOPS = 2 * 16 * 32 * 64
MATMUL = (array(16, 32), array(32, 64))


@pytest.mark.filterwarnings("ignore:.* does not know how to split pallas_call:autopar.AutoparWarning")
def test_flops_of_a_pallas_kernel_are_its_bodys_times_its_grid() -> None:
    node = node_of(pallas_matmul, *MATMUL, primitive="pallas_call")
    assert MATMUL_FLOPS + 4 * 16 * 64 <= flops(node) <= MATMUL_FLOPS + 10 * 16 * 64
    assert plan_of(pallas_matmul, *MATMUL).sharding.assumptions == ()


def by_program(body: Any) -> Any:
    """float32[16, 128] → the same, 8 programs of ``body(number, x)``."""

    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = body(pl.program_id(0), x_ref[...])

    spec = pl.BlockSpec((2, 128), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct((16, 128), jnp.float32)
    return pl.pallas_call(kernel, out_shape=shape, grid=(8,), in_specs=[spec], out_specs=spec, interpret=True)


TURNS = sum(range(8))


@pytest.mark.parametrize(
    ("body", "turns"),
    [
        (lambda i, x: jax.lax.fori_loop(0, i, lambda _, v: v * x, x), TURNS),
        (lambda i, x: jax.lax.fori_loop(2, 2 * i + 2, lambda _, v: v * x, x), 2 * TURNS),
        (lambda i, x: jax.lax.fori_loop(0, 5, lambda _, v: v * x, x), 8 * 5),
        (lambda i, x: jax.lax.cond(i < 2, lambda v: v * x, lambda v: v, x), 2),
        (lambda i, x: jax.lax.cond(x[0, 0] < 2, lambda v: v * x * x, lambda v: v * x, x), 8 * 2),
    ],
)
def test_flops_of_a_kernel_go_by_the_numbers_of_its_programs(body: Any, turns: int) -> None:
    done = flops(node_of(by_program(body), array(16, 128), primitive="pallas_call"))
    assert turns * 256 <= done <= turns * 256 + 8 * 20  # and what says how often


def test_flops_of_a_kernels_loop_that_writes() -> None:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        def square() -> None:
            o_ref[...] = x_ref[...] * x_ref[...]

        jax.lax.fori_loop(0, pl.program_id(0), lambda k, _: pl.when(k < 8)(square), None)

    spec = pl.BlockSpec((2, 128), lambda i: (i, 0))
    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((16, 128), jnp.float32), grid=(8,),
                          in_specs=[spec], out_specs=spec, interpret=True)  # fmt: skip
    done = flops(node_of(call, array(16, 128), primitive="pallas_call"))
    assert TURNS * 256 <= done <= TURNS * (256 + 20) + 8 * 20


def test_a_kernels_loop_over_a_value_is_an_assumption() -> None:
    step = by_program(lambda i, x: jax.lax.while_loop(lambda v: v[0, 0] < 100, lambda v: v * x, x))
    (row,) = plan_of(step, array(16, 128)).sharding.assumptions
    assert (row.primitive, row.assumed) == ("while", "8 trips")


def test_a_pallas_kernels_own_estimate_comes_first() -> None:
    estimate = pl.CostEstimate(flops=12345, bytes_accessed=1, transcendentals=0)
    node = node_of(lambda x, y: pallas_matmul(x, y, cost_estimate=estimate), *MATMUL, primitive="pallas_call")
    assert flops(node) == 12345
    assert node.digest == node_of(pallas_matmul, *MATMUL, primitive="pallas_call").digest


def test_flops_of_a_decorated_kernel_are_those_of_what_it_calls() -> None:
    kernel = sharding_rule("seen", "_ _, _ _ -> _ _")(pallas_matmul)
    count = flops(node_of(kernel, *MATMUL, primitive="autopar_kernel"))
    assert MATMUL_FLOPS < count == flops(node_of(pallas_matmul, *MATMUL, primitive="pallas_call"))


def test_flops_of_a_shard_map_are_its_bodys_times_its_devices() -> None:
    mesh = AbstractMesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec("a", "b")
    f = jax.shard_map(lambda x: jnp.tanh(x) @ x.T, mesh=mesh, in_specs=spec, out_specs=spec)
    node = node_of(f, array(16, 16), primitive="shard_map")
    local = 8 * 4
    assert flops(node) == 8 * (8 * local + local + 2 * 8 * 4 * 8)  # tanh, transpose, product


def test_flops_are_the_users_word() -> None:
    by_shapes = sharding_rule("said", "_ _, _ _ -> _ _", flops=lambda x, y, out: x[1] * out[0] * y[1])(pallas_matmul)
    by_number = sharding_rule("said too", "_ _, _ _ -> _ _", flops=7)(pallas_matmul)
    assert flops(node_of(by_shapes, *MATMUL, primitive="autopar_kernel")) == 32 * 16 * 64
    assert flops(node_of(by_number, *MATMUL, primitive="autopar_kernel")) == 7
    mapped = jax.vmap(by_shapes, in_axes=(0, None))
    assert flops(node_of(mapped, array(5, 16, 32), array(32, 64), primitive="autopar_kernel")) == 5 * 32 * 16 * 64


def ffi(x: jax.Array) -> jax.Array:
    return jax.ffi.ffi_call("a_said_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def test_a_call_that_cannot_be_seen_into_is_an_assumption_until_its_flops_are_said() -> None:
    with pytest.warns(autopar.AutoparWarning, match="does not know how to split a_said_target"):
        (row,) = plan_of(lambda x: 2 * ffi(x), array(16, 8)).sharding.assumptions
    assert (row.primitive, row.assumed, row.count) == ("ffi_call 'a_said_target'", "1 FLOP an element", 1)
    assert row.source.startswith("test_assumptions.py:")
    sharding_rule("a_said_target", "n _ -> n _", flops=lambda x, out: 1e6 * x[0] * out[1])
    plan = plan_of(lambda x: 2 * ffi(x), array(16, 8))
    assert plan.sharding.assumptions == ()
    assert 1e6 * 16 * 8 / 8 <= plan.predictions.flops <= 1e6 * 16 * 8 / 8 + 16 * 8


def test_what_is_hidden_in_a_kernel_is_assumed_too() -> None:
    kernel = sharding_rule("outer", "n _ -> n _")(
        lambda x: jax.lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: jax.ffi.ffi_call("inner", x)(x), x)
    )
    rows = plan_of(kernel, array(16, 8)).sharding.assumptions
    assert [(r.primitive, r.assumed) for r in rows] == [
        ("ffi_call 'inner'", "1 FLOP an element"),
        ("while", f"{TRIPS} trips"),
    ]


@pytest.mark.parametrize("said", [-1, float("nan"), "many", True])
def test_flops_that_are_no_number(said: Any) -> None:
    with pytest.raises(RuleError, match=r"sharding rule 'wrong': flops is .*; expected a number from 0 on"):
        sharding_rule("wrong", "n -> n", flops=said)
    with pytest.raises(RuleError, match=r"kernel 'wrong' \(test_assumptions.py:\d+\): flops is .* \(4,\), \(4,\)"):
        sharding_rule("wrong", "n -> n", flops=lambda x, out: said)(lambda x: x)(jnp.zeros(4))
