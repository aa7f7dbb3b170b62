"""Known clusters, and the logical meshes that can be laid over one.

In: ``preset[:hosts]`` or the path of a ClusterSpec in JSON. Out: a `ClusterSpec`; and from it and a shape,
a `LogicalMesh` whose axes carry the link that a ring along them sees.

Figures. FLOP rates, memory and link bandwidths are vendors' data sheets (NVIDIA V100, A100, H100, H200, DGX B200;
Google Cloud TPU v4, v5e, v5p system architecture): dense peaks, not achieved rates; links in one direction. The
V100's rates and its NVLink are others' published measurements instead (sources beside them), so that plans for
``p3.16xlarge`` can be compared with step times published for it. ``float32`` is what a float32 matrix product gets at
JAX's default precision: TF32 on A100 and later, bfloat16 on TPU. Memory is the data sheet's capacity in decimal GB
for NVIDIA; the gap to binary units is about what the driver and collective buffers take. Latencies are guesses of one
step of a collective (no vendor states them); so are the CPU's figures, of the order of a laptop core each.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace

from autopar.ir import files
from autopar.ir.cluster import ClusterSpec, DeviceSpec, HostGroup, LinkSpec, LogicalMesh, MeshAxis
from autopar.ir.errors import ClusterError, PlanFormatError
from autopar.ir.serde import from_json

_NVLINK_LATENCY_S = 3e-6  # guessed: one step of a NCCL ring
_NIC_LATENCY_S = 1e-5  # guessed: one step over InfiniBand
_ETHERNET_LATENCY_S = 3e-5  # guessed: one step over TCP
_ICI_LATENCY_S = 1e-6  # guessed: one hop of a TPU torus
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
_V4 = DeviceSpec(
    name="TPU-v4",
    memory_bytes=32 * 2**30,
    flops_per_s=_rates(float32=275e12, bfloat16=275e12, int8=275e12),
    memory_bytes_per_s=1.228e12,
)
_V5E = DeviceSpec(
    name="TPU-v5e",
    memory_bytes=16 * 2**30,
    flops_per_s=_rates(float32=197e12, bfloat16=197e12, int8=394e12),
    memory_bytes_per_s=819e9,
)
_V5P = DeviceSpec(
    name="TPU-v5p",
    memory_bytes=95 * 2**30,
    flops_per_s=_rates(float32=459e12, bfloat16=459e12, int8=918e12),
    memory_bytes_per_s=2.765e12,
)
_CPU = DeviceSpec(
    name="cpu",
    memory_bytes=4 * 2**30,
    flops_per_s=_rates(float64=1e10, float32=2e10),
    memory_bytes_per_s=5e9,
)


def _server(device: DeviceSpec, link_bytes_per_s: float, nics: int, nic: LinkSpec) -> ClusterSpec:
    intra = LinkSpec(latency_s=_NVLINK_LATENCY_S, bytes_per_s=link_bytes_per_s)
    group = HostGroup(hosts=1, devices_per_host=8, device=device, intra_host=intra, nics_per_host=nics, nic=nic)
    return ClusterSpec(name="", groups=(group,))


def _slice(device: DeviceSpec, torus: tuple[int, ...], ici_bytes_per_s: float, host_bytes_per_s: float) -> ClusterSpec:
    intra = LinkSpec(latency_s=_ICI_LATENCY_S, bytes_per_s=ici_bytes_per_s)
    nic = LinkSpec(latency_s=_ETHERNET_LATENCY_S, bytes_per_s=host_bytes_per_s)
    group = HostGroup(
        hosts=1, devices_per_host=math.prod(torus), device=device, intra_host=intra, nics_per_host=1, nic=nic
    )
    return ClusterSpec(name="", groups=(group,), torus=torus)


def _infiniband(gigabits_per_s: float) -> LinkSpec:
    return LinkSpec(latency_s=_NIC_LATENCY_S, bytes_per_s=gigabits_per_s * 1e9 / 8)


_ETHERNET_25G = LinkSpec(latency_s=_ETHERNET_LATENCY_S, bytes_per_s=25e9 / 8)
_CPU_LINK = LinkSpec(latency_s=_CPU_LATENCY_S, bytes_per_s=2e9)

PRESETS: dict[str, ClusterSpec] = {
    "cpu": ClusterSpec(
        name="",
        groups=(
            HostGroup(
                hosts=1, devices_per_host=8, device=_CPU, intra_host=_CPU_LINK, nics_per_host=1, nic=_ETHERNET_25G
            ),
        ),
    ),
    "p3.16xlarge": _server(_V100, _V100_RING_BYTES_PER_S, 1, _ETHERNET_25G),  # the NIC's line rate; not measured
    "dgx-a100": _server(_A100, 300e9, 8, _infiniband(200)),
    "dgx-h100": _server(_H100, 450e9, 8, _infiniband(400)),
    "dgx-h200": _server(_H200, 450e9, 8, _infiniband(400)),
    "dgx-b200": _server(_B200, 900e9, 8, _infiniband(400)),
    # Per torus link and direction; a v4 or v5p "-8" counts cores, two to a JAX device. The host's share of
    # the data-centre network is 200 Gb/s (guessed for v4).
    "v4-8": _slice(_V4, (2, 2), 50e9, 25e9),
    "v5e-8": _slice(_V5E, (2, 4), 50e9, 25e9),
    "v5p-8": _slice(_V5P, (2, 2), 100e9, 25e9),
}
"""One host of each kind (TPU: one slice), by name. `cluster_from_text` multiplies them."""

KINDS = {
    "v100": "p3.16xlarge",
    "a100": "dgx-a100",
    "h100": "dgx-h100",
    "h200": "dgx-h200",
    "b200": "dgx-b200",
    "v4": "v4-8",
    "v5 lite": "v5e-8",
    "v5": "v5p-8",
}
"""What JAX's name of a kind of device holds, in lower case → its preset; the first that fits."""


