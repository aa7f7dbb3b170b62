"""The examples run, on 8 virtual devices, and what they train gets better."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAINED = {
    "llama_nnx": "ZeRO-3", "lora": "ZeRO", "long_context": "sequence parallel",
    "moe_equinox": "expert parallel", "unet_diffusion": "over", "vit": "over",
}  # fmt: skip
"""Example → what its plan is called, among others."""
EXAMPLES = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"__init__"}


def run(name: str, *words: str, cwd: Path = ROOT) -> str:
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{name}", *words], cwd=cwd, env=env, capture_output=True, text=True,
        check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_examples_are_run() -> None:
    assert {*TRAINED, "plan_64_h100"} == EXAMPLES


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name == "moe_equinox" else pytest.mark.full) for name in TRAINED
])  # fmt: skip
def test_it_trains(name: str) -> None:
    text = run(name, "--steps", "10")
    assert TRAINED[name] in text.splitlines()[0]
    found = re.search(r"loss (\S+) at first, (\S+) after 10 steps", text)
    assert found is not None and float(found[2]) < float(found[1])


@pytest.mark.full
def test_a_plan_for_64_h100(tmp_path: Path) -> None:
    text = run("plan_64_h100", cwd=tmp_path)
    assert "8 hosts x 8 H100-SXM5-80GB" in text and "saved llama.json and llama.html" in text
    assert (tmp_path / "llama.json").stat().st_size > 1e5 and "</html>" in (tmp_path / "llama.html").read_text()
