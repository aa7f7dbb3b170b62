"""A process that runs one function again and again, and is ended where a call takes too long.

What hangs inside XLA cannot be interrupted from Python, and what crashes there takes its process along.
"""

from __future__ import annotations

import importlib
import multiprocessing
import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

RESTARTED_AFTER = 150
"""Calls after which a process is replaced: what JAX keeps of each program adds up. A guess."""
STARTED_IN_S = 120.0


class CallEndedError(Exception):
    """The call took longer than its limit, raised, or its process died; the message says which."""


class _Raised(NamedTuple):
    text: str


class Worker:
    """Calls ``module:function`` in a process of its own; a context manager."""

    def __init__(self, function: str) -> None:
        self.function = function
        self.process: Any = None
        self.pipe: Any = None
        self.calls = 0

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def call(self, argument: Any, limit_s: float) -> Any:
        """What ``function(argument)`` returns.

        Raises:
            CallEndedError: after ``limit_s`` seconds, where it raises, or where the process dies.
        """
        if self.calls >= RESTARTED_AFTER:
            self.stop()
        if self.process is None:
            self._start()
        self.calls += 1
        self.pipe.send(argument)
        answer = self._receive(limit_s)
        if isinstance(answer, _Raised):
            raise CallEndedError(f"raised: {answer.text}")
        return answer

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.process, self.calls = None, 0

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(self.function, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self._receive(STARTED_IN_S)

    def _receive(self, limit_s: float) -> Any:
        try:
            if self.pipe.poll(limit_s):
                return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            code = self.process.exitcode
            self.stop()
            raise CallEndedError(f"crashed: the process ended with code {code}") from None
        self.stop()
        raise CallEndedError(f"hung: no answer in {limit_s:.0f} s")


def _serve(function: str, pipe: Connection) -> None:
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)
    pipe.send("ready")
    while True:
        try:
            argument = pipe.recv()
        except EOFError:
            return
        try:
            answer = call(argument)
        except Exception:  # noqa: BLE001 -- the caller is told
            answer = _Raised(traceback.format_exc())
        pipe.send(answer)
