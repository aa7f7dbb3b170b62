"""Which submeshes of a large cluster are tried; what crosses between meshes wherever they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.inter_op.submesh import Submesh, mesh_of, moved_up, submeshes
from autopar.ir.cluster import ClusterSpec, LinkSpec
from autopar.ir.graph import TensorType
from autopar.ir.presets import cluster_from_text
from autopar.ir.resharding import CrossValue, network_of, place
from autopar.ir.sharding import ShardingSpec
from autopar.resharding.planning import reshard_cost


def two_kinds() -> ClusterSpec:
    """Four hosts of 8 devices, three of 4 with a slower NIC."""
    cluster = cluster_from_text("p3.16xlarge:4")
    slow = LinkSpec(latency_s=1e-5, bytes_per_s=1e9)
    return replace(cluster, groups=(*cluster.groups, replace(cluster.groups[0], nic=slow, devices_per_host=4, hosts=3)))


def test_small_parts_of_large_clusters_are_left_out() -> None:
    large = cluster_from_text("dgx-h100:128")
    assert min(s.size for s in submeshes(large)) == 1
    assert min(s.size for s in submeshes(large, 50)) == 8  # 1024 / (4 · 50) is 5.12
    assert max(s.size for s in submeshes(large, 50)) == 1024
    assert submeshes(large, 256) == submeshes(large)
    small = replace(large.groups[0], hosts=1, devices_per_host=2)
    both = replace(large, groups=(*large.groups, small))
    assert [s for s in submeshes(both, 4) if s.group == 1] == [Submesh(1, 1, 2)]  # no group is left out


@pytest.mark.parametrize("seed", range(30))
def test_what_crosses_takes_as_long_on_the_first_hosts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cluster = two_kinds()
    kinds = [s for s in submeshes(cluster) if s.size <= 16]
    free, first, width = [[0, 1, 2, 3], [0, 1, 2]], [0, 32], [8, 4]
    meshes = []
    for g in rng.permutation(2) if seed % 2 else (0, 0):
        fits = [s for s in kinds if s.group == g and s.hosts <= min(2, len(free[g]))]
        submesh = fits[int(rng.integers(len(fits)))]
        hosts = [free[g].pop(int(rng.integers(len(free[g])))) for _ in range(submesh.hosts)]
        offset = int(rng.integers(width[g] // submesh.devices)) * submesh.devices
        ids = [first[g] + h * width[g] + offset + i for h in hosts for i in range(submesh.devices)]
        meshes.append(mesh_of(cluster, submesh, (submesh.size,), ids))
    up = moved_up(cluster, meshes)
    assert moved_up(cluster, up) == up
    used = {d // 8 if d < 32 else 4 + (d - 32) // 4 for mesh in up for d in mesh.device_ids}
    assert [h for h in used if h < 4] == list(range(len([h for h in used if h < 4])))
    assert [h for h in used if h >= 4] == list(range(4, 4 + len([h for h in used if h >= 4])))
    axes = [mesh.axes[0].name if mesh.axes else None for mesh in meshes]
    split, whole = ShardingSpec(dims=((axes[0],) if axes[0] else (), ())), ShardingSpec(dims=((), ()))
    value = CrossValue(type=TensorType(shape=(960, 640), dtype="float32"), src=0, src_spec=split, dst=1, dst_spec=whole)
    was, now = (
        reshard_cost((value,), tuple(place(mesh, cluster) for mesh in pair), network_of(cluster))
        for pair in (meshes, up)
    )
    assert now.time_s == pytest.approx(was.time_s, rel=1e-9)
    assert now.bound_s == pytest.approx(was.bound_s, rel=1e-9)
