"""Logical meshes over a cluster: which device is where on one, and what each of its axes has of the links.

In: a `ClusterSpec` and a shape. Out: a `LogicalMesh`.

Between hosts (domains of hosts, where NVLink joins several) an axis takes the slowest link of a ring along it. On a TPU
slice the axes are laid along the torus' dimensions, an axis over several, or a dimension over several axes, whichever
cuts fewest dimensions. A collective then uses the rings of all dimensions of its axis at once, and both ways round
where one closes: an axis of 16 devices over 4 × 4 chips that wrap has four links' rate (Jouppi et al., "TPU v4: An
Optically Reconfigurable Supercomputer", ISCA 2023, section 2; each device sends the parts of a message along different
orders of the dimensions). What crosses the middle of a ring limits an all-to-all: a quarter of its length times the
message, over the links that a device has along it.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from autopar.ir.cluster import ClusterSpec, HostGroup, LinkSpec, LogicalMesh, MeshAxis, Torus, shape_text
from autopar.ir.errors import ClusterError


def mesh_shape_from_text(text: str) -> tuple[int, ...]:
    """``2x4`` → (2, 4). Raises ClusterError where ``text`` is no such list of sizes."""
    if not re.fullmatch(r"[0-9]+(x[0-9]+)*", text):
        raise ClusterError(f"mesh {text!r} is not a shape; write its axis sizes as in 8, 2x4 or 2x2x2")
    return tuple(map(int, text.split("x")))


def default_axis_names(rank: int) -> tuple[str, ...]:
    """Names of a mesh's axes where the user gave none: x, y, z, w, then x4, x5, …"""
    return tuple("xyzw"[i] if i < 4 else f"x{i}" for i in range(rank))


