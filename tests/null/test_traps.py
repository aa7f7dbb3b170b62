"""`autopar doctor` tells of what works and yet surprises, and of nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from autopar.launch.traps import traps

ALL = {"jax": "0.12.0", "libtpu": "", "numba": "1", "ray": "2.60.0", "tensorstore": "1"}
CPU = {"count": 8, "platform": "cpu", "kind": "cpu"}
GPU = {"count": 8, "platform": "gpu", "kind": "NVIDIA H100"}
TPU = {"count": 4, "platform": "tpu", "kind": "TPU v5e"}
DRIVER = "a script that drives Ray's workers"


@pytest.mark.parametrize(
    ("devices", "versions", "environment", "expected"),
    [
        (CPU, {}, {}, []),
        ({}, {}, {}, []),
        ({**CPU, "count": 1}, {}, {}, ["JAX has one CPU device, so that plans split nothing. JAX_NUM_CPU_DEVICES=8"]),
        (
            CPU, {}, {"JAX_NUM_CPU_DEVICES": "4", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
            ["JAX_NUM_CPU_DEVICES=4 holds"],
        ),
        (CPU, {"jax": "0.10.2"}, {}, ["jax 0.10.2 undoes recomputation on CPUs"]),
        (GPU, {"jax": "0.10.2"}, {}, ["JAX takes 0.75 of a GPU's memory", DRIVER]),
        (GPU, {}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}, [DRIVER]),
        (GPU, {}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "much"}, ["JAX takes 0.75", DRIVER]),
        (TPU, {"libtpu": "0.0.42"}, {}, [DRIVER]),
        (CPU, {"libtpu": "0.0.42"}, {}, ["describing TPUs to libtpu"]),
        (CPU, {"libtpu": "0.0.42"}, {"TPU_SKIP_MDS_QUERY": "1"}, []),
        (CPU, {"ray": ""}, {}, ["ray is not installed: steps run in this process"]),
        (CPU, {"numba": ""}, {}, ["numba is not installed: large problems"]),
        (CPU, {"tensorstore": ""}, {}, ["tensorstore is not installed: autopar.save"]),
        (CPU, {}, {"JAX_ENABLE_COMPILATION_CACHE": "False"}, ["JAX_ENABLE_COMPILATION_CACHE is off"]),
        (CPU, {}, {"JAX_COMPILATION_CACHE_DIR": "gs://bucket"}, []),
    ],
)  # fmt: skip
def test_what_is_told(devices: Any, versions: Any, environment: Any, expected: list[str]) -> None:
    told = traps(ALL | versions, devices, environment)
    assert len(told) == len(expected), told
    assert all(line.startswith(start) for line, start in zip(told, expected, strict=True))


def test_a_cache_that_others_can_write_in(tmp_path: Path) -> None:
    own, shared = tmp_path / "own", tmp_path / "shared"
    own.mkdir(mode=0o700)
    shared.mkdir()
    os.chmod(shared, 0o777)
    assert traps(ALL, CPU, {"JAX_COMPILATION_CACHE_DIR": str(own)}) == []
    (told,) = traps(ALL, CPU, {"JAX_COMPILATION_CACHE_DIR": str(shared)})
    assert told.startswith("JAX_COMPILATION_CACHE_DIR: all users can write in ")
