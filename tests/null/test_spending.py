"""Where a plan's seconds go adds up to what it predicts, and throughput to its step."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.ir.spending import Spending, spending
from benchmarks.models import gpt
from tests.clusters import SLOW_8
from tests.models import build
from tests.null.handmade import handmade_plan
from tests.null.pipeline_files import handmade_pipeline

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "seq": 32, "vocab": 128}


def of(cluster: str, **options: object) -> tuple[autopar.StepPlan, Spending]:
    step, args = gpt(**SIZES)
    plan = autopar.parallelize(step, cluster=cluster, donate_argnums=0, **options).plan(*args)
    return plan, spending(plan.data)


def shown(found: Spending) -> float:
    """What runs beside nothing."""
    return math.fsum(row.seconds - row.beside for row in found.rows)


def seconds(found: Spending, *, collectives: bool) -> float:
    return math.fsum(
        row.seconds for row in found.rows if (" over " in row.what) == collectives and row.what != "bubble"
    )


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["cpu:8", "dgx-h100", "v5e-8"])
def test_one_program(cluster: str) -> None:
    plan, found = of(cluster, num_microbatches=1, stages=1)
    p = plan.predictions
    assert seconds(found, collectives=False) == pytest.approx(p.compute_s)
    assert p.hidden_s is not None
    assert seconds(found, collectives=True) == pytest.approx(p.communication_s + p.hidden_s)
    assert shown(found) == pytest.approx(p.step_s)
    if cluster == "cpu:8":
        assert p.hidden_s == 0
    assert found.utilisation is not None and 0 < found.utilisation < 1
    batch = plan.data.inputs[-1].type.shape[0]
    assert found.examples_per_s == pytest.approx(batch / p.step_s)
    assert found.tokens_per_s == pytest.approx(batch * SIZES["seq"] / p.step_s)
    assert [s for _, s in found.dearest] == sorted((s for _, s in found.dearest), reverse=True)


@pytest.mark.slow
def test_microbatches_are_passes_too() -> None:
    """What a loop over them does is of the pass that it is of; model FLOPs are those of all."""
    found = [of("v5e-8", num_microbatches=count, stages=1, mesh=8, method="data_parallel") for count in (1, 4)]
    flops = [s.utilisation * plan.predictions.step_s for plan, s in found if s.utilisation is not None]
    assert flops[0] == pytest.approx(flops[1])
    for _, each in found:
        rows = {row.what: row.seconds for row in each.rows}
        assert rows["products"] > rows["update"] > 0


def test_a_scan_is_of_the_pass_that_it_is_in() -> None:
    """Its products are the model's: three times those of its forward pass."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(w, x)
        return w - gradient, value

    args = jax.ShapeDtypeStruct((3, 512, 512), jnp.float32), jax.ShapeDtypeStruct((64, 512), jnp.float32)
    plan = autopar.parallelize(step, cluster="v5e-8", mesh=8, method="data_parallel").plan(*args)
    found = spending(plan.data)
    assert found.utilisation is not None
    flops = found.utilisation * plan.predictions.step_s * 8 * 197e12
    assert flops == pytest.approx(3 * 3 * 2 * 64 * 512 * 512, rel=0.01)


@pytest.mark.slow
def test_stages() -> None:
    """What the busiest worker spends, on its layers and between them, and its bubble are the step."""
    plan, found = of("cpu:8", num_microbatches=4, stages=2)
    p = plan.predictions
    busy_s = max(w.busy_s for w in p.workers)
    bubble_s = next((row.seconds for row in found.rows if row.what == "bubble"), 0.0)
    assert busy_s + bubble_s == pytest.approx(p.step_s)
    assert seconds(found, collectives=False) + seconds(found, collectives=True) == pytest.approx(busy_s)


@pytest.mark.full
def test_stages_whose_collectives_are_hidden() -> None:
    plan, found = of("dgx-h100:2", num_microbatches=8, stages=2, zero=3, tensor=1, submeshes=["1x8"], workers=1)
    assert any(row.beside for row in found.rows)
    assert shown(found) == pytest.approx(plan.predictions.step_s)


