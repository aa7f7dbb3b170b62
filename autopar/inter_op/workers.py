"""Other processes that share the work of a search: how they are started, get what they need, and take turns.

They come from `multiprocessing`'s fork server, which imports what they need once, in a process where jax is not.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import ForkingPickler
from multiprocessing.sharedctypes import Synchronized
from types import ModuleType

CONTEXT: ForkServerContext = get_context("forkserver")


def cores() -> int:
    """Cores that this process may use, where the system says that; else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def expect() -> None:
    """The fork server starts now, if it does not run yet, and imports what layouts need (`forked`) while this process
    goes on: two seconds or three that each process would take otherwise. It stays while this process does, as fork
    servers do, with the 0.18 GB that it has imported (measured)."""
    if cores() > 1:
        forkserver.set_forkserver_preload(["autopar.inter_op.forked"])
        forkserver.ensure_running()


@contextmanager
def handed(what: object, count: int) -> Generator[Connection]:
    """Where ``count`` processes get ``what``. For what a process is started with, its starter would wait; so a thread
    sends it, written down before: whoever goes on here adds to what it holds (`cached_property`)."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    data = ForkingPickler.dumps(what)

    def send() -> None:
        with sender, suppress(BrokenPipeError):  # of more processes than are started nobody takes it
            for _ in range(count):
                sender.send_bytes(data)

    threading.Thread(target=send, daemon=True).start()
    with receiver:
        yield receiver


def turns(begun: Synchronized[int], count: int) -> Iterator[int]:
    """Of 0 … ``count`` - 1 in order those that no other process has begun, each when it is asked for."""
    while True:
        with begun.get_lock():
            k = begun.value
            begun.value = min(k + 1, count)
        if k == count:
            return
        yield k


@contextmanager
def no_main() -> Generator[None]:
    """Processes that start meanwhile do not run the user's script again, which they otherwise do before their work."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
