"""`autopar report plan.json -o report.html`: a plan to look at, in one file. Runs where jax cannot be imported."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from autopar.cli.output import saved
from autopar.cli.progress import shown
from autopar.garbage import collection_paused
from autopar.ir.errors import OptionError, PlanFormatError
from autopar.ir.pipelined import Pipelined
from autopar.ir.plan import OneProgram, Plan
from autopar.ir.serde import JsonData, load_plan, read_text, replace_file

POINTS = 1_500
"""Of a curve of memory; between two the most is shown."""


def add_parser(commands: Any) -> None:
    """Adds this command to argparse's ``commands``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "report",
        help="a plan as a page to look at",
        description="Writes one HTML file that needs no network: the model by stage, layer and line, coloured by work, "
        "sharding, cost or stage; the pipeline's timeline; memory over the step; who holds which part of an argument; "
        "collectives; what lost. Needs no jax.",
    )
    parser.add_argument("plan", metavar="PLAN.json", help="a plan that was saved")
    parser.add_argument("-o", "--out", metavar="REPORT.html", type=Path, required=True, help="where the page is saved")
    parser.add_argument("--verified", metavar="VERIFY.json", type=Path, help="what `autopar verify --json` found")
    parser.add_argument("--measured", metavar="TRACE.json", type=Path, help="what `step.trace` wrote of a pipeline")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Writes the page; returns 0. Raises PlanFormatError where a file cannot be read or written, OptionError where
    VERIFY.json is no verification."""
    from autopar.report.page import page  # here, for what simulating imports

    with collection_paused(), shown(f"reading {options.plan}"):
        plan = load_plan(options.plan)
        more: dict[str, JsonData] = {}
        if isinstance(plan.body, OneProgram) and plan.step is not None:
            more["live"] = _live(plan)
        if options.verified is not None:
            more["verified"] = _verified(options.verified)
        if options.measured is not None:
            more["measured"] = _measured(plan, options.measured)
        replace_file(options.out, page(plan, more))
    saved(options.out)
    return 0


def _live(plan: Plan) -> list[JsonData]:
    """[operator, bytes of a device] over one program."""
    from autopar.explain.posed import posed  # here, for numpy: `inspect` runs without it

    (problem,) = posed(plan)
    found = [float(size) for size in problem.chosen.live_bytes]
    each = max(1, -(-len(found) // POINTS))
    return [[at, max(found[at : at + each])] for at in range(0, len(found), each)]


def _measured(plan: Plan, path: Path) -> list[JsonData]:
    """[name, timeline] of the steps of a trace. Raises OptionError for another file, and for another plan's trace."""
    from autopar.inter_op.program.timeline import timelines_of  # here, as above
    from autopar.report.facts import timeline_facts

    try:
        found = timelines_of(json.loads(read_text(path)))
    except (ValueError, PlanFormatError) as fault:
        raise OptionError(f"--measured {path}: {fault}") from None
    workers = len(plan.predictions.workers)
    steps = {title: timeline for title, timeline in found.items() if title != "simulated"}
    if not isinstance(plan.body, Pipelined) or any(len(t.workers) != workers for t in found.values()) or not steps:
        raise OptionError(f"--measured {path}: is no trace of steps of this plan, of stages on {workers} workers")
    return [[title, timeline_facts(timeline)] for title, timeline in steps.items()]


def _verified(path: Path) -> list[JsonData]:
    """Rows of what `autopar verify --json` wrote. Raises OptionError for anything else."""
    try:
        facts = json.loads(read_text(path))
        rows: list[JsonData] = []
        for f in facts["figures"]:
            planned, compiled = (_figure(f[side], f["unit"]) for side in ("planned", "compiled"))
            rows.append([f["name"], planned, compiled, _apart(f), bool(f["agrees"])])
        for c in facts["collectives"]:
            name = f"{c['kind']} over {', '.join(c['axes'])}"
            rows.append([name, f"{c['planned_bytes']} B", f"{c['compiled_bytes']} B", "", bool(c["agrees"])])
    except (ValueError, TypeError, KeyError, PlanFormatError) as fault:
        raise OptionError(f"--verified {path}: is not what `autopar verify --json` writes: {fault}") from None
    return rows


def _figure(value: Any, unit: str) -> str:
    return "" if value is None else f"{float(value):.4g} {unit}"


def _apart(figure: dict[str, Any]) -> str:
    planned, compiled = figure["planned"], figure["compiled"]
    return f"{100 * (planned / compiled - 1):+.1f} %" if planned is not None and compiled else ""
