"""A plan planned again from its file: the same again, the same as from the step, and what only the step can do."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cli import main
from autopar.ir.errors import InfeasibleError, OptionError
from autopar.ir.options import settled
from autopar.ir.plan import Plan
from autopar.ir.plan_text import plan_facts
from autopar.ir.presets import cluster_from_text
from autopar.ir.serde import digest, load_plan, save_plan
from autopar.step.again import plan_again
from autopar.step.asked import NamedMesh, as_options, in_stages, of_options, one_program
from tests.clusters import cluster
from tests.null.test_imports import run_python
from tests.null.test_planner_choice import apart, array, chain
from tests.shares import each

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("planning again")]  # what all share is made once

FAST = cluster(4, flops_per_s=1e12, memory_bytes_per_s=1e11, latency_s=1e-6, bytes_per_s=1e11)
LARGER = cluster(8, flops_per_s=1e12, memory_bytes_per_s=1e11, latency_s=1e-6, bytes_per_s=1e10)
GPUS = cluster_from_text("dgx-a100")


def planned(options: dict[str, Any], made: tuple[Any, Any] | None = None) -> Plan:
    step, args = chain() if made is None else made
    return autopar.parallelize(step, **options).plan(*args).data


def read_again(plan: Plan, tmp_path: Path) -> Plan:
    save_plan(plan, tmp_path / "plan.json")
    return load_plan(tmp_path / "plan.json")


@pytest.fixture(scope="module")
def program() -> Plan:
    return planned({"cluster": FAST, "mesh": (2, 2), "num_microbatches": 2})


@pytest.fixture(scope="module")
def pipeline() -> Plan:
    return planned({"cluster": apart(), "stages": 2, "num_microbatches": 4, "workers": 1})


OPTIONS: dict[str, dict[str, Any]] = {
    "program": {"cluster": FAST, "stages": 1, "num_microbatches": 2},
    "method": {"cluster": FAST, "mesh": (4,), "method": "zero2", "forbid": "all-to-all", "num_microbatches": 1},
    "degrees": {"cluster": FAST, "tensor": 2, "stages": 1, "num_microbatches": 1},
    "memory": {"cluster": GPUS, "mesh": (8,), "num_microbatches": 1, "recompute": True, "memory_bytes": 64_000_000},
    "pins": {"cluster": FAST, "mesh": (2, 2), "constraints": {"args[1]": jax.sharding.PartitionSpec("y")}},
    "stages": {"cluster": apart(), "stages": (2, None), "num_microbatches": 4, "schedule": "1f1b", "workers": 1},
    "stages' method": {"cluster": apart(), "stages": 2, "num_microbatches": 4, "method": "zero2", "workers": 1},
    "starts": {
        "cluster": FAST, "stage_starts": (0, 1), "submeshes": ["1x2"], "recompute": "full", "layers": 4,
        "batch_axis": [0, ()], "num_microbatches": 2, "whole_examples": True, "workers": 1,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", each(2, OPTIONS))
def test_with_nothing_changed_it_is_the_same_plan(name: str, tmp_path: Path) -> None:
    examples = 16384 if name == "memory" else 512
    plan = planned(OPTIONS[name], chain(examples=examples))
    assert (name == "memory") == bool(plan.config.stages is None and plan.sharding.recompute)
    again = plan_again(read_again(plan, tmp_path), {"workers": 1} if plan.config.stages else None)
    assert digest(again) == digest(plan)
    assert digest(plan_again(again, {"workers": 1} if plan.config.stages else None)) == digest(plan)
    assert again.step == plan.step


@pytest.mark.slow
@pytest.mark.full
def test_what_was_compared_with_stages_is_the_same_plan_and_says_what_was_not_compared(tmp_path: Path) -> None:
    plan = planned({"cluster": FAST})
    assert plan.config.stages is None and plan.step is not None and plan.step.freely
    again = plan_again(read_again(plan, tmp_path))
    assert digest(again) == digest(plan)
    count = plan.config.num_microbatches
    assert again.provenance.notes[-1] == (
        f"planned again from a plan for {FAST.name}, without the step: stages and other numbers of microbatches than "
        f"{count} were not compared"
    )


@pytest.mark.parametrize(
    "change", [{"cluster": LARGER, "mesh": (8,)}, {"memory_bytes": 8_000_000}, {"method": "zero3"}]
)
def test_one_program_is_planned_as_from_the_step(program: Plan, change: dict[str, Any]) -> None:
    options = {"cluster": FAST, "mesh": (2, 2), "num_microbatches": 2, **change}
    assert digest(plan_again(program, change)) == digest(planned(options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", each(2, [{"schedule": ["gpipe"]}, {"cluster": FAST}, {"cluster": apart(2e12)}, {"stages": (2, 4)}])
)
def test_stages_are_planned_as_from_the_step(pipeline: Plan, change: dict[str, Any]) -> None:
    options = {"cluster": apart(), "stages": 2, "num_microbatches": 4, "workers": 1, **change}
    assert digest(plan_again(pipeline, {**change, "workers": 1})) == digest(planned(options))


def test_rules_and_batches_of_the_step_are_kept(tmp_path: Path) -> None:
    autopar.sharding_rule("of_this_test", "b n -> b n")  # used by nobody
    autopar.sharding_rule("cos", "b _ -> b _")
    try:

        def step(w: Any, x: Any) -> Any:
            return w, jnp.cos(x @ w)

        options = {"cluster": FAST, "mesh": (4,), "method": "tensor_parallel", "num_microbatches": 1}
        plan = planned(options, (step, (array(64, 64), array(32, 64))))
    finally:
        from autopar.frontend.user_rules import _RULES

        _RULES.pop("cos"), _RULES.pop("of_this_test")
    assert plan.step is not None
    assert [name for name, _ in plan.step.user_rules] == ["cos"]
    assert plan.step.batch_inputs == ((1, 0),)
    again = read_again(plan, tmp_path)
    assert digest(plan_again(again)) == digest(plan)
    assert again.step is not None
    for without in (replace(again.step, user_rules=()), replace(again.step, batch_inputs=())):
        assert digest(plan_again(replace(again, step=without))) != digest(plan)


@jax.tree_util.register_pytree_node_class
class Boxed:
    """A parameter with the mesh axes that a model library keeps beside it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _: None, values: tuple[Any]) -> Boxed:
        return cls(*values)

    def get_partition_spec(self) -> jax.sharding.PartitionSpec:
        return jax.sharding.PartitionSpec("y", "x")


