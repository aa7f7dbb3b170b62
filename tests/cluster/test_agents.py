"""Agents on "hosts" of this machine, reached through a shell as ssh does, and without one as srun does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from autopar.ir.errors import ClusterError
from autopar.launch import agent
from autopar.launch.agent import REACH_S, Agent, reach, state, stop
from autopar.launch.cluster import Cluster, record, recorded
from autopar.launch.hosts import Host
from autopar.launch.records import folder_of, forget_cluster, read_node, write_cluster, write_node
from autopar.launch.sessions import Reach, Session, ask_all, connected, environment_from, run_on, this_machine
from autopar.runtime.on_ray.node import start_command
from autopar.runtime.on_ray.ports import Ports
from tests.cluster.namespaces import ROOT
from tests.processes import left, sleeper

HOSTS = (Host(name="a", address="127.0.0.1"), Host(name="b", address="127.0.0.2"))
SHELLS = {
    "ssh": 'shift\nexec sh -c "$*"\n',
    "srun": 'shift\nexec "$@"\n',
    "greets": 'shift\necho "Welcome!"\nexec "$@"\n',
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_HOME", str(tmp_path))
    return tmp_path


def reached(folder: Path, shell: str = "ssh", **more: Any) -> Reach:
    script = folder / "rsh"
    script.write_text(f"#!/bin/sh\n{SHELLS.get(shell, shell)}")
    script.chmod(0o755)
    given = {"python": sys.executable, "environment": {"PYTHONPATH": str(ROOT)}}
    return Reach(rsh=str(script), **(given | more))


@pytest.mark.parametrize("shell", SHELLS)
def test_all_are_asked_and_clocks_compared(tmp_path: Path, shell: str) -> None:
    with connected(HOSTS, reached(tmp_path, shell)) as sessions:
        told = ask_all(sessions, "facts", lambda s: {"address": s.host.address})
        assert [told[h.name]["own_address"] for h in HOSTS] == [True, True]
        offset, error = sessions[0].ping()
        assert abs(offset) <= error + 1e-3 and error < 5
        with pytest.raises(ClusterError, match=r"a: dance: .*does not know 'dance'"):
            sessions[0].ask("dance")
        assert sessions[0].ask("reach", targets=[]) == []  # and the next question has its own answer


def test_ports_are_listened_on_and_reached(tmp_path: Path) -> None:
    with socket.socket() as taken, connected(HOSTS, reached(tmp_path)) as (a, b):
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        used = taken.getsockname()[1]
        free = next(p for p in range(20000, 30000) if p != used and not reach_fails_not(p))
        assert a.ask("listen", ports=[used, free], address="127.0.0.1") == [used]
        assert b.ask("reach", targets=[("127.0.0.1", free)]) == []
        a.ask("unlisten")
        ((address, port, why),) = b.ask("reach", targets=[("127.0.0.1", free)])
        assert (address, port) == ("127.0.0.1", free) and "refused" in why


def test_all_hosts_of_a_large_cluster_connect_at_once() -> None:
    """The kernel takes their connections, though nobody accepts one."""
    mine = Agent()
    port = next(p for p in range(30000, 32000) if not reach_fails_not(p))
    with contextlib.ExitStack() as stack:
        stack.callback(mine.close)
        assert mine.listen([port], "127.0.0.1") == []
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), REACH_S))


def reach_fails_not(port: int) -> bool:
    return not reach(targets=[("127.0.0.1", port)])


@pytest.mark.parametrize(
    ("shell", "more", "message"),
    [
        ("ssh", {"environment": {}, "python": "/usr/bin/python3 -S"}, "signs that shells read"),
        ("ssh", {"python": "/no/such/python"}, r"(?s)a: connecting.*no such interpreter.*b: connecting"),
        ("shift\necho No module named autopar >&2; exit 1", {}, "Install autopar there"),
        ("echo Permission denied >&2; exit 255\n", {}, r"Permission denied\. Try it by hand: ssh a true"),
    ],
)
def test_hosts_that_cannot_be_reached(tmp_path: Path, shell: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=message), connected(HOSTS, reached(tmp_path, shell, **more)):
        pass


def test_no_such_remote_shell() -> None:
    with pytest.raises(ClusterError, match="there is no command 'no-such-shell'"):
        Session(HOSTS[0], Reach(rsh="no-such-shell -x", python="python", environment={}))


def test_where_the_name_goes() -> None:
    reach = Reach(rsh="env -u {} --", python="python", environment={"PATH": "/bin"})
    assert reach.command(HOSTS[0])[:6] == ["env", "-u", "a", "--", "env", "PATH=/bin"]


@pytest.mark.parametrize("rsh", ["", "ssh"])
def test_commands_show_no_values(tmp_path: Path, rsh: str) -> None:
    """What everybody on both machines can read has what an interpreter needs to start; an error, the name alone."""
    secret = {"KEY": "sesame and more", "PYTHONPATH": str(ROOT)}
    way = reached(tmp_path, environment=secret) if rsh else Reach(rsh="", python=sys.executable, environment=secret)
    words = way.command(HOSTS[0])
    assert not any("sesame" in word for word in words) and f"PYTHONPATH={ROOT}" in [w.split(":")[0] for w in words]
    (tmp_path / "script.py").write_text("import os, sys\nsys.exit(os.environ['KEY'] != 'sesame and more')\n")
    request = {"script": ["script.py"], "folder": str(tmp_path), "environment": secret}
    assert run_on(HOSTS[0], way, request) == 0
    with pytest.raises(ClusterError) as error:
        reached(tmp_path, environment={"PATH": "/sesame and more"}).command(HOSTS[0])
    assert "--env PATH" in str(error.value) and "sesame" not in str(error.value)


def test_nothing_is_imported_from_where_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "autopar", "socket", "ray"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the folder was imported')\n")
    monkeypatch.chdir(tmp_path)
    for way in (Reach(rsh="", python=sys.executable, environment={}), reached(tmp_path)):
        with connected(HOSTS[:1], way) as (session,):
            assert session.ask("time") > 0
    command = start_command(Ports(), "127.0.0.1", tmp_path, num_cpus=1)
    assert [words[1] for words in (command, command[command.index(sys.executable, 1) :])] == ["-P", "-P"]


def test_sessions_before_one_that_cannot_be_made_are_closed(tmp_path: Path) -> None:
    hosts = HOSTS[0], Host(name="c", address="127.0.0.3", python="not a path")
    made: list[Session] = []
    with (
        mock.patch.object(Session, "close", autospec=True, side_effect=made.append),
        pytest.raises(ClusterError, match="'not a path' cannot be passed"),
        connected(hosts, reached(tmp_path)),
    ):
        pass
    assert [session.host.name for session in made] == ["a"]
    mock.patch.stopall()
    made[0].close()


def test_a_script_runs_there_and_gives_its_status(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys\nprint(sys.argv[1:], os.environ['X'])\nprint('mind', file=sys.stderr)\nsys.exit(7)\n"
    )
    request = {"script": ["script.py", "a b", "$c"], "folder": str(tmp_path), "environment": {"X": "y z"}}
    assert run_on(HOSTS[0], reached(tmp_path), request) == 7
    out, err = capfd.readouterr()
    assert out == "['a b', '$c'] y z\n" and err == "mind\n"
    assert run_on(HOSTS[0], reached(tmp_path), request | {"folder": "/no/such"}) == 2
    assert "has no folder /no/such" in capfd.readouterr().err


@pytest.mark.slow
def test_a_script_ends_with_its_launcher(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    launcher = (
        "from tests.cluster.test_agents import *\n"
        f"run_on(HOSTS[0], reached(Path({str(tmp_path)!r})), "
        f"{{'script': ['script.py'], 'folder': {str(tmp_path)!r}, 'environment': {{}}}})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", launcher], cwd=ROOT)
    pid = int(soon(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
    process.kill()
    process.wait()
    soon(lambda: not Path(f"/proc/{pid}").exists())


def soon(done: Any, within_s: float = 60.0) -> Any:
    stop_s = time.monotonic() + within_s
    while not (found := done()):
        assert time.monotonic() < stop_s
        time.sleep(0.05)
    return found


def test_only_what_was_started_is_ended(tmp_path: Path) -> None:
    folder = folder_of("mine", "a")
    folder.mkdir(parents=True)
    with sleeper() as other, sleeper() as node:
        write_node(folder, other.pid, {"temporary": str(tmp_path / "t")})
        record = json.loads((folder / "node.json").read_text())
        (folder / "node.json").write_text(json.dumps(record | {"started": "1"}))  # its number was given to another
        assert read_node(folder) is None
        assert stop(name="mine", host="a") is False
        assert other.poll() is None
        write_node(folder, node.pid, {"temporary": str(tmp_path / "t")})
        (folder / "token").write_text("secret")
        assert stop(name="mine", host="a") is True
        assert node.wait(10) in (-signal.SIGTERM, 0)
        assert other.poll() is None
    assert not list(folder.glob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_asked_to_end_waits_for_its_script(tmp_path: Path, number: signal.Signals) -> None:
    """Which is interrupted, and has time to leave nothing behind: the next run may begin at once."""
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, time\ntry:\n    print('on', flush=True)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    time.sleep(0.5)\n    pathlib.Path('clean').touch()\n"
    )
    host = this_machine()
    record(
        Cluster(
            name="default", hosts=(host,), ports=Ports(), reach=Reach(rsh="", python=sys.executable, environment={})
        )
    )
    (folder := folder_of("default", host.name)).mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "autopar", "run", "script.py"]
    with sleeper() as node:
        write_node(folder, node.pid, {})
        # SIGTERM: as a shell starts what is in the background
        before = signal.signal(signal.SIGINT, signal.SIG_IGN if number == signal.SIGTERM else signal.SIG_DFL)
        try:
            run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE)
        finally:
            signal.signal(signal.SIGINT, before)
        with run:
            assert run.stdout is not None and run.stdout.readline() == b"on\n"
            run.send_signal(number)
            assert run.wait(15) == 128 + number
            assert (tmp_path / "clean").exists()


def test_what_a_killed_node_left_goes_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's folder, by the next start as by `autopar cluster down`; no other, whatever a record says."""
    folder, mine, other = folder_of("mine", "a"), tmp_path / "autopar-ray-1", tmp_path / "mine"
    folder.mkdir(parents=True)
    (new := tmp_path / "new").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(new))

    def killed(temporary: Path) -> None:
        temporary.mkdir(exist_ok=True)
        with sleeper() as node:
            write_node(folder, node.pid, {"temporary": str(temporary)})

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("no node")

    for temporary in (mine, other):
        killed(temporary)
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no node"):
            patch.setattr(agent.subprocess, "Popen", fails)
            start(Agent())
        assert not (folder / "node.json").exists()
        killed(temporary)
        assert stop(name="mine", host="a") is False
        assert not (folder / "node.json").exists()
    assert other.exists() and not mine.exists() and not list(new.iterdir())


