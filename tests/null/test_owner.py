"""One driver at a time writes into a root of checkpoints: `autopar.checkpoint.owner`."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from autopar.checkpoint import owner
from autopar.checkpoint.folder import UNFINISHED, begin
from autopar.checkpoint.owner import OWNER, own, release
from autopar.ir import files
from autopar.ir.errors import CheckpointError

ROOT = Path(__file__).parents[2]
HOLD = "import sys, autopar.checkpoint as c; c.own(sys.argv[1]); print('has it', flush=True); sys.stdin.read()"


@contextmanager
def driver(root: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns ``root``, until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(root)], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "has it\n"
        yield other
        if other.poll() is None:
            other.kill()


@pytest.mark.slow
@pytest.mark.parametrize("take_over", [False, True])
def test_a_second_driver_is_refused_by_name(tmp_path: Path, take_over: bool) -> None:
    half = tmp_path / f"3{UNFINISHED}-its"
    half.mkdir()
    with driver(tmp_path) as other:
        before = (tmp_path / OWNER).read_bytes()
        who = f"process {other.pid} of host {socket.gethostname()} (run "
        with pytest.raises(CheckpointError) as caught:
            begin(tmp_path, 4, take_over=take_over)
        assert who in str(caught.value) and "and lives" in str(caught.value)
        with pytest.raises(CheckpointError, match="and lives"):
            release(tmp_path)
        assert half.is_dir(), "what the other was writing was removed"
        assert (tmp_path / OWNER).read_bytes() == before
    (tmp_path / "elsewhere").mkdir()
    begin(tmp_path / "elsewhere", 4)


@pytest.mark.slow
def test_a_driver_that_ended_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with driver(tmp_path) as other:
        assert other.stdin is not None
        other.stdin.close()
        assert other.wait(60) == 0
        assert not (tmp_path / OWNER).exists()
    own(tmp_path)
    assert not caplog.records
    own(tmp_path)
    release(tmp_path)
    assert not (tmp_path / OWNER).exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_driver_that_died_here_is_followed_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: signal.Signals
) -> None:
    with driver(tmp_path) as other:
        other.send_signal(how)
        other.wait(60)
    assert (tmp_path / OWNER).exists()
    own(tmp_path)
    assert [r.getMessage() for r in caplog.records if f"taken over from process {other.pid} of host" in r.getMessage()]
    release(tmp_path)


@pytest.mark.parametrize("left", [{"host": "far", "process": 7, "boot": "another", "run": "ab", "since": "then"}, None])
def test_whether_one_on_another_host_is_gone_has_to_be_said(tmp_path: Path, left: Any) -> None:
    """So has that of a driver of which the file says nothing that can be read."""
    text = "{half of" if left is None else json.dumps(left)
    (tmp_path / OWNER).write_text(text)
    who = "a driver that cannot be read of" if left is None else r"process 7 of host far \(run ab, since then\)"
    with pytest.raises(CheckpointError, match=f"{who} saved checkpoints there.*take_over=True"):
        begin(tmp_path, 1)
    assert (tmp_path / OWNER).read_text() == text
    begin(tmp_path, 1, take_over=True)
    assert json.loads((tmp_path / OWNER).read_text())["process"] == os.getpid()
    release(tmp_path)
    (tmp_path / OWNER).write_text(text)
    release(tmp_path)
    begin(tmp_path, 2)
    release(tmp_path)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is known to be gone there."""

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", none)
    own(tmp_path)
    owner._let_go(tmp_path)
    (tmp_path / OWNER).write_text(json.dumps({"boot": files.boot(), "process": 1, "host": "here"}))
    with pytest.raises(CheckpointError, match="has not said that it ended"):
        own(tmp_path)
    own(tmp_path, take_over=True)
    release(tmp_path)


@pytest.mark.slow
def test_two_at_once(tmp_path: Path) -> None:
    """Of four that start together one has it."""
    code = (
        "import sys, time, autopar.checkpoint as c\ntry:\n  c.own(sys.argv[1])\nexcept c.owner.CheckpointError:\n"
        "  print('refused')\nelse:\n  print('has it', flush=True)\n  sys.stdin.read()"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(4)
    ]  # fmt: skip
    said = [child.stdout.readline() for child in children if child.stdout is not None]
    for child in children:
        child.communicate()
    assert sorted(said) == ["has it\n", *["refused\n"] * 3]
    assert not (tmp_path / OWNER).exists()


@pytest.mark.slow
def test_a_fork_is_another_driver(tmp_path: Path) -> None:
    own(tmp_path)
    code = "import os\nfrom autopar.checkpoint import own\n"
    code += (
        "own(PATH)\npid = os.fork()\nif not pid:\n  try:\n    own(PATH)\n  except Exception as e:\n"
        "    os._exit(7 if 'and lives' in str(e) else 8)\n  os._exit(9)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7"
    )
    done = subprocess.run(
        [sys.executable, "-c", code.replace("PATH", repr(str(tmp_path / "a")))], cwd=ROOT, check=False
    )
    assert done.returncode == 0
    release(tmp_path)


def test_a_root_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot begin a checkpoint there: "):
        own(tmp_path / "file" / "root")
