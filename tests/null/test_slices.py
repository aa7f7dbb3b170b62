"""TPU slices by name, and how meshes lie on a torus: which links each axis has, and which chips."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autopar.cost.collectives import collective_s
from autopar.cost.logical_meshes import is_block, logical_mesh, natural_shapes
from autopar.inter_op.submesh import logical_meshes, part_of, place, submeshes
from autopar.ir.cluster import ClusterSpec, HostGroup, LinkSpec, Torus
from autopar.ir.errors import ClusterError
from autopar.ir.pipelined import PipelineOptions
from autopar.ir.presets import cluster_from_text
from autopar.ir.slices import GENERATIONS, slice_names


def group_of(text: str) -> HostGroup:
    (group,) = cluster_from_text(text).groups
    return group


def torus_of(text: str) -> Torus:
    torus = group_of(text).torus
    assert torus is not None
    return torus


# Google Cloud's tables: accelerator type, topology, chips, hosts (VMs); rings where a table of MaxText has them.
@pytest.mark.parametrize(
    ("name", "topology", "chips", "hosts", "wraps"),
    [
        ("v4-8", (2, 2, 1), 4, 1, "---"),
        ("v4-16", (2, 2, 2), 8, 2, "---"),
        ("v4-32", (2, 2, 4), 16, 4, "---"),
        ("v4-64", (2, 4, 4), 32, 8, "---"),
        ("v4-128", (4, 4, 4), 64, 16, "ooo"),
        ("v4-256", (4, 4, 8), 128, 32, "ooo"),
        ("v4-1536", (8, 8, 12), 768, 192, "ooo"),
        ("v4-4096", (8, 16, 16), 2048, 512, "ooo"),
        ("v5p-64", (2, 4, 4), 32, 8, "---"),
        ("v5p-384", (4, 4, 12), 192, 48, "ooo"),
        ("v5p-640", (4, 4, 20), 320, 80, "ooo"),
        ("v5p-1152", (4, 12, 12), 576, 144, "ooo"),
        ("v5p-2048", (8, 8, 16), 1024, 256, "ooo"),
        ("v5p-12288", (16, 16, 24), 6144, 1536, "ooo"),
        ("v5e-1", (1, 1), 1, 1, "--"),
        ("v5e-4", (2, 2), 4, 1, "--"),
        ("v5e-8", (2, 4), 8, 1, "--"),
        ("v5e-16", (4, 4), 16, 4, "--"),
        ("v5e-128", (8, 16), 128, 32, "-o"),
        ("v5e-256", (16, 16), 256, 64, "oo"),
        ("v5litepod-64", (8, 8), 64, 16, "--"),
        ("v6e-256", (16, 16), 256, 64, "oo"),
        ("v7x-8", (2, 2, 1), 4, 1, "---"),
        ("tpu7x-128", (4, 4, 4), 64, 16, "ooo"),
    ],
)
def test_names_of_slices(name: str, topology: tuple[int, ...], chips: int, hosts: int, wraps: str) -> None:
    group, torus = group_of(name), torus_of(name)
    assert (torus.shape, math.prod(torus.shape), group.hosts) == (topology, chips, hosts)
    assert "".join("o" if w else "-" for w in torus.wraps) == wraps
    assert group.num_devices == chips * (2 if "7x" in name else 1)
    word = name.partition("-")[0]
    by_shape = cluster_from_text(f"{word}-{'x'.join(map(str, topology))}")
    assert by_shape.groups == cluster_from_text(name).groups


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
def test_all_usual_slices_and_the_blocks_of_them(generation: str) -> None:
    """Each that is named exists; blocks of a slice are boxes of neighbours, each device once, hosts whole."""
    for name in slice_names(generation):
        group, torus = group_of(name), torus_of(name)
        if group.num_devices > 1024:
            continue
        for n in (n for n in range(1, group.num_devices + 1) if is_block(group, n)):
            mesh = logical_mesh(cluster_from_text(name), (n,))
            assert sorted(mesh.device_ids) == list(range(n))
            box = coordinates(torus)[list(mesh.device_ids)]
            assert math.prod(int(box[:, d].max()) + 1 for d in range(box.shape[1])) == n
        for shape in natural_shapes(group):
            assert math.prod(shape) == group.num_devices
            logical_mesh(cluster_from_text(name), shape)


def coordinates(torus: Torus) -> Any:
    """Of each device of a slice, as it is numbered: where its chip is, and which of the chip's devices it is. Written
    from the definition: hosts row-major, chips row-major within a host."""
    grid = [range(n // k) for n, k in zip(torus.shape, torus.host, strict=True)]
    inside = [range(k) for k in torus.host]
    return np.array([
        [*(h * k + i for h, i, k in zip(host, chip, torus.host, strict=True)), core]
        for host in itertools.product(*grid) for chip in itertools.product(*inside)
        for core in range(torus.devices_per_chip)
    ])  # fmt: skip


def rates(text: str, shape: tuple[int, ...]) -> list[float]:
    """GB/s of each axis."""
    return [round(a.link.bytes_per_s / 1e9, 3) for a in logical_mesh(cluster_from_text(text), shape).axes]


def test_an_axis_has_all_rings_of_its_dimensions_and_both_ways_round() -> None:
    ici = 100.0  # v5p, one direction
    assert rates("v5p-128", (4, 4, 4)) == [2 * ici] * 3
    assert rates("v5p-128", (16, 4)) == [4 * ici, 2 * ici]
    assert rates("v5p-128", (64,)) == [6 * ici]
    assert rates("v5p-64", (2, 4, 4)) == [ici, ici, ici]  # nothing wraps: the way back is along the same links
    assert rates("v5e-128", (8, 16)) == rates("v5e-128", (16, 8))[::-1] == [50, 100]
    assert rates("v5p-4x4x8", (8, 16)) == [2 * ici, 4 * ici]  # along the long dimension, which comes last
    # a dimension that two axes share: the inner one's four are a line; the outer one's rings lie four abreast
    assert rates("v5e-256", (16, 4, 4)) == [100, 100 / 4, 50]
    # a chip's devices share its links: of 16 chips both, or one a chip
    assert rates("v7x-128", (64, 2)) == [6 * ici / 2, 600]
    assert rates("v5p-128:2", (2, 64)) == [6.25, 600]  # 50 Gb/s a chip between slices


def test_an_all_to_all_is_limited_by_the_middle_of_the_longest_ring() -> None:
    """Twice the ring's links cross its middle; half of the devices send half of theirs over it, both ways."""
    for text, shape in (("v5p-128", (4, 4, 4)), ("v5e-256", (16, 16)), ("v5p-128", (64,)), ("v5e-8", (2, 4))):
        torus, cluster = torus_of(text), cluster_from_text(text)
        for axis in logical_mesh(cluster, shape).axes:
            message, n = 1e9, axis.size
            longest = max(torus.shape) if len(shape) == 1 else n
            closed = torus.wraps[torus.shape.index(longest)]
            rings = n // longest  # side by side along this dimension
            crossing = rings * longest / 2 * message / 2
            want = crossing / (rings * (2 if closed else 1) * group_of(text).intra_host.bytes_per_s)
            got = collective_s("all-to-all", n, message, replace(axis.exchange or axis.link, latency_s=1e-30))
            assert got == pytest.approx(want), (text, shape, axis)


