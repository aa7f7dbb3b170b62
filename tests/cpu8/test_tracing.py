"""Real steps, traced: what runs when is the program's order, what devices hold is what the plan says."""

from __future__ import annotations

import gc
import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.inter_op.schedules import SCHEDULES
from autopar.ir.errors import AutoparError
from autopar.ir.program import Run, Send
from autopar.runtime.pieces import shards_of
from autopar.runtime.tracing import PLACED, Traced, TransferWatch, held_bytes
from benchmarks.models import CLIPPED_ADAM, clipped_chain_step
from tests.clusters import SLOW_8
from tests.models import build

WIDTH, BATCH, LAYERS = 256, 512, 6
PARAMS = [np.random.default_rng(k).normal(size=(WIDTH, WIDTH)).astype(np.float32) * WIDTH**-0.5 for k in range(LAYERS)]
X = np.random.default_rng(9).normal(size=(BATCH, WIDTH)).astype(np.float32)


STATE = (PARAMS, jax.device_get(CLIPPED_ADAM.init(PARAMS)))
"""In host memory."""


def planned(**options: Any) -> Any:
    known: Any = {"stages": 2, "submeshes": ["1x2"], "schedule": "1f1b", "layers": LAYERS, **options}
    step = autopar.parallelize(
        clipped_chain_step, cluster=SLOW_8, num_microbatches=4, workers=1, donate_argnums=0, **known
    )
    step.plan(STATE, X)
    return step


THREE: Any = {"stages": 3, "submeshes": ["1x1"]}
SIZES: dict[str, Any] = {"eager_1f1b": THREE, "zb_h1": THREE}
CASES = {
    name: {"schedule": name, **({"stages": 4, "submeshes": ["1x4"]} if kind.chunked else SIZES.get(name, {}))}
    for name, kind in SCHEDULES.items()
    if kind.trains
}
"""Every schedule that trains."""
STEPS = 3
"""To look at: in one of them, a message may come later than planned, and not stand there beside the fullest task."""


def peaks(traced: Traced) -> list[float]:
    """Of each worker, in the fullest of the steps."""
    return [max(w.peak_bytes for w in mine) for mine in zip(*(step.workers for step in traced.steps), strict=True)]


def within(real_bytes: float, plan_bytes: float) -> bool:
    """The bar, of the runtimes' issue."""
    return 0.9 <= real_bytes / plan_bytes <= 1.1


def assert_nothing_left(before: list[int]) -> None:
    """Beside what was there ``before``, some of which, of other tests, may be gone by now."""
    assert all(now <= then for now, then in zip(held_bytes(jax.devices()), before, strict=True))


