"""A measurement in a process of its own, so that its peak memory is its own.

The child is ``python -m MODULE --one``; it gets its request as JSON on stdin, and answers with JSON in the last line of
its output.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SAMPLE_S = 0.5
"""How often the memory of several processes is added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a child answered; ``together_bytes`` is the most that it and processes of its own were seen to hold at one
    time, pages that they share counted once (0 where it had none, or the system has no /proc)."""

    values: dict[str, Any]
    together_bytes: int


class ChildError(Exception):
    """A child ended without an answer."""


def ask(module: str, request: Mapping[str, Any], stop_after_s: float) -> Answer:
    """Runs a child to its end.

    Raises:
        ChildError: it failed, answered with no JSON, or was stopped after ``stop_after_s``.
    """
    command = [sys.executable, "-m", module, "--one"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    together = 0
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+") as out:
        json.dump(request, given)
        given.seek(0)
        child = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=given, stdout=out, start_new_session=True)
        stop_s = time.perf_counter() + stop_after_s
        try:
            while True:
                try:
                    code = child.wait(SAMPLE_S)
                    break
                except subprocess.TimeoutExpired:
                    together = max(together, _together_bytes(child.pid))
                    if time.perf_counter() > stop_s:
                        raise ChildError(f"no answer after {stop_after_s:.0f} s") from None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)  # its own session: what it started ends too
                child.wait()
        out.seek(0)
        lines = out.read().splitlines()
    if code:
        raise ChildError(f"ended with exit status {code}")
    try:
        values = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise ChildError(f"answered {lines[-1:]}, no JSON") from None
    return Answer(values=values, together_bytes=together)


def peak_rss_bytes() -> int:
    """The most that this process, or any one that it started and waited for, has held."""
    used = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return used * (1 if sys.platform == "darwin" else 1024)


def _together_bytes(session: int) -> int:
    """Proportional set size of a session's processes; 0 where there is only one: `peak_rss_bytes` knows better."""
    pids: list[str] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # state, parent, group, session, …
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session:
            pids.append(stat.parent.name)
    return sum(map(_proportional_bytes, pids)) if len(pids) > 1 else 0


def _proportional_bytes(pid: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
