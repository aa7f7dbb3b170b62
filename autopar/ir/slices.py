"""TPU slices by the names that Google Cloud gives them: ``v5p-128`` (a number of TensorCores or of chips, as each
generation counts) or ``v5p-4x4x4`` (chips along each dimension).

Figures and topologies: Google Cloud's pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x", read in November
2026. Their interconnect figure is of all links of a chip, both directions: six links of slices of three dimensions,
four of those of two; one link's one direction is that over twice the links. Slices of three dimensions wrap in all of
them from one cube of 4x4x4 on, those of two where a dimension is the pod's 16 (MaxText's table of slices says the
same). Twisted tori are taken for plain ones.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from autopar.ir.cluster import ClusterSpec, DeviceSpec, HostGroup, LinkSpec, Torus, shape_text
from autopar.ir.errors import ClusterError

_ICI_LATENCY_S = 1e-6  # guessed: one hop
_CHIP_LATENCY_S = 5e-7  # guessed: between the halves of a chip
_NETWORK_LATENCY_S = 3e-5  # guessed: one step over TCP
_SMALL = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
"""Slices of three dimensions below one cube."""
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
"""All slices of two dimensions."""
_CUBE, _POD_SIDE = 4, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One of TPUs.

    Attributes:
        device: one device of JAX.
        link: one direction of a link between chips.
        network_bytes_per_s: a chip's share of the data-centre network.
        counted: what a name's number counts of each chip: its TensorCores, or 1.
        rank: dimensions of a slice.
        most: chips of the largest slice.
        source: of the figures.
        chip: between the devices of a chip; None where it is one.
    """

    device: DeviceSpec
    link: LinkSpec
    network_bytes_per_s: float
    counted: int
    rank: int
    most: int
    source: str
    chip: LinkSpec | None = None

    @property
    def devices_per_chip(self) -> int:
        """Devices of JAX."""
        return 1 if self.chip is None else 2


def _device(
    name: str, gib: float, usable_gib: float, memory_bytes_per_s: float, bfloat16: float, **others: float
) -> DeviceSpec:
    """float32 is the rate at JAX's default precision, bfloat16; usable is what the compiler says that there is, where a
    program needs more (libtpu 0.0.42; of a v4 twice what it says of a core)."""
    rates = {"float32": bfloat16, "bfloat16": bfloat16, **others}
    return DeviceSpec(
        name=name, memory_bytes=int(gib * 2**30), flops_per_s=tuple(sorted(rates.items())),
        memory_bytes_per_s=memory_bytes_per_s, reserved_bytes=int((gib - usable_gib) * 2**30),
    )  # fmt: skip


def _ici(gigabytes_per_s: float) -> LinkSpec:
    return LinkSpec(latency_s=_ICI_LATENCY_S, bytes_per_s=gigabytes_per_s * 1e9)


GENERATIONS = {
    "v4": Generation(
        device=_device("TPU-v4", 32, 30.5, 1.228e12, 275e12, int8=275e12),
        link=_ici(50), network_bytes_per_s=6.25e9, counted=2, rank=3, most=4096,
        source='Google Cloud, "TPU v4": ICI 300 GB/s a chip over six links; the network is a guess, 200 Gb/s a host',
    ),
    "v5e": Generation(
        device=_device("TPU-v5e", 16, 15.75, 819e9, 197e12, int8=394e12),
        link=_ici(50), network_bytes_per_s=3.125e9, counted=1, rank=2, most=256,
        source='Google Cloud, "TPU v5e": ICI 400 GB/s a chip over four links; network 6.4 Tb/s a pod of 256',
    ),
    "v5p": Generation(
        device=_device("TPU-v5p", 95, 95, 2.765e12, 459e12, int8=918e12),
        link=_ici(100), network_bytes_per_s=6.25e9, counted=2, rank=3, most=6144,
        source='Google Cloud, "TPU v5p": ICI 1200 GB/s a chip over six links; network 50 Gb/s a chip; 96 cubes a job',
    ),
    "v6e": Generation(
        device=_device("TPU-v6e", 32, 31.25, 1.638e12, 918e12, int8=1.836e15),
        link=_ici(100), network_bytes_per_s=12.5e9, counted=1, rank=2, most=256,
        source='Google Cloud, "TPU v6e": ICI 800 GB/s a chip over four links; network 25.6 Tb/s a pod of 256',
    ),
    "v7x": Generation(  # a chip is two devices; what joins them is six times as fast as a link between chips
        device=_device("TPU7x", 96, 94.75, 3.69e12, 1.1535e15, float8_e4m3fn=2.307e15, float8_e5m2=2.307e15),
        link=_ici(100), network_bytes_per_s=12.5e9, counted=2, rank=3, most=9216,
        chip=LinkSpec(latency_s=_CHIP_LATENCY_S, bytes_per_s=600e9),
        source='Google Cloud, "TPU7x (Ironwood)", halves of a chip: ICI 1200 GB/s a chip over six links; network '
        "100 Gb/s a chip",
    ),
}  # fmt: skip
"""By the name that a slice's begins with."""
_ALIASES = {"v5litepod": "v5e", "tpu7x": "v7x"}


TPU_KINDS = {"v4": "v4", "v5 lite": "v5e", "v5e": "v5e", "v5": "v5p", "v6": "v6e", "7x": "v7x", "v7": "v7x"}
"""What JAX's name of a kind of TPU holds, in lower case → its generation; the first that fits."""


