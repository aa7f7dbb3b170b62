"""A worker answers, and ends where it is told to, crashes or hangs; then another takes its place."""

from __future__ import annotations

import os
import time

import pytest

from tests.worker import CallEndedError, Worker


def act(what: str) -> str:
    if what == "crash":
        os._exit(3)
    if what == "hang":
        time.sleep(600)
    if what == "raise":
        raise ValueError("no")
    return what


@pytest.mark.slow
def test_calls_that_end_are_told_apart() -> None:
    with Worker("tests.null.test_worker:act") as worker:
        assert worker.call("fine", 60) == "fine"
        with pytest.raises(CallEndedError, match="crashed: the process ended with code 3"):
            worker.call("crash", 60)
        with pytest.raises(CallEndedError, match=r"hung: no answer in 1 s"):
            worker.call("hang", 1)
        with pytest.raises(CallEndedError, match=r"(?s)raised: .*ValueError: no"):
            worker.call("raise", 60)
        assert worker.call("fine again", 60) == "fine again"
