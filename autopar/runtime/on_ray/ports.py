"""Where a Ray node listens: fixed ports, what each is for, and whom a firewall should let in."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from autopar.ir.errors import ClusterError

PURPOSES = {
    "head": "the head's store: nodes and drivers join here",
    "node_manager": "raylet: leases workers",
    "object_manager": "raylet: objects between hosts",
    "agent_grpc": "dashboard agent (only with ray[default])",
    "agent_http": "dashboard agent (only with ray[default])",
    "metrics": "metrics for Prometheus (only with ray[default])",
    "runtime_env": "sets up workers' environments",
    "autoscaler": "the head's autoscaler: metrics for Prometheus",
}
ON_HEAD = ("head", "autoscaler")
"""Ports that only the head's host listens on."""
AUTOSCALER_VARIABLE = "AUTOSCALER_METRIC_PORT"
"""`ray start` has no option for the autoscaler's port: this variable of its environment says it (ray 2.60,
``autoscaler/_private/constants.py``; 44217 without it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Where a Ray head listens, most of it on all interfaces: firewalls should let hosts of the cluster in, and nobody
    else. Numbers are chosen, outside Linux's ephemeral ones (32768 up).

    Attributes:
        head: the head's store, which nodes and drivers join.
        node_manager: leases workers.
        object_manager: objects between hosts.
        agent_grpc: dashboard agent (only with ``ray[default]``).
        agent_http: dashboard agent (only with ``ray[default]``).
        metrics: for Prometheus (only with ``ray[default]``).
        runtime_env: sets up workers' environments.
        autoscaler: the head's autoscaler's metrics.
        first_worker: the first port of workers and drivers.
        last_worker: the last one.
    """

    head: int = 26379
    node_manager: int = 26380
    object_manager: int = 26381
    agent_grpc: int = 26382
    agent_http: int = 26383
    metrics: int = 26384
    runtime_env: int = 26385
    autoscaler: int = 26386
    first_worker: int = 26400
    last_worker: int = 26499

    def daemons(self) -> Iterator[tuple[str, int]]:
        """(name, port) of all but the workers' ports."""
        yield from ((f.name, getattr(self, f.name)) for f in fields(self) if not f.name.endswith("_worker"))

    def purpose(self, port: int) -> str | None:
        """What a port is for; None where it is not among these.

        Args:
            port: its number.
        """
        for name, number in self.daemons():
            if number == port:
                return PURPOSES[name]
        return "a worker or driver of Ray" if self.first_worker <= port <= self.last_worker else None

    def verify(self) -> None:
        """Raises ClusterError where two ports are the same, one is not from 1024 to 65535, or workers have fewer than
        eight."""
        seen: dict[int, str] = {}
        for name, port in self.daemons():
            if not 1024 <= port <= 65535:
                raise ClusterError(f"port {port} ({name}): expected 1024 to 65535")
            if port in seen:
                raise ClusterError(f"port {port} is given to {seen[port]} and to {name}")
            if self.first_worker <= port <= self.last_worker:
                raise ClusterError(
                    f"port {port} ({name}) lies among workers' ports, {self.first_worker} to {self.last_worker}"
                )
            seen[port] = name
        if not 1024 <= self.first_worker <= self.last_worker - 7 <= 65535 - 7:
            raise ClusterError(
                f"workers' ports {self.first_worker} to {self.last_worker}: expected eight or more, from 1024 to 65535"
            )


def ports_from(base: int) -> Ports:
    """The default ports, moved.

    Args:
        base: the head's port.

    Raises:
        ClusterError: one is then not from 1024 to 65535.
    """
    usual = Ports()
    names = [f.name for f in fields(Ports)]
    ports = replace(usual, **{name: getattr(usual, name) + base - usual.head for name in names})
    ports.verify()
    return ports


def is_free(port: int) -> bool:
    """True where nobody listens on ``port``, on any interface of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True
