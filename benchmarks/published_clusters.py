"""The cluster of a published run: a `ClusterSpec` of a `Case`'s hardware, devices and what its row says of the network.

Devices are the presets' (`ir.presets`, `ir.slices`) where there is one; those that have none are here, with their
source. A row's text says NICs of a host in one of a few ways (`network`); where it gives no figure, hosts have the
NICs of the preset that the hardware is sold in.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from autopar.ir.cluster import ClusterSpec, DeviceSpec, HostGroup, LinkSpec, Torus
from autopar.ir.errors import ClusterError
from autopar.ir.presets import PRESETS
from autopar.ir.slices import slice_from_text, slices_of
from benchmarks.published_rows import Case, RowError


def _group(preset: str) -> HostGroup:
    (group,) = PRESETS[preset].groups
    return group


_H100, _B200, _GB200 = _group("dgx-h100"), _group("dgx-b200"), _group("gb200-nvl72")


def _rates(tera_flops: float, float8: float) -> tuple[tuple[str, float], ...]:
    dense = {"float32": tera_flops / 2, "float16": tera_flops, "bfloat16": tera_flops, "float8_e4m3fn": float8}
    return tuple(sorted((name, 1e12 * rate) for name, rate in (dense | {"float8_e5m2": float8}).items()))


_CAPPED = 0.78
"""Of an H100's rates, what one of 500 W keeps up of 700 (fitted on three runs)."""
_H100_HBM2E = replace(
    _H100.device, name="H100-SXM5-96GB", memory_bytes=96_000_000_000, memory_bytes_per_s=2.4e12,
    flops_per_s=tuple((name, _CAPPED * rate) for name, rate in _H100.device.flops_per_s),
)  # fmt: skip
"""torchtitan's: HBM2e, 500 W. The bandwidth is a guess: five stacks of HBM2e."""
_B300 = DeviceSpec(
    name="B300-270GB", memory_bytes=270_000_000_000, flops_per_s=_rates(2250, 4500), memory_bytes_per_s=8e12
)
"""NVIDIA DGX B300 data sheet: 2.1 TB, 36 PFLOP/s of float8 dense on eight; 8 x 800 Gb/s."""
_GB300 = DeviceSpec(
    name="GB300-279GB", memory_bytes=279_000_000_000, flops_per_s=_rates(2500, 5000), memory_bytes_per_s=8e12
)
"""NVIDIA GB300 NVL72 data sheet, a 72nd: 20 TB, 360 PFLOP/s of float8 dense, 576 TB/s; 800 Gb/s a GPU."""
_V100_32 = replace(_group("p3.16xlarge").device, name="V100-SXM2-32GB", memory_bytes=32_000_000_000)
_NVLINK2 = LinkSpec(latency_s=3e-6, bytes_per_s=6 * 20e9)
"""Four V100 of a host: six links each, as the preset counts them."""

TENSOR_HIDDEN = 0.75
"""Of tensor-parallel collectives, what runs beside products where a framework has them do so (fitted)."""

OMNI_PATH = 0.25
"""Of an Omni-Path NIC's rate, what NCCL's rings get (fitted on BLOOM's runs: of layouts that differ in their stages,
those with more gradients a device were predicted 8 to 30 % too fast)."""

GPUS: dict[str, HostGroup] = {
    "A100_40GB": _group("dgx-a100-40"),
    "A100_80GB": _group("dgx-a100"),
    "H100_SXM": _H100,
    "H100_500W_HBM2e": replace(_H100, device=_H100_HBM2E),
    "H200_SXM": _group("dgx-h200"),
    "B200": _B200,
    "B300": replace(_B200, device=_B300, nic=replace(_B200.nic, bytes_per_s=1e11)),
    "GB200": _GB200,
    "GB300": replace(_GB200, device=_GB300, nic=replace(_GB200.nic, bytes_per_s=1e11)),
    "V100_SXM2_32GB": replace(_group("p3.16xlarge"), device=_V100_32, intra_host=_NVLINK2),
}
"""``hw_key`` → a host as it is sold."""
SLICES = {"TPU_v4": "v4", "TPU_v5e": "v5e", "TPU_v5p": "v5p", "TPU_v6e": "v6e", "TPU_v7x": "v7x"}
_V3 = DeviceSpec(
    name="TPU-v3", memory_bytes=16 * 2**30, flops_per_s=(("bfloat16", 61.5e12), ("float32", 61.5e12)),
    memory_bytes_per_s=450e9,
)  # fmt: skip
"""A core. Jouppi et al., "A domain-specific supercomputer for training deep neural networks", CACM 2020: 123 TFLOP/s,
32 GiB and 900 GB/s a chip of two cores, four links of 656 Gb/s."""
_V3_LINK = LinkSpec(latency_s=1e-6, bytes_per_s=82e9)
_V3_CHIP = LinkSpec(latency_s=5e-7, bytes_per_s=82e9)
"""Between the cores of a chip: a guess."""
_SLICE_CHIPS = {"TPU_v5e": 256, "TPU_v6e": 256}
"""Chips of the largest slice."""


