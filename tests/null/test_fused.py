"""What readers make for themselves, as one program and in layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.frontend.layering import layered
from autopar.frontend.trace import trace
from autopar.ir.graph import Graph, Node

WIDTH = 8


def square(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape or (WIDTH, WIDTH), jnp.float32)


def every(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        yield node
        for body in node.bodies:
            yield from every(body)


def marked(graph: Graph) -> Counter[str]:
    return Counter(node.primitive for node in every(graph) if node.fused)


def gradients(act: Callable[[Any], Any], *, checkpoint: bool = False) -> Callable[[Any, Any], Any]:
    def block(w: Any, x: Any) -> Any:
        return act(x @ w)

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = (jax.checkpoint(block) if checkpoint else block)(w, x)
        return jnp.sum(x @ params[0])

    return jax.value_and_grad(loss)


def graph_of(fun: Callable[..., Any], *args: Any, keep_remat: bool = True) -> Graph:
    return trace(fun, *args, keep_remat=keep_remat).graph


@pytest.mark.parametrize(
    ("act", "ops"),
    [
        (jax.nn.relu, {}),  # its mask is handed over: x is not
        (lambda x: x * jax.nn.relu(x), {"gt": 2}),
        (jnp.tanh, {"sub": 2}),
        (lambda x: x * 3.0, {}),  # nothing of the forward is handed over
        (lambda x: jnp.sin(x), {}),  # the cosine is a function, computed once
    ],
    ids=["relu", "gated-relu", "tanh", "linear", "sine"],
)
@pytest.mark.parametrize("checkpoint", [False, True], ids=["plain", "inlined-checkpoint"])
def test_what_only_the_backward_pass_reads_is_its_readers(act: Any, ops: dict[str, int], checkpoint: bool) -> None:
    fun = gradients(act, checkpoint=checkpoint)
    assert marked(graph_of(fun, [square()] * 2, square(), keep_remat=False)) == ops


def test_what_is_computed_again_is_not_its_readers() -> None:
    fun = gradients(jnp.tanh, checkpoint=True)
    graph = graph_of(fun, [square()] * 2, square())
    again = [body for node in graph.nodes if node.primitive in ("checkpoint", "remat2") for body in node.bodies]
    assert again and not any(marked(body) for body in again)


def test_what_the_forward_pass_hands_on_is_made_once() -> None:
    def fun(w: Any, x: Any) -> Any:
        def loss(w: Any) -> tuple[Any, Any]:
            mask = x @ w > 0
            return jnp.sum(jnp.where(mask, x @ w, 0.0) @ w), mask

        return jax.grad(loss, has_aux=True)(w)

    assert "gt" not in marked(graph_of(fun, square(), square()))


def test_cotangents_and_updates_are_computed() -> None:
    def fun(state: tuple[Any, Any], x: Any) -> Any:
        w, moments = state
        grad = jax.grad(lambda w: jnp.mean((x @ w - x) ** 2))(w)
        moments = 0.9 * moments + 0.1 * grad
        return w - moments, moments

    graph = graph_of(fun, (square(), square()), square())
    assert not marked(graph) - Counter({"mul": 1})  # the square's derivative, twice what was squared
    assert not any(node.fused for node in graph.nodes if node.phase == "update")


@jax.custom_vjp
def own_tanh(x: Any) -> Any:
    return jnp.tanh(x)


own_tanh.defvjp(lambda x: (jnp.tanh(x),) * 2, lambda t, g: ((1.0 - t * t) * g,))


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
def test_loops_of_layers_and_of_microbatches(scanned: bool) -> None:
    def fun(ws: Any, x: Any) -> Any:
        def loss(ws: Any, x: Any) -> Any:
            if scanned:
                x, _ = jax.lax.scan(lambda x, w: (own_tanh(x @ w), None), x, ws)
            else:
                x = own_tanh(own_tanh(x @ ws[0]) @ ws[1])
            return jnp.sum(x @ ws[0])

        value, grads = autopar.value_and_grad(loss)(ws, x)
        return ws - grads, value

    step = autopar.parallelize(fun, cluster="cpu:2", stages=1, num_microbatches=2)
    graph = step.plan(square(4, WIDTH, WIDTH), square()).data.step.graph
    assert [node.primitive for node in graph.nodes if node.bodies] == ["scan"]
    found, times = marked(graph), 1 if scanned else 2
    assert found["sub"] == found["mul"] == times  # not what g is multiplied with


@pytest.mark.parametrize(
    "act", [lambda x: x * jax.nn.relu(x), jax.nn.gelu, jnp.tanh], ids=["gated-relu", "gelu", "tanh"]
)
def test_layers_and_one_program_agree(act: Any) -> None:
    """Operator by operator: what is marked as one program is in layers, which make more again for themselves."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            for w in params:
                x = act(x @ w)
            return jnp.mean(x**2)

        value, grads = autopar.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    args = [square()] * 3, square()
    layers = layered(step, args, num_microbatches=1, platform="cpu")
    in_layers: Counter[str] = sum((marked(layers.graph.kinds[x.kind].joint[0]) for x in layers.graph.layers), Counter())
    whole = marked(autopar.parallelize(step, cluster="cpu:1", stages=1, num_microbatches=1).plan(*args).data.step.graph)
    assert whole and not whole - in_layers
