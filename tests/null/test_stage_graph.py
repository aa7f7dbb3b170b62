"""Stages of a step: what goes out of one comes in at another, and together they are the step."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cost.roofline import flops
from autopar.frontend.layering import layered
from autopar.inter_op.stage_graph import stage_graph
from autopar.ir.graph import Graph
from autopar.ir.layers import RECEIVE, SEND, LayeredGraph, StageGraph
from benchmarks.models import gpt

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("stage graph")]  # what all share is made once

PAIRS = ("forward", "backward", "gradient")


def small_gpt(scan: bool) -> LayeredGraph:
    step, args = gpt(layers=4, hidden=32, heads=4, seq=16, vocab=64, batch=8, scan=scan)
    return layered(step, args, num_microbatches=4, donate_argnums=(0,)).graph


def skipping() -> LayeredGraph:
    """A value that is read two layers on, a weight that two layers share, and a global norm of the gradients."""

    def loss(params: Any, x: Any) -> Any:
        first = autopar.layer_boundary(jnp.tanh(x @ params["a"]))
        second = autopar.layer_boundary(jnp.tanh(first @ params["b"]))
        third = autopar.layer_boundary(jnp.tanh(second @ params["a"] + first))
        return jnp.mean(third**2)

    def step(params: Any, x: Any) -> Any:
        value, grads = autopar.value_and_grad(loss)(params, x)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda p, g: p - 0.1 * g / norm, params, grads), value

    params = {k: jax.ShapeDtypeStruct((8, 8), jnp.float32) for k in "ab"}
    batch = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    return layered(step, (params, batch), num_microbatches=4, donate_argnums=(0,)).graph


STEPS = {"gpt": lambda: small_gpt(False), "gpt scan": lambda: small_gpt(True), "skipping": skipping}


@pytest.fixture(
    scope="module",
    params=[pytest.param("gpt", marks=pytest.mark.full), pytest.param("gpt scan", marks=pytest.mark.full), "skipping"],
)
def graph(request: pytest.FixtureRequest) -> LayeredGraph:
    return STEPS[request.param]()


def cut(graph: LayeredGraph, *starts: int) -> list[StageGraph]:
    ends = (*starts[1:], len(graph.layers))
    return [stage_graph(graph, a, b, ["none"] * (b - a)) for a, b in zip(starts, ends, strict=True)]


def total_flops(graph: Graph) -> float:
    """FLOPs of contractions."""
    own = sum(flops(n) for n in graph.nodes if n.primitive == "dot_general")
    return own + sum(n.params.get("length", 1) * sum(map(total_flops, n.bodies)) for n in graph.nodes)


def all_cuts(graph: LayeredGraph) -> list[tuple[int, ...]]:
    inner = range(1, len(graph.layers))
    return [(0, *c) for count in (1, 2, 3) for c in itertools.combinations(inner, count)]


@pytest.mark.slow
def test_whole_stages_are_well_formed(graph: LayeredGraph) -> None:
    for starts in ((0,), *all_cuts(graph)):
        for stage in cut(graph, *starts):
            stage.graph.verify()
            for ports, primitive in ((stage.receives, RECEIVE), (stage.sends, SEND)):
                for port in ports:
                    inside = port.phase in ("forward", "backward")
                    node = (stage.body if inside else stage.graph).nodes[port.node]
                    assert node.primitive == primitive
                    assert (port.node < stage.boundary) == (port.phase == "forward") or not inside


def test_one_stage_has_no_ends(graph: LayeredGraph) -> None:
    """But the examples of the batch."""
    [whole] = cut(graph, 0)
    assert not whole.sends
    assert all(p.phase == "forward" and p.value not in graph.makers for p in whole.receives)


@pytest.mark.slow
def test_what_goes_out_comes_in(graph: LayeredGraph) -> None:
    """A received activation has one maker, a received cotangent or gradient somebody who gives a part of it."""
    for starts in all_cuts(graph):
        stages = cut(graph, *starts)
        for a, stage in enumerate(stages):
            for port in stage.receives:
                if port.phase == "forward" and port.value not in graph.makers:
                    continue
                givers = [
                    b for b, other in enumerate(stages)
                    if b != a and any((s.value, s.phase) == (port.value, port.phase) for s in other.sends)
                ]  # fmt: skip
                assert givers
                if port.phase in PAIRS:
                    assert len(givers) == 1 or port.phase != "forward"
                    assert all(b < a for b in givers) if port.phase == "forward" else all(b > a for b in givers)
            for port in stage.sends:
                takers = [
                    b for b, other in enumerate(stages)
                    if b != a and any((r.value, r.phase) == (port.value, port.phase) for r in other.receives)
                ]  # fmt: skip
                assert takers or port.phase == "update"  # another stage may make it for itself


@pytest.mark.slow
def test_stages_do_the_work_of_the_step(graph: LayeredGraph) -> None:
    [whole] = cut(graph, 0)
    for starts in all_cuts(graph):
        assert sum(total_flops(s.graph) for s in cut(graph, *starts)) == pytest.approx(total_flops(whole.graph))


@pytest.mark.slow
def test_all_that_is_contracted_is_read(graph: LayeredGraph) -> None:
    """Each part of a gradient goes into its sum, each cotangent into a part, or to another stage."""
    for starts in ((0,), *all_cuts(graph)):
        for stage in cut(graph, *starts):
            for part in (stage.body, stage.graph):
                read = {o for node in part.nodes for o in node.operands} | set(part.outputs)
                assert all(set(node.results) & read for node in part.nodes if node.primitive == "dot_general")


@pytest.mark.slow
def test_stages_hold_the_state_of_the_step(graph: LayeredGraph) -> None:
    """Every argument is with one stage, one that several layers share with each of theirs; moments with their
    parameter, rows of stacked arguments with the layers that read them."""
    [whole] = cut(graph, 0)
    held = {where: whole.graph.values[v] for where, v in zip(whole.inputs, whole.graph.inputs, strict=True)}
    for starts in all_cuts(graph):
        found: dict[tuple[int, int, int], int] = {}
        for stage in cut(graph, *starts):
            for where, v in zip(stage.inputs, stage.graph.inputs, strict=True):
                assert held[where] == stage.graph.values[v]
                found[where] = found.get(where, 0) + 1
        assert set(found) == set(held)
        shared = {
            graph.arguments.index(v) for v, users in graph.users.items() if v in graph.arguments and len(users) > 1
        }
        scalars = {a for a, t in enumerate(graph.argument_types) if not t.shape}
        assert {where[0] for where, count in found.items() if count > 1} <= shared | scalars


def test_stacked_arguments_are_updated_by_rows() -> None:
    """Nothing of a stage has all layers' rows, and each input that is replaced shares its buffer with an output."""
    graph = small_gpt(True)
    for stage in cut(graph, 0, 2, 4):
        rows = [where for where in stage.inputs if where[2]]
        assert rows
        assert all(stop - start == 1 for _, start, stop in rows)
        assert set(rows) <= {stage.inputs[i] for i in stage.graph.donated}
        for i, j in stage.graph.state:
            output = stage.graph.outputs[j]
            assert isinstance(output, int)
            assert stage.graph.values[stage.graph.inputs[i]] == stage.graph.values[output]


def test_equal_layers_are_equal_graphs(graph: LayeredGraph) -> None:
    prints: dict[int, set[str]] = {}
    for k, layer in enumerate(graph.layers):
        prints.setdefault(layer.kind, set()).add(stage_graph(graph, k, k + 1, ["none"]).graph.fingerprint)
    assert all(len(found) <= 2 for found in prints.values())
