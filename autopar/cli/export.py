"""`autopar export plan.json`: the plan's shardings as code for plain JAX, flax or equinox. Needs no jax."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from autopar.cli.output import saved
from autopar.ir.errors import PlanFormatError
from autopar.ir.serde import load_plan
from autopar.report.export import STYLES, exported


def add_parser(commands: Any) -> None:
    """Adds this command to argparse's ``commands``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "export",
        help="the plan's shardings as code for plain JAX, flax or equinox",
        description="Writes a Python module with the plan's mesh, the PartitionSpec of each leaf, and functions that "
        "lay a step out so without autopar. How operators run between is XLA's choice then. Needs no jax.",
    )
    parser.add_argument("plan", metavar="PLAN.json", help="a plan that was saved")
    parser.add_argument("--for", dest="style", choices=STYLES, default=STYLES[0], help="default: jit")
    parser.add_argument("--out", metavar="FILE.py", type=Path, help="default: stdout")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Writes the module; returns 0. Raises PlanFormatError where the file is no plan, or --out cannot be written,
    OptionError for a plan of stages."""
    text = exported(load_plan(options.plan), options.style)
    if options.out is None:
        sys.stdout.write(text)
        return 0
    try:
        options.out.write_text(text)
    except OSError as fault:
        raise PlanFormatError(f"--out {options.out}: {fault.strerror or fault}") from fault
    saved(options.out)
    return 0