def generation_of(device_name: str) -> str | None:
    """The generation whose device has that name; None where none has."""
    return next((word for word, of in GENERATIONS.items() if of.device.name == device_name), None)


def is_slice(name: str) -> bool:
    """Whether a cluster's name is meant as a slice's."""
    return _generation(name.partition("-")[0]) is not None and "-" in name


def _generation(word: str) -> str | None:
    word = _ALIASES.get(word, word)
    return word if word in GENERATIONS else None


def source_of(name: str) -> str:
    """Of a slice's figures."""
    known = _generation(name.partition("-")[0])
    assert known is not None
    return GENERATIONS[known].source


def slice_from_text(name: str, slices: int) -> ClusterSpec:
    """So many equal slices, which a data-centre network joins. Raises ClusterError where there is no such slice; the
    text names those that are near."""
    word, _, size = name.partition("-")
    known = _generation(word)
    assert known is not None
    return slices_of(known, _topology(known, size, name), slices, name)


def slices_of(
    generation: str, shape: tuple[int, ...], slices: int, name: str, host: tuple[int, ...] | None = None
) -> ClusterSpec:
    """``slices`` slices of so many chips along each dimension, in hosts of such blocks (None: as Google Cloud's)."""
    of, chips = GENERATIONS[generation], math.prod(shape)
    if host is None:
        host = shape if of.rank == 2 and chips <= 8 else (2, 2, 1)[: of.rank]
    hosts, rank3 = chips // math.prod(host), of.rank == 3
    wraps = tuple(not any(k % _CUBE for k in shape) if rank3 else n == _POD_SIDE for n in shape)
    network = LinkSpec(latency_s=_NETWORK_LATENCY_S, bytes_per_s=of.network_bytes_per_s * math.prod(host))
    group = HostGroup(
        hosts=hosts * slices, devices_per_host=math.prod(host) * of.devices_per_chip, device=of.device,
        intra_host=of.link, nics_per_host=1, nic=network, domain_hosts=hosts,
        torus=Torus(shape=shape, host=host, wraps=wraps, devices_per_chip=of.devices_per_chip, chip=of.chip),
    )  # fmt: skip
    cluster = ClusterSpec(name=name, groups=(group,))
    cluster.verify()
    return cluster


def slice_names(generation: str) -> list[str]:
    """The names of a generation's slices of usual sizes, by their numbers."""
    of = GENERATIONS[generation]
    return [f"{generation}-{of.counted * math.prod(shape)}" for shape in _usual(of)]


def _usual(of: Generation) -> list[tuple[int, ...]]:
    if of.rank == 2:
        return list(_FLAT)
    cubes = (shape for n in range(2 * 3, 15) if (shape := _cubic(2**n)) and 2**n <= of.most)
    return [*_SMALL, *cubes]


def _cubic(chips: int) -> tuple[int, ...] | None:
    """The topology of so many chips: cubes of 4x4x4, in a block as near to a cube as can be."""
    cubes, rest = divmod(chips, _CUBE**3)
    if rest or not cubes:
        return None
    thirds = [(a, b, cubes // a // b) for a in range(1, cubes + 1) if cubes % a == 0
              for b in range(a, cubes // a + 1) if cubes // a % b == 0 and cubes // a // b >= b]  # fmt: skip
    return tuple(_CUBE * n for n in min(thirds, key=sum))


def _topology(generation: str, size: str, name: str) -> tuple[int, ...]:
    of = GENERATIONS[generation]
    if re.fullmatch(r"[1-9][0-9]{0,5}", size):
        chips, rest = divmod(int(size), of.counted)
        small = {math.prod(shape): shape for shape in (_FLAT if of.rank == 2 else _SMALL)}
        found = small.get(chips) or (_cubic(chips) if of.rank == 3 else None)
        if found is not None and not rest and chips <= of.most:
            return found
        what = f"{size} {'TensorCores, two a chip' if of.counted == 2 else 'chips'}"
        near = _near(generation, int(size))
        raise ClusterError(f"cluster {name!r}: there is no {generation} slice of {what}; there are {near}")
    if not re.fullmatch(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){1,2}", size):
        example = slice_names(generation)[3]
        shape = shape_text(_usual(of)[3])
        raise ClusterError(f"cluster {name!r}: {size!r} is no size of a slice; write {example} or {generation}-{shape}")
    shape = tuple(map(int, size.split("x")))
    ordered = tuple(sorted(shape))
    if shape in (_FLAT if of.rank == 2 else _SMALL):
        return shape
    if of.rank == 3 and len(shape) == 3 and shape == ordered and not any(n % _CUBE for n in shape):
        if math.prod(shape) <= of.most:
            return shape
        raise ClusterError(f"cluster {name!r}: {math.prod(shape)} chips are more than the {of.most} of the largest "
                           f"{generation} slice; several are {generation}-…:2")  # fmt: skip
    what = (
        f"{', '.join(map(shape_text, _FLAT))}" if of.rank == 2
        else f"{', '.join(map(shape_text, _SMALL))}, and AxBxC with multiples of {_CUBE}, A ≤ B ≤ C"
    )  # fmt: skip
    raise ClusterError(f"cluster {name!r}: {generation} has no slice of {shape_text(shape)} chips; there are {what}")


def _near(generation: str, size: int) -> str:
    """Slices of about so many."""

    def number(name: str) -> int:
        return int(name.rpartition("-")[2])

    names = sorted(slice_names(generation), key=lambda name: abs(math.log(number(name) / size)))[:3]
    return ", ".join(sorted(names, key=number))