def test_a_gathering_takes_as_long_as_its_slowest_part() -> None:
    """Between slices 1/64 of each slice's rows enter over each chip's share of the network; inside they go on."""
    (axis,) = logical_mesh(cluster_from_text("v5p-128:4"), (256,)).axes
    assert 255 / axis.link.bytes_per_s == pytest.approx(max(3 / 6.25e9, 63 * 4 / 600e9))


@pytest.mark.parametrize("text", ["v5p-4x4x8", "v5e-128", "v7x-64", "v5p-16:3"])
def test_devices_of_a_mesh_are_neighbours_along_its_axes(text: str) -> None:
    group, torus = group_of(text), torus_of(text)
    at = coordinates(torus)
    for shape in natural_shapes(group)[1:]:
        mesh = logical_mesh(cluster_from_text(text), shape)
        ids = np.array(mesh.device_ids).reshape(shape)
        assert sorted(mesh.device_ids) == list(range(group.num_devices))
        for axis in range(len(shape)):
            changes = np.zeros(at.shape[1], bool)
            whole = np.moveaxis(ids, axis, 0)
            for device in whole[1:].reshape(len(whole) - 1, -1):
                changes |= (at[device % len(at)] != at[whole[0].reshape(-1) % len(at)]).any(0)
            sizes = [n for n, c in zip((*torus.shape, torus.devices_per_chip), changes, strict=True) if c]
            slices = 3 if ":" in text and axis == 0 else 1
            assert math.prod(sizes) * slices == shape[axis], "an axis runs over whole dimensions"


