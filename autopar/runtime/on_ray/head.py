"""Runs a Ray node until this process's own standard input is closed, then ends it and all processes of its group.

    python -m autopar.runtime.on_ray.head [--detached] FOLDER COMMAND…

A Ray node that is started so does not outlive its driver, however that ends: the kernel closes the pipe. Its FOLDER
(token, logs, sockets) goes with it. ``--detached`` leaves the input alone; SIGTERM ends either. A raylet that fails,
which `ray start` would wait for in vain, ends the node with the raylet's reason; one that only gave its agent too
little time (`SLOW`) is started again.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

END_S = 10.0
"""For Ray's daemons to end when asked to (chosen; about 1 s on an idle machine)."""
POLL_S = 0.5
"""Between two looks at the raylet (chosen)."""
ERRORS = Path("session_latest", "logs", "raylet.err")
"""Where a raylet writes why it failed, below the node's folder."""
SLOW = "Timed out waiting for file"
"""In what a raylet fails with whose agent takes more than 15 s to start, as on a busy machine. No setting changes these
(ray 2.60, ``NodeManager::WaitForDashboardAgentPorts``; ray-project/ray#65983)."""


def main(command: list[str]) -> int:
    """Runs ``command``, its node's folder before it, and before that ``--detached`` or not; returns its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt at the terminal is the driver's
    asked: list[int] = []  # to end
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    detached = command[0] == "--detached"
    inputs, errors = [] if detached else [0], Path(command[detached], ERRORS)
    while True:
        errors.unlink(missing_ok=True)
        process = subprocess.Popen(  # with what it was given to keep open: the folder's lock
            command[detached + 1 :], stdin=subprocess.DEVNULL, start_new_session=True, close_fds=False
        )
        while not (why := _failure(errors)) and process.poll() is None and not asked:
            if select.select(inputs, [], [], POLL_S)[0] and not os.read(0, 4096):
                asked.append(0)  # it is closed
        print(why, end="", flush=True)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.0 if why else END_S)
        with contextlib.suppress(ProcessLookupError):  # what it left behind
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        if asked and not detached:
            shutil.rmtree(command[0], ignore_errors=True)  # the driver may not be there to do it
        if asked or SLOW not in why:
            return 1 if why else code


def _failure(errors: Path) -> str:
    """The line in which a raylet says why it ended itself, marked C; "" where there is none."""
    with contextlib.suppress(FileNotFoundError):
        if found := re.search(r"^\[\S+ \S+ C .*\n", errors.read_text(errors="replace"), re.MULTILINE):
            return found[0]
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
