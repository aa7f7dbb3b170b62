"""The documentation's code blocks, run as a reader would: a page is one session, from its top to its end.

Of a page's fenced blocks

- ``python`` runs in the session's namespace, in order; one that begins with ``# NAME.py`` is written to that file;
- ``sh`` runs in bash, in the session's folder, beside those files; any command that fails ends the session;
- ``text`` is what the block before it printed with jax 0.10: each of its lines, in that order. A line that ends in
  ``…`` stands for all that begin so, ``…`` alone for any lines;
- ``json`` is read.

``<!-- not run: REASON -->`` before a block leaves it out (`python -m tests.pages --left-out` lists them).
``<!-- with NAME.py of PAGE.md -->`` puts a file of another page there, to which the text links. ``<!-- before`` …
``-->`` holds Python that a reader has already (a batch, a state), and runs unseen. Blocks without a language, and
other languages without a reason, are errors.

``python -m tests.pages PAGE …`` runs pages from a clone, each in a folder of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import linecache
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
PAGES = tuple(
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
    if "decisions" not in path.parts and not re.search(r"-py\d+$", path.stem)
)
"""Pages for users, by their paths from the root: decisions tell of code that may be gone, tables of tests have none."""
LANGUAGES = ("python", "sh", "text", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of a page, or what runs before it unseen.

    ``line``: of its first line of code, from 1. ``left_out``: why it is not run, or "".
    """

    language: str
    code: str
    line: int
    left_out: str


def blocks(text: str) -> tuple[Block, ...]:
    """The blocks of a page in their order. Raises ValueError where one has no language, or one that cannot be run and
    no reason."""
    out: list[Block] = []
    left_out = ""
    for token in MarkdownIt().parse(text):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "html_block":
            if told := re.fullmatch(r"<!-- not run: (.+?) -->\s*", token.content, re.DOTALL):
                left_out = " ".join(told[1].split())
                continue
            if told := re.fullmatch(r"<!-- before\n(.*?)-->\s*", token.content, re.DOTALL):
                out.append(Block(language="python", code=told[1], line=line + 1, left_out=""))
            if told := re.fullmatch(r"<!-- with (\w+\.py) of ([\w/-]+\.md) -->\s*", token.content):
                other = blocks((ROOT / "docs" / told[2]).read_text())
                (found,) = (each for each in other if each.code.startswith(f"# {told[1]}\n"))
                out.append(found)
        elif token.type == "fence":
            language = token.info.strip()
            if language.startswith("{"):  # a directive of the tool that builds the pages
                continue
            if language not in LANGUAGES and not left_out:
                raise ValueError(f"line {line}: a block in {language or 'no language'}, of {', '.join(LANGUAGES)}")
            out.append(Block(language=language, code=token.content, line=line + 1, left_out=left_out))
        left_out = ""
    return tuple(out)


def missing(shown: str, printed: str) -> str:
    """The first line of ``shown`` that ``printed`` does not have behind those before it; "" where it has all."""
    left = iter([line.rstrip() for line in printed.splitlines()])
    for line in [line.rstrip() for line in shown.splitlines()]:
        start = line.removesuffix("…")
        if line == "…" or not line:
            continue
        if not any(told == line or (start != line and told.startswith(start)) for told in left):
            return line
    return ""


def run(page: str) -> None:
    """Runs one page in this process, in the folder that it is in. Raises what a block raises, CalledProcessError
    where a command fails, ValueError where something else is printed than shown."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in blocks((ROOT / page).read_text()):
        where = f"{page}:{block.line}"
        if block.left_out:
            continue
        match block.language:
            case "text":
                if version("jax").startswith("0.10.") and (line := missing(block.code, printed)):
                    raise ValueError(f"{where}: not printed: {line}\nprinted was:\n{printed}")
            case "json":
                json.loads(block.code)
            case "sh":
                done = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", block.code], capture_output=True, text=True, check=False
                )
                printed = done.stdout
                if done.returncode:
                    raise ValueError(f"{where}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
            case _ if named := re.match(r"# (\w+\.py)\b", block.code):
                Path(named[1]).write_text(block.code)
            case _:
                source = "\n" * (block.line - 1) + block.code
                linecache.cache[where] = (len(source), None, source.splitlines(keepends=True), where)
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(source, page, "exec"), names)
                printed = out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.pages")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="by its path from the root (default: all)")
    parser.add_argument("--left-out", action="store_true", help="list what is not run, and why")
    options = parser.parse_args()
    for page in options.pages or PAGES:
        if options.left_out:
            for block in blocks((ROOT / page).read_text()):
                if block.left_out:
                    print(f"{page}:{block.line}: {block.left_out}")
        else:
            began = time.monotonic()
            session(page)
            print(
                f"{page}: {len(blocks((ROOT / page).read_text()))} blocks, {time.monotonic() - began:.0f} s", flush=True
            )


def session(page: str) -> None:
    """Runs one page in a process and a folder of its own, with 8 CPU devices. Raises ValueError with what it said
    where it fails."""
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environment = {**kept, "PATH": paths, "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        code = f"import sys; sys.path.insert(0, '.'); from tests.pages import run; run({page!r})"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise ValueError(f"{page}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
