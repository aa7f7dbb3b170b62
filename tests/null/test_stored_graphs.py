"""Graphs as plan files have them: nothing is lost, equal operators are there once, and what is damaged is refused."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

import autopar
from autopar.frontend.layering import layered
from autopar.frontend.trace import trace
from autopar.ir.errors import PlanFormatError, VerifyError
from autopar.ir.graph import Constant, Graph, Node, TensorType
from autopar.ir.layers import LayeredGraph
from autopar.ir.plan import Plan
from autopar.ir.serde import encode, from_json, plan_from_data, to_json
from autopar.ir.stored_graph import stored, stored_layers
from tests.clusters import cluster
from tests.null.test_planner_choice import array, chain

pytestmark = pytest.mark.xdist_group("stored graphs")  # one process makes what all tests of the file share

SCALAR = TensorType(shape=(), dtype="float32")
SMALL = cluster(2, flops_per_s=1e12, memory_bytes_per_s=1e11, latency_s=1e-6, bytes_per_s=1e11)


def loops(w: Any, x: Any) -> Any:
    """Every form of body, numbers that JSON does not have, and a kernel of the user's."""

    def body(carry: Any, w: Any) -> Any:
        return jnp.tanh(carry @ w), jnp.sum(carry)

    y, sums = jax.lax.scan(body, x, w)
    y = jax.lax.cond(jnp.sum(y) > 0, lambda y: y * 2, jnp.sin, y)
    y = jnp.where(y > 0, y, -jnp.inf) + jnp.abs(jax.lax.complex(y, y) * (1 + 2j))
    y = jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * 0.5, c[1] + 1), (y, 0))[0]
    scale = autopar.sharding_rule("scale", "b n -> b n", flops=12.0)(lambda v: jnp.take(v, 0, axis=1)[:, None] * v)
    return scale(y), sums


def looping() -> Graph:
    return trace(loops, array(3, 8, 8), array(4, 8)).graph


def in_layers(layers: int = 4) -> LayeredGraph:
    step, (params, x) = chain(width=16, examples=8)
    return layered(step, ([params[0]] * layers, x), {}, num_microbatches=2).graph


def whole(layers: int) -> Graph:
    step, (params, x) = chain(width=16, examples=8, marked=False)
    return trace(step, [params[0]] * layers, x).graph


def test_a_graph_makes_the_round_trip() -> None:
    graph = looping()
    told = to_json(graph)
    assert all(word in told for word in ('"-inf"', '"(1+2j)"', '"hidden_runs":1', '"flops":12.0'))
    back = from_json(Graph, told)
    assert back == graph  # the NaN that out of range is filled with, too
    assert repr(back) == repr(graph)
    assert '{"$number":"nan"}' in told
    back.verify()


def test_parameters_that_json_has_no_numbers_for_make_the_round_trip() -> None:
    node = Node(
        id=0, primitive="gather", params={"fill_value": math.nan, "of": (1, (-math.inf, {"a": 2.0}))}, operands=(0,),
        results=(1,), operand_types=(SCALAR,), result_types=(SCALAR,),
    )  # fmt: skip
    graph = Graph(values=(SCALAR, SCALAR), nodes=(node,), inputs=(0,), outputs=(1,))
    text = to_json(graph)
    assert '"fill_value":{"$number":"nan"}' in text
    assert repr(from_json(Graph, text)) == repr(graph)


def test_parameters_of_numpy_make_the_round_trip() -> None:
    kernel = Primitive("kernel")  # as cuDNN's attention is called with a scale of 1 / np.sqrt(size)
    kernel.def_abstract_eval(lambda x, **_: x)
    params = {"scale": np.float64(0.125), "rows": np.int64(3), "causal": np.bool(True)}
    graph = trace(lambda x: kernel.bind(x, **params), array(4)).graph
    assert graph.nodes[0].params == {"scale": 0.125, "rows": 3, "causal": True}
    assert repr(from_json(Graph, to_json(graph))) == repr(graph)


