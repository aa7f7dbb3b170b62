"""`autopar inspect plan.json`: what a plan decided and predicts, at a glance or section by section.

Runs where jax cannot be imported.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from autopar.cli.output import show
from autopar.garbage import collection_paused
from autopar.ir.glance import glance
from autopar.ir.plan_text import LIMIT, SECTIONS, plan_facts, plan_text, section_text
from autopar.ir.serde import load_plan

_HELP = {
    "operators": "operators: how each is split, what it takes, what is recomputed, replicated or assumed",
    "collectives": "collectives by kind and axes, and for which operators they run",
    "memory": "what is live at the peak, by name",
    "stages": "stages of a pipeline, what crosses between them, their layers",
    "schedule": "each worker's order of tasks",
    "why": "what the plan was chosen from, what bounds it, and notes",
}
"""Sections that take no pattern."""


def add_parser(commands: Any) -> None:
    """Adds this command to argparse's ``commands``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="show a plan",
        description="Shows a plan at a glance: what it is in the field's words, time, memory, what lies where, what it "
        "was chosen from. Flags show one section or several instead. Needs no jax.",
    )
    parser.add_argument("plan", metavar="PLAN.json", help="a plan that was saved")
    parser.add_argument(
        "--args", metavar="PATTERN", nargs="?", const="",
        help="arguments and results, the batch first; those whose path has PATTERN in it (* for any text)",
    )  # fmt: skip
    for name, text in _HELP.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_argument("--all", action="store_true", help="every section, every row of every table")
    parser.add_argument("--json", action="store_true", help="all of it as JSON, SI units in the names")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the plan; returns 0. Raises PlanFormatError where the file is no plan, or damaged, OptionError where no
    argument has the pattern."""
    with collection_paused():
        plan = load_plan(options.plan, graph=False)
    asked = [name for name in SECTIONS if getattr(options, name) not in (None, False)]
    if options.json:
        print(json.dumps(plan_facts(plan), indent=1))
    elif asked:
        limit = None if options.all else LIMIT
        texts = (section_text(plan, name, limit=limit, pattern=options.args or "") for name in asked)
        show("\n".join(texts))
    else:
        show(plan_text(plan, limit=None) if options.all else glance(plan))
    return 0
