"""`autopar.check` passes right plans, and names the operator at fault in a plan whose lowering was broken."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import check
from autopar.ir.errors import CheckError, OptionError
from autopar.jax_compat import bind
from autopar.runtime.one_program import local, lowering
from tests.random_plans import random_strategies


def mlp_step(state: Any, batch: Any) -> Any:
    x, y = batch

    def loss_fn(params: Any) -> Any:
        hidden = jnp.tanh(x @ params["w1"])
        return jnp.mean((hidden @ params["w2"] - y) ** 2)

    loss, grads = autopar.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def mlp_args(dtype: str = "float32") -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    state = {"w1": rng.standard_normal((16, 32)) * 0.2, "w2": rng.standard_normal((32, 8)) * 0.2}
    batch = rng.standard_normal((4096, 16)), rng.standard_normal((4096, 8))
    return jax.tree.map(lambda a: jnp.asarray(a, dtype), (state, batch))


SPLIT: dict[str, Any] = {"mesh": (2, 4), "constraints": {"args[1]*": P(("x", "y"))}}
"""Options under which what is made of the batch stays split: it is large, and gathering it would cost more."""


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes the local lowering of a primitive wrong by ``change`` wherever it is sharded."""

    def break_it(primitive: str, change: Any) -> None:
        right = local.LOCAL.get(primitive, lambda ctx, eqn, *operands: bind(eqn, *operands))
        monkeypatch.setitem(local.LOCAL, primitive, lambda *a: [change(r) for r in right(*a)])

    return break_it


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_plan_passes(dtype: str) -> None:
    args = mlp_args(dtype)
    report = check(mlp_step, None, args, num_steps=2, **SPLIT, donate_argnums=0)
    assert report.agrees
    text = str(report)
    assert text.startswith("check of mlp_step on mesh 2x4 (x, y), 2 steps: all 3 results agree\n")
    assert "out[0]['w1']" in text and "out[1]" in text
    jax.block_until_ready(args)  # nothing was donated


