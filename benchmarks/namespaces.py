"""Hosts on one machine: network namespaces with an address each, joined by a bridge over links of limited bandwidth.

Needs root, and the commands ``ip`` and ``tc``. Everything made here carries this process's number in its name and is
removed when the ``with`` ends, for whatever reason (SIGTERM included; after SIGKILL, ``ip netns del`` by hand).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple, NoReturn

SUBNET = "10.213.77"
"""Of the hosts' addresses; no other network sees them."""
BURST = "256kb"
LATENCY = "100ms"
"""Of each link's token bucket: what may be sent at once, and how long a packet may wait before it is dropped."""


class NamespaceError(Exception):
    """Namespaces cannot be made here; the message says why."""


class NetworkHost(NamedTuple):
    """A host: the namespace's name and its address."""

    name: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command that starts another one in the host (it becomes that one: its process number stays)."""
        return ("ip", "netns", "exec", self.name)


@contextmanager
def network(count: int, bits_per_s: float) -> Iterator[tuple[NetworkHost, ...]]:
    """``count`` hosts, each with a full-duplex link of ``bits_per_s``.

    Raises:
        NamespaceError: not root, a command is missing, or the kernel refuses.
    """
    if os.geteuid() != 0:
        raise NamespaceError("network namespaces need root: run it with sudo")
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        raise NamespaceError(f"the command {missing[0]!r} is not installed (package iproute2)")
    bridge = f"autopar{os.getpid()}-bridge"
    hosts = tuple(NetworkHost(f"autopar{os.getpid()}-{i}", f"{SUBNET}.{i + 1}") for i in range(count))
    before = signal.signal(signal.SIGTERM, _ended)
    made: list[str] = []
    try:
        for name in (bridge, *(host.name for host in hosts)):
            _do("ip", "netns", "add", name)
            made.append(name)
        _do("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
        _do("ip", "-n", bridge, "link", "set", "bridge", "up")
        for i, host in enumerate(hosts):
            port = f"port{i}"
            _do("ip", "-n", host.name, "link", "add", "nic", "type", "veth", "peer", "name", port, "netns", bridge)
            _do("ip", "-n", bridge, "link", "set", port, "master", "bridge", "up")
            _do("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "nic")
            _do("ip", "-n", host.name, "link", "set", "nic", "up")
            _do("ip", "-n", host.name, "link", "set", "lo", "up")
            for name, device in ((host.name, "nic"), (bridge, port)):
                limit = f"{bits_per_s:.0f}bit"
                _do("tc", "-n", name, "qdisc", "add", "dev", device, "root",
                    "tbf", "rate", limit, "burst", BURST, "latency", LATENCY)  # fmt: skip
        yield hosts
    finally:
        signal.signal(signal.SIGTERM, before)
        left = [name for name in made if subprocess.run(["ip", "netns", "del", name], check=False).returncode]
        if left:
            raise NamespaceError(f"these namespaces could not be removed: {', '.join(left)}")


def _ended(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NamespaceError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
