"""The benchmark on real links: it says when it cannot run, measures what arrives, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from autopar.ir.errors import ReshardingTimeoutError
from benchmarks import resharding_hosts
from benchmarks.namespaces import NamespaceError, network

ROOT = Path(__file__).parents[2]


def _refused() -> str:
    """Why namespaces cannot be made here, or nothing."""
    try:
        with network(1, 1e9):
            return ""
    except NamespaceError as error:
        return str(error)


REFUSED = _refused()
needs_namespaces = pytest.mark.skipif(bool(REFUSED), reason=REFUSED or "-")


def namespaces_of(pid: int) -> list[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line.startswith(f"autopar{pid}-")]


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert resharding_hosts.main([]) == 2
    assert "cannot run here: network namespaces need root" in capsys.readouterr().out


def test_without_iproute_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda command: None)
    assert resharding_hosts.main([]) == 2
    assert "'ip' is not installed" in capsys.readouterr().out


@needs_namespaces
def test_namespaces_are_removed_after_a_failure() -> None:
    with pytest.raises(ZeroDivisionError), network(2, 1e9):
        assert len(namespaces_of(os.getpid())) == 3
        raise ZeroDivisionError
    assert not namespaces_of(os.getpid())


@needs_namespaces
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_namespaces_are_removed_after_an_interrupt(sent: signal.Signals) -> None:
    code = (
        "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # where a shell ignores it
        "from benchmarks.namespaces import network\n"
        "with network(2, 1e9) as hosts:\n    print(flush=True)\n    time.sleep(600)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert child.stdout is not None
    with child, child.stdout:
        try:
            child.stdout.readline()
            assert len(namespaces_of(child.pid)) == 3
            child.send_signal(sent)
            assert child.wait(60) != 0
        finally:
            child.kill()
    assert not namespaces_of(child.pid)


@needs_namespaces
def test_tiles_arrive_over_the_links() -> None:
    with network(2, 1e9) as hosts:
        measured = resharding_hosts.run_case(resharding_hosts.SINGLE, hosts, 8e6, 2)
    assert measured.median_s > 0.9 * measured.plan.bound_s  # the link's bandwidth is limited


@needs_namespaces
def test_a_link_that_is_cut_is_an_error_in_time() -> None:
    plan = resharding_hosts.plan_of(resharding_hosts.SINGLE, 64e6)  # half a second
    with network(2, 1e9) as hosts, resharding_hosts.gang_for(plan, hosts) as gang:
        gang.run(deadline_s=60.0)
        cut = ["ip", "-n", hosts[1].name, "link", "set", "nic", "down"]
        timer = threading.Timer(0.2, subprocess.run, (cut,), {"check": True})
        timer.start()
        with pytest.raises(ReshardingTimeoutError, match=r"run: no answer from worker 0 .*, worker 1 .* within 3 s"):
            gang.run(deadline_s=3.0)
        timer.join()


@needs_namespaces
def test_tiles_that_differ_are_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(resharding_hosts, "digest", lambda tile: "another")
    assert resharding_hosts.main(["--only", "broadcast", "--megabytes", "1", "--runs", "1"]) == 1
    assert "failed: value 0, device 1: another tile than expected arrived" in capsys.readouterr().out
    assert not namespaces_of(os.getpid())
