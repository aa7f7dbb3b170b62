"""`autopar plan --pipeline`: the options of pipelines, and the call that they make."""

from __future__ import annotations

import argparse
import logging
import re
from pathlib import Path
from typing import Any

from autopar.inter_op.schedules import SCHEDULES
from autopar.ir.cluster import ClusterSpec
from autopar.ir.errors import OptionError
from autopar.ir.layers import REMAT
from autopar.ir.plan_text import plan_text

_OPTIONS = {
    "stages": "num_stages",
    "schedule": "schedules",
    "stage_starts": "stage_starts",
    "submesh": "submeshes",
    "mesh_shape": "mesh_shapes",
    "batch_axes": "batch_axes",
    "whole_examples": "whole_examples",
    "uniform_stages": "uniform_stages",
    "remat": "remat",
    "layers": "layers",
    "workers": "workers",
    "cache": "cache",
}
"""Option → keyword of `autopar.plan_pipeline`."""
_ONE_MESH = {
    "mesh": "say --mesh-shape 2x4",
    "method": "a pipeline's stages have no method",
    "recompute": "say --remat",
    "time_limit": "a pipeline's search stops by itself",
}
"""Options of plans of one mesh, and what to do instead."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``--pipeline`` and what goes with it."""
    group = parser.add_argument_group("pipelines", "with --pipeline and --microbatches; each fixes a choice")
    add = group.add_argument
    add("--pipeline", action="store_true", help="plan stages on parts of the cluster, and a schedule")
    add("--stages", metavar="N", type=_whole, help="number of stages")
    add("--stage-starts", metavar="0,12,…", type=_starts, help="the first layer of every stage")
    add("--schedule", metavar="NAME", action="append", choices=tuple(SCHEDULES),
        help=f"{', '.join(SCHEDULES)} (repeatable)")  # fmt: skip
    add("--submesh", metavar="1x4", action="append", type=_submesh,
        help="hosts x devices of each that stages may run on; with --stage-starts and one for each stage, that stage's "
        "(repeatable)")  # fmt: skip
    add("--mesh-shape", metavar="2x4", action="append", type=_shape, help="logical meshes of stages (repeatable)")
    add("--batch-axes", metavar="0", action="append", type=_batch_axes,
        help="position of the mesh axis that the batch is split over (several: 0+1), whole or free; with "
        "--stage-starts and one for each stage, that stage's (repeatable)")  # fmt: skip
    add("--whole-examples", action="store_true", default=None,
        help="split no example: neither its positions nor its rows of pixels")  # fmt: skip
    add("--uniform-stages", action="store_true", default=None, help="all stages on submeshes of one kind")
    add("--remat", metavar="KIND", action="append", choices=REMAT,
        help="what layers may compute again in the backward pass: none, dots (all but contractions), full "
        "(repeatable)")  # fmt: skip
    add("--layers", metavar="N|names", type=_layers, help="layers to cut the step into, or one per named block")
    add("--workers", metavar="N", type=_whole, help="planning processes (default: one a core)")
    add("--cache", metavar="DIR", help="keep solved layers and pipelines there, for planning again")


def check(options: argparse.Namespace) -> None:
    """Raises OptionError where options of pipelines and of plans of one mesh are mixed, or --pipeline has no
    --microbatches."""
    given = [name for name in _OPTIONS if getattr(options, name) is not None]
    if not options.pipeline:
        if given:
            raise OptionError(f"{_flag(given[0])} is about pipelines: add --pipeline")
        return
    for name, instead in _ONE_MESH.items():
        if getattr(options, name) is not None:
            raise OptionError(f"{_flag(name)} is about plans of one mesh; {instead}")
    if options.microbatches is None:
        raise OptionError("--pipeline needs --microbatches N: how many parts of the batch go through the stages")


def planned(options: argparse.Namespace, cluster: ClusterSpec, step: Any, args: Any, out: Path) -> str:
    """Plans a pipeline by the options and saves it to ``out``; returns the plan's text. Raises as `plan_pipeline`;
    PlanFormatError where ``out`` cannot be written."""
    import autopar.step.planned_pipeline as api  # here, for jax: `inspect`, `simulate` and `diff` run without it

    settings: dict[str, Any] = {
        keyword: getattr(options, name) for name, keyword in _OPTIONS.items() if getattr(options, name) is not None
    }
    if options.memory_gb is not None:
        settings["memory_bytes"] = round(options.memory_gb * 1e9)
    if options.forbid:
        settings["forbid"] = tuple(options.forbid)
    if options.on_unsupported is not None:
        settings["on_unsupported"] = options.on_unsupported
    plan = api.plan_pipeline(step, args, cluster=cluster, num_microbatches=options.microbatches, **settings)
    logging.getLogger("autopar").info("saving %s", out)
    plan.save(out)
    return plan_text(plan.data)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _whole(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _starts(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: write the first layer of every stage, 0,12,24 say")
    return tuple(map(int, text.split(",")))


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]+(x[0-9]+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape; write its axis sizes as in 8, 2x4 or 2x2x2")
    return tuple(map(int, text.split("x")))


_KEPT = {"whole": (), "free": None}


def _batch_axes(text: str) -> tuple[int, ...] | None:
    if text in _KEPT:
        return _KEPT[text]
    if not re.fullmatch(r"[0-9]+(\+[0-9]+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: write a position of a mesh axis, 0 or 0+1 say, or whole, or free")
    return tuple(map(int, text.split("+")))


def _submesh(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"[0-9]+x[0-9]+", text):
        raise argparse.ArgumentTypeError(f"{text!r}: write hosts x devices of each, 1x4 say")
    hosts, devices = map(int, text.split("x"))
    return hosts, devices


def _layers(text: str) -> int | str:
    return text if text == "names" else _whole(text)
