"""The table of options: Python's signature, the docstring and the command line say the same."""

import argparse
import re
import typing
from typing import Any

import numpy as np
import pytest

import autopar
from autopar.cli import main as cli_main
from autopar.cli import plan as cli
from autopar.ir.errors import OptionError
from autopar.ir.options import FORMER, OPTIONS, settled
from autopar.step.options import Options, asked, of_their_types


def test_python_and_the_docstring_have_every_option() -> None:
    assert list(Options.__annotations__) == list(OPTIONS)
    text = (autopar.parallelize.__doc__ or "").partition("Returns:")[0]
    told = re.findall(r"^ {8}(\w+(?:, \w+)*):", text, re.MULTILINE)
    assert [name for names in told for name in names.split(", ")] == ["fun", *OPTIONS]


def test_the_command_line_has_every_flag() -> None:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    (actions,) = (a.choices.values() for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    (plan,) = actions
    flags = {flag for action in plan._actions for flag in action.option_strings}
    assert {option.flag for option in OPTIONS.values() if option.flag} <= flags
    former = {f"--{name.replace('_', '-')}" for name in FORMER}
    assert flags - {option.flag for option in OPTIONS.values()} - former == {"-h", "--help", "--set", "--out"}


@pytest.mark.parametrize("name", FORMER)
def test_a_former_name_says_the_new_one(name: str) -> None:
    with pytest.raises(OptionError, match=f"^{name}: is {FORMER[name]} now:"):
        autopar.parallelize(lambda x: x, **{name: 2})  # type: ignore[call-overload]


@pytest.mark.parametrize("name", [name for name in FORMER if name != "submesh"])
def test_a_former_flag_says_the_new_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flag, value = f"--{name.replace('_', '-')}", [] if name == "pipeline" else ["2"]
    with pytest.raises(SystemExit):
        cli_main(["plan", "x.py:make", "--cluster", "cpu", "--out", "x.json", flag, *value])
    assert f"error: {flag} is {OPTIONS[FORMER[name]].flag} now (`autopar plan --help`" in capsys.readouterr().err


def test_a_wrong_name_is_an_error_at_once() -> None:
    with pytest.raises(OptionError, match=r"memory_byte: parallelize has no such option .did you mean memory_bytes"):
        autopar.parallelize(lambda x: x, memory_byte=2)  # type: ignore[call-overload]


PROGRAM = {"workers": 2, "cache": "folder"}


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.no_program])
def test_what_one_program_cannot_have_is_refused_with_the_reason(name: str) -> None:
    for other, because in (({"stages": 1}, "stages=1"), ({"mesh": 8}, "mesh=")):
        with pytest.raises(OptionError) as caught:
            asked(settled({name: PROGRAM[name], **other}))
        why = f"{because} asks for one program, and {OPTIONS[name].no_program}; stages=(1, None) plans stages"
        assert str(caught.value) == f"{name}: {why}"
    for other in ({}, {"stages": 2}):
        assert asked(settled({name: PROGRAM[name], **other})).stages is not None


STAGES = {
    "whole_examples": True, "stages": (2, None), "stage_starts": [0, 1], "layers": 3, "submeshes": ["1x2"],
    "virtual_stages": 2, "schedule": "1f1b", "uniform_stages": True, "resharding": "broadcast",
}  # fmt: skip


def test_options_of_stages_ask_for_them() -> None:
    assert [name for name, option in OPTIONS.items() if option.asks_stages] == sorted(STAGES, key=list(OPTIONS).index)
    for name, value in STAGES.items():
        assert asked(settled({name: value})).config.stages is not None
    one = asked(settled({"stages": 1}))
    assert one.program is not None and one.stages is None and not one.no_stages


def test_what_says_how_one_mesh_has_the_step_asks_for_one_program() -> None:
    for name, value in {"mesh": (2, 4), "method": "zero3", "batch_axis": 0}.items():
        found = asked(settled({name: value}))
        assert found.program is not None and found.stages is None and found.no_stages.startswith(f"{name}= says how")


def test_without_options_either_may_be_planned() -> None:
    for options in (
        {},
        {"recompute": False},
        {"memory_bytes": 10},
        {"constraints": {"args[0]": ()}},
        {"forbid": "all-gather"},
        {"solver": "highs"},
    ):
        found = asked(settled(options))
        assert found.program is not None and found.stages is not None and found.auto
    assert not asked(settled({"num_microbatches": 2})).auto


