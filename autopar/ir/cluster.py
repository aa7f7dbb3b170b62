"""Clusters and logical meshes: devices, their memory and rates, and the links between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from autopar.ir.errors import ClusterError

Platform: TypeAlias = Literal["cpu", "gpu", "tpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """A link, one direction: latency in seconds, bandwidth in bytes per second (both positive)."""

    latency_s: float
    bytes_per_s: float

    def verify(self) -> None:
        """Raises ClusterError unless both figures are positive and finite."""
        if not (0 < self.latency_s < math.inf and 0 < self.bytes_per_s < math.inf):
            raise ClusterError(f"link needs positive, finite latency_s and bytes_per_s, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One accelerator. ``flops_per_s``: (dtype name, FLOP/s of a large matrix product) sorted by name; a data sheet's
    peak in presets, measured in profiles. ``memory_bytes_per_s``: between memory and chip."""

    name: str
    memory_bytes: int
    flops_per_s: tuple[tuple[str, float], ...]
    memory_bytes_per_s: float

    @property
    def platform(self) -> Platform:
        """JAX's name of its platform. Presets' and profiles' names of devices say it: ``cpu``, ``TPU…``; GPUs have
        their own."""
        name = self.name.lower()
        return "cpu" if name == "cpu" else "tpu" if name.startswith("tpu") else "gpu"

    def peak_flops_per_s(self, dtype: str) -> float:
        """FLOP/s for ``dtype``; dtypes that are not listed have the float32 rate."""
        table = dict(self.flops_per_s)
        return table.get(dtype, table["float32"])

    def verify(self) -> None:
        """Raises ClusterError unless every figure is positive and float32 is listed."""
        if "float32" not in dict(self.flops_per_s):
            raise ClusterError(f"device {self.name}: flops_per_s needs float32")
        rates = (
            ("memory_bytes_per_s", self.memory_bytes_per_s),
            *((f"flops_per_s {t}", v) for t, v in self.flops_per_s),
        )
        for what, value in (("memory_bytes", self.memory_bytes), *rates):
            if not 0 < value < math.inf:
                raise ClusterError(f"device {self.name}: memory and rates must be positive; {what} is {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """``hosts`` equal hosts. ``nic`` is one NIC's link; a host has ``nics_per_host`` of them."""

    hosts: int
    devices_per_host: int
    device: DeviceSpec
    intra_host: LinkSpec
    nics_per_host: int
    nic: LinkSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Groups of equal hosts. ``between`` links hosts of different groups; ``torus`` is the shape of a
    TPU slice's torus, whose links are then ``intra_host`` per axis."""

    name: str
    groups: tuple[HostGroup, ...]
    between: LinkSpec | None = None
    torus: tuple[int, ...] | None = None

    @property
    def num_devices(self) -> int:
        """Devices in all groups."""
        return sum(g.hosts * g.devices_per_host for g in self.groups)

    @property
    def platform(self) -> Platform:
        """JAX's name of the platform that its devices are of."""
        return self.groups[0].device.platform

    def verify(self) -> None:
        """Raises ClusterError where a group is empty, a figure is not positive, several groups have no ``between``, or
        the torus has another number of devices than the groups."""
        if not self.groups:
            raise ClusterError(f"cluster {self.name} has no hosts")
        for number, g in enumerate(self.groups):
            where = f"cluster {self.name}, group {number}"
            if g.hosts < 1 or g.devices_per_host < 1 or g.nics_per_host < 1:
                raise ClusterError(
                    f"cluster {self.name}: hosts, devices_per_host and nics_per_host must be at least 1; group "
                    f"{number} has {g.hosts}, {g.devices_per_host} and {g.nics_per_host}"
                )
            for what, part in (("device", g.device), ("intra_host", g.intra_host), ("nic", g.nic)):
                _verify(part, f"{where}, {what}")
        if len(self.groups) > 1 and self.between is None:
            raise ClusterError(f"cluster {self.name}: several groups need a `between` link")
        if self.between is not None:
            _verify(self.between, f"cluster {self.name}, between")
        if self.torus is not None and (min(self.torus, default=0) < 1 or math.prod(self.torus) != self.num_devices):
            raise ClusterError(f"cluster {self.name}: torus {self.torus} does not hold {self.num_devices} devices")


def _verify(part: DeviceSpec | LinkSpec, where: str) -> None:
    """Verifies a part; the error says which it is."""
    try:
        part.verify()
    except ClusterError as fault:
        raise ClusterError(f"{where}: {fault}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """One axis of a logical mesh; ``link`` is what a ring along it sees per device, one direction."""

    name: str
    size: int
    link: LinkSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalMesh:
    """Devices as an array of any rank, row-major over ``device_ids``; axis names are unique."""

    axes: tuple[MeshAxis, ...]
    device_ids: tuple[int, ...]
    device: DeviceSpec

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis sizes."""
        return tuple(a.size for a in self.axes)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Axis names."""
        return tuple(a.name for a in self.axes)

    @property
    def num_devices(self) -> int:
        """Product of the axis sizes."""
        return math.prod(self.shape)

    def verify(self) -> None:
        """Raises ClusterError where axis names repeat, a size is below 1, or the sizes' product is not the number of
        devices."""
        if len(set(self.axis_names)) != len(self.axes):
            raise ClusterError(f"mesh axis names repeat: {self.axis_names}")
        if self.num_devices != len(self.device_ids) or any(a.size < 1 for a in self.axes):
            raise ClusterError(f"mesh of shape {self.shape} with {len(self.device_ids)} devices")

    def __str__(self) -> str:
        return "x".join(str(a.size) for a in self.axes) + f" ({', '.join(self.axis_names)})"
