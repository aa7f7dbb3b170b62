"""Devices of this process → the ClusterSpec that describes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from autopar.ir.cluster import ClusterSpec, shape_text
from autopar.ir.errors import ClusterError
from autopar.ir.presets import KINDS, cluster_from_text
from autopar.ir.slices import GENERATIONS, TPU_KINDS, slices_of
from autopar.jax_compat import remat_is_undone


def undoes_remat(cluster: ClusterSpec) -> bool:
    """True where the cluster's compiler, as far as this process knows it, merges what is computed twice."""
    return remat_is_undone() and cluster.platform == "cpu"


def cluster_of(devices: Sequence[Any] | None) -> ClusterSpec:
    """The cluster of ``devices`` (None: all of this process's backend), by their kind.

    Raises:
        ClusterError: the kind is not among the presets.
    """
    devices = jax.devices() if devices is None else devices
    hosts = len({d.process_index for d in devices})
    if devices[0].platform == "cpu":
        if hosts == 1 or len(devices) % hosts:
            return cluster_from_text(f"cpu:{len(devices)}")
        cluster = cluster_from_text(f"cpu:{len(devices) // hosts}")
        (group,) = cluster.groups
        return replace(cluster, name=f"{hosts} x {cluster.name}", groups=(replace(group, hosts=hosts),))
    kind = devices[0].device_kind.lower()
    if devices[0].platform == "tpu":
        generation = next((g for word, g in TPU_KINDS.items() if word in kind), None)
        if generation is not None:
            return _slices(generation, devices)
    for word, preset in KINDS.items():
        if word in kind:
            (group,) = cluster_from_text(preset).groups
            per_host = max(1, len(devices) // hosts)
            domain = group.domain_hosts if hosts % group.domain_hosts == 0 else 1
            group = replace(group, hosts=hosts, devices_per_host=per_host, domain_hosts=domain)
            return ClusterSpec(name=preset, groups=(group,))
    raise ClusterError(
        f"no preset describes this device, {devices[0].device_kind!r}: pass cluster= a preset or a ClusterSpec file"
    )


def in_order(devices: Sequence[Any], cluster: ClusterSpec) -> list[Any]:
    """``devices`` as the cluster numbers them: those of TPU slices slice by slice, hosts row-major over the torus, and
    row-major within a host; others as they come."""
    torus = cluster.groups[0].torus
    if torus is None or any(getattr(d, "coords", None) is None for d in devices):
        return list(devices)
    firsts = {s: _corner(mine) for s, mine in _by_slice(devices).items()}

    def place(device: Any) -> tuple[Any, ...]:
        at = _place(device, firsts[_slice_of(device)])
        blocks = [divmod(x, size) for x, size in zip(at, torus.host, strict=False)]
        return _slice_of(device), [b for b, _ in blocks], [i for _, i in blocks], getattr(device, "core_on_chip", 0)

    return sorted(devices, key=place)


def _slices(generation: str, devices: Sequence[Any]) -> ClusterSpec:
    """The slices that ``devices`` are, whichever process drives which.

    Raises ClusterError where they do not fill a block of one, or blocks of equal shape of several."""
    of = GENERATIONS[generation]
    slices = list(_by_slice(devices).values())
    for mine in slices:
        chips = math.prod(_extents(mine))
        if len(mine) == 2 * chips and of.devices_per_chip == 1:
            raise ClusterError(
                f"these {mine[0].device_kind} are two devices a chip, and JAX on Google Cloud has one: describe the "
                "topology with chip_config_name='megacore'"
            )
        if len(mine) != chips * of.devices_per_chip:
            raise ClusterError(
                f"{len(mine)} devices ({mine[0].device_kind}) fill no block of a slice: the least that holds them has "
                f"{shape_text(_extents(mine))} chips, {chips * of.devices_per_chip} devices. Take all of these"
            )
    shape, *others = sorted({_extents(mine) for mine in slices})
    if others:
        shapes = " and ".join(map(shape_text, [shape, *others]))
        raise ClusterError(f"the devices are slices of unequal shapes, {shapes}: pass cluster= what they are")
    hosts = {_extents([d for d in devices if d.process_index == p]) for p in {d.process_index for d in devices}}
    host = hosts.pop() if len(hosts) == 1 else shape
    host = host if all(n % k == 0 for n, k in zip(shape, host, strict=True)) else shape
    shape, host = shape[: of.rank], host[: of.rank]
    name = f"{generation}-{shape_text(shape)}" + (f":{len(slices)}" if len(slices) > 1 else "")
    return slices_of(generation, shape, len(slices), name, host)


def _slice_of(device: Any) -> int:
    return getattr(device, "slice_index", 0) or 0


def _by_slice(devices: Sequence[Any]) -> dict[int, list[Any]]:
    out: dict[int, list[Any]] = {}
    for device in devices:
        out.setdefault(_slice_of(device), []).append(device)
    return out


def _corner(devices: Sequence[Any]) -> tuple[int, ...]:
    """The least coordinate along each dimension."""
    return tuple(map(min, zip(*(d.coords for d in devices), strict=True)))


def _place(device: Any, corner: Sequence[int]) -> tuple[int, ...]:
    return tuple(x - first for x, first in zip(device.coords, corner, strict=True))


def _extents(devices: Sequence[Any]) -> tuple[int, ...]:
    """Chips along each dimension of the least block that holds ``devices``."""
    corner = _corner(devices)
    return tuple(1 + max(along) for along in zip(*(_place(d, corner) for d in devices), strict=True))
