"""Measures the hosts of the Ray that RAY_ADDRESS names: an actor on each, in one `jax.distributed` group.

    python -m autopar.runtime.on_ray.measure '{"name": "mine", "addresses": ["10.0.0.1", …], "devices": [4, …]}'

Prints the ClusterSpec as JSON on stdout, all else on stderr. ``devices``: CPU devices of each host; hosts that Ray
says have GPUs or TPUs use all of these instead. ``"quick": true`` measures less, as `measure` says.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.ir.cluster import ClusterSpec, LinkSpec
from autopar.ir.errors import AutoparError, ClusterError, WorkerError
from autopar.ir.serde import to_json
from autopar.ir.text import link_text, seconds_text
from autopar.runtime.on_ray.group import join, meeting_place
from autopar.runtime.on_ray.process import RESOURCES, Process
from autopar.runtime.on_ray.ray_cluster import init

START_S = 180.0
"""For the first actor to start (chosen)."""
MEASURE_S = 600.0
"""For all measurements (chosen; half a minute on two cores)."""


class Probe:
    """An actor that has a host's devices."""

    def coordinator(self, address: str) -> str:
        """``address:port`` where the group meets, on this host."""
        return meeting_place(address)

    def measure(self, coordinator: str, count: int, index: int, quick: bool) -> tuple[Any, Any]:
        """Joins the group as process ``index`` of ``count`` and measures: (`HostMeasured`, the link between hosts; None
        where there is one host)."""
        import jax
        import numpy as np
        from jax.sharding import Mesh

        from autopar.runtime.profile import measure_host, measure_link

        if count > 1:
            join(coordinator, count, index)
        host = measure_host(jax.local_devices(), quick=quick)
        if count == 1:
            return host, None
        by_host = [[d for d in jax.devices() if d.process_index == i] for i in range(count)]
        rings = min(map(len, by_host))
        mesh = Mesh(np.array([devices[:rings] for devices in by_host]), ("host", "device"))
        ring = measure_link(mesh, "host")
        return host, replace(ring, bytes_per_s=ring.bytes_per_s * rings)


def measure(name: str, addresses: Sequence[str], devices: Sequence[int], *, quick: bool = False) -> ClusterSpec:
    """The ClusterSpec of hosts, measured by an actor on each.

    Args:
        addresses: of the hosts' nodes.
        devices: CPU devices of each; hosts that Ray says have GPUs or TPUs use all of these instead.
        quick: measures less, for tests.

    Raises:
        ClusterError: no node of Ray runs at an address.
        WorkerError: an actor failed, or was not done in time.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from autopar.runtime.profile_hosts import cluster_from_hosts

    nodes: dict[str, Any] = {node["NodeManagerAddress"]: node for node in ray.nodes() if node["Alive"]}
    up = {address: nodes.get(address) or nodes.get(_resolved(address)) for address in addresses}
    by_name = {address: node for address, node in up.items() if node is not None}
    missing = [address for address in addresses if address not in by_name]
    if missing:
        raise ClusterError(f"no node of Ray runs at {', '.join(missing)}; there are nodes at {', '.join(nodes)}")
    actor = ray.remote(max_restarts=0)(Probe)
    probes: list[Any] = []
    for (_, node), count in zip(by_name.items(), devices, strict=True):
        process = _process(node["Resources"], count)
        where = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        options = actor.options(
            **process.options, scheduling_strategy=where, runtime_env={"env_vars": process.variables}
        )
        probes.append(options.remote())
    try:
        address = next(iter(by_name.values()))["NodeManagerAddress"]
        coordinator = ray.get(probes[0].coordinator.remote(address), timeout=START_S)
        calls = [p.measure.remote(coordinator, len(probes), i, quick) for i, p in enumerate(probes)]
        found = ray.get(calls, timeout=MEASURE_S)
    except RayError as fault:
        raise WorkerError(f"measuring failed: {fault}") from fault
    finally:
        for probe in probes:
            ray.kill(probe)
    links = [link for _, link in found if link is not None]
    nic = LinkSpec(
        latency_s=max(k.latency_s for k in links), bytes_per_s=min(k.bytes_per_s for k in links)
    ) if links else None  # fmt: skip
    for address, (host, _) in zip(addresses, found, strict=True):
        inside = f", links {link_text(host.link)}" if host.link else ""
        print(f"{address}: {host.devices} devices, launch {seconds_text(host.launch_s)}{inside}", file=sys.stderr)
    return cluster_from_hosts(name, [host for host, _ in found], nic)


def _process(resources: Mapping[str, float], count: int) -> Process:
    """On all GPUs or TPUs of a node, else on ``count`` CPU devices."""
    for platform, name in RESOURCES.items():
        if resources.get(name):
            return Process(platform=platform, devices=int(resources[name]))
    return Process(platform="cpu", devices=count)


def _resolved(address: str) -> str:
    try:
        return socket.gethostbyname(address)
    except OSError:
        return address


def main(argv: Sequence[str]) -> int:
    """Runs the command of the module's docstring; returns 0, or 2 after an error of autopar's, which it prints."""
    try:
        given = json.loads(argv[0])
        with init():
            spec = measure(given["name"], given["addresses"], given["devices"], quick=given.get("quick", False))
            print(to_json(spec))
    except AutoparError as error:
        print(f"autopar: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
