"""The command line, by its text: results on stdout, errors in one message with exit code 2."""

from __future__ import annotations

import json
import logging
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.cli import main
from autopar.ir.errors import InfeasibleError
from autopar.ir.serde import load_plan, save_plan
from tests.null.handmade import handmade_plan

PLAN = handmade_plan()
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


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    save_plan(PLAN, tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Stands in for `autopar.api`: records what it is asked for and plans by hand."""
    record: dict[str, Any] = {}

    class Parallelized:
        def __call__(self) -> None:
            raise AssertionError("planning does not run the step")

        def with_options(self, **settings: Any) -> Parallelized:
            record.update(fun=self, settings=settings)
            return self

        def plan(self, *args: Any) -> Any:
            record["args"] = args
            logging.getLogger("autopar.planner").info("solving [3] nodes")
            if record["settings"].get("memory_bytes") == 1000:
                raise InfeasibleError("no plan fits 1 kB per device: the best needs 1 MB")
            return types.SimpleNamespace(data=PLAN)

    def parallelize(fun: Any, **settings: Any) -> Parallelized:
        record.update(fun=fun, settings=settings)
        return Parallelized()

    api = types.ModuleType("autopar.api")
    api.parallelize, api.Parallelized = parallelize, Parallelized  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "autopar.api", api)
    monkeypatch.setattr("autopar.api", api, raising=False)
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
    assert out.out.startswith("plan of train_step\n  digest ")
    assert "peak memory  123 kB of 4.29 GB" in out.out
    assert max(map(len, out.out.splitlines())) <= 100


def test_inspect_json(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", plan_file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predictions"]["peak_memory_bytes"] == 123_456


def test_headings_are_bold_on_a_terminal(
    plan_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["inspect", plan_file]) == 0
    assert "\x1b[1mplan of train_step\x1b[0m\n" in capsys.readouterr().out


def test_diff(plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", plan_file, plan_file]) == 0
    assert re.fullmatch(r"equal plans \(digest [0-9a-f]{16}\)\n", capsys.readouterr().out)
    other = str(tmp_path / "other.json")
    save_plan(replace(PLAN, predictions=replace(PLAN.predictions, step_s=4e-3)), other)
    assert main(["diff", plan_file, other]) == 1
    assert capsys.readouterr().out == "predicted, per device and step\n  step time  2 ms -> 4 ms  +100 %\n"


def test_files_that_cannot_be_read(plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(capsys, "inspect", "no.json") == ("autopar: error: no.json: cannot be read: No such file or directory")
    newer = tmp_path / "newer.json"
    newer.write_text(Path(plan_file).read_text().replace('"schema_version": 3', '"schema_version": 7'))
    assert fails(capsys, "diff", plan_file, str(newer)) == (
        f"autopar: error: {newer}: was written by a newer autopar (schema 7; this one reads 3): upgrade autopar"
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
        "forbid": ("all-to-all",),
        "time_limit_s": 5.0,
    }
    assert load_plan(out) == PLAN
    printed = capsys.readouterr()
    assert printed.out.startswith("plan of train_step\n")
    assert printed.err.splitlines() == [
        f"loading {model}:make",
        "solving [3] nodes",
        f"saving {out}",
        f"saved {out}",
    ]


def test_plan_passes_on_only_what_was_asked(asked: dict[str, Any], model: str, tmp_path: Path) -> None:
    assert main(["plan", model + ":make", "--cluster", "v5e-8", "--out", str(tmp_path / "out.json")]) == 0
    assert list(asked["settings"]) == ["cluster"]
    assert logging.getLogger("autopar").handlers == []


@pytest.mark.parametrize(("option", "value"), [("--recompute", True), ("--no-recompute", False)])
def test_recomputation_is_asked_for_or_ruled_out(
    asked: dict[str, Any], model: str, tmp_path: Path, option: str, value: bool
) -> None:
    assert main(["plan", model + ":make", "--cluster", "cpu", option, "--out", str(tmp_path / "o.json")]) == 0
    assert asked["settings"]["recompute"] is value


def test_a_step_that_is_parallelized_already_keeps_its_own_options(
    asked: dict[str, Any], model: str, tmp_path: Path
) -> None:
    wrapped = Path(model).read_text() + "\nimport autopar.api\nstep = autopar.api.parallelize(step, donate_argnums=0)\n"
    Path(model).write_text(wrapped)
    assert (
        main(["plan", model + ":make", "--cluster", "cpu", "--method", "zero3", "--out", str(tmp_path / "o.json")]) == 0
    )
    assert type(asked["fun"]).__name__ == "Parallelized"
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
        ("MODEL:make", ["--mesh", "4x4"], "mesh 4x4 needs 16 devices; cluster cpu has 8"),
        ("MODEL:make", ["--mesh", "2by4"], "mesh '2by4' is not a shape; write its axis sizes as in 8, 2x4 or 2x2x2"),
        ("MODEL:make", ["--cluster", "dgx"], "unknown cluster 'dgx'"),
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
            "argument --memory-gb: -1 is not above 0",
        ),
        (["plan", "m:f", "--cluster", "cpu", "--out", "x", "--time-limit", "soon"], "'soon' is not a number"),
        (["plan", "m:f", "--cluster", "cpu", "--out", "x", "--forbid", "gossip"], "invalid choice: 'gossip'"),
        (["plan", "m:f", "--cluster", "cpu", "--out", "x", "--method", "magic"], "invalid choice: 'magic'"),
    ],
)
def test_bad_options(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert re.fullmatch(r"autopar \d+\.\d+\.\d+\n", capsys.readouterr().out)