def start(agent: Agent) -> Any:
    return agent.start(
        name="mine", host="a", address="127.0.0.1", joins=None, ports=asdict(Ports()), token="t", detached=True,
        num_cpus=1,
    )  # fmt: skip


def test_a_number_that_another_process_has_got_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a node had started is killed where the node does not end; by then its number may be another's."""
    monkeypatch.setattr(agent, "END_S", 0.3)
    folder = folder_of("mine", "a")
    folder.mkdir(parents=True)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
    with sleeper() as another, subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as stubborn:
        assert stubborn.stdout is not None and stubborn.stdout.readline()
        write_node(folder, stubborn.pid, {"temporary": str(tmp_path / "t")})
        real, asked = agent.started, list[int]()

        def since(pid: int) -> str:
            asked.append(pid)
            return "1" if pid == another.pid and asked.count(pid) == 1 else real(pid)

        monkeypatch.setattr(agent, "started", since)
        monkeypatch.setattr(agent, "below", lambda _: [another.pid])
        assert stop(name="mine", host="a")
        assert stubborn.wait(10) == -signal.SIGKILL and another.poll() is None


def test_a_node_that_cannot_be_recorded_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    nodes: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def seen(*_: Any, **given: Any) -> Any:
        nodes.append(real([sys.executable, "-c", "import time; time.sleep(600)"], **given))
        return nodes[-1]

    monkeypatch.setattr(agent, "write_node", full)
    monkeypatch.setattr(agent.subprocess, "Popen", seen)
    with pytest.raises(OSError, match="No space left"):
        start(Agent())
    assert not left([node.pid for node in nodes], 10)
    assert nodes[0].wait() is not None
    assert not (folder_of("mine", "a") / "token").exists()


