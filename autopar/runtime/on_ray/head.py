"""Runs a command until its own standard input is closed, then ends it and all processes of its group.

    python -m autopar.runtime.on_ray.head [--detached] COMMAND…

A Ray node that is started so does not outlive its driver, however that ends: the kernel closes the pipe. ``--detached``
leaves the input alone; SIGTERM ends either.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

END_S = 10.0
"""For Ray's daemons to end when asked to (chosen; about 1 s on an idle machine)."""


def main(command: list[str]) -> int:
    """Runs ``command``, ``--detached`` before it or not; returns its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt at the terminal is the driver's
    end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: end.set())  # before there is a process that it could leave behind
    detached = command[:1] == ["--detached"]
    process = subprocess.Popen(command[detached:], stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end, args=(process, end), daemon=True).start()
    if not detached:
        threading.Thread(target=_watch_input, args=(end,), daemon=True).start()
    code = process.wait()
    with contextlib.suppress(ProcessLookupError):  # what it left behind
        os.killpg(process.pid, signal.SIGKILL)
    return code


def _watch_input(end: threading.Event) -> None:
    while os.read(0, 1):
        pass
    end.set()


def _end(process: subprocess.Popen[bytes], end: threading.Event) -> None:
    end.wait()
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
