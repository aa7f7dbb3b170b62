"""Plans of one program on a Ray: over two hosts, each process of which runs the whole program on its devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.ir.errors import TraceError
from autopar.ir.plan import OneProgram
from tests.clusters import cluster
from tests.compare import assert_close
from tests.models import build
from tests.option_pairs import batch, create, train

TWO_HOSTS = cluster(2, flops_per_s=1e10, memory_bytes_per_s=1e10, latency_s=1e-8, hosts=2)


def on_ray(ray_cluster: Any, fun: Any, args: Any, **options: Any) -> Any:
    """``fun``, planned for two hosts of two devices."""
    near = autopar.parallelize(fun, cluster=TWO_HOSTS, **options)
    return near.with_options(cluster=ray_cluster, plan=near.plan(*args), deadline_s=120.0)


def test_all_that_a_step_does(ray_cluster: Any, tmp_path: Path) -> None:
    shapes = jax.eval_shape(create)
    step = on_ray(ray_cluster, train, (shapes, batch()), donate_argnums=0)
    assert isinstance(step.plan(shapes, batch()).data.body, OneProgram)
    state, want = step.init(create), create()
    (workers,) = step.compiled().loaded
    assert len(workers.devices) == 2, "a process sees devices of the other host"
    with step.trace() as traced, step.loader(lambda start: map(batch, range(start, 3))) as batches:
        for number, each in enumerate(batches):
            old = state
            state, loss = step(state, each)
            want, expected = jax.jit(train)(want, batch(number))
            assert old["w"][0].is_deleted()
            assert_close(jax.tree.map(np.asarray, (state, loss)), (want, expected), 1e-9)
    assert [len(t.workers) for t in traced.steps] == [1, 1, 1] and "simulated" in str(traced)
    autopar.save(tmp_path, state, step=3).wait()
    found = autopar.restore(tmp_path, step.abstract(create), step=3)
    assert_close(jax.tree.map(np.asarray, found), want, 1e-9)
    near = autopar.parallelize(train)
    near.plan(shapes, batch())
    elsewhere = autopar.restore(tmp_path, near.abstract(create), step=3)
    (again, loss), (want, expected) = step(found, batch(3)), jax.jit(train)(want, batch(3))
    assert_close(jax.tree.map(np.asarray, (again, loss)), (want, expected), 1e-9)
    assert_close(near(elsewhere, batch(3)), (want, expected), 1e-9)
    with pytest.raises(TraceError, match="runs on a Ray, which is no JAX program"):
        jax.jit(step)(create(), batch())
    report = autopar.check(step.with_options(donate_argnums=()), args=(create(), batch()))
    assert report.agrees and len(report.leaves) == 6
    step.close()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full) for n in ("gpt_dropout", "moe", "conv_net", "gpt_scan", "unet")]
)
def test_equals_serial(ray_cluster: Any, name: str) -> None:
    model = build(name, "float64")
    known = {k: v for k, v in model.kwargs.items() if k in ("batch_argnums", "static_argnums", "donate_argnums")}
    step = on_ray(ray_cluster, model.step, model.args, num_microbatches=2, **known)
    serial = jax.jit(model.step)
    got = want = model.args
    for _ in range(2):
        expected, out = serial(*want), step(*got)
        assert_close(jax.tree.map(np.asarray, out), expected, 1e-9, least_norm=1e-6)
        got, want = (out[0], *got[1:]), (expected[0], *want[1:])
    step.close()
