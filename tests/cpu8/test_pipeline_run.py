"""Pipelines run in one process: the numbers of the step on one device, for all models, schedules and meshes."""

from __future__ import annotations

import functools
import gc
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback
from jax.sharding import NamedSharding

import autopar
from autopar.inter_op.schedules import SCHEDULES
from autopar.inter_op.stage_graph import stage_graph
from autopar.ir.errors import LoweringError, OptionError, PlanMismatchError, TraceError
from autopar.ir.serde import to_json
from autopar.runtime.feeds import Feed
from autopar.runtime.in_process import PipelineExecutor
from autopar.runtime.partition_specs import partition_spec
from autopar.runtime.tracing import held_bytes
from tests.clusters import SLOW_8
from tests.compare import FUSED, assert_close
from tests.models import build

TOLERANCE = 1e-9
STEPS = 3


def run(name: str, num_microbatches: int, **options: Any) -> Any:
    """Some steps as a pipeline, each held against the step on one device; returns the plan."""
    model = build(name, "float64")
    known = {k: v for k, v in model.kwargs.items() if k in ("batch_argnums", "static_argnums", "donate_argnums")}
    step = autopar.parallelize(
        model.step, cluster=SLOW_8, num_microbatches=num_microbatches, workers=1,
        **known, **options,
    )  # fmt: skip
    serial = jax.jit(model.step)
    got = want = model.args
    for _ in range(STEPS):
        expected, out = serial(*want), step(*got)
        assert_close(jax.tree.map(np.asarray, out), expected, TOLERANCE, least_norm=1e-6)
        got, want = (out[0], *got[1:]), (expected[0], *want[1:])
    return step.last_plan


QUICK = (
    ("mlp", "gpipe", 3, "1x1", None, 2),
    ("mlp", "interleaved_1f1b", None, "1x4", 4, 4),
    ("gpt_scan", "zb_h1", 4, "1x2", None, 4),
    ("moe", "eager_1f1b", 2, "1x2", None, 4),
    ("unet", "1f1b", 2, "1x2", None, 4),
)
"""(model, schedule, stages, submesh, layers, microbatches): every kind of model, schedule, and size of mesh."""
MODELS = ("mlp", "gpt", "gpt_scan", "gpt_tied", "gpt_dropout", "gpt_scan_dropout", "moe", "conv_net", "unet",
          "encoder_decoder")  # fmt: skip
STAGE_A_MESH = tuple(name for name, record in SCHEDULES.items() if record.trains and not record.chunked)
FULL = [
    ("gpt_dropout", "1f1b", 4, "1x1", None, 2),
    ("gpt_scan_dropout", "zb_h1", 4, "1x2", None, 4),
    ("conv_net", "zb_h2", 2, "1x4", None, 4),
    ("gpt_scan", "interleaved_1f1b", None, "1x4", 4, 4),
    *((name, schedule, 2, "1x2", None, 4) for name in MODELS for schedule in STAGE_A_MESH),
    *((name, "1f1b", 4, "1x1", 4, 4) for name in MODELS),
    *((name, "zb_h1", 2, "1x4", None, 4) for name in MODELS),
    *((name, "interleaved_1f1b", None, "1x4", 8, 4) for name in ("gpt", "gpt_scan", "encoder_decoder")),
]


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(c, marks=pytest.mark.full) for c in FULL)], ids=str)
@pytest.mark.usefixtures("float64")
def test_models(case: Any) -> None:
    name, schedule, stages, submesh, layers, n = case
    plan = run(name, n, stages=stages, submeshes=[submesh], schedule=schedule, layers=layers)
    assert plan.stages.schedule.name == schedule
    if stages is None:  # several on each of two meshes
        assert len(plan.stages.stages) in (4, 6, 8)
    else:
        assert len(plan.stages.stages) == stages