def test_who_looks_elsewhere_holds_nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that counts has all arrays in its hands: another one does not count what it has let go of itself."""
    mine = jax.block_until_ready(jax.device_put(X, jax.devices()[7]))
    gc.collect()
    [before] = held_bytes(jax.devices()[7:])
    looking = threading.Event()

    def slow(x: jax.Array) -> Any:
        looking.set()
        time.sleep(0.01)
        return shards_of(x)

    monkeypatch.setattr("autopar.runtime.tracing.shards_of", slow)
    other = threading.Thread(target=held_bytes, args=(jax.devices(),))
    other.start()
    looking.wait()
    del mine
    [after] = held_bytes(jax.devices()[7:])
    other.join()
    assert before - after == X.nbytes


@pytest.mark.full
@pytest.mark.parametrize("name", list(CASES))
def test_devices_hold_what_a_gpts_plan_says(name: str) -> None:
    gc.collect()
    before = held_bytes(jax.devices())
    model = build("gpt", "float32", large=True)
    args = jax.device_get(model.args)
    stages, devices = (4, 4) if SCHEDULES[name].chunked else (2, 2)
    step = autopar.parallelize(
        model.step, cluster=SLOW_8, num_microbatches=8, stages=stages, submeshes=[(1, devices)], schedule=name,
        workers=1, donate_argnums=0,
    )  # fmt: skip
    del model
    plan = step.plan(*args)
    state, _ = step(*args)
    with step.trace() as traced:
        for _ in range(STEPS):
            state, _ = step(state, *args[1:])
    meshes = plan.data.pipelined.worker_meshes()
    for mesh, real_bytes, planned in zip(meshes, peaks(traced), traced.simulated.workers, strict=True):
        others = max(before[d] for d in mesh.device_ids)
        assert within(real_bytes - others, planned.peak_bytes), (real_bytes - others, planned.peak_bytes)


@pytest.mark.parametrize(
    "options",
    [pytest.param(v, marks=() if k == "zb_h1" else pytest.mark.full, id=k) for k, v in CASES.items()],
)
def test_devices_hold_what_the_plan_says(options: Any, tmp_path: Path) -> None:
    """Peaks within 10 %, nothing left when the results are deleted; and the trace is the program's."""
    gc.collect()
    before = held_bytes(jax.devices())
    parallel = planned(**options)
    state, value = parallel(STATE, X)
    with parallel.trace(tmp_path / "trace.json") as traced:
        for _ in range(STEPS):
            state, value = parallel(state, X)
    program, meshes = parallel.compiled().program, parallel.last_plan.data.pipelined.worker_meshes()
    step, most = traced.steps[0], peaks(traced)
    for w, (real, simulated) in enumerate(zip(step.workers, traced.simulated.workers, strict=True)):
        others = max(before[d] for d in meshes[w].device_ids)  # what other tests have left there
        assert within(most[w] - others, simulated.peak_bytes), f"worker {w}"
        runs = [i for i in program.workers[w] if isinstance(i, Run)]
        labels = [program.executables[i.executable].label(i.microbatch) for i in runs]
        skipped = [label for label in labels if label.startswith("grad_sync")]  # nothing to be sent: nothing runs
        ran = [what for what, _ in itertools.groupby(e.what for e in real.events)]  # a norm runs once for each stage
        assert ran == [PLACED, *(x for x in labels if x not in skipped)]
        assert all(a.stop_s <= b.start_s for a, b in zip(real.events, real.events[1:], strict=False))
        assert 0 <= step.bubble(w) < 1
    sends = [i for worker in program.workers for i in worker if isinstance(i, Send)]
    assert sum(len(link.events) for link in step.links) == len(sends)
    assert [len(link.events) for link in step.links] == [len(link.events) for link in traced.simulated.links]
    assert all(0 < link.busy_s <= step.makespan_s for link in step.links)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert list(named) == [f"{name}: {what}" for name in ("simulated", *(f"step {n}" for n in range(STEPS)))
                           for what in ("workers", "links")]  # fmt: skip
    assert len(set(named.values())) == len(named)
    assert f"simulated {traced.simulated.makespan_s * 1e3:.3g} ms" in str(traced)
    del state, value
    gc.collect()
    assert_nothing_left(before)


@pytest.mark.parametrize("trained", [False, pytest.param(True, marks=pytest.mark.full)])
def test_devices_hold_what_the_plan_says_of_unequal_layers(trained: bool) -> None:
    """The last stage is fused, and of two layers: one keeps activations, the other, after it, a weight context; with
    ``trained``, the first hands over a context that nobody would store."""
    gc.collect()
    before = held_bytes(jax.devices())
    rng = np.random.default_rng(0)

    def array(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32) * shape[0] ** -0.5

    params = {"in": array(64, 1024), "down": array(1024, 64), "out": array(64, 10240)}
    params["middle"] = [array(1024) for _ in range(10)] if trained else []
    fixed, x = array(10240, 64), array(1024, 64)

    def loss(p: Any, x: Any, fixed: Any) -> Any:
        h = autopar.layer_boundary(jnp.tanh(x @ p["in"]))
        for n in range(10):
            h = jnp.tanh(h * 3 + (p["middle"][n] if trained else 0.1 * n))
        h = autopar.layer_boundary(jnp.tanh(h @ p["down"]))
        return jnp.mean(jnp.tanh(h @ p["out"] @ fixed) ** 2)

    def step(p: Any, x: Any, fixed: Any) -> Any:
        value, grads = autopar.value_and_grad(loss)(p, x, fixed)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), value

    parallel = autopar.parallelize(
        step, cluster=SLOW_8, num_microbatches=4, stages=2, stage_starts=[0, 1], submeshes=["1x1"], schedule="zb_h1",
        workers=1, donate_argnums=0, batch_argnums=1,
    )  # fmt: skip
    assert [s.fused for s in parallel.plan(params, x, fixed).stages.stages] == [False, True]
    state, _ = parallel(params, x, fixed)
    with parallel.trace() as traced:
        for _ in range(STEPS):
            state, _ = parallel(state, x, fixed)
    real_bytes, planned = peaks(traced)[1] - before[1], traced.simulated.workers[1].peak_bytes
    assert within(real_bytes, planned), (real_bytes, planned)


