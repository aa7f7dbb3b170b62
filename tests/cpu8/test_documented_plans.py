"""Every plan of `mlp.py` that the documentation makes on the command line, compiled for as many virtual devices: its
collectives are the compiled programs'. That its blocks run at all is for `test_pages`."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, blocks

READ = [[block.code for block in blocks((ROOT / page).read_text()) if block.language != "text"] for page in PAGES]
MLP = next(code for code in READ[PAGES.index("docs/planning.md")] if code.startswith("# mlp.py\n"))
LINES = [line for page in READ if MLP in page for code in page for line in code.replace("\\\n", " ").splitlines()]
COMMANDS = list(dict.fromkeys(
    re.sub(r" #.*", "", line).split(maxsplit=2)[2]
    for line in LINES
    if re.match(r"autopar plan (mlp\.py:make|mlp\.json) ", line)
))  # fmt: skip
"""What follows ``autopar plan``."""


def test_the_documents_make_plans() -> None:
    targets = [command.split()[0] for command in COMMANDS]
    assert targets.count("mlp.py:make") >= 5
    assert targets.count("mlp.json") >= 2


@pytest.mark.full
def test_documented_plans_are_what_is_compiled(tmp_path: Path) -> None:
    (tmp_path / "mlp.py").write_text(MLP)
    made: dict[str, list[str]] = {}
    """Plan → its step, as `autopar verify` takes it."""
    for command in COMMANDS:
        target, *options = shlex.split(command)
        _autopar(tmp_path, "plan", target, *options)
        out = options[options.index("--out") + 1]
        words = options[options.index("--set") + 1 :] if "--set" in options else []
        keywords = list(itertools.takewhile(lambda word: not word.startswith("--"), words))
        made[out] = made.get(target, [target, *(["--set", *keywords] if keywords else [])])
        told = _autopar(tmp_path, "verify", out, *made[out], "--compiler", "cpu")
        assert "\ncollectives\n" in told and "  differs" not in told, f"{command}\n{told}"


def _autopar(where: Path, *words: str) -> str:
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "32", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "autopar", *words], capture_output=True, text=True, check=False, cwd=where,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout
