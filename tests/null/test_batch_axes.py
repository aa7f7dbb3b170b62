"""The batch of a pipeline bound to mesh axes, and examples kept whole: every operator does so; what is refused."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cli.plan import _settings, add_parser  # pyright: ignore[reportPrivateUsage]
from autopar.frontend.layering.layers import layered
from autopar.inter_op.pipeline_search import PipelineOptions, plan_pipeline
from autopar.inter_op.stage_graph import stage_graph
from autopar.inter_op.submesh import Submesh, mesh_of
from autopar.intra_op.batch_bound import Bound, ExampleDims
from autopar.intra_op.decisions import Decisions
from autopar.intra_op.specs import Mesh
from autopar.intra_op.stage_costs import StageProblem, pose_stage
from autopar.ir.degrees import Degrees
from autopar.ir.errors import OptionError, VerifyError
from autopar.ir.layers import LayeredGraph
from autopar.ir.options import settled
from autopar.ir.plan_text import plan_text
from autopar.ir.presets import cluster_from_text
from autopar.step.options import asked as what_is_asked
from benchmarks import alpa_gpt, models
from tests.shares import each

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("batch axes")]  # what all share is made once

BATCH, SEQ = 24, 20
"""Examples of a microbatch and positions: sizes that nothing else in the model has."""
COUNT = 2


def gpt(**more: Any) -> LayeredGraph:
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "seq": SEQ, "vocab": 64, "batch": COUNT * BATCH}
    step, args = models.gpt(**{**sizes, **more}, remat=True)
    return layered(step, args, num_microbatches=COUNT, donate_argnums=(0,)).graph


@pytest.fixture(scope="module")
def graph() -> LayeredGraph:
    return gpt()


def axes_of(mesh: Mesh, value_type: Any, code: int, size: int) -> list[set[int]]:
    """For each dimension of ``size``: the mesh axes that split it."""
    spelled = mesh.space(value_type).codes[code]
    return [{a for a, d in enumerate(spelled) if d == dim} for dim, n in enumerate(value_type.shape) if n == size]


def solved(layers: LayeredGraph, k: int, bound: Bound, seq_dims: bool = True) -> tuple[Mesh, StageProblem, Decisions]:
    """Layer k alone on 2x2 devices, bound; what it receives has examples first, then positions."""
    mesh = Mesh(mesh_of(cluster_from_text("cpu:4"), Submesh(0, 1, 4), (2, 2), range(4)))
    part = stage_graph(layers, k, k + 1, ["none"])
    problem = StageProblem(part, pose_stage(part, mesh))
    within = frozenset({1}) if seq_dims else frozenset[int]()
    known = {
        i: ExampleDims(batch=frozenset({0}), within=within)
        for i, port in enumerate(problem.stage.receives)
        if port.type.shape[:1] == (BATCH,)
    }
    assert known
    met, sent = problem.bind(known, Degrees(), bound)
    for i, port in enumerate(problem.stage.sends):
        assert (i in sent) == (port.type.shape[:1] == (BATCH,)), port
    problem = problem.held_to(met.allowed)
    return mesh, problem, problem.posed.decided(problem.solve().choice)


def values_of(problem: StageProblem, out: Decisions) -> Any:
    """(type, code) of every operand and result of every operator that something reads, as it was decided."""
    classes = problem.graph.classes
    read = {c for this in classes for sources in this.inputs for c, _ in sources}
    for c, (this, s) in enumerate(zip(classes, out.strategy, strict=False)):
        if this.signature.node is None or c not in read:
            continue
        signature = this.signature
        for t, codes in (*zip(signature.operand_types, signature.operands, strict=True),
                         *zip(signature.result_types, signature.results, strict=True)):  # fmt: skip
            if codes is not None:
                yield t, int(codes[s])


@pytest.mark.slow
@pytest.mark.parametrize("axes", [("x",), ("y",), ("x", "y"), ()])
@pytest.mark.parametrize("k", each(2, [0, 1, -1]))
def test_every_operator_splits_the_batch_over_these_axes(graph: LayeredGraph, axes: tuple[str, ...], k: int) -> None:
    mesh, problem, out = solved(graph, k % len(graph.layers), Bound(axes=axes))
    wanted = {mesh.names.index(name) for name in axes}
    found = [split for t, code in values_of(problem, out) for split in axes_of(mesh, t, code, BATCH)]
    assert found
    assert all(split == wanted for split in found)


@pytest.mark.parametrize("k", [0, 1, -1])
def test_no_operator_splits_an_example(graph: LayeredGraph, k: int) -> None:
    mesh, problem, out = solved(graph, k % len(graph.layers), Bound(axes=("x",), whole_examples=True))
    found = [split for t, code in values_of(problem, out) for split in axes_of(mesh, t, code, SEQ)]
    assert found
    assert not any(found)


def test_without_a_bound_the_solver_does_otherwise(graph: LayeredGraph) -> None:
    """What is shown above is no accident: data parallel on both axes is what this step wants."""
    mesh, problem, out = solved(graph, 1, Bound())
    found = [split for t, code in values_of(problem, out) for split in axes_of(mesh, t, code, BATCH)]
    assert any(split == {0, 1} for split in found)


@pytest.mark.slow
def test_a_whole_pipeline(graph: LayeredGraph) -> None:
    """What crosses between stages has the batch where each stage wants it."""
    options = PipelineOptions(
        starts=(0, 2), submeshes=((1, 4), (1, 4)), logical_shapes=((2, 2),), schedules=("1f1b",), workers=1,
        remat=("none",), batch_axes=((0,), (1,)),
    )  # fmt: skip
    plan = plan_pipeline(graph, cluster_from_text("cpu:8"), options).plan
    crossing = [v for cut in plan.cuts if cut.phase == "forward" for v in cut.values if v.type.shape[0] == BATCH]
    assert crossing
    for value in crossing:
        assert value.src_spec.dims[0] == ("x",)
        assert value.dst_spec.dims[0] == ("y",)
    whole = plan_pipeline(graph, cluster_from_text("cpu:8"), replace(options, batch_axes=((),))).plan
    for cut in whole.cuts:
        for value in cut.values:
            if value.type.shape[:1] == (BATCH,):
                assert value.src_spec.dims[0] == value.dst_spec.dims[0] == ()


@pytest.mark.slow
@pytest.mark.full
def test_a_bound_costs_time(graph: LayeredGraph) -> None:
    options = PipelineOptions(stages=(1, 1), submeshes=((1, 4),), logical_shapes=((2, 2),), workers=1)
    free = plan_pipeline(graph, cluster_from_text("cpu:4"), options).step_s
    for axes in ((0,), (1,), (), None):
        bound = plan_pipeline(graph, cluster_from_text("cpu:4"), replace(options, batch_axes=(axes,))).step_s
        assert bound >= free * (1 - 2e-3), axes
        assert (axes is None) == (bound == free)


@pytest.mark.slow
@pytest.mark.full
def test_a_stage_may_be_left_free(graph: LayeredGraph) -> None:
    options = PipelineOptions(
        starts=(0, 2), submeshes=((1, 2), (1, 2)), schedules=("1f1b",), workers=1, batch_axes=((), None)
    )
    bound = plan_pipeline(graph, cluster_from_text("cpu:4"), options)
    every = plan_pipeline(graph, cluster_from_text("cpu:4"), replace(options, batch_axes=((),)))
    free = plan_pipeline(graph, cluster_from_text("cpu:4"), replace(options, batch_axes=None))
    assert free.plan.stages[1].cost == bound.plan.stages[1].cost != every.plan.stages[1].cost
    assert every.plan.stages[0].cost == bound.plan.stages[0].cost != free.plan.stages[0].cost


@pytest.mark.slow
def test_from_python_and_back_from_a_file(tmp_path: Path) -> None:
    step, args = models.gpt(layers=2, hidden=32, heads=4, seq=SEQ, vocab=64, batch=COUNT * BATCH)
    plan = autopar.parallelize(
        step, cluster="cpu:4", num_microbatches=COUNT, donate_argnums=0, stages=(1, None), mesh=["2x2"], batch_axis=0,
        whole_examples=True, workers=1, cache=tmp_path / "cache",
    ).plan(*args)  # fmt: skip
    assert plan.data.config.stages.batch_axes == ((0,),)
    assert "mesh shapes 2x2; batch 0; whole examples" in plan_text(plan.data)
    plan.save(tmp_path / "plan.json")
    assert autopar.load_plan(tmp_path / "plan.json").data == plan.data
    free = autopar.parallelize(
        step, cluster="cpu:4", num_microbatches=COUNT, donate_argnums=0, stages=(1, None), mesh=["2x2"], workers=1,
        cache=tmp_path / "cache",
    ).plan(*args)  # fmt: skip
    assert free.digest != plan.digest, "layouts of a bound batch are kept apart"
    assert free.predictions.step_s <= plan.predictions.step_s


@pytest.mark.parametrize(
    ("given", "kept"),
    [("0", ((0,),)), ("y", ((1,),)), ("0+1", ((0, 1),)), ("whole", ((),)), ("free", None)],
)
def test_the_command_line(given: str, kept: Any) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    argv = ["plan", "m:f", "--cluster", "cpu", "--out", "o", "--stages", "2-"]
    asked = _settings(parser.parse_args([*argv, "--batch-axis", given]))
    config = what_is_asked(settled(asked)).config
    assert config.stages is not None
    assert config.stages.batch_axes == kept
    with pytest.raises(SystemExit):
        parser.parse_args([*argv, "--batch-axis", "0+"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_axis": [0, 1]}, "batch_axis has 2 entries, but no stage_starts is given; give one for all stages"),
        (
            {"batch_axis": [0, 0, 0], "stage_starts": (0, 2)},
            "batch_axis has 3 entries, but stage_starts names 2 stages; give one for all stages, or one each",
        ),
        ({"batch_axis": -1}, "batch_axis: (-1,) are no positions of mesh axes"),
        ({"batch_axis": [(0, 0)]}, "batch_axis: (0, 0) are no positions of mesh axes, each once"),
        (
            {"batch_axis": 2, "mesh": ["2x2"]},
            "batch_axis: no logical mesh that is allowed (2x2) has axes 2 that divide the 24 examples of a microbatch",
        ),
        (
            {"batch_axis": 0, "cluster": "cpu:5", "submeshes": ["1x5"]},
            "no logical mesh that is allowed (5) has axes 0 that divide the 24 examples",
        ),
        ({"batch_axis": 0, "batch_argnums": {1: None}, "num_microbatches": 1}, "reads examples of a batch; say in"),
        ({"whole_examples": True, "batch_argnums": {1: None}, "num_microbatches": 1}, "whole_examples: no layer of"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    step, args = models.gpt(layers=2, hidden=32, heads=4, seq=SEQ, vocab=64, batch=COUNT * BATCH)
    settings: dict[str, Any] = {
        "cluster": "cpu:4", "num_microbatches": COUNT, "stages": (1, None), "workers": 1, **options
    }  # fmt: skip
    with pytest.raises(OptionError, match=re.escape(message)):
        autopar.parallelize(step, **settings).plan(*args)


def test_examples_of_a_step(graph: LayeredGraph) -> None:
    assert {(graph.values[v].shape, dim) for v, dim in graph.examples} == {((BATCH, SEQ), 0)}
    with pytest.raises(VerifyError, match="examples: value 0 is no input of the layers with a dimension 9"):
        replace(graph, examples=((0, 9),)).verify()


def test_the_measured_points_formats() -> None:
    """Bytes of state a parameter: float16, float32 master copy and two moments."""
    _, args = alpa_gpt.gpt(layers=2, hidden=64, heads=4, seq=16, vocab=128, batch=8)
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    count = sum(x.size for x in jax.tree.leaves(args[0][0]))
    assert size(args[0]) - 8 == 14 * count, "beside AdamW's count and the step's"
    assert {x.dtype for x in jax.tree.leaves(args[0][0])} == {jnp.dtype("float16")}
