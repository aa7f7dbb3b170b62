"""Devices of this process → the ClusterSpec that describes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from autopar.ir.cluster import ClusterSpec
from autopar.ir.errors import ClusterError
from autopar.ir.presets import KINDS, cluster_from_text
from autopar.jax_compat import remat_is_undone


def undoes_remat(cluster: ClusterSpec) -> bool:
    """True where the cluster's compiler, as far as this process knows it, merges what is computed twice."""
    return remat_is_undone() and cluster.platform == "cpu"


def _torus(devices: Sequence[Any]) -> tuple[int, ...] | None:
    """The extents of the TPU slice that ``devices`` are, all of it, whichever process drives them; None if of none."""
    coords = {tuple(c) for d in devices if (c := getattr(d, "coords", None)) is not None}
    if len(coords) < len(devices) or len({getattr(d, "slice_index", 0) for d in devices}) > 1:
        return None
    extents = tuple(max(along) - min(along) + 1 for along in zip(*coords, strict=True))
    return tuple(n for n in extents if n > 1) if math.prod(extents) == len(devices) > 1 else None


def cluster_of(devices: Sequence[Any] | None) -> ClusterSpec:
    """The cluster of ``devices`` (None: all of this process's backend), by their kind.

    Raises:
        ClusterError: the kind is not among the presets.
    """
    devices = jax.devices() if devices is None else devices
    if devices[0].platform == "cpu":
        hosts = len({d.process_index for d in devices})
        if hosts == 1 or len(devices) % hosts:
            return cluster_from_text(f"cpu:{len(devices)}")
        cluster = cluster_from_text(f"cpu:{len(devices) // hosts}")
        (group,) = cluster.groups
        return replace(cluster, name=f"{hosts} x {cluster.name}", groups=(replace(group, hosts=hosts),))
    kind = devices[0].device_kind.lower()
    for word, preset in KINDS.items():
        if word in kind:
            cluster = cluster_from_text(preset)
            (group,) = cluster.groups
            torus = _torus(devices) if devices[0].platform == "tpu" else None
            if torus is not None:
                name = cluster.name if torus == cluster.torus else f"{group.device.name} {'x'.join(map(str, torus))}"
                group = replace(group, devices_per_host=len(devices))
                return replace(cluster, name=name, groups=(group,), torus=torus)
            hosts = max(1, len({d.process_index for d in devices}))
            per_host = max(1, len(devices) // hosts)
            return replace(cluster, groups=(replace(group, hosts=hosts, devices_per_host=per_host),), torus=None)
    raise ClusterError(
        f"no preset describes this device, {devices[0].device_kind!r}: pass cluster= a preset or a ClusterSpec file"
    )
