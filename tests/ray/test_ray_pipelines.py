"""Pipelines on a local Ray: two workers with two CPU devices each."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.ir.errors import WorkerError
from autopar.runtime.in_process import InProcess
from tests.clusters import cluster
from tests.compare import FAST_COMPILE, assert_close
from tests.models import build

HOST_4 = cluster(4, flops_per_s=1e10, memory_bytes_per_s=1e10, latency_s=1e-8)
DEADLINE_S = 60.0


def compiled(ray_cluster: Any, name: str) -> tuple[Any, Any, Any]:
    """(model, plan, its step on Ray)."""
    model = build(name, "float64")
    argnums = {k: v for k, v in model.kwargs.items() if k in ("batch_argnums", "static_argnums", "donate_argnums")}
    plan = autopar.plan_pipeline(
        model.step, model.args, cluster=HOST_4, num_microbatches=4, workers=1, num_stages=2, submeshes=["1x2"],
        schedules="1f1b", **argnums,
    )  # fmt: skip
    step = ray_cluster.compile(
        plan.layered, plan.data, model.step, model.args, options=FAST_COMPILE, deadline_s=DEADLINE_S, **argnums
    )
    return model, plan, step


def on_host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree, is_leaf=lambda x: hasattr(x, "fetch"))


@pytest.mark.parametrize("name", ["mlp", "gpt_tied"])
def test_equals_the_in_process_runtime_and_serial(ray_cluster: Any, name: str) -> None:
    model, plan, far = compiled(ray_cluster, name)
    assert [len(x.devices) for x in far.loaded] == [2, 2]  # and no others
    assert len(set(far.pids) | {os.getpid()}) == 3
    near = InProcess(plan.layered, plan.data, jax.devices(), options=FAST_COMPILE)
    serial = jax.jit(model.step, compiler_options=FAST_COMPILE)
    args, here, want = model.fresh_args(), model.fresh_args(), model.args
    for _ in range(3):
        there = far(*args)
        flat = near(jax.tree_util.tree_leaves((here, {})))
        found = jax.tree_util.tree_unflatten(plan.layered.call.out_tree, flat)
        out = serial(*want)
        jax.tree.map(np.testing.assert_array_equal, on_host(there), jax.tree.map(np.asarray, found))
        assert_close(on_host(there), jax.tree.map(np.asarray, out), 1e-9, least_norm=1e-6)
        args, here, want = model.next_args(there), model.next_args(found), model.next_args(out)
    far.close()


def test_a_killed_worker_is_an_error_in_time_and_nothing_is_left(ray_cluster: Any) -> None:
    """Goes last: it shuts the cluster down."""
    model, _, far = compiled(ray_cluster, "mlp")
    state = far(*model.fresh_args())[0]
    os.kill(far.pids[1], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerError, match=rf"step: worker 1 \(process {far.pids[1]}\) died"):
        far(state, *model.args[1:])
    assert time.monotonic() - started < 10
    with pytest.raises(WorkerError, match="shut down, or ended by a failure"):
        far(*model.fresh_args())
    head = ray_cluster._head.pid
    mine = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _below(pid, head)]
    assert len(mine) > 3  # Ray's daemons
    ray_cluster.shutdown()
    assert not [pid for pid in (*mine, *far.pids, head) if os.path.exists(f"/proc/{pid}")]


def _below(pid: int, above: int) -> bool:
    """Whether process ``above`` is an ancestor of ``pid``."""
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            return False
        if pid == above:
            return True
    return False
