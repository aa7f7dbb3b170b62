"""What workers start with: devices of the plan's kind, and programs that were compiled before."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.ir.errors import ClusterError, WorkerError
from autopar.ir.presets import cluster_from_text
from autopar.runtime.on_ray.gang import ROOM_S
from tests.compare import assert_close
from tests.processes import left
from tests.ray.steps import X, init, train

OPTIONS: Any = {"schedule": "1f1b", "submeshes": ["1x2"], "workers": 1, "layers": 2, "stages": 2}


def plan(spec: Any) -> Any:
    shapes = jax.eval_shape(init, jax.random.key(0)), X
    return autopar.parallelize(train, cluster=spec, num_microbatches=2, **OPTIONS).plan(*shapes)


def planned(plan: Any, ray_cluster: Any) -> Any:
    """The step of a plan, to run on a Ray."""
    step = autopar.parallelize(train, plan=plan, cluster=ray_cluster)
    step.plan(jax.eval_shape(init, jax.random.key(0)), X)
    return step


def test_a_plan_for_gpus_says_that_there_are_none(ray_cluster: Any) -> None:
    spec = cluster_from_text("dgx-h100")
    spec = replace(spec, groups=(replace(spec.groups[0], devices_per_host=4),))
    far, started_s = planned(plan(spec), ray_cluster), time.monotonic()
    with pytest.raises(ClusterError, match="2 workers ask Ray for 4 GPU; no node of it has one"):
        far.compiled()
    assert time.monotonic() - started_s < ROOM_S, "room was waited for"


@pytest.mark.full
def test_it_can_be_tried_on_cpu_devices(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_devices", "cpu")
    far, state = planned(plan("dgx-h100"), ray_cluster), init(jax.random.key(0))
    got = jax.tree.map(np.asarray, far(state, X))
    far.close()
    assert_close(got, jax.tree.map(np.asarray, jax.jit(train)(state, X)), 1e-9)


@pytest.fixture
def driver_cache(ray_cluster: Any, tmp_path: Path, monkeypatch: Any) -> Iterator[None]:
    """This process's JAX has a cache of its own, which keeps all."""
    monkeypatch.setattr(ray_cluster, "_compilation_cache", None)
    wanted = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("driver_cache")
@pytest.mark.full
def test_a_second_gang_compiles_nothing(ray_cluster: Any) -> None:
    state, made, found = init(jax.random.key(0)), plan(ray_cluster.spec), list[Any]()
    for _ in range(2):
        far = planned(made, ray_cluster)
        found.append((far.compiled().loaded, jax.tree.map(np.asarray, far(state, X))))
        far.close()
    (first, once), (second, again) = found
    assert all(x.programs for x in first), "no program was asked for"
    assert [(x.programs, x.cached) for x in second] == [(x.programs, x.programs) for x in first]
    jax.tree.map(np.testing.assert_array_equal, once, again)


def test_programs_that_others_can_put_there_are_not_run(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "compiled"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setattr(ray_cluster, "_compilation_cache", folder)
    far = planned(plan(ray_cluster.spec), ray_cluster)
    with pytest.raises(WorkerError, match=f"worker . .*compilation cache: all users can write in {folder}, and what"):
        far.compiled()
    folder.chmod(0o700)
    far.compiled()
    far.close()


def test_workers_that_nobody_has_end(ray_cluster: Any) -> None:
    """They live as long as the step or what it made does; then their room is free, too."""
    import ray

    free, state = ray.available_resources()["CPU"], init(jax.random.key(0))
    far = planned(plan(ray_cluster.spec), ray_cluster)
    kept = far(state, X)
    pids = list(far.compiled().pids)
    del far
    gc.collect()
    assert left(pids, 0.0) == pids
    jax.tree.map(np.asarray, kept)
    del kept
    gc.collect()
    assert not left(pids, 30.0)
    stop_s = time.monotonic() + 30
    while ray.available_resources().get("CPU", 0) < free:
        assert time.monotonic() < stop_s
        time.sleep(0.1)
