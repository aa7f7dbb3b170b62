"""Pipeline plans as files: round trips, what is refused, digests, text and differences."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.ir.errors import ClusterError, PlanFormatError, VerifyError
from autopar.ir.layer_sharding import JoinChains
from autopar.ir.pipeline import ScalarExchange
from autopar.ir.pipeline_diff import pipeline_diff_text
from autopar.ir.pipeline_file import PipelineFile
from autopar.ir.pipeline_text import explain_text, pipeline_facts, pipeline_text
from autopar.ir.plan import ArgPlan
from autopar.ir.plan_files import load_any, load_pipeline, pipeline_digest, save_pipeline
from autopar.ir.serde import from_json, load_plan, save_plan, to_json
from autopar.ir.sharding import ShardingSpec
from autopar.ir.sharding_plan import Chain
from tests.null.handmade import handmade_plan
from tests.null.pipeline_files import handmade_pipeline

FILE = handmade_pipeline()
FLOAT = FILE.plan.cuts[0].values[0].type
SHARDING = FILE.shardings[0]
SHARDED = ShardingSpec(dims=(("z",), ()))
SPLIT = ShardingSpec(dims=(("x",), ()))
TWICE = ShardingSpec(dims=(("x",), ("x",)))
WHOLE = ShardingSpec(dims=((), ()))


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
        ('"schema_version": 4', '"schema_version": 5', "a newer autopar (schema 5; this one reads 4): upgrade autopar"),
        ('"schema_version": 4', '"schema_version": 3', "an older autopar (schema 3; this one reads 4): plan again"),
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


def placed(**changes: Any) -> ArgPlan:
    argument = FILE.inputs[0]
    return replace(argument, places=(replace(argument.places[0], **changes),))


def _layer(**changes: Any) -> PipelineFile:
    return replace(FILE, layers=(replace(FILE.layers[0], **changes), *FILE.layers[1:]))


def _chains(**changes: Any) -> PipelineFile:
    chain = replace(Chain(type=FLOAT, src=WHOLE, dst=SPLIT, steps=()), **changes)
    return replace(FILE, joins=(JoinChains(axes=SHARDING.axes, chains=(chain,)),))


def _sharding(**changes: Any) -> PipelineFile:
    return replace(FILE, shardings=(replace(SHARDING, **changes), *FILE.shardings[1:]))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (replace(FILE, layers=FILE.layers[:1]), "1 layers, but stages of 2"),
        (replace(FILE, config=replace(FILE.config, num_microbatches=5)), "3 microbatches; asked for: 5"),
        (_stage(FILE, mesh=replace(FILE.plan.stages[0].mesh, device_ids=(7,))), "stage 0 uses devices that cluster"),
        (_stage(FILE, remat=("full",)), "stage 0 and the sharding of layer 0 disagree about rematerialisation"),
        (_layer(sharding=2), "layer 0 has sharding 2 of 2"),
        (_sharding(remat="full"), "stage 0 and the sharding of layer 0 disagree about rematerialisation"),
        (_sharding(axes=()), "layer 0 is sharded over other axes than stage 0's mesh 1 (x) has"),
        (_sharding(receives=()), "layer 0 receives 1 values, its sharding 0"),
        (_sharding(sends=(WHOLE, WHOLE)), "layer 0 sends 1 values, its sharding 2"),
        (_sharding(sends=(SHARDED,)), "sharding 0: sharding [z,_] uses 'z'; the axes are x"),
        (_sharding(sends=(TWICE,)), "sharding 0: sharding [x,x] uses a mesh axis twice"),
        (_sharding(strategies=SHARDING.strategies[:1]), "sharding 0: node 1 has strategy 1 of 1"),
        (_sharding(root=replace(SHARDING.root, bodies=())), "sharding 0: node 0 has strategy -1 of 2"),
        (
            _sharding(chains=(Chain(type=FLOAT, src=ShardingSpec(dims=()), dst=WHOLE, steps=()),)),
            "sharding 0: a chain of float32[8,8] leads through [], which has another rank",
        ),
        (
            _sharding(operators=(replace(SHARDING.operators[0], strategy=9),)),
            "sharding 0: 1 x dot_general with strategy 9",
        ),
        (
            _sharding(sends=(SPLIT,)),
            "nothing says how forward value 5, from layer 0 to layer 1, gets from [x,_] to [_,_]",
        ),
        (_chains(src=SHARDED), "sharding [z,_] uses 'z'; the axes are x"),
        (_chains(dst=ShardingSpec(dims=())), "a chain of float32[8,8] leads through [], which has another rank"),
        (_cut(value=6), "forward value 5 crosses from stage 0 to stage 1, and no cut has it"),
        (
            replace(FILE, plan=replace(FILE.plan, cuts=FILE.plan.cuts[:1])),
            "backward value 5 crosses from stage 1 to stage 0, and no cut has it",
        ),
        (
            replace(
                FILE, plan=replace(FILE.plan, cuts=(*FILE.plan.cuts, replace(FILE.plan.cuts[0], phase="gradient")))
            ),
            "no layers of stages 0 and 1 give and take gradient value 5 as the cut has it",
        ),
        (_stage(FILE, stop=2), "stage 0 has layers 0 to 2"),
        (replace(FILE, inputs=(placed(stage=2),)), "on stage 2, which does not exist"),
        (replace(FILE, inputs=(placed(spec=SHARDED),)), "uses 'z', not an axis of mesh 1 (x)"),
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
    assert "sharding of layer 0 on mesh 1 (x), remat none" in lines
    assert "backward 1 dot_general whole [_,_] [_,_] -> [_,_] model.py:3" in lines
    assert "... 1 other operators (--all shows them)" in lines
    assert re.search(r"update +1 +sub +whole", pipeline_text(FILE, limit=None))
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
    slow = replace(FILE.plan.cuts[1], time_s=0.75)
    text = explain_text(replace(FILE, plan=replace(FILE.plan, cuts=(FILE.plan.cuts[0], slow))))
    assert "stage 1 to 0, backward: 256 B in 750 ms, at least 250 ms by any resharding" in text


def test_differences() -> None:
    assert pipeline_diff_text(FILE, FILE) == ""
    other = handmade_pipeline("gpipe", microbatches=4)
    text = pipeline_diff_text(FILE, other)
    assert "schedule\n  - 1f1b, 3 microbatches, 2 stages\n  + gpipe, 4 microbatches, 2 stages\n" in text
    assert re.search(r"step time +\d+\.?\d* s -> \d+\.?\d* s +\+\d", text)
    moved = pipeline_diff_text(FILE, _stage(FILE, remat=("full",)))
    assert re.search(r"stages: 1 changed\n.*\n +0 +- +0 +1x1 +1 +none .*\n +\+ +0 +1x1 +1 +full", moved)
    splits = replace(SHARDING.strategies[0], factor_axes=(("i", ("x",)),), operands=(SPLIT, WHOLE), results=(SPLIT,))
    text = pipeline_diff_text(FILE, _sharding(strategies=(splits, SHARDING.strategies[1])))
    assert re.search(
        r"shardings: 1 layer changed\n.*\n +0 +forward dot_general \(model\.py:3\) +1 whole \[_,_\] \[_,_\] -> "
        r"\[_,_\] +1 i:x \[x,_\] \[_,_\] -> \[x,_\]\n +and 1 more",
        text,
    )
    assert "cuts: 1 changed" in pipeline_diff_text(
        FILE, replace(FILE, plan=replace(FILE.plan, cuts=FILE.plan.cuts[1:]))
    )
