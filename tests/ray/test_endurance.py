"""Training that outlives one failure of each kind (`benchmarks.endurance`, in three minutes)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.endurance import KINDS
from tests.cluster.namespaces import ROOT

DEADLINE_S = 1500.0
"""On a machine that does other things too."""


@pytest.mark.full
@pytest.mark.slow
def test_training_outlives_each_kind_of_failure() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'autopar[ray]'")
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.endurance", "--steps", "70", "--least", "4", "--most", "8"], cwd=ROOT,
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    print(run.stdout)
    if run.returncode == 2:
        pytest.skip(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    assert all(kind in run.stdout for kind in KINDS), "not all kinds"
