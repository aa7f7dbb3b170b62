"""Which processes there are, by /proc; and one that does nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator


@contextlib.contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps until it is killed, here at the latest."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def below(above: int) -> list[int]:
    """Processes that ``above`` started, or that these started, and so on."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid != above and _is_below(pid, above)]


def left(pids: list[int], within_s: float) -> list[int]:
    """Those that are still there after ``within_s``.

    Zombies, which only wait to be asked for, are not, once the last of their threads is gone: these hold their sockets.
    """
    stop_s = time.monotonic() + within_s
    while True:
        found = [pid for pid in pids if _holds(pid)]
        if not found or time.monotonic() > stop_s:
            return found
        time.sleep(0.1)


def _stat(pid: int) -> list[str] | None:
    """State, parent, …; None: there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def _holds(pid: int) -> bool:
    """Whether what a process has open is still open (proc_pid_stat(5): state, threads)."""
    found = _stat(pid)
    return found is not None and (found[0] != "Z" or int(found[17]) > 1)


def _is_below(pid: int, above: int) -> bool:
    while pid > 1:
        found = _stat(pid)
        if found is None:
            return False
        pid = int(found[1])
        if pid == above:
            return True
    return False
