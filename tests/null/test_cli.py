"""The command line, by its text: results on stdout, errors in one message with exit code 2."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.cli import main
from autopar.ir.errors import InfeasibleError
from autopar.ir.glance import glance
from autopar.ir.options import settled
from autopar.ir.plan import SCHEMA_VERSION
from autopar.ir.plan_text import SECTIONS, plan_text, section_text
from autopar.ir.progress import Progress
from autopar.ir.serde import load_plan, save_plan
from autopar.step.options import asked as what_is_asked
from tests.null.handmade import handmade_plan
from tests.null.pipeline_files import handmade_pipeline

PLAN = handmade_plan()
PIPELINE = handmade_pipeline()
MODEL = """
def make(layers=2, *, name="gpt", fail=None):
    if fail == "pair":
        return 3
    if fail == "args":
        return step, 4
    if fail == "own":
        raise RuntimeError("my own bug")
    return step, (layers, name)

def step(*args):
    return args

def _private():
    return step, ()

class Config:
    pass

from functools import wraps
CONSTANT = 3

@wraps(make)
def _hidden(*args, **kwargs):
    return make(*args, **kwargs)

wrapped = _hidden
"""

SMALL = """
import jax

def make():
    return (lambda w, x: (w, (x @ w).sum())), tuple(jax.ShapeDtypeStruct(s, "float32") for s in ((8, 8), (16, 8)))