@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt_tied", marks=pytest.mark.full)])
def test_numbers_of_32_bits(name: str) -> None:
    """Loss and gradients: after a first step, the first moment is a tenth of the gradient."""
    model = build(name, "float32")
    step = autopar.parallelize(
        model.step, cluster=SLOW_8, num_microbatches=2, stages=2, submeshes=["1x2"], schedule="1f1b", workers=1,
    )  # fmt: skip
    want, out = jax.jit(model.step)(*model.args), step(*model.args)
    for got, expected in ((out[1], want[1]), (out[0]["opt"][0].mu, want[0]["opt"][0].mu)):
        assert_close(jax.tree.map(np.asarray, got), expected, 1e-5, least_norm=1e-3)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("mlp", "1f1b"), *(pytest.param(name, schedule, marks=pytest.mark.full) for name, schedule in (
        ("moe", "zb_h1"), ("gpt_dropout", "1f1b"), ("mlp", "zb_h1"), ("mlp", "zb_h2"),
        *itertools.product(("gpt_scan", "encoder_decoder"), ("1f1b", "zb_h1", "zb_h2")),
    ))],
)  # fmt: skip
def test_fused_tasks_give_what_they_give_apart(name: str, schedule: str, tmp_path: Path) -> None:
    """Bit for bit: the last stage's forward tasks and those after them. (Gradients of convolutions are not among them:
    XLA's CPU compiler writes these otherwise in a computation that is called.)"""
    model = build(name, "float32")
    step = autopar.parallelize(
        model.step, cluster=SLOW_8, num_microbatches=2, stages=2, submeshes=["1x2"], schedule=schedule, workers=1,
        compiler_options=FUSED,
    )  # fmt: skip
    data = step.plan(*model.args).data
    body = data.pipelined
    assert [stage.fused for stage in body.plan.stages] == [False, True]
    ran = step.compiled().part.stages[1].compiled
    assert ("weight_grad" in ran) == (schedule != "1f1b") and not {"forward", "backward", "input_grad"} & set(ran)
    stages = tuple(replace(stage, fused=False) for stage in body.plan.stages)
    path = tmp_path / "apart.json"
    path.write_text(to_json(replace(data, body=replace(body, plan=replace(body.plan, stages=stages)))))
    apart = step.with_options(plan=path)
    got, want = (jax.device_get(jax.tree.leaves(run(*model.args))) for run in (step, apart))
    assert "forward" in apart.compiled().part.stages[1].compiled
    jax.tree.map(np.testing.assert_array_equal, got, want)


# --- one thing each --------------------------------------------------------------------------------------------------

WIDTH = 8
PARAMS = [np.random.default_rng(k).normal(size=(WIDTH, WIDTH)) * WIDTH**-0.5 for k in range(6)]
X = np.random.default_rng(9).normal(size=(8, WIDTH))
TWO: Any = {
    "cluster": SLOW_8, "num_microbatches": 2, "stages": 2, "submeshes": ["1x2"], "schedule": "1f1b", "workers": 1,
    "layers": 3,
}  # fmt: skip


def hold(step: Any, args: Any, **options: Any) -> Any:
    """One call as a pipeline against the step itself."""
    want = jax.jit(step)(*args)
    parallel = autopar.parallelize(step, **{**TWO, **options})
    out = parallel(*args)
    assert_close(jax.tree.map(np.asarray, out), want, TOLERANCE, least_norm=1e-6)
    return out, parallel


def chain(params: Any, x: Any) -> Any:
    for w in params:
        x = jnp.tanh(x @ w)
    return x


@pytest.mark.usefixtures("float64")
def test_what_the_update_takes_beside_gradients() -> None:
    """Sums, maxima, rows and constants of the microbatches, gradients as outputs, a norm over all stages."""

    def step(params: Any, batch: Any, scale: Any) -> Any:
        def loss(params: Any) -> Any:
            x, mask = batch
            x = chain(params, x)
            mean = jnp.sum(x * mask) / jnp.sum(mask)
            return mean * scale, {"max": jnp.max(x), "rows": x[:, 0], "count": jnp.sum(mask), "scale": scale, "n": 3}

        (value, aux), grads = autopar.value_and_grad(loss, has_aux=True)(params)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
        biggest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(g)) for g in grads])
        new = [p - 0.1 * g / (norm + biggest) for p, g in zip(params, grads, strict=True)]
        return new, value, aux, grads, norm, jnp.zeros(3), scale

    mask = (np.random.default_rng(3).normal(size=(8, WIDTH)) > 0).astype(float)
    out, _ = hold(step, (PARAMS, (X, mask), np.asarray(2.0)))
    assert isinstance(out[0][0], jax.Array)