def logical_mesh(
    cluster: ClusterSpec, shape: Sequence[int], names: Sequence[str] | None = None,
    devices: Sequence[int] | None = None,
) -> LogicalMesh:  # fmt: skip
    """The first ∏ ``shape`` devices of ``cluster`` as an array: row-major, hosts outermost; on a TPU slice as its
    dimensions are laid along the axes. ``devices``: these are given in that order, and only the links are found.

    An axis between hosts has the host's NICs together, divided by the rings along it that leave the host at the same
    time (all rings along an axis run at once; one ring alone may use all NICs, as NCCL's channels do). Raises
    ClusterError where the mesh does not fit the cluster or is no block of its torus, a size is below 1, or names and
    shape disagree.
    """
    shape = tuple(shape)
    text = shape_text(shape)
    if not shape or any(size < 1 for size in shape):
        raise ClusterError(f"mesh {text or '()'}: every axis needs a size of at least 1")
    names = default_axis_names(len(shape)) if names is None else tuple(names)
    if len(names) != len(shape):
        raise ClusterError(f"mesh {text} has {len(shape)} axes, but {len(names)} names: {', '.join(names)}")
    count = math.prod(shape)
    if count > cluster.num_devices:
        raise ClusterError(
            f"mesh {text} needs {count} devices; cluster {cluster.name} has {cluster.num_devices}. "
            f"Use a smaller mesh or a larger cluster"
        )
    domains = [(g, h // group.domain_hosts) for g, group in enumerate(cluster.groups) for h in range(group.hosts)]
    hosts = [group for group in cluster.groups for _ in range(group.hosts)]
    domain_of = [d for d, group in zip(domains, hosts, strict=True) for _ in range(group.devices_per_host)][:count]
    kind = {cluster.groups[g].device for g, _ in domain_of}
    if len(kind) > 1:
        kinds = ", ".join(sorted(d.name for d in kind))
        raise ClusterError(f"mesh {text} would mix devices ({kinds}); a mesh needs devices of one kind")
    ids: Sequence[int] = range(count) if devices is None else devices
    if sorted(ids) != list(range(count)):
        raise ClusterError(f"mesh {text}: its devices are not the first {count} of {cluster.name}, each once")
    if domain_of[-1][0] == 0 and cluster.groups[0].torus is not None:
        ids, links = _on_slices(cluster.groups[0], shape, devices)
    else:
        links = [_host_links(cluster, domain_of, n, math.prod(shape[i + 1 :])) for i, n in enumerate(shape)]
    axes = tuple(
        MeshAxis(name=name, size=size, link=link, exchange=exchange)
        for name, size, (link, exchange) in zip(names, shape, links, strict=True)
    )
    mesh = LogicalMesh(axes=axes, device_ids=tuple(ids), device=kind.pop())
    mesh.verify()
    return mesh


def _host_links(cluster: ClusterSpec, domain_of: list[tuple[int, int]], size: int, stride: int) -> _Links:
    """What rings of ``size`` devices, ``stride`` apart, see; and what their all-to-alls do, which bring to other hosts
    all that is for devices there, over the NICs of the host together."""
    ring = _ring_link(cluster, domain_of, size, stride)
    together = Counter((device - device // stride % size * stride, d) for device, d in enumerate(domain_of))
    """(first device of a ring, domain) → devices of the ring there."""
    away: dict[tuple[int, int], float] = {}
    """Domain → messages that leave it, in units of what a device has."""
    for (_, domain), count in together.items():
        away[domain] = away.get(domain, 0.0) + count * (size - count) / size
    groups = cluster.groups
    rates = [(1 - 1 / size) * groups[g].domain_bytes_per_s / share for (g, _), share in away.items() if share]
    slowest = min(rates, default=math.inf)
    return ring, replace(ring, bytes_per_s=slowest) if slowest < ring.bytes_per_s * (1 - 1e-9) else None


def _ring_link(cluster: ClusterSpec, domain_of: list[tuple[int, int]], size: int, stride: int) -> LinkSpec:
    """The slowest link that the rings of ``size`` devices, ``stride`` apart, meet, with the mean latency of their hops.

    What devices of one domain send each other need not leave it: of n devices in h domains (h−1)/h of a message goes
    out, where a ring's links carry (n−1)/n of it."""
    leaving: dict[tuple[int, int], int] = {}
    links = [cluster.groups[g].intra_host for g in sorted({g for g, _ in domain_of})]
    latencies_s: list[float] = []
    between = 0
    for device, domain in enumerate(domain_of):
        position = device // stride % size
        follower = domain_of[device + (stride if position < size - 1 else -position * stride)]
        group = cluster.groups[domain[0]]
        if follower == domain:
            latencies_s.append(group.intra_host.latency_s)
            continue
        leaving[domain] = leaving.get(domain, 0) + 1
        latencies_s.append(group.nic.latency_s)
        if follower[0] != domain[0] and cluster.between is not None:
            between += 1
            latencies_s[-1] = max(latencies_s[-1], cluster.between.latency_s)
    latency_s = statistics.fmean(latencies_s)
    inside = min(links, key=lambda link: link.bytes_per_s)
    if not leaving:
        return replace(inside, latency_s=latency_s)
    met = len({domain_of[device] for device in range(0, size * stride, stride)})
    less = (1 - 1 / size) / (1 - 1 / met)
    outside = [replace(cluster.groups[g].nic, bytes_per_s=less * cluster.groups[g].domain_bytes_per_s / rings)
               for (g, _), rings in leaving.items()]  # fmt: skip
    if between and cluster.between is not None:
        rate = less * cluster.between.bytes_per_s / max(leaving.values())
        outside.append(replace(cluster.between, bytes_per_s=rate))
    slowest = min(outside, key=lambda link: link.bytes_per_s)
    return replace(slowest, bytes_per_s=min(slowest.bytes_per_s, inside.bytes_per_s), latency_s=latency_s)


@dataclass(frozen=True, slots=True)
class _Dimension:
    """One along which devices lie: the slices that a network joins, one of a torus, or a chip. ``link``: each device's
    share of one direction."""

    kind: Literal["network", "torus", "chip"]
    size: int
    link: LinkSpec
    wraps: bool = False


@dataclass(frozen=True, slots=True)
class _Ring:
    """A mesh axis' part of a dimension: ``size`` devices, ``stride`` apart."""

    of: _Dimension
    size: int
    stride: int

    @property
    def directions(self) -> int:
        """2 where it closes, so that a message goes both ways round; the way back along a line is one of its own."""
        return 2 if self.of.wraps and self.size * self.stride == self.of.size else 1

    @property
    def bytes_per_s(self) -> float:
        """Of all directions; rings of other devices on the same links, as many as the stride, have their shares."""
        return self.directions * self.of.link.bytes_per_s / (1 if self.of.kind == "network" else self.stride)

    @property
    def latency_s(self) -> float:
        """Until a message has been everywhere."""
        return -(-(self.size - 1) // self.directions) * self.of.link.latency_s * self.stride

    def exchange_s(self, message_bytes: float) -> float:
        """An all-to-all of so many bytes a device, apart from latency."""
        crossing = 1 - 1 / self.size if self.of.kind == "network" else self.size / 4
        return message_bytes * crossing / self.bytes_per_s


_Links: TypeAlias = tuple[LinkSpec, LinkSpec | None]


def _on_slices(
    group: HostGroup, shape: tuple[int, ...], given: Sequence[int] | None
) -> tuple[list[int], list[_Links]]:  # fmt: skip
    """The devices of a mesh over the first devices of TPU slices (``given``: those, in that order), and what each axis
    has of the links."""
    ids, dimensions = _block(group, math.prod(shape))
    layouts: list[tuple[list[int], list[list[_Ring]]]] = []
    for middle in itertools.permutations(range(1, len(dimensions) - 1)):
        order = (0, *middle, len(dimensions) - 1)
        rings = _laid(shape, [dimensions[i] for i in order])
        if rings is not None:
            layouts.append((ids.transpose(order).reshape(-1).tolist(), rings))
    if given is None and not layouts:
        sizes = shape_text(d.size for d in dimensions if d.size > 1)
        raise ClusterError(f"mesh {shape_text(shape)} cannot be laid along the {sizes} devices of the slice")
    if given is None:
        devices, rings = min(layouts, key=lambda layout: sum(map(len, layout[1])))
        return devices, [_links(along, group) for along in rings]
    places = np.empty((len(given), len(dimensions)), int)
    places[ids.reshape(-1)] = np.stack(np.unravel_index(np.arange(len(given)), ids.shape), axis=1)
    places = places[list(given)].reshape(*shape, -1)
    rings = _whole_rings(places, dimensions) or next((r for laid, r in layouts if laid == list(given)), None)
    if rings is not None:
        return list(given), [_links(along, group) for along in rings]
    return list(given), [(_routed(places, axis, dimensions), None) for axis in range(len(shape))]


def _whole_rings(places: Any, dimensions: Sequence[_Dimension]) -> list[list[_Ring]] | None:
    """Each axis' rings, innermost first, where it runs over whole dimensions, in whatever order; else None.
    ``places``: int[*mesh, dimensions]."""
    out: list[list[_Ring]] = []
    free = set(range(len(dimensions)))
    for axis in range(places.ndim - 1):
        changes = (places != places.take([0], axis)).reshape(-1, len(dimensions)).any(0)
        mine = {d for d in range(len(dimensions)) if changes[d]}
        if not mine <= free or math.prod(dimensions[d].size for d in mine) != places.shape[axis]:
            return None
        free -= mine
        out.append([_Ring(dimensions[d], dimensions[d].size, 1) for d in sorted(mine, reverse=True)])
    return out


def _routed(places: Any, axis: int, dimensions: Sequence[_Dimension]) -> LinkSpec:
    """What the rings along an axis see that lie anyhow: each message goes along one dimension after the other, the
    shorter way round, and the link that most of them share sets the rate."""
    here = places.reshape(-1, len(dimensions))
    there = np.roll(places, -1, axis).reshape(-1, len(dimensions))
    rate, latency_s = math.inf, 0.0
    for d, dimension in enumerate(dimensions):
        load: dict[tuple[Any, ...], int] = {}
        longest = 0
        for start, stop in zip(here, there, strict=True):
            steps = int(stop[d] - start[d])
            if dimension.wraps and abs(steps) * 2 > dimension.size:
                steps -= int(math.copysign(dimension.size, steps))
            longest = max(longest, abs(steps))
            for step in range(abs(steps)):
                at = (start[d] + (step if steps > 0 else -step)) % dimension.size
                key = (*stop[:d], at, *start[d + 1 :], steps > 0)
                load[key] = load.get(key, 0) + 1
        rate = min(rate, dimension.link.bytes_per_s / max(load.values(), default=0) if load else math.inf)
        latency_s += longest * dimension.link.latency_s
    return LinkSpec(latency_s=latency_s, bytes_per_s=rate)


def _block(group: HostGroup, count: int) -> tuple[Any, list[_Dimension]]:
    """The first ``count`` devices by (slice, chip along each dimension, device of the chip), and these dimensions."""
    assert group.torus is not None
    if not is_block(group, count):
        known = [n for n in range(1, group.num_devices + 1) if is_block(group, n)]
        what = f"{count} devices are no block of a {shape_text(group.torus.shape)} slice, nor some slices"
        raise ClusterError(f"{what}; these are: {', '.join(map(str, known))}")
    whole = min(count, group.domain_devices)
    torus, slices = part_of_torus(group.torus, whole), count // whole
    cores, rank = torus.devices_per_chip, len(torus.shape)
    grid = [n // k for n, k in zip(torus.shape, torus.host, strict=True)]
    order = (0, *(axis for i in range(rank) for axis in (1 + i, 1 + rank + i)), 2 * rank + 1)
    ids = np.arange(count).reshape(slices, *grid, *torus.host, cores).transpose(order)
    share = replace(group.intra_host, bytes_per_s=group.intra_host.bytes_per_s / cores)
    network = replace(group.nic, bytes_per_s=group.domain_bytes_per_s / group.domain_devices)
    return ids.reshape(slices, *torus.shape, cores), [
        _Dimension("network", slices, network),
        *(_Dimension("torus", n, share, wraps) for n, wraps in zip(torus.shape, torus.wraps, strict=True)),
        _Dimension("chip", cores, torus.chip or group.intra_host),
    ]


def is_block(group: HostGroup, devices: int) -> bool:
    """Whether the first so many devices of a group are whole domains, or divide one; of a torus, as a block of it."""
    if devices >= group.domain_devices:
        return devices % group.domain_devices == 0 and devices <= group.num_devices
    return group.domain_devices % devices == 0 and (group.torus is None or _chips(group.torus, devices) is not None)


def part_of_torus(torus: Torus, devices: int) -> Torus:
    """The block that the first devices of a slice are (`is_block`)."""
    chips = _chips(torus, devices)
    assert chips is not None, "no block"
    cores = min(devices, torus.devices_per_chip)
    return Torus(
        shape=chips, host=tuple(map(min, torus.host, chips)), devices_per_chip=cores,
        wraps=tuple(w and n == k for w, n, k in zip(torus.wraps, torus.shape, chips, strict=True)),
        chip=torus.chip if cores > 1 else None,
    )  # fmt: skip


def candidate_shapes(cluster: ClusterSpec, mesh_axes: int = 2) -> list[tuple[int, ...]]:
    """Mesh shapes of ``mesh_axes`` axes at most, 2 or 3, that are worth planning one program for: one axis over all
    devices; if they divide, hosts × devices of a host, else 2 × half of the devices where there are four or more; of
    one group of hosts `three_axis_shape`. Of TPU slices `natural_shapes` in place of the first."""
    (group, *others), count = cluster.groups, cluster.num_devices
    three = three_axis_shape(group) if mesh_axes > 2 and not others else None
    if not others and group.torus is not None:
        shapes = list(natural_shapes(group))
    else:
        hosts = sum(g.hosts // g.domain_hosts for g in cluster.groups)
        shapes: list[tuple[int, ...]] = [(count,)]
        if hosts > 1 and count % hosts == 0:
            shapes.append((hosts, count // hosts))
        elif count >= 4 and count % 2 == 0:
            shapes.append((2, count // 2))
        shapes = [s for s in shapes if all(n > 1 for n in s) or len(s) == 1]
    return shapes if three is None else [*shapes, three]


def natural_shapes(group: HostGroup) -> tuple[tuple[int, ...], ...]:
    """Shapes of meshes over a group of TPU slices that cut no dimension: all devices on one axis, and on two; one of
    those that differ in the order of their axes alone."""
    torus, whole = group.torus, group.domain_devices
    assert torus is not None
    slices, cores = group.num_devices // whole, torus.devices_per_chip
    suffixes = [cores * math.prod(torus.shape[i:]) for i in range(len(torus.shape), -1, -1)]
    others = [cores * math.prod(some) for r in (1, 2) for some in itertools.combinations(torus.shape, r)]
    shapes = [(whole * slices // inner, inner) for inner in dict.fromkeys([whole, *suffixes, *others])]
    two = {tuple(sorted(shape)): shape for shape in reversed(shapes) if min(shape) > 1}
    return ((whole * slices,), *reversed(two.values()))


def three_axis_shape(group: HostGroup) -> tuple[int, int, int] | None:
    """The shape of a mesh of three axes over a group: what joins its devices, outermost first (slices or domains, hosts
    of a domain or dimensions of a torus, devices of a host), the innermost that can be in halves where these are fewer
    than three, of more the smallest neighbours of a torus as one. None where its devices do not divide so often."""
    domains, torus = group.num_devices // group.domain_devices, group.torus
    if torus is None:
        inner = [group.domain_hosts, group.devices_per_host]
    else:
        inner = [*torus.shape[:-1], torus.shape[-1] * torus.devices_per_chip]
    inner, outer = [n for n in inner if n > 1], [domains] if domains > 1 else []
    while len(outer) + len(inner) > 3:
        i = min(range(len(inner) - 1), key=lambda i: inner[i] * inner[i + 1])
        inner[i : i + 2] = [inner[i] * inner[i + 1]]
    sizes = outer + inner
    while len(sizes) < 3:
        even = [i for i, n in enumerate(sizes) if n >= 4 and n % 2 == 0]
        if not even:
            return None
        sizes[even[-1] : even[-1] + 1] = [2, sizes[even[-1]] // 2]
    first, second, third = sizes
    return first, second, third


def _chips(torus: Torus, devices: int) -> tuple[int, ...] | None:
    """The chips along each dimension of the first ``devices`` devices of a slice; None where these are no block."""
    chips, rest = divmod(devices, min(devices, torus.devices_per_chip))
    if rest:
        return None
    if chips <= math.prod(torus.host):
        return _trailing(torus.host, chips)
    hosts, rest = divmod(chips, math.prod(torus.host))
    grid = _trailing([n // k for n, k in zip(torus.shape, torus.host, strict=True)], hosts)
    return None if rest or grid is None else tuple(n * k for n, k in zip(grid, torus.host, strict=True))


def _trailing(sizes: Sequence[int], count: int) -> tuple[int, ...] | None:
    """The first ``count`` places of a row-major grid as a block of it; None where they are none."""
    out: list[int] = []
    for size in reversed(sizes):
        out.append(min(count, size))
        count, rest = divmod(count, out[-1])
        if rest:
            return None
    return tuple(reversed(out)) if count == 1 else None


def _laid(shape: Sequence[int], dimensions: Sequence[_Dimension]) -> list[list[_Ring]] | None:
    """Each axis' rings where a mesh lies row-major over these dimensions; None where an axis would begin or end within
    a part of a dimension that its size does not divide."""
    out: list[list[_Ring]] = []
    inner = reversed(dimensions)
    dimension, stride = next(inner), 1
    for size in reversed(shape):
        rings: list[_Ring] = []
        while size > 1:
            left = dimension.size // stride
            if left == 1:
                dimension, stride = next(inner), 1
                continue
            part = min(size, left)
            if max(size, left) % part:
                return None
            rings.append(_Ring(dimension, part, stride))
            size, stride = size // part, stride * part
        out.append(rings)
    return out[::-1]


def _links(rings: Sequence[_Ring], group: HostGroup) -> _Links:
    """What collectives along an axis of these rings (innermost first) see, and all-to-alls where these see less.

    A gathering goes between slices first, then along all of the torus' rings at once, then within chips, each carrying
    what the ones before have gathered; in chunks, so that the slowest of the three sets the rate."""
    size = math.prod(ring.size for ring in rings)
    if size == 1:
        return group.intra_host, None
    steps_s = sum(ring.latency_s for ring in rings) / (size - 1)
    slowest_s, gathered = 0.0, 1
    for _, together in itertools.groupby(reversed(rings), key=lambda ring: ring.of.kind):
        at_once = list(together)
        count = math.prod(ring.size for ring in at_once)
        slowest_s = max(slowest_s, (count - 1) * gathered / sum(ring.bytes_per_s for ring in at_once))
        gathered *= count
    link = LinkSpec(latency_s=steps_s, bytes_per_s=(size - 1) / slowest_s)
    exchange_s = max(ring.exchange_s(1.0) for ring in rings)
    exchange = LinkSpec(latency_s=steps_s, bytes_per_s=(1 - 1 / size) / exchange_s)
    return link, exchange if exchange.bytes_per_s < link.bytes_per_s * (1 - 1e-9) else None
