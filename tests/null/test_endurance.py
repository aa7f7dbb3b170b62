"""What `benchmarks.endurance` finds wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.endurance import BATCH, EnduranceError, Training, compared

STEPS = 4


def trainings(folder: Path) -> list[Any]:
    """An undisturbed one, and one in which two steps were done again."""
    out: list[Any] = []
    for name, order in (("quiet", range(STEPS)), ("disturbed", [0, 1, 2, 1, 2, 3])):
        training = Training(folder / name, folder / "saves", STEPS, {})
        training.lines = [json.dumps({"step": i, "loss": (1 / (i + 1)).hex()}) for i in order]
        training.took_s = [1.0]
        (training.folder / "end").write_text(json.dumps({"seen": [BATCH] * STEPS, "digest": "a"}))
        out.append(training)
    return out


def test_equal_runs(tmp_path: Path) -> None:
    assert "2 steps done again: losses and state bit for bit" in compared(*trainings(tmp_path), STEPS)


def last_bit(training: Any) -> None:
    line = json.loads(training.lines[2])
    training.lines[2] = json.dumps(line | {"loss": (float.fromhex(line["loss"]) * (1 + 2**-52)).hex()})


def not_done(training: Any) -> None:
    del training.lines[-1]


def twice(training: Any) -> None:
    (training.folder / "end").write_text(json.dumps({"seen": [BATCH, 2 * BATCH, BATCH, BATCH], "digest": "a"}))


def other_state(training: Any) -> None:
    (training.folder / "end").write_text(json.dumps({"seen": [BATCH] * STEPS, "digest": "b"}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (last_bit, r"steps \[2\] have other losses"), (not_done, r"steps \[3\] were never done"),
        (twice, r"batches \[1\] are not in the state once"), (other_state, "the state is another"),
    ],
)  # fmt: skip
def test_what_differs(tmp_path: Path, spoil: Callable[[Any], None], message: str) -> None:
    quiet, disturbed = trainings(tmp_path)
    spoil(disturbed)
    with pytest.raises(EnduranceError, match=message):
        compared(quiet, disturbed, STEPS)
