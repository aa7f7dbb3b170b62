"""Each collective names the source line of the equation that it is for."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.ir.plan_text import plan_text
from tests.clusters import SLOW_8

pytestmark = pytest.mark.slow


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def line_of(fun: Any, text: str) -> str:
    lines, first = inspect.getsourcelines(fun)
    (at,) = [i for i, line in enumerate(lines) if text in line]
    return f"test_places.py:{first + at}"


def places(step: Any, *args: Any, **options: Any) -> dict[str, set[str]]:
    """Kind of collective → the places it is for; each shown by inspect."""
    plan = autopar.parallelize(step, cluster=SLOW_8, mesh=(8,), **options).plan(*args).data
    out: dict[str, set[str]] = {}
    for c in plan.sharding.collectives:
        assert c.where in plan_text(plan, limit=None)
        out.setdefault(c.kind, set()).add(c.where)
    return out


def test_operators_are_named_by_their_line() -> None:
    def step(w: Any, v: Any, x: Any) -> Any:
        hidden = x @ w  # gathered
        hidden = jnp.sin(hidden)
        return hidden @ v  # reduced

    pins = {"args[0]": P("x", None), "args[1]": P("x", None), "args[2]": P("x", None), "out*": P()}
    found = places(step, array(64, 64), array(64, 8), array(8, 64), constraints=pins)
    text = " ".join(w for kind in found.values() for w in kind)
    assert f"dot_general ({line_of(step, '# gathered')})" in text
    assert f"({line_of(step, '# reduced')})" in text


def test_a_result_is_named_by_what_it_comes_from() -> None:
    def step(x: Any) -> Any:
        return jnp.exp(x) * 2  # made

    (where,) = places(step, array(64, 8), constraints={"args[0]": P("x"), "out": P(None, "x")})["all-to-all"]
    assert where in (f"result, from mul ({line_of(step, '# made')})", f"mul ({line_of(step, '# made')})",
                     f"exp ({line_of(step, '# made')})")  # fmt: skip


def test_gradients_are_named_by_the_line_of_their_update() -> None:
    def step(w: Any, x: Any) -> Any:
        grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * grads  # update

    found = places(step, array(32, 32), array(64, 32), method="data_parallel", donate_argnums=(0,))
    assert found == {"all-reduce": {f"sub ({line_of(step, '# update')})"}} or found == {
        "all-reduce": {f"mul ({line_of(step, '# update')})"}
    }


def test_loops_and_branches_name_a_line_too() -> None:
    def step(w: Any, x: Any) -> Any:
        def turn(c: Any, _: Any) -> Any:
            c = jax.lax.cond(c[0, 0] > 0, lambda c: c @ w, lambda c: c, c)
            return jnp.tanh(c), c.sum()

        return jax.lax.scan(turn, x, None, length=3)

    found = places(step, array(64, 64), array(8, 64), constraints={"args[0]": P("x"), "args[1]": P("x"), "out*": P()})
    assert found
    for kind in found.values():
        for where in kind:
            assert "test_places.py:" in where, where


def test_every_collective_of_a_gpt_names_a_line() -> None:
    from examples.gpt.model import GPTConfig, make_train_step, train_step_args

    config = GPTConfig(vocab=64, seq=16, layers=2, hidden=32, heads=4, dropout=0.1)
    plan = autopar.parallelize(
        make_train_step(config), donate_argnums=(0,), cluster=SLOW_8, mesh=(2, 4), num_microbatches=2
    ).plan(*train_step_args(config, 16))
    assert plan.sharding.collectives
    assert not {c.where for c in plan.sharding.collectives if ".py:" not in c.where}
