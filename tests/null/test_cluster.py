"""Presets, ClusterSpec files, and the links that a logical mesh's axes see."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.ir.cluster import ClusterSpec, HostGroup, LinkSpec
from autopar.ir.errors import ClusterError
from autopar.ir.presets import (
    KINDS,
    PRESETS,
    cluster_from_file,
    cluster_from_text,
    default_axis_names,
    logical_mesh,
    mesh_shape_from_text,
)
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
    ],
)
def test_presets(text: str, hosts: int, devices: int) -> None:
    cluster = cluster_from_text(text)
    cluster.verify()
    assert cluster.name == text
    assert sum(g.hosts for g in cluster.groups) == hosts
    assert cluster.num_devices == devices


def test_every_preset_is_known_by_its_devices() -> None:
    assert set(KINDS.values()) | {"cpu"} == set(PRESETS)


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
        ("dgx-a10", "unknown cluster 'dgx-a10' (did you mean dgx-a100?): known are cpu[:devices], p3.16xlarge[:hosts]"),
        ("", "unknown cluster '': known are cpu[:devices]"),
        ("dgx-a100:0", "cluster 'dgx-a100:0': '0' is not a number of hosts; write dgx-a100:2, say"),
        ("dgx-a100:two", "'two' is not a number of hosts"),
        ("cpu:", "cluster 'cpu:': '' is not a number of devices; write cpu:2, say"),
        ("v4-8:2", "v4-8 is one whole slice; describe 2 of them in a ClusterSpec file"),
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
        ClusterError, match="cluster mine: hosts, devices_per_host and nics_per_host must be at least 1"
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
    assert links("dgx-a100:2", (4, 4)) == [nic / 4, nvlink]  # a ring of four, two per host
    assert links("dgx-a100:2", (16,)) == [nic]  # one ring has all NICs
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
