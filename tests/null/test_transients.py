"""What tasks need for a moment: by phase, against what a stage's tasks are, and against what the search counts with."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import jax
import pytest

from autopar.frontend.layering import layered
from autopar.inter_op.candidates import Built
from autopar.inter_op.layer_tasks import Versions, layer_tasks
from autopar.inter_op.pipeline_search import _Planner, plan_pipeline
from autopar.inter_op.program.emit import emit
from autopar.inter_op.program.simulate import simulate
from autopar.inter_op.schedules import SCHEDULES
from autopar.inter_op.stage_graph import stage_graph
from autopar.ir.errors import VerifyError
from autopar.ir.layers import LayeredGraph
from autopar.ir.pipeline import StageCost, Transients, fullest
from autopar.ir.pipelined import PipelineOptions
from autopar.ir.presets import cluster_from_text
from autopar.ir.pretty import shard_bytes
from benchmarks.models import CLIPPED_ADAM, clipped_chain_step, gpt
from tests.null.pipelines import even, stage_cost
from tests.shares import each

pytestmark = pytest.mark.xdist_group("transients")  # one process makes what all tests of the file share

WIDTH, LAYERS = 256, 6


def models() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")] * LAYERS
    state = params, jax.eval_shape(CLIPPED_ADAM.init, params)
    return {
        "mlp": (clipped_chain_step, (state, jax.ShapeDtypeStruct((512, WIDTH), "float32"))),
        "gpt": gpt(layers=2, hidden=128, heads=4, seq=64, vocab=256, batch=32),
    }


@pytest.fixture(scope="module", params=["mlp", pytest.param("gpt", marks=pytest.mark.full)])
def graph(request: Any) -> LayeredGraph:
    step, args = models()[request.param]
    layers = LAYERS if request.param == "mlp" else None
    return layered(step, args, num_microbatches=4, donate_argnums=(0,), layers=layers).graph


def searched(graph: LayeredGraph, name: str) -> tuple[_Planner, list[Built]]:
    """A search under one schedule, and what it would simulate."""
    planner = _Planner(graph, cluster_from_text("cpu:4"), PipelineOptions(schedules=(name,), workers=1), None, None)
    return planner, planner.built(planner.layouts())


@pytest.mark.slow
def test_figures_are_plain_numbers(graph: LayeredGraph) -> None:
    """Of NumPy's a plan cannot be written."""
    _, found = searched(graph, "1f1b")
    for built in found:
        for stage in built.plan.stages:
            for value in (stage.cost, stage.cost.transients):
                figures = {f.name: getattr(value, f.name) for f in fields(value)}
                assert {n: type(v) for n, v in figures.items() if type(v) not in (float, Transients)} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", each(2, [name for name, kind in SCHEDULES.items() if kind.trains]))
def test_no_step_holds_more_than_the_search_counts_with(graph: LayeredGraph, name: str) -> None:
    """But for what waits between meshes, of which the search counts one microbatch's, evenly split: what it allows a
    stage to have is never less than the step then holds."""
    planner, found = searched(graph, name)
    record, seen = SCHEDULES[name], 0
    limits = planner.cuts.limits(record, (1,))
    for built in found:
        schedule = built.plan.schedule
        allowed = [0.0] * len(schedule.tasks)
        for s, choice in enumerate(built.choices):
            flights = max(schedule.in_flight) if record.chunked else schedule.in_flight[s]
            cell = planner.builder.cells[choice.cell]
            held = cell.held_bytes(flights, limits.contexts)[choice.option, cell.number[choice.start, choice.stop]]
            allowed[schedule.mesh_of_stage[s]] += float(held)
        silent = tuple(replace(cut, values=(), receive_bytes=0.0) for cut in built.plan.cuts)
        workers = simulate(emit(replace(built.plan, cuts=silent))).workers
        for worker, most in zip(workers, allowed, strict=True):
            assert worker.peak_bytes <= most, built.text
            seen += 1
    assert seen


