"""Which parts of a cluster a stage may run on, as which logical meshes, and where stages are put.

A *submesh* is some whole hosts of one group, or a part of one host whose size divides the host's (Alpa, OSDI 2022,
section 5.2, with any number of hosts and any logical shape); of hosts that NVLink or a torus joins, a block. Where
sizes divide each other, every set that adds up to a group's devices fills it, so that a search only counts devices;
`place` puts them there, and says where it cannot.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.cost.logical_meshes import is_block, logical_mesh, natural_shapes, part_of_torus, three_axis_shape
from autopar.ir.cluster import ClusterSpec, LogicalMesh
from autopar.ir.pipelined import PipelineOptions

MANY_HOSTS = 4
"""Of groups with more hosts only numbers of hosts that divide the group's are tried (guessed)."""
FEW_HOSTS = 2
"""Up to so many hosts are cut in halves on a mesh axis (measured: 16 x 4 devices take six times as long as 8 x 8)."""

LEAST_PART = 4
"""A stage that has less than this part of the devices that it would have, were there as many stages as there may be,
is not tried (guessed; a cluster of 128 hosts of 8 is then searched in whole hosts)."""


@dataclass(frozen=True, slots=True, order=True)
class Submesh:
    """``hosts`` hosts of group ``group``, ``devices`` devices of each."""

    group: int
    hosts: int
    devices: int

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.hosts * self.devices

    def __str__(self) -> str:
        return f"({self.hosts},{self.devices})" + (f" of group {self.group}" if self.group else "")


def submeshes(cluster: ClusterSpec, stages: int | None = None) -> tuple[Submesh, ...]:
    """Every submesh of a cluster, group by group, small ones first. Where there are at most ``stages`` stages, without
    those of which `LEAST_PART` on each would not fill the cluster; a group has one at least."""
    least = 1.0 if stages is None else cluster.num_devices / (LEAST_PART * stages)
    out: list[Submesh] = []
    for g, group in enumerate(cluster.groups):
        width = group.devices_per_host
        mine = [Submesh(g, 1, k) for k in range(1, width) if width % k == 0]
        counts = (h for h in range(1, group.hosts + 1) if group.hosts % h == 0 or group.hosts <= MANY_HOSTS)
        mine += [Submesh(g, h, width) for h in counts]
        mine = [s for s in mine if is_block(group, s.size)]
        out += [s for s in mine if s.size >= least] or mine[-1:]
    return tuple(out)


