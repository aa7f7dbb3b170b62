"""The `autopar` command: a file here for each of its subcommands.

Results go to stdout, progress and errors to stderr. Exit codes: 0 done; 1 `diff` or `verify` found differences,
`doctor` or `cluster check` something wrong; 2 an error, told in one message without a traceback (an exception of the
user's own step keeps its traceback); 130 interrupted; of `run` the script's own. `inspect`, `simulate`, `diff` and
`export` need neither jax nor numpy, `explain` and `what-if` no jax.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from autopar._version import __version__
from autopar.cli import (
    cluster,
    diff,
    doctor,
    explain,
    export,
    inspect,
    plan,
    profile,
    report,
    simulate,
    verify,
    what_if,
)
from autopar.ir.errors import AutoparError

SHELLS = ("bash", "zsh", "tcsh")
"""Those that completion is written for."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="autopar",
        description="Plans the sharding of JAX train steps, shows plans, and runs them on clusters.",
        epilog="A plan needs no accelerator: autopar plan model.py:make --cluster dgx-h100:2 --out plan.json",
    )
    top.add_argument("--version", action="version", version=_versions())
    top.add_argument(
        "--print-completion", action=_Completion, choices=SHELLS,
        help="print what completes autopar's commands in a shell: eval \"$(autopar --print-completion bash)\"",
    )  # fmt: skip
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (plan, inspect, explain, what_if, report, simulate, diff, verify, export, cluster, doctor, profile):
        command.add_parser(commands)
    return top


def _versions() -> str:
    """autopar's version, and of what it runs on; nothing is imported for it."""
    found = [f"Python {platform.python_version()}"]
    for name in ("jax", "jaxlib"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return f"autopar {__version__} ({', '.join(found)})"


class _Completion(argparse.Action):
    """Prints a shell's completion script, made by shtab, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None) -> None:
        try:
            import shtab  # here: it is an extra
        except ImportError:
            parser.error("--print-completion needs shtab: pip install autopar[completion]")
        print(shtab.complete(parser, shell=values))
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; ``argv`` without the program's name, by default the process's. Returns the exit code."""
    options = parser().parse_args(argv)
    try:
        code = options.run(options)
        sys.stdout.flush()
    except AutoparError as error:
        print(f"autopar: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("autopar: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader (head, less) has seen enough; keep the interpreter's last flush quiet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code
