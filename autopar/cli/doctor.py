"""`autopar doctor`: what this machine and its cluster are like, and what is wrong with them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from autopar.cli.cluster import add_options, cluster_of
from autopar.cli.output import show
from autopar.ir.errors import ClusterError
from autopar.ir.text import bytes_text, table
from autopar.launch.checks import Problem, check_host
from autopar.launch.cluster import Cluster, check, recorded, states
from autopar.launch.facts import facts, version_of
from autopar.launch.listening import Listener, below, listeners
from autopar.launch.records import ElsewhereError, clusters_folder, read_node
from autopar.launch.traps import traps
from autopar.runtime.on_ray.ports import ON_HEAD, PURPOSES, Ports

DEVICES_S = 120.0
"""For a process to import JAX and find devices (chosen)."""
_DEVICES = """
import json, jax
d = jax.devices()
print(json.dumps({"count": len(d), "platform": d[0].platform, "kind": d[0].device_kind}))
"""


def add_parser(commands: Any) -> None:
    """Adds this command to argparse's ``commands``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="check this machine and its cluster",
        description="Shows versions, devices, limits, Ray's ports with what each is for, who listens there, and rules "
        "for a firewall; what works and yet surprises; then a line for each problem with what to do. With --hosts, or "
        "where a cluster was launched from here, all its hosts are checked. Exit code 0: nothing wrong; 1: something "
        "is; 2: an error. --cluster tells what plans for that one count on instead: devices, natural meshes, links, "
        "and their sources.",
    )
    add_options(parser)
    parser.add_argument(
        "--cluster", metavar="CLUSTER", default=None, help="a preset, a TPU slice, or a file, as of plan"
    )
    parser.add_argument("--no-devices", action="store_true", help="do not start JAX to look for devices")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints what it finds; returns 0, or 1 where something is wrong. Raises ClusterError as `cluster_of`, and where
    the hosts of a cluster that was launched from here cannot be asked."""
    if options.cluster is not None:
        from autopar.cli.described import described  # numpy, which no other command here needs

        show(described(options.cluster))
        return 0
    known = options.hosts is not None or recorded(options.name) is not None
    cluster = cluster_of(options, launched=options.hosts is None and known)
    nodes = _nodes()
    ports = cluster.ports
    told = facts(ports=[] if nodes else [port for _, port in ports.daemons()])
    devices, problems = ({}, []) if options.no_devices else _devices()
    _show_machine(told, devices)
    _show_ports(ports)
    for where, node in nodes:
        found = listeners([node["pid"], *below(node["pid"])])
        _show_listeners(where, node, found)
        problems += _check_listeners(where, node, found)
    packages = told["versions"] | {name: version_of(name) for name in ("libtpu", "numba", "tensorstore")}
    if not known:  # nobody needs it yet; `traps` tell of it
        told = {**told, "versions": {name: version for name, version in told["versions"].items() if name != "ray"}}
    problems += check_host("", told, "its address", ports, alone=not known or len(cluster.hosts) == 1)
    if known:
        problems += _check_cluster(cluster, told)
    if surprises := traps(packages, devices, os.environ):
        show("\n".join(["\nto know", *(f"  {each}" for each in surprises)]))
    show("\nproblems" if problems else "\nnothing wrong")
    for problem in problems:
        print(f"  {problem}")
    return 1 if problems else 0


def _check_cluster(cluster: Cluster, told: dict[str, Any]) -> list[Problem]:
    """Of all hosts; this machine's own problems are told once."""
    try:
        running = states(cluster)
    except ClusterError as fault:
        return [
            Problem(host="", what=f"cluster {cluster.name}: {fault}", do="Hosts that are gone: `autopar cluster down`")
        ]
    rows = [["host", "address", "node"]]
    for host in cluster.hosts:
        node = running[host.name]
        rows.append([host.name, host.address, f"process {node['pid']}" if node else "does not run"])
    show("\n".join([f"\ncluster {cluster.name}", *table(rows)]))
    out = check(cluster) if len(cluster.hosts) > 1 else []
    some = any(running.values())
    for name, node in running.items():
        if some and node is None:
            do = f"~/.autopar/clusters/{cluster.name}/{name}/node.log says why; `autopar cluster up` starts it again"
            out.append(Problem(host=name, what="its node of Ray has ended", do=do))
    return out


