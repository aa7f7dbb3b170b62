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
DERIVATIVE = "sub" if jax.__version_info__ < (0, 12) else "one_minus_square"
"""Of jnp.tanh, what stands in the backward pass."""


@jax.custom_jvp
def tanh(x: Any) -> Any:
    """With the derivative as jax 0.10 has it, whichever jax it is: t and 1 - t of the result t are handed over."""
    return jnp.tanh(x)


@tanh.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x,), (g,) = primals, tangents
    t = tanh(x)
    return t, (g + g * t) * (1.0 - t)


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


def descent(block: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], Any]:
    """A step of three blocks, and its arguments."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            for w in params:
                x = block(w, x)
            return jnp.mean(x**2)

        value, grads = autopar.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step, ([square()] * 3, square())


def layers(step: Callable[..., Any], args: Any) -> list[Graph]:
    """Of each layer forward and backward, without rematerialisation."""
    graph = layered(step, args, num_microbatches=1, platform="cpu").graph
    return [graph.kinds[layer.kind].joint[0] for layer in graph.layers]


def graph_of(fun: Callable[..., Any], *args: Any, keep_remat: bool = True) -> Graph:
    return trace(fun, *args, keep_remat=keep_remat).graph


@pytest.mark.parametrize(
    ("act", "ops"),
    [
        (jax.nn.relu, {}),  # its mask is handed over: x is not
        (lambda x: x * jax.nn.relu(x), {"gt": 2}),
        (jnp.tanh, {DERIVATIVE: 2}),
        (tanh, {"sub": 2}),
        (lambda x: x * 3.0, {}),  # nothing of the forward is handed over
        (lambda x: jnp.sin(x), {}),  # the cosine is a function, computed once
    ],
    ids=["relu", "gated-relu", "tanh", "own-tanh", "linear", "sine"],
)
@pytest.mark.parametrize("checkpoint", [False, True], ids=["plain", "inlined-checkpoint"])
def test_what_only_the_backward_pass_reads_is_its_readers(act: Any, ops: dict[str, int], checkpoint: bool) -> None:
    fun = gradients(act, checkpoint=checkpoint)
    assert marked(graph_of(fun, [square()] * 2, square(), keep_remat=False)) == ops


def test_arithmetic_on_what_is_computed_again_is_its_readers() -> None:
    """Of a checkpointed step, and of layers that compute the same again: 1 − tanh² of each tanh."""
    fun = gradients(tanh, checkpoint=True)
    graph = graph_of(fun, [square()] * 2, square())
    again = [body for node in graph.nodes if node.primitive in ("checkpoint", "remat2") for body in node.bodies]
    assert len(again) == 2 and all(marked(body) == {"sub": 1} for body in again)
    step, args = descent(lambda w, x: tanh(x @ w))
    graph = layered(step, args, num_microbatches=1, platform="cpu", layers=3).graph
    for layer in graph.layers[:-1]:
        assert all(marked(joint)["sub"] == 1 for joint in graph.kinds[layer.kind].joint)


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
    assert not any(node.fused for node in graph.nodes)  # sums of gradients begin with numbers that are written
    found, times = marked(graph), 1 if scanned else 2
    assert found["sub"] == found["mul"] == times  # not what g is multiplied with


@pytest.mark.parametrize("act", [lambda x: x * jax.nn.relu(x), jax.nn.gelu, tanh], ids=["gated-relu", "gelu", "tanh"])
def test_layers_and_one_program_agree(act: Any) -> None:
    """Operator by operator: what is marked as one program is in layers, which make more again for themselves."""
    step, args = descent(lambda w, x: act(x @ w))
    whole = marked(autopar.parallelize(step, cluster="cpu:1", stages=1, num_microbatches=1).plan(*args).data.step.graph)
    in_layers: Counter[str] = sum((marked(graph) for graph in layers(step, args)), Counter())
    assert whole and not whole - in_layers


def normalised(x: Any, w: Any) -> Any:
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * w


@pytest.mark.parametrize("loss", ["mean", "masked", "scaled"])
def test_marks_do_not_depend_on_what_the_step_returns(loss: str) -> None:
    """Without the loss the whole forward pass is for the backward pass alone, and is not made by readers."""

    def value(ws: Any, x: Any, mask: Any) -> Any:
        for w in ws:
            x = x + jax.nn.gelu(normalised(x, w[0]) @ w) @ w
        each = jnp.mean(x**2, -1)
        if loss == "masked":
            return jnp.sum(each * mask) / jnp.sum(mask)
        return jnp.mean(each) * (128.0 if loss == "scaled" else 1.0)

    args = [square()] * 2, square(), square(WIDTH)
    both = marked(graph_of(jax.value_and_grad(value), *args))
    assert both and marked(graph_of(jax.grad(value), *args)) == both
    assert not set(both) & {"tanh", "rsqrt", "dot_general", "reduce_sum"}


def test_training_in_a_loop_is_a_step_at_a_time() -> None:
    def step(w: Any, x: Any) -> tuple[Any, None]:
        return w - jax.grad(lambda w: jnp.mean(tanh(x @ w) ** 2))(w), None

    one = marked(graph_of(step, square(), square()))
    assert one["sub"] == 1
    assert marked(graph_of(lambda w, xs: jax.lax.scan(step, w, xs), square(), square(3, WIDTH, WIDTH))) == one


@pytest.mark.parametrize("power", [1, 2], ids=["begins-with-numbers", "begins-with-values"])
def test_carries_that_become_cotangents_are_such(power: int) -> None:
    """That of h begins with an argument."""

    def loss(w: Any, x: Any, v: Any) -> Any:
        def turn(carry: Any, _: None) -> Any:
            h, total = carry
            return (0.5 * h, total + own_tanh(h @ w)), None

        h, total = jax.lax.scan(turn, (x, x), length=3)[0]
        return jnp.mean(total**power) + jnp.sum(h * v)

    graph = graph_of(jax.value_and_grad(loss, argnums=(0, 1)), square(), square(), square())
    loops = [node for node in graph.nodes if node.phase == "backward" and node.bodies]
    assert [n.primitive for node in loops for n in node.bodies[0].nodes].count("mul") > 2
    assert sum((marked(node.bodies[0]) for node in loops), Counter()) == {"mul": 1, "sub": 1}  # 1 - t * t


def test_functions_in_loops_are_computed() -> None:
    policy = jax.checkpoint_policies.dots_saveable
    block = jax.checkpoint(lambda x, w: jnp.sin(x @ w), policy=policy)

    def loss(ws: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda x, w: (block(x, w), None), x, ws)[0] ** 2)

    graph = graph_of(jax.value_and_grad(loss), square(3, WIDTH, WIDTH), square(), keep_remat=False)
    assert any(node.primitive == "cos" for node in every(graph)) and "cos" not in marked(graph)


def test_nodes_without_results_are_no_part_of_it() -> None:
    def block(w: Any, x: Any) -> Any:
        y = tanh(x @ w)
        jax.debug.print("{}", y.sum())
        return y

    fun = jax.value_and_grad(lambda w, x: jnp.mean(jax.checkpoint(block)(w, jax.checkpoint(block)(w, x)) ** 2))
    assert marked(graph_of(fun, square(), square(), keep_remat=False))["sub"] == 2


@jax.custom_vjp
def coarse(x: Any) -> Any:
    return jnp.tanh(x)


coarse.defvjp(lambda x: (jnp.tanh(x), (16 * x).astype(jnp.int8)), lambda q, g: (g * q.astype(jnp.float32) / 16,))


def test_what_a_layer_hands_to_its_backward_pass_is_computed() -> None:
    nodes = [node for graph in layers(*descent(lambda w, x: coarse(x) @ w)) for node in graph.nodes]
    assert "convert_element_type" in {node.primitive for node in nodes if node.phase == "forward"}
    assert not any(node.fused for node in nodes if node.phase == "forward")


def test_functions_of_weights_are_computed() -> None:
    fun = jax.value_and_grad(lambda w, x: jnp.mean((x @ jnp.sin(w)) ** 2))
    graph = graph_of(fun, square(), square())
    assert "cos" in {n.primitive for n in graph.nodes} and "cos" not in marked(graph)