def _written(name: str, preset: ClusterSpec) -> str:
    """How the preset is named on a command line."""
    return name if preset.torus is not None else f"{name}[:{'devices' if name == 'cpu' else 'hosts'}]"


_KNOWN = ", ".join(_written(name, preset) for name, preset in PRESETS.items())


def cluster_from_text(text: str) -> ClusterSpec:
    """The cluster that ``text`` names: ``preset[:hosts]``, ``cpu[:devices]``, or a ClusterSpec file
    (``….json``). Raises ClusterError, which lists the presets."""
    if text.endswith(".json") or os.sep in text:
        return cluster_from_file(text)
    name, colon, count_text = text.partition(":")
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ClusterError(f"unknown cluster {text!r}{hint}: known are {_KNOWN}, or a ClusterSpec file (*.json)")
    preset = PRESETS[name]
    if not colon:
        return replace(preset, name=text)
    if not re.fullmatch(r"[1-9][0-9]{0,6}", count_text):
        unit = "devices" if name == "cpu" else "hosts"
        raise ClusterError(f"cluster {text!r}: {count_text!r} is not a number of {unit}; write {name}:2, say")
    count = int(count_text)
    if preset.torus is not None and count > 1:
        raise ClusterError(
            f"cluster {text!r}: {name} is one whole slice; describe {count} of them in a ClusterSpec file (*.json)"
        )
    (group,) = preset.groups
    group = replace(group, devices_per_host=count) if name == "cpu" else replace(group, hosts=count)
    return replace(preset, name=text, groups=(group,))


def cluster_from_file(path: str | os.PathLike[str]) -> ClusterSpec:
    """The ClusterSpec in the JSON file ``path`` (as `serde.to_json` writes it). Raises ClusterError where it cannot be
    read, or is none."""
    try:
        cluster = from_json(ClusterSpec, files.read_text(path))
    except OSError as fault:
        raise ClusterError(f"cluster file {os.fspath(path)}: {fault.strerror or fault}. Presets: {_KNOWN}") from fault
    except (PlanFormatError, files.DamagedError) as fault:
        raise ClusterError(f"cluster file {os.fspath(path)}: {fault}") from None
    cluster.verify()
    return cluster


def mesh_shape_from_text(text: str) -> tuple[int, ...]:
    """``2x4`` → (2, 4). Raises ClusterError where ``text`` is no such list of sizes."""
    if not re.fullmatch(r"[0-9]+(x[0-9]+)*", text):
        raise ClusterError(f"mesh {text!r} is not a shape; write its axis sizes as in 8, 2x4 or 2x2x2")
    return tuple(map(int, text.split("x")))


def default_axis_names(rank: int) -> tuple[str, ...]:
    """Names of a mesh's axes where the user gave none: x, y, z, w, then x4, x5, …"""
    return tuple("xyzw"[i] if i < 4 else f"x{i}" for i in range(rank))


def logical_mesh(cluster: ClusterSpec, shape: Sequence[int], names: Sequence[str] | None = None) -> LogicalMesh:
    """The first ∏ ``shape`` devices of ``cluster`` as an array, row-major, hosts outermost.

    An axis takes the slowest link of a ring along it. Inside a host that is ``intra_host``; between hosts, the
    host's NICs together, divided by the rings along this axis that leave the host at the same time (all rings
    along an axis run at once; one ring alone may use all NICs, as NCCL's channels do). Raises ClusterError
    where the mesh does not fit the cluster, a size is below 1, or names and shape disagree.
    """
    shape = tuple(shape)
    text = "x".join(map(str, shape))
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
    hosts = [(g, h) for g, group in enumerate(cluster.groups) for h in range(group.hosts)]
    host_of = [where for where in hosts for _ in range(cluster.groups[where[0]].devices_per_host)][:count]
    devices = {cluster.groups[g].device for g, _ in host_of}
    if len(devices) > 1:
        kinds = ", ".join(sorted(d.name for d in devices))
        raise ClusterError(f"mesh {text} would mix devices ({kinds}); a mesh needs devices of one kind")
    axes = tuple(
        MeshAxis(name=name, size=size, link=_ring_link(cluster, host_of, size, math.prod(shape[i + 1 :])))
        for i, (name, size) in enumerate(zip(names, shape, strict=True))
    )
    mesh = LogicalMesh(axes=axes, device_ids=tuple(range(count)), device=devices.pop())
    mesh.verify()
    return mesh


def _ring_link(cluster: ClusterSpec, host_of: list[tuple[int, int]], size: int, stride: int) -> LinkSpec:
    """The slowest link that the rings of ``size`` devices, ``stride`` apart, meet."""
    leaving: dict[tuple[int, int], int] = {}
    links = [cluster.groups[g].intra_host for g in sorted({g for g, _ in host_of})]
    crosses_groups = False
    for device, host in enumerate(host_of):
        position = device // stride % size
        follower = host_of[device + (stride if position < size - 1 else -position * stride)]
        if follower != host:
            leaving[host] = leaving.get(host, 0) + 1
            crosses_groups |= follower[0] != host[0]
    for (g, _), rings in leaving.items():
        group = cluster.groups[g]
        share = group.nic.bytes_per_s * group.nics_per_host / rings
        links.append(LinkSpec(latency_s=group.nic.latency_s, bytes_per_s=share))
    if crosses_groups and cluster.between is not None:
        between = cluster.between
        links.append(replace(between, bytes_per_s=between.bytes_per_s / max(leaving.values())))
    return LinkSpec(latency_s=max(k.latency_s for k in links), bytes_per_s=min(k.bytes_per_s for k in links))
