"""Made-up clusters, on which small models are worth sharding.

On any real machine a test-sized step runs best whole on every device: a collective's latency is all that counts.
"""

from __future__ import annotations

from autopar.ir.cluster import ClusterSpec, DeviceSpec, HostGroup, LinkSpec


def cluster(
    devices: int, *, flops_per_s: float, memory_bytes_per_s: float, latency_s: float, bytes_per_s: float = 100e9,
    hosts: int = 1,
) -> ClusterSpec:  # fmt: skip
    """Hosts of ``devices`` with 16 GiB each."""
    link = LinkSpec(latency_s=latency_s, bytes_per_s=bytes_per_s)
    device = DeviceSpec(
        name="cpu",  # what the tests compile for: see decision 006
        memory_bytes=16 * 2**30,
        flops_per_s=(("float32", flops_per_s),),
        memory_bytes_per_s=memory_bytes_per_s,
    )
    host = HostGroup(hosts=hosts, devices_per_host=devices, device=device, intra_host=link, nics_per_host=1, nic=link)
    return ClusterSpec(name="made-up", groups=(host,))


SLOW_8 = cluster(8, flops_per_s=1e10, memory_bytes_per_s=1e10, latency_s=1e-8)
"""8 slow devices on fast links: plans shard all that can be sharded, and use every kind of collective."""
