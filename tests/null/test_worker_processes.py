"""What workers of a plan ask Ray for, their environment, and their compilation cache's settings; no Ray is started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from autopar.ir.presets import PRESETS
from autopar.ir.slices import GENERATIONS
from autopar.runtime.on_ray.compiled import LEAST_S, default_folder, settings
from autopar.runtime.on_ray.process import Process, lacks_kind, needed, no_room


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_their_platform(name: str) -> None:
    assert PRESETS[name].platform == ("cpu" if name == "cpu" else "gpu")
    assert all(of.device.platform == "tpu" for of in GENERATIONS.values())


def test_what_actors_get() -> None:
    cpu, gpu, tpu = (Process(platform=p, devices=4) for p in ("cpu", "gpu", "tpu"))
    assert (cpu.options, cpu.bundle) == ({"num_cpus": 1}, {"CPU": 1})
    assert (gpu.options, gpu.bundle) == ({"num_cpus": 1, "num_gpus": 4}, {"CPU": 1, "GPU": 4})
    assert (tpu.options, tpu.bundle) == ({"num_cpus": 1, "resources": {"TPU": 4}}, {"CPU": 1, "TPU": 4})
    assert cpu.variables == {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    assert (gpu.variables, tpu.variables) == ({"JAX_PLATFORMS": "cuda,cpu"}, {"JAX_PLATFORMS": "tpu,cpu"})
    assert needed([gpu, gpu, cpu]) == {"CPU": 3, "GPU": 8}


def test_what_is_missing_is_named() -> None:
    gpus = [Process(platform="gpu", devices=8)] * 2
    cpu_only, some = {"CPU": 64.0}, {"CPU": 64.0, "GPU": 16.0}
    assert lacks_kind(gpus, cpu_only) and not lacks_kind(gpus, some)
    assert str(no_room(gpus, cpu_only, cpu_only, 0)).startswith(
        "the plan's 2 workers ask Ray for 16 GPU; no node of it has one. Start nodes where they are"
    )
    assert str(no_room(gpus, some, {"CPU": 64.0, "GPU": 9.0}, 60)) == (
        "Ray has no room for 2 workers within 60 s. They ask for 2 CPU (64 of 64 free), 16 GPU (9 of 16 free); 8 GPU "
        "on one node"
    )
    one = [Process(platform="gpu", devices=8)]
    assert str(no_room(one, cpu_only, cpu_only, 0)).startswith("the plan's worker asks Ray for 8 GPU; no node of it")
    assert str(no_room(one, some, {}, 60)).startswith("Ray has no room for 1 worker within 60 s. It asks for 1 CPU (0")


@pytest.fixture
def driver() -> Iterator[Any]:
    """Sets this process's JAX, and sets it back."""
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield lambda **given: [jax.config.update(f"jax_{name}", value) for name, value in given.items()]
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_cache_is_the_drivers_or_the_users(driver: Any, tmp_path: Path, monkeypatch: Any) -> None:
    def chosen(given: Any) -> tuple[Any, ...]:
        found = settings(given)
        folder = found["jax_compilation_cache_dir"] if found["jax_enable_compilation_cache"] else None
        return folder, found["jax_persistent_cache_min_compile_time_secs"]

    driver(compilation_cache_dir=None, persistent_cache_min_compile_time_secs=3.0)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_folder() == os.path.join("~", ".cache", "autopar", "jax")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert chosen(None) == ("/cache/autopar/jax", LEAST_S)
    assert chosen(tmp_path) == (str(tmp_path), LEAST_S)
    assert chosen(False)[0] is None
    driver(compilation_cache_dir="/mine")
    assert chosen(None) == ("/mine", 3.0)
    driver(enable_compilation_cache=False)
    assert chosen(None)[0] is None
    assert chosen(tmp_path)[0] == str(tmp_path)
