"""Values on their meshes → unit tasks: the slices between all cuts of both sides, who holds each and who wants it.

A slice is the intersection of one source tile and one destination tile, so that the devices that hold it are those of
the source tile and the devices that want it those of the destination tile. Dimensions are cut independently
(`_units`), which makes the slices a product of segments and their arrays a matter of index arithmetic.

Devices and NICs are numbered here through all meshes and hosts (`Work`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from autopar.ir.errors import ReshardingError
from autopar.ir.graph import itemsize_bits
from autopar.ir.resharding import Box, CrossValue, Network, PlacedMesh, verify_meshes
from autopar.ir.sharding import ShardingSpec

Ints: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
Floats: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
"""One-dimensional arrays."""
Places: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int64]]
"""int[units, rank]: a place in a value for each unit task."""


def sums_at(places: Ints, amounts: ArrayLike, size: int) -> Floats:
    """float[size]: the sum of the ``amounts`` at each place (`bincount` with weights, which numpy declares as ints)."""
    return np.bincount(places, amounts, size).astype(np.float64, copy=False)


@dataclass(frozen=True, kw_only=True)
class Work:
    """All unit tasks of a resharding, ordered by value, destination tile, source tile (row-major).

    Arrays over devices, in the order of meshes: ``device_ids`` int[D], ``host`` int[D], ``nic`` int[D] (numbered host
    by host). An *endpoint* is a NIC (0 to N − 1) or a device's port to the others on its host (N + device index); over
    endpoints: ``rate`` float[E], bytes per second in either direction, ``latency_s`` float[E], ``at_host`` int[E]. Over
    units: ``value`` int[U], ``elements`` int[U], ``bytes`` float[U], ``holders``
    and ``wanters`` int[U]: indices into ``sets``, tuples of device indices. ``starts`` and ``stops`` hold, for each
    value, int[its units, rank]; ``first`` int[values + 1], the first unit of each value.
    """

    meshes: tuple[PlacedMesh, ...]
    values: tuple[CrossValue, ...]
    network: Network
    device_ids: Ints
    host: Ints
    nic: Ints
    nics: int
    rate: Floats
    latency_s: Floats
    at_host: Ints
    value: Ints
    elements: Ints
    bytes: Floats
    holders: Ints
    wanters: Ints
    sets: tuple[tuple[int, ...], ...]
    starts: tuple[Places, ...]
    stops: tuple[Places, ...]
    first: tuple[int, ...]

    @property
    def num_units(self) -> int:
        """The number of unit tasks; empty slices are none."""
        return len(self.bytes)

    @cached_property
    def hosts_of_set(self) -> tuple[dict[int, tuple[int, ...]], ...]:
        """Host → its devices of the set, for each of ``sets``."""
        out: list[dict[int, tuple[int, ...]]] = []
        host = self.host_list
        for devices in self.sets:
            by_host: dict[int, tuple[int, ...]] = {}
            for device in devices:
                by_host[host[device]] = (*by_host.get(host[device], ()), device)
            out.append(by_host)
        return tuple(out)

    def box(self, unit: int) -> Box:
        """The slice of a unit task in its value."""
        value = int(self.value[unit])
        row = unit - self.first[value]
        return tuple(zip(self.starts[value][row].tolist(), self.stops[value][row].tolist(), strict=True))

    @cached_property
    def host_list(self) -> list[int]:
        """``host`` as a list."""
        return self.host.tolist()

    @cached_property
    def nic_list(self) -> list[int]:
        """``nic`` as a list."""
        return self.nic.tolist()

    @cached_property
    def item_bytes(self) -> Floats:
        """float[values]: bytes of one element, a fraction for types below one byte."""
        return np.array([itemsize_bits(value.type.dtype) / 8 for value in self.values])


def work_of(values: tuple[CrossValue, ...], meshes: tuple[PlacedMesh, ...], network: Network) -> Work:
    """The unit tasks of ``values``.

    Raises:
        ReshardingError: meshes are empty or overlap, values or specs do not fit them, a device is on a host or NIC that
            the network does not have.
    """
    network.verify()
    verify_meshes(meshes)
    for index, value in enumerate(values):
        value.verify(meshes, f"value {index}")
    nics = np.array([host.nics for host in network.hosts])
    first_nic = np.cumsum(nics) - nics
    _verify_placement(meshes, network)
    hosts = [h for mesh in meshes for h in mesh.hosts]
    host = np.array(hosts, np.int64)
    local = np.array([n for mesh in meshes for n in mesh.nics], np.int64)
    links = [h.nic for h in network.hosts for _ in range(h.nics)] + [network.hosts[h].intra_host for h in hosts]
    offsets = np.cumsum([0] + [len(mesh.hosts) for mesh in meshes])
    sets: list[tuple[int, ...]] = []
    number: dict[tuple[int, ...], int] = {}

    def numbered(devices: tuple[int, ...]) -> int:
        if devices not in number:
            number[devices] = len(sets)
            sets.append(devices)
        return number[devices]

    parts: list[_Units] = []
    for value in values:
        source, target = (
            [numbered(tuple(int(offsets[mesh]) + p for p in tile)) for tile in _tile_devices(spec, meshes[mesh])]
            for mesh, spec in ((value.src, value.src_spec), (value.dst, value.dst_spec))
        )
        parts.append(_units(value, meshes, np.array(source, np.int64), np.array(target, np.int64)))
    counts = [len(part.elements) for part in parts]
    elements = _join([part.elements for part in parts])
    index = np.repeat(np.arange(len(values)), counts)
    item = np.array([itemsize_bits(value.type.dtype) / 8 for value in values] or [0.0], np.float64)
    return Work(
        meshes=meshes,
        values=values,
        network=network,
        device_ids=np.array([d for mesh in meshes for d in mesh.mesh.device_ids], np.int64),
        host=host,
        nic=first_nic[host] + local,
        nics=int(nics.sum()),
        rate=np.array([link.bytes_per_s for link in links]),
        latency_s=np.array([link.latency_s for link in links]),
        at_host=np.concatenate([np.repeat(np.arange(len(nics)), nics), host]),
        value=index,
        elements=elements,
        bytes=elements * item[index],
        holders=_join([part.holders for part in parts]),
        wanters=_join([part.wanters for part in parts]),
        sets=tuple(sets),
        starts=tuple(part.starts for part in parts),
        stops=tuple(part.stops for part in parts),
        first=(0, *np.cumsum(counts).tolist()),
    )


def _verify_placement(meshes: tuple[PlacedMesh, ...], network: Network) -> None:
    for index, mesh in enumerate(meshes):
        for device, host, nic in zip(mesh.mesh.device_ids, mesh.hosts, mesh.nics, strict=True):
            if not 0 <= host < len(network.hosts):
                raise ReshardingError(
                    f"mesh {index}: device {device} is on host {host}; the network has hosts 0 to "
                    f"{len(network.hosts) - 1}"
                )
            if not 0 <= nic < network.hosts[host].nics:
                raise ReshardingError(
                    f"mesh {index}: device {device} uses NIC {nic} of host {host}, which has {network.hosts[host].nics}"
                )


def _join(arrays: list[Ints]) -> Ints:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


def _dim_parts(spec: ShardingSpec, placed: PlacedMesh) -> tuple[int, ...]:
    """How many parts each dimension is cut into."""
    sizes = {axis.name: axis.size for axis in placed.mesh.axes}
    return tuple(math.prod(sizes[a] for a in axes) for axes in spec.dims)


def _tile_devices(spec: ShardingSpec, placed: PlacedMesh) -> list[tuple[int, ...]]:
    """Positions of the devices of each tile, tiles in row-major order."""
    mesh = placed.mesh
    indices = np.indices(mesh.shape).reshape(len(mesh.axes), mesh.num_devices)
    coordinates = dict(zip(mesh.axis_names, indices, strict=True))
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    flat = np.zeros(mesh.num_devices, np.int64)
    for axes in spec.dims:
        for axis in axes:
            flat = flat * sizes[axis] + coordinates[axis]
    order = np.argsort(flat, kind="stable")
    tiles = math.prod(_dim_parts(spec, placed))
    return [tuple(part.tolist()) for part in np.split(order, np.searchsorted(flat[order], np.arange(1, tiles)))]


class _Units(NamedTuple):
    """The unit tasks of one value: ``starts`` and ``stops`` int[U, rank], all others int[U]."""

    starts: Places
    stops: Places
    elements: Ints
    holders: Ints
    wanters: Ints


def _units(value: CrossValue, meshes: tuple[PlacedMesh, ...], source: Ints, target: Ints) -> _Units:
    """The unit tasks of ``value``; ``source`` and ``target`` int[tiles]: the set of devices of each tile."""
    shape = value.type.shape
    rank = len(shape)
    if 0 in shape:
        none = np.zeros(0, np.int64)
        return _Units(np.zeros((0, rank), np.int64), np.zeros((0, rank), np.int64), none, none, none)
    src_parts = _dim_parts(value.src_spec, meshes[value.src])
    dst_parts = _dim_parts(value.dst_spec, meshes[value.dst])
    starts, stops, src_at, dst_at = list[Ints](), list[Ints](), list[Ints](), list[Ints]()
    for size, src, dst in zip(shape, src_parts, dst_parts, strict=True):
        src_step, dst_step = -(-size // src), -(-size // dst)
        cuts = np.union1d(np.arange(0, size, src_step), np.arange(0, size, dst_step))
        starts.append(cuts)
        stops.append(np.append(cuts[1:], size))
        src_at.append(cuts // src_step)
        dst_at.append(cuts // dst_step)
    counts = [len(s) for s in starts]
    segments = np.indices(counts).reshape(rank, math.prod(counts))

    def taken(arrays: list[Ints]) -> Places:
        return (
            np.stack([a[i] for a, i in zip(arrays, segments, strict=True)], 1) if rank else np.zeros((1, 0), np.int64)
        )

    src_tile = _flat(taken(src_at), src_parts)
    dst_tile = _flat(taken(dst_at), dst_parts)
    low, high = taken(starts), taken(stops)
    order = np.lexsort((src_tile, dst_tile))
    elements = np.prod(high - low, axis=1, dtype=np.int64)
    return _Units(low[order], high[order], elements[order], source[src_tile[order]], target[dst_tile[order]])


def _flat(parts: Places, counts: tuple[int, ...]) -> Ints:
    out = np.zeros(len(parts), np.int64)
    for d, count in enumerate(counts):
        out = out * count + parts[:, d]
    return out
