"""What works and yet surprises: settings and packages of one machine → `traps`, a line each. Pure, but for folders."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from autopar.ir import files
from autopar.ir.presets import JAX_FRACTION

_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_COUNT, _FORCED = "JAX_NUM_CPU_DEVICES", "xla_force_host_platform_device_count"
_EXTRAS = {
    "ray": ("ray", "steps run in this process, or as several controllers"),
    "numba": ("solver", "large problems are solved several times slower"),
    "tensorstore": ("checkpoint", "autopar.save, restore and run_elastic cannot write"),
}
"""A package that is an extra's → the extra, and what is so without it."""


def traps(versions: Mapping[str, str], devices: Mapping[str, Any], environment: Mapping[str, str]) -> list[str]:
    """What to know of this machine.

    Args:
        versions: of packages, "" where one is missing.
        devices: what JAX sees: ``count``, ``platform`` (``cpu``, ``gpu``, ``tpu``); empty where nobody looked.
        environment: variables.
    """
    out: list[str] = []
    platform = devices.get("platform", "")
    if platform == "cpu" and devices["count"] == 1:
        out.append(f"JAX has one CPU device, so that plans split nothing. {_COUNT}=8 makes eight of its cores")
    if environment.get(_COUNT) and _FORCED in environment.get("XLA_FLAGS", ""):
        out.append(f"{_COUNT}={environment[_COUNT]} holds; the number that XLA_FLAGS asks for by --{_FORCED} does not")
    if platform == "cpu" and versions.get("jax", "").startswith(("0.10.", "0.11.")):
        out.append(f"jax {versions['jax']} undoes recomputation on CPUs: plans for those keep all. jax 0.12 does not")
    if platform == "gpu" and _fraction(environment) <= JAX_FRACTION:
        out.append(
            f"JAX takes {JAX_FRACTION} of a GPU's memory, and plans may need more (they say so): {_FRACTION}=0.9"
        )
    if platform in ("gpu", "tpu"):
        out.append(
            "a script that drives Ray's workers on this host takes the devices from them. Run it with JAX_PLATFORMS=cpu"
        )
    if versions.get("libtpu") and platform != "tpu" and not environment.get("TPU_SKIP_MDS_QUERY"):
        out.append(
            "describing TPUs to libtpu asks Google Cloud for its metadata first, for minutes. `autopar verify` does "
            "not; in scripts of your own set TPU_SKIP_MDS_QUERY=1"
        )
    out += [
        f"{package} is not installed: {what}. pip install 'autopar[{extra}]'"
        for package, (extra, what) in _EXTRAS.items()
        if package in versions and not versions[package]
    ]
    if environment.get("JAX_ENABLE_COMPILATION_CACHE", "").lower() in ("0", "false", "off"):
        out.append("JAX_ENABLE_COMPILATION_CACHE is off: workers compile everything again at each start. Unset it")
    cache = environment.get("JAX_COMPILATION_CACHE_DIR", "")
    cache = os.path.expanduser(cache)
    if os.path.isdir(cache) and (why := files.open_to_others(cache)):
        out.append(f"JAX_COMPILATION_CACHE_DIR: {why}, and what is there is run. Workers refuse it: chmod go-w")
    return out


def _fraction(environment: Mapping[str, str]) -> float:
    try:
        return float(environment.get(_FRACTION, JAX_FRACTION))
    except ValueError:
        return JAX_FRACTION
