"""The table of options: Python's signature, the docstring and the command line say the same."""

import argparse
import re
import typing

import pytest

import autopar
from autopar.cli import plan as cli
from autopar.ir.errors import OptionError
from autopar.ir.options import FORMER, OPTIONS, settled
from autopar.step.options import Options, plan_config


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
    assert flags - {option.flag for option in OPTIONS.values()} == {"-h", "--help", "--set", "--out"}


@pytest.mark.parametrize("name", FORMER)
def test_a_former_name_says_the_new_one(name: str) -> None:
    with pytest.raises(OptionError, match=f"^{name}: is {FORMER[name]} now:"):
        autopar.parallelize(lambda x: x, **{name: 2})  # type: ignore[call-overload]


def test_a_wrong_name_is_an_error_at_once() -> None:
    with pytest.raises(OptionError, match=r"memory_byte: parallelize has no such option .did you mean memory_bytes"):
        autopar.parallelize(lambda x: x, memory_byte=2)  # type: ignore[call-overload]


VALUES = {"constraints": {"args[0]": ()}, "method": "zero3", "time_limit_s": 5.0, "solver": "highs"}
PROGRAM = {"workers": 2, "cache": "folder"}


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.no_stages])
def test_what_stages_cannot_have_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        plan_config(settled({name: VALUES[name], "stages": 2}))
    assert str(caught.value) == f"{name}: stages= asks for stages, and {OPTIONS[name].no_stages}"
    plan_config(settled({name: VALUES[name]}))


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.no_program])
def test_what_one_program_cannot_have_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(OptionError, match=re.escape(OPTIONS[name].no_program)):
        plan_config(settled({name: PROGRAM[name]}))
    plan_config(settled({name: PROGRAM[name], "stages": 2}))


STAGES = {
    "whole_examples": True, "stages": (2, None), "stage_starts": [0, 1], "layers": 3, "submeshes": ["1x2"],
    "schedule": "1f1b", "uniform_stages": True,
}  # fmt: skip


def test_options_of_stages_ask_for_them() -> None:
    assert [name for name, option in OPTIONS.items() if option.asks_stages] == sorted(STAGES, key=list(OPTIONS).index)
    for name, value in STAGES.items():
        assert plan_config(settled({name: value})).stages is not None
    assert plan_config(settled({"stages": 1})).stages is None


@pytest.mark.parametrize(
    ("given", "kept"),
    [(None, ("none", "dots", "full")), (True, ("none", "dots", "full")), (False, ("none",)), ("dots", ("dots",))],
)
def test_recompute_of_stages_says_what_layers_keep(given: typing.Any, kept: tuple[str, ...]) -> None:
    stages = plan_config(settled({"recompute": given, "stages": 2})).stages
    assert stages is not None and stages.remat == kept


@pytest.mark.parametrize(
    ("given", "axes"),
    [
        ("y", ((1,),)), (1, ((1,),)), (("x", "y"), ((0,), (1,))), ([("x", "y")], ((0, 1),)), ([()], ((),)),
        (["x", None], ((0,), None)),
    ],
)  # fmt: skip
def test_batch_axes_of_stages_by_name_and_position(given: typing.Any, axes: typing.Any) -> None:
    stages = plan_config(settled({"batch_axis": given, "stages": 2})).stages
    assert stages is not None and stages.batch_axes == axes
    if given in ("y", 1):
        assert plan_config(settled({"batch_axis": given, "mesh": (2, 4)})).batch_axis == "y"


def test_several_meshes_are_for_stages() -> None:
    assert plan_config(settled({"mesh": ["2x4", 8], "stages": 2})).stages.logical_shapes == ((2, 4), (8,))  # type: ignore[union-attr]
    with pytest.raises(OptionError, match="several shapes are for stages"):
        plan_config(settled({"mesh": ["2x4", "8"]}))
    with pytest.raises(OptionError, match="neither a number of stages nor the least and the most"):
        plan_config(settled({"stages": True}))
