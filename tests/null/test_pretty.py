"""The text form of plans."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autopar.ir.diff import diff_text
from autopar.ir.plan import Place
from autopar.ir.plan_text import plan_facts, plan_text
from autopar.ir.pretty import fold_paths
from autopar.ir.serde import digest
from autopar.ir.text import bytes_text, percent_text, seconds_text
from tests.null.handmade import handmade_plan, spec

PLAN = handmade_plan()

TEXT = """\
plan of train_step
  digest     DIGEST (autopar 0.1.0, jax 0.10.2)
  cluster    cpu:8: 1 host x 8 cpu (4.29 GB each), 2 GB/s
  asked for  method auto; mesh 2x4; 4 microbatches; pin args[0]*wq [_,y]; pin name:hidden [x,?]
  runs as    one program on mesh 2x4: x=2 (2 GB/s, 20 us); y=4 (2 GB/s, 20 us)

predicted, per device and step
  step time    2 ms (compute 1.65 ms, communication 350 us)
  peak memory  123 kB of 4.29 GB (<0.1 %); arguments 50 kB
  FLOPs        10 MFLOP

  120 ktokens a second, 5.0 % of the peak FLOP/s for the model's FLOPs
where the time goes
                       time  of the step  beside compute
  products           1.2 ms       60.0 %
  all-gather over y  160 us        8.0 %
  all-reduce over x  150 us        7.5 %
  all-reduce over y  180 us        9.0 %

dearest: dot_general (model.py:88) 1.2 ms

arguments: 7 arrays, 37.3 kB per device
  path                            count  type            sharding  per device
  args[0]['layers'][*]['wq']          3  float32[64,64]  [_,y]        12.3 kB  donated
  args[0]['layers'][{0-1}]['w1']      2  float32[64,64]  [y,_]        8.19 kB  donated
  args[0]['layers'][2]['w1']          1  float32[64,64]  [_,_]        16.4 kB  donated
  args[1]                             1  int32[8,30]     [x,_]          480 B

results: 7 arrays, 36.9 kB per device
  path                           count  type            sharding  per device
  out[0]['layers'][*]['wq']          3  float32[64,64]  [_,y]        12.3 kB
  out[0]['layers'][{0-1}]['w1']      2  float32[64,64]  [y,_]        8.19 kB
  out[0]['layers'][2]['w1']          1  float32[64,64]  [_,_]        16.4 kB
  out[1]                             1  float32[]       []               4 B

collectives: 9 in the program; a step moves 34.8 kB per device in 490 us
  kind        over  dtype     ops  runs    bytes     time
  all-reduce  y     float32     2     6  6.14 kB   180 us
  all-gather  y     bfloat16    1    ~8  ~4.1 kB  ~160 us
  all-reduce  x     float32     6     6  24.6 kB   150 us
  ~ : some run in a loop of unknown length, counted with the trips assumed below
  each:
    180 us  all-reduce  y  6 x 1.02 kB  dot_general (node 7, model.py:88)
    160 us  all-gather  y  ~8 x 512 B   while (node 9, model.py:91)
    150 us  all-reduce  x  6 x 4.1 kB   result out[0]

recomputed: 1 value; 4 MB per device not held meanwhile, for 10 us (0.5 % of the step)
  operator           count  not held   time
  tanh (model.py:9)      1      4 MB  10 us

replicated for lack of a rule: 2 operators, 0.1 % of the FLOPs
  operator   count  FLOPs  bytes  where        why
  my_kernel      2   10 k  240 B  model.py:12  no rule

assumed, for the step does not say it
  operator  count  assumed  where        why
  while         1  8 trips  model.py:91  how often a while loop runs depends on values

solved by highs, optimal: no plan under 1.98 ms, gap 1 % (of its problem 0 %), took 250 ms

compared under the same cost model
  plan           step time  against this  peak memory
  this plan           2 ms                     123 kB
  zero3             2.5 ms         +25 %       100 kB  does not fit
  data_parallel       3 ms         +50 %       200 kB

planning took 750 ms (trace 500 ms, ilp 250 ms)

notes
  - the batch of 8 leaves 1 row a device
"""


def test_the_whole_text() -> None:
    assert plan_text(PLAN) == TEXT.replace("DIGEST", digest(PLAN)[:16])


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


def test_a_difference_inside_is_said() -> None:
    assert "look the same to a user, but not inside" in diff_text(
        PLAN, replace(PLAN, body=replace(PLAN.body, checkpoints=False))
    )
