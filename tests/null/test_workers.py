"""Processes that share a search: what they are given, which turns they take, and what they have imported before."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import pytest

from autopar.inter_op.workers import CONTEXT, handed, turns

pytestmark = pytest.mark.slow

IN_A_PROCESS = """
from concurrent.futures import ProcessPoolExecutor
from autopar.inter_op import workers
workers.cores = lambda: 2
workers.expect()
with ProcessPoolExecutor(1, workers.CONTEXT) as pool, workers.no_main():
    print(pool.submit(eval, "' '.join(__import__('sys').modules)").result())
    print(pool.submit(eval, "__import__('signal').getsignal(2)").result())
"""


class Changing:
    """What its maker goes on to change, as cached properties do; noted is who writes it down."""

    def __init__(self, noted: list[Any]) -> None:
        self.noted, self.seen, self.held = noted, 0, b"x" * 2**20

    def __getstate__(self) -> dict[str, Any]:
        self.noted.append(threading.current_thread())
        return {"seen": self.seen, "held": self.held}


def test_processes_get_what_was_there_when_they_were_asked_for() -> None:
    """The queue of `multiprocessing` writes down when its own thread comes to it: planning ended with "dictionary
    changed size during iteration" in that thread, and waited for ever."""
    noted = list[Any]()
    changing = Changing(noted)
    with handed(changing, 2) as received:
        changing.seen = 1
        assert noted == [threading.current_thread()]
        assert [received.recv().seen for _ in range(2)] == [0, 0]


def test_what_no_process_takes_is_not_waited_for() -> None:
    before = set(threading.enumerate())
    with handed(Changing([]), 3) as received:
        received.recv()
        (sending,) = set(threading.enumerate()) - before
    sending.join(10.0)
    assert not sending.is_alive()


def test_every_turn_is_taken_once_and_in_order() -> None:
    begun = CONTEXT.Value("q", 0)
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda _: list(turns(begun, 50)), range(4)))
    assert sorted(k for mine in taken for k in mine) == list(range(50))
    assert all(mine == sorted(mine) for mine in taken)
    assert list(turns(begun, 50)) == []


def test_a_turn_is_not_taken_before_it_is_asked_for() -> None:
    begun = CONTEXT.Value("q", 0)
    one, other = turns(begun, 3), turns(begun, 3)
    assert [next(one), next(other), next(one)] == [0, 1, 2]


def test_what_layouts_need_is_imported_before_a_process_begins() -> None:
    """Kernels too, where numba is installed; Ctrl-C does in them what it does elsewhere."""
    run = subprocess.run([sys.executable, "-c", IN_A_PROCESS], capture_output=True, text=True, timeout=120, check=True)
    modules, handler = run.stdout.splitlines()
    assert "autopar.inter_op.layer_layouts" in modules.split()
    assert ("autopar.intra_op.solvers.kernels" in modules.split()) == (find_spec("numba") is not None)
    assert "jax" not in modules.split()
    assert "default_int_handler" in handler
    assert run.stderr == ""