def test_equal_numbers_of_other_types_stay_apart() -> None:
    values = (0, 0.0, -0.0, False, 1, True, None)
    constants = tuple(Constant(type=SCALAR, value=value) for value in values)
    graph = Graph(values=(), nodes=(), inputs=(), outputs=constants)
    assert [repr(o) for o in from_json(Graph, to_json(graph)).outputs] == [repr(c) for c in constants]


def test_paths_make_the_round_trip() -> None:
    paths = ("args[0]", "args[0].w", "args[0].w2", "args", "", "x")
    graph = Graph(values=(SCALAR,) * 6, nodes=(), inputs=tuple(range(6)), outputs=(), arg_paths=paths)
    assert from_json(Graph, to_json(graph)).arg_paths == paths


@pytest.mark.parametrize("layers", [4, 6])
def test_a_step_in_layers_makes_the_round_trip(layers: int) -> None:
    graph = in_layers(layers)
    back = from_json(LayeredGraph, to_json(graph))
    assert back == graph
    back.verify()


def test_digests_that_do_not_follow_from_the_graph_are_stored() -> None:
    node = Node(
        id=0, primitive="neg", params={}, operands=(0,), results=(1,), operand_types=(SCALAR,), result_types=(SCALAR,),
        digest="mine",
    )  # fmt: skip
    graph = Graph(values=(SCALAR, SCALAR), nodes=(node,), inputs=(0,), outputs=(1,), fingerprint="")
    assert from_json(Graph, to_json(graph)) == graph
    assert stored(looping()).tables.graphs[-1].digests == ()


@pytest.mark.slow
@pytest.mark.parametrize("make", [whole, in_layers])
def test_operators_are_stored_once_however_deep_a_step_is(make: Callable[[int], Graph | LayeredGraph]) -> None:
    def tables(layers: int) -> Any:
        graph = make(layers)
        return (stored(graph) if isinstance(graph, Graph) else stored_layers(graph)).tables

    assert tables(24).operators == tables(12).operators
    assert len(tables(24).graphs) == len(tables(12).graphs)
    more = len(to_json(make(24))) - len(to_json(make(12)))
    assert 0 < more / 12 < 400  # bytes a layer: names of its arguments, what it reads and gives


def test_rows_of_a_layer_are_those_of_the_layer_before() -> None:
    rows = {layers: len(stored(whole(layers)).tables.graphs[-1].nodes) for layers in (12, 24)}
    assert rows[24] == rows[12]
    assert from_json(Graph, to_json(whole(24))) == whole(24)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": (1,)}, "values are not numbered in order"),
        ({"nodes": (3,)}, "neg (node 3) is node 0; its operands are float32[]"),
    ],
)
def test_graphs_that_are_not_in_order_are_not_written(change: dict[str, Any], message: str) -> None:
    def node(number: int) -> Node:
        return Node(
            id=number, primitive="neg", params={}, operands=(0,), results=(1,), operand_types=(SCALAR,),
            result_types=(SCALAR,),
        )  # fmt: skip

    graph = Graph(values=(SCALAR, SCALAR), nodes=(node(0),), inputs=(0,), outputs=(1,))
    nodes = tuple(map(node, change.pop("nodes", (0,))))
    with pytest.raises(VerifyError, match=re.escape(message)):
        to_json(replace(graph, nodes=nodes, **change))


