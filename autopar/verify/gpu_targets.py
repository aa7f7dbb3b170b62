"""GPUs as XLA's compiler for them is told of them, where there are none: `target_config`.

The figures of a device are those that XLA keeps itself for ahead-of-time compilation (openxla/xla,
``xla/backends/gpu/target_config/specs``, read in November 2026: what the driver reports of one); the text is a
``GpuTargetConfigProto``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.ir.cluster import DeviceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTarget:
    """One kind of GPU: what the driver reports of it. Bytes, but for ``clock_rate_ghz`` and the counts."""

    description: str
    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    clock_rate_ghz: float
    memory_bytes: int
    memory_bytes_per_s: int
    l2_cache_bytes: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int


_HOPPER = {
    "capability": (9, 0), "cores": 132, "fpus_per_core": 128, "clock_rate_ghz": 1.98, "l2_cache_bytes": 52428800,
    "shared_memory_per_core": 233472, "shared_memory_per_block_optin": 232448,
}  # fmt: skip
_AMPERE = {
    "capability": (8, 0), "cores": 108, "fpus_per_core": 64, "clock_rate_ghz": 1.41, "l2_cache_bytes": 41943040,
    "shared_memory_per_core": 167936, "shared_memory_per_block_optin": 166912,
}  # fmt: skip


def _target(description: str, memory_bytes: int, memory_bytes_per_s: int, chip: dict[str, Any]) -> GpuTarget:
    return GpuTarget(
        description=description, memory_bytes=memory_bytes, memory_bytes_per_s=memory_bytes_per_s, **chip
    )  # fmt: skip


TARGETS = {
    "H100-SXM5-80GB": _target("NVIDIA H100 80GB HBM3", 84942979072, 3352320000000, _HOPPER),
    "H200-SXM5-141GB": _target("NVIDIA H200 141GB HBM3e", 151397597184, 4800000000000, _HOPPER),
    "A100-SXM4-80GB": _target("NVIDIA A100-SXM4-80GB", 85100068864, 2039040000000, _AMPERE),
    "A100-SXM4-40GB": _target("NVIDIA A100-SXM4-40GB", 42331013120, 1555200000000, _AMPERE),
}
"""By the name that clusters have (`ir.presets`)."""


def target_of(device: DeviceSpec) -> GpuTarget | None:
    """The target that a cluster's device is; None for a GPU that is not known here."""
    return TARGETS.get(device.name)


def target_config(target: GpuTarget) -> str:
    """What `jax.experimental.topologies.get_topology_desc` takes as ``target_config``."""
    major, minor = target.capability
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {target.shared_memory_per_core}
  threads_per_core_limit: 2048
  core_count: {target.cores}
  fpus_per_core: {target.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {target.memory_bytes_per_s}
  l2_cache_size: {target.l2_cache_bytes}
  clock_rate_ghz: {target.clock_rate_ghz}
  device_memory_size: {target.memory_bytes}
  shared_memory_per_block_optin: {target.shared_memory_per_block_optin}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{target.description}"
"""
