"""Devices that a real compiler compiles for, without the hardware: a cluster → `jax` devices that are only described.

TPU slices and GPUs are described by `jax.experimental.topologies`; for the CPU's compiler virtual devices do. All hosts
are one process', so that one program is compiled for all devices.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence

import jax
from jax.experimental import topologies

from autopar.ir.cluster import ClusterSpec, Torus, shape_text
from autopar.ir.errors import ClusterError, CompilerError
from autopar.ir.slices import generation_of
from autopar.jax_compat import Device
from autopar.runtime.local_devices import cluster_of, in_order
from autopar.verify.environment import OF_PLATFORM, Compiler
from autopar.verify.gpu_targets import TARGETS, target_config, target_of

_NEEDED = {"cuda": ("jax_cuda12_plugin", "verify-cuda"), "tpu": ("libtpu", "verify-tpu")}
"""Compiler → what must be importable, and the extra that brings it."""


_CPU = '--compiler cpu (of autopar verify), or compiler="cpu"'
"""How the command and `verify_step` take the compiler that needs nothing."""


def check_installed(compiler: Compiler) -> None:
    """Raises CompilerError where a compiler's extra is not installed."""
    if compiler not in _NEEDED:
        return
    module, extra = _NEEDED[compiler]
    if importlib.util.find_spec(module) is None:
        raise CompilerError(
            f"the compiler {compiler} is not installed ({module} is missing): pip install 'autopar[{extra}]', or "
            f"{_CPU}, which tells of the collectives and of no times"
        )


def described(compiler: Compiler, cluster: ClusterSpec) -> list[Device]:
    """Devices of ``cluster`` as it numbers them, for ``compiler`` to compile for.

    Raises:
        CompilerError: its extra is not installed, or it cannot compile for such devices.
    """
    check_installed(compiler)
    if compiler == "cpu":
        return _virtual(cluster)
    if OF_PLATFORM[cluster.platform] != compiler:
        raise CompilerError(
            f"the compiler {compiler} does not compile for cluster {cluster.name}, whose devices are "
            f"{cluster.groups[0].device.name}: leave the compiler out, or take cpu"
        )
    if len(cluster.groups) > 1:
        raise CompilerError(f"cluster {cluster.name} has unequal hosts: no topology describes them; {_CPU} does")
    with _said(compiler, cluster):
        found = _gpus(cluster) if compiler == "cuda" else _slices(cluster)
    devices = in_order(found, cluster)
    if len(devices) != cluster.num_devices:
        raise CompilerError(f"{len(devices)} devices are described of the {cluster.num_devices} of {cluster.name}")
    return devices


def alone(devices: Sequence[Device]) -> list[Device]:
    """Described ``devices``, a stage's, as the compiler takes them: those of a TPU slice as a slice of their own.

    libtpu 0.0.42 ends the process at a collective among devices that are, by their numbers, no first part of a slice's
    blocks: among a column of a v5e:2x4, while its first and last four devices will do.

    Raises CompilerError where they fill no block of a slice."""
    if devices[0].platform != "tpu":
        return list(devices)
    try:
        spec = cluster_of(devices)
    except ClusterError as fault:
        raise CompilerError(f"the compiler tpu cannot describe a stage's devices: {fault}") from fault
    with _said("tpu", spec):
        own = in_order(_slices(spec), spec)
    taken = dict(zip(in_order(devices, spec), own, strict=True))
    return [taken[d] for d in devices]


@contextlib.contextmanager
def _said(compiler: Compiler, cluster: ClusterSpec) -> Iterator[None]:
    """What a compiler says against a topology as a CompilerError."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, NotImplementedError) as fault:
        raise CompilerError(f"the compiler {compiler} cannot describe cluster {cluster.name}: {fault}") from fault


def _virtual(cluster: ClusterSpec) -> list[Device]:
    devices = jax.devices("cpu")
    if len(devices) < cluster.num_devices:
        raise CompilerError(
            f"the plan is for {cluster.num_devices} devices, and this process has {len(devices)} virtual ones: set "
            f"JAX_NUM_CPU_DEVICES={cluster.num_devices} before JAX is imported"
        )
    return devices[: cluster.num_devices]


def _gpus(cluster: ClusterSpec) -> list[Device]:
    (group,) = cluster.groups
    target = target_of(group.device)
    if target is None:
        raise CompilerError(
            f"no target describes {group.device.name} to the compiler cuda; known are {', '.join(TARGETS)}: take {_CPU}"
        )
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name=group.device.name, target_config=target_config(target),
        topology=f"1x{group.hosts}x{group.devices_per_host}",
    )  # fmt: skip
    return list(topology.devices)


def _slices(cluster: ClusterSpec) -> list[Device]:
    (group,) = cluster.groups
    torus: Torus | None = group.torus
    generation = generation_of(group.device.name)
    if torus is None or generation is None:
        raise CompilerError(f"cluster {cluster.name}: {group.device.name} in no slice that the compiler tpu knows")
    shape = (*torus.shape, 1, 1)[:3]
    name = _TOPOLOGIES.get(generation, generation)
    settings: dict[str, object] = {"chips_per_host_bounds": shape}
    if generation == "v4":
        settings["chip_config_name"] = "megacore"
    slices = group.hosts // group.domain_hosts
    if slices > 1:
        settings["num_slices"] = slices
    bounds = torus.shape if generation in _FLAT else shape
    topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:{shape_text(bounds)}", **settings)
    return list(topology.devices)


_TOPOLOGIES = {"v7x": "tpu7x"}
"""Generation → libtpu's name of it, where that is another."""
_FLAT = ("v5e", "v6e")
