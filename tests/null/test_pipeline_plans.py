"""Pipeline plans: files, digests, text, differences; planning small models; what is refused, and how."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.ir.cluster import ClusterSpec
from autopar.ir.errors import (
    ClusterError,
    InfeasibleError,
    MicrobatchError,
    OptionError,
    PlanFormatError,
    VerifyError,
)
from autopar.ir.pipeline import ScalarExchange
from autopar.ir.pipeline_diff import pipeline_diff_text
from autopar.ir.pipeline_file import PipelineFile
from autopar.ir.pipeline_text import explain_text, pipeline_facts, pipeline_text
from autopar.ir.plan_files import load_any, load_pipeline, pipeline_digest, save_pipeline
from autopar.ir.presets import cluster_from_text
from autopar.ir.serde import from_json, load_plan, save_plan, to_json
from autopar.ir.sharding import ShardingSpec
from tests.null.handmade import handmade_plan
from tests.null.pipeline_files import handmade_pipeline

ROOT = Path(__file__).parents[2]
FILE = handmade_pipeline()
SHARDED = ShardingSpec(dims=(("z",), ()))


# Files -------------------------------------------------------------------------------------------------------------


def test_the_round_trip(tmp_path: Path) -> None:
    assert from_json(PipelineFile, to_json(FILE)) == FILE
    save_pipeline(FILE, tmp_path / "a.json")
    assert load_pipeline(tmp_path / "a.json") == FILE
    assert load_any(tmp_path / "a.json") == FILE
    assert pipeline_digest(load_pipeline(tmp_path / "a.json")) == pipeline_digest(FILE)


def test_provenance_and_planning_processes_are_not_in_the_digest() -> None:
    later = replace(FILE, provenance=replace(FILE.provenance, seconds=(("trace", 9.0),), simulated=()))
    options = replace(FILE.config.options, workers=7)
    assert pipeline_digest(later) == pipeline_digest(FILE)
    assert pipeline_digest(replace(FILE, config=replace(FILE.config, options=options))) == pipeline_digest(FILE)
    assert pipeline_digest(replace(FILE, name="other")) != pipeline_digest(FILE)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"layers": ', '"leyers": ', "$.layers: expected a value for this field of PipelineFile"),
        ('"name": ', '"extra": 1, "name": ', "$.extra: expected only the fields of PipelineFile"),
        ('"schema_version": 1', '"schema_version": 2', "a newer autopar (schema 2; this one reads 1): upgrade autopar"),
        ('"schema_version": 1', '"schema_version": 0', "an older autopar (schema 0; this one reads 1): plan again"),
        ('"phase":"forward"', '"phase":"sideways"', 'expected one of "forward", "backward"'),
        ('"num_microbatches": 3', '"num_microbatches": 4', "contradicts itself: the schedule has 3 microbatches"),
    ],
)
def test_damaged_files(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "a.json"
    save_pipeline(FILE, path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(PlanFormatError, match=f"^{re.escape(str(path))}: .*{re.escape(message)}"):
        load_pipeline(path)


def test_each_kind_of_plan_says_where_the_other_is_wanted(tmp_path: Path) -> None:
    save_pipeline(FILE, tmp_path / "stages.json")
    save_plan(handmade_plan(), tmp_path / "mesh.json")
    with pytest.raises(PlanFormatError, match=r"stages\.json: holds a pipeline plan, not a plan of one mesh"):
        load_plan(tmp_path / "stages.json")
    with pytest.raises(PlanFormatError, match=r"mesh\.json: holds a plan of one mesh, without stages"):
        load_pipeline(tmp_path / "mesh.json")
    assert load_any(tmp_path / "mesh.json") == handmade_plan()


def _stage(file: PipelineFile, **changes: Any) -> PipelineFile:
    stages = (replace(file.plan.stages[0], **changes), *file.plan.stages[1:])
    return replace(file, plan=replace(file.plan, stages=stages))


def _worker(**changes: Any) -> PipelineFile:
    p = FILE.predictions
    return replace(FILE, predictions=replace(p, workers=(replace(p.workers[0], **changes), *p.workers[1:])))


def _cut(**changes: Any) -> PipelineFile:
    cut = FILE.plan.cuts[0]
    cut = replace(cut, values=(replace(cut.values[0], **changes),))
    return replace(FILE, plan=replace(FILE.plan, cuts=(cut, *FILE.plan.cuts[1:])))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (replace(FILE, layers=FILE.layers[:1]), "1 layers, but stages of 2"),
        (replace(FILE, layouts=FILE.layouts[:1]), "1 layouts for 2 layers"),
        (replace(FILE, config=replace(FILE.config, num_microbatches=5)), "3 microbatches; asked for: 5"),
        (_stage(FILE, mesh=replace(FILE.plan.stages[0].mesh, device_ids=(7,))), "stage 0 uses devices that cluster"),
        (_stage(FILE, remat=("full",)), "stage 0 and the layouts of its layers disagree about rematerialisation"),
        (_stage(FILE, stop=2), "stage 0 has layers 0 to 2"),
        (replace(FILE, arguments=(replace(FILE.arguments[0], stage=2),)), "is on stage 2, which does not exist"),
        (replace(FILE, arguments=(replace(FILE.arguments[0], spec=SHARDED),)), "uses 'z', not an axis of mesh 1 (x)"),
        (_cut(src_spec=SHARDED), "layer 0, from stage 0 to stage 1: sharding [z,_] uses 'z'"),
        (_cut(dst_spec=ShardingSpec(dims=())), "does not have the rank of float32[8,8]"),
        (
            replace(FILE, exchange=ScalarExchange(compute_s=(0.0,), reduce_s=0.0, device_bytes=0.0)),
            "exchange has 1 times for 2 stages",
        ),
        (
            replace(FILE, exchange=ScalarExchange(compute_s=(0.0, 0.0), reduce_s=-1.0, device_bytes=0.0)),
            "exchange has a negative figure",
        ),
        (
            replace(FILE, predictions=replace(FILE.predictions, workers=FILE.predictions.workers[:1])),
            "predictions of 1 workers, the schedule has 2",
        ),
        (_worker(num_devices=3), "worker 0 is predicted with 3 devices, its mesh is 1 (x)"),
        (_worker(busy_s=1e9), "worker 0 is busy for 1000000000.0 s of a step of"),
        (_worker(peak_bytes=1e9), "worker 0 holds 1000000000.0 bytes of 10000.0"),
        (
            replace(FILE, predictions=replace(FILE.predictions, links=(replace(FILE.predictions.links[0], target=5),))),
            "no link from worker 0 to worker 5",
        ),
    ],
)
def test_verify_rejects(file: PipelineFile, message: str) -> None:
    FILE.verify()
    with pytest.raises((VerifyError, ClusterError), match=re.escape(message)):
        file.verify()


# Text --------------------------------------------------------------------------------------------------------------


def test_the_text() -> None:
    text = pipeline_text(FILE)
    lines = [re.sub(" +", " ", line.strip()) for line in text.splitlines()]
    assert text.startswith("pipeline plan of train_step\n  digest     ")
    assert max(map(len, text.splitlines())) <= 100
    for line in (
        "asked for 3 microbatches; 2 stages; submeshes 1x1; memory 10 kB",
        "layers 2 of 2 kinds",
        "1 1 1x1 1 1 none",
        "1 1 s 2 s 250 ms 250 ms 1 100 B 10 B 5 B 883 B",
        "schedule: 1f1b, 3 microbatches; order of tasks",
        "worker 1 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2",
        "0 1 forward 1 256 B 500 ms 250 ms 2 [_,_] -> [_,_]",
        "args[0]['w'][*] 2 float32[8,8] 0-1 [_,_] 256 B",
        "why: the fastest of 2 that were simulated",
    ):
        assert line in lines, line
    assert "+100 %  gpipe: 2 x 1 layers on (1,1)" in text


def test_long_tables_are_cut() -> None:
    file = handmade_pipeline(microbatches=64)
    assert max(map(len, pipeline_text(file).splitlines())) <= 100
    assert "F1.63 B1.63" in pipeline_text(file, limit=None)
    assert "... 1 more cuts (--all shows them)" in pipeline_text(file, limit=1)


def test_facts_are_plain_json() -> None:
    facts = json.loads(json.dumps(pipeline_facts(FILE)))
    assert facts["digest"] == pipeline_digest(FILE)
    assert facts["stages"][1]["layers"] == [1, 2]
    assert facts["predictions"]["workers"][0]["bubble"] == FILE.predictions.bubble_of(0)
    assert facts["cuts"][0]["bound_s"] == 0.25


def test_the_explanation() -> None:
    text = explain_text(FILE)
    assert "the fastest of 2 that were simulated" in text
    assert re.search(r"bubble    \d+\.\d % of the devices' time", text)
    assert "stage 0 to 1, forward: 256 B in 500 ms, at least 250 ms by any resharding" in text


def test_differences() -> None:
    assert pipeline_diff_text(FILE, FILE) == ""
    other = handmade_pipeline("gpipe", microbatches=4)
    text = pipeline_diff_text(FILE, other)
    assert "schedule\n  - 1f1b, 3 microbatches, 2 stages\n  + gpipe, 4 microbatches, 2 stages\n" in text
    assert re.search(r"step time +\d+\.?\d* s -> \d+\.?\d* s +\+\d", text)
    moved = pipeline_diff_text(FILE, _stage(FILE, remat=("full",)))
    assert re.search(r"stages: 1 changed\n.*\n +0 +- +0 +1x1 +1 +none .*\n +\+ +0 +1x1 +1 +full", moved)
    assert "cuts: 1 changed" in pipeline_diff_text(
        FILE, replace(FILE, plan=replace(FILE.plan, cuts=FILE.plan.cuts[1:]))
    )


# Planning ----------------------------------------------------------------------------------------------------------


def make(layers: int = 4, width: int = 512, batch: int = 1024) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """An MLP with a residual connection around each block, as shapes."""

    def forward(params: Any, x: Any) -> Any:
        for w in params["layers"]:
            x = x + jnp.tanh(x @ w["up"]) @ w["down"]
        return x

    def train_step(params: Any, x: Any) -> Any:
        loss_fn = lambda params, x: jnp.mean((forward(params, x) - x) ** 2)
        loss, grads = autopar.value_and_grad(loss_fn)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    train_step.forward = forward  # type: ignore[attr-defined]
    array = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
    layer = {"up": array(width, 4 * width), "down": array(4 * width, width)}
    return train_step, ({"layers": [layer] * layers}, array(batch, width))


def planned(*, infers: bool = False, **options: Any) -> autopar.PlannedPipeline:
    """The MLP on two CPU devices, searched in this process; a stage a device unless ``options`` say otherwise."""
    step, args = make()
    step = step.forward if infers else step  # type: ignore[attr-defined]
    options = {"cluster": "cpu:2", "num_microbatches": 4, "submeshes": ["1x1"], "remat": "none", **options}
    return autopar.plan_pipeline(step, args, workers=1, **options)


@pytest.fixture(scope="module")
def pair() -> autopar.PlannedPipeline:
    return planned(num_stages=2, donate_argnums=0)


def test_a_small_model_is_planned(pair: autopar.PlannedPipeline, tmp_path: Path) -> None:
    plan = pair.plan
    assert [(s.start, s.stop, s.mesh.device_ids) for s in plan.stages] == [(0, 2, (0,)), (2, 4, (1,))]
    assert {(cut.source, cut.target, cut.phase) for cut in plan.cuts} >= {(0, 1, "forward"), (1, 0, "backward")}
    assert sorted(a.path for a in pair.data.arguments if a.stage == 1) == [
        f"args[0]['layers'][{k}]['{name}']" for k in (2, 3) for name in ("down", "up")
    ]
    assert pair.predictions.step_s == min(seconds for _, seconds in pair.data.provenance.simulated)
    pair.save(tmp_path / "pair.json")
    loaded = autopar.load_pipeline(tmp_path / "pair.json")
    assert loaded.data == pair.data
    assert loaded.digest == pair.digest
    timeline = loaded.simulate()
    assert timeline.makespan_s == pair.predictions.step_s
    assert [w.peak_bytes for w in timeline.workers] == [w.peak_bytes for w in pair.predictions.workers]
    assert str(loaded) == str(pair)
    assert "the fastest of " in pair.explain()


def test_user_control_is_kept(pair: autopar.PlannedPipeline) -> None:
    one = planned(stage_starts=(0, 3), schedules="gpipe")
    assert [(s.start, s.stop) for s in one.plan.stages] == [(0, 3), (3, 4)]
    assert one.plan.schedule.name == "gpipe"
    text = pipeline_diff_text(pair.data, one.data)
    assert "stages: 2 changed" in text
    assert "- 4 microbatches; 2 stages; submeshes 1x1; remat none\n" in text
    assert "+ 4 microbatches; schedules gpipe; stages from layers 0, 3; submeshes 1x1; remat none\n" in text


def test_a_parallelized_step_brings_its_argnums() -> None:
    step, args = make()
    wrapped = autopar.parallelize(step, donate_argnums=0)
    plan = autopar.plan_pipeline(
        wrapped, args, cluster="cpu:2", num_microbatches=4, num_stages=2, submeshes=[(1, 1)], remat="none", workers=1
    )
    assert plan.layered is not None
    assert len(plan.layered.graph.donated) == 8


def test_a_step_that_only_infers() -> None:
    plan = planned(infers=True, num_microbatches=1, num_stages=2, batch_argnums=(1,))
    assert plan.plan.schedule.name == "inference"
    assert all(cut.phase == "forward" for cut in plan.plan.cuts)


DIGEST = """
from tests.null.test_pipeline_plans import planned
print(planned(submeshes=None, schedules=("1f1b", "zb_h1")).digest)
"""


def test_equal_inputs_give_equal_digests_whatever_the_hash_seed() -> None:
    found = [
        subprocess.run(
            [sys.executable, "-c", DIGEST], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert found[0] == found[1]
    assert re.fullmatch("[0-9a-f]{64}\n", found[0])


# Bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_stages": 5},
            "5 stages, but train_step has 4 layers: a stage needs at least one. Cut it into more layers",
        ),
        ({"num_stages": 0}, "num_stages: 0 stages; at least 1"),
        ({"num_stages": 3, "stage_starts": (0, 2)}, "num_stages is 3, but stage_starts names 2 stages (0, 2)"),
        ({"stage_starts": (1, 2)}, "stage_starts: 1, 2 must ascend from layer 0"),
        ({"stage_starts": (0, 4)}, "stage_starts: 4 is past the last of 4 layers (0 to 3)"),
        (
            {"num_stages": 3, "schedules": "1f1b"},
            "3 stages on the 2 devices of cluster cpu:2: each needs a mesh of its own, but under interleaved_1f1b",
        ),
        ({"num_stages": 1, "schedules": ["gpipe"]}, "a single stage runs one task after the other; allow 1f1b"),
        (
            {"submeshes": ["1x3"]},
            "submeshes: 1x3 (hosts x devices of each) is no part of cluster cpu:2; there are 1x1, 1x2",
        ),
        ({"submeshes": [(1,)]}, "submeshes: (1,) is not (hosts, devices of each); write (1, 4) or 1x4, say"),
        (
            {"submeshes": ["1x1", "1x2"], "stage_starts": (0, 2), "schedules": "1f1b"},
            "submeshes: 2 stages on 1x1, 1x2 take 3 devices; cluster cpu:2 has 2",
        ),
        (
            {"submeshes": ["1x1", "1x2"], "stage_starts": (0, 2), "schedules": "1f1b", "uniform_stages": True},
            "uniform_stages: the stages' submeshes are not equal: 1x1, 1x2",
        ),
        (
            {"submeshes": None, "mesh_shapes": ["2"], "num_stages": 2, "schedules": "1f1b"},
            "submeshes: 2 stages on 2 x (1,2) at least take 4 devices; cluster cpu:2 has 2",
        ),
        (
            {"mesh_shapes": ["2x2"]},
            "mesh_shapes: 2x2 is no logical mesh of an allowed submesh; no submesh has 4 devices",
        ),
        ({"schedules": ["1f1c"]}, "schedules: there is no '1f1c' (did you mean 1f1b?)"),
        ({"schedules": []}, "schedules: none is allowed; there are gpipe, 1f1b"),
        ({"schedules": "inference"}, "schedules: inference has no backward pass, but train_step takes gradients"),
        (
            {"infers": True, "schedules": "zb_h1", "num_microbatches": 1},
            "schedules: zb_h1 splits the backward pass, but forward has none: it takes no gradients",
        ),
        ({"remat": "all"}, "remat: 'all' is not one of none, dots, full"),
        ({"memory_bytes": 0}, "memory_bytes: 0 is not above 0"),
        ({"workers": 0}, "workers: 0 processes; at least 1"),
        ({"num_microbatches": 0}, "num_microbatches: 0 is no number of microbatches; at least 1"),
        ({"layers": "all"}, "layers: 'all' is neither a number of layers"),
    ],
)
def test_contradictions(options: dict[str, Any], message: str) -> None:
    step, args = make()
    infers = options.pop("infers", False)
    step = step.forward if infers else step  # type: ignore[attr-defined]
    options = {"cluster": "cpu:2", "num_microbatches": 4, "submeshes": ["1x1"], "workers": 1, **options}
    with pytest.raises(OptionError, match=re.escape(message)):
        autopar.plan_pipeline(step, args, **options)


def test_a_batch_that_microbatches_do_not_divide() -> None:
    with pytest.raises(MicrobatchError, match=r"args\[1\]: the batch has 1024 examples, which num_microbatches=3"):
        planned(num_microbatches=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices_per_host": 0}, "must be at least 1; group 0 has 1, 0 and 1"),
        ({"hosts": -2}, "must be at least 1; group 0 has -2, 8 and 1"),
        (
            {"nic": {"bytes_per_s": 0.0}},
            "cluster cpu, group 0, nic: link needs positive, finite latency_s and bytes_per_s",
        ),
        ({"intra_host": {"latency_s": -1.0}}, "cluster cpu, group 0, intra_host: link needs positive, finite"),
        ({"device": {"memory_bytes": -5}}, "memory and rates must be positive; memory_bytes is -5"),
        (
            {"device": {"flops_per_s": (("float32", 0.0),)}},
            "memory and rates must be positive; flops_per_s float32 is 0.0",
        ),
    ],
)
def test_clusters_with_zero_or_negative_entries(change: dict[str, Any], message: str) -> None:
    cluster = cluster_from_text("cpu")
    (group,) = cluster.groups
    for field, value in change.items():
        group = replace(group, **{field: replace(getattr(group, field), **value) if isinstance(value, dict) else value})
    with pytest.raises(ClusterError, match=re.escape(message)):
        planned(cluster=replace(cluster, groups=(group,)))


def test_links_between_groups_are_checked_too() -> None:
    (group,) = cluster_from_text("cpu").groups
    slow = replace(group.nic, bytes_per_s=-1.0)
    with pytest.raises(ClusterError, match="cluster two, between: link needs positive, finite"):
        ClusterSpec(name="two", groups=(group, group), between=slow).verify()


def test_a_model_that_does_not_fit() -> None:
    """The refusal says by how much; a limit a little above what it names does fit."""
    pattern = (
        r"no cut of 4 layers into stages fits 1 MB a device on cpu:2: the leanest needs (\S+) MB, (\S+) MB \((\S+) %\) "
        r"more\. What would fit: a limit of that"
    )
    with pytest.raises(InfeasibleError, match=pattern) as caught:
        planned(memory_bytes=1_000_000, schedules="1f1b")
    found = re.search(pattern, str(caught.value))
    assert found is not None
    least = float(found[1])
    assert float(found[2]) == pytest.approx(least - 1, rel=0.01)
    assert float(found[3]) == pytest.approx(100 * (least - 1), rel=0.01)
    assert "recomputing layers (remat full is not allowed)" in str(caught.value)
    with pytest.raises(InfeasibleError):
        planned(memory_bytes=int(0.97e6 * least), schedules="1f1b")
    assert planned(memory_bytes=int(1.03e6 * least), schedules="1f1b").predictions.peak_bytes <= 1.03e6 * least


def test_more_hosts_are_proposed_where_they_would_do() -> None:
    with pytest.raises(InfeasibleError) as caught:
        planned(memory_bytes=40_000_000, schedules="1f1b")
    assert "; 2 times as many hosts (" in str(caught.value)
    assert len(planned(cluster="cpu:4", memory_bytes=40_000_000, schedules="1f1b").plan.stages) > 2
