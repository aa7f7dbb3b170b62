"""`autopar inspect plan.json`: what a plan decided and predicts. Runs where jax cannot be imported."""

from __future__ import annotations

import argparse
import json
from typing import Any

from autopar.cli.output import show
from autopar.ir.plan_text import plan_facts, plan_text
from autopar.ir.serde import load_plan


def add_parser(commands: Any) -> None:
    """Adds this command to argparse's ``commands``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="show a plan",
        description="Shows mesh, shardings of arguments and results, collectives, predicted time and memory, what "
        "was replicated for lack of a rule, and how the plan was found; of a pipeline its stages, schedule and cuts. "
        "Needs no jax.",
    )
    parser.add_argument("plan", metavar="PLAN.json")
    parser.add_argument("--json", action="store_true", help="as JSON, with every row, SI units in the names")
    parser.add_argument("--all", action="store_true", help="every row of every table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the plan; returns 0. Raises PlanFormatError where the file is no plan, or damaged."""
    plan = load_plan(options.plan)
    limit = None if options.all else 40
    if options.json:
        print(json.dumps(plan_facts(plan), indent=1))
    else:
        show(plan_text(plan, limit=limit))
    return 0
