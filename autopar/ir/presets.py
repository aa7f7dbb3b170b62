"""Known clusters by name.

In: ``preset[:hosts]``, a TPU slice's name (`ir.slices`), or the path of a ClusterSpec in JSON. Out: a `ClusterSpec`.

Figures. FLOP rates, memory and link bandwidths are vendors' data sheets (`SOURCES`): dense peaks, not achieved rates;
links in one direction. The V100's rates and its NVLink are others' published measurements instead (sources beside
them), so that plans for ``p3.16xlarge`` can be compared with step times published for it. ``float32`` is what a float32
matrix product gets at JAX's default precision: TF32 on A100 and later. Memory is the data sheet's capacity in decimal
GB; the gap to binary units is about what the driver and collective buffers take. Latencies are guesses of one step of a
collective (no vendor states them); so are the CPU's figures, of the order of a laptop core each.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import replace

from autopar.ir import files
from autopar.ir.cluster import ClusterSpec, DeviceSpec, HostGroup, LinkSpec
from autopar.ir.errors import ClusterError, PlanFormatError
from autopar.ir.serde import from_json
from autopar.ir.slices import GENERATIONS, is_slice, slice_from_text, source_of

_NVLINK_LATENCY_S = 3e-6  # guessed: one step of a NCCL ring
_NIC_LATENCY_S = 8e-6  # one step of a ring over InfiniBand (NCCL's tuning constants, its issue 1334)
_ETHERNET_LATENCY_S = 3e-5  # two steps, as a small all-reduce of two p5 hosts takes 69 μs (AWS' nccl-tests)
_PCIE_LATENCY_S = 8e-6  # guessed: one step through the host's memory
_CPU_LATENCY_S = 2e-5  # guessed: a rendezvous of threads


def _rates(**flops_per_s: float) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(flops_per_s.items()))


# Achieved, not peak. Peaks (data sheet): float64 7.8, float32 15.7, float16 125 TFLOP/s, 900 GB/s.
# float32, float16: matrix products of size 8192 in PyTorch 2.7 on a V100-SXM2-16GB, 14.38 and 97.36 TFLOP/s
#   (github.com/zzc0721/torch-performance-test-data, issue 140); 14 and 95 in github.com/mli/transformers-benchmarks,
#   README. Products of size 1024 reach 10.6 and 57. bfloat16 has no unit and takes the float32 rate.
# float64, memory: a loop of multiply-adds and a saxpy of 200 Mi elements on a V100-SXM2-32GB, 7.7 TFLOP/s and
#   810 GB/s (github.com/pc2/GPUInspector.jl, docs/src/devices/v100_sxm2.md).
_V100 = DeviceSpec(
    name="V100-SXM2-16GB",
    memory_bytes=16_000_000_000,
    flops_per_s=_rates(float64=7.7e12, float32=14.4e12, float16=97.4e12),
    memory_bytes_per_s=810e9,
)
# A V100 has six NVLinks of 25 GB/s a direction. NCCL counts on 20 GB/s of each in a ring (its src/graph/topo.h,
# SM70_NVLINK_BW); plain copies over two reach 48.3 GB/s (GPUInspector.jl, as above). All six carry a ring through
# the eight devices of a host; in the hybrid cube mesh a ring through four has four of them and a pair one or two,
# which one figure for all cannot say: for those this is too fast.
_V100_RING_BYTES_PER_S = 6 * 20e9
_A100 = DeviceSpec(
    name="A100-SXM4-80GB",
    memory_bytes=80_000_000_000,
    flops_per_s=_rates(float64=19.5e12, float32=156e12, float16=312e12, bfloat16=312e12, int8=624e12),
    memory_bytes_per_s=2.039e12,
)
_H100 = DeviceSpec(
    name="H100-SXM5-80GB",
    memory_bytes=80_000_000_000,
    flops_per_s=_rates(
        float64=66.9e12,
        float32=494.7e12,
        float16=989.4e12,
        bfloat16=989.4e12,
        int8=1978.9e12,
        float8_e4m3fn=1978.9e12,
        float8_e5m2=1978.9e12,
    ),
    memory_bytes_per_s=3.35e12,
)
_A100_40 = replace(_A100, name="A100-SXM4-40GB", memory_bytes=40_000_000_000, memory_bytes_per_s=1.555e12)
_H200 = replace(_H100, name="H200-SXM5-141GB", memory_bytes=141_000_000_000, memory_bytes_per_s=4.8e12)
_B200 = DeviceSpec(
    name="B200-180GB",
    memory_bytes=180_000_000_000,
    flops_per_s=_rates(
        float64=37e12,
        float32=1.125e15,
        float16=2.25e15,
        bfloat16=2.25e15,
        int8=4.5e15,
        float8_e4m3fn=4.5e15,
        float8_e5m2=4.5e15,
    ),
    memory_bytes_per_s=8e12,
)
_GB200 = DeviceSpec(  # a rack's figures over its 72
    name="GB200-186GB",
    memory_bytes=186_000_000_000,
    flops_per_s=_rates(
        float64=40e12,
        float32=1.25e15,
        float16=2.5e15,
        bfloat16=2.5e15,
        int8=5e15,
        float8_e4m3fn=5e15,
        float8_e5m2=5e15,
    ),
    memory_bytes_per_s=8e12,
)
_A10G = DeviceSpec(
    name="A10G-24GB",
    memory_bytes=24_000_000_000,
    flops_per_s=_rates(float64=0.55e12, float32=35e12, float16=70e12, bfloat16=70e12, int8=140e12),
    memory_bytes_per_s=600e9,
)
_L4 = DeviceSpec(
    name="L4-24GB",
    memory_bytes=24_000_000_000,
    flops_per_s=_rates(
        float64=0.49e12,
        float32=60e12,
        float16=121e12,
        bfloat16=121e12,
        int8=242e12,
        float8_e4m3fn=242e12,
        float8_e5m2=242e12,
    ),
    memory_bytes_per_s=300e9,
)
_L40S = DeviceSpec(
    name="L40S-48GB",
    memory_bytes=48_000_000_000,
    flops_per_s=_rates(
        float64=1.43e12,
        float32=183e12,
        float16=362e12,
        bfloat16=362e12,
        int8=733e12,
        float8_e4m3fn=733e12,
        float8_e5m2=733e12,
    ),
    memory_bytes_per_s=864e9,
)
_CPU = DeviceSpec(
    name="cpu",
    memory_bytes=4 * 2**30,
    flops_per_s=_rates(float64=1e10, float32=2e10),
    memory_bytes_per_s=5e9,
)


GPU_REPORTED = 1.065
"""Bytes that drivers report, of a data sheet's: 81,559 MiB of an H100's 80 GB, 40,960 of an A100's 40, 143,771 of an
H200's 141 (nvidia-smi)."""
GPU_USABLE = 0.9 * GPU_REPORTED
"""Of a data sheet's memory, what XLA has where it may have nine tenths of what there is, as recipes have it
(``XLA_PYTHON_CLIENT_MEM_FRACTION=0.9``; JAX's default is `JAX_FRACTION`): the rest is the context's and the
libraries'."""
JAX_FRACTION = 0.75


