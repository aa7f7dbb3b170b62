"""`autopar explain plan.json NAME`: why something is sharded as it is. Runs where jax cannot be imported."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from autopar.cli.output import show
from autopar.cli.progress import shown
from autopar.garbage import collection_paused
from autopar.ir.errors import OptionError
from autopar.ir.in_words import in_words
from autopar.ir.plan import Plan
from autopar.ir.serde import load_plan, save_plan
from autopar.ir.text import bytes_text, percent_text, seconds_text, table

MOST = 3
"""Operators that are explained of those that have a name, unless all are asked for."""
TRIES = 8
"""Other ways that are tried of each, unless all are."""


def add_parser(commands: Any) -> None:
    """Adds this command to argparse's ``commands``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain",
        help="why something is sharded as it is, and what another way would add",
        description="NAME is an argument's path, an operator (dot_general, 'dot_general (model.py:88)'), a source line "
        "(model.py:88), a named value (name:hidden), or a layer ('layer 3'): how it is sharded, what that costs, and "
        "what each other way would add, each in the best plan that has it. Needs no jax.",
    )
    parser.add_argument("plan", metavar="PLAN.json", help="a plan that was saved")
    parser.add_argument("name", metavar="NAME", nargs="?")
    parser.add_argument(
        "--why-not",
        metavar="'PATH: AXIS, None'",
        help="plans again with this pinned, and says what changes: mesh axes of each dimension, None for a whole one, "
        "? for the planner's choice",
    )
    parser.add_argument("--out", metavar="PLAN.json", type=Path, help="where the plan of --why-not is saved")
    parser.add_argument("--all", action="store_true", help="all that have the name, and every other way")
    parser.set_defaults(run=run, usage_error=parser.error)


def run(options: argparse.Namespace) -> int:
    """Prints the answer; returns 0. Raises PlanFormatError where the file is no plan, OptionError for a name that
    nothing has and a plan without a graph, and what planning raises."""
    if (options.name is None) == (options.why_not is None):
        options.usage_error("give a NAME or --why-not, and not both")
    if options.out is not None and options.why_not is None:
        raise OptionError("--out: nothing is planned again without --why-not")
    with collection_paused():
        plan = load_plan(options.plan)
    show(_asked(plan, options.name, options.all) if options.name is not None else _why_not(plan, options))
    return 0


def _asked(plan: Plan, name: str, everything: bool) -> str:
    from autopar.explain.alternatives import explained  # here, for numpy: `inspect` runs without it
    from autopar.explain.names import found
    from autopar.explain.posed import posed
    from autopar.explain.text import explained_text

    with shown(f"looking for {name}"):
        named = found(posed(plan), name)
        asked = named if everything else named[:MOST]
        answers = [explained(one, None if everything else TRIES) for one in asked]
    return explained_text(answers, len(named) - len(asked))


def _why_not(plan: Plan, options: argparse.Namespace) -> str:
    from autopar.explain.text import changes_text  # here, for numpy: `inspect` runs without it
    from autopar.explain.why_not import pin_from_text, why_not

    pin = pin_from_text(options.why_not)
    with shown(f"planning {plan.name} again") as tell:
        again, changes = why_not(plan, pin, tell)
        if options.out is not None:
            save_plan(again, options.out)
    before, after = plan.predictions, again.predictions
    rows = [["", "planned", "with that", ""]]
    rows.append([
        "step time", seconds_text(before.step_s), seconds_text(after.step_s),
        percent_text(after.step_s - before.step_s, before.step_s),
    ])  # fmt: skip
    rows.append(["peak memory", *(bytes_text(p.peak_memory_bytes) for p in (before, after)), ""])
    lines = [f"with {options.why_not}", *table(rows, right=(1, 2, 3))]
    if (words := in_words(again)) != in_words(plan):
        lines.append(f"  it would be {words}")
    each = [f"  {changes_text([change])}" for change in (changes if options.all else changes[:TRIES])]
    lines += ["", "where the time goes otherwise", *(each or ["  nowhere"])]
    left = len(changes) - len(each)
    return "\n".join([*lines, *([f"  and {left} more (--all shows them)"] if changes and left > 0 else [])]) + "\n"
