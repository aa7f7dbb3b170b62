"""A search that a time limit or Ctrl-C ends: what it gives, what it says of it, and what it leaves behind."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar.inter_op import layer_layouts
from autopar.ir.errors import SolverTimeoutError
from autopar.ir.plan_text import explain_text, plan_text
from autopar.ir.progress import Progress, Watch
from autopar.ir.serde import plan_from_text, plan_to_text
from tests.null.test_planner_choice import apart, chain


class Clock:
    """`time.perf_counter` and `time.time` of a search, which jumps when told."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


def ends_after(monkeypatch: pytest.MonkeyPatch, layouts: int) -> None:
    """Watches with a limit are over once so many layouts were solved."""
    solve, count = layer_layouts.StageProblem.solve, 0
    left = Watch.left_s.fget
    assert left is not None

    def counting(self: Any, *args: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        return solve(self, *args, **{**more, "left_s": math.inf})

    def left_s(self: Watch) -> float:
        return -1.0 if count >= layouts and self._deadline_s < math.inf else left(self)

    monkeypatch.setattr(layer_layouts.StageProblem, "solve", counting)
    monkeypatch.setattr(Watch, "left_s", property(left_s))


def planned(**options: Any) -> Any:
    step, args = chain(width=16, examples=64)
    how = {"cluster": apart(), "stages": (1, None), "num_microbatches": 4, "workers": 1, **options}
    return autopar.parallelize(step, **how).plan(*args)
