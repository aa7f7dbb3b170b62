"""Presets, ClusterSpec files, and the links that a logical mesh's axes see."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cost.logical_meshes import default_axis_names, logical_mesh, mesh_shape_from_text
from autopar.ir.cluster import ClusterSpec, HostGroup, LinkSpec
from autopar.ir.errors import ClusterError
from autopar.ir.presets import KINDS, PRESETS, SOURCES, cluster_from_file, cluster_from_text
from autopar.ir.serde import to_json


@pytest.mark.parametrize(
    ("text", "hosts", "devices"),
    [
        ("cpu", 1, 8),
        ("cpu:4", 1, 4),
        ("p3.16xlarge", 1, 8),
        ("p3.16xlarge:8", 8, 64),
        ("dgx-a100:2", 2, 16),
        ("dgx-h100:4", 4, 32),
        ("dgx-h200", 1, 8),
        ("dgx-b200:128", 128, 1024),
        ("v4-8", 1, 4),
        ("v5e-8", 1, 8),
        ("v5p-8", 1, 4),
        ("v5p-128:2", 32, 128),
        ("v5e-16", 4, 16),
        ("v7x-128", 16, 128),
        ("gb200-nvl72:2", 36, 144),
        ("dgx-a100:2+dgx-h100", 3, 24),
    ],
)
def test_presets(text: str, hosts: int, devices: int) -> None:
    cluster = cluster_from_text(text)
    cluster.verify()
    assert cluster.name == text
    assert sum(g.hosts for g in cluster.groups) == hosts
    assert cluster.num_devices == devices


def test_every_kind_of_device_has_a_preset() -> None:
    """The first word that fits names a cluster of such devices; every preset has its sources."""
    assert set(SOURCES) == set(PRESETS)
    names = {
        "NVIDIA A100-SXM4-40GB": "A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB": "A100-SXM4-80GB",
        "NVIDIA H100 80GB HBM3": "H100-SXM5-80GB", "NVIDIA L40S": "L40S-48GB", "NVIDIA GB200": "GB200-186GB",
        "NVIDIA B200": "B200-180GB", "NVIDIA A10G": "A10G-24GB", "Tesla V100-SXM2-16GB": "V100-SXM2-16GB",
        "NVIDIA H200": "H200-SXM5-141GB", "NVIDIA L4": "L4-24GB",
    }  # fmt: skip
    for kind, device in names.items():
        preset = next(preset for word, preset in KINDS.items() if word in kind.lower())
        assert cluster_from_text(preset).groups[0].device.name == device
    assert {PRESETS[preset].groups[0].device.name for preset in KINDS.values()} == set(names.values())


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_figures_are_of_the_right_order(name: str) -> None:
    (group,) = cluster_from_text(name).groups
    device = group.device
    assert device.peak_flops_per_s("bfloat16") >= device.peak_flops_per_s("float32") > 1e9
    assert 1e9 < group.nic.bytes_per_s < device.memory_bytes_per_s * 10
    assert 1e9 <= group.intra_host.bytes_per_s < device.memory_bytes_per_s
    assert 1e-7 < group.intra_host.latency_s <= group.nic.latency_s < 1e-3


def test_a_v100_is_rated_at_what_it_achieves() -> None:
    (group,) = cluster_from_text("p3.16xlarge").groups
    peaks = {"float64": 7.8e12, "float32": 15.7e12, "float16": 125e12}
    for dtype, peak in peaks.items():
        assert 0.7 * peak < group.device.peak_flops_per_s(dtype) < peak
    assert group.device.peak_flops_per_s("bfloat16") == group.device.peak_flops_per_s("float32")
    assert 0.8 * 900e9 < group.device.memory_bytes_per_s < 900e9
    assert 0.75 * 150e9 < group.intra_host.bytes_per_s < 150e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dgx-a10", "unknown cluster 'dgx-a10' (did you mean dgx-a100?): known are cpu[:devices]; hosts p3.16xlarge, "),
        ("", "unknown cluster '': known are cpu[:devices]"),
        ("dgx-a100:0", "cluster 'dgx-a100:0': '0' is not a number of hosts up to 9,999,999; write dgx-a100:2, say"),
        ("dgx-a100:two", "'two' is not a number of hosts"),
        ("cpu:", "cluster 'cpu:': '' is not a number of devices up to 9,999,999; write cpu:2, say"),
        ("v4-8:no", "'no' is not a number of slices up to 9,999,999; write v4-8:2, say"),
        ("v5p-100", "there is no v5p slice of 100 TensorCores, two a chip; there are v5p-64, v5p-128, v5p-256"),
        ("v5p-7", "there is no v5p slice of 7 TensorCores"),
        ("v6e-512", "there is no v6e slice of 512 chips; there are v6e-64, v6e-128, v6e-256"),
        (
            "v5p-8x4x4",
            "v5p has no slice of 8x4x4 chips; there are 2x2x1, 2x2x2, 2x2x4, 2x4x4, and AxBxC",
        ),
        ("v5e-3x3", "v5e has no slice of 3x3 chips; there are 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"),
        ("v5p-16x16x32", "8192 chips are more than the 6144 of the largest v5p slice"),
        ("v5p-", "'' is no size of a slice; write v5p-64 or v5p-2x4x4"),
        ("dgx-a100+cpu", "cluster 'dgx-a100+cpu': one program has devices of one platform; these are of several"),
        ("nowhere.json", "cluster file nowhere.json: No such file or directory. Presets: cpu[:devices]"),
    ],
)
def test_bad_cluster_texts(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(message)):
        cluster_from_text(text)


def test_a_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    cluster = replace(cluster_from_text("dgx-a100:2"), name="mine")
    path.write_text(to_json(cluster))
    assert cluster_from_file(path) == cluster
    assert cluster_from_text(str(path)) == cluster
    path.write_text(to_json(cluster).replace('"hosts":2', '"hosts":0'))
    with pytest.raises(
        ClusterError,
        match="cluster mine, group 0: hosts, devices_per_host, nics_per_host and domain_hosts must be at least 1",
    ):
        cluster_from_file(path)
    path.write_text(to_json(cluster).replace('"hosts":2', '"hosts":"2"'))
    with pytest.raises(ClusterError, match=re.escape('mine.json: $.groups[0].hosts: expected an integer, got "2"')):
        cluster_from_file(path)


def links(text: str, shape: tuple[int, ...]) -> list[float]:
    """Bytes per second per axis."""
    return [a.link.bytes_per_s for a in logical_mesh(cluster_from_text(text), shape).axes]


def test_links_of_axes() -> None:
    nic, nvlink = 8 * 25e9, 300e9
    assert links("dgx-a100", (2, 4)) == [nvlink, nvlink]
    assert links("dgx-a100:2", (2, 8)) == [nic / 8, nvlink]  # eight rings leave each host
    assert links("dgx-a100:2", (4, 4)) == [1.5 * nic / 4, nvlink]  # a ring of four, two per host: half of it goes out
    assert links("dgx-a100:2", (16,)) == [nvlink]  # one ring has all NICs
    assert links("dgx-a100:8", (64,)) == pytest.approx([nic * (63 / 64) / (7 / 8)])
    assert links("dgx-a100:4", (2, 2, 8)) == [nic / 8, nic / 8, nvlink]
    assert links("dgx-a100:2", (8,)) == [nvlink]  # the first host alone
    assert links("p3.16xlarge:2", (2, 8)) == [25e9 / 8 / 8, 120e9]
    latencies = [a.link.latency_s for a in logical_mesh(cluster_from_text("dgx-a100:2"), (2, 8)).axes]
    assert latencies[0] > latencies[1]


def test_a_mesh_is_row_major_with_default_names() -> None:
    mesh = logical_mesh(cluster_from_text("cpu"), (2, 2, 2))
    assert mesh.axis_names == ("x", "y", "z")
    assert mesh.device_ids == tuple(range(8))
    assert default_axis_names(5) == ("x", "y", "z", "w", "x4")
    assert logical_mesh(cluster_from_text("cpu"), (2, 4), ("data", "model")).axis_names == ("data", "model")


def test_groups_of_hosts() -> None:
    (group,) = cluster_from_text("dgx-a100").groups
    slow = LinkSpec(latency_s=1e-4, bytes_per_s=1e9)
    cluster = ClusterSpec(name="two", groups=(group, group), between=slow)
    assert logical_mesh(cluster, (2, 8)).axes[0].link == LinkSpec(latency_s=1e-4, bytes_per_s=1e9 / 8)
    (other,) = cluster_from_text("dgx-h100").groups
    mixed = ClusterSpec(name="mixed", groups=(group, other), between=slow)
    assert logical_mesh(mixed, (8,)).device == group.device
    with pytest.raises(ClusterError, match=r"mesh 2x8 would mix devices \(A100-SXM4-80GB, H100-SXM5-80GB\)"):
        logical_mesh(mixed, (2, 8))


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((4, 4), None, "mesh 4x4 needs 16 devices; cluster cpu has 8. Use a smaller mesh or a larger cluster"),
        ((2, 4), ("x",), "mesh 2x4 has 2 axes, but 1 names: x"),
        ((2, 0), None, "mesh 2x0: every axis needs a size of at least 1"),
        ((), None, "mesh (): every axis needs a size of at least 1"),
        ((2, 4), ("x", "x"), "mesh axis names repeat"),
    ],
)
def test_bad_meshes(shape: tuple[int, ...], names: tuple[str, ...] | None, message: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(message)):
        logical_mesh(cluster_from_text("cpu"), shape, names)


def test_mesh_shapes_from_text() -> None:
    assert mesh_shape_from_text("2x4") == (2, 4)
    assert mesh_shape_from_text("8") == (8,)
    for text in ("", "2x", "2,4", "-2x4", "axb"):
        with pytest.raises(ClusterError, match="is not a shape; write its axis sizes as in 8, 2x4 or 2x2x2"):
            mesh_shape_from_text(text)


def test_a_group_needs_hosts() -> None:
    (group,) = cluster_from_text("cpu").groups
    assert isinstance(group, HostGroup)
    with pytest.raises(ClusterError, match="has no hosts"):
        ClusterSpec(name="none", groups=()).verify()


def test_a_file_may_leave_out_the_fabric_of_its_links(tmp_path: Path) -> None:
    cluster = cluster_from_text("dgx-h100")
    assert cluster.groups[0].intra_host.fabric == "nvlink4"
    path = tmp_path / "mine.json"
    path.write_text(to_json(cluster).replace(',"fabric":"nvlink4"', "").replace(',"fabric":"ib"', ""))
    assert cluster_from_text(str(path)).groups[0].intra_host == replace(cluster.groups[0].intra_host, fabric="")
