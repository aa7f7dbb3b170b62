"""What `benchmarks.choice` has recorded can be read, fits its models, and says what autopar takes as options."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import jax
import pytest

import autopar
from autopar.inter_op.schedules import SCHEDULES
from autopar.ir.errors import PlanFormatError
from autopar.ir.layers import REMAT
from autopar.ir.pipelined import PipelineOptions
from autopar.ir.serde import decode, encode
from autopar.step.options import asked
from benchmarks import choice, models, records
from benchmarks.choice import CASES, FORCED_BAR, SLOWER_BAR, missed
from benchmarks.records import OneMesh, Pipeline, Record, Refused, Spec
from benchmarks.suite import cluster_of
from tests.shares import each

RECORDS = [records.load(name) for name in CASES]
MESHES = [(r.name, r.one_mesh) for r in RECORDS if isinstance(r.one_mesh, OneMesh)]
PIPELINES = [(r.name, r.pipeline) for r in RECORDS if isinstance(r.pipeline, Pipeline)]
LARGEST_BYTES = 100_000


def leaves(name: str) -> dict[str, tuple[int, ...]]:
    """Paths and shapes of a case's arguments."""
    case = CASES[name]
    _, args = case.build(case.global_batch)
    found = jax.tree_util.tree_flatten_with_path(args)[0]
    return {"args" + jax.tree_util.keystr(path): leaf.shape for path, leaf in found}


def resolved(constraints: dict[str, Spec], paths: Any) -> dict[str, Spec | None]:
    """What the constraints say of each path: the last that matches holds."""
    return {
        path: next((spec for glob, spec in reversed(constraints.items()) if records.matches(glob, path)), None)
        for path in paths
    }


def fault(spec: Spec | None, shape: tuple[int, ...], sizes: dict[str, int]) -> bool:
    """True where a sharding is not one of a leaf."""
    if spec is None or len(spec) != len(shape):
        return True
    axes = [axis for dim in spec for axis in dim]
    parts = [math.prod(sizes[axis] for axis in dim) for dim in spec]
    return len(axes) != len(set(axes)) or any(n % k for n, k in zip(shape, parts, strict=True))


# --- what is recorded ------------------------------------------------------------------------------------------


def test_every_case_has_a_record_and_every_file_is_one() -> None:
    files = sorted(path.name for path in records.FOLDER.iterdir())
    assert files == sorted(f"{name}.json" for name in CASES)
    assert all((records.FOLDER / name).stat().st_size <= LARGEST_BYTES for name in files)


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.name)
def test_a_record_is_of_its_case(record: Record) -> None:
    case = CASES[record.name]
    assert record == replace(
        record,
        name=record.name,
        cluster=case.cluster,
        devices=case.devices,
        global_batch=case.global_batch,
        num_microbatches=case.num_microbatches,
    )
    for found in (record.one_mesh, record.pipeline):
        assert found.took.planning_s > 0 and found.took.cpu_s > 0 and found.took.rss_bytes > 0
        if isinstance(found, Refused):
            assert re.search("over the limit|more", found.why)
            continue
        assert found.step_s > 0 and re.fullmatch("[0-9a-f]{64}", found.digest)
        assert found.options.num_microbatches == case.num_microbatches
        assert found.took.phases


def test_something_is_found_for_every_model() -> None:
    assert {name for name, _ in (*MESHES, *PIPELINES)} == set(CASES)
    assert len(MESHES) < len(CASES), "one that fits in stages alone is among them"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "found"), each(3, (pytest.param(*x, id=x[0]) for x in MESHES)))
def test_a_layout_on_one_mesh_says_where_every_leaf_is(name: str, found: OneMesh) -> None:
    sizes = dict(zip(found.axes, found.options.mesh, strict=True))
    assert math.prod(sizes.values()) == CASES[name].devices
    shapes = leaves(name)
    said = resolved(found.options.constraints, shapes)
    assert [path for path, shape in shapes.items() if fault(said[path], shape, sizes)] == []
    assert all(any(records.matches(glob, path) for path in shapes) for glob in found.options.constraints)
    given = encode(found.options)
    step = autopar.parallelize(lambda state, batch: state, **given)
    config = asked(step._options).config
    assert (config.mesh_shape, config.recompute) == (found.options.mesh, found.options.recompute)
    assert {pin.target: pin.dims for pin in config.pins} == found.options.constraints


@pytest.mark.parametrize(("name", "found"), PIPELINES, ids=[name for name, _ in PIPELINES])
def test_a_layout_in_stages_says_what_runs_where(name: str, found: Pipeline) -> None:
    options, stages, case = found.options, found.stages, CASES[name]
    assert options.stage_starts == tuple(s.start for s in stages) and stages[-1].stop == found.num_layers
    assert [s.stop for s in stages[:-1]] == [s.start for s in stages[1:]]
    assert options.submeshes == tuple(s.submesh for s in stages)
    assert set(options.mesh) == {s.mesh_shape for s in stages}
    assert set(options.recompute) == {kept for s in stages for kept in s.remat} <= set(REMAT)
    assert set(options.schedule) <= set(SCHEDULES)
    workers = {s.worker: s for s in stages}
    assert sum(math.prod(s.submesh) for s in workers.values()) <= case.devices
    assert len(found.peak_bytes) == len(workers)
    memory = cluster_of(case.cluster, case.devices).groups[0].device.memory_bytes
    assert 0 < max(found.peak_bytes) <= memory
    for s in stages:
        assert math.prod(s.mesh_shape) == math.prod(s.submesh) and len(s.axes) == len(s.mesh_shape)
        assert len(s.remat) == s.stop - s.start and set(s.batch_axes) <= set(range(len(s.axes)))
    step = autopar.parallelize(lambda state, batch: state, **encode(options))
    assert asked(step._options).config.stages == PipelineOptions(
        schedules=options.schedule,
        starts=options.stage_starts,
        submeshes=options.submeshes,
        logical_shapes=options.mesh,
        remat=options.recompute,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "found"), each(3, (pytest.param(*x, id=x[0]) for x in PIPELINES)))
