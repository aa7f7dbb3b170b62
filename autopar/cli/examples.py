"""`autopar examples [--to DIR]`: the examples and the launching scripts that came with autopar, listed or copied."""

from __future__ import annotations

import argparse
import ast
import re
import shutil
from pathlib import Path
from typing import Any

from autopar.cli.output import saved, show
from autopar.ir.errors import OptionError
from autopar.ir.text import table

FOLDERS = ("examples", "cluster")


def add_parser(commands: Any) -> None:
    """Adds this command to argparse's ``commands``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "examples",
        help="examples and launching scripts, to read and to copy",
        description="Lists the examples, and the scripts that launch on hosts, in Slurm jobs and on Kubernetes; with "
        "--to copies all of them. An example then runs from that folder: python -m examples.vit.",
    )
    parser.add_argument("--to", metavar="DIR", type=Path, help="copy the folders examples/ and cluster/ there")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Lists or copies; returns 0. Raises OptionError where a folder is there already, or cannot be written."""
    root = shipped()
    if options.to is None:
        rows = [["file", "what"]]
        for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.*")):
            if path.is_file() and "__pycache__" not in path.parts and (what := about(path)):
                rows.append([path.relative_to(root).as_posix(), what])
        show("\n".join(["in " + str(root), *table(rows), "\nautopar examples --to DIR copies them"]))
        return 0
    for folder in FOLDERS:
        target = options.to / folder
        try:
            shutil.copytree(root / folder, target, ignore=shutil.ignore_patterns("__pycache__"))
        except FileExistsError:
            raise OptionError(f"--to {options.to}: has a folder {folder!r} already; name another") from None
        except OSError as fault:
            raise OptionError(f"--to {options.to}: cannot be written: {fault.strerror or fault}") from None
        for script in target.glob("*.sh"):  # wheels may lose it
            script.chmod(0o755)
        saved(target)
    return 0


def shipped() -> Path:
    """Where the folders lie: in an installed package, or beside the package in a clone."""
    package = Path(__file__).parents[1]
    return package / "shipped" if (package / "shipped").is_dir() else package.parent


def about(path: Path) -> str:
    """What a file says that it is: the first paragraph of its docstring or of its comments; "" where there is none."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        told = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0]
    else:
        found = re.search(r"^# (.*?)$(?!\n# )", text, re.MULTILINE | re.DOTALL)
        told = "" if found is None or path.suffix == ".md" else found[1].replace("\n# ", " ")
    return " ".join(told.split())
