"""Random reshardings, and what their transfers do on host memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from autopar.ir.cluster import DeviceSpec, LinkSpec, LogicalMesh, MeshAxis
from autopar.ir.graph import TensorType
from autopar.ir.resharding import (
    Box,
    CrossValue,
    HostLinks,
    Network,
    PlacedMesh,
    ReshardingPlan,
    box_size,
    tile_box,
)
from autopar.ir.sharding import ShardingSpec

NIC = LinkSpec(latency_s=1e-5, bytes_per_s=1e9)
INTRA = LinkSpec(latency_s=1e-6, bytes_per_s=1e10)
DEVICE = DeviceSpec(name="any", memory_bytes=1, flops_per_s=(("float32", 1.0),), memory_bytes_per_s=1.0)


class Problem(NamedTuple):
    """Arguments of `plan_resharding`."""

    values: tuple[CrossValue, ...]
    meshes: tuple[PlacedMesh, ...]
    network: Network


def mesh(shape: Sequence[int], hosts: Sequence[int], nics: Sequence[int], first: int) -> PlacedMesh:
    """A mesh with axes a0, a1, …, its devices numbered from ``first``."""
    axes = tuple(MeshAxis(name=f"a{i}", size=size, link=NIC) for i, size in enumerate(shape))
    ids = tuple(range(first, first + math.prod(shape)))
    return PlacedMesh(mesh=LogicalMesh(axes=axes, device_ids=ids, device=DEVICE), hosts=tuple(hosts), nics=tuple(nics))


def spec(*dims: str) -> ShardingSpec:
    """``spec("01", "")``: dimension 0 over axes a0 and a1, dimension 1 whole."""
    return ShardingSpec(dims=tuple(tuple(f"a{letter}" for letter in dim) for dim in dims))


def network(hosts: int, nics: int = 1, nic: LinkSpec = NIC) -> Network:
    """Equal hosts."""
    return Network(hosts=(HostLinks(nics=nics, nic=nic, intra_host=INTRA),) * hosts)


def rows(hosts: int, local: int, first_host: int, first: int, rails: bool = False) -> PlacedMesh:
    """A mesh of shape (hosts, local), a row per host."""
    count = hosts * local
    return mesh(
        (hosts, local),
        [first_host + i // local for i in range(count)],
        [i % local if rails else 0 for i in range(count)],
        first,
    )


def between(
    shape: Sequence[int], src: tuple[int, int], src_spec: ShardingSpec, dst: tuple[int, int], dst_spec: ShardingSpec,
    *, rails: bool = False, dtype: str = "int32", copies: int = 1, back: bool = False,
) -> Problem:  # fmt: skip
    """A value from hosts × local devices to others."""
    a = rows(*src, 0, 0, rails)
    b = rows(*dst, src[0], math.prod(src), rails)
    value_type = TensorType(shape=tuple(shape), dtype=dtype)
    values = (CrossValue(type=value_type, src=0, src_spec=src_spec, dst=1, dst_spec=dst_spec),) * copies
    if back:
        values += (CrossValue(type=value_type, src=1, src_spec=dst_spec, dst=0, dst_spec=src_spec),) * copies
    return Problem(values, (a, b), network(src[0] + dst[0], max(src[1], dst[1]) if rails else 1))


@st.composite
def problems(draw: Any, *, max_hosts: int = 3, shared: bool = True) -> Problem:
    """Up to three values between two meshes of any rank, in both directions; ragged, empty and scalar ones; meshes may
    share hosts."""
    rails = draw(st.booleans())
    together = shared and draw(st.integers(0, 4)) == 0
    meshes: list[PlacedMesh] = []
    devices = hosts = 0
    for _ in range(2):
        count, local = draw(st.integers(1, max_hosts)), draw(st.sampled_from([1, 2, 4]))
        shape = [count, local]
        if local == 4 and draw(st.booleans()):
            shape = [count, 2, 2]
        if draw(st.booleans()):
            shape.reverse()
        ids = np.arange(count * local).reshape(count, local)
        if shape[0] == local and shape[-1] == count:
            ids = ids.T
        flat = ids.reshape(-1)
        first = 0 if together else hosts
        placed = mesh(shape, (first + flat // local).tolist(), (flat % local if rails else flat * 0).tolist(), devices)
        meshes.append(placed)
        devices += count * local
        hosts = max(hosts, first + count)
    values: list[CrossValue] = []
    for _ in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
        src = draw(st.integers(0, 1))
        specs = [draw(_specs(len(shape), len(meshes[m].mesh.axes))) for m in (src, 1 - src)]
        dtype = draw(st.sampled_from(["int32", "bfloat16", "int4", "complex128"]))
        value_type = TensorType(shape=shape, dtype=dtype)
        values.append(CrossValue(type=value_type, src=src, src_spec=specs[0], dst=1 - src, dst_spec=specs[1]))
    return Problem(tuple(values), tuple(meshes), network(hosts, 4 if rails else 1))


@st.composite
def _specs(draw: Any, rank: int, axes: int) -> ShardingSpec:
    dims: list[tuple[str, ...]] = [()] * rank
    if rank:
        for axis in draw(st.permutations(range(axes))):
            where = draw(st.integers(-1, rank - 1))
            if where >= 0:
                dims[where] = (*dims[where], f"a{axis}")
    return ShardingSpec(dims=tuple(dims))


def region(box: Box, tile: Box) -> tuple[slice, ...]:
    """Where a box lies in a tile that holds it."""
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(box, tile, strict=True))


def run(plan: ReshardingPlan) -> int:
    """Carries a plan's transfers out, leg by leg, and checks that every element of every destination tile comes once,
    with its value, and that who passes something on has it. Returns how many messages there were."""
    arrays = [np.arange(v.type.size).reshape(v.type.shape) + 1000 * i for i, v in enumerate(plan.values)]
    tiles: dict[tuple[int, int], Box] = {}
    held: dict[tuple[int, int], Any] = {}
    got: dict[tuple[int, int], Any] = {}
    times: dict[tuple[int, int], Any] = {}
    for i, value in enumerate(plan.values):
        for side, index in ((value.src_spec, value.src), (value.dst_spec, value.dst)):
            placed = plan.meshes[index]
            for position, device in enumerate(placed.mesh.device_ids):
                box = tiles[i, device] = tile_box(value.type, side, placed.mesh, position)
                tile = arrays[i][tuple(slice(*bounds) for bounds in box)]
                if index == value.src:
                    held[i, device] = tile
                else:
                    got[i, device], times[i, device] = np.full(tile.shape, -1), np.zeros(tile.shape, int)
    messages = 0
    for transfer in plan.transfers:
        shape = tuple(high - low for low, high in transfer.box)
        for leg in transfer.legs:
            for start, stop in map(transfer.chunk, range(transfer.chunks)):
                index = np.unravel_index(np.arange(start, stop), shape) if shape else ()
                giver, taker = (transfer.value, leg.giver), (transfer.value, leg.taker)
                assert leg.after >= 0 or leg.giver == transfer.sender
                tile = held[giver] if leg.after < 0 else got[giver]
                data = tile[(..., *region(transfer.box, tiles[giver]))][index]
                where = region(transfer.box, tiles[taker])
                got[taker][(..., *where)][index] = data
                times[taker][(..., *where)][index] += 1
                messages += 1
    for (i, device), tile in got.items():
        expected = arrays[i][tuple(slice(*bounds) for bounds in tiles[i, device])]
        np.testing.assert_array_equal(times[i, device], np.ones(tile.shape, int))
        np.testing.assert_array_equal(tile, expected)
        assert box_size(tiles[i, device]) == tile.size
    return messages


def density_s(demands: Sequence[tuple[float, tuple[int, ...]]], rate: Any) -> float:
    """By enumeration: the greatest (bytes that only endpoints in Q can carry) / (rate of Q) over all sets Q."""
    endpoints = sorted({e for _, options in demands for e in options})
    best = 0.0
    for count in range(1, len(endpoints) + 1):
        for chosen in itertools.combinations(endpoints, count):
            inside = sum(size for size, options in demands if set(options) <= set(chosen))
            best = max(best, inside / float(rate[list(chosen)].sum()))
    return best
