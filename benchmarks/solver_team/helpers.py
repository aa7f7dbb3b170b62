"""Starting, asking and ending worker processes (`worker`)."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from benchmarks.solver_team.worker import Adopt, Better, Combine, Done, Improve, Prove, Walk

START = "from benchmarks.solver_team.worker import main; main()"
"""Not as ``__main__``: the classes of requests are those of the module."""


class Helper:
    """One worker with a problem. Its answers wait in ``answers``; None is the last of a worker that has ended."""

    def __init__(self, core: Any) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-c", START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.answers: queue.Queue[Better | Done | None] = queue.Queue()
        self.busy = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._send(Adopt(core=core))

    def ask(self, request: Walk | Improve | Combine | Prove) -> None:
        """Sends a request; the worker must not be busy with another."""
        self.busy = True
        self._send(request)

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is among the answers
            pickle.dump(message, self._process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                self.answers.put(pickle.load(self._process.stdout))
            except (EOFError, OSError, ValueError, pickle.UnpicklingError):
                self.answers.put(None)
                return

    def close(self) -> None:
        """Ends the worker, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what was not sent yet is not wanted any more
                    pipe.close()