def test_metadata_of_a_model_library_is_kept(tmp_path: Path) -> None:
    def step(w: Boxed, x: Any) -> Any:
        return jnp.cos(x @ w.value)

    args = Boxed(array(64, 64)), array(8, 64)
    plan = planned({"cluster": FAST, "mesh": (2, 2), "num_microbatches": 1}, (step, args))
    again = read_again(plan, tmp_path)
    assert digest(plan_again(again)) == digest(plan)
    assert str(plan_again(again).inputs[0].spec) == "[y,x]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "change", "message"),
    [
        ("program", {"num_microbatches": 4}, "the plan holds the step as it was traced, in 2 microbatches"),
        ("pipeline", {"num_microbatches": "auto"}, "the plan holds the step as it was traced, in 4 microbatches"),
        ("program", {"stages": 2}, "stages: is of stages, and the plan holds the step as one program, not in layers"),
        ("program", {"schedule": ["1f1b"]}, "schedule: is of stages, and the plan holds the step as one program"),
        ("program", {"workers": 1}, "workers: the plan is of one program: one program is planned in one process"),
        ("pipeline", {"stages": 1}, "stages: one program is planned from the whole step's graph"),
        (
            "pipeline",
            {"layers": 2},
            "layers: cannot be changed in a plan alone: layers are cut when the step is",
        ),
        (
            "pipeline",
            {"donate_argnums": 0},
            "donate_argnums: cannot be changed in a plan alone: what is donated",
        ),
        ("program", {"static_argnums": 0}, "static_argnums: cannot be changed in a plan alone: static arguments"),
        ("program", {"batch_argnums": 0}, "batch_argnums: cannot be changed in a plan alone: which arguments"),
        ("program", {"on_unsupported": "error"}, "on_unsupported: cannot be changed in a plan alone: operators"),
        ("program", {"constraints": {}}, "constraints: cannot be changed in a plan alone"),
        ("pipeline", {"method": "tensor_parallel"}, "method: stages= asks for stages, whose meshes may differ in size"),
        ("program", {"method": "magic"}, "method: 'magic' is not one of"),
        ("program", {"mesh_shape": (4,)}, "mesh_shape: is mesh now"),
    ],
)
def test_what_only_the_step_can_do_is_refused(
    request: pytest.FixtureRequest, which: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        plan_again(request.getfixturevalue(which), change)


def test_the_number_of_microbatches_that_it_has_may_be_given(program: Plan) -> None:
    assert digest(plan_again(program, {"num_microbatches": 2, "stages": 1})) == digest(program)


def test_what_does_not_fit_is_refused(program: Plan) -> None:
    with pytest.raises(InfeasibleError, match="no plan"):
        plan_again(program, {"memory_bytes": 1000})


def test_a_plan_without_its_graph_or_that_follows_another_is_refused(program: Plan) -> None:
    with pytest.raises(OptionError, match="the plan of step has no graph: it cannot be planned again without the step"):
        plan_again(replace(program, step=None))
    assert program.step is not None
    with pytest.raises(OptionError, match="has its arguments where another plan has them"):
        plan_again(replace(program, step=replace(program.step, follows=True)))


def test_another_platform_is_planned_for_by_the_graph_that_there_is(program: Plan) -> None:
    assert program.step is not None and program.step.undoes_remat in ((), ("cpu",))
    there = plan_again(program, {"cluster": GPUS, "mesh": (8,), "recompute": True})
    told = planned({"cluster": GPUS, "mesh": (8,), "recompute": True, "num_microbatches": 2})
    assert replace(there.sharding, report=told.sharding.report) == told.sharding
    here = plan_again(program, {"recompute": True})
    assert any("the graph is as it was traced for cpu" in note for note in there.provenance.notes)
    assert not any("as it was traced" in note for note in here.provenance.notes)
    for plan, undone in ((there, False), (here, bool(program.step.undoes_remat))):
        assert any(note.startswith("nothing is recomputed") for note in plan.provenance.notes) == undone


def test_the_digest_and_the_facts_leave_the_graph_out(program: Plan) -> None:
    assert digest(replace(program, step=None)) == digest(program)
    assert "step" not in plan_facts(program)


@pytest.mark.parametrize("options", list(OPTIONS.values())[:4] + [OPTIONS["stages"], OPTIONS["starts"]])
def test_options_come_back_from_what_was_asked(options: dict[str, Any]) -> None:
    asked = of_options(settled({k: v for k, v in options.items() if k != "cluster"}))
    if asked.stages is not None and asked.program is None:
        assert in_stages(as_options(asked.stages), "stages") == asked.stages
    else:
        assert asked.program is not None
        assert one_program(as_options(asked.program)) == asked.program


def test_names_of_axes_come_back_from_what_was_asked() -> None:
    config = one_program(settled({"mesh": NamedMesh(shape=(2, 4), names=("data", "model")), "batch_axis": "data"}))
    assert config.axis_names == ("data", "model")
    assert one_program(as_options(config)) == config


# The command line ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("which", "more"), [("program", []), ("pipeline", ["--workers", "1"])])
def test_it_runs_where_jax_cannot_be_imported(
    request: pytest.FixtureRequest, which: str, more: list[str], tmp_path: Path
) -> None:
    plan, path, out = request.getfixturevalue(which), str(tmp_path / "plan.json"), str(tmp_path / "again.json")
    save_plan(plan, path)
    code = f"from autopar.cli import main\nsys.exit(main({['plan', path, *more, '--out', out]!r}))"
    done = run_python(code, without=("jax", "jaxlib"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("plan of step: ")
    assert digest(load_plan(out)) == digest(plan)


def test_options_on_the_command_line(program: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = str(tmp_path / "plan.json"), str(tmp_path / "again.json")
    save_plan(program, path)
    options = ["--cluster", "dgx-a100:2", "--mesh", "2x8", "--memory-gb", "0.5", "--method", "zero2"]
    assert main(["plan", path, *options, "--out", out]) == 0
    again = load_plan(out)
    assert again.cluster == cluster_from_text("dgx-a100:2")
    assert again.config == replace(program.config, mesh_shape=(2, 8), memory_bytes=500_000_000, method="zero2")
    assert capsys.readouterr().err.splitlines()[0] == f"loading {path}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "layers=2"], "--set gives keywords to a function, and PLAN is a plan: layers"),
        (["--microbatches", "8"], "num_microbatches: the plan holds the step as it was traced, in 2 microbatches"),
        (["--stages", "2-"], "stages: is of stages, and the plan holds the step as one program"),
        (["--cluster", "dgx"], "unknown cluster 'dgx'"),
    ],
)
def test_what_the_command_line_refuses(
    program: Plan, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "plan.json", tmp_path / "again.json"
    save_plan(program, path)
    assert main(["plan", str(path), *options, "--out", str(out)]) == 2
    assert f"autopar: error: {message.replace('PLAN', str(path))}" in capsys.readouterr().err
    assert not out.exists()


def test_a_plan_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path / "no.json"), "--out", str(tmp_path / "out.json")]) == 2
    assert "no.json: cannot be read: No such file or directory" in capsys.readouterr().err