@pytest.mark.slow
def test_layers_have_both_passes() -> None:
    """What they compute again is not the model's."""
    options = {"cluster": "cpu:8", "num_microbatches": 4, "stages": 2, "submeshes": ["1x4"], "mesh": 4, "workers": 1}
    flops: list[float] = []
    for recompute in ("none", "full"):
        plan, found = of(recompute=recompute, **options)
        assert {row.phase for row in plan.data.pipelined.sharding_of(0).operators} >= {"forward", "backward"}
        assert found.utilisation is not None
        flops.append(found.utilisation * plan.predictions.step_s)
    assert flops[0] == pytest.approx(flops[1])


def test_an_evaluation_is_a_forward_pass() -> None:
    """Of which the examples are the batch's, and not the rows of weights that no result replaces."""

    def step(w: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w["up"]) @ w["down"])

    up, down = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 2048), (2048, 512)))
    x = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    plan = autopar.parallelize(step, cluster="dgx-h100", mesh=8).plan({"up": up, "down": down}, x)
    found = spending(plan.data)
    assert {row.what for row in found.rows} >= {"products", "memory-bound"}
    assert not any(row.what == "update" for row in found.rows)
    assert found.utilisation is not None
    flops = found.utilisation * plan.predictions.step_s * 8 * 989.4e12
    assert flops == pytest.approx(2 * 2 * 64 * 512 * 2048, rel=0.01)
    assert found.examples_per_s == pytest.approx(64 / plan.predictions.step_s)
    assert "new state" not in {row.kind for row in plan.predictions.workers[0].live}


def test_between_layers() -> None:
    """What is resharded there, in each microbatch, is a part of the step: layers' own rows are the others."""
    model = build("mlp", "float32")
    step = autopar.parallelize(model.step, cluster=SLOW_8, num_microbatches=4, stages=1, layers=2, **model.kwargs)
    plan = step.plan(*model.args)
    found, p = spending(plan.data), plan.predictions
    assert math.fsum(c.time_s for c in plan.data.pipelined.between[0]) > 0.005 * p.step_s
    assert seconds(found, collectives=False) + seconds(found, collectives=True) == pytest.approx(p.step_s)


@pytest.mark.slow
def test_what_several_layers_read_is_resharded_once() -> None:
    """An embedding that later blocks add again, in one form: the step takes its exchange once, as the program does."""

    def loss(p: Any, ids: Any) -> Any:
        h = first = p["embedding"][ids]
        for i, w in enumerate(p["blocks"]):
            normal = h / jnp.sqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
            h = h + jax.nn.gelu(normal @ w["up"]) @ w["down"] + (0.1 * first if i % 2 else 0)
        return jnp.mean(jax.nn.logsumexp(h @ p["embedding"].T, -1))

    def step(p: Any, ids: Any) -> Any:
        value, gradient = autopar.value_and_grad(loss)(p, ids)
        return jax.tree.map(lambda a, b: a - 0.1 * b, p, gradient), value

    vocabulary, width = 96, 48
    embedding, up, down = (
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((vocabulary, width), (width, 4 * width), (4 * width, width))
    )
    params = {"embedding": embedding, "blocks": [{"up": up, "down": down}] * 5}
    staged = autopar.parallelize(step, cluster="cpu:8", num_microbatches=4, stages=1, layers=4)
    plan = staged.plan(params, jax.ShapeDtypeStruct((16, 12), jnp.int32)).data
    total = seconds(spending(plan), collectives=False) + seconds(spending(plan), collectives=True)
    assert total == pytest.approx(plan.predictions.step_s)


def test_utilisation_counts_no_recomputation() -> None:
    """Three times the forward pass, whatever the backward pass makes again."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))

    def step(w: jax.Array, x: jax.Array, again: bool) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(jax.checkpoint(loss) if again else loss)(w, x)
        return w - gradient, value

    args = jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((64, 512), jnp.float32)
    made = []
    for again in (False, True):
        plan = autopar.parallelize(lambda w, x, again=again: step(w, x, again), cluster="v5e-8").plan(*args)
        found = spending(plan.data)
        assert found.utilisation is not None
        made.append(found.utilisation * plan.predictions.step_s)
    assert made[0] == pytest.approx(made[1])


def test_plans_with_nothing_to_say() -> None:
    assert spending(handmade_plan()).dearest[0][0] == "dot_general (model.py:88)"
    assert {row.what for row in spending(handmade_pipeline()).rows} >= {"products", "update"}