"""


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    save_plan(PLAN, tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


@pytest.fixture
def pipeline_file(tmp_path: Path) -> str:
    save_plan(PIPELINE, tmp_path / "pipeline.json")
    return str(tmp_path / "pipeline.json")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Stands in for `autopar.step.step`: records what it is asked for, checks it, and plans by hand."""
    record: dict[str, Any] = {}

    class Step:
        def __init__(self, fun: Any, settings: dict[str, Any]) -> None:
            self.config = what_is_asked(settled(settings)).config
            record.update(fun=fun, tell=settings.pop("progress", None), settings=settings)

        def __call__(self) -> None:
            raise AssertionError("planning does not run the step")

        def with_options(self, **settings: Any) -> Step:
            return Step(self, settings)

        def plan(self, *args: Any) -> Any:
            record["args"] = args
            for done in range(3):  # lines of one phase are seconds apart
                record["tell"](Progress(phase="solving [3] nodes", elapsed_s=1.0, done=done, total=3, best_s=0.5))
            if self.config.memory_bytes == 1000:
                raise InfeasibleError("no plan fits 1 kB per device: the best needs 1 MB")
            return types.SimpleNamespace(data=PLAN if self.config.stages is None else PIPELINE)

    steps = types.ModuleType("autopar.step.step")
    steps.Step = Step  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "autopar.step.step", steps)
    path = list(sys.path)
    yield record
    sys.path[:] = path
    for name in ("model_of_test", "broken", "needs"):
        sys.modules.pop(name, None)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model_of_test.py").write_text(MODEL)
    return str(tmp_path / "model_of_test.py")


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Runs ``autopar argv``, which must end with exit code 2; returns its message."""
    assert main(argv) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert "Traceback" not in out.err
    return next(line for line in out.err.splitlines() if line.startswith("autopar: error: "))


def test_inspect(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", plan_file]) == 0
    out = capsys.readouterr()
    assert out.err == ""
    assert "\x1b" not in out.out
    assert out.out == glance(PLAN)
    assert "peak memory  123 kB of 4.29 GB" in out.out
    assert max(map(len, out.out.splitlines())) <= 100


@pytest.mark.parametrize("name", SECTIONS)
def test_inspect_a_section(name: str, plan_file: str, pipeline_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    for path, plan in ((plan_file, PLAN), (pipeline_file, PIPELINE)):
        assert main(["inspect", path, f"--{name}"]) == 0
        assert capsys.readouterr().out == section_text(plan, name)
        assert main(["inspect", path, f"--{name}", "--all"]) == 0
        assert capsys.readouterr().out == section_text(plan, name, limit=None)
    assert main(["inspect", plan_file, "--why", "--args", "wq"]) == 0
    both = capsys.readouterr().out
    assert both == section_text(PLAN, "args", pattern="wq") + "\n" + section_text(PLAN, "why")


def test_inspect_all_of_it(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", plan_file, "--all"]) == 0
    assert capsys.readouterr().out == plan_text(PLAN, limit=None)


def test_arguments_that_are_not_there(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no argument or result has 'bias' in its path; near to that: " in fails(
        capsys, "inspect", plan_file, "--args", "bias"
    )


def test_inspect_json(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", plan_file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predictions"]["peak_memory_bytes"] == 123_456


def test_headings_are_bold_on_a_terminal(
    plan_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["inspect", plan_file]) == 0
    assert "\x1b[1mplan of train_step: " in capsys.readouterr().out


def test_diff(plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", plan_file, plan_file]) == 0
    assert re.fullmatch(r"equal plans \(digest [0-9a-f]{16}\)\n", capsys.readouterr().out)
    other = str(tmp_path / "other.json")
    save_plan(replace(PLAN, predictions=replace(PLAN.predictions, step_s=4e-3)), other)
    assert main(["diff", plan_file, other]) == 1
    assert capsys.readouterr().out == "predicted\n  step time  2 ms -> 4 ms  +100 %\n"


def test_files_that_cannot_be_read(plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(capsys, "inspect", "no.json") == ("autopar: error: no.json: cannot be read: No such file or directory")
    newer = tmp_path / "newer.json"
    here, there = (f'"schema_version": {version}' for version in (SCHEMA_VERSION, SCHEMA_VERSION + 1))
    newer.write_text(Path(plan_file).read_text().replace(here, there))
    assert fails(capsys, "diff", plan_file, str(newer)) == (
        f"autopar: error: {newer}: was written by a newer autopar (schema {SCHEMA_VERSION + 1}; this one reads "
        f"{SCHEMA_VERSION}): upgrade autopar"
    )


def test_plan(asked: dict[str, Any], model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out.json")
    options = ["--mesh", "2x4", "--memory-gb", "1.5", "--microbatches", "4", "--method", "zero2", "--time-limit", "5"]
    options += ["--forbid", "all-to-all", "--set", "layers=12", "name=big", "--out", out]
    assert main(["plan", model + ":make", "--cluster", "cpu:8", *options]) == 0
    assert asked["args"] == (12, "big")
    assert asked["fun"].__name__ == "step"
    cluster = asked["settings"].pop("cluster")
    assert cluster.name == "cpu:8"
    assert asked["settings"] == {
        "mesh": (2, 4),
        "memory_bytes": 1_500_000_000,
        "num_microbatches": 4,
        "method": "zero2",
        "forbid": ["all-to-all"],
        "time_limit_s": 5.0,
    }
    assert load_plan(out) == PLAN
    printed = capsys.readouterr()
    assert printed.out == glance(PLAN)
    assert printed.err.splitlines() == [
        f"loading {model}:make",
        "solving [3] nodes 0/3, 1 s, best 500 ms a step",
        f"saved {out}",
    ]


def test_plan_passes_on_only_what_was_asked(asked: dict[str, Any], model: str, tmp_path: Path) -> None:
    assert main(["plan", model + ":make", "--cluster", "v5e-8", "--out", str(tmp_path / "out.json")]) == 0
    assert list(asked["settings"]) == ["cluster"]


@pytest.mark.parametrize(("option", "value"), [("yes", True), ("no", False)])
def test_recomputation_is_asked_for_or_ruled_out(
    asked: dict[str, Any], model: str, tmp_path: Path, option: str, value: bool
) -> None:
    argv = ["plan", model + ":make", "--cluster", "cpu", "--recompute", option, "--out", str(tmp_path / "o.json")]
    assert main(argv) == 0
    assert asked["settings"]["recompute"] is value


def test_a_step_that_is_parallelized_already_keeps_its_own_options(
    asked: dict[str, Any], model: str, tmp_path: Path
) -> None:
    wrapped = (
        Path(model).read_text() + "\nfrom autopar.step.step import Step\nstep = Step(step, {'donate_argnums': 0})\n"
    )
    Path(model).write_text(wrapped)
    assert (
        main(["plan", model + ":make", "--cluster", "cpu", "--method", "zero3", "--out", str(tmp_path / "o.json")]) == 0
    )
    assert type(asked["fun"]).__name__ == "Step"
    assert asked["settings"].pop("cluster").name == "cpu"
    assert asked["settings"] == {"method": "zero3"}


def test_targets_by_module_name(asked: dict[str, Any], model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(model).parent)
    assert main(["plan", "model_of_test:make", "--cluster", "cpu", "--out", "out.json"]) == 0
    assert asked["args"] == (2, "gpt")


@pytest.mark.parametrize(
    ("target", "more", "message"),
    [
        ("model", [], "target 'model': write module:function or file.py:function"),
        ("no/such.py:make", [], "target 'no/such.py:make': there is no file no/such.py"),
        ("no_such_module.x:make", [], "there is no module 'no_such_module' (looked in the current folder and"),
        ("MODEL:made", [], "'made' does not exist in MODEL; it has make, step, wrapped"),
        ("MODEL:CONSTANT", [], "'CONSTANT' is not a function in MODEL; it has make, step, wrapped"),
        ("BROKEN:make", [], "cannot read BROKEN: invalid syntax"),
        ("NEEDS:make", [], "importing needs failed: No module named 'no_such_module'"),
        (
            "MODEL:make",
            ["--set", "depth=3"],
            "got an unexpected keyword argument 'depth'. It is make(layers=2, *, name=",
        ),
        ("MODEL:make", ["--set", "depth"], "--set 'depth': write key=value, for example --set layers=4"),
        ("MODEL:make", ["--set", "layers=1", "--set", "layers=2"], "--set gives 'layers' twice"),
        ("MODEL:make", ["--set", "fail=pair"], "must return (train_step, args), got a int"),
        ("MODEL:make", ["--set", "fail=args"], "args must be a tuple of the step's arguments, got a int"),
        ("MODEL:make", ["--cluster", "dgx"], "unknown cluster 'dgx'"),
        ("MODEL:make", ["--solver", "magic"], "solver: 'magic' is not one of auto, highs, cbc"),
        ("MODEL:make", ["--memory-gb", "1e-6"], "no plan fits 1 kB per device: the best needs 1 MB"),
        ("MODEL:make", ["--out", "nowhere/plan.json"], "--out nowhere/plan.json: there is no folder nowhere"),
        ("MODEL:make", ["--out", "/"], "--out /: is a folder"),
    ],
)
def test_what_cannot_be_planned(
    asked: dict[str, Any],
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    target: str,
    more: list[str],
    message: str,
) -> None:
    names = {"MODEL": model, "BROKEN": str(tmp_path / "broken.py"), "NEEDS": str(tmp_path / "needs.py")}
    Path(names["BROKEN"]).write_text("def make(:\n")
    Path(names["NEEDS"]).write_text("import no_such_module\n")
    for word, path in names.items():
        target, message = target.replace(word, path), message.replace(word, path)
    out = tmp_path / "out.json"
    out.write_text("as it was")
    assert message in fails(capsys, "plan", target, "--cluster", "cpu", "--out", str(out), *more)
    assert out.read_text() == "as it was"


def test_a_mesh_that_the_cluster_has_no_room_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.py").write_text(SMALL)
    target, out = f"{tmp_path / 'small.py'}:make", str(tmp_path / "out.json")
    assert "mesh 4x4 needs 16 devices; cluster cpu has 8" in fails(
        capsys, "plan", target, "--cluster", "cpu", "--mesh", "4x4", "--out", out
    )


def test_an_exception_of_the_user_keeps_its_traceback(asked: dict[str, Any], model: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="my own bug"):
        main(["plan", model + ":make", "--cluster", "cpu", "--set", "fail=own", "--out", str(tmp_path / "o.json")])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["plan", "m:f", "--out", "x.json"], "the following arguments are required: --cluster"),
        (
            ["plan", "m:f", "--cluster", "cpu", "--out", "x", "--memory-gb", "-1"],
            "argument --memory-gb: -1 is no finite number above 0",
        ),
        (["plan", "m:f", "--cluster", "cpu", "--out", "x", "--time-limit", "soon"], "'soon' is not a number"),
        (["plan", "m:f", "--cluster", "cpu", "--out", "x", "--forbid", "gossip"], "invalid choice: 'gossip'"),
        (["plan", "m:f", "--cluster", "cpu", "--out", "x", "--method", "magic"], "invalid choice: 'magic'"),
        (
            ["plan", "m:f", "--cluster", "cpu", "--out", "x", "--mesh", "2by4"],
            "argument --mesh: '2by4' is not a shape; write its axis sizes as in 8, 2x4 or 2x2x2",
        ),
    ],
)
def test_bad_options(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


# Pipelines ---------------------------------------------------------------------------------------------------------


def test_plan_a_pipeline(asked: dict[str, Any], model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out.json")
    options = ["--microbatches", "4", "--stages", "2", "--stage-starts", "0,12", "--schedule", "1f1b"]
    options += ["--schedule", "zb_h1", "--submesh", "1x4", "--submesh", "1x2", "--mesh", "2x2", "--mesh", "4"]
    options += ["--uniform-stages", "--memory", "1.5", "--recompute", "none", "--recompute", "full", "--layers", "24"]
    options += ["--forbid", "all-to-all", "--workers", "1", "--set", "layers=12", "--out", out]
    options += ["--batch-axis", "0", "--batch-axis", "free", "--whole-examples"]
    assert main(["plan", model + ":make", "--cluster", "cpu:8", *options]) == 0
    assert asked["args"] == (12, "gpt")
    assert asked["settings"].pop("cluster").name == "cpu:8"
    assert asked["settings"] == {
        "num_microbatches": 4,
        "stages": 2,
        "stage_starts": (0, 12),
        "schedule": ["1f1b", "zb_h1"],
        "submeshes": [(1, 4), (1, 2)],
        "mesh": [(2, 2), (4,)],
        "batch_axis": [0, None],
        "whole_examples": True,
        "uniform_stages": True,
        "memory_bytes": 1_500_000_000,
        "recompute": ["none", "full"],
        "layers": 24,
        "forbid": ["all-to-all"],
        "workers": 1,
    }
    assert load_plan(out) == PIPELINE
    printed = capsys.readouterr()
    assert printed.out == glance(PIPELINE)
    assert printed.err.splitlines()[-1] == f"saved {out}"


def test_a_pipeline_passes_on_only_what_was_asked(asked: dict[str, Any], model: str, tmp_path: Path) -> None:
    options = ["--microbatches", "2", "--layers", "names", "--time-limit", "5", "--solver", "cbc"]
    options += ["--out", str(tmp_path / "o.json")]
    assert main(["plan", model + ":make", "--cluster", "cpu", *options]) == 0
    assert asked["settings"].pop("cluster").name == "cpu"
    assert asked["settings"] == {"num_microbatches": 2, "layers": "names", "time_limit_s": 5.0, "solver": "cbc"}


@pytest.mark.parametrize(("text", "stages"), [("4", 4), ("2-8", (2, 8)), ("2-", (2, None))])
def test_how_many_stages(asked: dict[str, Any], model: str, tmp_path: Path, text: str, stages: Any) -> None:
    out = str(tmp_path / "o.json")
    assert main(["plan", model + ":make", "--cluster", "cpu", "--stages", text, "--out", out]) == 0
    assert asked["settings"]["stages"] == stages
    assert load_plan(out) == PIPELINE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "2", "--stages", "1"], "workers: stages=1 asks for one program, and one program is planned in"),
        (["--cache", "c", "--mesh", "8"], "cache: mesh= asks for one program, and what is kept are solved layers, and"),
        (["--recompute", "full"], "recompute: 'full' says what layers keep, and one program has none"),
        (["--mesh", "2x4", "--mesh", "8"], "mesh: [(2, 4), (8,)]: several shapes are for stages; one program has one"),
        (["--batch-axis", "x+y"], "batch_axis: [('x', 'y')]: several axes are for stages; one program takes one"),
        (["--stages", "2", "--method", "tensor_parallel"], "method: stages= asks for stages, whose meshes may differ"),
    ],
)
def test_options_of_the_other_kind_of_plan(
    asked: dict[str, Any],
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    argv = ["plan", model + ":make", "--cluster", "cpu", *options, "--out", str(tmp_path / "o.json")]
    assert message in fails(capsys, *argv)
    assert asked == {}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--stages", "0"], "argument --stages: '0' is not a whole number above 0"),
        (["--stage-starts", "0;3"], "'0;3': write the first layer of every stage, 0,12,24 say"),
        (["--submesh", "4"], "'4': write hosts x devices of each, 1x4 say"),
        (["--mesh", "x4"], "'x4' is not a shape"),
        (["--stages", "2-x"], "argument --stages: 'x' is not a whole number above 0"),
        (["--batch-axis", "0+"], "'0+': write a mesh axis, x or 0 or 0+1 say, or whole, or free"),
        (["--schedule", "2f2b"], "invalid choice: '2f2b'"),
        (["--recompute", "some"], "invalid choice: 'some'"),
        (["--layers", "many"], "argument --layers: 'many' is not a whole number above 0"),
    ],
)
def test_bad_pipeline_options(option: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "m:f", "--cluster", "cpu", "--out", "x", *option])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_inspect_a_pipeline(pipeline_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", pipeline_file]) == 0
    assert capsys.readouterr().out == glance(PIPELINE)
    assert main(["inspect", pipeline_file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schedule"]["name"] == "1f1b"


def test_diff_of_pipelines(
    pipeline_file: str, plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", pipeline_file, pipeline_file]) == 0
    assert re.fullmatch(r"equal plans \(digest [0-9a-f]{16}\)\n", capsys.readouterr().out)
    other = str(tmp_path / "other.json")
    save_plan(handmade_pipeline("gpipe"), other)
    assert main(["diff", pipeline_file, other]) == 1
    text = "2 stages, {}, 3 microbatches; 2 layers of 2 kinds\n"
    assert f"  - {text.format('1f1b')}  + {text.format('gpipe')}" in capsys.readouterr().out
    assert main(["diff", plan_file, pipeline_file]) == 1
    mesh = "2x4: x=2 (2 GB/s, 20 us); y=4 (2 GB/s, 20 us)"
    out = capsys.readouterr().out
    assert f"runs as\n  - one program on mesh {mesh}\n  + {text.format('1f1b')}" in out


SIMULATED = """\
step of train_step: 14.6 s
  1f1b, 3 microbatches, 2 stages on 2 workers