def test_machines_that_share_a_home_keep_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither takes the other's node as ended, and clusters on one machine have records of their own."""
    here, folder = Reach(rsh="", python=sys.executable, environment={}), folder_of("mine", "a")
    clusters = dict[str, Cluster]()
    folder.mkdir(parents=True)
    with sleeper() as node:
        for name in ("red", "blue"):
            monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
            clusters[name] = Cluster(name="mine", hosts=(this_machine(),), reach=here, ports=Ports())
            record(clusters[name])
        write_node(folder, node.pid, {"temporary": str(tmp_path / "t")})
        (folder / "token").write_text("secret")
        monkeypatch.setattr(socket, "gethostname", lambda: "red")
        assert recorded("mine") == clusters["red"]
        for act in (stop, state):
            with pytest.raises(ClusterError, match=rf"of a node on blue \(process {node.pid}\), and this is red"):
                act(name="mine", host="a")
        given = {"address": "127.0.0.1", "joins": None, "ports": asdict(Ports()), "token": "t", "num_cpus": 1}
        with pytest.raises(ClusterError, match="of a node on blue"):
            Agent().start(name="mine", host="a", detached=True, **given)
        assert node.poll() is None and (folder / "token").read_text() == "secret"
    forget_cluster("mine", "red")
    assert recorded("mine") is None
    monkeypatch.setattr(socket, "gethostname", lambda: "blue")
    assert recorded("mine") == clusters["blue"]


def test_records_are_private_and_named(tmp_path: Path) -> None:
    write_cluster("mine", {})
    path = folder_of("mine") / "cluster.json"
    assert os.stat(path).st_mode & 0o077 == 0 and os.stat(path.parent).st_mode & 0o077 == 0
    for name in ("../other", "", "a b"):
        with pytest.raises(ClusterError, match="expected letters"):
            folder_of(name)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "x")
    assert environment_from(["A=b=c", "MINE"]) == {"A": "b=c", "MINE": "x"}
    for text, message in (("1A=b", "write KEY=VALUE"), ("NOT_SET_HERE", "is not set here")):
        with pytest.raises(ClusterError, match=message):
            environment_from([text])
