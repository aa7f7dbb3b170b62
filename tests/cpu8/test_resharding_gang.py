"""Reshardings over processes on loopback: bit by bit, with relays; and what dies or stalls is an error in time."""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from autopar.ir.errors import ReshardingError, ReshardingTimeoutError
from autopar.ir.resharding import ReshardingPlan
from autopar.runtime.pieces import digest, host_of
from benchmarks.pipe_gang.gang import Gang, Host
from benchmarks.pipe_gang.gang import _Gone as Gone
from benchmarks.pipe_gang.messages import Failed
from benchmarks.resharding_cases import Case, side
from tests.resharding_values import (
    DTYPES,
    bits_of,
    chain,
    planned,
    random_case,
    random_value,
    source_tiles,
    wanted_bits,
)

ROOT = Path(__file__).parents[2]
HOSTS = (Host(devices=(0, 1, 2)), Host(devices=(3, 4, 5)), Host(devices=(6, 7)))
RUN_S = 60.0
SOON_S = 15.0
"""Within this an error has to be there whose deadline is 2 s, on a busy machine."""


def _no_processes() -> str:
    """Why processes cannot talk to each other over loopback here, or nothing."""
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
        subprocess.run([sys.executable, "-c", ""], check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"no processes over loopback: {error}"
    return ""


REFUSED = _no_processes()
pytestmark = pytest.mark.skipif(bool(REFUSED), reason=REFUSED or "-")


def hosts_of(plan: ReshardingPlan, values: list[Any]) -> dict[Any, np.ndarray[Any, Any]]:
    devices = dict(enumerate(jax.devices()))
    return {key: host_of(tile) for key, tile in source_tiles(plan, values, devices).items()}


def gone(pids: tuple[int, ...]) -> bool:
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        return False
    return True


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    with Gang(HOSTS) as gang:
        pids = gang.pids
        yield gang
    assert gone(pids)


def assert_arrives(gang: Gang, plan: ReshardingPlan) -> None:
    values = [random_value(value.type, seed) for seed, value in enumerate(plan.values)]
    wanted = wanted_bits(plan, values)
    gang.load(plan)
    gang.put(hosts_of(plan, values))
    for _ in range(2):
        gang.run(deadline_s=RUN_S)
        got = gang.collect()
        assert got.keys() == wanted.keys()
        for key, tile in got.items():
            assert bits_of(tile) == wanted[key], key
    assert gang.digests() == {key: digest(tile) for key, tile in got.items()}


@pytest.mark.parametrize("seed", range(200, 216))
def test_random_tiles_arrive(gang: Gang, seed: int) -> None:
    assert_arrives(gang, planned(random_case(seed, ragged=True, back=seed % 2 == 0), 256.0))


def test_every_dtype_arrives(gang: Gang) -> None:
    for dtype in DTYPES:
        case = Case(name=dtype, shape=(7, 11), dtype=dtype, src=side((2, 2), "S0R"), dst=side((2, 2), "RS01"))
        assert_arrives(gang, planned(case, 64.0))


def test_relays_pass_megabytes_on(gang: Gang) -> None:
    plan = chain(8, 1_000_003, 40_000)
    assert_arrives(gang, plan)


def test_what_a_worker_is_not_given_is_an_error_of_the_worker() -> None:
    with Gang([Host(devices=(0,)), Host(devices=(1,))]) as gang:
        with pytest.raises(ReshardingError, match=r"no worker has devices \[2\]"):
            gang.load(chain(3, 100, 10))
        gang.load(chain(2, 100, 10))
        with pytest.raises(ReshardingError, match=r"worker 0 .* failed: ReshardingError: .*no tile is given"):
            gang.run(deadline_s=RUN_S)
        assert gone(gang.pids)
        with pytest.raises(ReshardingError, match="the gang was closed"):
            gang.run(deadline_s=RUN_S)


@pytest.mark.parametrize(
    ("victim", "sent", "error", "message"),
    [
        (0, signal.SIGKILL, ReshardingError, r"worker 0 \(process \d+, .* died by SIGKILL"),
        (1, signal.SIGKILL, ReshardingError, r"worker 1 \(process \d+, .* died by SIGKILL"),
        (1, signal.SIGSTOP, ReshardingTimeoutError, r"run: no answer from .*worker 1 .* within 2 s"),
    ],
)
def test_a_worker_that_dies_or_stalls_in_a_transfer_is_an_error_in_time(
    victim: int, sent: signal.Signals, error: type[Exception], message: str
) -> None:
    plan = chain(3, 50_000_000, 500)  # 100,000 chunks: more than a minute
    with Gang([Host(devices=(d,)) for d in range(3)]) as gang:
        gang.load(plan)
        gang.put({(0, 0): np.zeros(50_000_000, np.int32)})
        timer = threading.Timer(1.0, os.kill, (gang.pids[victim], sent))
        timer.start()
        started = time.perf_counter()
        with pytest.raises(error, match=message):
            gang.run(deadline_s=2.0 if sent == signal.SIGSTOP else RUN_S)
        assert 0.9 < time.perf_counter() - started < SOON_S
        timer.join()
        assert gone(gang.pids)


def test_a_death_is_named_also_where_others_report_it_first() -> None:
    with Gang([Host(devices=(0,)), Host(devices=(1,))]) as gang:
        os.kill(gang.pids[1], signal.SIGKILL)
        replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        replies.put((1, Gone()))
        error = gang._error(0, Failed(summary="connection closed", trace=""), replies)
    assert re.search(r"worker 1 \(process \d+, .* died by SIGKILL", str(error))


def test_workers_end_with_their_driver() -> None:
    code = (
        "import time\nfrom benchmarks.pipe_gang.gang import Gang, Host\n"
        "with Gang([Host(devices=(0,))]) as gang:\n    print(*gang.pids, flush=True)\n    time.sleep(600)"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    with driver, driver.stdout:
        try:
            pids = tuple(map(int, driver.stdout.readline().split()))
            assert pids and not gone(pids)
        finally:
            driver.kill()
    stop_s = time.monotonic() + SOON_S
    while not gone(pids):
        assert time.monotonic() < stop_s
        time.sleep(0.05)


def test_hosts_that_share_a_device_or_cannot_start_are_refused() -> None:
    with pytest.raises(ReshardingError, match="hosts share a device"):
        Gang([Host(devices=(0,)), Host(devices=(0, 1))])
    with pytest.raises(ReshardingError, match=r"no_such_command .*could not be started"):
        Gang([Host(devices=(0,), prefix=("no_such_command",))])
    with pytest.raises(ReshardingError, match=r"worker 0 .* died with exit status 7"):
        Gang([Host(devices=(0,), prefix=("sh", "-c", "exit 7"))])