# In plans ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program() -> Plan:
    """A plan of one program, with a loop."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            y, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)
            return jnp.mean(y**2)

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    return autopar.parallelize(step, cluster=SMALL, mesh=2, donate_argnums=0).plan(array(3, 8, 8), array(4, 8)).data


@pytest.fixture(scope="module")
def pipeline() -> Plan:
    """A plan of two stages."""
    step, args = chain(width=16, examples=8)
    return autopar.parallelize(step, cluster=SMALL, stages=2, num_microbatches=2, workers=1).plan(*args).data


def test_plans_hold_their_graph(program: Plan, pipeline: Plan) -> None:
    for plan in (program, pipeline):
        assert plan.step is not None
        assert plan.step.graph.fingerprint == plan.fingerprint
        assert from_json(Plan, to_json(plan)) == plan


def _at(*keys: str | int, to: Any) -> Callable[[Any], None]:
    def edit(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = to

    return edit


GRAPH = ("step", "graph")
TABLES = (*GRAPH, "tables")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_at(*TABLES, "graphs", -1, "nodes", 1, 0, to=99), "$.step.graph: graph 2, node 1: operator 99 of "),
        (_at(*TABLES, "graphs", -1, "nodes", 1, to=[-1]), "$.step.graph: graph 2, node 1: no (-1,) of 1 rows"),
        (_at(*TABLES, "graphs", -1, "nodes", 1, to=[]), "$.step.graph: graph 2, node 1: no operator"),
        (_at(*TABLES, "graphs", -1, "nodes", 1, to=[-9, 2]), "graph 2, node 1: no (-9, 2) of 1 rows"),
        (_at(*TABLES, "graphs", -1, "nodes", 1, to=[-1, 10**9]), "graph 2, node 1: no (-1, 1000000000) of 1 rows"),
        (_at(*TABLES, "graphs", -1, "length", to=1), "graph 2: 10 nodes, of 1"),
        (_at(*TABLES, "paths", 1, 0, to=99), "path 1 has 99 characters of "),
        (_at(*TABLES, "graphs", -1, "nodes", 0, 1, to=77), "graph 2, node 0: value 77, before which there are only "),
        (_at(*TABLES, "graphs", -1, "nodes", 0, 1, to=-50), "graph 2, node 0: constant 49 of "),
        (_at(*TABLES, "graphs", -1, "inputs", 0, to=50), "graph 2: type 50 of "),
        (_at(*TABLES, "graphs", -1, "arg_paths", 0, 1, to=50), "graph 2: no paths 0 to 50 of "),
        (_at(*TABLES, "graphs", -1, "nodes", 0, to="x"), '.nodes[0]: expected an array, got "x"'),
        (_at(*TABLES, "types", 0, "dtype", to="float33"), "$.step.graph: unknown dtype 'float33'"),
        (_at(*TABLES, "operators", 0, "primitive", to="mul"), "the graph is of another step than the plan"),
        (_at(*TABLES, "operators", 0, "hidden_runs", to=0), "runs its body 0 times, or takes None FLOPs"),
        (
            _at(*TABLES, "graphs", -1, "donated", to=[]),
            "its new value, or who takes its buffer, is not as in",
        ),
        (_at(*GRAPH, "type", to="Plan"), '$.step.graph.type: expected one of Graph, LayeredGraph, got "Plan"'),
        (_at("step", "batch_inputs", to=[[1, 7]]), "no input 1 of the step has a dimension 7"),
        (_at("inputs", 1, "type", "dtype", to="int32"), "the plan's arguments are not those of its graph"),
        (_at("outputs", 0, "path", to="out[7]"), "the plan's results are not those of its graph"),
        (_at("body", "sharding", "root", "nodes", to=[0] * 50), "step: decisions for 50 nodes, the graph has "),
        (_at("body", "sharding", "root", "nodes", 1, to=-1), "has 0 bodies, other than its decisions say"),
        (_at("body", "sharding", "root", "bodies", to=[]), "bodies, other than its decisions say"),
        (_at("body", "sharding", "root", "inputs", to=[]), "step, inputs: shardings  are not of float32[3,8,8]"),
        (_at("body", "sharding", "strategies", 0, "operands", to=[]), "operands of "),
    ],
)
def test_a_damaged_graph_of_one_program_is_refused(program: Plan, edit: Any, message: str) -> None:
    data: Any = json.loads(to_json(program))
    edit(data)
    with pytest.raises(PlanFormatError, match=re.escape(message)):
        plan_from_data(data)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_at(*GRAPH, "layers", 0, "kind", to=9), "$.step.graph: layer 0 block 0: kind 9 of "),
        (_at(*GRAPH, "kinds", 0, "forward", to=99), "$.step.graph: kind 0: graph 99 of "),
        (_at(*GRAPH, "kinds", 0, "seeds", to=[5]), "cotangents are of results (5,) of 1"),
        (_at(*GRAPH, "update", to=-1), "$.step.graph: update: graph -1 of "),
        (_at(*GRAPH, "update_layers", 0, to=99), "$.step.graph: update_layers: owner 99 of "),
        (_at(*GRAPH, "values", 0, to=99), "$.step.graph: values: type 99 of "),
        (_at(*GRAPH, "per_microbatch", to=[99]), "$.step.graph: per_microbatch: entry 99 of "),
        (_at(*GRAPH, "layers", 0, "operands", to=[0]), "operands or results are not its kind's"),
        (_at(*GRAPH, "layers", 0, "operands", 0, to=999), "value 999 of "),
        (_at(*GRAPH, "trained", 0, to=-3), "value -3 of "),
        (_at(*GRAPH, "num_microbatches", to=0), "0 microbatches"),
        (_at(*GRAPH, "num_microbatches", to=4), "the graph is of another step than the plan"),
        (_at(*GRAPH, "layers", 1, "name", to="mine"), "layer 1 is block 1 in the plan, mine in its graph"),
        (_at("step", "batch_inputs", to=[[0, 0]]), "no input 0 of the step has a dimension 0"),
    ],
)
def test_a_damaged_step_in_layers_is_refused(pipeline: Plan, edit: Any, message: str) -> None:
    data: Any = json.loads(to_json(pipeline))
    edit(data)
    name = data["body"]["layers"][0]["name"]
    message = message.replace("block 0", name).replace("block 1", pipeline.pipelined.layers[1].name)
    with pytest.raises(PlanFormatError, match=re.escape(message)):
        plan_from_data(data)


def test_a_graph_of_the_other_kind_is_refused(program: Plan, pipeline: Plan) -> None:
    assert program.step is not None and pipeline.step is not None
    other = replace(pipeline, step=program.step, fingerprint=program.fingerprint, inputs=program.inputs)
    with pytest.raises(VerifyError, match="the plan's results are not those of its graph"):
        other.verify()
    other = replace(other, outputs=program.outputs)
    with pytest.raises(VerifyError, match="the plan's graph is in layers and its body is not, or the other way round"):
        other.verify()


def _places(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if path:
        yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from _places(value, (*path, key))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("which", ["program", "pipeline"])
def test_whatever_is_edited_is_read_or_refused(request: pytest.FixtureRequest, which: str, seed: int) -> None:
    """Never a traceback, and never another graph under the plan's fingerprint."""
    plan: Plan = request.getfixturevalue(which)
    rng = random.Random(seed)
    data: Any = json.loads(json.dumps(encode(plan)))
    places = [("step", *path) for path in _places(data["step"])]
    for _ in range(150):
        *way, last = rng.choice(places)
        at = data
        for key in way:
            at = at[key]
        before = at[last]
        values: list[Any] = [-1, 0, 3, 10**6, None, "x", 1.5, True, [], [0], {}]
        values += [before + 1, before - 1] if type(before) is int else []
        values += [before[1:], before[:-1], before * 2] if isinstance(before, list) else []
        at[last] = rng.choice(values)
        try:
            read = plan_from_data(data)
        except PlanFormatError:
            pass
        else:
            assert read.step is None or read.step.graph.fingerprint == plan.fingerprint
        at[last] = before
    assert plan_from_data(data) == plan
