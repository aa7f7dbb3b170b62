"""Every plan that README and the guide make on the command line, compiled for as many virtual devices: its collectives
are the compiled programs'."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.cli import main

ROOT = Path(__file__).parents[2]
TEXTS = [(ROOT / name).read_text() for name in ("README.md", "docs/guide.md")]
BLOCKS = [block for text in TEXTS for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]
(MLP,) = (block for block in BLOCKS if block.startswith("# mlp.py\n"))
COMMANDS = [
    re.sub(r" #.*", "", line).split(maxsplit=2)[2]
    for block in BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("autopar plan ") and "TARGET" not in line and "model.py:make" not in line
]
"""What follows ``autopar plan``: of targets that are there."""


def test_the_documents_make_plans() -> None:
    targets = [command.split()[0] for command in COMMANDS]
    assert targets.count("examples.gpt.model:plan_target") == 2
    assert targets.count("mlp.py:make") == 3
    assert targets.count("mlp.json") == 1


ASKED = [
    line
    for block in BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
    if re.match(r"autopar (explain|what-if|report|export|inspect) mlp\.json", line)
]


def test_documented_questions_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mlp.py").write_text(MLP)
    plan = ["plan", "mlp.py:make", "--cluster", "dgx-a100", "--mesh", "2x4", "--set", "width=512", "batch=64"]
    assert main([*plan, "--out", "mlp.json"]) == 0
    assert len(ASKED) >= 5
    for line in ASKED:
        capsys.readouterr()
        assert main(shlex.split(line)[1:]) == 0, (line, capsys.readouterr().err)


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