0 FFFFF········BBBBBFFFBBBBB·····BBBBBgu 35 % idle
1 ····FFBBBBBBFFBBBBB···FFFBBBBBg······u 35 % idle
F = forward, B = backward, g = gradients reduced, u = update, · = nothing

workers
  worker  stages   busy  bubble  peak memory     of
       0       0  9.5 s  35.0 %        893 B  10 kB
       1       1  9.5 s  35.0 %        883 B  10 kB

links
  from  to  transfers   busy  of the step
     0   1          3  1.5 s       10.3 %
     1   0          3  1.5 s       10.3 %
"""


def test_simulate(pipeline_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.json"
    assert main(["simulate", pipeline_file, "--width", "38", "--trace", str(trace)]) == 0
    out = capsys.readouterr()
    assert out.out == SIMULATED
    assert out.err == f"saved {trace}\n"
    events = json.loads(trace.read_text())["traceEvents"]
    ran = [e for e in events if e["ph"] == "X" and e["pid"] == 0]
    assert sum(e["dur"] for e in ran) == pytest.approx(1e6 * sum(w.busy_s for w in PIPELINE.predictions.workers))


def test_simulate_blocking(pipeline_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", pipeline_file, "--blocking"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert re.fullmatch(r"step of train_step: 1\d(\.\d)? s; the plan says 14\.6 s, transfers beside no compute", first)
    other = str(tmp_path / "other.json")
    save_plan(handmade_pipeline("zb_h1"), other)
    assert "--blocking: the order of zb_h1 needs transfers beside compute: workers wait for ever" in fails(
        capsys, "simulate", other, "--blocking"
    )


def test_what_cannot_be_simulated(
    plan_file: str, pipeline_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is a plan of one program, without stages: there is nothing to simulate" in fails(
        capsys, "simulate", plan_file
    )
    assert main(["simulate", pipeline_file, "--trace", str(tmp_path / "no" / "t.json")]) == 2
    assert "cannot write" in capsys.readouterr().err
    body = PIPELINE.pipelined
    tasks = body.plan.schedule.tasks
    order = ((tasks[0][2], *tasks[0][:2], *tasks[0][3:]), tasks[1])
    schedule = replace(body.plan.schedule, tasks=order)
    edited = replace(PIPELINE, body=replace(body, plan=replace(body.plan, schedule=schedule)))
    save_plan(edited, tmp_path / "edited.json")
    assert "B0.0" in fails(capsys, "simulate", str(tmp_path / "edited.json"))


@pytest.mark.parametrize(
    "words",
    [
        "inspect pipeline.json",
        "inspect --json plan.json",
        "simulate pipeline.json",
        "diff plan.json pipeline.json",
        "simulate --help",
        "--version",
    ],
)
@pytest.mark.usefixtures("plan_file", "pipeline_file")
def test_a_reader_that_goes_away_ends_a_command_quietly(words: str, tmp_path: Path) -> None:
    for unbuffered in ("", "1"):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(
            [sys.executable, "-m", "autopar", *words.split()], cwd=tmp_path, text=True, check=False,
            stdout=write, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
        os.close(write)
        assert (done.returncode, done.stderr) == (0, "")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert re.fullmatch(r"autopar \S+ \(Python \S+, jax \S+, jaxlib \S+\)\n", capsys.readouterr().out)


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_the_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--print-completion", shell])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("what-if", "explain", "memory-gb", "smallest-change"))


def test_completion_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit):
        main(["--print-completion", "bash"])
    assert "pip install autopar[completion]" in capsys.readouterr().err
