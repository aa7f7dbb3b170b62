"""What crosses from mesh to mesh, and how: values, and the chunked transfers that bring them.

A `ReshardingPlan` covers everything that shares links at one time: several values of one cut, forward and backward.
Each value lies on a source mesh under a `ShardingSpec` and is wanted on a destination mesh under another. Every element
of every destination tile is brought exactly once by one of the plan's transfers.

Tiles. A dimension of n elements that p parts share is cut as GSPMD cuts it: each part has ⌈n/p⌉ elements, the last
ones fewer or none (`tile_box`). Dimensions need not divide.

Pieces. A transfer brings one *piece*: a stretch of a box of the value, elements ``start`` to ``stop`` of the box in
row-major order, so that any share can be cut from any box. It goes from ``sender`` to a device of every host that wants
it (`Hop`), in chunks of ``chunk_elements`` that follow each other: while a device receives chunk k it passes on chunk
k − 1. In a chain each hop gets the chunks from the one before; in general a hop names the one it gets them from. On
each host the hop's device hands the piece on to the other devices there that want it, one after the other
(``copies``), over the links inside the host.

Streams. Transfers of one ``stream`` follow one another; different streams are in flight together, and a NIC divides
its bandwidth between them in proportion to their chunks' bytes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from autopar.ir.cluster import ClusterSpec, LinkSpec, LogicalMesh
from autopar.ir.errors import ReshardingError
from autopar.ir.graph import TensorType
from autopar.ir.sharding import ShardingSpec

Box: TypeAlias = tuple[tuple[int, int], ...]
"""(start, stop) of every dimension."""


def box_size(box: Box) -> int:
    """Number of elements of a box; 1 for a scalar's."""
    return math.prod(stop - start for start, stop in box)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLinks:
    """What connects a host: ``nics`` full-duplex NICs, each ``nic`` in either direction; ``intra_host``, what one of
    its devices sends to (and takes from) the others there."""

    nics: int
    nic: LinkSpec
    intra_host: LinkSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The hosts' links; a host's number is its index. Between NICs the network is taken to be free of contention."""

    hosts: tuple[HostLinks, ...]

    def verify(self) -> None:
        """Raises ReshardingError without hosts or where one has no NIC, ClusterError where a link's figure is not
        positive."""
        if not self.hosts:
            raise ReshardingError("the network has no hosts")
        for number, host in enumerate(self.hosts):
            if host.nics < 1:
                raise ReshardingError(f"host {number} has {host.nics} NICs; it needs at least 1")
            host.nic.verify()
            host.intra_host.verify()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedMesh:
    """A mesh and where its devices are: ``hosts[i]`` and ``nics[i]`` (numbered inside the host) are those of
    ``mesh.device_ids[i]``. ``device_ids`` are unique over the cluster."""

    mesh: LogicalMesh
    hosts: tuple[int, ...]
    nics: tuple[int, ...]

    def verify(self, name: str = "mesh") -> None:
        """Raises ReshardingError for a mesh without devices or with a device twice, and where lengths disagree."""
        count = len(self.mesh.device_ids)
        if not count:
            raise ReshardingError(f"{name} is empty: a resharding needs devices on both sides")
        self.mesh.verify()
        if len(self.hosts) != count or len(self.nics) != count:
            raise ReshardingError(
                f"{name} has {count} devices, but {len(self.hosts)} hosts and {len(self.nics)} NICs are given; "
                f"give one of each per device"
            )
        if len(set(self.mesh.device_ids)) != count:
            raise ReshardingError(f"{name} names a device twice: {self.mesh.device_ids}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossValue:
    """One value to bring from mesh ``src`` to mesh ``dst`` (indices into the plan's meshes)."""

    type: TensorType
    src: int
    src_spec: ShardingSpec
    dst: int
    dst_spec: ShardingSpec

    def __str__(self) -> str:
        return f"{self.type} mesh {self.src} {self.src_spec} -> mesh {self.dst} {self.dst_spec}"

    def verify(self, meshes: tuple[PlacedMesh, ...], name: str = "value") -> None:
        """Raises ReshardingError where a mesh does not exist, both are one, or a spec does not fit its mesh or the
        value; VerifyError for a bad type or spec."""
        self.type.verify()
        for side, index, spec in (("source", self.src, self.src_spec), ("destination", self.dst, self.dst_spec)):
            where = f"{name} ({self.type}), {side} spec {spec}"
            if not 0 <= index < len(meshes):
                raise ReshardingError(f"{where}: mesh {index} does not exist; there are {len(meshes)}")
            spec.verify()
            if spec.unreduced:
                raise ReshardingError(
                    f"{where}: partial sums over {', '.join(spec.unreduced)} cannot cross meshes; reduce them before"
                )
            if len(spec.dims) != len(self.type.shape):
                raise ReshardingError(f"{where}: {len(spec.dims)} dimensions, the value has {len(self.type.shape)}")
            names = meshes[index].mesh.axis_names
            for axis in (a for dim in spec.dims for a in dim):
                if axis not in names:
                    raise ReshardingError(
                        f"{where}: mesh {index} has no axis {axis!r}; its axes are {', '.join(names)}"
                    )
        if self.src == self.dst:
            raise ReshardingError(f"{name} ({self.type}): source and destination are both mesh {self.src}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """``device`` gets the chunks from hop ``source`` of its transfer (an earlier one, or −1: the sender) and hands
    them on to ``copies`` on its host, each getting them from the one before."""

    device: int
    source: int
    copies: tuple[int, ...] = ()


class Leg(NamedTuple):
    """A piece's way from one device to the next: from ``giver``, which has it by leg ``after`` of its transfer (−1: it
    is the sender), to ``taker``."""

    giver: int
    taker: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One piece of value ``value`` (an index into the plan's values) and its way; see the module's docstring."""

    value: int
    box: Box
    start: int
    stop: int
    sender: int
    hops: tuple[Hop, ...]
    chunk_elements: int
    stream: int

    @property
    def elements(self) -> int:
        """Elements of the piece."""
        return self.stop - self.start

    @property
    def chunks(self) -> int:
        """How many chunks the piece is sent in; the last may be shorter."""
        return -(-self.elements // self.chunk_elements)

    @property
    def receivers(self) -> tuple[int, ...]:
        """Every device that the piece is brought to."""
        return tuple(d for hop in self.hops for d in (hop.device, *hop.copies))

    @property
    def legs(self) -> tuple[Leg, ...]:
        """One for each receiver, in their order: what sends, relays and copies do, each after the one it depends on."""
        out: list[Leg] = []
        at: list[int] = []
        for hop in self.hops:
            after = -1 if hop.source < 0 else at[hop.source]
            at.append(len(out))
            giver = self.sender if hop.source < 0 else self.hops[hop.source].device
            for device in (hop.device, *hop.copies):
                out.append(Leg(giver, device, after))
                giver, after = device, len(out) - 1
        return tuple(out)

    def chunk(self, index: int) -> tuple[int, int]:
        """(start, stop) of chunk ``index``: elements of the box in row-major order."""
        start = self.start + index * self.chunk_elements
        return start, min(self.stop, start + self.chunk_elements)

    def __str__(self) -> str:
        box = ",".join(f"{start}:{stop}" for start, stop in self.box)
        part = "" if (self.start, self.stop) == (0, box_size(self.box)) else f"({self.start}:{self.stop})"
        way = [f"{self.sender}"]
        for index, hop in enumerate(self.hops):
            copies = f"+{'+'.join(map(str, hop.copies))}" if hop.copies else ""
            source = "" if hop.source == index - 1 else f"(hop {hop.source})" if hop.source >= 0 else "(sender)"
            way.append(f"{source}{hop.device}{copies}")
        return f"v{self.value}[{box}]{part} {' -> '.join(way)} in {self.chunks} chunks, stream {self.stream}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardingPlan:
    """Transfers that bring ``values`` over, and what they take by the cost model.

    ``time_s`` counts chunks and latency, ``fluid_s`` bandwidth alone, both with all streams in flight; ``bound_s`` is
    the lower bound of any plan. ``nic_busy_s[h]`` is how long the busiest NIC of host h sends or receives.
    """

    meshes: tuple[PlacedMesh, ...]
    values: tuple[CrossValue, ...]
    transfers: tuple[Transfer, ...]
    strategy: str
    time_s: float
    fluid_s: float
    bound_s: float
    nic_busy_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """``fluid_s`` over the lower bound; 1 where nothing has to move."""
        return self.fluid_s / self.bound_s if self.bound_s > 0 else 1.0

    @property
    def streams(self) -> int:
        """How many streams are in flight together."""
        return max((t.stream for t in self.transfers), default=-1) + 1

    def __str__(self) -> str:
        head = (
            f"resharding of {len(self.values)} values by {self.strategy}: {1e3 * self.time_s:.3f} ms, "
            f"{self.ratio:.3f} times the bound, {len(self.transfers)} transfers in {self.streams} streams"
        )
        lines = [f"v{i}: {value}" for i, value in enumerate(self.values)]
        return "\n".join([head, *lines, *map(str, self.transfers)])

    def verify(self) -> None:
        """Raises ReshardingError unless meshes, values and transfers fit each other: senders hold and receivers want
        what they send and receive, hops come after those they get their chunks from, copies stay on their host, and
        every device gets as many elements as its tile has."""
        verify_meshes(self.meshes)
        for index, value in enumerate(self.values):
            value.verify(self.meshes, f"value {index}")
        if not (0 <= self.bound_s <= self.fluid_s * (1 + 1e-9) and self.fluid_s <= self.time_s * (1 + 1e-9)):
            raise ReshardingError(f"times out of order: {self.bound_s} s, {self.fluid_s} s, {self.time_s} s")
        held = [_tiles(v.type, v.src_spec, self.meshes[v.src]) for v in self.values]
        wanted = [_tiles(v.type, v.dst_spec, self.meshes[v.dst]) for v in self.values]
        host_of = {d: h for mesh in self.meshes for d, h in zip(mesh.mesh.device_ids, mesh.hosts, strict=True)}
        brought: dict[tuple[int, int], int] = {}
        for index, transfer in enumerate(self.transfers):
            fault = self._fault_of(transfer, held, wanted, host_of)
            if fault:
                raise ReshardingError(f"transfer {index}: {fault}")
            for device in transfer.receivers:
                key = transfer.value, device
                brought[key] = brought.get(key, 0) + transfer.elements
        for index, tiles in enumerate(wanted):
            for device, tile in tiles.items():
                got = brought.get((index, device), 0)
                if got != box_size(tile):
                    raise ReshardingError(
                        f"value {index}: device {device} gets {got} elements, its tile {tile} has {box_size(tile)}"
                    )

    def _fault_of(
        self,
        transfer: Transfer,
        held: list[dict[int, Box]],
        wanted: list[dict[int, Box]],
        host_of: dict[int, int],
    ) -> str:
        """What is wrong with a transfer; empty where nothing is."""
        if not 0 <= transfer.value < len(self.values):
            return f"there is no value {transfer.value}"
        if transfer.chunk_elements < 1:
            return f"chunks of {transfer.chunk_elements} elements"
        if not 0 <= transfer.start < transfer.stop <= box_size(transfer.box):
            return f"{transfer}: an empty piece, or one outside its box"
        if not _inside(transfer.box, held[transfer.value].get(transfer.sender)):
            return f"{transfer}: device {transfer.sender} does not hold it"
        if not transfer.hops or any(not -1 <= hop.source < i for i, hop in enumerate(transfer.hops)):
            return f"{transfer}: no hops, or one that gets its chunks from a later one"
        for hop in transfer.hops:
            if any(host_of.get(d) != host_of.get(hop.device) for d in hop.copies):
                return f"{transfer}: copies leave the host of device {hop.device}"
        for device in transfer.receivers:
            if not _inside(transfer.box, wanted[transfer.value].get(device)):
                return f"{transfer}: device {device} does not want it"
        return ""


def verify_meshes(meshes: tuple[PlacedMesh, ...]) -> None:
    """Raises ReshardingError where a mesh is malformed or two share a device."""
    owner: dict[int, int] = {}
    for index, mesh in enumerate(meshes):
        mesh.verify(f"mesh {index}")
        shared = [d for d in mesh.mesh.device_ids if d in owner]
        if shared:
            raise ReshardingError(
                f"meshes {owner[shared[0]]} and {index} overlap: both have device {shared[0]}. Meshes of a resharding "
                f"are disjoint; inside one mesh, a sharding constraint reshards"
            )
        owner.update((d, index) for d in mesh.mesh.device_ids)


def host_at(cluster: ClusterSpec, device: int) -> tuple[int, int, int]:
    """(group, host within it, device within that one) of the cluster's devices, numbered host by host, groups in order.

    Raises:
        ReshardingError: the cluster has no such device.
    """
    left = device
    for number, group in enumerate(cluster.groups):
        if 0 <= left < group.num_devices:
            return number, *divmod(left, group.devices_per_host)
        left -= group.num_devices
    raise ReshardingError(
        f"device {device} is not in cluster {cluster.name}, which has devices 0 to {cluster.num_devices - 1}"
    )


def place(mesh: LogicalMesh, cluster: ClusterSpec) -> PlacedMesh:
    """Where a mesh's devices are (`host_at`); a host's devices share its NICs evenly. Hosts of a domain, which reach
    each other without NICs, are one.

    Raises:
        ReshardingError: the cluster has no such device.
    """
    first_domain = [0, *itertools.accumulate(g.hosts // g.domain_hosts for g in cluster.groups)]
    hosts, nics = list[int](), list[int]()
    for device in mesh.device_ids:
        number, host, local = host_at(cluster, device)
        group = cluster.groups[number]
        domain, inside = divmod(host, group.domain_hosts)
        mine = min(group.nics_per_host, group.devices_per_host)
        hosts.append(first_domain[number] + domain)
        nics.append(inside * mine + local * mine // group.devices_per_host)
    return PlacedMesh(mesh=mesh, hosts=tuple(hosts), nics=tuple(nics))


def network_of(cluster: ClusterSpec) -> Network:
    """A cluster's network: domains of hosts group by group. NICs beyond one a device are left out; in a cluster of
    several groups ``between`` limits each NIC."""
    hosts: list[HostLinks] = []
    for group in cluster.groups:
        nic = group.nic
        if cluster.between is not None and len(cluster.groups) > 1:
            nic = LinkSpec(
                latency_s=max(nic.latency_s, cluster.between.latency_s),
                bytes_per_s=min(nic.bytes_per_s, cluster.between.bytes_per_s),
            )
        nics = min(group.nics_per_host, group.devices_per_host) * group.domain_hosts
        hosts += [HostLinks(nics=nics, nic=nic, intra_host=group.intra_host)] * (group.hosts // group.domain_hosts)
    return Network(hosts=tuple(hosts))


def part_bounds(size: int, parts: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) of each of ``parts`` parts of a dimension: ⌈size/parts⌉ elements each, the last fewer or none."""
    step = -(-size // parts)
    return tuple((min(size, i * step), min(size, (i + 1) * step)) for i in range(parts))


def tile_box(type: TensorType, spec: ShardingSpec, mesh: LogicalMesh, position: int) -> Box:
    """The box of a value that the device ``mesh.device_ids[position]`` holds; a dimension's axes split it major to
    minor."""
    coordinates: dict[str, int] = {}
    for axis in reversed(mesh.axes):
        position, coordinates[axis.name] = divmod(position, axis.size)
    sizes = {axis.name: axis.size for axis in mesh.axes}
    box: list[tuple[int, int]] = []
    for size, axes in zip(type.shape, spec.dims, strict=True):
        part, parts = 0, 1
        for axis in axes:
            part, parts = part * sizes[axis] + coordinates[axis], parts * sizes[axis]
        box.append(part_bounds(size, parts)[part])
    return tuple(box)


def _tiles(type: TensorType, spec: ShardingSpec, placed: PlacedMesh) -> dict[int, Box]:
    return {d: tile_box(type, spec, placed.mesh, i) for i, d in enumerate(placed.mesh.device_ids)}


def _inside(box: Box, tile: Box | None) -> bool:
    if tile is None or len(box) != len(tile):
        return False
    return all(low <= start <= stop <= high for (start, stop), (low, high) in zip(box, tile, strict=True))
