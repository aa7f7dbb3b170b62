"""Clusters from the launching machine: check, start, run a script on, end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import IO, Any

from autopar.ir.errors import ClusterError
from autopar.launch.checks import Problem, Unreachable, check_clocks, check_host, check_hosts, check_reach
from autopar.launch.hosts import Host, hosts_from_json, hosts_to_json
from autopar.launch.records import forget_cluster, read_cluster, write_cluster
from autopar.launch.sessions import Reach, Session, ask_all, connected, run_on, this_machine
from autopar.runtime.on_ray.node import NUM_CPUS, START_S, new_token
from autopar.runtime.on_ray.ports import ON_HEAD, Ports

REACH_ALL_S = 300.0
"""For a host to try all others (chosen; a port that does not answer takes 3 s, 64 at a time)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster to launch, or that was: the first host is the head."""

    name: str
    hosts: tuple[Host, ...]
    reach: Reach
    ports: Ports

    @property
    def alone(self) -> str | None:
        """The host of a cluster on this machine alone, whose records lie apart: homes may be shared."""
        return None if self.reach.rsh else self.hosts[0].name

    @property
    def address(self) -> str:
        """``host:port`` of the head."""
        return f"{self.hosts[0].address}:{self.ports.head}"

    def ports_of(self, host: Host) -> list[int]:
        """The ports that Ray's daemons listen on at a host of the cluster."""
        return [port for name, port in self.ports.daemons() if host is self.hosts[0] or name not in ON_HEAD]


def check(cluster: Cluster, *, running: bool = False) -> list[Problem]:
    """What is wrong with the hosts of a cluster; ports of its own running nodes do not count. ``running``: nodes run
    that were not started from here. Raises ClusterError where a host cannot be reached at all."""
    with connected(cluster.hosts, cluster.reach) as sessions:
        return check_sessions(cluster, sessions, running=running)


def check_sessions(cluster: Cluster, sessions: Sequence[Session], *, running: bool = False) -> list[Problem]:
    """As `check`, over connections that there are."""
    alone = len(cluster.hosts) == 1
    states: dict[str, Any] = (
        {host.name: {} for host in cluster.hosts}
        if running
        else ask_all(sessions, "state", lambda s: {"name": cluster.name, "host": s.host.name})
    )
    told = ask_all(sessions, "facts", lambda s: {"ports": cluster.ports_of(s.host), "address": s.host.address})
    out: list[Problem] = []
    for host in cluster.hosts:
        mine = dict(told[host.name])
        if states[host.name] is not None:
            mine["taken"] = []
        out += check_host(host.name, mine, host.address, cluster.ports, alone=alone)
    if alone:
        return out
    out += check_hosts(cluster.hosts, told)
    out += check_clocks({session.host.name: session.ping() for session in sessions})
    out += check_reach(_unreachable(cluster, sessions, states), cluster.ports)
    return out


def _unreachable(cluster: Cluster, sessions: Sequence[Session], states: Mapping[str, Any]) -> list[Unreachable]:
    """Agents listen on Ray's ports (where no node does), and connect to all others."""
    wanted = {
        host.name: [*cluster.ports_of(host), cluster.ports.first_worker, cluster.ports.last_worker]
        for host in cluster.hosts
    }
    idle = [session for session in sessions if states[session.host.name] is None]
    listening = {host.name: [cluster.ports.node_manager] for host in cluster.hosts}
    failed = ask_all(idle, "listen", lambda s: {"ports": wanted[s.host.name], "address": s.host.address})
    for name, ports in failed.items():
        listening[name] = [port for port in wanted[name] if port not in ports]
    try:
        targets = {
            host.name: [
                (other.address, port) for other in cluster.hosts if other is not host for port in listening[other.name]
            ]
            for host in cluster.hosts
        }
        found = ask_all(sessions, "reach", lambda s: {"targets": targets[s.host.name]}, REACH_ALL_S)
    finally:
        ask_all(idle, "unlisten", lambda _: {})
    names = {host.address: host.name for host in cluster.hosts}
    return [
        Unreachable(source=source, target=names[address], address=address, port=port, why=why)
        for source, failures in found.items()
        for address, port, why in failures
    ]


