"""Measurements of several hosts → one ClusterSpec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from autopar.ir.cluster import ClusterSpec, DeviceSpec, HostGroup, LinkSpec
from autopar.runtime.profile import HostMeasured


def cluster_from_hosts(name: str, hosts: Sequence[HostMeasured], nic: LinkSpec | None) -> ClusterSpec:
    """Measured hosts as a cluster; neighbours with equally many devices are a group. A step waits for its slowest
    device, so all get the slowest's figures, and links inside hosts likewise.

    Args:
        nic: between hosts, of all of a host's rings together; None: there is one host, and its own link stands there.
    """
    device = _slowest([host.device for host in hosts])
    inside = [host.link for host in hosts if host.link is not None]
    link = LinkSpec(
        latency_s=max(k.latency_s for k in inside), bytes_per_s=min(k.bytes_per_s for k in inside)
    ) if inside else nic  # fmt: skip
    if link is None:  # one device: nothing ever moves; what its memory does is no link, but a bound of one
        link = LinkSpec(latency_s=hosts[0].launch_s, bytes_per_s=device.memory_bytes_per_s)
    groups = tuple(
        HostGroup(
            hosts=len(list(same)), devices_per_host=count, device=device, intra_host=link, nics_per_host=1,
            nic=link if nic is None else nic,
        )
        for count, same in groupby(host.devices for host in hosts)
    )  # fmt: skip
    spec = ClusterSpec(name=name, groups=groups, between=nic if len(groups) > 1 else None)
    spec.verify()
    return spec


def _slowest(devices: Sequence[DeviceSpec]) -> DeviceSpec:
    rates = [dict(d.flops_per_s) for d in devices]
    return replace(
        devices[0],
        memory_bytes=min(d.memory_bytes for d in devices),
        flops_per_s=tuple((t, min(r[t] for r in rates)) for t in sorted(set.intersection(*map(set, rates)))),
        memory_bytes_per_s=min(d.memory_bytes_per_s for d in devices),
    )
