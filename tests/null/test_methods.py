"""A forced method is what its name says, inside the step too, not at its arguments alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import pytest

import autopar
from autopar.ir.graph import Graph, Node, TensorType
from autopar.ir.sharding import ShardingSpec
from autopar.ir.sharding_plan import RegionPlan
from examples.gpt.model import GPTConfig, make_train_step, train_step_args
from tests.clusters import SLOW_8
from tests.shares import each

BATCH = 24
"""No other dimension is a multiple of it, and 8 divides it."""
CONFIGS = {
    "unrolled": GPTConfig(vocab=64, seq=16, layers=2, hidden=32, heads=4),
    "scan": GPTConfig(vocab=64, seq=16, layers=2, hidden=32, heads=4, scan=True, remat=True, tied=False),
    "dropout": GPTConfig(vocab=64, seq=16, layers=1, hidden=32, heads=4, dropout=0.1),
}

CASES = pytest.mark.parametrize(
    ("name", "mesh"),
    [("unrolled", (8,)), ("unrolled", (2, 4)), ("scan", (8,)), ("scan", (2, 2, 2)), ("dropout", (2, 4))],
)


def planned(name: str, mesh: tuple[int, ...], method: str, **options: Any) -> tuple[Any, Graph, int]:
    """The plan, its graph, and how many arrays the parameters are."""
    config = CONFIGS[name]
    args = train_step_args(config, BATCH)
    step = autopar.parallelize(
        make_train_step(config), donate_argnums=(0,), cluster=SLOW_8, mesh=mesh, method=method, **options
    )
    plan = step.plan(*args)
    (entry,) = step._entries.values()
    return plan.data, entry.bound.traced.graph, len(jax.tree.leaves(args[0].params))


def operators(graph: Graph, region: RegionPlan, plan: Any) -> Iterator[tuple[Node, TensorType, ShardingSpec]]:
    """Every operand and result of every operator, bodies included, with its sharding; not those of a broadcast scalar,
    of which its readers make their own part."""
    bodies = dict(region.bodies)
    for position, (node, index) in enumerate(zip(graph.nodes, region.nodes, strict=True)):
        if index >= 0 and any(r in graph.last_use for r in node.results):
            s = plan.sharding.strategies[index]
            for t, spec in zip((*node.operand_types, *node.result_types), (*s.operands, *s.results), strict=True):
                yield node, t, spec
        for body, inside in zip(node.bodies, bodies.get(position, ()), strict=bool(node.bodies)):
            yield from operators(body, inside, plan)


def of_batch(dims: tuple[int, ...]) -> list[int]:
    """Dimensions that are the batch's, or begin with it."""
    return [d for d, n in enumerate(dims) if n % BATCH == 0 and n]


def counts(plan: Any) -> Counter[str]:
    out: Counter[str] = Counter()
    for c in plan.sharding.collectives:
        out[c.kind] += c.count * c.trips
    return out


@pytest.mark.slow
@CASES
def test_data_parallel_splits_the_batch_and_reduces_each_gradient_once(name: str, mesh: tuple[int, ...]) -> None:
    plan, graph, parameters = planned(name, mesh, "data_parallel")
    for node, t, spec in operators(graph, plan.sharding.root, plan):
        split = [d for d, axes in enumerate(spec.dims) if axes]
        assert set(split) <= set(of_batch(t.shape)), f"{node}: {t} {spec}"
        if node.primitive == "dot_general" and of_batch(t.shape):
            assert split, f"{node}: {t} {spec}"
    for argument in (*plan.inputs, *plan.outputs):
        assert any(argument.spec.dims) == (BATCH in argument.type.shape), argument.path
    assert counts(plan) == {"all-reduce": parameters + 1}  # and the loss
    assert {c.axes for c in plan.sharding.collectives} == {("x", "y", "z")[: len(mesh)]}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(8,), (2, 4)], ids=str)
def test_data_parallel_reduces_once_a_step_with_microbatches(mesh: tuple[int, ...]) -> None:
    plan, _, parameters = planned("unrolled", mesh, "data_parallel", num_microbatches=3)
    assert counts(plan) == {"all-reduce": parameters + 1}


@pytest.mark.slow
@CASES
@pytest.mark.parametrize("method", each(2, ["zero3", "zero2"]))
def test_zero_splits_the_batch_and_scatters_gradients(name: str, mesh: tuple[int, ...], method: str) -> None:
    plan, graph, _ = planned(name, mesh, method)
    for node, t, spec in operators(graph, plan.sharding.root, plan):
        if of_batch(t.shape) and any(axes for d, axes in enumerate(spec.dims) if d in of_batch(t.shape)):
            assert not any(axes for d, axes in enumerate(spec.dims) if d not in of_batch(t.shape)), (
                f"{node}: {t} {spec}"
            )
        if node.primitive == "dot_general" and of_batch(t.shape):
            assert any(spec.dims), f"{node}: {t} {spec}"
    found = counts(plan)
    assert set(found) == {"all-gather", "reduce-scatter", "all-reduce"}
    assert found["all-reduce"] <= 3  # the loss, the gradients' norm


@pytest.mark.slow
@CASES
def test_tensor_parallel_keeps_the_batch_whole(name: str, mesh: tuple[int, ...]) -> None:
    plan, graph, _ = planned(name, mesh, "tensor_parallel")
    split = 0
    for node, t, spec in operators(graph, plan.sharding.root, plan):
        assert not any(spec.dims[d] for d in of_batch(t.shape)), f"{node}: {t} {spec}"
        split += node.primitive == "dot_general" and any(spec.dims)
    assert split


@pytest.mark.slow
@pytest.mark.full
def test_baselines_are_the_forced_plans() -> None:
    plan, _, _ = planned("unrolled", (8,), "auto")
    for baseline in plan.provenance.considered:
        forced, _, _ = planned("unrolled", (8,), baseline.name)
        assert forced.predictions.step_s <= baseline.step_s * 1.001, baseline.name
        assert forced.predictions.step_s == pytest.approx(baseline.step_s, rel=0.05), baseline.name
