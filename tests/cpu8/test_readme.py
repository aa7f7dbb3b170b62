"""README's first example: short, on the first screen, and it runs and prints as shown there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import jax

README = (Path(__file__).parents[2] / "README.md").read_text()
EXAMPLE, SHOWN = re.findall(r"^```\w+\n(.*?)^```", README, re.DOTALL | re.MULTILINE)[:2]
SCREEN = 40
"""Lines of a terminal window."""


def test_the_example_is_short_and_on_the_first_screen() -> None:
    lines = EXAMPLE.splitlines()
    assert lines[0].startswith("import autopar")
    assert len(lines) <= 15
    assert README[: README.index(EXAMPLE)].count("\n") + len(lines) <= SCREEN


def test_the_example_runs_and_prints_what_is_shown(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(EXAMPLE)
    code = "import runpy, sys; runpy.run_path(sys.argv[1])"  # from the repository's root, whose autopar is meant
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, tmp_path / "example.py"],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    printed = done.stdout.splitlines()
    assert printed[0].startswith("plan of train_step: ")
    if jax.__version__.startswith("0.10."):  # what is shown is from there
        assert [line for line in SHOWN.splitlines() if not any(p.startswith(line) for p in printed)] == []
