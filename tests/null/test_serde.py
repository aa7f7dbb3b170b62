"""The JSON codec: round trips, faults that name their place, files that survive a failed write."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar.ir.errors import PlanFormatError, VerifyError
from autopar.ir.glance import glance
from autopar.ir.graph import Constant, Graph, Node, TensorType
from autopar.ir.plan import SCHEMA_VERSION, OneProgram, Plan
from autopar.ir.presets import PRESETS, cluster_from_text
from autopar.ir.serde import digest, from_json, load_plan, save_plan, to_json
from autopar.ir.sharding import ShardingSpec
from autopar.ir.sharding_plan import RegionPlan
from benchmarks.models import gpt
from tests.null.handmade import handmade_plan, spec

PLAN = handmade_plan()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    number: float
    maybe: int | None
    mixed: int | float | str | tuple[int, ...] | None
    word: Literal["a", "b"]
    steps: tuple[Run | Free, ...]
    pair: tuple[str, bool]
    table: dict[str, tuple[int, ...]]
    anything: Any


EVERY = Every(
    number=0.1,
    maybe=None,
    mixed=1.5,
    word="a",
    steps=(Run(stage=1), Free(stage=1)),
    pair=("p", True),
    table={"t": (1, 2)},
    anything={"k": (1, (2.5, None), {"deep": True})},
)


def test_every_type_form_makes_the_round_trip() -> None:
    assert from_json(Every, to_json(EVERY)) == EVERY
    for mixed in (1, 1.0, "1", (1, 2), None):
        back = from_json(Every, to_json(replace(EVERY, mixed=mixed))).mixed
        assert back == mixed
        assert type(back) is type(mixed)


def test_members_of_a_union_of_classes_carry_their_name() -> None:
    assert json.loads(to_json(EVERY))["steps"] == [{"type": "Run", "stage": 1}, {"type": "Free", "stage": 1}]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_make_the_round_trip_exactly(number: float) -> None:
    assert repr(from_json(Every, to_json(replace(EVERY, number=number))).number) == repr(number)


def test_an_int_in_a_float_field_is_written_as_a_float() -> None:
    assert json.loads(to_json(replace(EVERY, number=3)), parse_int=str)["number"] == 3.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"number": "x"}, '$.number: expected a number, got "x"'),
        ({"number": True}, "$.number: expected a number, got true"),
        ({"maybe": 1.5}, "$.maybe: expected int or null, got 1.5"),
        ({"maybe": True}, "$.maybe: expected int or null, got true"),
        ({"word": "c"}, '$.word: expected one of "a", "b", got "c"'),
        (
            {"steps": [{"type": "Run", "stage": 1}, {"stage": 2}]},
            "$.steps[1].type: expected one of Run, Free, got null",
        ),
        ({"steps": [{"type": "Free", "stage": "2"}]}, '$.steps[0].stage: expected an integer, got "2"'),
        ({"pair": ["p"]}, "$.pair: expected an array of 2, got list"),
        ({"pair": ["p", 1]}, "$.pair[1]: expected true or false, got 1"),
        ({"table": {"t": [1, 2.0]}}, "$.table.t[1]: expected an integer, got 2.0"),
        ({"steps": [{"type": "Run", "stage": True}]}, "$.steps[0].stage: expected an integer, got true"),
        ({"table": []}, "$.table: expected an object, got list"),
        ({"surprise": 1}, "$.surprise: expected only the fields of Every (number, maybe,"),
    ],
)
def test_a_fault_is_told_with_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanFormatError, match=re.escape(message)):
        from_json(Every, json.dumps(json.loads(to_json(EVERY)) | change))


def test_a_missing_field_is_named() -> None:
    data = json.loads(to_json(EVERY))
    del data["word"]
    with pytest.raises(PlanFormatError, match=re.escape("$.word: a field of Every that is missing")):
        from_json(Every, json.dumps(data))


def test_what_is_not_of_its_type_is_not_written() -> None:
    wrong: Any = replace(EVERY, table={"t": (1, "2")})  # pyright: ignore
    with pytest.raises(VerifyError, match=re.escape("Every cannot be written: $.table.t[1]: expected an integer")):
        to_json(wrong)
    with pytest.raises(VerifyError, match=r"\$\.number: expected a finite number, got Infinity"):
        to_json(replace(EVERY, number=float("inf")))
    with pytest.raises(VerifyError, match=r"\$\.anything: expected plain JSON .*, got list"):
        to_json(replace(EVERY, anything=[1]))


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1', "", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_damaged_json(text: str) -> None:
    with pytest.raises(PlanFormatError, match="damaged JSON"):
        from_json(Every, text)


def test_graphs_make_the_round_trip() -> None:
    scalar = TensorType(shape=(), dtype="float32")
    body = Graph(values=(scalar,), nodes=(), inputs=(0,), outputs=(0,))
    node = Node(
        id=0,
        primitive="cond",
        params={"linear": (True, None), "n": {"a": (1, 2)}},
        operands=(0, Constant(type=scalar, value=2.0)),
        results=(1,),
        operand_types=(scalar, scalar),
        result_types=(scalar,),
        bodies=(body,),
    )
    graph = Graph(values=(scalar, scalar), nodes=(node,), inputs=(0,), outputs=(1,), state=((0, 0),), donated=(0,))
    assert from_json(Graph, to_json(graph)) == graph


@pytest.mark.parametrize("name", [*sorted(PRESETS), "v5p-128:2", "v7x-8", "dgx-a100+dgx-h100"])
def test_clusters_make_the_round_trip(name: str) -> None:
    cluster = cluster_from_text(name)
    assert from_json(type(cluster), to_json(cluster)) == cluster


def test_plans_make_the_round_trip(tmp_path: Path) -> None:
    save_plan(PLAN, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == PLAN
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.json"]


def test_a_plan_file_has_a_line_per_argument(tmp_path: Path) -> None:
    save_plan(PLAN, tmp_path / "plan.json")
    lines = (tmp_path / "plan.json").read_text().splitlines()
    assert len([line for line in lines if line.startswith('  {"path"')]) == len(PLAN.inputs) + len(PLAN.outputs)


def test_the_digest_leaves_out_wall_times_and_nothing_else() -> None:
    report = replace(PLAN.sharding.report, seconds=99.0)
    later = replace(
        PLAN,
        provenance=replace(PLAN.provenance, seconds=(), notes=()),
        body=replace(PLAN.body, sharding=replace(PLAN.sharding, report=report)),
    )
    assert digest(later) == digest(PLAN)
    assert digest(replace(PLAN, name="other")) != digest(PLAN)
    assert digest(replace(PLAN, body=replace(PLAN.body, sharding=replace(PLAN.sharding, objective_s=1.0)))) != digest(
        PLAN
    )


def _edited(tmp_path: Path, edit: Any) -> Path:
    """The plan's file after ``edit(data)``."""
    path = tmp_path / "plan.json"
    save_plan(PLAN, path)
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    return path


