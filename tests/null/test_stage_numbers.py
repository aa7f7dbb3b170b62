"""A stage's graph, run with numpy, against the step's loss differentiated by differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

import autopar
from autopar.frontend.layering import layered
from autopar.inter_op.stage_graph import stage_graph
from autopar.ir.graph import Constant, Graph, Node
from autopar.ir.layers import RECEIVE, StageGraph

WIDTH, ROWS, COUNT = 3, 2, 4
STEP = 1e-5
"""Of a central difference: off by its square."""

Values = dict[int, Any]


def dot(node: Node, x: Any, y: Any) -> Any:
    ((a,), (b,)), batch = node.params["dimension_numbers"]
    assert batch == ((), ())
    return np.tensordot(x, y, axes=(a, b))


RULES: Mapping[str, Callable[..., Any]] = {
    "add": lambda node, x, y: x + y,
    "add_any": lambda node, x, y: x + y,
    "broadcast_in_dim": lambda node, x: np.broadcast_to(x, node.params["shape"]),
    "cos": lambda node, x: np.cos(x),
    "div": lambda node, x, y: x / y,
    "dot_general": dot,
    "integer_pow": lambda node, x: x ** node.params["y"],
    "mul": lambda node, x, y: x * y,
    "neg": lambda node, x: -x,
    "one_minus_square": lambda node, x: 1 - x * x,  # jax 0.12's, of tanh
    "reduce_sum": lambda node, x: np.sum(x, axis=node.params["axes"]),
    "sin": lambda node, x: np.sin(x),
    "sub": lambda node, x, y: x - y,
    "tanh": lambda node, x: np.tanh(x),
    "transpose": lambda node, x: np.transpose(x, node.params["permutation"]),
}


def run(graph: Graph, values: Values, nodes: range, received: Mapping[int, Any]) -> None:
    """Some nodes of a graph; ``received``: by number of the node."""
    for number in nodes:
        node = graph.nodes[number]
        if node.primitive == RECEIVE:
            values[node.results[0]] = received[number]
        elif node.results:
            values[node.results[0]] = RULES[node.primitive](node, *(operand(values, o) for o in node.operands))


def operand(values: Values, o: Any) -> Any:
    return np.full(o.type.shape, o.value, float) if isinstance(o, Constant) else values[o]


def summed(stages: list[StageGraph], weights: Mapping[int, Any], batch: int, x: Any) -> dict[int, Any]:
    """Gradients by value, over all microbatches, of stages that send each other what crosses. ``weights``: by value;
    ``batch``: the value that a microbatch of the batch is."""
    totals = {v: np.zeros((WIDTH, WIDTH)) for v in weights}
    for rows in np.split(x, COUNT):
        sent: dict[tuple[int, str], Any] = {(batch, "forward"): rows}
        every: list[Values] = []
        for phase in ("forward", "backward"):
            for at in range(len(stages)) if phase == "forward" else reversed(range(len(stages))):
                stage, body = stages[at], stages[at].body
                if phase == "forward":
                    own = [weights[v] for v in stage.input_values]
                    loop = stage.graph.nodes[stage.loop]
                    consts = [own[stage.graph.inputs.index(o)] for o in loop.operands[: len(own)]]
                    zeros = [np.zeros((WIDTH, WIDTH))] * (len(body.inputs) - len(consts))
                    every.append(dict(zip(body.inputs, (*consts, *zeros), strict=True)))
                nodes = range(stage.boundary) if phase == "forward" else range(stage.boundary, len(body.nodes))
                ports = [port for port in stage.receives if port.phase == phase]
                # a cotangent that is a constant, as zero is of what is not differentiated, is not sent
                have = {p.node: sent.get((p.value, phase), np.zeros(p.type.shape)) for p in ports}
                run(body, every[at], nodes, have)
                for p in stage.sends:
                    if p.phase == phase:
                        key = (p.value, phase)
                        sent[key] = sent.get(key, 0.0) * (phase == "backward") + every[at][p.stored]
        for stage, values in zip(stages, every, strict=True):
            read = [v for v in weights if v in stage.input_values]  # gradient sums are in the order of the step's
            for v, out in zip(read, stage.body.outputs, strict=False):
                totals[v] = totals[v] + operand(values, out)
    return totals


def skips(np: Any, a: Any, b: Any, x: Any, mark: Any, stop: Any) -> Any:
    """Read two layers on, and a weight read twice; without what is read but not differentiated."""
    first = np.tanh(x @ a)
    aside, first = mark((np.cos(x @ a), first))
    second = mark(np.tanh(first @ b))
    return np.mean((np.tanh(second @ a + first) + stop(aside)) ** 2)


@pytest.mark.parametrize("starts", [(0,), (0, 1), (0, 2), (0, 1, 2)])
def test_gradients_are_those_of_differences(starts: tuple[int, ...]) -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any, batch: Any) -> Any:
            return skips(jnp, params["a"], params["b"], batch, autopar.layer_boundary, jax.lax.stop_gradient)

        value, grads = autopar.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    shapes = ({"a": weight, "b": weight}, jax.ShapeDtypeStruct((COUNT * ROWS, WIDTH), jnp.float32))
    graph = layered(step, shapes, num_microbatches=COUNT, donate_argnums=(0,)).graph
    ends = (*starts[1:], len(graph.layers))
    stages = [stage_graph(graph, i, j, ["none"] * (j - i)) for i, j in zip(starts, ends, strict=True)]
    rng = np.random.default_rng(0)
    a, b, x = rng.normal(size=(WIDTH, WIDTH)), rng.normal(size=(WIDTH, WIDTH)), rng.normal(size=(COUNT * ROWS, WIDTH))
    value_a, value_b, batch = graph.arguments
    assert graph.trained == (value_a, value_b)
    found = summed(stages, {value_a: a, value_b: b}, batch, x)

    def number(a: Any, b: Any, fixed: Any) -> float:
        return float(skips(np, a, b, x, lambda made: made, lambda _: fixed))

    aside = np.cos(x @ a)
    wanted_a, wanted_b = np.zeros_like(a), np.zeros_like(b)
    for at in np.ndindex(a.shape):
        more: NDArray[np.float64] = np.zeros_like(a)
        more[at] = STEP
        wanted_a[at] = (number(a + more, b, aside) - number(a - more, b, aside)) / (2 * STEP)
        wanted_b[at] = (number(a, b + more, aside) - number(a, b - more, aside)) / (2 * STEP)
    np.testing.assert_allclose(found[value_a], wanted_a, atol=1e-8)
    np.testing.assert_allclose(found[value_b], wanted_b, atol=1e-8)