@pytest.mark.usefixtures("float64")
def test_tied_weights_and_skips_over_stages() -> None:
    """A weight of three stages, a scalar one of all, and residuals over stages: gradients meet at one stage."""

    def step(state: Any, x: Any) -> Any:
        def loss(state: Any) -> Any:
            params, gain = state
            h, first = x, None
            for w in (params[0], params[1], params[2], params[0], params[3], params[0]):
                h = jnp.tanh(h @ w) * gain
                first = h if first is None else first
            return jnp.mean((h + first) ** 2)

        value, grads = autopar.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    state = (PARAMS[:4], np.asarray(1.1))
    out, parallel = hold(step, (state, X), donate_argnums=0, stages=3, submeshes=["1x2"], layers=6)
    assert isinstance(out[0][0][0], autopar.Array), "no handle for what several stages have"
    again = parallel(out[0], X)
    want = jax.jit(step)(jax.jit(step)(state, X)[0], X)
    assert_close(jax.tree.map(np.asarray, again), want, TOLERANCE)
    assert out[0][0][0].is_deleted()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("norm", [False, True])
def test_stacked_weights_lie_by_rows(norm: bool) -> None:
    """Rows of stacked parameters stay where their layers are; partial norms of them meet in an exchange."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0] ** 2)

        value, g = autopar.value_and_grad(loss)(w)
        scale = 1 / (1 + jnp.sqrt(jnp.sum(g**2)) + jnp.max(g)) if norm else 1.0
        return w - 0.1 * scale * g, value, jnp.min(g), jnp.sum(g**2)

    out, parallel = hold(step, (np.stack(PARAMS), X), donate_argnums=0, layers=6)
    assert isinstance(out[0], autopar.Array)
    assert {(p.start, p.stop) for p in out[0].pieces} == {(k, k + 1) for k in range(6)}
    again = parallel(out[0], X)
    assert_close(jax.tree.map(np.asarray, again), jax.jit(step)(jax.jit(step)(np.stack(PARAMS), X)[0], X), TOLERANCE)


LOSSES: Any = {
    "early": lambda p, x: (jnp.mean((x @ p[0]) ** 2) + jnp.mean(chain(p, x) ** 2), None),
    "late": lambda p, x: (jnp.mean(chain(p, x) ** 2) + jnp.mean((x @ p[0]) ** 2), None),
    "weights": lambda p, x: (jnp.mean(chain(p, x) ** 2) + 1e-3 * sum(jnp.sum((w @ w.T) ** 2) for w in p), None),
    "twice": lambda p, x: (jnp.mean(jnp.where(chain(p, x) > 0, jnp.sqrt(abs(chain(p, x)) + 1e-6), 0.0)), None),
    "constant": lambda p, x: (jnp.mean(chain(p, x) ** 2), {"one": jnp.ones(()), "first": jnp.mean(x @ p[0])}),
}


@pytest.mark.parametrize(
    ("loss", "schedule"),
    [
        pytest.param(loss, schedule, marks=() if (i + 3 * k) % 5 == 0 else pytest.mark.full)
        for i, loss in enumerate(LOSSES)
        for k, schedule in enumerate(["1f1b", "zb_h1"])
    ],
)
@pytest.mark.usefixtures("float64")
def test_losses_of_terms_that_early_layers_make(loss: str, schedule: str) -> None:
    """The cotangent of such a term is a number that the last layer knows before it runs."""

    def step(params: Any, x: Any) -> Any:
        (value, more), grads = autopar.value_and_grad(LOSSES[loss], has_aux=True)(params, x)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value, more

    params = [p.astype(np.float64) for p in PARAMS]
    parallel = autopar.parallelize(step, **{**TWO, "schedule": schedule, "layers": 4})
    assert_close(jax.device_get(parallel(params, X)), jax.device_get(jax.jit(step)(params, X)), TOLERANCE)


@pytest.mark.parametrize(
    ("way", "layers"),
    [
        pytest.param(way, layers, marks=() if (i + 2 * k) % 5 == 0 else pytest.mark.full)
        for i, way in enumerate(["once", "results", "twice", "back", "two"])
        for k, layers in enumerate([3, 2, None])
    ],
)
@pytest.mark.usefixtures("float64")
def test_layers_that_read_several_rows(way: str, layers: int | None) -> None:
    """Of stacked weights: fewer layers than the scan has turns, two scans over the same, and one over others."""

    def step(state: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            def turn(h: Any, w: Any) -> Any:
                h = jnp.tanh(h @ w["w"] + w["b"])
                return h, jnp.mean(h, 0) if way == "results" else None

            h, means = jax.lax.scan(turn, x, p["all"])
            if way in ("twice", "back"):
                h, _ = jax.lax.scan(turn, h, p["all"], reverse=way == "back")
            if way == "two":
                h, _ = jax.lax.scan(turn, h, p["others"])
            return jnp.mean(h**2), means

        (value, means), grads = autopar.value_and_grad(loss, has_aux=True)(state)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda p, g: p - 0.1 * g / (1 + norm), state, grads), value, means

    start = {"all": {"w": np.stack(PARAMS[:4]).astype(np.float64), "b": np.zeros((4, WIDTH))}}
    if way == "two":
        start["others"] = {"w": np.stack(PARAMS[3:]).astype(np.float64), "b": np.ones((3, WIDTH))}
    parallel = autopar.parallelize(step, donate_argnums=0, **{**TWO, "layers": layers})
    parallel.plan(start, X)
    graph = parallel.compiled().graph
    for k in range(len(graph.layers)):  # each row takes the place of the one before
        part = stage_graph(graph, k, k + 1, ["none"])
        rows = [i for i, (_, _, stop) in enumerate(part.inputs) if stop]
        assert set(part.graph.donated) >= set(rows)
    state, want = start, start
    for _ in range(3):
        state, *got = parallel(state, X)
        want, *expected = jax.jit(step)(want, X)
        assert_close(jax.tree.map(np.asarray, (state, got)), jax.device_get((want, expected)), TOLERANCE)


def test_what_the_update_tells_the_host() -> None:
    """Once a step, of losses and gradients too; what the loss takes from it is refused."""
    told: list[float] = []

    def telling(params: Any, x: Any) -> Any:
        value, grads = autopar.value_and_grad(lambda p: jnp.mean(chain(p, x) ** 2))(params)
        jax.debug.callback(
            lambda v, g, p: told.extend(map(float, (v, g, p))), value, jnp.sum(grads[0]), params[0][0, 0]
        )
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    parallel = autopar.parallelize(telling, **TWO)
    for _ in range(2):
        jax.block_until_ready(parallel(PARAMS, X))
    jax.effects_barrier()
    got = np.reshape(told, (2, 3))
    told.clear()
    jax.block_until_ready(jax.jit(telling)(PARAMS, X))
    jax.effects_barrier()
    np.testing.assert_allclose(got, [told, told], rtol=1e-5)

    def asking(params: Any, x: Any) -> Any:
        scale = io_callback(lambda: np.float32(2.0), jax.ShapeDtypeStruct((), "float32"))
        value, grads = autopar.value_and_grad(lambda p: scale * jnp.mean(chain(p, x) ** 2))(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    with pytest.raises(TraceError, match=r"asking: the loss takes what io_callback \(.*\) gives, which has effects"):
        autopar.parallelize(asking, **TWO).plan(PARAMS, X)


@pytest.mark.usefixtures("float64")
def test_a_second_plan_from_a_steps_own_results() -> None:
    """A last batch that is smaller: what is traced has no mesh of the first plan's."""

    labels = np.arange(8) % WIDTH

    def step(params: Any, batch: Any) -> Any:
        def loss(p: Any) -> Any:
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(chain(p, batch[0]), batch[1]))

        value, grads = autopar.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    run = autopar.parallelize(step, **{**TWO, "submeshes": ["1x1"], "layers": 2})
    params, want = PARAMS, PARAMS
    for rows in (8, 8, 4):
        batch = (X[:rows], labels[:rows])
        params, value = run(params, batch)
        want, expected = jax.jit(step)(want, batch)
        assert_close(value, expected, TOLERANCE)
    assert_close(jax.device_get(params), jax.device_get(want), TOLERANCE)
    with pytest.raises(TraceError, match=r"step runs as a pipeline, which is no JAX program"):
        jax.jit(lambda p: run(p, batch))(params)