def _nodes() -> list[tuple[str, dict[str, Any]]]:
    """Nodes of Ray that were launched on this machine and live: (cluster/host, record)."""
    out: list[tuple[str, dict[str, Any]]] = []
    for path in sorted(clusters_folder().glob("*/*/node.json")):
        with suppress(ElsewhereError):  # that machine's doctor tells of it
            node = read_node(path.parent)
            if node is not None:
                out.append((f"{path.parent.parent.name}/{path.parent.name}", node))
    return out


def _devices() -> tuple[dict[str, Any], list[Problem]]:
    """What JAX sees, in a process of its own: this one takes no memory of theirs."""
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _DEVICES], env=environment, capture_output=True, text=True, timeout=DEVICES_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        what = f"JAX finds no devices within {DEVICES_S:g} s"
        return {}, [Problem(host="", what=what, do="Another process may hold them; --no-devices leaves them out")]
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return {}, [
            Problem(host="", what=f"JAX finds no devices: {last[0]}", do="Try: python -c 'import jax; jax.devices()'")
        ]
    return json.loads(done.stdout.splitlines()[-1]), []


def _show_machine(told: dict[str, Any], devices: dict[str, Any]) -> None:
    versions = ", ".join(f"{name} {version or '(missing)'}" for name, version in told["versions"].items())
    limits = told["open_files"]
    rows = [
        ["versions", versions],
        ["name", f"{told['hostname']}, which means {', '.join(told['resolves_to']) or 'no address'}"],
        ["open files", f"{limits['soft']}, at most {limits['hard']}"],
        ["/dev/shm", f"{bytes_text(told['shm_free_bytes'])} free"],
        [told["temporary"], f"{bytes_text(told['temporary_free_bytes'])} free"],
        ["Ray's token", _token(told["auth_mode"])],
    ]
    if devices:
        rows.insert(1, ["devices", f"{devices['count']} {devices['platform']} ({devices['kind']})"])
    show("\n".join(["this machine", *table(rows)]))


def _token(mode: str) -> str:
    if mode.lower() == "disabled":
        return "switched off"
    if any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        return "from the environment"
    if (Path.home() / ".ray" / "auth_token").exists():
        return "~/.ray/auth_token"
    return "made for each cluster"


def _show_ports(ports: Ports) -> None:
    rows = [["port", "host", "for"]]
    for name, port in ports.daemons():
        rows.append([str(port), "head" if name in ON_HEAD else "all", PURPOSES[name]])
    rows.append([f"{ports.first_worker}-{ports.last_worker}", "all", "workers and drivers of Ray"])
    rows.append(["ephemeral", "all", "jax.distributed, collectives and transfers between workers"])
    numbers = sorted(port for _, port in ports.daemons())
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    rows[-1][0] = f"{first}-{last}"
    span = f"{numbers[0]}-{numbers[-1]}, {ports.first_worker}-{ports.last_worker}, {first}-{last}"
    rules = [
        "# nftables, chain input; HOSTS are the cluster's addresses, separated by commas",
        "ct state established,related accept",
        "ip saddr { HOSTS } tcp dport 1024-65535 accept",
        f"iif != lo tcp dport {{ {span} }} drop",
    ]
    show("\n".join(["\nports", *table(rows), "\nfirewall", *(f"  {rule}" for rule in rules)]))


def _show_listeners(where: str, node: dict[str, Any], found: list[Listener]) -> None:
    ports = Ports(**node["ports"])
    rows = [["port", "on", "process", "for"]]
    for one in found:
        on = "all interfaces" if one.everywhere else one.address
        rows.append(
            [str(one.port), on, f"{one.process} ({one.pid})", ports.purpose(one.port) or "not one of Ray's ports"]
        )
    show("\n".join([f"\nnode {where}, at {node['address']}, listens", *table(rows)]))


def _check_listeners(where: str, node: dict[str, Any], found: list[Listener]) -> list[Problem]:
    """Ports that are not pinned, and open to all."""
    ports = Ports(**node["ports"])
    return [
        Problem(
            host="", what=f"node {where}: {one.process} (process {one.pid}) listens on port {one.port} of all "
            "interfaces, which is not among Ray's ports", do="A script's own server, or another version of Ray: "
            "keep the firewall closed for it",
        )
        for one in found if one.everywhere and ports.purpose(one.port) is None
    ]  # fmt: skip
