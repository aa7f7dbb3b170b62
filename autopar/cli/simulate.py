"""`autopar simulate plan.json`: a pipeline's step by discrete events. Runs where jax cannot be imported."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from rich.console import Console
from rich.text import Text

from autopar.cli.output import saved, show
from autopar.inter_op.check_schedule import check_schedule
from autopar.inter_op.program.check import check_program
from autopar.inter_op.program.emit import emit
from autopar.inter_op.program.simulate import simulate
from autopar.inter_op.program.timeline import Timeline, ascii_timeline, chrome_trace
from autopar.ir.errors import PlanFormatError, ProgramError
from autopar.ir.pipelined import Pipelined
from autopar.ir.plan import Plan
from autopar.ir.serde import load_plan, replace_file
from autopar.ir.text import bytes_text, percent_text, seconds_text, table

_STYLES = {"F": "green", "B": "cyan", "I": "cyan", "W": "blue", "g": "magenta", "u": "yellow", "r": "red", "·": "dim"}
_LETTERS = {
    "F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "g": "gradients reduced",
    "u": "update", "n": "norm", "r": "resharded", "+": "gradients added", "·": "nothing",
}  # fmt: skip


def add_parser(commands: Any) -> None:
    """Adds this command to argparse's ``commands``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "simulate",
        help="simulate a pipeline",
        description="Emits a pipeline plan's program, checks it and runs it by discrete events: a timeline, idle time "
        "and peak memory of each worker; --trace writes it for Perfetto (ui.perfetto.dev) and chrome://tracing. "
        "Needs no jax.",
    )
    parser.add_argument("plan", metavar="PLAN.json", help="a plan that was saved")
    parser.add_argument("--trace", metavar="T.json", help="write a Chrome trace")
    parser.add_argument("--width", metavar="N", type=_width, default=72, help="columns of the timeline (default: 72)")
    parser.add_argument("--blocking", action="store_true", help="transfers beside no compute, one at a time")
    parser.set_defaults(run=run)


def _width(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,3}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of columns from 1 to 9999")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Prints the timeline, writes the trace; returns 0. Raises PlanFormatError where the file is no pipeline plan or
    the trace cannot be written, ScheduleError and ProgramError where its schedule or program cannot run, with
    --blocking where it needs transfers beside compute."""
    plan = load_plan(options.plan)
    if not isinstance(plan.body, Pipelined):
        raise PlanFormatError(f"{options.plan}: is a plan of one program, without stages: there is nothing to simulate")
    schedule = plan.body.plan.schedule
    check_schedule(schedule)
    program = emit(plan.body.plan, exchange=plan.body.exchange)
    check_program(program)
    try:
        timeline = simulate(program, blocking=options.blocking)
    except ProgramError as fault:
        if not options.blocking:
            raise
        raise ProgramError(
            f"--blocking: the order of {schedule.name} needs transfers beside compute: {fault}"
        ) from None
    how = ", transfers beside no compute" if options.blocking else ""
    p = plan.predictions
    against = "" if timeline.makespan_s == p.step_s else f"; the plan says {seconds_text(p.step_s)}"
    show(f"step of {plan.name}: {seconds_text(timeline.makespan_s)}{against}{how}")
    show(f"  {schedule.name}, {schedule.num_microbatches} microbatches, {len(plan.meshes)} stages on "
         f"{len(timeline.workers)} workers\n")  # fmt: skip
    _draw(ascii_timeline(timeline, options.width), _used(timeline))
    print()
    show("\n".join(["workers", *table(_rows(plan, timeline), right=range(6))]))
    if timeline.links:
        links = [["from", "to", "transfers", "busy", "of the step"]]
        for link in timeline.links:
            busy = percent_text(link.busy_s, timeline.makespan_s)
            links.append([str(link.source), str(link.target), str(len(link.events)), seconds_text(link.busy_s), busy])
        show("\n".join(["\nlinks", *table(links, right=range(5))]))
    if options.trace is not None:
        replace_file(options.trace, json.dumps(chrome_trace(timeline)))
        saved(options.trace)
    return 0


def _used(timeline: Timeline) -> set[str]:
    """Letters that a drawing may have."""
    return {e.what[0] for w in timeline.workers for e in w.events if e.stop_s > e.start_s} | {"·"}


def _draw(text: str, used: set[str]) -> None:
    """The timeline in colours on a terminal, what its letters mean below."""
    console = Console(highlight=False)
    for line in text.splitlines():
        drawn = Text(line, no_wrap=True)
        for letter, style in _STYLES.items():
            drawn.highlight_regex(f"{re.escape(letter)}+", style)
        console.print(drawn, soft_wrap=True)
    console.print(", ".join(f"{k} = {v}" for k, v in _LETTERS.items() if k in used), soft_wrap=True, markup=False)


def _rows(plan: Plan, timeline: Timeline) -> list[list[str]]:
    rows = [["worker", "stages", "busy", "bubble", "peak memory", "of"]]
    mesh_of = plan.pipelined.plan.schedule.mesh_of_stage
    for number, (worker, predicted) in enumerate(zip(timeline.workers, plan.predictions.workers, strict=True)):
        stages = ", ".join(str(s) for s, w in enumerate(mesh_of) if w == number)
        rows.append([
            str(number), stages, seconds_text(worker.busy_s), percent_text(timeline.bubble(number), 1),
            bytes_text(worker.peak_bytes), bytes_text(predicted.limit_bytes),
        ])  # fmt: skip
    return rows
