"""`autopar plan TARGET --cluster C --out plan.json`: plans a train step from shapes, without an accelerator.

TARGET may be a plan: its step is planned again, which runs where jax cannot be imported.
"""

from __future__ import annotations

import argparse
import re
import typing
from pathlib import Path
from typing import Any

from autopar.cli.numbers import gigabytes, positive, whole
from autopar.cli.output import saved, show
from autopar.cli.progress import shown
from autopar.cli.target import TargetError, keywords_from_texts, step_and_args
from autopar.inter_op.schedules import SCHEDULES
from autopar.ir.degrees import ZERO
from autopar.ir.errors import PlanFormatError
from autopar.ir.glance import glance
from autopar.ir.layers import REMAT
from autopar.ir.options import FORMER, OPTIONS
from autopar.ir.plan import MESH_AXES, METHODS, Plan
from autopar.ir.presets import PRESETS, cluster_from_text
from autopar.ir.serde import load_plan, save_plan
from autopar.ir.strategy import CollectiveKind


def add_parser(commands: Any) -> None:
    """Adds this command to argparse's ``commands``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="plan a train step",
        description="Plans a train step from shapes alone. TARGET is module:function or file.py:function; the function "
        "takes keywords (--set) and returns (train_step, args), args with jax.ShapeDtypeStructs. Or TARGET is a plan, "
        "PLAN.json: its step is planned again, as that plan was asked for but for what is given here; needs no jax.",
    )
    parser.add_argument("target", metavar="TARGET", help="the step, as module:function or file.py:function; or a plan")
    parser.add_argument(
        "--cluster",
        metavar="C",
        help=f"{', '.join(PRESETS)} (:hosts or cpu:devices), or a JSON file; "
        "of a plan that is planned again the default is its own",
    )
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], nargs="+", help="keywords of TARGET")
    parser.add_argument("--out", metavar="PLAN.json", required=True, help="where the plan is saved")
    group = parser.add_argument_group("options of autopar.parallelize", "each fixes a choice")
    for name, how in _ARGUMENTS.items():
        option = OPTIONS[name]
        group.add_argument(option.flag, dest=name, default=None, help=option.text, **how)
    flags = {option.flag for option in OPTIONS.values()}
    for name in FORMER:
        if (flag := f"--{name.replace('_', '-')}") not in flags:
            parser.add_argument(flag, action=_Former, nargs="?", dest=name, help=argparse.SUPPRESS)
    parser.set_defaults(run=run, usage_error=parser.error)


class _Former(argparse.Action):
    """A flag by the former name of an option: an error that says the present one."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(f"--{self.dest.replace('_', '-')} is {OPTIONS[FORMER[self.dest]].flag} now")


def _count(text: str) -> int | str:
    return text if text == "auto" else whole(text)


def _stages(text: str) -> int | tuple[int, int | None]:
    least, dash, most = text.partition("-")
    return (whole(least), whole(most) if most else None) if dash else whole(text)