@contextmanager
def running(cluster: Cluster, *, detached: bool, force: bool = False, num_cpus: int = NUM_CPUS) -> Iterator[str]:
    """Checks the hosts and starts Ray on them; yields where the head keeps the token.

    Nodes end with this, unless ``detached``: then those that the cluster has lost are started, where its head runs.
    Raises ClusterError, with all problems unless ``force``; what was started is then ended.
    """
    with connected(cluster.hosts, cluster.reach) as sessions:
        runs = ask_all(sessions, "state", lambda s: {"name": cluster.name, "host": s.host.name})
        there = [name for name, node in runs.items() if node is not None]
        head = runs[sessions[0].host.name]
        new = [session for session in sessions if runs[session.host.name] is None]
        if there and not (detached and new and head is not None and _has_all(cluster, recorded(cluster.name))):
            raise ClusterError(
                f"cluster {cluster.name} runs already on {', '.join(there)}: end it (`autopar cluster down`), use it "
                "(`autopar run script.py`), or give this one another --name and --port-base"
            )
        problems = [] if force else check_sessions(cluster, sessions)
        if problems:
            lines = "\n".join(f"  {problem}" for problem in problems)
            raise ClusterError(f"cluster {cluster.name}: not started (--force starts it all the same), as\n{lines}")
        token = new_token() if head is None else sessions[0].ask("token", name=cluster.name, host=sessions[0].host.name)

        def given(session: Session) -> dict[str, Any]:
            is_head = session is sessions[0]
            return {
                "name": cluster.name, "host": session.host.name, "address": session.host.address,
                "joins": None if is_head else cluster.address, "ports": asdict(cluster.ports), "token": token,
                "detached": detached, "num_cpus": num_cpus,
            }  # fmt: skip

        try:
            if head is None:
                head = ask_all(sessions[:1], "start", given, START_S + 30)[sessions[0].host.name]
            ask_all([session for session in new if session is not sessions[0]], "start", given, START_S + 30)
            if detached:
                record(cluster)
        except BaseException:
            if detached:
                ask_all(new, "stop", lambda s: {"name": cluster.name, "host": s.host.name})
            raise
        yield head["token_path"]


def _has_all(cluster: Cluster, known: Cluster | None) -> bool:
    """Whether ``cluster`` is what was launched, with its head, or more hosts besides."""
    return known is not None and known.address == cluster.address and {*known.hosts} <= {*cluster.hosts}


def down(cluster: Cluster) -> list[str]:
    """Ends the nodes that `running` left; returns the names of hosts where there was none. Raises ClusterError where a
    host cannot be reached."""
    with connected(cluster.hosts, cluster.reach) as sessions:
        order = [*sessions[1:], sessions[0]]  # a worker without its head takes long to end
        found = {}
        for part in (order[:-1], order[-1:]):
            found |= ask_all(part, "stop", lambda s: {"name": cluster.name, "host": s.host.name})
    forget_cluster(cluster.name, cluster.alone)
    return [name for name, was in found.items() if not was]


def states(cluster: Cluster) -> dict[str, Any]:
    """Host → the record of its running node, or None. Raises ClusterError where a host cannot be reached."""
    with connected(cluster.hosts, cluster.reach) as sessions:
        return ask_all(sessions, "state", lambda s: {"name": cluster.name, "host": s.host.name})


def run_and_read(cluster: Cluster, token_path: str, script: Sequence[str]) -> tuple[int, str]:
    """As `run` in the root folder; returns the exit status and the last line that the script writes to stdout."""
    with tempfile.TemporaryFile() as out:
        status = run(cluster, token_path, script, "/", out)
        out.seek(0)
        lines = out.read().decode(errors="replace").splitlines()
    return status, lines[-1] if lines else ""


def run(cluster: Cluster, token_path: str, script: Sequence[str], folder: str, out: IO[bytes] | None = None) -> int:
    """Runs ``script`` (words) in ``folder`` on the head's host, joined to the cluster; returns its exit status. Its
    output goes where this process's goes, or to ``out``. Raises ClusterError where the command cannot be made
    (`Reach.command`)."""
    environment = {
        **cluster.reach.environment, "RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": token_path,
    }  # fmt: skip
    request = {"script": list(script), "folder": folder, "environment": environment}
    return run_on(cluster.hosts[0], cluster.reach, request, out)


def record(cluster: Cluster) -> None:
    """Keeps what `recorded` reads, on this machine."""
    reach = {"rsh": cluster.reach.rsh, "python": cluster.reach.python, "environment": dict(cluster.reach.environment)}
    told = {"hosts": hosts_to_json(cluster.hosts), "reach": reach, "ports": asdict(cluster.ports)}
    write_cluster(cluster.name, told, cluster.alone)


def recorded(name: str) -> Cluster | None:
    """The cluster that was launched from here under this name, or None. Raises ClusterError where its record is
    damaged, or ``name`` can be no cluster's."""
    data = read_cluster(name, this_machine().name) or read_cluster(name)
    if data is None:
        return None
    try:
        return Cluster(
            name=name, hosts=hosts_from_json(data["hosts"]), reach=Reach(**data["reach"]), ports=Ports(**data["ports"])
        )
    except (TypeError, KeyError) as fault:
        raise ClusterError(
            f"the record of cluster {name} is damaged: {type(fault).__name__}: {str(fault)[:200]}"
        ) from None
