"""Compilers by name, and what a process that uses one needs in its environment. Needs no jax."""

from __future__ import annotations

from typing import Literal, TypeAlias

from autopar.ir.cluster import ClusterSpec, Platform

Compiler: TypeAlias = Literal["cpu", "cuda", "tpu"]
COMPILERS: tuple[Compiler, ...] = ("cpu", "cuda", "tpu")
OF_PLATFORM: dict[Platform, Compiler] = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
"""Platform of a cluster → its compiler."""


def compiler_of(cluster: ClusterSpec) -> Compiler:
    """The compiler of a cluster's platform."""
    return OF_PLATFORM[cluster.platform]


def environment(compiler: Compiler, cluster: ClusterSpec) -> dict[str, str]:
    """What the environment of a process that compiles should have before it imports JAX: no backend of its own but the
    CPU's, no search for the slice that it might be on, no lock on TPUs that it does not use."""
    out = {"JAX_PLATFORMS": "cpu"}
    if compiler == "cpu":
        out["JAX_NUM_CPU_DEVICES"] = str(cluster.num_devices)
    if compiler == "tpu":
        out |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    return out
