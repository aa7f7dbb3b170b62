"""The text form of plans."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.ir.diff import diff_text
from autopar.ir.errors import OptionError
from autopar.ir.glance import WIDTH, glance
from autopar.ir.graph import TensorType
from autopar.ir.pipelined import Pipelined
from autopar.ir.plan import ArgPlan, Ended, Place, Plan
from autopar.ir.plan_text import plan_facts, plan_text, section_text
from autopar.ir.pretty import fold_paths
from autopar.ir.serde import digest
from autopar.ir.sharding import ShardingSpec
from autopar.ir.text import bytes_text, percent_text, seconds_text
from tests.null.handmade import handmade_plan, spec
from tests.null.pipeline_files import handmade_pipeline

PLAN = handmade_plan()

GOLDENS = Path(__file__).parents[1] / "golden" / "plans"
TEXTS = {
    "one_program": lambda: plan_text(PLAN),
    "one_program_glance": lambda: glance(PLAN),
    "pipeline": lambda: plan_text(handmade_pipeline()),
    "pipeline_glance": lambda: glance(handmade_pipeline()),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_match_their_goldens(name: str, regen_goldens: bool) -> None:
    text, path = re.sub("digest +[0-9a-f]{16}", "digest  DIGEST", TEXTS[name]()), GOLDENS / f"{name}.txt"
    if regen_goldens:
        path.write_text(text)
    assert text == path.read_text()
    if name.endswith("glance"):
        assert max(map(len, text.splitlines())) <= WIDTH


def test_what_hides_beside_compute_is_told_where_it_is_a_part_of_the_step() -> None:
    p = PLAN.predictions
    for share, said in ((0.01, True), (1e-6, False), (0.0, False)):
        text = glance(replace(PLAN, predictions=replace(p, hidden_s=share * p.step_s)))
        assert ("of it beside compute)" in text) == said


def test_digests_are_shown() -> None:
    for text in (plan_text(PLAN), glance(PLAN)):
        assert f" {digest(PLAN)[:16]} (autopar 0.1.0, jax 0.10.2)\n" in text


def test_arguments_are_found_by_a_part_of_their_path() -> None:
    rows = [line.split()[0] for line in section_text(PLAN, "args", pattern="[2]*w1").splitlines() if "[2]" in line]
    assert rows == ["args[0]['layers'][2]['w1']", "out[0]['layers'][2]['w1']"]
    assert "results" not in section_text(PLAN, "args", pattern="args[1]")
    with pytest.raises(OptionError, match=r"no argument or result has 'wz' in its path; near to that: .*\['wq'\]"):
        section_text(PLAN, "args", pattern="wz")


def test_the_batch_comes_first() -> None:
    assert section_text(PLAN, "args").splitlines()[2].split()[0] == "args[1]"


def test_tables_are_clipped_on_request() -> None:
    assert "  ... 2 more rows (--all shows them)" in plan_text(PLAN, limit=2)


def test_a_plan_with_nothing_to_tell() -> None:
    bare = replace(
        PLAN,
        body=replace(
            PLAN.body,
            sharding=replace(PLAN.sharding, collectives=(), recompute=(), replicated=(), assumptions=()),
        ),
        provenance=replace(PLAN.provenance, considered=(), notes=()),
    )
    text = plan_text(bare)
    assert "collectives: none" in text
    assert "replicated for lack of a rule: none" in text
    assert "assumed" not in text
    assert "recomputed" not in text
    assert "compared" not in text
    assert "notes" not in text


def test_facts_are_json_with_every_row() -> None:
    facts = json.loads(json.dumps(plan_facts(PLAN)))
    assert len(facts["arguments"]) == 7
    assert facts["arguments"][0] == {
        "path": "args[0]['layers'][0]['wq']",
        "shape": [64, 64],
        "dtype": "float32",
        "role": "weights",
        "places": [{"stage": 0, "rows": None, "dims": [[], ["y"]], "unreduced": [], "bytes_per_device": 4096}],
        "donated_to": 0,
        "becomes": 0,
    }
    assert facts["arguments"][-1]["donated_to"] is None
    assert facts["mesh"]["shape"] == [2, 4]
    assert (facts["collectives"][2]["trips"], facts["collectives"][2]["trips_assumed"]) == (8, True)
    assert facts["assumptions"][0]["assumed"] == "8 trips"
    assert facts["solver"]["gap"] == pytest.approx(0.01)
    assert facts["planning_s"] == 0.75
    assert facts["recompute"][0]["consumers"] == [3]
    assert facts["replicated"][0]["why"] == "no rule"


def paths(*rows: tuple[str, str]) -> list[tuple[str, int]]:
    """(folded path, count)."""
    return [(f.path, len(f.rows)) for f in fold_paths(rows)]


def test_folding() -> None:
    assert paths(("a[0]", "s"), ("a[1]", "s")) == [("a[*]", 2)]
    assert paths(("a[0]", "s"), ("a[1]", "t"), ("a[2]", "s")) == [("a[{0,2}]", 2), ("a[1]", 1)]
    assert paths(("['Dense_0']['w']", "s"), ("['Dense_1']['w']", "s")) == [("['Dense_*']['w']", 2)]
    assert paths(("h0/wq", "s"), ("h1/wq", "s")) == [("h*/wq", 2)]
    assert paths(("ffn/w1", "s"), ("ffn/w2", "s")) == [("ffn/w1", 1), ("ffn/w2", 1)]
    assert paths(("a[0][0]", "s"), ("a[0][1]", "s"), ("a[1][0]", "s"), ("a[1][1]", "s")) == [("a[*][*]", 4)]
    three = (("a[0][0]", "s"), ("a[0][1]", "s"), ("a[1][0]", "s"))
    assert paths(*three) == [(path, 1) for path, _ in three]  # a*, b* would claim a[1][1] too
    assert paths(("opt.mu['w']", "s"), ("opt.nu['w']", "s")) == [("opt.mu['w']", 1), ("opt.nu['w']", 1)]


def test_units() -> None:
    assert [bytes_text(n) for n in (0, 999, 1000, 1.5e9, 999.9e9)] == ["0 B", "999 B", "1 kB", "1.5 GB", "1000 GB"]
    assert [seconds_text(s) for s in (0, 2e-6, 0.0123, 1.5, 1234)] == ["0 s", "2 us", "12.3 ms", "1.5 s", "1234 s"]
    assert [percent_text(a, b) for a, b in ((1, 3), (0, 3), (1, 1e6), (1, 0))] == ["33.3 %", "0.0 %", "<0.1 %", "n/a"]
    assert [percent_text(a, 1e6) for a in (-1, 999_999, 1e6)] == [">-0.1 %", ">99.9 %", "100.0 %"]


def test_equal_plans_have_no_difference() -> None:
    assert diff_text(PLAN, PLAN) == ""
    assert diff_text(PLAN, replace(PLAN, provenance=replace(PLAN.provenance, seconds=()))) == ""


def test_differences() -> None:
    batch = replace(PLAN.inputs[-1], places=(Place(spec=spec("xy", "")),))
    sharding = replace(PLAN.sharding, collectives=PLAN.sharding.collectives[1:], replicated=())
    other = replace(
        PLAN,
        config=replace(PLAN.config, num_microbatches=1),
        inputs=(*PLAN.inputs[:-1], batch),
        outputs=PLAN.outputs[:-1],
        body=replace(PLAN.body, sharding=sharding),
        predictions=replace(PLAN.predictions, step_s=1e-3, communication_s=200e-6),
    )
    assert diff_text(PLAN, other) == (
        "asked for\n"
        "  - method auto; mesh 2x4; 4 microbatches; pin args[0]*wq [_,y]; pin name:hidden [x,?]\n"
        "  + method auto; mesh 2x4; pin args[0]*wq [_,y]; pin name:hidden [x,?]\n"
        "\n"
        "arguments: 1 changed\n"
        "  path     count  a      b\n"
        "  args[1]      1  [x,_]  [x·y,_]\n"
        "\n"
        "results: 1 changed\n"
        "  path    count  a             b\n"
        "  out[1]      1  float32[] []  absent\n"
        "\n"
        "collectives\n"
        "  kind        over  runs          bytes            time\n"
        "  all-reduce  x     6 ->  0  24.6 kB ->  0 B  150 us ->  0 s\n"
        "\n"
        "replicated for lack of a rule\n"
        "  my_kernel  2 -> 0  no rule\n"
        "\n"
        "predicted\n"
        "  step time      2 ms -> 1 ms      -50 %\n"
        "  communication  350 us -> 200 us  -42.9 %\n"
    )


def test_a_changed_type_shows_both() -> None:
    batch = replace(PLAN.inputs[-1], type=replace(PLAN.inputs[-1].type, shape=(16, 30)))
    text = diff_text(PLAN, replace(PLAN, inputs=(*PLAN.inputs[:-1], batch)))
    assert "  args[1]      1  int32[8,30] [x,_]  int32[16,30] [x,_]\n" in text


def fed(pipeline: Plan, axis: str) -> Plan:
    """A handmade pipeline whose second stage is given a batch in microbatches."""
    whole, one = (TensorType(shape=(n, 8), dtype="int32") for n in (16, 4))
    place = Place(stage=1, spec=ShardingSpec(dims=((axis,) if axis else (), ())))
    batch = ArgPlan(path="args[1]", type=whole, places=(), role="batch", fed=(place,), fed_type=one)
    return replace(pipeline, inputs=(*pipeline.inputs, batch))


def test_a_batch_that_a_stage_is_given_lies_there() -> None:
    pipeline = handmade_pipeline()
    axis = pipeline.meshes[1].axes[0].name
    text = diff_text(fed(pipeline, ""), fed(pipeline, axis))
    assert f"  args[1]      1  [_,_] on stage 1  [{axis},_] on stage 1\n" in text
    assert "int32[4,8] a microbatch [_,_]" in glance(fed(pipeline, ""))


def test_leaves_that_take_more_on_some_stages_are_rows_of_their_own() -> None:
    """A row's bytes are those of all of its leaves on one device."""
    pipeline = handmade_pipeline()
    assert isinstance(pipeline.body, Pipelined)
    stages = list(pipeline.body.plan.stages)
    (axis, *others) = stages[1].mesh.axes
    stages[1] = replace(stages[1], mesh=replace(stages[1].mesh, axes=(replace(axis, name="x", size=2), *others)))
    body = replace(pipeline.body, plan=replace(pipeline.body.plan, stages=tuple(stages)))
    weight = pipeline.inputs[0].type
    places = (Place(stage=0, spec=spec("", "")), Place(stage=0, spec=spec("", "")), Place(stage=1, spec=spec("x", "")))
    inputs = tuple(ArgPlan(path=f"args[0][{k}]", type=weight, places=(place,)) for k, place in enumerate(places))
    rows = section_text(replace(pipeline, body=body, inputs=inputs), "args").splitlines()
    assert rows[2].split()[:2] == ["args[0][{0-1}]", "2"] and "512 B" in rows[2], "two of 256"
    assert rows[3].split()[:2] == ["args[0][2]", "1"] and "128 B" in rows[3]


def test_a_search_that_ended_early_is_told_at_a_glance() -> None:
    ended = Ended(why="time_limit_s=20 passed", what="every plan", bound_s=0.5 * PLAN.predictions.step_s)
    plan = replace(PLAN, provenance=replace(PLAN.provenance, ended=ended))
    assert "not searched to the end: time_limit_s=20 passed" in " ".join(glance(plan).split())
    assert "not searched" not in glance(PLAN)


def test_a_difference_inside_is_said() -> None:
    assert "look the same to a user, but not inside" in diff_text(
        PLAN, replace(PLAN, body=replace(PLAN.body, checkpoints=False))
    )