def _servers(
    device: DeviceSpec, link_bytes_per_s: float, nics: int, nic: LinkSpec, fabric: str = "", *, devices: int = 8,
    hosts: int = 1, latency_s: float = _NVLINK_LATENCY_S,
) -> ClusterSpec:  # fmt: skip
    """One domain of ``hosts``, joined by such links."""
    if device.platform == "gpu":
        device = replace(device, reserved_bytes=round((1 - GPU_USABLE) * device.memory_bytes))
    intra = LinkSpec(latency_s=latency_s, bytes_per_s=link_bytes_per_s, fabric=fabric)
    group = HostGroup(
        hosts=hosts, devices_per_host=devices, device=device, intra_host=intra, nics_per_host=nics, nic=nic,
        domain_hosts=hosts,
    )  # fmt: skip
    return ClusterSpec(name="", groups=(group,))


def _pcie(device: DeviceSpec, nics: int, nic: LinkSpec) -> ClusterSpec:
    """Eight devices with 16 lanes of PCIe 4.0 each; what goes from one to another passes the host's memory."""
    return _servers(device, 32e9, nics, nic, "pcie", latency_s=_PCIE_LATENCY_S)


def _infiniband(gigabits_per_s: float) -> LinkSpec:
    return LinkSpec(latency_s=_NIC_LATENCY_S, bytes_per_s=gigabits_per_s * 1e9 / 8, fabric="ib")


def _ethernet(gigabits_per_s: float, fabric: str = "ethernet") -> LinkSpec:
    return LinkSpec(latency_s=_ETHERNET_LATENCY_S, bytes_per_s=gigabits_per_s * 1e9 / 8, fabric=fabric)