@pytest.mark.parametrize(
    ("given", "kept"),
    [(None, ("none", "dots", "full")), (True, ("none", "dots", "full")), (False, ("none",)), ("dots", ("dots",))],
)
def test_recompute_of_stages_says_what_layers_keep(given: typing.Any, kept: tuple[str, ...]) -> None:
    stages = asked(settled({"recompute": given, "stages": 2})).config.stages
    assert stages is not None and stages.remat == kept


@pytest.mark.parametrize(
    ("given", "axes"),
    [
        ("y", ((1,),)), (1, ((1,),)), (("x", "y"), ((0,), (1,))), ([("x", "y")], ((0, 1),)), ([()], ((),)),
        (["x", None], ((0,), None)),
    ],
)  # fmt: skip
def test_batch_axes_of_stages_by_name_and_position(given: typing.Any, axes: typing.Any) -> None:
    stages = asked(settled({"batch_axis": given, "stages": 2})).config.stages
    assert stages is not None and stages.batch_axes == axes
    if given in ("y", 1):
        assert asked(settled({"batch_axis": given, "mesh": (2, 4)})).config.batch_axis == "y"


def test_several_meshes_are_for_stages() -> None:
    assert asked(settled({"mesh": ["2x4", 8], "stages": 2})).config.stages.logical_shapes == ((2, 4), (8,))  # type: ignore[union-attr]
    with pytest.raises(OptionError, match="several shapes are for stages"):
        asked(settled({"mesh": ["2x4", "8"]}))
    with pytest.raises(OptionError, match="neither a number of stages nor the least and the most"):
        asked(settled({"stages": True}))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"cache": False}, "cache: got False, of type bool; expected str | os.PathLike[str] | None"),
        ({"time_limit_s": "5"}, "time_limit_s: got '5', of type str; expected float | None"),
        ({"memory_bytes": True}, "memory_bytes: got True, of type bool; expected float | None"),
        ({"mesh": (2.0, 4)}, "mesh: got (2.0, 4), of type tuple; expected int | str | Sequence["),
        ({"constraints": [("args[0]", ())]}, "constraints: got [('args[0]', ())], of type list; expected Mapping[str,"),
        ({"schedule": 3}, "schedule: got 3, of type int; expected str | Sequence[str] | None"),
        ({"schedule": ("1f1b", 3)}, "schedule: got ('1f1b', 3), of type tuple; expected str | Sequence[str] | None"),
        ({"forbid": 3}, "forbid: got 3, of type int; expected Sequence[str] | str"),
        ({"workers": "2"}, "workers: got '2', of type str; expected int | None"),
        ({"progress": 3}, "progress: got 3, of type int; expected Callable[[Progress], None] | None"),
        ({"compiler_options": 3}, "compiler_options: got 3, of type int; expected Mapping[str, Any] | None"),
        ({"layers": 2.5}, "layers: got 2.5, of type float; expected int | str | None"),
        ({"uniform_stages": "yes"}, "uniform_stages: got 'yes', of type str; expected bool"),
        ({"batch_axis": [2.5]}, "batch_axis: got [2.5], of type list; expected str | int | Sequence["),
        ({"plan": 4}, "plan: got 4, of type int; expected StepPlan | Plan | str | os.PathLike[str] | None"),
        ({"cluster": 8}, "cluster: got 8, of type int; expected ClusterSpec | Cluster | str | None"),
    ],
)
def test_values_of_another_type_are_refused_by_name(given: dict[str, Any], why: str) -> None:
    with pytest.raises(OptionError, match="^" + re.escape(why)):
        autopar.parallelize(lambda x: x, **{"cluster": "cpu:2", **given})


def test_values_that_count_as_an_options_type() -> None:
    count = np.int64(2)
    given = {"num_microbatches": count, "mesh": np.array([2, 4]), "forbid": {"all-gather"}, "memory_bytes": 1e9}
    found = asked(of_their_types(settled(given))).config
    assert (found.num_microbatches, found.mesh_shape, found.memory_bytes) == (2, (2, 4), 10**9)
    stages = asked(of_their_types(settled({"stages": [2, None], "submeshes": "1x4", "stage_starts": range(0, 4, 2)})))
    assert stages.config.stages is not None
    assert (stages.config.stages.submeshes, stages.config.stages.starts) == (((1, 4),), (0, 2))
