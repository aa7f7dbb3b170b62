"""`autopar plan TARGET --cluster C --out plan.json`: plans a train step from shapes, without an accelerator."""

from __future__ import annotations

import argparse
import logging
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from autopar.cli import pipeline
from autopar.cli.output import show
from autopar.cli.target import keywords_from_texts, step_and_args
from autopar.ir.errors import PlanFormatError
from autopar.ir.plan import METHODS
from autopar.ir.plan_text import plan_text
from autopar.ir.presets import PRESETS, cluster_from_text, logical_mesh, mesh_shape_from_text
from autopar.ir.serde import save_plan
from autopar.ir.strategy import CollectiveKind


def add_parser(commands: Any) -> None:
    """Adds this command to argparse's ``commands``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="plan a train step",
        description="Plans a train step from shapes alone. TARGET is module:function or file.py:function; the function "
        "takes keywords (--set) and returns (train_step, args), args with jax.ShapeDtypeStructs.",
    )
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument(
        "--cluster", metavar="C", required=True, help=f"{', '.join(PRESETS)} (:hosts or cpu:devices), or a JSON file"
    )
    parser.add_argument("--mesh", metavar="2x4", help="shape of the logical mesh (default: chosen by the planner)")
    parser.add_argument("--memory-gb", metavar="G", type=_positive, help="limit per device, in 1e9 bytes")
    parser.add_argument("--microbatches", metavar="N", type=int, help="microbatches per step")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], nargs="+", help="keywords of TARGET")
    parser.add_argument("--method", choices=METHODS, help="force a kind of plan (default: auto)")
    kinds = typing.get_args(CollectiveKind)
    parser.add_argument(
        "--forbid", metavar="KIND", action="append", default=[], choices=kinds, help=f"{', '.join(kinds)} (repeatable)"
    )
    parser.add_argument(
        "--recompute",
        action=argparse.BooleanOptionalAction,
        help="compute values again where that makes a plan under the limit faster, or never (default: where nothing "
        "that fits is found without)",
    )
    parser.add_argument(
        "--on-unsupported",
        choices=("replicate", "error"),
        help="operators that autopar does not know: replicate, with a warning (default), or refuse",
    )
    parser.add_argument("--time-limit", metavar="S", type=_positive, help="seconds for the solver")
    parser.add_argument("--out", metavar="PLAN.json", required=True)
    pipeline.add_options(parser)
    parser.set_defaults(run=run)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def run(options: argparse.Namespace) -> int:
    """Plans, saves, prints the plan; returns 0. Raises PlanFormatError where --out cannot be written, OptionError for
    options that do not go together, ClusterError, TargetError, and what planning raises."""
    out = Path(options.out)
    if out.is_dir() or not out.parent.is_dir():  # before minutes of planning, not after
        problem = "is a folder" if out.is_dir() else f"there is no folder {out.parent}"
        raise PlanFormatError(f"--out {out}: {problem}")
    pipeline.check(options)
    cluster = cluster_from_text(options.cluster)
    settings: dict[str, Any] = {"cluster": cluster}
    if options.mesh is not None:
        settings["mesh"] = mesh_shape_from_text(options.mesh)
        logical_mesh(cluster, settings["mesh"])
    if options.memory_gb is not None:
        settings["memory_bytes"] = round(options.memory_gb * 1e9)
    if options.microbatches is not None:
        settings["num_microbatches"] = options.microbatches
    if options.method is not None:
        settings["method"] = options.method
    if options.forbid:
        settings["forbid"] = tuple(options.forbid)
    if options.recompute is not None:
        settings["recompute"] = options.recompute
    if options.on_unsupported is not None:
        settings["on_unsupported"] = options.on_unsupported
    if options.time_limit is not None:
        settings["time_limit_s"] = options.time_limit
    keywords = keywords_from_texts([text for texts in options.set for text in texts])

    with _progress(f"loading {options.target}"):
        step, args = step_and_args(options.target, keywords)
        if options.pipeline:
            text = pipeline.planned(options, cluster, step, args, out)
        else:
            plan = _parallelized(step, settings).plan(*args)
            logging.getLogger("autopar").info("saving %s", out)
            save_plan(plan.data, out)
            text = plan_text(plan.data)
    show(text)
    Console(stderr=True, highlight=False).print(f"saved {out}", markup=False)
    return 0


def _parallelized(step: Any, settings: dict[str, Any]) -> Any:
    import autopar.api as api  # here, for jax: `inspect` and `diff` run without it

    if isinstance(step, api.Parallelized):  # keeps what it was given, but for what the command line says
        return step.with_options(**settings)
    return api.parallelize(step, **settings)


@contextmanager
def _progress(first: str) -> Iterator[None]:
    """Shows ``first``, then each INFO message of the ``autopar`` loggers, on stderr: beside a spinner and a clock
    on a terminal, as lines elsewhere."""
    console = Console(stderr=True, highlight=False)
    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    task = bar.add_task(first, total=None)

    class Messages(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if console.is_terminal:
                bar.update(task, description=record.getMessage())
            else:
                console.print(record.getMessage(), markup=False, soft_wrap=True)

    handler, logger = Messages(logging.INFO), logging.getLogger("autopar")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    if not console.is_terminal:
        console.print(first, markup=False, soft_wrap=True)
    try:
        with bar:
            yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
