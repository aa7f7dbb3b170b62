"""What users call: `autopar.init`, steps planned for the cluster and run on it, their arrays."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.ir.errors import ClusterError, OptionError, TraceError, WorkerError
from autopar.runtime.partition_specs import partition_spec
from tests.compare import assert_close
from tests.ray.steps import WIDTH, X, init, keeping, keeping_init, train

OPTIONS: Any = {
    "num_microbatches": 2, "stages": 2, "schedule": "1f1b", "submeshes": ["1x2"], "workers": 1, "layers": 4,
}  # fmt: skip


def test_parallelize_plans_for_the_cluster_and_runs_on_it(ray_cluster: Any) -> None:
    step = autopar.parallelize(train, cluster="ray", donate_argnums=0, **OPTIONS)
    key = jax.random.key(3)
    plan = step.plan(jax.eval_shape(init, key), X)
    assert plan.data.cluster == ray_cluster.spec
    state = step.init(init, key)
    want: Any = init(key)
    assert all(isinstance(w, autopar.Array) for w in state), "the state was made here"
    assert_close(jax.tree.map(np.asarray, state), jax.tree.map(np.asarray, want), 1e-12)
    first = state
    for _ in range(3):
        state, value = step(state, X)
        want, expected = jax.jit(train)(want, X)
        assert_close(np.asarray(value), np.asarray(expected), 1e-9)
        assert float(value) == np.asarray(value)
    assert_close(jax.tree.map(np.asarray, state), jax.tree.map(np.asarray, want), 1e-9)
    w = state[0]
    assert (w.shape, w.dtype, w.ndim, w.nbytes) == ((WIDTH, WIDTH), np.float64, 2, 8 * WIDTH**2)
    (placed,) = plan.place(init(key))[0]
    (sharding,) = w.shardings
    assert tuple(sharding.spec) == tuple(partition_spec(placed.spec)) and sharding.mesh.size == 2
    assert first[0].is_deleted(), "a donated array is still there"
    with pytest.raises(WorkerError, match=r"was donated to a step, or deleted, and is gone"):
        np.asarray(first[0])
    with pytest.raises(WorkerError, match="is gone"):
        step(first, X)
    step(state, X)  # what was refused has done no harm


def test_a_donated_state_keeps_what_the_step_returns_as_it_is(ray_cluster: Any) -> None:
    """And what nobody reads is let go of."""
    shapes = jax.eval_shape(keeping_init, jax.random.key(0))
    far = autopar.parallelize(keeping, cluster=ray_cluster, donate_argnums=0, **OPTIONS)
    far.plan(shapes, X)
    workers: Any = far.compiled()
    state, want = far.init(keeping_init, jax.random.key(1)), keeping_init(jax.random.key(1))
    held: list[Any] = []
    for _ in range(4):
        state, _ = far(state, X)
        want, _ = jax.jit(keeping)(want, X)
        assert_close(jax.tree.map(np.asarray, state), jax.tree.map(np.asarray, want), 1e-9)
        held.append([live.arrays for live in workers.live()])
    assert held[-1] == held[-2] == held[-3]
    state["before"], want["before"] = state["w"], want["w"]  # the same arrays, donated twice
    for _ in range(2):
        state, _ = far(state, X)
        want, _ = jax.jit(keeping)(want, X)
        assert_close(jax.tree.map(np.asarray, state), jax.tree.map(np.asarray, want), 1e-9)
    assert [live.arrays for live in workers.live()] == held[-1]
    far.close()


def test_threads_call_one_step(ray_cluster: Any) -> None:
    """Each gets its own batch's numbers."""
    far = autopar.parallelize(train, cluster=ray_cluster, **OPTIONS)
    far.plan(jax.eval_shape(init, jax.random.key(0)), X)
    state, batches = far.init(init, jax.random.key(1)), [X * k for k in range(1, 4)]
    want = [float(far(state, x)[1]) for x in batches]

    def loss(x: Any) -> float:
        with jax.enable_x64(True):  # of a thread
            return float(far(state, x)[1])

    with ThreadPoolExecutor(len(batches)) as threads:
        for _ in range(3):
            assert list(threads.map(loss, batches)) == want
    far.close()