@pytest.mark.usefixtures("float64")
def test_steps_that_infer() -> None:
    def infer(params: Any, x: Any) -> Any:
        y = chain(params, x)
        return y, jnp.sum(y), {"first": y[:, 0]}

    hold(infer, (PARAMS, X), num_microbatches=1, schedule="inference")


@pytest.mark.usefixtures("float64")
def test_a_step_that_follows_runs_on_the_train_steps_state() -> None:
    step, params = autopar.parallelize(train, donate_argnums=0, **TWO), [np.asarray(p) for p in PARAMS]
    state, _ = step(params, X)
    evaluate = step.follow(chain, params, X)
    assert_close(np.asarray(evaluate(state, X)), np.asarray(chain(list(map(np.asarray, state)), X)), TOLERANCE)


def train(params: Any, x: Any) -> Any:
    value, grads = autopar.value_and_grad(lambda p: jnp.mean(chain(p, x) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.mark.usefixtures("float64")
def test_parallelize_runs_pipelines() -> None:
    step = autopar.parallelize(train, donate_argnums=0, **TWO)
    with pytest.raises(PlanMismatchError, match="needs a plan"):
        step.init(lambda: [jnp.asarray(p) for p in PARAMS])
    with pytest.raises(PlanMismatchError, match="needs a plan"):
        step.trace()
    plan = step.plan(PARAMS, X)
    state = step.init(lambda: [jnp.asarray(p) for p in PARAMS])
    with step.trace() as traced:
        pass
    assert not traced.steps and len(traced.simulated.workers) == 2
    devices = [{d.id for d in x.sharding.device_set} for x in state]
    assert set.union(*devices) == {0, 1, 2, 3} and all(len(d) == 2 for d in devices)
    want: Any = PARAMS
    for _ in range(3):
        state, value = step(state, X)
        want, expected = jax.jit(train)(want, X)
        assert_close(value, expected, TOLERANCE)
    assert step.last_plan is plan and [{d.id for d in x.sharding.device_set} for x in state] == devices
    assert_close(jax.tree.map(np.asarray, state), want, TOLERANCE)


def test_what_cannot_run_says_why(tmp_path: Path) -> None:
    step = autopar.parallelize(train, **TWO)
    plan = step.plan(PARAMS, X)
    layers = step.compiled().layered
    with pytest.raises(PlanMismatchError, match=r"run on 4 devices, the last of them 3; this process has 2"):
        PipelineExecutor(layers, plan.data, jax.devices()[:2])
    plan.save(tmp_path / "plan.json")
    loaded = autopar.load_plan(tmp_path / "plan.json")
    replayed = autopar.parallelize(train, plan=loaded)
    with pytest.raises(PlanMismatchError, match="needs a plan"):
        replayed.compiled()
    with pytest.raises(PlanMismatchError, match=r"args\[0\]\[0\] is float32\[4,4\], in the plan float32\[8,8\]"):
        replayed.plan([p[:4, :4] for p in PARAMS], X[:, :4])
    with pytest.raises(PlanMismatchError, match=r"args\[1\] is float32\[4,8\], in the plan float32\[8,8\]"):
        replayed(PARAMS, X[:4])
    with pytest.raises(PlanMismatchError, match="another step"):
        replayed(PARAMS[:5], X)
    with pytest.raises(PlanMismatchError, match="another step"):
        autopar.parallelize(lambda p, x: train(p, 2 * x), plan=loaded).plan(PARAMS, X)
    assert_close(jax.tree.map(np.asarray, replayed(PARAMS, X)), jax.tree.map(np.asarray, step(PARAMS, X)), 0.0)
    with pytest.raises(OptionError, match="method: stages= asks for stages, whose meshes may differ in size"):
        autopar.parallelize(train, stages=(2, None), method="tensor_parallel")
    with pytest.raises(LoweringError, match="train is planned in 2 stages, which are many programs"):
        step.lower(PARAMS, X)


@pytest.mark.full
def test_arguments_of_other_dtypes() -> None:
    """What JAX converts as it is called is converted; nothing is cut short: what has another dtype is planned again."""

    def scaled(params: Any, x: Any, scale: Any, count: Any) -> Any:
        value, grads = autopar.value_and_grad(lambda p: jnp.mean(chain(p, x) ** 2))(params)
        return [p - scale * g for p, g in zip(params, grads, strict=True)], value, count + 1

    given = (PARAMS, X, np.float32(0.1), np.int32(3))
    parallel = autopar.parallelize(scaled, **TWO)
    want = jax.device_get(parallel(*given))
    executor: Any = parallel.compiled()
    for scale, count in ((0.1, 3), (np.float64(0.1), np.int64(3)), (jnp.float32(0.1), True)):
        got = parallel(PARAMS, X.astype(np.float64), scale, count)
        assert int(got[2]) == int(count) + 1
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(got[:2]), want[:2])
    for other, text in (
        ((PARAMS, X.astype(np.int32), 0.1, 3), r"args\[1\] is int32\[8,8\]; the plan is for float32\[8,8\]"),
        ((PARAMS, jnp.asarray(X, "bfloat16"), 0.1, 3), r"args\[1\] is bfloat16\[8,8\]"),
        ((PARAMS, X, 0.1, 3.5), r"args\[3\] is 3\.5; the plan is for int32"),
    ):
        with pytest.raises(TypeError, match=text):
            executor(jax.tree.leaves(other))
        assert_close(jax.device_get(parallel(*other)), jax.device_get(jax.jit(scaled)(*other)), 1e-5)
    with pytest.raises(TypeError, match=r"args\[2\] is 'much'; the plan is for float32"):
        executor(jax.tree.leaves((PARAMS, X, "much", 3)))
    with pytest.raises(TraceError, match=r"args\[2\] is 'much', a str"):
        parallel(PARAMS, X, "much", 3)
    with pytest.raises(TraceError, match="scaled cannot be traced: TypeError"):
        parallel(PARAMS, X, None, 3)


def test_threads_call_one_step() -> None:
    """Each gets its own batch's numbers."""
    step = autopar.parallelize(train, **TWO)
    batches = [X * k for k in range(1, 5)]
    want = [float(step(PARAMS, x)[1]) for x in batches]
    with ThreadPoolExecutor(len(batches)) as threads:
        for _ in range(5):
            assert list(threads.map(lambda x: float(step(PARAMS, x)[1]), batches)) == want


def test_an_error_of_one_worker_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a worker that failed, and the next step runs."""
    step = autopar.parallelize(train, **TWO)
    step.plan(PARAMS, X)
    first = step.compiled().executables[0]
    with monkeypatch.context() as patch:
        patch.setattr(first, "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(PARAMS, X)
    want = jax.device_get(step(PARAMS, X))
    with monkeypatch.context() as patch:
        patch.setattr(Feed, "take", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(PARAMS, X)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(step(PARAMS, X)), want)


def test_what_is_sent_waits_until_it_is_expected() -> None:
    """The target's devices hold nothing of it before."""
    step = autopar.parallelize(train, **TWO)
    plan = step.plan(PARAMS, X).stages
    executor = step.compiled()
    transport = executor.transport
    number = next(n for n, t in enumerate(executor.program.transfers) if t.source == 0)
    cut = plan.cuts[executor.program.transfers[number].cut]
    [value] = cut.values
    source, target = (set(plan.stages[s].mesh.device_ids) for s in (cut.source, cut.target))
    mesh, spec = executor.part.meshes[cut.source], partition_spec(value.src_spec)
    sent = jax.device_put(jnp.ones(value.type.shape, value.type.dtype), NamedSharding(mesh, spec))
    given = {("send", value.value, executor.program.transfers[number].cut): sent}
    devices = [jax.devices()[d] for d in sorted(target - source)]

    def held() -> int:
        gc.collect()
        return sum(held_bytes(devices))

    for first, second in (("send", "expect"), ("expect", "send")):
        transport.start()
        before = held()
        arguments = {"send": (number, 0, given), "expect": (number, 0)}
        getattr(transport, first)(*arguments[first])
        assert not transport.arrived(number, 0) and held() == before
        getattr(transport, second)(*arguments[second])
        assert transport.arrived(number, 0) and held() > before
        [arrived] = transport.receive(number, 0).values()
        np.testing.assert_array_equal(arrived, sent)
        del arrived


def test_what_the_step_returns_as_it_is_stays() -> None:
    """Donated, it comes out under its own name, or another's."""

    def keeping(state: Any, x: Any) -> Any:
        new, value = train(state["w"], x)
        return {"w": new, "before": state["w"], "frozen": state["frozen"]}, value

    state: Any = {"w": [jnp.asarray(p) for p in PARAMS], "before": [jnp.zeros_like(p) for p in PARAMS]}
    state["frozen"] = jnp.ones(3)
    state["before"] = state["w"]  # the same arrays, donated twice
    want = jax.tree.map(jnp.copy, state)
    step = autopar.parallelize(keeping, donate_argnums=0, **TWO)
    for _ in range(3):
        state, _ = step(state, X)
        want, _ = jax.jit(keeping)(want, X)
        assert_close(jax.tree.map(np.asarray, state), jax.tree.map(np.asarray, want), 1e-6)


def test_nothing_is_kept_from_step_to_step() -> None:
    step = autopar.parallelize(train, donate_argnums=0, **TWO)
    state: Any = [jnp.asarray(p) for p in PARAMS]
    counts: list[int] = []
    for _ in range(4):
        state, value = step(state, X)
        jax.block_until_ready((state, value))
        counts.append(len(jax.live_arrays()))
    assert counts[1] == counts[2] == counts[3]