PRESETS: dict[str, ClusterSpec] = {
    "cpu": _servers(_CPU, 2e9, 1, _ethernet(25), latency_s=_CPU_LATENCY_S),
    "p3.16xlarge": _servers(_V100, _V100_RING_BYTES_PER_S, 1, _ethernet(25)),
    "p4d.24xlarge": _servers(_A100_40, 300e9, 4, _ethernet(100, "efa-p4"), "nvlink3"),
    "p4de.24xlarge": _servers(_A100, 300e9, 4, _ethernet(100, "efa-p4"), "nvlink3"),
    "p5.48xlarge": _servers(_H100, 450e9, 8, _ethernet(400), "nvlink4"),
    "p5en.48xlarge": _servers(_H200, 450e9, 8, _ethernet(400), "nvlink4"),
    "a3-highgpu-8g": _servers(_H100, 450e9, 4, _ethernet(200, "tcpx"), "nvlink4"),
    "a3-megagpu-8g": _servers(_H100, 450e9, 8, _ethernet(200, "tcpx"), "nvlink4"),
    "a3-ultragpu-8g": _servers(_H200, 450e9, 8, _infiniband(400), "nvlink4"),
    "a4-highgpu-8g": _servers(_B200, 900e9, 8, _infiniband(400), "nvlink5"),
    "g5.48xlarge": _pcie(_A10G, 1, _ethernet(100)),
    "g6.48xlarge": _pcie(_L4, 1, _ethernet(100)),
    "g6e.48xlarge": _pcie(_L40S, 4, _ethernet(100)),
    "dgx-a100": _servers(_A100, 300e9, 8, _infiniband(200), "nvlink3"),
    "dgx-a100-40": _servers(_A100_40, 300e9, 8, _infiniband(200), "nvlink3"),
    "dgx-h100": _servers(_H100, 450e9, 8, _infiniband(400), "nvlink4"),
    "dgx-h200": _servers(_H200, 450e9, 8, _infiniband(400), "nvlink4"),
    "dgx-b200": _servers(_B200, 900e9, 8, _infiniband(400), "nvlink5"),
    "gb200-nvl72": _servers(_GB200, 900e9, 4, _infiniband(400), "nvlink5-72", devices=4, hosts=18),
}
"""One host of each kind (of GB200 one rack, a domain of 18), by name. `cluster_from_text` multiplies them."""

_AWS, _GOOGLE = "AWS EC2 instance types, accelerated computing", "Google Cloud GPU machine types"
SOURCES = {
    "cpu": "guesses, of the order of a laptop core each",
    "p3.16xlarge": f"V100: measurements of others (named in ir/presets.py); {_AWS}: 25 Gb/s, the line rate",
    "p4d.24xlarge": f"NVIDIA A100 40 GB data sheet; {_AWS}: 4 x 100 Gb/s EFA",
    "p4de.24xlarge": f"NVIDIA A100 80 GB data sheet; {_AWS}: 4 x 100 Gb/s EFA",
    "p5.48xlarge": f"NVIDIA H100 SXM data sheet; {_AWS}: 3200 Gb/s EFA, 400 a GPU",
    "p5en.48xlarge": f"NVIDIA H200 data sheet; {_AWS}: 3200 Gb/s EFA, 400 a GPU",
    "a3-highgpu-8g": f"NVIDIA H100 SXM data sheet; {_GOOGLE}: 4 x 200 Gb/s for GPUs",
    "a3-megagpu-8g": f"NVIDIA H100 SXM data sheet; {_GOOGLE}: 8 x 200 Gb/s for GPUs",
    "a3-ultragpu-8g": f"NVIDIA H200 data sheet; {_GOOGLE}: 8 x 400 Gb/s RoCE",
    "a4-highgpu-8g": f"NVIDIA DGX B200 data sheet; {_GOOGLE}: 8 x 400 Gb/s RoCE",
    "g5.48xlarge": f"NVIDIA A10G (AWS's variant of the A10): 70 TFLOP/s bfloat16; PCIe 4.0 x16; {_AWS}: 100 Gb/s",
    "g6.48xlarge": f"NVIDIA L4 data sheet, without sparsity; PCIe 4.0 x16; {_AWS}: 100 Gb/s",
    "g6e.48xlarge": f"NVIDIA L40S data sheet, without sparsity; PCIe 4.0 x16; {_AWS}: 400 Gb/s",
    "dgx-a100": "NVIDIA DGX A100 80 GB data sheet: NVLink 600 GB/s both ways, 8 x 200 Gb/s",
    "dgx-a100-40": "NVIDIA DGX A100 40 GB data sheet: NVLink 600 GB/s both ways, 8 x 200 Gb/s",
    "dgx-h100": "NVIDIA DGX H100 data sheet: NVLink 900 GB/s both ways, 8 x 400 Gb/s",
    "dgx-h200": "NVIDIA DGX H200 data sheet: NVLink 900 GB/s both ways, 8 x 400 Gb/s",
    "dgx-b200": "NVIDIA DGX B200 data sheet: NVLink 1800 GB/s both ways, 8 x 400 Gb/s",
    "gb200-nvl72": "NVIDIA GB200 NVL72 data sheet, a 72nd, no sparsity: 13.4 TB, 576 TB/s; 4 x 400 Gb/s a tray",
}
"""Where a preset's figures are from; those of TPU slices: `ir.slices`."""