@pytest.mark.slow
def test_no_phase_needs_more_than_the_most(graph: LayeredGraph) -> None:
    """Half of a backward pass needs less than all of it, and some phase less than the most that any needs."""
    _, found = searched(graph, "zb_h1")
    costs = [s.cost for b in found for s in b.plan.stages]
    for cost in costs:
        cost.verify()
        beside = cost.transients
        assert max(beside.input_grad_bytes, beside.weight_grad_bytes) <= beside.backward_bytes <= cost.transient_bytes
        assert beside.forward_bytes <= cost.transient_bytes
        assert beside.update_bytes <= cost.transient_bytes + cost.activation_bytes
    assert any(cost.transients.forward_bytes < cost.transient_bytes for cost in costs)
    assert any(cost.transients.input_grad_bytes < cost.transients.backward_bytes for cost in costs)


@pytest.mark.slow
def test_what_waits_for_weight_gradients_is_what_tasks_hand_over(graph: LayeredGraph) -> None:
    """Copies of operands are made for a product, not for the backward pass after the turn: activations are what the
    forward task gives; contexts what the input gradients hand over, within what the reshaped ones among them take."""
    made = plan_pipeline(
        graph, cluster_from_text("cpu:4"),
        PipelineOptions(schedules=("zb_h1",), stages=(2, 2), submeshes=((1, 2),), workers=1),
    )  # fmt: skip
    for k in range(len(graph.layers)):
        stage = next(s for s in made.plan.stages if s.start <= k < s.stop)
        sharding = made.shardings.distinct[made.shardings.of[k]]
        part = stage_graph(graph, k, k + 1, [sharding.remat])
        tasks = layer_tasks(part, sharding, split=True)
        [region] = dict(sharding.root.bodies)[part.loop]
        versions = Versions(part.body, region, sharding)

        def size(version: Any, part: Any = part, versions: Any = versions, stage: Any = stage) -> float:
            return shard_bytes(part.body.values[version[0]], versions.spec(version), stage.mesh)

        assert tasks.input_grad is not None and tasks.weight_grad is not None
        kept = {v: size(v) for v in tasks.forward.gives}
        handed = sum(map(size, tasks.input_grad.gives))
        late = sum(kept[v] for v in tasks.weight_grad.takes if v in kept)
        cost = sharding.cost
        assert cost.activation_bytes == pytest.approx(sum(kept.values()), rel=0.01, abs=64)
        assert cost.kept_bytes == pytest.approx(late, rel=0.01, abs=64)
        assert cost.weight_context_bytes - cost.weight_kept_bytes == pytest.approx(handed, rel=0.1, abs=64)


def test_layers_of_a_stage_take_turns() -> None:
    """Of each phase the neediest, results of the update being there together; where tasks are fused, activations of
    layers before are there, contexts are not."""
    first = Transients(
        forward_bytes=1, backward_bytes=5, input_grad_bytes=3, weight_grad_bytes=0, fused_bytes=6,
        fused_input_grad_bytes=4, received_bytes=8, update_bytes=7,
    )  # fmt: skip
    layers = [
        stage_cost(first, activation_bytes=30, weight_context_bytes=20, results_bytes=4),
        stage_cost(even(2.0), results_bytes=2),
    ]
    want = Transients(
        forward_bytes=2, backward_bytes=5, input_grad_bytes=3, weight_grad_bytes=2, fused_bytes=6,
        fused_input_grad_bytes=12, received_bytes=8, update_bytes=9,
    )  # fmt: skip
    assert fullest(layers) == want
    assert fullest(layers[::-1]) == replace(want, fused_input_grad_bytes=4, received_bytes=2)


@pytest.mark.parametrize(
    ("cost", "fault"),
    [
        (stage_cost(even(-1.0)), r"transients: forward_bytes is -1\.0"),
        (stage_cost(even(float("inf"))), "transients: forward_bytes is inf"),
        (
            stage_cost(Transients(
                forward_bytes=0, backward_bytes=1, input_grad_bytes=2, weight_grad_bytes=0, fused_bytes=0,
                fused_input_grad_bytes=0, received_bytes=0, update_bytes=0,
            ), transient_bytes=4),
            "half of a backward pass needs more than all of it",
        ),
        (stage_cost(even(3.0), transient_bytes=2.0), r"a task needs 3\.0 bytes beside, of 2\.0 at most"),
        (stage_cost(even(0.0), transient_bytes=-2.0), r"stage cost: transient_bytes is -2\.0"),
    ],
)  # fmt: skip
def test_transients_that_cannot_be(cost: StageCost, fault: str) -> None:
    with pytest.raises(VerifyError, match=fault):
        cost.verify()