def test_a_mesh_of_devices_in_an_order_of_its_own() -> None:
    """Its axes have what that leaves them: whole dimensions in any order; anything else by the ways of messages."""
    cluster = cluster_from_text("v5p-128")
    at = coordinates(torus_of("v5p-128"))

    def links(order: list[int], shape: tuple[int, ...]) -> list[float]:
        mesh = logical_mesh(cluster, shape, devices=order)
        assert list(mesh.device_ids) == order
        return [round(a.link.bytes_per_s / 1e9, 3) for a in mesh.axes]

    swapped = sorted(range(64), key=lambda d: (at[d][1], at[d][2], at[d][0]))
    assert links(swapped, (4, 16)) == [200, 400]
    assert links(list(logical_mesh(cluster, (8, 8)).device_ids), (8, 8)) == rates("v5p-128", (8, 8))
    shuffled = np.random.default_rng(0).permutation(64).tolist()
    assert max(links(shuffled, (4, 16))) < 100
    row = cluster_from_text("v5e-8")  # 2x4, one host: device 4·x + y
    pairs = logical_mesh(row, (4, 2), devices=[0, 3, 1, 2, 4, 7, 5, 6])
    assert pairs.axes[1].link.bytes_per_s == 25e9  # 0 to 3 and 1 to 2 share the link from 1 to 2
    with pytest.raises(ClusterError, match="its devices are not the first 64 of v5p-128, each once"):
        logical_mesh(cluster, (64,), devices=[0] * 64)


def test_stages_are_blocks_with_their_own_links() -> None:
    """Of a slice's rings a half has lines; places of stages begin where blocks do."""
    cluster = cluster_from_text("v5p-128")
    assert [s.size for s in submeshes(cluster)] == [1, 2, 4, 8, 16, 32, 64]
    half = next(s for s in submeshes(cluster) if s.size == 32)
    (part,) = part_of(cluster, half).groups
    assert part.torus is not None and (part.torus.shape, part.torus.wraps) == ((2, 4, 4), (False, True, True))
    quarter = next(s for s in submeshes(cluster) if s.size == 16)
    where = place(cluster, [quarter, half, quarter])
    assert sorted(d for devices in where for d in devices) == list(range(64))
    at = coordinates(torus_of("v5p-128"))
    for devices, submesh in zip(where, (quarter, half, quarter), strict=True):
        box = at[list(devices)]
        assert math.prod(box.max(0) - box.min(0) + 1) == submesh.size
        for mesh in logical_meshes(cluster, submesh, PipelineOptions()):
            assert mesh.num_devices == submesh.size


def test_a_domain_of_several_hosts_needs_no_nics() -> None:
    rack, racks = cluster_from_text("gb200-nvl72"), cluster_from_text("gb200-nvl72:2")
    assert [a.link.bytes_per_s for a in logical_mesh(rack, (18, 4)).axes] == [900e9, 900e9]
    assert [a.link.bytes_per_s for a in logical_mesh(racks, (2, 72)).axes] == [50e9, 900e9]  # each GPU has a NIC
    assert {s.hosts for s in submeshes(racks) if s.devices == 4} == {1, 2, 3, 6, 9, 18, 36}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (4, 4)}, "shape, host and wraps need a figure of each dimension, sizes at least 1"),
        ({"shape": (4, 0, 4)}, "sizes at least 1"),
        ({"host": (3, 2, 1)}, "hosts of 3x2x1 chips do not fill 4x4x4"),
        ({"shape": (2, 8, 4)}, "a dimension of 2 cannot wrap: its chips are neighbours already"),
        ({"devices_per_chip": 2}, "chips of 2 devices, with chip=None: the link is needed where there are several"),
        ({"chip": LinkSpec(latency_s=1e-6, bytes_per_s=1e9)}, "chips of 1 devices, with chip="),
        ({"shape": (4, 4, 8)}, "torus: 4x4x8 chips do not hold 64 devices"),
        ({"host": (2, 1, 1)}, "host of the torus: 2x1x1 chips do not hold 4 devices"),
    ],
)
def test_impossible_toruses(change: dict[str, Any], message: str) -> None:
    cluster = cluster_from_text("v5p-128")
    torus = replace(torus_of("v5p-128"), **change)
    with pytest.raises(ClusterError, match=re.escape(message)):
        replace(cluster, groups=(replace(cluster.groups[0], torus=torus),)).verify()


def test_what_does_not_fill_a_slice() -> None:
    cluster = cluster_from_text("v5p-16")
    with pytest.raises(
        ClusterError, match="3 devices are no block of a 2x2x2 slice, nor some slices; these are: 1, 2, 4"
    ):
        logical_mesh(cluster, (3,))
    with pytest.raises(ClusterError, match="mesh 12x2 needs 24 devices"):
        logical_mesh(cluster, (12, 2))
    (group,) = cluster.groups
    with pytest.raises(ClusterError, match="3 hosts do not fill domains of 2"):
        ClusterSpec(name="odd", groups=(replace(group, hosts=3),)).verify()
