"""What devices and links achieve, measured: → DeviceSpec and LinkSpec, in the cost model's own terms.

All devices of a process work at once, as they do in a step: devices that share cores, a power limit or a memory bus
are measured with what is left for each. A link is measured by the all-reduce that runs over it; its α and β are those
with which `cost.collectives` gives back the time of the smallest and of the largest one (`fit_link`).
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.cost.collectives import collective_s
from autopar.ir.cluster import DeviceSpec, LinkSpec
from autopar.ir.errors import ClusterError
from autopar.jax_compat import Device

REPEATS = 5
"""Of each measurement; the median counts (chosen)."""
WORTH_S = 0.03
"""That a measurement of rates takes at least: launches and clocks are 1 % of it or less (chosen; one copy of
`VECTOR_BYTES` takes 0.3 ms on an H100, half of it to launch it)."""
LARGEST = 8192
"""Rows of the largest matrices: 0.5 GB of float64 each (chosen)."""
VECTOR_BYTES = 256 * 10**6
"""Of the largest array that is read and written, far larger than caches (chosen)."""
MESSAGES = (1024, 16 * 2**20)
"""Bytes per device of the smallest and the largest all-reduce (chosen)."""
DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Whose matrix products are measured; others go as float32, see `DeviceSpec.peak_flops_per_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMeasured:
    """What one host's ``devices`` devices achieve. ``launch_s``: from the call of a compiled function of one device
    until its number is there; plans do not count it. ``link``: None where the host has one device only."""

    device: DeviceSpec
    devices: int
    launch_s: float
    link: LinkSpec | None


def measure_host(devices: Sequence[Device], *, quick: bool = False) -> HostMeasured:
    """Measures ``devices``, all of this process's. ``quick``, for tests: float32 alone, smaller arrays. Raises
    ClusterError where accelerators do not say how much memory they have."""
    worth_s = WORTH_S / 10 if quick else WORTH_S
    dtypes = ("float32",) if quick else DTYPES
    rates = tuple(sorted((dtype, matmul_flops_per_s(devices, dtype, worth_s)) for dtype in dtypes))
    device = DeviceSpec(
        name="cpu" if devices[0].platform == "cpu" else devices[0].device_kind, memory_bytes=_memory_bytes(devices),
        flops_per_s=rates,
        memory_bytes_per_s=memory_bytes_per_s(devices, VECTOR_BYTES // (16 if quick else 1), worth_s),
    )  # fmt: skip
    device.verify()
    link = None if len(devices) == 1 else measure_link(Mesh(np.array(devices), ("x",)), "x")
    return HostMeasured(device=device, devices=len(devices), launch_s=launch_s(devices[0]), link=link)


def matmul_flops_per_s(devices: Sequence[Device], dtype: str, worth_s: float = WORTH_S) -> float:
    """FLOP/s of each of ``devices``, all at work: products of square matrices of ``dtype``, of twice the size until one
    takes ``worth_s`` seconds or has `LARGEST` rows."""
    n = 256
    with jax.enable_x64(dtype == "float64"):
        while True:
            took_s = _on_all(devices, jnp.dot, lambda n=n: (np.full((n, n), 1 / n, dtype),) * 2, worth_s)
            if took_s >= worth_s or n == LARGEST:
                return 2.0 * n**3 / took_s
            n *= 2


def memory_bytes_per_s(devices: Sequence[Device], vector_bytes: int, worth_s: float = WORTH_S) -> float:
    """Bytes per second of each of ``devices``, all at work: a float32 array of ``vector_bytes`` read and one of that
    size written, so often in a row that it takes ``worth_s`` seconds."""
    with jax.enable_x64(False):
        took_s = _on_all(devices, lambda x: x * 2 + 1, lambda: (np.ones(vector_bytes // 4, np.float32),), worth_s)
    return 2 * vector_bytes / took_s


def launch_s(device: Device, count: int = 200) -> float:
    """Seconds of a call of a function of one number on ``device``, until its result is there: the median of
    ``count``."""
    step = jax.jit(lambda x: x + 1)
    x = jax.block_until_ready(step(jax.device_put(np.float32(0), device)))
    return _median(lambda: jax.block_until_ready(step(x)), count)


def measure_link(mesh: Mesh, axis: str) -> LinkSpec:
    """The link that each ring along ``axis`` sees while all of them run, from all-reduces of `MESSAGES`. Every process
    of the mesh calls this at once. Raises ClusterError where the axis has one device."""
    size = mesh.shape[axis]
    if size < 2:
        raise ClusterError(f"mesh axis {axis!r} has one device: there is no link to measure along it")
    times: list[float] = []
    spec = PartitionSpec(mesh.axis_names)
    for message in MESSAGES:
        summed = jax.jit(
            jax.shard_map(lambda x: jax.lax.psum(x, axis), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        )
        part = np.ones(message // 4, np.float32)
        local = np.tile(part, len(mesh.local_devices))
        x = jax.make_array_from_process_local_data(NamedSharding(mesh, spec), local)
        times.append(_median(lambda x=x, summed=summed: jax.block_until_ready(summed(x))))
    return fit_link("all-reduce", size, MESSAGES, times)


def fit_link(kind: str, size: int, messages: Sequence[int], times_s: Sequence[float]) -> LinkSpec:
    """The α and β with which `cost.collectives` gives the times that were measured of a ``kind`` over ``size`` devices.

    Args:
        messages: operand bytes a device of the smallest and of the largest.
        times_s: seconds of these two. β follows from what the largest takes more, a twentieth of its time at least,
            where noise leaves less.

    Raises:
        ValueError: ``kind`` is not a collective.
    """
    hops_s = collective_s(kind, size, 0.0, LinkSpec(latency_s=1.0, bytes_per_s=1.0))
    small, large = (collective_s(kind, size, float(b), LinkSpec(latency_s=0.0, bytes_per_s=1.0)) for b in messages)
    more_s = max(times_s[1] - times_s[0], times_s[1] / 20)
    bytes_per_s = (large - small) / more_s
    alpha_s = times_s[0] / hops_s - small / bytes_per_s / hops_s
    link = LinkSpec(latency_s=max(alpha_s, times_s[0] / hops_s / 20), bytes_per_s=bytes_per_s)
    link.verify()
    return link


def _on_all(devices: Sequence[Device], function: Callable[..., Any], made: Callable[[], Any], worth_s: float) -> float:
    """Seconds until all devices have done it, each on its own arrays; so often in a row that it takes ``worth_s``:
    accelerators are launched ahead."""
    step = jax.jit(function)
    arguments = [tuple(jax.device_put(x, d) for x in made()) for d in devices]

    def work(times: int) -> None:  # earlier results are let go of as the next ones come
        jax.block_until_ready(deque((step(*mine) for _ in range(times) for mine in arguments), len(devices)))

    count = max(1, math.ceil(worth_s / _median(lambda: work(1))))
    return _median(lambda: work(count)) / count


def _median(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    work()  # compiles
    times: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _memory_bytes(devices: Sequence[Device]) -> int:
    """Of each; CPU devices share the machine's."""
    stats = devices[0].memory_stats()
    if stats and stats.get("bytes_limit"):
        return int(stats["bytes_limit"])
    if devices[0].platform != "cpu":
        raise ClusterError(f"{devices[0].device_kind} does not say how much memory it has; write it into a ClusterSpec")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)
