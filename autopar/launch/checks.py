"""What hosts say of themselves (`facts`) → what is wrong, and what to do about it. Pure functions."""

from __future__ import annotations

import ipaddress
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.text import bytes_text
from autopar.launch.hosts import Host
from autopar.runtime.on_ray.node import OBJECT_STORE_BYTES
from autopar.runtime.on_ray.ports import Ports

CLOCKS_S = 1.0
"""By how much clocks may differ: times in logs and traces of several hosts are read side by side (chosen)."""
OPEN_FILES = 4096
"""That a host's processes may have at least; a node raises its soft limit to the hard one (chosen)."""
TEMPORARY_BYTES = 2 * 10**9
"""Free in the temporary folder: logs, and objects that leave memory (chosen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """``host``: its name, "" for the whole cluster; ``what`` is wrong; what to ``do``."""

    host: str
    what: str
    do: str

    def __str__(self) -> str:
        return f"{self.host + ': ' if self.host else ''}{self.what}. {self.do}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    """``source`` could not connect to port ``port`` of ``target``: ``why``, in the system's words."""

    source: str
    target: str
    address: str
    port: int
    why: str


def check_host(name: str, told: Mapping[str, Any], address: str, ports: Ports, *, alone: bool) -> list[Problem]:
    """What is wrong with one host that `facts` says ``told`` of. ``address``: where others reach it; ``alone``: True
    where it is the only one, so that no other needs to."""
    out: list[Problem] = []

    def problem(what: str, do: str) -> None:
        out.append(Problem(host=name, what=what, do=do))

    for package, version in told["versions"].items():
        if not version:
            extra = "autopar[ray]" if package == "ray" else package
            problem(f"{package} is not installed", f"pip install '{extra}' there, or name another python= for it")
    hostname, resolved = told["hostname"], told["resolves_to"]
    if not resolved:
        problem(
            f"its own name, {hostname!r}, means no address",
            f"Add to its /etc/hosts: {address} {hostname}",
        )
    elif not alone and ipaddress.ip_address(resolved[0]).is_loopback:
        problem(
            f"its own name, {hostname!r}, means {resolved[0]}, where only the host itself is reached; gloo "
            "binds there, and other hosts get 'Connection refused'",
            f"In its /etc/hosts, replace that line by: {address} {hostname}",
        )
    if not told["own_address"]:
        problem(
            f"{address} is not an address of this host", "Correct address= in the hosts file (`ip address` lists them)"
        )
    for port in told["taken"]:
        problem(
            f"port {port} ({ports.purpose(port)}) is taken",
            "Perhaps by another cluster: end that (`autopar cluster down`), or choose other ports (--port-base)",
        )
    hard = told["open_files"]["hard"]
    if 0 <= hard < OPEN_FILES:
        problem(
            f"a process may open {hard} files",
            f"Raise the hard limit to {OPEN_FILES} or more (/etc/security/limits.conf, or LimitNOFILE= of its service)",
        )
    free = told["shm_free_bytes"]
    if free < OBJECT_STORE_BYTES:
        problem(
            f"/dev/shm has {bytes_text(free)} free, Ray's object store takes {bytes_text(OBJECT_STORE_BYTES)}",
            "Remove what lies there, or make it larger (containers: --shm-size=1g, or an emptyDir of medium Memory)",
        )
    free = told["temporary_free_bytes"]
    if free < TEMPORARY_BYTES:
        problem(
            f"{told['temporary']} has {bytes_text(free)} free, expected {bytes_text(TEMPORARY_BYTES)}",
            "Make room, or set TMPDIR to a folder with some (its path short)",
        )
    if told["auth_mode"].lower() == "disabled":
        problem(
            "RAY_AUTH_MODE=disabled: whoever reaches Ray's ports can run any code",
            "Unset it; autopar makes a token for each cluster",
        )
    return out


def check_hosts(hosts: Sequence[Host], told: Mapping[str, Mapping[str, Any]]) -> list[Problem]:
    """What differs between hosts, and must not: versions, and machines that are one and the same."""
    out: list[Problem] = []
    head = hosts[0].name
    for package, expected in told[head]["versions"].items():
        found = {host.name: told[host.name]["versions"].get(package, "") for host in hosts}
        other = [f"{name} has {version}" for name, version in found.items() if version and version != expected]
        if expected and other:
            out.append(Problem(
                host="", what=f"versions of {package} differ: {head} has {expected}, {', '.join(other)}",
                do="Workers trace the same step and read each other's messages: install "
                + ("the same Python everywhere" if package == "python" else f"{package}=={expected} everywhere"),
            ))  # fmt: skip
    machines: dict[str, str] = {}
    for host in hosts:
        machine = told[host.name]["machine"]
        if machine and machine in machines:
            out.append(Problem(
                host="", what=f"{machines[machine]} and {host.name} are the same machine: their ports collide",
                do="List each machine once; devices= says how many devices it has",
            ))  # fmt: skip
        machines.setdefault(machine, host.name)
    return out


def check_clocks(offsets_s: Mapping[str, tuple[float, float]]) -> list[Problem]:
    """Hosts whose clock is apart from the middle one's by more than `CLOCKS_S`, the measurement's error allowed for.
    ``offsets_s``: host → (its clock less this machine's, the error of that), in seconds."""
    middle_s = statistics.median_low([offset for offset, _ in offsets_s.values()])
    return [
        Problem(
            host=name, what=f"its clock is {offset - middle_s:+.1f} s from the other hosts'",
            do="Run an NTP service there (chronyd, systemd-timesyncd)",
        )
        for name, (offset, error) in offsets_s.items()
        if abs(offset - middle_s) - error > CLOCKS_S
    ]  # fmt: skip


def check_reach(failures: Sequence[Unreachable], ports: Ports) -> list[Problem]:
    """Problems of what cannot be connected to, one for each pair of hosts."""
    pairs: dict[tuple[str, str], list[Unreachable]] = {}
    for failure in failures:
        pairs.setdefault((failure.source, failure.target), []).append(failure)
    out: list[Problem] = []
    for (source, target), failed in pairs.items():
        numbers = ", ".join(f"{f.port} ({ports.purpose(f.port)})" for f in failed[:3])
        more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
        out.append(Problem(
            host=target, what=f"{source} cannot connect to {failed[0].address}, port {numbers}{more}: {failed[0].why}",
            do=f"Let its firewall accept TCP from {source}: `autopar doctor` lists the ports",
        ))  # fmt: skip
    return out
