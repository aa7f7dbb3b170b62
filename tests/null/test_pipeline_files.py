"""Pipeline plans as files: round trips, what is refused, digests, text and differences."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.ir.diff import diff_text
from autopar.ir.errors import ClusterError, PlanFormatError, VerifyError
from autopar.ir.layer_sharding import JoinChains
from autopar.ir.pipeline import ScalarExchange
from autopar.ir.plan import ArgPlan, Plan
from autopar.ir.plan_text import explain_text, plan_facts, plan_text
from autopar.ir.serde import digest, from_json, load_plan, save_plan, to_json
from autopar.ir.sharding import ShardingSpec
from autopar.ir.sharding_plan import Chain
from autopar.ir.strategy import Collective
from autopar.step.options import given_plan
from autopar.step.step_plan import StepPlan
from tests.null.pipeline_files import handmade_pipeline

FILE = handmade_pipeline()
BODY = FILE.pipelined
PIPELINE = BODY.plan
FLOAT = PIPELINE.cuts[0].values[0].type
SHARDING = BODY.shardings[0]
SHARDED = ShardingSpec(dims=(("z",), ()))
SPLIT = ShardingSpec(dims=(("x",), ()))
TWICE = ShardingSpec(dims=(("x",), ("x",)))
WHOLE = ShardingSpec(dims=((), ()))


# Files -------------------------------------------------------------------------------------------------------------


def test_the_round_trip(tmp_path: Path) -> None:
    assert from_json(Plan, to_json(FILE)) == FILE
    save_plan(FILE, tmp_path / "a.json")
    assert load_plan(tmp_path / "a.json") == FILE
    assert digest(load_plan(tmp_path / "a.json")) == digest(FILE)


def test_provenance_and_planning_processes_are_not_in_the_digest() -> None:
    later = replace(FILE, provenance=replace(FILE.provenance, seconds=(("trace", 9.0),), considered=()))
    assert FILE.config.stages is not None
    options = replace(FILE.config.stages, workers=7)
    assert digest(later) == digest(FILE)
    assert digest(replace(FILE, config=replace(FILE.config, stages=options))) == digest(FILE)
    assert digest(replace(FILE, name="other")) != digest(FILE)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"layers": [', '"leyers": [', "$.body.layers: a field of Pipelined that is missing"),
        ('"name": ', '"extra": 1, "name": ', "$.extra: expected only the fields of Plan"),
        ('"phase":"forward"', '"phase":"sideways"', 'expected one of "forward", "backward"'),
        ('"num_microbatches": 3', '"num_microbatches": 4', "contradicts itself: the schedule has 3 microbatches"),
    ],
)
def test_damaged_files(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "a.json"
    save_plan(FILE, path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(PlanFormatError, match=f"^{re.escape(str(path))}: .*{re.escape(message)}"):
        load_plan(path)


def _body(**changes: Any) -> Plan:
    return replace(FILE, body=replace(BODY, **changes))


def _pipeline(**changes: Any) -> Plan:
    return _body(plan=replace(PIPELINE, **changes))


def _stage(**changes: Any) -> Plan:
    return _pipeline(stages=(replace(PIPELINE.stages[0], **changes), *PIPELINE.stages[1:]))


def _worker(**changes: Any) -> Plan:
    p = FILE.predictions
    return replace(FILE, predictions=replace(p, workers=(replace(p.workers[0], **changes), *p.workers[1:])))


def _cut(**changes: Any) -> Plan:
    cut = PIPELINE.cuts[0]
    cut = replace(cut, values=(replace(cut.values[0], **changes),))
    return _pipeline(cuts=(cut, *PIPELINE.cuts[1:]))


def placed(**changes: Any) -> ArgPlan:
    argument = FILE.inputs[0]
    return replace(argument, places=(replace(argument.places[0], **changes),))


def _scheduled(**changes: Any) -> Plan:
    """Of a first stage that is said to be fused, and sends nothing."""
    stages = (replace(PIPELINE.stages[0], fused=True), PIPELINE.stages[1])
    return _pipeline(stages=stages, cuts=(), schedule=replace(PIPELINE.schedule, **changes))


def _layer(**changes: Any) -> Plan:
    return _body(layers=(replace(BODY.layers[0], **changes), *BODY.layers[1:]))


def _chains(**changes: Any) -> Plan:
    chain = replace(Chain(type=FLOAT, src=WHOLE, dst=SPLIT, steps=()), **changes)
    return _body(joins=(JoinChains(axes=SHARDING.axes, chains=(chain,)),))


def _sharding(**changes: Any) -> Plan:
    return _body(shardings=(replace(SHARDING, **changes), *BODY.shardings[1:]))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (_body(layers=BODY.layers[:1]), "1 layers, but stages of 2"),
        (_body(between=((),)), "1 lists of collectives between layers for 2 stages"),
        (replace(FILE, config=replace(FILE.config, num_microbatches=5)), "3 microbatches; asked for: 5"),
        (_stage(mesh=replace(PIPELINE.stages[0].mesh, device_ids=(7,))), "stage 0 uses devices that cluster"),
        (_stage(remat=("full",)), "stage 0 and the sharding of layer 0 disagree about rematerialisation"),
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
            _pipeline(cuts=PIPELINE.cuts[:1]),
            "backward value 5 crosses from stage 1 to stage 0, and no cut has it",
        ),
        (
            _pipeline(cuts=(*PIPELINE.cuts, replace(PIPELINE.cuts[0], phase="gradient"))),
            "no layers of stages 0 and 1 give and take gradient value 5 as the cut has it",
        ),
        (_stage(stop=2), "stage 0 has layers 0 to 2"),
        (_stage(fused=True), "stage 0 is fused, but sends activations or does not run each"),
        (_scheduled(tasks=((), PIPELINE.schedule.tasks[1])), "stage 0 is fused, but sends activations or does not"),
        (_scheduled(mesh_of_stage=(2, 1), tasks=((), PIPELINE.schedule.tasks[1])), "stages on meshes (2, 1), of 2"),
        (replace(FILE, inputs=(placed(stage=2),)), "on stage 2, which does not exist"),
        (replace(FILE, inputs=(placed(spec=SHARDED),)), "uses 'z', not an axis of mesh 1 (x)"),
        (_cut(src_spec=SHARDED), "layer 0, from stage 0 to stage 1: sharding [z,_] uses 'z'"),
        (_cut(dst_spec=ShardingSpec(dims=())), "does not have the rank of float32[8,8]"),
        (
            _body(exchange=ScalarExchange(compute_s=(0.0,), reduce_s=0.0, device_bytes=0.0)),
            "exchange has 1 times for 2 stages",
        ),
        (
            _body(exchange=ScalarExchange(compute_s=(0.0, 0.0), reduce_s=-1.0, device_bytes=0.0)),
            "exchange has a negative figure",
        ),
        (
            replace(FILE, predictions=replace(FILE.predictions, workers=FILE.predictions.workers[:1])),
            "predictions of 1 workers, the plan has 2",
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
def test_verify_rejects(file: Plan, message: str) -> None:
    FILE.verify()
    with pytest.raises((VerifyError, ClusterError), match=re.escape(message)):
        file.verify()


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (
            _pipeline(schedule=replace(PIPELINE.schedule, tasks=tuple(t[::-1] for t in PIPELINE.schedule.tasks))),
            "1f1b: meshes wait for each other: mesh 0 at ",
        ),
        (_stage(mesh=replace(PIPELINE.stages[0].mesh, device_ids=(7,))), "stage 0 uses devices that cluster"),
    ],
)
def test_a_plan_to_replay_is_checked_first(file: Plan, message: str, tmp_path: Path) -> None:
    assert given_plan(FILE) is FILE
    for plan in (file, StepPlan(file)):
        with pytest.raises(PlanFormatError, match=f"^plan: contradicts itself: {re.escape(message)}"):
            given_plan(plan)
    save_plan(file, tmp_path / "a.json")
    with pytest.raises(PlanFormatError, match=re.escape(f"{tmp_path / 'a.json'}: contradicts itself: {message}")):
        given_plan(tmp_path / "a.json")


# Text --------------------------------------------------------------------------------------------------------------


def test_the_text() -> None:
    text = plan_text(FILE)
    assert max(map(len, text.splitlines())) <= 100
    assert "... 1 other operators (--all shows them)" in text
    assert re.search(r"update +1 +sub +1 ms +whole", plan_text(FILE, limit=None))


def test_long_tables_are_cut() -> None:
    file = handmade_pipeline(microbatches=64)
    assert max(map(len, plan_text(file).splitlines())) <= 100
    assert "F1.63 B1.63" in plan_text(file, limit=None)
    assert "... 1 more cuts (--all shows them)" in plan_text(file, limit=1)


def test_facts_are_plain_json() -> None:
    facts = json.loads(json.dumps(plan_facts(FILE)))
    assert facts["digest"] == digest(FILE)
    assert facts["stages"][1]["layers"] == [1, 2]
    assert facts["predictions"]["workers"][0]["bubble"] == FILE.predictions.bubble_of(0)
    assert facts["cuts"][0]["bound_s"] == 0.25


def test_what_runs_between_layers_is_shown() -> None:
    row = Collective(
        kind="all-to-all", axes=("x",), operand_bytes=4, dtype="float32", trips=3, count=2, time_s=0.5,
        where="between layers",
    )  # fmt: skip
    file = _body(between=((), (row,)))
    text = plan_text(file)
    assert "between the layers of stage 1\n  all-to-all over x: 6 a step, 24 B a device in 500 ms\n" in text
    assert "of stage 0\n  all" not in text and "between the layers" not in plan_text(FILE)
    facts = json.loads(json.dumps(plan_facts(file)))
    assert [len(s["collectives_between_layers"]) for s in facts["stages"]] == [0, 1]
    assert facts["stages"][1]["collectives_between_layers"][0]["time_s"] == 0.5


def test_the_explanation() -> None:
    text = explain_text(FILE)
    assert "compared under the same cost model" in text
    assert re.search(r"bubble    \d+\.\d % of the devices' time", text)
    assert "stage 0 to 1, forward: 256 B in 500 ms, at least 250 ms by any resharding" in text
    slow = replace(PIPELINE.cuts[1], time_s=0.75)
    text = explain_text(_pipeline(cuts=(PIPELINE.cuts[0], slow)))
    assert "stage 1 to 0, backward: 256 B in 750 ms, at least 250 ms by any resharding" in text


def test_differences() -> None:
    assert diff_text(FILE, FILE) == ""
    other = handmade_pipeline("gpipe", microbatches=4)
    text = diff_text(FILE, other)
    assert "runs as\n  - 2 stages, 1f1b, 3 microbatches; 2 layers of 2 kinds\n  + 2 stages, gpipe, 4 " in text
    assert re.search(r"step time +\d+\.?\d* s -> \d+\.?\d* s +\+\d", text)
    fused = _pipeline(stages=(PIPELINE.stages[0], replace(PIPELINE.stages[1], fused=True)))
    assert "\na microbatch's forward task and the one after it are one executable: stage 1\n" in plan_text(fused)
    assert "one executable" not in plan_text(FILE)
    assert re.search(r"stages: 1 changed\n.*\n +1 +- .* none +\d.*\n +\+ .* none +fused +\d", diff_text(FILE, fused))
    moved = diff_text(FILE, _stage(remat=("full",)))
    assert re.search(r"stages: 1 changed\n.*\n +0 +- +0 +1x1 +1 +none .*\n +\+ +0 +1x1 +1 +full", moved)
    splits = replace(SHARDING.strategies[0], factor_axes=(("i", ("x",)),), operands=(SPLIT, WHOLE), results=(SPLIT,))
    text = diff_text(FILE, _sharding(strategies=(splits, SHARDING.strategies[1])))
    assert re.search(
        r"shardings: 1 layer changed\n.*\n +0 +forward dot_general \(model\.py:3\) +1 whole \[_,_\] \[_,_\] -> "
        r"\[_,_\] +1 i:x \[x,_\] \[_,_\] -> \[x,_\]\n +and 1 more",
        text,
    )
    assert "cuts: 1 changed" in diff_text(FILE, _pipeline(cuts=PIPELINE.cuts[1:]))