@pytest.mark.full
def test_arrays_of_another_gang_and_of_this_process_go_in(ray_cluster: Any) -> None:
    shapes = jax.eval_shape(init, jax.random.key(0))
    one = autopar.parallelize(train, cluster=ray_cluster, **OPTIONS)
    plan = one.plan(shapes, X)
    state, workers = one.init(init, jax.random.key(1)), one.compiled()
    with pytest.raises(TypeError, match=r"args\[1\] is float64\[4,8\]; the plan is for float64\[8,8\]"):
        workers([*state, X[:4]])
    with pytest.raises(TypeError, match=r"args\[1\] is int64\[8,8\]"):
        workers([*state, X.astype(int)])
    with pytest.raises((TypeError, ValueError)):
        workers([*state[1:], X])
    mixed = [*state[:2], *map(np.asarray, state[2:])]
    two = one.with_options(cluster="ray", num_microbatches=4, stages=1, schedule=None)
    want, _ = jax.jit(train)(init(jax.random.key(1)), X)
    for step in (one, two, autopar.parallelize(train, plan=plan)):
        assert_close(jax.tree.map(np.asarray, step(mixed, X)[0]), jax.tree.map(np.asarray, want), 1e-9)
    state[0].delete()
    with pytest.raises(WorkerError, match="is gone"):
        one(state, X)
    one.close()
    two.close()


@pytest.mark.parametrize(
    "settings",
    [
        *(pytest.param(s, marks=pytest.mark.full) for s in ({}, {"threefry_partitionable": False})),
        {"default_prng_impl": "rbg"},
    ],
    ids=str,
)
def test_workers_trace_as_the_driver_does(ray_cluster: Any, settings: Any) -> None:
    """Under its settings of JAX; and handles are numbers."""
    with ExitStack() as stack:
        for name, value in settings.items():
            stack.enter_context(getattr(jax, name)(value))
        table = jnp.linspace(0.5, 1.5, WIDTH)  # of the x64 of now

        def counting_init() -> Any:
            key = jax.random.key(3)
            return {"w": init(key), "count": jnp.int32(5), "key": key}

        def counting(state: Any, x: Any) -> Any:
            new, value = train(state["w"], x * table)
            key, mine = jax.random.split(state["key"])
            rows, dice = value * jnp.arange(3.0), jax.random.uniform(mine)
            more = {"loss": value, "bad": jnp.isnan(value), "rows": rows, "dice": dice}
            return {"w": new, "count": state["count"] + 1, "key": key}, more

        start = counting_init()
        far = autopar.parallelize(counting, cluster=ray_cluster, donate_argnums=0, **OPTIONS)
        far.plan(start, X)
        state = far.init(counting_init)
        keys = jax.random.key_data(state["key"].whole())
        np.testing.assert_array_equal(keys, jax.random.key_data(start["key"]))
        assert_close([np.asarray(w) for w in state["w"]], [np.asarray(w) for w in start["w"]], 1e-9)
        before, same = copy.deepcopy(state["w"]), copy.copy(state["w"][0])
        state, more = far(state, X)
        _, expected = jax.jit(counting)(start, X)
        want = jax.device_get(expected)
        assert_close({k: np.asarray(v) for k, v in more.items()}, want, 1e-9)
        assert_close(before, [np.asarray(w) for w in start["w"]], 1e-9)
        assert same.is_deleted() and not more["bad"] and state["count"] == 6 and [7, 8][state["count"] - 6] == 7
        assert f"{more['loss']:.3f}" == f"{float(want['loss']):.3f}" and more["loss"].item() == float(more["loss"])
        assert more["loss"] < more["loss"] + 1 == 1 + more["loss"] and len(more["rows"]) == len(list(more["rows"])) == 3
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(more["rows"])), more["rows"] * 1)
        moved = pickle.loads(pickle.dumps(state["key"]))
        np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(state["key"].whole()))
        far.close()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Mine:
    """A pytree."""

    w: Any