def test_a_layout_in_stages_says_how_they_hold_the_state(name: str, found: Pipeline) -> None:
    assert sorted(s for held in found.arguments for s in held.stages) == list(range(len(found.stages)))
    shapes, seen = leaves(name), set[str]()
    for held in found.arguments:
        for s in held.stages:
            stage = found.stages[s]
            sizes = dict(zip(stage.axes, stage.mesh_shape, strict=True))
            said = resolved(held.constraints, shapes)
            mine = {path for path, spec in said.items() if spec is not None}
            # a glob is of equal leaves, of which the stage may hold some
            assert [path for path in mine if fault(said[path], shapes[path], sizes)] == []
            seen |= mine
    assert {path for path in shapes if re.match(r"args\[0\](\[0\]|\.params)", path)} <= seen, "all parameters"
    for crossing in found.crossings:
        for spec, s in ((crossing.source_spec, crossing.source), (crossing.target_spec, crossing.target)):
            assert {axis for dim in spec for axis in dim} <= set(found.stages[s].axes)


@pytest.mark.parametrize("planner", choice.PLANNERS)
def test_a_recorded_layout_is_forced_by_its_options(planner: str) -> None:
    before = getattr(records.load("mlp"), planner)
    now = choice.plan_one("mlp", planner, encode(before.options)).found
    recorded_with = version("jax").startswith("0.10.")  # of another version's jaxprs prices are a little different
    assert missed(before, now, FORCED_BAR if recorded_with else 1.01) == ""
    assert now.options == before.options


# --- how it is written -----------------------------------------------------------------------------------------


def test_equal_leaves_share_a_line_and_others_follow() -> None:
    row, column, whole = (("x",), ()), ((), ("x",)), ((), ())
    specs: dict[records.Leaf, Spec] = {(f"args[0].mu['blocks'][{k}]['up']", (8, 8)): row for k in range(4)}
    specs[("args[0].mu['blocks'][2]['up']", (8, 8))] = column
    specs[("args[0].mu['embed']", (8, 8))] = whole
    specs |= {(f"args[0].mu['odd'][{k}]", (8, 4)): row for k in (0, 2)}
    specs |= {(f"args[0].mu['odd'][{k}]", (2, 8, 4)): ((), *row) for k in (1, 3)}
    found = records.as_globs(specs, records.globs_of(list(specs)))
    assert found == {
        "args[0].mu['blocks'][*]['up']": row,
        "args[0].mu['embed']": whole,
        "args[0].mu['odd'][0]": row,
        "args[0].mu['odd'][2]": row,
        "args[0].mu['odd'][1]": ((), *row),
        "args[0].mu['odd'][3]": ((), *row),
        "args[0].mu['blocks'][2]['up']": column,
    }
    assert list(found)[-1] == "args[0].mu['blocks'][2]['up']", "the last that matches holds"
    assert resolved(found, [path for path, _ in specs]) == {path: spec for (path, _), spec in specs.items()}


def test_a_glob_that_would_meet_deeper_leaves_is_not_written() -> None:
    specs: dict[records.Leaf, Spec] = {(f"args[0]['w'][{k}]['up']", (8,)): (("x",),) for k in range(2)}
    specs[("args[0]['w'][0]['in']['up']", (8, 8))] = ((), ())
    specs[("args[0]['w'][0]['in'][1]['up']", (8, 8))] = ((), ())
    assert set(records.globs_of(list(specs)).values()) == {path for path, _ in specs}


@pytest.mark.slow
def test_the_axes_of_the_batch_are_read_off() -> None:
    step, args = models.gpt(layers=1, hidden=32, heads=4, seq=16, vocab=64, batch=16)
    for axes in ((1,), ()):
        plan = autopar.parallelize(
            step, cluster="cpu:4", num_microbatches=2, stages=(1, None), mesh=["2x2"], batch_axis=[axes], workers=1
        ).plan(*args)
        assert choice.batch_axes(plan, choice.types_of(step, args, plan), 0, 8) == axes


def test_lines_are_json_that_fits_a_width() -> None:
    value = {"short": [1, 2], "long": ["x" * 30] * 8, "deep": {"a": {"b": [["y" * 60], ["z" * 60]]}}}
    text = records.lines(value)
    assert json.loads(text) == value
    assert '"short": [1, 2],' in text
    assert max(map(len, text.splitlines())) <= records.WIDTH + 20


def test_a_damaged_record_is_refused() -> None:
    data = encode(records.load("mlp"))
    del data["pipeline"]["stages"]
    with pytest.raises(PlanFormatError, match="pipeline"):
        decode(Record, data)


# --- the bar ---------------------------------------------------------------------------------------------------


def test_what_is_missed() -> None:
    before = records.load("mlp").one_mesh
    assert isinstance(before, OneMesh)
    refused = Refused(why="no plan fits", took=before.took)
    slower = replace(before, step_s=1.0011 * before.step_s)
    assert missed(before, before, SLOWER_BAR) == missed(refused, before, SLOWER_BAR) == ""
    assert missed(before, replace(before, step_s=1.0009 * before.step_s), SLOWER_BAR) == ""
    assert "bar 1.001" in missed(before, slower, SLOWER_BAR)
    assert missed(before, refused, SLOWER_BAR) == "nothing is found any more: no plan fits"