def logical_shapes(
    cluster: ClusterSpec, submesh: Submesh, asked: Sequence[tuple[int, ...]] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Shapes of a submesh's logical meshes: those of ``asked`` that have its devices, of any rank. Unasked hosts ×
    devices, which can do what all devices on one axis can (`intra_op.specs`: collectives over both axes); of one host
    all on one axis; halves of few hosts × devices. Of a TPU slice `natural_shapes`."""
    if asked is not None:
        return tuple(shape for shape in dict.fromkeys(asked) if math.prod(shape) == submesh.size)
    (group,) = part_of(cluster, submesh).groups
    if group.torus is not None:
        return natural_shapes(group)
    h, k = submesh.hosts, submesh.devices
    shapes: list[tuple[int, ...]] = [(h, k) if h > 1 and k > 1 else (h * k,)]
    if k >= 4 and k % 2 == 0 and h <= FEW_HOSTS:
        shapes.append((2 * h, k // 2))
    return tuple(dict.fromkeys(shapes))


def part_of(cluster: ClusterSpec, submesh: Submesh) -> ClusterSpec:
    """A submesh as a cluster of its own, with its share of a host's NICs (one at least)."""
    group = cluster.groups[submesh.group]
    nics = max(1, group.nics_per_host * submesh.devices // group.devices_per_host)
    torus = group.torus and part_of_torus(group.torus, min(submesh.size, group.domain_devices))
    part = replace(
        group, hosts=submesh.hosts, devices_per_host=submesh.devices, nics_per_host=nics,
        domain_hosts=min(submesh.hosts, group.domain_hosts), torus=torus,
    )  # fmt: skip
    return ClusterSpec(name=f"{cluster.name}{submesh}", groups=(part,))


def mesh_of(
    cluster: ClusterSpec, submesh: Submesh, shape: Sequence[int], devices: Sequence[int],
    names: Sequence[str] | None = None,
) -> LogicalMesh:  # fmt: skip
    """The logical mesh of that shape on a submesh, whose devices are the cluster's ``devices``. Raises ClusterError as
    `logical_mesh`."""
    return moved(logical_mesh(part_of(cluster, submesh), shape, names), devices)


def moved(mesh: LogicalMesh, devices: Sequence[int]) -> LogicalMesh:
    """A mesh over devices 0, 1, … as one over ``devices``."""
    return replace(mesh, device_ids=tuple(devices[i] for i in mesh.device_ids))


def three_axis_meshes(cluster: ClusterSpec, submesh: Submesh) -> tuple[LogicalMesh, ...]:
    """The logical meshes of three axes of a submesh, on the first devices, that are tried unasked: one or none."""
    shape = three_axis_shape(part_of(cluster, submesh).groups[0])
    return () if shape is None else (mesh_of(cluster, submesh, shape, range(submesh.size)),)


def logical_meshes(cluster: ClusterSpec, submesh: Submesh, options: PipelineOptions) -> tuple[LogicalMesh, ...]:
    """The logical meshes of a submesh, on the first devices, that ``options`` leave."""
    degrees = options.degrees
    if degrees.names is None:
        shapes = logical_shapes(cluster, submesh, options.logical_shapes)
    else:
        shape = degrees.shape(submesh.size)
        shapes = () if shape is None else (shape,)
    return tuple(mesh_of(cluster, submesh, shape, range(submesh.size), degrees.names) for shape in shapes)


def moved_up(cluster: ClusterSpec, meshes: Sequence[LogicalMesh]) -> tuple[LogicalMesh, ...]:
    """The same meshes on the first hosts of their groups, each host on one of its own kind: what crosses between them
    takes as long there, and there are few different ones."""
    sizes = [group.hosts * group.devices_per_host for group in cluster.groups]
    firsts = list(itertools.accumulate(sizes[:-1], initial=0))
    hosts: dict[tuple[int, int], int] = {}
    taken = [0] * len(sizes)
    out: list[LogicalMesh] = []
    for mesh in meshes:
        ids: list[int] = []
        for device in mesh.device_ids:
            g = bisect.bisect_right(firsts, device) - 1
            width = cluster.groups[g].devices_per_host
            host, local = divmod(device - firsts[g], width)
            if (g, host) not in hosts:
                hosts[g, host] = taken[g]
                taken[g] += 1
            ids.append(firsts[g] + hosts[g, host] * width + local)
        out.append(replace(mesh, device_ids=tuple(ids)))
    return tuple(out)


def place(cluster: ClusterSpec, wanted: Sequence[Submesh]) -> tuple[tuple[int, ...], ...]:
    """Device numbers (hosts group by group) of each submesh: in order as far as they fill hosts without gaps, else
    large ones first.

    Raises:
        ValueError: they do not fit the cluster.
    """
    for order in (range(len(wanted)), sorted(range(len(wanted)), key=lambda i: -wanted[i].size)):
        found = _placed(cluster, [wanted[i] for i in order])
        if found is not None:
            return tuple(where for _, where in sorted(zip(order, found, strict=True)))
    raise ValueError(f"{', '.join(map(str, wanted))} do not fit cluster {cluster.name}")


def _placed(cluster: ClusterSpec, wanted: Sequence[Submesh]) -> list[tuple[int, ...]] | None:
    firsts = list(itertools.accumulate((g.hosts * g.devices_per_host for g in cluster.groups), initial=0))
    used = [[0] * group.hosts for group in cluster.groups]
    """Devices taken of each host."""
    out: list[tuple[int, ...]] = []
    for submesh in wanted:
        group, taken = cluster.groups[submesh.group], used[submesh.group]
        width, first = group.devices_per_host, firsts[submesh.group]
        if submesh.devices < width:
            fits = [h for h in range(group.hosts) if taken[h] % submesh.devices == 0 and taken[h] < width]
            if not fits:
                return None
            h = fits[0]
            out.append(tuple(first + h * width + taken[h] + i for i in range(submesh.devices)))
            taken[h] += submesh.devices
            continue
        step = 1 if group.domain_hosts == 1 else submesh.hosts  # a part of a domain, or whole ones, as the first is
        starts = [h for h in range(0, group.hosts - submesh.hosts + 1, step) if not any(taken[h : h + submesh.hosts])]
        if not starts:
            return None
        h = starts[0]
        taken[h : h + submesh.hosts] = [width] * submesh.hosts
        out.append(tuple(first + h * width + i for i in range(submesh.size)))
    return out