def test_what_the_script_defines_is_refused(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where workers would not know it."""

    def step(state: Any, x: Any) -> Any:
        new, value = train(state.w, x)
        return Mine(new), value

    lock = threading.Lock()

    def locked(params: Any, x: Any) -> Any:
        with lock:
            return train(params, x)

    shapes = jax.eval_shape(init, jax.random.key(0))
    far = autopar.parallelize(step, cluster=ray_cluster, **OPTIONS)
    far.plan(Mine(shapes), X)
    with monkeypatch.context() as patch:
        patch.setattr(Mine, "__module__", "__main__")
        with pytest.raises(TraceError, match=r"Mine is defined in the script that runs \(__main__\)"):
            far.compiled()
    far = autopar.parallelize(locked, cluster=ray_cluster, **OPTIONS)
    far.plan(shapes, X)
    with pytest.raises(TraceError, match="locked cannot be sent to workers, by cloudpickle"):
        far.compiled()


def test_what_cannot_run_says_why(ray_cluster: Any) -> None:
    with pytest.raises(OptionError, match="method: stages= asks for stages, whose meshes may differ in size"):
        autopar.parallelize(train, cluster="ray", stages=2, method="tensor_parallel")
    with pytest.raises(ClusterError, match="is connected to a Ray already"):
        autopar.init()
    with pytest.raises(ClusterError, match="unknown cluster 'rya'"):
        autopar.parallelize(train, cluster="rya", **OPTIONS)
    with pytest.raises(OptionError, match="deadline_s: only steps on a Ray have one"):
        autopar.parallelize(train, cluster="cpu:2", deadline_s=3, **OPTIONS)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    with pytest.raises(OptionError, match=r"mesh: a jax.sharding.Mesh has devices of this process"):
        autopar.parallelize(train, mesh=mesh, cluster="ray")


def test_autopar_is_imported_without_ray() -> None:
    code = (
        "import sys, autopar\nautopar.init, autopar.parallelize, autopar.load_plan\n"
        "assert 'ray' not in sys.modules\n"
        "sys.modules['ray'] = None\nimport importlib.util\nimportlib.util.find_spec = lambda name: None\n"
        "try: autopar.init()\nexcept autopar.ir.errors.ClusterError as error: assert 'needs Ray' in str(error)\n"
        "else: raise AssertionError"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_traced_step_is_the_step(ray_cluster: Any, tmp_path: Path) -> None:
    """Each worker's tasks and each transfer, in their order, beside the simulated ones."""
    far = autopar.parallelize(train, cluster=ray_cluster, **OPTIONS)
    plan = far.plan(jax.eval_shape(init, jax.random.key(0)), X)
    state = far.init(init, jax.random.key(1))
    want = jax.tree.map(np.asarray, far(state, X))
    started_s = time.time()
    with far.trace(tmp_path / "trace.json") as traced:
        for _ in range(2):
            got = jax.tree.map(np.asarray, far(state, X))
    took_s = time.time() - started_s
    jax.tree.map(np.testing.assert_array_equal, got, want)
    far(state, X)
    near = autopar.parallelize(train, plan=plan)
    near.plan(jax.eval_shape(init, jax.random.key(0)), X)
    with near.trace() as there:
        near(jax.tree.map(np.asarray, state), X)
    far.close()
    assert len(traced.steps) == 2
    for step in traced.steps:
        assert 0 < step.makespan_s < took_s
        for mine, its in zip(step.workers, there.steps[0].workers, strict=True):
            assert [e.what for e in mine.events] == [e.what for e in its.events]
            assert all(a.stop_s <= b.start_s for a, b in zip(mine.events, mine.events[1:], strict=False))
            assert mine.peak_bytes > 0
        for mine, its in zip(step.links, there.steps[0].links, strict=True):
            assert (mine.source, mine.target) == (its.source, its.target)
            assert sorted(e.what for e in mine.events) == sorted(e.what for e in its.events)
        first, second = step.workers
        assert first.events[1].stop_s <= second.events[-1].stop_s, "the clocks of two processes differ"
        ends = {e.what: e.stop_s for e in first.events}
        begins = {e.what: e.start_s for e in second.events}
        assert ends["F0.0"] <= begins["FB1.0"] and ends["F0.1"] <= begins["FB1.1"]
    named = {e["args"]["name"] for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
             if e["name"] == "process_name"}  # fmt: skip
    assert {"simulated: workers", "step 1: links"} <= named
    with pytest.raises(OptionError, match="alone=True"):
        far.trace(alone=True)
