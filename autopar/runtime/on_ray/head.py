"""Runs a command until its own standard input is closed, then ends it and all processes of its group.

    python -m autopar.runtime.on_ray.head COMMAND…

A Ray node that is started so does not outlive its driver, however that ends: the kernel closes the pipe.
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
    """Runs it; returns its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt at the terminal is the driver's
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_with_input, args=(process,), daemon=True).start()
    code = process.wait()
    with contextlib.suppress(ProcessLookupError):  # what it left behind
        os.killpg(process.pid, signal.SIGKILL)
    return code


def _end_with_input(process: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1):
        pass
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
