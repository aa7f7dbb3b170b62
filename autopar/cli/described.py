"""A cluster as plans see it: devices, natural meshes with each axis' links, and where the figures are from."""

from __future__ import annotations

from autopar.cost.logical_meshes import candidate_shapes, logical_mesh
from autopar.ir.cluster import ClusterSpec, HostGroup, shape_text
from autopar.ir.presets import cluster_from_text, sources
from autopar.ir.pretty import cluster_text
from autopar.ir.text import bytes_text, link_text, rate_text, table


def described(text: str) -> str:
    """The cluster that ``text`` names. Raises ClusterError as `cluster_from_text`."""
    cluster = cluster_from_text(text)
    rows = list(map(list, sources(text))) or [["figures", f"the file {text}"]]
    parts = [cluster_text(cluster), *table([["of", "from"], *rows])]
    for number, group in enumerate(cluster.groups):
        title = "\ndevices" if len(cluster.groups) == 1 else f"\ndevices of group {number}"
        parts += [title, *table(_device_rows(group)), "\nnatural meshes", *table(_mesh_rows(cluster, group))]
    return "\n".join(parts)


def _device_rows(group: HostGroup) -> list[list[str]]:
    device, torus = group.device, group.torus
    count = f"{group.num_devices} {device.name}"
    if torus is not None:
        chips = group.num_devices // torus.devices_per_chip
        each = f", {torus.devices_per_chip} a chip" if torus.devices_per_chip > 1 else ""
        count += f": {chips} chips, {group.hosts} hosts{each}"
    rows = [["count", count]]
    rows += [["memory", f"{bytes_text(device.memory_bytes)}, {rate_text(device.memory_bytes_per_s, 'B/s')}"]]
    rows += [[dtype, rate_text(rate, "FLOP/s")] for dtype, rate in device.flops_per_s]
    rows += [["link", f"{link_text(group.intra_host)}, one direction"]]
    if group.hosts > group.domain_hosts:
        rows += [["NIC", f"{group.nics_per_host} a host, {link_text(group.nic)}"]]
    return rows


def _mesh_rows(cluster: ClusterSpec, group: HostGroup) -> list[list[str]]:
    alone = ClusterSpec(name=cluster.name, groups=(group,))
    rows = [["mesh", "axis", "devices", "a ring sees", "an all-to-all sees"]]
    for shape in candidate_shapes(alone):
        for axis in logical_mesh(alone, shape).axes:
            first = shape_text(shape) if axis.name == "x" else ""
            rows.append([first, axis.name, str(axis.size), link_text(axis.link), link_text(axis.exchange or axis.link)])
    return rows