def test_steps_go_on_from_state_in_several_arguments() -> None:
    seen: list[float] = []

    def step(momentum: Any, double: bool, params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(params["w"])
        momentum = {"w": (2 if double else 1) * momentum["w"] + grads}
        jax.debug.callback(lambda loss: seen.append(float(loss)), value)
        return value, {"w": params["w"] - 0.1 * momentum["w"], "more": params["more"]}, momentum

    params = {"w": jnp.ones((16, 8)), "more": jnp.ones(3)}
    args = ({"w": jnp.ones((16, 8))}, True, params, jnp.ones((8, 16)))
    assert check(step, None, args, num_steps=3, mesh=(8,), static_argnums=1, batch_argnums=3).agrees
    assert len({f"{loss:.3g}" for loss in seen}) == 3


def test_the_operator_at_fault_is_named(broken: Any) -> None:
    broken("tanh", lambda r: r * 1.01)
    with pytest.raises(CheckError) as error:
        check(mlp_step, None, mlp_args(), **SPLIT)
    text = str(error.value)
    assert "results differ" in text
    lines, first = inspect.getsourcelines(mlp_step)
    line = first + next(i for i, text in enumerate(lines) if "jnp.tanh(" in text)
    assert f"first value that differs: tanh (node {_node('tanh')}, test_check.py:{line}), result 0 of 1, " in text
    assert "its strategy: " in text and "over x·y" in text and "([x·y,_]) -> ([x·y,_])" in text
    assert "allowed 1e-05" in text and "got " in text and "expected " in text


def _node(primitive: str) -> int:
    graph = autopar.parallelize(mlp_step, **SPLIT).planned(*mlp_args()).traced.graph
    return next(n.id for n in graph.nodes if n.primitive == primitive)


def test_a_loop_is_named_as_a_whole(broken: Any) -> None:
    def step(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (jnp.sin(c), c.sum()), x * 2, None, length=3)

    broken("sin", lambda r: r + 0.5)
    with pytest.raises(CheckError, match=r"value that differs: scan \(node \d+, test_check.py:\d+\), result 0 of 2"):
        check(step, None, (jnp.ones((4096, 64)),), mesh=(8,), constraints={"args[0]": P("x")})


def test_a_step_that_is_parallelized_already_and_a_given_plan(broken: Any) -> None:
    step = autopar.parallelize(mlp_step, **SPLIT, donate_argnums=0)
    args = mlp_args()
    plan = step.plan(*args)
    assert check(step, None, args).agrees
    assert check(step, plan, args).agrees
    broken("tanh", lambda r: r * 1.01)
    with pytest.raises(CheckError, match="first value that differs: tanh"):
        check(mlp_step, plan, args)


def test_keys_integers_and_nan() -> None:
    def step(key: Any, count: Any, x: Any) -> Any:
        return jax.random.split(key), count + 1, jnp.log(x), jax.random.normal(key, (8,)), count > 2

    x = jnp.array([1.0, -1.0, 0.0, 2.0, jnp.inf, 3.0, 4.0, -5.0])
    assert check(step, None, (jax.random.key(1), jnp.arange(8), x), mesh=(8,)).agrees


def test_integers_are_compared_exactly(broken: Any) -> None:
    broken("mul", lambda r: r + 1)
    with pytest.raises(CheckError, match=r"int32\[8\]: max difference 1 .* allowed 0"):
        pins = {"args[0]": P("x"), "out*": P("x")}
        check(lambda n: n * 3, None, (jnp.arange(8) + 1000000,), mesh=(8,), constraints=pins)


def test_rtol_replaces_the_tolerances(broken: Any) -> None:
    broken("tanh", lambda r: r * 1.001)
    assert check(mlp_step, None, mlp_args(), rtol=0.1, **SPLIT).agrees
    with pytest.raises(CheckError):
        check(mlp_step, None, mlp_args(), rtol=1e-4, **SPLIT)


def test_a_result_that_is_resharded_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lowering.emit_step
    monkeypatch.setattr(lowering, "emit_step", lambda step, x, *more: right(step, x, *more) * 2)
    pins = {"args[0]": P("x"), "out": P()}
    with pytest.raises(CheckError, match="every operator's result agrees, but out differs from the value that"):
        check(lambda x: x, None, (jnp.arange(8.0),), mesh=(8,), constraints=pins)


def test_rounding_that_grows_is_told_from_a_fault() -> None:
    x = np.random.default_rng(0).uniform(1, 2, (4096, 64)).astype(np.float32)
    total = np.float32(x.sum(dtype=np.float64))
    report = check(lambda x: (x.sum() - total) * 1000, None, (x,), mesh=(8,), constraints={"args[0]": P("x")})
    assert not report.agrees
    assert "1 of 1 results differ" in str(report) and "what differs is rounding that grew" in str(report)


def test_what_check_cannot_do() -> None:
    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    with pytest.raises(CheckError, match=r"args\[0\] is a ShapeDtypeStruct: check runs the step, so give it arrays"):
        check(lambda x: x, None, (shape,), mesh=(8,))
    with pytest.raises(CheckError, match="num_steps above 1 needs a step that returns its new state"):
        check(lambda x: x.sum(), None, (jnp.ones(8),), mesh=(8,), num_steps=2)
    with pytest.raises(OptionError, match="num_steps must be at least 1, got 0"):
        check(lambda x: x, None, (jnp.ones(8),), num_steps=0)


def _centred() -> Any:
    x = np.random.default_rng(0).normal(size=(4096, 64)).astype(np.float32)
    return x - x.mean(0)


def _low_precision(w: Any, x: Any) -> Any:
    """A scan in float32 with products in bfloat16."""

    def body(c: Any, _: None) -> Any:
        y = jnp.tanh((c.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32))
        return y, y.sum()

    return jax.lax.scan(body, x, None, length=6)


@pytest.mark.parametrize("seed", range(3))
def test_sums_that_cancel_out_and_low_precision_in_loops_are_no_faults(seed: int) -> None:
    steps = [
        (lambda x: (x.sum(0), (x * x).mean()), (_centred(),)),
        (_low_precision, (0.04 * _centred()[:64], _centred())),
    ]
    for fun, args in steps:
        step = autopar.parallelize(fun, mesh=(2, 4))
        with random_strategies(seed):
            step.plan(*args)
        assert check(step, None, args).agrees


def test_a_fault_in_a_sum_that_cancels_out_is_found(broken: Any) -> None:
    broken("reduce_sum", lambda r: r + 0.5)
    with pytest.raises(CheckError, match=r"first value that differs: reduce_sum \(node 0, test_check.py"):
        check(lambda x: x.sum(0), None, (_centred(),), mesh=(2, 4), constraints={"args[0]": P("x", "y")})


def test_a_nan_is_told_with_the_operator_that_made_it() -> None:
    def step(w: Any, x: Any) -> Any:
        return w * 2, jnp.log(x @ w - 100).mean()

    report = check(step, None, (jnp.ones((8, 8)), jnp.ones((16, 8))), mesh=(2, 4))
    text = str(report)
    assert report.agrees and "all 2 results agree, 1 of them holds NaN\n" in text
    assert "the first NaN is made by log (node 3, test_check.py:" in text
    report = check(lambda x: x + 1, None, (jnp.full(8, jnp.nan),), mesh=(8,))
    assert str(report).endswith("args[0] is NaN already")
