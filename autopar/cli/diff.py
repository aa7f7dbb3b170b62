"""`autopar diff a.json b.json`: what changed between two plans; exit code 1 where something did."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from autopar.cli.output import saved, show
from autopar.ir.diff import diff_text
from autopar.ir.serde import digest, load_plan, replace_file


def add_parser(commands: Any) -> None:
    """Adds this command to argparse's ``commands``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "diff",
        help="compare two plans",
        description="Shows what differs between two plans: mesh, shardings, collectives, predictions, of "
        "pipelines also stages, schedule and cuts. Exit code 0: "
        "they are equal but for wall times; 1: they differ; 2: an error. Needs no jax.",
    )
    parser.add_argument("a", metavar="A.json")
    parser.add_argument("b", metavar="B.json")
    parser.add_argument("-o", "--out", metavar="DIFF.html", type=Path, help="write a page to look at instead")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the differences, or writes their page; returns 0 where there are none, else 1. Raises PlanFormatError
    where a file is no plan, or the page cannot be written."""
    a, b = load_plan(options.a), load_plan(options.b)
    text = diff_text(a, b)
    if options.out is None:
        show(text or f"equal plans (digest {digest(a)[:16]})")
    else:
        from autopar.report.compared import compared_page  # here: `diff` as text needs no more than `ir`

        replace_file(options.out, compared_page(a, b, (options.a, options.b)))
        saved(options.out)
    return 1 if text else 0