@pytest.mark.full
@pytest.mark.parametrize("steps", [3, 200])
def test_nothing_grows(steps: int) -> None:
    step = planned()
    gc.collect()
    before = held_bytes(jax.devices())
    state: Any = STATE
    batch = jnp.array(X)
    held: set[tuple[int, ...]] = set()
    for _ in range(steps):
        state, value = step(state, batch)
        jax.block_until_ready((state, value))
        held.add(tuple(held_bytes(jax.devices())))
    assert len(held) == 1
    del state, value, batch
    gc.collect()
    assert_nothing_left(before)


def test_a_traced_step_is_the_step() -> None:
    step = planned()
    want = jax.device_get(step(STATE, X))
    with step.trace(memory=False) as traced:
        assert str(traced) == "no step was traced"
        got = [jax.device_get(step(STATE, X)) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, got, [want, want])
    assert len(traced.steps) == 2 and traced.steps[0].workers[0].memory == ()
    assert "not looked at" in str(traced)
    step(STATE, X)
    assert len(traced.steps) == 2


def test_an_error_ends_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    step = planned()
    with monkeypatch.context() as patch:
        patch.setattr(step.compiled().executables[1], "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), step.trace() as traced:
            step(STATE, X)
    assert not traced.steps
    step(STATE, X)


def test_moments_are_made_in_the_round_that_gives_them() -> None:
    """Behind a clip by the global norm: what is made before the norm is known is held once more."""
    step = planned()
    for stage in step.compiled().stages:
        assert len(stage.update.takes) > 1
        for takes in stage.update.takes[1:]:
            held = [a for a in takes.arrays.values() if a.key[0] == "held"]
            assert all(a.type.shape == () for a in held), held


def test_transfers_end_in_any_order() -> None:
    """Each when its own arrays are there, which are not kept then."""
    go = threading.Event()

    def late(x: Any) -> Any:
        go.wait(60)
        return x

    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 20_000, lambda _, y: jnp.tanh(y @ y), x))
    watch = TransferWatch(time.perf_counter())
    pending = jax.jit(lambda x: jax.pure_callback(late, x, x))(slow(jax.device_put(jnp.eye(64), jax.devices()[1])))
    watch.begun(0, 0, time.perf_counter(), [pending])
    there = jnp.full((5, 7), 2.0)
    watch.begun(1, 0, time.perf_counter(), [there])
    watch.begun(2, 0, time.perf_counter(), ())
    del there
    stop_s = time.monotonic() + 20
    while len(watch.events) < 2 or any(x.shape == (5, 7) for x in jax.live_arrays()):
        assert time.monotonic() < stop_s
        time.sleep(0.01)
    assert sorted(number for number, _ in watch.events) == [1, 2]
    go.set()
    watch.close()
    assert [number for number, _ in watch.events][2:] == [0]


def test_what_takes_no_trace_says_so(tmp_path: Path) -> None:
    """The step's results are not lost where the trace cannot be written."""
    step = planned()
    with pytest.raises(AutoparError), step.trace(tmp_path / "nowhere" / "trace.json") as traced:
        step(STATE, X)
    assert len(traced.steps) == 1