def _set(*keys: str | int, to: Any) -> Any:
    def edit(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = to

    return edit


def _sharding(*keys: str | int, to: Any) -> Any:
    return _set("body", "sharding", *keys, to=to)


def _dims(to: Any) -> Any:
    """Of the first argument."""
    return _set("inputs", 0, "places", 0, "spec", "dims", to=to)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            _set("schema_version", to=SCHEMA_VERSION + 1),
            f"was written by a newer autopar (schema {SCHEMA_VERSION + 1}; this one reads {SCHEMA_VERSION}): upgrade "
            "autopar",
        ),
        (
            _set("schema_version", to=0),
            f"was written by an older autopar (schema 0; this one reads {SCHEMA_VERSION}): plan again",
        ),
        (_set("schema_version", to="1"), '$.schema_version: expected an integer, got "1"'),
        (
            _sharding("mesh", "axes", 1, "size", to="four"),
            '$.body.sharding.mesh.axes[1].size: expected an integer, got "four"',
        ),
        (
            _sharding("root", "nodes", 2, to=5),
            "contradicts itself: step: a node names a strategy that is not",
        ),
        (
            _dims(to=[["q"], []]),
            "argument args[0]['layers'][0]['wq']: sharding [q,_] uses 'q', not an axis of mesh 2x4 (x, y)",
        ),
        (
            _dims(to=[[]]),
            "sharding [_] does not have the rank of float32[64,64]",
        ),
        (_dims(to=[["x"], ["x"]]), "sharding [x,x] uses a mesh axis twice"),
        (
            _sharding("root", "rebased", 0, 1, "dims", to=[["q"]]),
            "step: sharding [q] uses 'q', not an axis",
        ),
        (_set("inputs", 0, "donated_to", to=70), "donated to result 70, which does not exist"),
        (_set("inputs", 0, "becomes", to=70), "becomes result 70, which does not exist"),
        (_sharding("mesh", "axes", 1, "size", to=3), "mesh of shape (2, 3) with 8 devices"),
        (
            _sharding("mesh", "device_ids", 0, to=9),
            "the mesh uses devices that cluster cpu:8 does not have",
        ),
        (_sharding("root", "bodies", 0, 0, to=9), "step: a body of node 9, which does not exist"),
    ],
)
def test_a_plan_that_was_edited_badly_is_refused(tmp_path: Path, edit: Any, message: str) -> None:
    path = _edited(tmp_path, edit)
    with pytest.raises(PlanFormatError, match=re.escape(message)) as caught:
        load_plan(path)
    assert str(caught.value).startswith(str(path) + ": ")


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(PlanFormatError, match=r"plan.json: cannot be read: No such file or directory"):
        load_plan(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanFormatError, match=r"is not a plan file: byte 0 is not UTF-8 text"):
        load_plan(path)
    path.write_text('{"hello": 1}')
    with pytest.raises(PlanFormatError, match=r"is not a plan file: no schema_version at its top level"):
        load_plan(path)
    save_plan(PLAN, path)
    path.write_text(path.read_text()[:-100])
    with pytest.raises(PlanFormatError, match=r"damaged JSON: .* at line \d+ column \d+"):
        load_plan(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    save_plan(PLAN, path)
    before = path.read_text()
    with pytest.raises(VerifyError):
        save_plan(replace(PLAN, name=3), path)  # pyright: ignore

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(PlanFormatError, match=r"cannot write .*: No space left on device"):
        save_plan(replace(PLAN, name="other"), path)
    assert path.read_text() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.json"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanFormatError, match=r"cannot write .*nowhere.*: No such file or directory"):
        save_plan(PLAN, tmp_path / "nowhere" / "plan.json")


def test_a_plan_of_forty_thousand_nodes_stays_small(tmp_path: Path) -> None:
    root = RegionPlan(
        inputs=(spec("x", ""),) * 1000,
        outputs=(),
        nodes=(0,) * 40_000,
        rebased=(),
        copies=tuple((i, spec("", "y")) for i in range(2000)),
    )
    large = replace(PLAN, body=OneProgram(sharding=replace(PLAN.sharding, root=root)))
    save_plan(large, tmp_path / "plan.json")
    assert (tmp_path / "plan.json").stat().st_size < 2_000_000
    assert load_plan(tmp_path / "plan.json") == large


def test_from_json_needs_the_right_class() -> None:
    with pytest.raises(PlanFormatError, match="field of Plan"):
        from_json(Plan, to_json(ShardingSpec(dims=())))


def test_a_plan_is_read_without_its_graph(tmp_path: Path) -> None:
    step, args = gpt(layers=1, hidden=32, heads=2, seq=8, vocab=32, batch=8)
    plan = autopar.parallelize(step, cluster="cpu:8", mesh=(8,), num_microbatches=1).plan(*args).data
    save_plan(plan, tmp_path / "plan.json")
    light = load_plan(tmp_path / "plan.json", graph=False)
    assert plan.step is not None and light == replace(plan, step=None)
    assert digest(light) == digest(plan) and glance(light) == glance(plan)


def test_long_names_do_not_make_long_errors(tmp_path: Path) -> None:
    plan = handmade_plan()
    long = replace(plan, inputs=(replace(plan.inputs[0], role="9" * 5000), *plan.inputs[1:]))
    save_plan(long, tmp_path / "plan.json")
    with pytest.raises(PlanFormatError, match="contradicts itself: argument") as caught:
        load_plan(tmp_path / "plan.json")
    assert len(str(caught.value)) < 1000
