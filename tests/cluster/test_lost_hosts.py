"""`autopar cluster up` where a part of the cluster runs already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from autopar.ir.errors import ClusterError
from autopar.launch import cluster as launch
from autopar.launch.cluster import Cluster, record, recorded, running
from autopar.launch.hosts import Host
from autopar.launch.sessions import Reach
from autopar.runtime.on_ray.ports import Ports, ports_from

HOSTS = [Host(name=name, address=f"127.0.0.{i}") for i, name in enumerate("abcd", 1)]


class Told:
    """A session that keeps what it is asked. ``node``: whether one runs there."""

    def __init__(self, host: Host, node: bool, fails: bool = False) -> None:
        self.host, self.node, self.fails = host, node, fails
        self.asked: dict[str, Any] = {}

    def send(self, do: str, **given: Any) -> None:
        self.asked[do] = given

    def receive(self, do: str, _: float = 0.0) -> Any:
        if do == "start" and self.fails:
            raise ClusterError("no room")
        there = {"pid": 1, "token_path": f"{self.host.name}/token"}
        return {"state": there if self.node else None, "start": there, "token": "the head's", "stop": True}[do]

    def ask(self, do: str, **given: Any) -> Any:
        self.send(do, **given)
        return self.receive(do)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_HOME", str(tmp_path))


def of(hosts: Sequence[Host], ports: Ports | None = None) -> Cluster:
    reach = Reach(rsh="rsh", python="python", environment={})
    return Cluster(name="mine", hosts=tuple(hosts), ports=ports or Ports(), reach=reach)


def up(
    monkeypatch: pytest.MonkeyPatch, hosts: Sequence[Host], runs: str, *, fails: str = "", ports: Ports | None = None,
    detached: bool = True,
) -> tuple[list[Told], str]:  # fmt: skip
    """The sessions, and where the token is, or the error."""
    sessions = [Told(host, host.name in runs, host.name in fails) for host in hosts]

    @contextmanager
    def connected(*_: Any) -> Iterator[list[Told]]:
        yield sessions

    monkeypatch.setattr(launch, "connected", connected)
    try:
        with running(of(hosts, ports), detached=detached, force=True) as path:
            return sessions, path
    except ClusterError as fault:
        return sessions, str(fault)


def started(sessions: Sequence[Told]) -> str:
    return "".join(session.host.name for session in sessions if "start" in session.asked)


def test_lost_and_new_hosts_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the token that the head has; those that run are let alone, where one fails too."""
    record(of(HOSTS[:3]))
    sessions, path = up(monkeypatch, HOSTS, "ac")
    assert (started(sessions), path) == ("bd", "a/token")
    for session in sessions[1::2]:
        asked = session.asked["start"]
        assert (asked["token"], asked["joins"], asked["detached"]) == ("the head's", f"127.0.0.1:{Ports().head}", True)
    known = recorded("mine")
    assert known is not None and [host.name for host in known.hosts] == list("abcd")
    sessions, said = up(monkeypatch, HOSTS, "ac", fails="d")
    assert "no room" in said
    assert "".join(session.host.name for session in sessions if "stop" in session.asked) == "bd"


@pytest.mark.parametrize(
    ("hosts", "runs", "more"),
    [
        ("abc", "abc", {}),  # nothing is lost
        ("abc", "bc", {}),  # its head is
        ("ab", "a", {}),  # c would be forgotten
        ("abc", "ac", {"detached": False}),
        ("abc", "ac", {"ports": ports_from(30000)}),
    ],
)
def test_what_runs_is_not_mixed(monkeypatch: pytest.MonkeyPatch, hosts: str, runs: str, more: dict[str, Any]) -> None:
    record(of(HOSTS[:3]))
    sessions, said = up(monkeypatch, [host for host in HOSTS if host.name in hosts], runs, **more)
    assert "cluster mine runs already on" in said and not started(sessions)