def cluster_of(case: Case) -> ClusterSpec:
    """The cluster. Raises RowError for hardware that is not known here."""
    if case.hardware == "TPU_v3":
        return _v3(case)
    if case.hardware in SLICES:
        return _slices(case)
    if case.hardware not in GPUS:
        raise RowError(f"hardware {case.hardware!r} is not known; there are {', '.join((*GPUS, 'TPU_v3', *SLICES))}")
    group, per_host = GPUS[case.hardware], case.devices_per_host
    hosts, rest = divmod(case.devices, per_host)
    if rest:
        raise RowError(f"hosts of {per_host} do not hold {case.devices} devices")
    nics, gigabits = network(case.interconnect, group, per_host)
    domain = max(n for n in range(1, group.domain_hosts + 1) if hosts % n == 0)
    share = OMNI_PATH if "omni-path" in case.interconnect.lower() else 1.0
    nic = replace(group.nic, bytes_per_s=share * gigabits * 1e9 / 8)
    if case.tensor_overlaps:  # what shows of its collectives is as of faster links
        faster = group.intra_host.bytes_per_s / (1 - TENSOR_HIDDEN)
        group = replace(group, intra_host=replace(group.intra_host, bytes_per_s=faster))
    made = replace(
        group, hosts=hosts, devices_per_host=per_host, nics_per_host=nics, nic=nic, domain_hosts=domain, torus=None
    )
    return ClusterSpec(name=f"{case.hardware}:{hosts}x{per_host}", groups=(made,))


def network(said: str, group: HostGroup, per_host: int) -> tuple[int, float]:
    """(NICs of a host, Gb/s of each) of a row's text, ``group``'s where it has no figure."""
    usual = max(1, group.nics_per_host * per_host // group.devices_per_host), group.nic.bytes_per_s * 8 / 1e9
    low = said.lower().replace("hdr", "200gb/s").replace("ndr", "400gb/s")
    if found := re.search(r"(\d+)x (?:omni-path )?(\d+)gb/?p?s", low) or re.search(r"(\d+)x(\d+)gb/?p?s", low):
        return int(found[1]), float(found[2])
    if found := re.search(r"(\d+)gb/?p?s nics x(\d+)", low):
        return int(found[2]), float(found[1])
    if found := re.search(r"(\d+)gb/?p?s[^;,]*per (?:8-gpu )?(gpu|node|host)", low):
        each = float(found[1])
        return (per_host, each) if found[2] == "gpu" else (usual[0], each / usual[0])
    if "omni-path" in low:
        return 4, 100.0
    if found := re.search(r"(?<!\d)([24]00)gb/s", low):
        return usual[0], float(found[1])
    return usual


def _slices(case: Case) -> ClusterSpec:
    """TPU slices: as many as there are replicas of a sharded model, of at most the largest size."""
    generation = SLICES[case.hardware]
    chips = case.devices // (2 if generation == "v7x" else 1)
    slices = case.data // case.shard if case.zero == 3 else 1
    most = _SLICE_CHIPS.get(case.hardware, chips)
    slices = max(slices, -(-chips // most))
    while chips % slices:
        slices += 1
    each = chips // slices
    counted = 1 if generation in ("v5e", "v6e") else 2
    try:
        return slice_from_text(f"{generation}-{counted * each}", slices)
    except ClusterError:
        shape = _torus(each, 2 if counted == 1 else 3)
        if shape is None:
            raise RowError(f"no {generation} slice of {each} chips") from None
        return slices_of(generation, shape, slices, f"{generation}-{'x'.join(map(str, shape))}:{slices}")


def _torus(chips: int, rank: int) -> tuple[int, ...] | None:
    """The nearest to a cube, or a square, of so many chips whose sides are multiples of 4; None where there is none."""
    sides = [n for n in range(4, chips + 1, 4) if chips % n == 0]
    if rank == 2:
        found = [(a, chips // a) for a in sides if chips // a in sides and a <= chips // a]
    else:
        found = [(a, b, chips // a // b) for a in sides for b in sides if chips % (a * b) == 0 and a <= b
                 and chips // a // b in sides and b <= chips // a // b]  # fmt: skip
    return min(found, key=lambda shape: shape[-1], default=None)


def _v3(case: Case) -> ClusterSpec:
    shape = _torus(case.devices // 2, 2)
    if shape is None:
        raise RowError(f"no v3 slice of {case.devices // 2} chips")
    torus = Torus(shape=shape, host=(2, 2), wraps=tuple(n == 32 for n in shape), devices_per_chip=2, chip=_V3_CHIP)
    hosts = math.prod(shape) // 4
    group = HostGroup(
        hosts=hosts, devices_per_host=8, device=_V3, intra_host=_V3_LINK, nics_per_host=1,
        nic=LinkSpec(latency_s=3e-5, bytes_per_s=1.25e10), domain_hosts=hosts, torus=torus,
    )  # fmt: skip
    return ClusterSpec(name=f"v3-{case.devices}", groups=(group,))
