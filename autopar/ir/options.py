"""The options of planning and running a step: one table, from which Python's and the command line's are made.

`step.asked` says what their values mean, `autopar.parallelize` documents them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.ir.errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option.

    Attributes:
        former: names that it had.
        flag: on the command line; "": from Python only.
        text: a line of help there.
        asks_stages: True where it says something of stages, and so asks for a plan of them.
        no_program: why a plan of one program cannot; "": it can.
    """

    name: str
    default: Any = None
    former: tuple[str, ...] = ()
    flag: str = ""
    text: str = ""
    asks_stages: bool = False
    no_program: str = ""


_RECORDS = (
    Option(name="cluster", flag="--cluster"),
    Option(
        name="mesh", flag="--mesh", former=("mesh_shapes", "mesh_shape"),
        text="shape of the logical mesh; of stages, shapes that theirs may have (repeatable; default: the best)",
    ),
    Option(
        name="mesh_axes", default=2, flag="--mesh-axes",
        text="axes of a mesh at most: 2 (default), or 3, which takes longer to plan",
    ),
    Option(name="memory_bytes", flag="--memory-gb", text="limit per device, in 1e9 bytes"),
    Option(
        name="num_microbatches", default="auto", flag="--microbatches",
        text="parts of the batch, one after the other or through the stages (default: the best)",
    ),
    Option(name="constraints"),
    Option(name="forbid", default=(), flag="--forbid", text="a kind of collective not to use (repeatable)"),
    Option(
        name="method", default="auto", flag="--method",
        text="force a kind of plan, on the mesh of every stage (default: auto)",
    ),
    Option(
        name="zero", flag="--zero",
        text="state that is split over the axes that the batch is: 0 none, 1 the optimizer's, 2 also sums of "
        "gradients, 3 also parameters (default: the best)",
    ),
    Option(
        name="tensor", flag="--tensor",
        text="devices that share each weight, the rest having other examples (default: the best plan of any kind)",
    ),
    Option(name="sequence", flag="--sequence", text="devices that share each example's positions"),
    Option(name="experts", flag="--experts", text="devices that share the experts, stacked weights"),
    Option(
        name="batch_axis", flag="--batch-axis", former=("batch_axes",),
        text="mesh axis that the batch is split over, by name or position; of stages also several (x+y), whole or "
        "free, and with --stage-starts one for each stage (repeatable)",
    ),
    Option(
        name="whole_examples", default=False, flag="--whole-examples", asks_stages=True,
        text="stages split no example: neither its positions nor its rows of pixels",
    ),
    Option(
        name="recompute", flag="--recompute", former=("remat",),
        text="compute values again in the backward pass: yes (where that is faster), no; of stages also what layers "
        "may do: none, dots (all but contractions), full (repeatable; default: where nothing fits without, or what "
        "does is much slower)",
    ),
    Option(
        name="stages", flag="--stages", former=("num_stages", "pipeline"), asks_stages=True,
        text="stages on parts of the cluster: how many, or the least and the most (2-8; 2- for any from two on; "
        "default: as many as are best)",
    ),
    Option(name="stage_starts", flag="--stage-starts", asks_stages=True, text="the first layer of every stage"),
    Option(
        name="layers", flag="--layers", asks_stages=True,
        text="layers to cut the step into, or names: one per named block (default: repeated blocks)",
    ),
    Option(
        name="submeshes", flag="--submesh", former=("submesh",), asks_stages=True,
        text="hosts x devices of each that stages may run on; with --stage-starts and one for each stage, that "
        "stage's (repeatable)",
    ),
    Option(
        name="virtual_stages", flag="--virtual-stages", asks_stages=True,
        text="stages on each mesh, in turn, under a schedule of several; 1 for no such schedule (default: the best)",
    ),
    Option(
        name="schedule", flag="--schedule", former=("schedules",), asks_stages=True,
        text="a schedule that is allowed (repeatable; default: all that suit the step)",
    ),
    Option(
        name="uniform_stages", default=False, flag="--uniform-stages", asks_stages=True,
        text="all stages on submeshes of one kind",
    ),
    Option(
        name="resharding", default="auto", flag="--resharding", asks_stages=True,
        text="how values get from mesh to mesh: auto (default), or one way, to compare: send_recv, broadcast, …",
    ),
    Option(
        name="time_limit_s", flag="--time-limit",
        text="seconds after which the search ends with the best plan so far, as Ctrl-C does (default: at its own end)",
    ),
    Option(name="solver", default="auto", flag="--solver", text="auto, highs or cbc (default: auto)"),
    Option(
        name="workers", flag="--workers", text="processes that plan stages (default: one a core)",
        no_program="one program is planned in one process",
    ),
    Option(
        name="cache", flag="--cache", no_program="what is kept are solved layers, and one program has none",
        text="keep solved layers and pipelines in this folder, for planning again",
    ),
    Option(name="donate_argnums", default=()),
    Option(name="static_argnums", default=()),
    Option(name="batch_argnums"),
    Option(
        name="on_unsupported", default="replicate", flag="--on-unsupported",
        text="operators that autopar does not know: replicate, with a warning (default), or refuse them (error)",
    ),
    Option(name="plan"),
    Option(name="compiler_options"),
    Option(name="deadline_s"),
    Option(name="progress"),
)  # fmt: skip
OPTIONS: Mapping[str, Option] = {option.name: option for option in _RECORDS}
"""All options by name."""
FORMER: Mapping[str, str] = {name: option.name for option in _RECORDS for name in option.former}
"""A name that an option had → its name."""
FOLLOWED = (
    "mesh", "mesh_axes", "constraints", "stages", "stage_starts", "submeshes", "schedule", "uniform_stages",
    "recompute", "batch_axis", "whole_examples", "zero", "tensor", "sequence", "experts",
)  # fmt: skip
"""Options that a plan of stages which is followed decides."""
_HOW = {
    "pipeline": "stages=(2, None) plans a pipeline, stages=4 one of four stages",
    "remat": 'write recompute="full", or recompute=False',
    "batch_axes": "write batch_axis=, by name or position",
}
"""What to write instead of a name that is gone, where that is more than another name."""


def settled(options: Mapping[str, Any]) -> dict[str, Any]:
    """All options, those that are not given with their defaults. Raises OptionError for a name that is none."""
    for name in options:
        if name in FORMER and name not in OPTIONS:
            raise OptionError(f"{name}: is {FORMER[name]} now: {_HOW.get(name, f'write {FORMER[name]}=')}")
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else f"; there are {', '.join(OPTIONS)}"
            raise OptionError(f"{name}: parallelize has no such option{hint}")
    return {name: options.get(name, option.default) for name, option in OPTIONS.items()}


def is_given(name: str, options: Mapping[str, Any]) -> bool:
    """True where an option is not its default."""
    value, default = options[name], OPTIONS[name].default
    return value is not default and not (type(value) is type(default) and value == default)