KINDS = {
    "v100": "p3.16xlarge",
    "a100-sxm4-40gb": "dgx-a100-40",
    "a100": "dgx-a100",
    "h100": "dgx-h100",
    "h200": "dgx-h200",
    "gb200": "gb200-nvl72",
    "b200": "dgx-b200",
    "a10g": "g5.48xlarge",
    "l40s": "g6e.48xlarge",
    "l4": "g6.48xlarge",
}
"""What JAX's name of a kind of GPU holds, in lower case → its preset; the first that fits."""

_KNOWN = (
    f"cpu[:devices]; hosts {', '.join(name for name in PRESETS if name != 'cpu')}, each [:count]; TPU slices "
    f"{', '.join(f'{generation}-N' for generation in GENERATIONS)} (v5p-128, v5p-4x4x4), each [:count]"
)


def cluster_from_text(text: str) -> ClusterSpec:
    """The cluster that a text names.

    Args:
        text: ``preset[:hosts]``, ``cpu[:devices]``, ``v5p-128[:slices]``, several of these with ``+`` between them
            (unequal hosts, joined by their slower NICs), or a ClusterSpec file (``….json``).

    Returns:
        The cluster, verified.

    Raises:
        ClusterError: nothing has that name (lists the presets), the file cannot be read or is none, or parts are of
            several platforms.
    """
    if text.endswith(".json") or os.sep in text:
        return cluster_from_file(text)
    parts = [_named(part, text) for part in text.split("+")]
    groups = tuple(group for part in parts for group in part.groups)
    between = None if len(groups) == 1 else LinkSpec(
        latency_s=max(g.nic.latency_s for g in groups), bytes_per_s=min(g.nic.bytes_per_s for g in groups)
    )  # fmt: skip
    cluster = ClusterSpec(name=text, groups=groups, between=between)
    if len({cluster.platform, *(g.device.platform for g in groups)}) > 1:
        raise ClusterError(f"cluster {text!r}: one program has devices of one platform; these are of several")
    cluster.verify()
    return cluster


def sources(text: str) -> list[tuple[str, str]]:
    """(preset or slice, where its figures are from) of each part of a cluster's name; of a file nothing is known."""
    if text.endswith(".json") or os.sep in text:
        return []
    names = [part.partition(":")[0] for part in text.split("+")]
    return [(name, source_of(name) if is_slice(name) else SOURCES[name]) for name in dict.fromkeys(names)]


def _named(name: str, text: str) -> ClusterSpec:
    """A preset, so many times."""
    preset, colon, count_text = name.partition(":")
    many = "slices" if is_slice(preset) else "devices" if preset == "cpu" else "hosts"
    if preset not in PRESETS and not is_slice(preset):
        near = difflib.get_close_matches(preset, PRESETS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ClusterError(f"unknown cluster {text!r}{hint}: known are {_KNOWN}, or a ClusterSpec file (*.json)")
    if colon and not re.fullmatch(r"[1-9][0-9]{0,6}", count_text):
        some = f"a number of {many} up to 9,999,999"
        raise ClusterError(f"cluster {text!r}: {count_text!r} is not {some}; write {preset}:2, say")
    count = int(count_text) if colon else None
    if many == "slices":
        return slice_from_text(preset, count or 1)
    (group,) = PRESETS[preset].groups
    if many == "devices":
        return ClusterSpec(name=name, groups=(replace(group, devices_per_host=count or group.devices_per_host),))
    return ClusterSpec(name=name, groups=(replace(group, hosts=(count or 1) * group.domain_hosts),))


def cluster_from_file(path: str | os.PathLike[str]) -> ClusterSpec:
    """The ClusterSpec in a JSON file.

    Args:
        path: of the file, as ``autopar profile``, ``autopar cluster spec`` or `serde.to_json` wrote it.

    Returns:
        The cluster, verified.

    Raises:
        ClusterError: the file cannot be read, or is none.
    """
    try:
        text = files.read_text(path)
        if text.lstrip().startswith("{") and '"schema_version"' in text[:200]:
            raise ClusterError(f"cluster file {os.fspath(path)}: is a plan; a ClusterSpec is expected")
        cluster = from_json(ClusterSpec, text)
    except OSError as fault:
        raise ClusterError(f"cluster file {os.fspath(path)}: {fault.strerror or fault}. Presets: {_KNOWN}") from fault
    except (PlanFormatError, files.DamagedError) as fault:
        raise ClusterError(f"cluster file {os.fspath(path)}: {fault}") from None
    cluster.verify()
    return cluster
