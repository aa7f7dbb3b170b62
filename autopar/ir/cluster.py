"""Clusters and logical meshes: devices, their memory and rates, and the links between them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from autopar.ir.errors import ClusterError

Platform: TypeAlias = Literal["cpu", "gpu", "tpu"]


MAY_LACK = "may lack"
"""In a field's metadata where files may leave it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """A link, one direction.

    Attributes:
        latency_s: seconds before the first byte arrives; positive.
        bytes_per_s: bandwidth; positive.
        fabric: what `cost.collectives` knows collectives over such links by, which then take ``bytes_per_s`` for the
            data sheet's; "" where both figures are what a collective was measured to get.
    """

    latency_s: float
    bytes_per_s: float
    fabric: str = field(default="", metadata={MAY_LACK: True})

    def verify(self) -> None:
        """Raises ClusterError unless both figures are positive and finite."""
        if not (0 < self.latency_s < math.inf and 0 < self.bytes_per_s < math.inf):
            raise ClusterError(f"link needs positive, finite latency_s and bytes_per_s, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One accelerator.

    Attributes:
        name: presets' and profiles' names; it says the platform (`platform`).
        memory_bytes: all of its memory.
        flops_per_s: (dtype name, FLOP/s of a large matrix product) sorted by name, float32 among them; a data sheet's
            peak in presets, measured in profiles.
        memory_bytes_per_s: between memory and chip.
        reserved_bytes: of its memory, what programs cannot have.
    """

    name: str
    memory_bytes: int
    flops_per_s: tuple[tuple[str, float], ...]
    memory_bytes_per_s: float
    reserved_bytes: int = field(default=0, metadata={MAY_LACK: True})

    @property
    def usable_bytes(self) -> int:
        """The memory that programs can have, in bytes, which is a plan's limit where it is asked for none."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def platform(self) -> Platform:
        """JAX's name of its platform, ``cpu``, ``gpu`` or ``tpu``. The device's name says it (``cpu``, ``TPU…``); all
        others are GPUs."""
        name = self.name.lower()
        return "cpu" if name == "cpu" else "tpu" if name.startswith("tpu") else "gpu"

    def peak_flops_per_s(self, dtype: str) -> float:
        """FLOP/s of a large matrix product.

        Args:
            dtype: name of its operands' dtype; those that are not listed have the float32 rate.
        """
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
        if not 0 <= self.reserved_bytes < self.memory_bytes:
            raise ClusterError(f"device {self.name}: reserved_bytes is {self.reserved_bytes} of {self.memory_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Torus:
    """The chips of a TPU slice on a grid, neighbours joined by two `HostGroup.intra_host` links, one in each direction.

    Attributes:
        shape: chips along each dimension, as the coordinates of JAX's devices count.
        host: of them those of one host; hosts are numbered row-major over the slice, chips row-major within a host.
        wraps: dimensions whose last chip is joined to the first.
        devices_per_chip: devices of JAX that a chip is; they share its links.
        chip: between the devices of a chip; None where there is one.
    """

    shape: tuple[int, ...]
    host: tuple[int, ...]
    wraps: tuple[bool, ...]
    devices_per_chip: int = 1
    chip: LinkSpec | None = None

    @property
    def num_devices(self) -> int:
        """Devices of the slice."""
        return math.prod(self.shape) * self.devices_per_chip

    def verify(self) -> None:
        """Raises ClusterError where the dimensions' lists differ in length, a size is below 1, hosts do not fill the
        grid, two chips or fewer wrap, or ``chip`` contradicts ``devices_per_chip``."""
        if not len(self.shape) == len(self.host) == len(self.wraps) >= 1 or min(*self.shape, *self.host) < 1:
            raise ClusterError(
                f"shape, host and wraps need a figure of each dimension, sizes at least 1; they are "
                f"{list(self.shape)}, {list(self.host)} and {list(self.wraps)}"
            )
        if any(n % k for n, k in zip(self.shape, self.host, strict=True)):
            raise ClusterError(f"hosts of {shape_text(self.host)} chips do not fill {shape_text(self.shape)}")
        short = [n for n, wraps in zip(self.shape, self.wraps, strict=True) if wraps and n < 3]
        if short:
            raise ClusterError(f"a dimension of {short[0]} cannot wrap: its chips are neighbours already")
        if self.devices_per_chip < 1 or (self.devices_per_chip > 1) != (self.chip is not None):
            raise ClusterError(f"chips of {self.devices_per_chip} devices, with chip={self.chip}: the link is needed "
                               "where there are several, and only there")  # fmt: skip
        if self.chip is not None:
            _verify(self.chip, "chip")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """Equal hosts.

    Attributes:
        hosts: how many.
        devices_per_host: on each.
        device: what they are.
        intra_host: the link by which a domain's devices reach each other, one direction.
        nics_per_host: on each.
        nic: one NIC's link, one direction.
        domain_hosts: hosts that follow one another and are a *domain* (an NVLink domain, a TPU slice), whose devices
            need no NIC to reach each other.
        torus: how a domain's links lie, if they are a TPU slice's; None: each device has its own to a switch.
    """

    hosts: int
    devices_per_host: int
    device: DeviceSpec
    intra_host: LinkSpec
    nics_per_host: int
    nic: LinkSpec
    domain_hosts: int = 1
    torus: Torus | None = None

    @property
    def num_devices(self) -> int:
        """Devices of all its hosts."""
        return self.hosts * self.devices_per_host

    @property
    def domain_devices(self) -> int:
        """Devices of a domain."""
        return self.domain_hosts * self.devices_per_host

    @property
    def domain_bytes_per_s(self) -> float:
        """Bytes per second that a domain's NICs carry together, one direction."""
        return self.nic.bytes_per_s * self.nics_per_host * self.domain_hosts

    def verify(self) -> None:
        """Raises ClusterError where it is empty, a figure is not positive, its hosts do not fill its domains, or the
        torus holds another number of devices than a domain or a host."""
        counts = (self.hosts, self.devices_per_host, self.nics_per_host, self.domain_hosts)
        if min(counts) < 1:
            raise ClusterError(
                "hosts, devices_per_host, nics_per_host and domain_hosts must be at least 1; they are "
                f"{', '.join(map(str, counts[:3]))} and {counts[3]}"
            )
        for what, part in (("device", self.device), ("intra_host", self.intra_host), ("nic", self.nic)):
            _verify(part, what)
        if self.hosts % self.domain_hosts:
            raise ClusterError(f"{self.hosts} hosts do not fill domains of {self.domain_hosts}")
        if self.torus is None:
            return
        _verify(self.torus, "torus")
        for what, chips, devices in (
            ("torus", self.torus.shape, self.domain_devices), ("host of the torus", self.torus.host,
             self.devices_per_host),
        ):  # fmt: skip
            if math.prod(chips) * self.torus.devices_per_chip != devices:
                each = f" of {self.torus.devices_per_chip} devices" if self.torus.devices_per_chip > 1 else ""
                raise ClusterError(f"{what}: {shape_text(chips)} chips{each} do not hold {devices} devices")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """What plans are made for: groups of equal hosts.

    Attributes:
        name: shown in plans.
        groups: the hosts, of one kind in each group.
        between: the link between hosts of different groups; needed where there are several.
    """

    name: str
    groups: tuple[HostGroup, ...]
    between: LinkSpec | None = None

    @property
    def num_devices(self) -> int:
        """Devices in all groups."""
        return sum(g.num_devices for g in self.groups)

    @property
    def platform(self) -> Platform:
        """JAX's name of the platform that its devices are of, ``cpu``, ``gpu`` or ``tpu``."""
        return self.groups[0].device.platform

    def verify(self) -> None:
        """Raises ClusterError where there is no group, one is at fault (`HostGroup.verify`), or several have no
        ``between``."""
        if not self.groups:
            raise ClusterError(f"cluster {self.name} has no hosts")
        for number, group in enumerate(self.groups):
            _verify(group, f"cluster {self.name}, group {number}")
        if len(self.groups) > 1 and self.between is None:
            raise ClusterError(f"cluster {self.name}: several groups need a `between` link")
        if self.between is not None:
            _verify(self.between, f"cluster {self.name}, between")


def shape_text(shape: Iterable[int]) -> str:
    """Sizes as in 2x4."""
    return "x".join(map(str, shape))


def _verify(part: DeviceSpec | LinkSpec | Torus | HostGroup, where: str) -> None:
    """Verifies a part; the error says which it is."""
    try:
        part.verify()
    except ClusterError as fault:
        raise ClusterError(f"{where}: {fault}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """One axis of a logical mesh.

    Attributes:
        link: what a ring along it sees per device, one direction. Along a torus' rings, several of which a collective
            uses at once and both ways round: the one ring that is as fast as all of them.
        exchange: what an all-to-all along it sees; None where that is ``link``.
    """

    name: str
    size: int
    link: LinkSpec
    exchange: LinkSpec | None = None


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
        return shape_text(self.shape) + f" ({', '.join(self.axis_names)})"