def _starts(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: write the first layer of every stage, 0,12,24 say")
    return tuple(map(int, text.split(",")))


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]+(x[0-9]+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape; write its axis sizes as in 8, 2x4 or 2x2x2")
    return tuple(map(int, text.split("x")))


_WORDS: dict[str, tuple[int, ...] | None] = {"whole": (), "free": None}


def _batch_axis(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if not re.fullmatch(r"\w+(\+\w+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: write a mesh axis, x or 0 or 0+1 say, or whole, or free")
    first, *more = [int(axis) if axis.isdigit() else axis for axis in text.split("+")]
    return (first, *more) if more else first


def _submesh(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"[0-9]+x[0-9]+", text):
        raise argparse.ArgumentTypeError(f"{text!r}: write hosts x devices of each, 1x4 say")
    hosts, devices = map(int, text.split("x"))
    return hosts, devices


def _layers(text: str) -> int | str:
    return text if text == "names" else whole(text)


_ARGUMENTS: dict[str, dict[str, Any]] = {
    "mesh": {"metavar": "2x4", "type": _shape, "action": "append"},
    "mesh_axes": {"type": int, "choices": MESH_AXES},
    "memory_bytes": {"metavar": "G", "type": gigabytes},
    "num_microbatches": {"metavar": "N|auto", "type": _count},
    "forbid": {"metavar": "KIND", "action": "append", "choices": typing.get_args(CollectiveKind)},
    "method": {"choices": METHODS},
    "zero": {"type": int, "choices": ZERO},
    "tensor": {"metavar": "N", "type": whole},
    "sequence": {"metavar": "N", "type": whole},
    "experts": {"metavar": "N", "type": whole},
    "batch_axis": {"metavar": "AXIS", "type": _batch_axis, "action": "append"},
    "recompute": {"metavar": "HOW", "choices": ("yes", "no", *REMAT), "action": "append"},
    "stages": {"metavar": "N", "type": _stages},
    "stage_starts": {"metavar": "0,12,…", "type": _starts},
    "layers": {"metavar": "N|names", "type": _layers},
    "submeshes": {"metavar": "1x4", "type": _submesh, "action": "append"},
    "virtual_stages": {"metavar": "N", "type": whole},
    "schedule": {"metavar": "NAME", "choices": tuple(SCHEDULES), "action": "append"},
    "uniform_stages": {"action": "store_true"},
    "resharding": {"metavar": "NAME"},
    "whole_examples": {"action": "store_true"},
    "time_limit_s": {"metavar": "S", "type": positive},
    "solver": {"metavar": "NAME"},
    "workers": {"metavar": "N", "type": whole},
    "cache": {"metavar": "DIR"},
    "on_unsupported": {"choices": ("replicate", "error")},
}
"""How the command line takes an option."""
_YES_NO = {"yes": True, "no": False}


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """The options that the command line gives, as `autopar.parallelize` takes them."""
    out: dict[str, Any] = {name: value for name in _ARGUMENTS if (value := getattr(options, name)) is not None}
    for name in ("mesh", "batch_axis", "recompute"):  # one by itself
        given: list[Any] = out.get(name, [])
        several_axes = name == "batch_axis" and given and isinstance(given[0], tuple)
        if len(given) == 1 and not several_axes:
            (out[name],) = given
    if isinstance(out.get("recompute"), str):
        out["recompute"] = _YES_NO.get(out["recompute"], out["recompute"])
    return {name: value for name, value in out.items() if value is not None}


def run(options: argparse.Namespace) -> int:
    """Plans, saves, prints the plan; returns 0. Raises PlanFormatError where --out cannot be written, OptionError for
    options that do not go together, ClusterError, TargetError, and what planning raises."""
    out = Path(options.out)
    if out.is_dir() or not out.parent.is_dir():  # before minutes of planning, not after
        problem = "is a folder" if out.is_dir() else f"there is no folder {out.parent}"
        raise PlanFormatError(f"--out {out}: {problem}")
    if Path(options.target).suffix != ".json" and options.cluster is None:
        options.usage_error("the following arguments are required: --cluster")
    settings = _settings(options)
    if options.cluster is not None:
        settings = {"cluster": cluster_from_text(options.cluster), **settings}
    keywords = keywords_from_texts([text for texts in options.set for text in texts])

    with shown(f"loading {options.target}") as tell:
        plan = _planned(options.target, keywords, {**settings, "progress": tell})
        save_plan(plan, out)
        text = glance(plan)
    show(text)
    saved(out)
    return 0


def _planned(target: str, keywords: dict[str, Any], settings: dict[str, Any]) -> Plan:
    """The plan of the step that ``target`` leads to, or is a plan of."""
    if Path(target).suffix != ".json":
        step, args = step_and_args(target, keywords)
        return _parallelized(step, settings).plan(*args).data
    if keywords:
        raise TargetError(f"--set gives keywords to a function, and {target} is a plan: {', '.join(keywords)}")
    former = load_plan(target)
    from autopar.step.again import plan_again  # here, for what planning imports: `inspect` and `diff` run without it

    return plan_again(former, settings)


def _parallelized(step: Any, settings: dict[str, Any]) -> Any:
    from autopar.step.step import Step  # here, for jax: `inspect` and `diff` run without it

    if isinstance(step, Step):  # keeps what it was given, but for what the command line says
        return step.with_options(**settings)
    return Step(step, settings)
