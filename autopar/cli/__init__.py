"""The `autopar` command: a file here for each of its subcommands.

Results go to stdout, progress and errors to stderr. Exit codes: 0 done; 1 `diff` or `verify` found differences,
`doctor` or `cluster check` something wrong; 2 an error, told in one message without a traceback (an exception of the
user's own step keeps its traceback); 130 interrupted; of `run` the script's own. `inspect`, `simulate`, `diff` and
`export` need neither jax nor numpy, `explain` and `what-if` no jax.
"""

from __future__ import annotations

import argparse
import difflib
import os
import platform
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from autopar._version import __version__
from autopar.ir.errors import AutoparError

SHELLS = ("bash", "zsh", "tcsh")
"""Those that completion is written for."""


_COMMANDS = {
    "plan": "plan", "inspect": "inspect", "explain": "explain", "what-if": "what_if", "report": "report",
    "simulate": "simulate", "diff": "diff", "verify": "verify", "export": "export", "cluster": "cluster",
    "run": "cluster", "doctor": "doctor", "profile": "profile", "examples": "examples",
}  # fmt: skip
"""Command → the module here that has it."""


class Parser(argparse.ArgumentParser):
    """One whose errors are told as all others are: in a line, with the nearest of what could have been meant."""

    def error(self, message: str) -> NoReturn:
        said = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if said is not None:
            known = [name.strip("' ") for name in said[2].split(",")]
            if near := difflib.get_close_matches(said[1], known, n=1):
                message += f"; near to that: {near[0]}"
        self.exit(2, f"autopar: error: {message} (`{self.prog} --help` says more)\n")


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """The command line; of one ``command``, the others are not imported."""
    top = Parser(
        prog="autopar",
        description="Plans the sharding of JAX train steps, shows plans, and runs them on clusters.",
        epilog="A plan needs no accelerator: autopar plan model.py:make --cluster dgx-h100:2 --out plan.json",
    )
    top.add_argument("--version", action=_Version, nargs=0, help="print autopar's version, and jax's")
    top.add_argument(
        "--print-completion", action=_Completion, choices=SHELLS,
        help="print what completes autopar's commands in a shell: eval \"$(autopar --print-completion bash)\"",
    )  # fmt: skip
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    wanted = dict.fromkeys(_COMMANDS.values()) if command is None else [_COMMANDS[command]]
    for name in wanted:
        import_module(f"autopar.cli.{name}").add_parser(commands)
    return top


class _Version(argparse.Action):
    """Prints autopar's version, and of what it runs on; nothing is imported for it but packages' metadata."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None) -> None:
        from importlib.metadata import PackageNotFoundError, version  # here: it takes long to import

        found = [f"Python {platform.python_version()}"]
        for name in ("jax", "jaxlib"):
            try:
                found.append(f"{name} {version(name)}")
            except PackageNotFoundError:
                found.append(f"no {name}")
        print(f"autopar {__version__} ({', '.join(found)})")
        parser.exit()


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
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            options = parser(words[0] if words and words[0] in _COMMANDS else None).parse_args(words)
            code = options.run(options)
        except SystemExit as end:
            if isinstance(end.__context__, BrokenPipeError):  # rich makes one of the other
                raise end.__context__ from None
            sys.stdout.flush()
            raise
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
