"""What the compiler would simplify is simplified before planning, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.frontend.trace import trace

X = jax.ShapeDtypeStruct((4, 6), np.float32)
ROW = jax.ShapeDtypeStruct((1, 6), np.float32)


def primitives(fun: Callable[..., Any], *args: Any) -> list[str]:
    return [node.primitive for node in trace(fun, *(args or (X,))).graph.nodes]


def constant_carry(x: Any) -> Any:
    return lax.scan(lambda c, row: (c * 0.5 + row, c), jnp.zeros(6), x[:1])


REMOVED: dict[str, Callable[[Any], Any]] = {
    "adding zeros": lambda x: jnp.sin(x + jnp.zeros_like(x)),
    "a factor of one": lambda x: jnp.sin((jnp.ones(()) * 1.0) * x / 1.0),
    "reshapes there and back": lambda x: jnp.sin(x.reshape(24).reshape(2, 12).reshape(4, 6)),
    "reversing a dimension of one": lambda x: jnp.sin(lax.rev(x[None], (0,))[0]),
    "padding by nothing": lambda x: jnp.sin(lax.pad(x, 0.0, [(0, 0, 0)] * 2)),
    "an empty part of a concatenation": lambda x: jnp.sin(jnp.concatenate([x[:0], x])),
    "choosing by a constant": lambda x: jnp.sin(lax.select(jnp.full((4, 6), True), x, -x)),
    "a sum over a dimension of one": lambda x: jnp.sin(x[None].sum(0)),
    "the larger of equals": lambda x: jnp.sin(jnp.maximum(x, x)),
    "two signs": lambda x: jnp.sin(jnp.negative(-x)),
    "a cumulative sum of single rows": lambda x: jnp.sin(jnp.cumsum(x[None], 0)[0]),
}


@pytest.mark.parametrize("name", REMOVED)
def test_what_changes_nothing_is_gone(name: str) -> None:
    assert primitives(REMOVED[name]) == ["sin"]


CONSTANT: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda x: jnp.cos(jnp.full((4, 6), 2.0)) / 3 + 1,
    "moves": lambda x: jnp.ones((2, 12)).T.reshape(4, 6)[::-1],
    "an iota of one": lambda x: lax.broadcasted_iota(np.int32, (4, 1), 1) + 1,
    "the place of the only element": lambda x: jnp.argmax(x[None], 0) + 1,
    "padding that cuts all off": lambda x: lax.pad(x, 3.0, [(4, -4, 0), (0, 0, 0)]),
    "equal pieces": lambda x: jnp.concatenate([jnp.ones((1, 6)), jnp.ones((3, 6))]),
}


@pytest.mark.parametrize("name", CONSTANT)
def test_what_is_one_number_everywhere_is_made_where_it_is_read(name: str) -> None:
    fun = CONSTANT[name]
    traced = trace(lambda x: x * (fun(x)[:1, :1] + 1), X)
    assert [n.primitive for n in traced.graph.nodes if n.operands and isinstance(n.operands[0], int)] == ["mul"]
    x = jnp.arange(24, dtype=np.float32).reshape(4, 6)
    got = jax.core.eval_jaxpr(traced.jaxpr.jaxpr, traced.jaxpr.consts, x)[0]
    np.testing.assert_allclose(got, x * (fun(x)[:1, :1] + 1), rtol=1e-6)


def test_equal_equations_are_one() -> None:
    assert primitives(lambda x: jnp.tanh(x * x.T.T) + jnp.tanh(x.T.T * x)) == ["mul", "tanh", "add"]
    assert primitives(lambda x: (x[0] * x[1], x[1] * x[0])).count("mul") == 1
    assert primitives(lambda x: (x[0] - x[1], x[1] - x[0])).count("sub") == 2


def test_an_operator_on_a_reshaped_value_is_the_reshaped_result() -> None:
    names = primitives(lambda x: (jnp.tanh(x), 1 - jnp.tanh(x.reshape(24)), 1 - jnp.tanh(x)))
    assert sorted(names) == ["reshape", "sub", "tanh"] or sorted(names) == ["reshape", "sub", "sub", "tanh"]
    assert names.count("tanh") == 1


def test_a_scan_of_length_one_is_its_body() -> None:
    assert "scan" not in primitives(constant_carry)
    assert "scan" in primitives(lambda x: lax.scan(lambda c, row: (c * 0.5 + row, c), jnp.zeros(6), x))


def test_a_loop_knows_its_constants() -> None:
    def step(x: Any) -> Any:
        zeros, twice, double = jnp.zeros(6), x[0] * 2, 2 * x[0]
        return lax.scan(lambda c, row: (c + row * zeros + row * twice, c * double), x[0], x)

    (scan,) = [n for n in trace(step, X).graph.nodes if n.primitive == "scan"]
    (body,) = scan.bodies
    used = {o for node in body.nodes for o in node.operands if isinstance(o, int)} & set(body.inputs)
    assert len(used) <= 3  # the carry, the row, and one constant


def test_what_no_turn_changes_is_made_before_the_loop() -> None:
    def step(x: Any) -> Any:
        """A loop that may make no turn: another that may not end stays inside, whatever it starts from."""
        halves = lambda x: lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: x / 2, x)
        turn = lambda c: c * jnp.tanh(x) + halves(x) + jnp.arange(6.0)
        return lax.while_loop(lambda c: jnp.sum(c) < 3, turn, x)

    nodes = trace(step, X).graph.nodes
    assert {n.primitive for n in nodes} - {"reshape"} == {"iota", "tanh", "while"}
    body = nodes[-1].bodies[1]
    assert {"mul", "while", "add"} == {n.primitive for n in body.nodes} - {"broadcast_in_dim"}


def test_different_values_stay_apart() -> None:
    assert primitives(lambda x: (x + 1, x + 2)).count("add") == 2
    assert primitives(lambda x: x * jnp.zeros_like(x)) == ["broadcast_in_dim", "mul"]  # not a number times zero
    assert primitives(lambda x: (x.reshape(24), x.T.reshape(24))) == ["reshape", "transpose", "reshape"]
