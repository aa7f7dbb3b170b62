"""The benchmarks of the suites and of overlap, by their parts and on steps of a few layers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from autopar.cost.logical_meshes import logical_mesh
from autopar.frontend.layering.layers import layered
from autopar.inter_op.pipeline_search import PipelineOptions, plan_pipeline
from autopar.inter_op.schedules import make_schedule
from autopar.ir.graph import TensorType
from autopar.ir.layers import LayeredGraph
from autopar.ir.pipeline import Cut, CutValue, PipelinePlan
from autopar.ir.presets import cluster_from_text
from autopar.ir.sharding import ShardingSpec
from benchmarks import models, overlap, suite
from benchmarks.alpa_solutions import MEASURED, SOLUTIONS, Solution, Stage
from benchmarks.pins import logical_shape, pins_of, pins_of_measured
from benchmarks.suite_configs import ALPA_SUITE
from benchmarks.suite_models import SUITE
from tests.null.pipelines import pipeline, stage_cost

SIZES = {"layers": 4, "hidden": 32, "heads": 4, "seq": 16, "vocab": 64}


def small_gpt(num_microbatches: int = 4, layers: int | None = None) -> LayeredGraph:
    step, args = models.gpt(**SIZES, batch=8 * num_microbatches, remat=True)
    return layered(step, args, num_microbatches=num_microbatches, donate_argnums=(0,), layers=layers).graph


# --- pins ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOLUTIONS)
def test_a_published_solution_becomes_options(name: str) -> None:
    solution, pins = SOLUTIONS[name], pins_of(SOLUTIONS[name])
    assert len(pins["starts"]) == len(pins["submeshes"]) == len(solution.stages)
    ends = (*pins["starts"][1:], solution.num_layers)
    assert [b - a for a, b in zip(pins["starts"], ends, strict=True)] == [stage.layers for stage in solution.stages]
    # logical shapes are pinned as a set: that must leave each submesh exactly one
    by_submesh = {stage.submesh: {logical_shape(s.logical) for s in solution.stages if s.submesh == stage.submesh}
                  for stage in solution.stages}  # fmt: skip
    assert all(len(shapes) == 1 for shapes in by_submesh.values())
    PipelineOptions(**pins)


def test_pins_of_unequal_stages() -> None:
    pins = pins_of(SOLUTIONS["gpt-2.6B"])
    assert pins["starts"] == (0, 2, 4)
    assert pins["submeshes"] == ((1, 2), (1, 2), (1, 4))
    assert pins["logical_shapes"] == ((2,), (4,))
    assert pins["batch_axes"] == ((0,), None, None)
    assert set(pins_of(SOLUTIONS["gpt-39B"])["batch_axes"]) == {()}, "bound to an axis of one device: whole"


def test_pins_of_the_measured_point() -> None:
    pins = pins_of_measured(MEASURED, 8)
    assert (pins["starts"], pins["submeshes"], pins["logical_shapes"]) == ((0, 4), ((1, 4), (1, 4)), ((2, 2),))
    assert (pins["batch_axes"], pins["whole_examples"]) == (((0,),), True)


@pytest.mark.full
def test_the_measured_point_is_within_its_bars() -> None:
    """Blocks compute again, as they did where it was measured: else it is 34 % too fast, and 86 % too large."""
    got = suite.plan_one(suite.measured_request())
    assert abs(got["step_s"] / MEASURED.step_s - 1) <= suite.TIME_BAR
    assert abs(got["peak_bytes"] / MEASURED.peak_bytes - 1) <= suite.MEMORY_BAR


@pytest.mark.slow
def test_a_pinned_solution_is_planned_as_it_is_pinned() -> None:
    stages = (
        Stage(layers=1, submesh=(1, 2), logical=(2, 1)),
        Stage(layers=1, submesh=(1, 2), logical=(1, 2)),
        Stage(layers=2, submesh=(1, 4), logical=(2, 2)),
    )
    solution = Solution(stages=stages, num_microbatches=4)
    graph = small_gpt(layers=solution.num_layers)
    assert len(graph.layers) == solution.num_layers
    plan = plan_pipeline(graph, cluster_from_text("cpu:8"), PipelineOptions(**pins_of(solution), workers=1)).plan
    assert [(s.start, s.stop, s.mesh.shape) for s in plan.stages] == [(0, 1, (2,)), (1, 2, (2,)), (2, 4, (2, 2))]
    assert plan.schedule.name == "1f1b"
    assert {r for stage in plan.stages for r in stage.remat} == {"full"}
    text = "1f1b, 4 microbatches: 2 x 1 layers on 2 (1 full), 2 layers on 2x2 (2 full)"
    assert suite.plan_line(plan) == text


# --- rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUITE)
def test_a_row_has_the_devices_it_asks_for(name: str) -> None:
    row = SUITE[name]
    cluster = suite.cluster_of(suite.cluster_name(row.family, row.gpus), row.gpus)
    cluster.verify()
    assert cluster.num_devices == row.gpus
    assert cluster.groups[0].device.name == ("V100-SXM2-16GB" if name in SOLUTIONS else "H100-SXM5-80GB")
    assert (suite.published_request(name) is None) == (name not in SOLUTIONS)


# --- figures ---------------------------------------------------------------------------------------------


def gpt_flops(sizes: dict[str, int], examples: int) -> float:
    """Matrix products of a GPT's step by the literature's formula."""
    layers, hidden, seq, vocab = (sizes[name] for name in ("layers", "hidden", "seq", "vocab"))
    blocks = 24 * examples * seq * layers * hidden**2 * (1 + seq / (6 * hidden))
    return 3 * (blocks + 2 * examples * seq * hidden * vocab)


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", (1, 4))
def test_model_flops_follow_the_formula_and_not_the_recomputation(num_microbatches: int) -> None:
    graph = small_gpt(num_microbatches)
    assert suite.model_flops(graph) == pytest.approx(gpt_flops(SIZES, 8 * num_microbatches))


def test_flops_per_device_of_the_measured_point() -> None:
    (sizes,) = [m for m in ALPA_SUITE["gpt"]["models"] if f"gpt-{m['name']}" == MEASURED.row]
    flops = gpt_flops({**sizes, "seq": 1024, "vocab": 51200}, MEASURED.global_batch)
    assert flops / (8 * MEASURED.step_s) == pytest.approx(MEASURED.flops_per_s, rel=0.01)


def test_a_plan_in_a_line() -> None:
    plan = pipeline(make_schedule("eager_1f1b", 3, 8), [stage_cost(forward_s=1.0)] * 3, ())
    first, second, third = plan.stages
    plan = replace(plan, stages=(first, second, replace(third, remat=("full",))))
    assert suite.plan_line(plan) == "eager_1f1b, 8 microbatches: 2 x 1 layers on 1 (1 none), 1 layers on 1 (1 full)"


# --- bars ------------------------------------------------------------------------------------------------

GOOD = {
    "planning_s": 3.0,
    "cached_s": 0.5,
    "cpu_s": 5.0,
    "rss_bytes": 1e9,
    "peak_bytes": 15e9,
    "memory_bytes": 16e9,
    "step_s": 1.0,
}


@pytest.mark.parametrize(
    ("ours", "published", "said"),
    [
        ({}, {"step_s": 1.1, "lifted": ""}, []),
        ({}, None, []),
        ({"planning_s": 31.0}, None, ["row: planned in 31.0 s (5.0 s of CPU), bar 30 s"]),
        ({"cached_s": 1.25}, None, ["row: planned again in 1.25 s, bar 1 s"]),
        ({"rss_bytes": 2.5e9}, None, ["row: 2500 MB, bar 2000 MB"]),
        ({"peak_bytes": 17e9}, None, ["row: 17.0 GB on a device of 16 GB"]),
        ({"step_s": 1.2}, {"step_s": 1.1, "lifted": ""}, ["row: 1.2 s a step, Alpa's solution 1.1 s"]),
        (
            {"step_s": 1.2},
            {"step_s": 1.1, "lifted": "no room"},
            ["row: 1.2 s a step, Alpa's solution 1.1 s, which does not fit"],
        ),
        ({}, {"error": "stopped"}, ["row: Alpa's solution cannot be evaluated: stopped"]),
    ],
)
def test_what_a_row_misses(ours: dict[str, Any], published: dict[str, Any] | None, said: list[str]) -> None:
    assert suite.misses("row", 30.0, {**GOOD, **ours}, published) == said
    assert suite.misses("row", 30.0, {"error": "broken"}, published) == ["row: broken"]


# --- overlap ---------------------------------------------------------------------------------------------


def crossing_plan(split: bool, rows: int = 64) -> PipelinePlan:
    """Two stages on two hosts of `overlap.two_hosts`, one activation between them."""
    cluster = overlap.two_hosts(10.0)
    mesh = logical_mesh(replace(cluster, groups=(replace(cluster.groups[0], hosts=1),)), (2, 2))
    kind = TensorType(shape=(rows, 1024), dtype="float32")
    spec = ShardingSpec(dims=(("x", "y") if split else ("x",), ()), unreduced=())
    value = CutValue(value=0, name="x", type=kind, src_spec=spec, dst_spec=spec)
    cuts = tuple(
        Cut(source=a, target=b, phase=phase, values=(value,), time_s=1.0, bound_s=0.0, receive_bytes=0.0)
        for a, b, phase in ((0, 1, "forward"), (1, 0, "backward"))
    )
    plan = pipeline(make_schedule("1f1b", 2, 4), stage_cost(forward_s=1e-3, input_grad_s=2e-3), cuts)
    stages = tuple(
        replace(stage, mesh=replace(mesh, device_ids=tuple(4 * k + i for i in range(4))))
        for k, stage in enumerate(plan.stages)
    )
    return replace(plan, stages=stages)


def test_values_that_two_devices_want_are_sent_twice_by_send_recv_alone() -> None:
    cluster = overlap.two_hosts(10.0)
    ways = {way.name: way for way in overlap.WAYS}
    one_each, two_each = crossing_plan(split=True, rows=4096), crossing_plan(split=False, rows=4096)
    send, broadcast = ways["send/recv 1F1B"], ways["broadcast 1F1B"]
    took = {(p, w): overlap.run(plan, cluster, ways[w]).transfer_s
            for p, plan in (("split", one_each), ("whole", two_each)) for w in (send.name, broadcast.name)}  # fmt: skip
    assert took["split", send.name] == pytest.approx(took["split", broadcast.name], rel=0.02)
    assert took["whole", send.name] == pytest.approx(2 * took["whole", broadcast.name], rel=0.05)
    widened = tuple(overlap.operator_parallel(cut, one_each) for cut in one_each.cuts)
    assert widened == two_each.cuts


def test_ways_are_ordered_and_bounded_by_free_transfers() -> None:
    plan, cluster = crossing_plan(split=False), overlap.two_hosts(10.0)
    outcomes = {way.name: overlap.run(plan, cluster, way) for way in overlap.WAYS}
    free = outcomes[overlap.FREE.name]
    assert free.transfer_s == 0
    assert free.step_s == pytest.approx(3e-3 * (4 + 1))  # 1F1B: m + p − 1 microbatches of 3 ms
    order = ["send/recv 1F1B, blocking", "broadcast 1F1B, blocking", "broadcast 1F1B", "broadcast eager-1F1B"]
    steps = [outcomes[name].step_s for name in order]
    assert all(a >= b >= free.step_s for a, b in itertools.pairwise(steps))
    said = overlap.explain("gpt-2.6B", 0.05, outcomes)
    assert "not reached" in said and "even transfers in no time" in said
    assert overlap.explain("gpt-2.6B", 0.15, outcomes).endswith("reached")


def test_hosts_of_the_overlap_benchmark() -> None:
    cluster = overlap.two_hosts(25.0)
    cluster.verify()
    assert cluster.num_devices == 8
    assert cluster.groups[0].nic.bytes_per_s == pytest.approx(25e9 / 8)
