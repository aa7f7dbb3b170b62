"""Devices at hand → their cluster, and the order in which it numbers them; devices are stand-ins here."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass

import pytest

from autopar.ir.errors import ClusterError
from autopar.ir.presets import cluster_from_text
from autopar.runtime.local_devices import cluster_of, in_order


@dataclass(frozen=True)
class Chip:
    """What is read of JAX's device."""

    device_kind: str
    coords: tuple[int, int, int]
    process_index: int
    core_on_chip: int = 0
    slice_index: int = 0
    platform: str = "tpu"


def a_slice(kind: str, shape: tuple[int, ...], host: tuple[int, ...], cores: int = 1, number: int = 0) -> list[Chip]:
    """In JAX's order: the first coordinate runs fastest."""
    grid = [n // k for n, k in zip(shape, host, strict=True)]
    out: list[Chip] = []
    for z, y, x in itertools.product(*(range(n) for n in reversed(shape))):
        block = [c // k for c, k in zip((x, y, z), host, strict=True)]
        process = number * 1000 + block[0] + grid[0] * (block[1] + grid[1] * block[2])
        out += [Chip(kind, (x, y, z), process, core, number) for core in range(cores)]
    return out


@pytest.mark.parametrize(
    ("devices", "name"),
    [
        (a_slice("TPU v5", (4, 4, 8), (2, 2, 1)), "v5p-4x4x8"),
        (a_slice("TPU v5 lite", (4, 4, 1), (2, 2, 1)), "v5e-4x4"),
        (a_slice("TPU v5 lite", (16, 16, 1), (2, 2, 1)), "v5e-16x16"),
        (a_slice("TPU v6 lite", (2, 4, 1), (2, 4, 1)), "v6e-2x4"),
        (a_slice("TPU v4", (2, 2, 1), (2, 2, 1)), "v4-2x2x1"),
        (a_slice("TPU7x", (4, 4, 4), (2, 2, 1), cores=2), "v7x-4x4x4"),
        ([d for i in range(3) for d in a_slice("TPU v5", (2, 2, 2), (2, 2, 1), number=i)], "v5p-2x2x2:3"),
    ],
    ids=str,
)
def test_a_slice_is_known_by_its_coordinates(devices: list[Chip], name: str) -> None:
    """As the one of that name, in any order of devices; each host's are those of one process, in a row."""
    shuffled = random.Random(0).sample(devices, len(devices))
    cluster = cluster_of(shuffled)
    assert cluster == cluster_from_text(name)
    ordered = in_order(shuffled, cluster)
    assert ordered == in_order(devices, cluster)
    (group,) = cluster.groups
    width = group.devices_per_host
    hosts = [ordered[i : i + width] for i in range(0, len(ordered), width)]
    assert all(len({d.process_index for d in host}) == 1 for host in hosts)
    assert len({host[0].process_index for host in hosts}) == group.hosts
    assert len({d.slice_index for d in ordered[: group.domain_devices]}) == 1


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (a_slice("TPU v5", (2, 2, 2), (2, 2, 1))[:7], "7 devices (TPU v5) fill no block of a slice: the least that "
         "holds them has 2x2x2 chips, 8 devices. Take all of these"),
        (a_slice("TPU v5", (2, 2, 1), (2, 2, 1)) + a_slice("TPU v5", (2, 2, 2), (2, 2, 1), number=1),
         "the devices are slices of unequal shapes, 2x2x1 and 2x2x2"),
        (a_slice("TPU v4", (2, 2, 1), (2, 2, 1), cores=2), "chip_config_name='megacore'"),
        ([Chip("TPU v99", (0, 0, 0), 0)], "no preset describes this device, 'TPU v99'"),
    ],
)  # fmt: skip
def test_what_is_no_slice(devices: list[Chip], message: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(message)):
        cluster_of(devices)


def test_a_part_of_a_slice_is_one_itself() -> None:
    half = [d for d in a_slice("TPU v5", (4, 4, 4), (2, 2, 1)) if d.coords[0] >= 2]
    (group,) = cluster_of(half).groups
    assert group.torus is not None and group.torus.shape == (2, 4, 4)


def test_racks_by_their_processes() -> None:
    """Whole domains where there are; else each host is its own."""
    gpus = [Chip("NVIDIA GB200", (0, 0, 0), i // 4, platform="gpu") for i in range(144)]
    (racks,), (some,) = cluster_of(gpus).groups, cluster_of(gpus[:40]).groups
    assert (racks.hosts, racks.devices_per_host, racks.domain_hosts) == (36, 4, 18)
    assert (some.hosts, some.devices_per_host, some.domain_hosts) == (10, 4, 1)
