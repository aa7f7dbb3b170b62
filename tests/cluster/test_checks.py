"""What is said of facts: nothing of good ones, one line of each fault."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.ir.errors import ClusterError
from autopar.launch.checks import Unreachable, check_clocks, check_host, check_hosts, check_reach
from autopar.launch.facts import facts
from autopar.launch.hosts import Host
from autopar.runtime.on_ray.ports import Ports, ports_from

PORTS = Ports()
VERSIONS = {
    "python": "3.11.7",
    "autopar": "0.1.0",
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "numpy": "2.4.0",
    "ray": "2.60.0",
}
GOOD: dict[str, Any] = {
    "versions": VERSIONS, "hostname": "node1", "resolves_to": ["10.0.0.1"], "machine": "a", "taken": [],
    "own_address": True, "open_files": {"soft": 1024, "hard": 65536}, "shm_free_bytes": 2**30, "temporary": "/tmp",
    "temporary_free_bytes": 10**10, "auth_mode": "",
}  # fmt: skip


def said(change: dict[str, Any], *, alone: bool = False) -> list[str]:
    return [str(p) for p in check_host("n", GOOD | change, "10.0.0.1", PORTS, alone=alone)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"versions": VERSIONS | {"ray": ""}}, "n: ray is not installed. pip install 'autopar[ray]'"),
        ({"resolves_to": ["127.0.1.1", "10.0.0.1"]}, "/etc/hosts, replace that line by: 10.0.0.1 node1"),
        ({"resolves_to": []}, "means no address"),
        ({"own_address": False}, "10.0.0.1 is not an address of this host"),
        ({"taken": [26379]}, "port 26379 (the head's store"),
        ({"open_files": {"soft": 100, "hard": 1024}}, "a process may open 1024 files"),
        ({"shm_free_bytes": 64 * 2**20}, "--shm-size=1g"),
        ({"temporary_free_bytes": 10**6}, "TMPDIR"),
        ({"auth_mode": "disabled"}, "RAY_AUTH_MODE=disabled"),
    ],
)
def test_one_line_for_each_fault(change: dict[str, Any], message: str) -> None:
    assert said({}) == []
    (line,) = said(change)
    assert line.startswith("n: ") and message in line


def test_a_host_alone_may_be_loopback() -> None:
    assert said({"resolves_to": ["127.0.1.1"]}, alone=True) == []
    assert said({"open_files": {"soft": 100, "hard": -1}}) == []  # no limit


def test_hosts_that_differ() -> None:
    hosts = [Host(name=n, address=n) for n in "abc"]
    told = {n: GOOD | {"machine": n} for n in "abc"}
    assert check_hosts(hosts, told) == []
    told["c"] = told["c"] | {"versions": VERSIONS | {"jax": "0.12.0", "python": "3.12.1"}}
    lines = [str(p) for p in check_hosts(hosts, told)]
    assert len(lines) == 2
    assert "versions of jax differ: a has 0.10.2, c has 0.12.0" in lines[1] and "jax==0.10.2 everywhere" in lines[1]
    told["c"] = told["a"]
    assert "a and c are the same machine" in str(check_hosts(hosts, told)[0])


def test_clocks() -> None:
    assert check_clocks({"a": (0.0, 0.1), "b": (0.9, 0.1), "c": (2.0, 1.2)}) == []
    (problem,) = check_clocks({"a": (100.0, 0.1), "b": (97.0, 0.1), "c": (100.2, 0.1)})
    assert str(problem).startswith("b: its clock is -3.0 s from the other hosts'")


def test_who_cannot_reach_whom() -> None:
    failures = [Unreachable(source="a", target="b", address="10.0.0.2", port=p, why="x") for p in (26380, 26381)]
    (problem,) = check_reach(failures, PORTS)
    assert "a cannot connect to 10.0.0.2, port 26380 (raylet: leases workers), 26381" in str(problem)


def test_facts_of_this_machine_are_complete() -> None:
    told = facts(ports=(1,))
    assert told.keys() == GOOD.keys()
    assert told["versions"].keys() == VERSIONS.keys()


@pytest.mark.parametrize("base", [80, 65500])
def test_ports_out_of_range(base: int) -> None:
    with pytest.raises(ClusterError, match="expected"):
        ports_from(base)


def test_ports_are_apart() -> None:
    ports = ports_from(20000)
    numbers = [port for _, port in ports.daemons()]
    assert len(set(numbers)) == len(numbers) and not set(numbers) & set(
        range(ports.first_worker, ports.last_worker + 1)
    )
    assert ports.purpose(20000) == Ports().purpose(26379) and ports.purpose(26379) is None
    with pytest.raises(ClusterError, match="given to head and to metrics"):
        Ports(metrics=26379).verify()
