"""Recomputation in plans: a limit that no plan meets which keeps everything, the same numbers, the collectives listed,
and a compiled step that fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from autopar.checking import _first_fault as first_fault
from autopar.checking import _Runs as Runs
from autopar.ir.errors import InfeasibleError, OptionError
from autopar.ir.plan_text import plan_text
from autopar.ir.serde import from_json, to_json
from autopar.jax_compat import remat_is_undone
from autopar.planner import plan_graph
from autopar.runtime.one_program.collective_order import Order
from autopar.verify.verifying import verify_step
from benchmarks.models import gpt
from tests.compare import assert_close, assert_same_collectives

pytestmark = pytest.mark.xdist_group("recompute")  # one process makes what all tests of the file share

undone = pytest.mark.skipif(remat_is_undone(), reason="XLA's CPU compiler before jaxlib 0.12 undoes rematerialisation")
LAYERS, WIDTH, ROWS = 3, 32, 2048
PART = 0.7
"""The limit, of the peak without one."""


def step(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        y = x
        for up, down in params:
            y = y + jnp.tanh(y @ up) @ down
        return jnp.mean(y**2)

    value, grads = autopar.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments() -> Any:
    draw = np.random.default_rng(0)
    params = [
        (0.05 * draw.normal(size=(WIDTH, 4 * WIDTH)), 0.05 * draw.normal(size=(4 * WIDTH, WIDTH)))
        for _ in range(LAYERS)
    ]
    return params, draw.normal(size=(ROWS, WIDTH))


def planned(memory_bytes: int | None = None, **options: Any) -> Any:
    return autopar.parallelize(step, mesh=(8,), memory_bytes=memory_bytes, num_microbatches=1, **options)


@pytest.fixture(scope="module")
def recomputing() -> Iterator[tuple[Any, Any, Any]]:
    """A step planned for a limit that it meets by recomputing only; its arguments; its plan without a limit."""
    with jax.enable_x64(True):
        args = arguments()
        free = planned().plan(*args)
        sharded = planned(int(PART * free.predictions.peak_memory_bytes))
        sharded.plan(*args)
        yield sharded, args, free


@undone
def test_a_limit_that_no_plan_meets_which_keeps_everything(recomputing: Any) -> None:
    sharded, args, free = recomputing
    plan = sharded.plan(*args)
    limit = plan.data.config.memory_bytes
    with pytest.raises(InfeasibleError, match="recompute=None"):
        planned(limit, recompute=False).plan(*args)
    assert "values are recomputed" in plan_text(plan.data)
    rows = plan.sharding.recompute
    assert rows
    assert plan.predictions.peak_memory_bytes <= limit
    assert plan.predictions.step_s > free.predictions.step_s
    assert sum(r.saved_bytes for r in rows) > 0.5 * (free.predictions.peak_memory_bytes - limit)
    compiled = sharded.lower(*args).compile()
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert held + memory.temp_size_in_bytes <= limit
    assert_same_collectives(plan, compiled.as_text())
    assert_close(sharded(*args), jax.jit(step)(*args), 1e-9)
    assert from_json(type(plan.data), to_json(plan.data)) == plan.data
    assert f"recomputed: {len(rows)} values" in plan_text(plan.data)


@undone
def test_check_follows_recomputed_values(recomputing: Any) -> None:
    sharded, args, _ = recomputing
    assert all(leaf.agrees for leaf in autopar.check(sharded, args=args).leaves)
    assert first_fault(Runs(sharded.planned(*args)), None)[0] == ""


@undone
def test_a_saved_plan_is_replayed_with_what_it_recomputes(recomputing: Any, tmp_path: Any) -> None:
    sharded, args, _ = recomputing
    plan = sharded.plan(*args)
    plan.save(tmp_path / "plan.json")
    replayed = autopar.parallelize(step, plan=str(tmp_path / "plan.json"))
    assert replayed.plan(*args).digest == plan.digest
    assert_close(replayed(*args), jax.jit(step)(*args), 1e-9)


@pytest.mark.skipif(not remat_is_undone(), reason="from jaxlib 0.12 on the compiler keeps recomputation")
def test_nothing_is_recomputed_where_the_compiler_undoes_it() -> None:
    args = jax.tree.map(np.float32, arguments())
    free = planned(recompute=True).plan(*args)
    assert "undoes it" in plan_text(free.data)
    limit = int(PART * free.predictions.peak_memory_bytes)
    with pytest.raises(InfeasibleError, match="CPU compiler before jax"):
        planned(limit, recompute=True).plan(*args)


CALLS: list[float] = []


def dropped(h: Any, key: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0.0)


def routed(h: Any, key: Any) -> Any:
    _, where = jax.lax.top_k(h, 4)
    return h * jnp.zeros_like(h).at[jnp.arange(h.shape[0])[:, None], where].set(1.0)


def scaled_by_largest(h: Any, key: Any) -> Any:
    return h * jnp.max(h, axis=-1, keepdims=True)


def checkpointed(h: Any, key: Any) -> Any:
    return h + jax.checkpoint(lambda h: jnp.sin(jnp.cos(h)))(h)


def reported(h: Any, key: Any) -> Any:
    jax.debug.callback(CALLS.append, jnp.sum(h))
    return h


@undone
@pytest.mark.parametrize(
    ("inside", "part", "kept"),
    [
        (dropped, 0.8, ()),
        (routed, 0.75, ("top_k",)),
        (scaled_by_largest, 0.85, ("eq",)),
        (checkpointed, 0.7, ("remat2",)),
        (reported, 0.75, ("debug_callback",)),
    ],
)
def test_numbers_and_effects_are_those_of_the_plain_step(inside: Any, part: float, kept: tuple[str, ...]) -> None:
    def donating(state: Any, x: Any, key: Any) -> Any:
        def loss(params: Any) -> Any:
            y = x
            for i, (up, down) in enumerate(params):
                y = y + inside(jnp.tanh(y @ up), jax.random.fold_in(key, i)) @ down
            return jnp.mean(y**2)

        params, momentum = state
        value, grads = autopar.value_and_grad(loss)(params)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return (jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum), value

    def given() -> Any:
        params, x = jax.tree.map(jnp.asarray, arguments())
        return (params, jax.tree.map(jnp.zeros_like, params)), x, jax.random.key(3)

    with jax.enable_x64(True):
        options: dict[str, Any] = {"mesh": (8,), "num_microbatches": 1, "donate_argnums": 0, "time_limit_s": 10.0}
        free = autopar.parallelize(donating, **options).plan(*given())
        limit = int(part * free.predictions.peak_memory_bytes)
        sharded = autopar.parallelize(donating, memory_bytes=limit, recompute=True, **options)
        plan = sharded.plan(*given())
        assert plan.sharding.recompute
        assert not {r.what.split(" ")[0] for r in plan.sharding.recompute}.intersection(kept)
        CALLS.clear()
        got = jax.block_until_ready(sharded(*given()))
        jax.effects_barrier()
        called = sorted(CALLS)
        CALLS.clear()
        want = jax.block_until_ready(jax.jit(donating)(*given()))
        jax.effects_barrier()
        assert_close(got, want, 1e-9)
        np.testing.assert_allclose(called, sorted(CALLS), rtol=1e-6)


@undone
@pytest.mark.parametrize("method", ["data_parallel", "zero3"])
def test_a_forced_method_holds_where_values_are_recomputed(method: str) -> None:
    args = jax.tree.map(np.float32, arguments())
    free = planned(method=method).plan(*args)
    limit = int(PART * free.predictions.peak_memory_bytes)
    sharded = planned(limit, method=method)
    plan = sharded.plan(*args)
    assert plan.sharding.recompute and plan.predictions.peak_memory_bytes <= limit
    assert [a.spec.is_replicated for a in plan.data.inputs] == [a.spec.is_replicated for a in free.data.inputs]
    assert plan.data.inputs[0].spec.is_replicated == (method == "data_parallel")
    assert_close(sharded(*args), jax.jit(step)(*args), 1e-5)


@undone
def test_a_weight_is_gathered_again_for_the_backward_pass() -> None:
    with jax.enable_x64(True):
        draw = np.random.default_rng(0)
        weights = [(0.05 * draw.normal(size=(64, 256)), 0.05 * draw.normal(size=(256, 64))) for _ in range(8)]
        args = weights, draw.normal(size=(256, 64))
        free = planned(method="zero3").plan(*args)
        sharded = planned(int(0.95 * free.predictions.peak_memory_bytes), method="zero3", donate_argnums=0)
        plan = sharded.plan(*args)
        again = [r for r in plan.sharding.recompute if r.what.startswith("gather of args[0]")]
        assert again and all(r.saved_bytes == 8 * 64 * 256 and r.cost_s > 0 for r in again)
        gathers = [sum(c.count for c in p.sharding.collectives if c.kind == "all-gather") for p in (free, plan)]
        assert gathers[1] == gathers[0] + len(again)
        assert_same_collectives(plan, sharded.lower(*args).compile().as_text())
        want = jax.jit(step)(*args)
        assert_close(sharded(*args), want, 1e-9)


@undone
@pytest.mark.parametrize(
    ("recompute", "slow", "tried"), [(None, -1.0, True), (None, 1e9, False), (False, -1.0, False), (True, 1e9, True)]
)
def test_where_something_fits_it_is_looked_for_if_that_is_slow_or_on_request(
    monkeypatch: pytest.MonkeyPatch, recompute: bool | None, slow: float, tried: bool
) -> None:
    calls: list[int] = []
    monkeypatch.setattr("autopar.planner.with_recomputation", lambda *given: calls.append(given[3]))
    monkeypatch.setattr("autopar.planner.WORTH", -1.0)  # any plan is slow
    monkeypatch.setattr("autopar.planner.SLOW", slow)
    args = jax.tree.map(np.float32, ([(np.ones((128, 512)), np.ones((512, 128)))] * LAYERS, np.ones((1024, 128))))
    free = planned().plan(*args)
    peaks = [int(c.peak_bytes) for c in free.data.provenance.considered if c.peak_bytes is not None]
    limit = max(peak for peak in peaks if peak < free.predictions.peak_memory_bytes)  # a baseline's fits
    planned(limit, recompute=recompute, time_limit_s=2.0).plan(*args)
    assert bool(calls) == tried
    if recompute is not False:
        with pytest.raises(InfeasibleError, match="arguments take at least"):
            planned(limit // 100, recompute=recompute).plan(*args)
        assert limit // 100 not in calls


@undone
@pytest.mark.parametrize("fit", [((2, 4), False), ((8,), None)])
def test_of_several_meshes_those_without_recomputation_come_first(monkeypatch: pytest.MonkeyPatch, fit: Any) -> None:
    calls: list[Any] = []

    def only_one_fits(graph: Any, cluster: Any, logical: Any, config: Any, **rest: Any) -> Any:
        calls.append((logical.shape, config.recompute))
        if calls[-1] != fit:
            raise InfeasibleError("does not fit")
        return plan_graph(graph, cluster, logical, config, **rest)

    monkeypatch.setattr("autopar.planner.plan_graph", only_one_fits)
    plan = autopar.parallelize(step, stages=1, num_microbatches=1).plan(*jax.tree.map(np.float32, arguments()))
    assert plan.data.sharding.mesh.shape == fit[0]
    assert plan.data.config.recompute is None
    both = [(2, 4), (8,)]
    assert [shape for shape, _ in calls] == both * (1 if fit[1] is False else 2)
    assert [recompute for _, recompute in calls] == [False] * 2 + [None] * (len(calls) - 2)


def test_recompute_is_one_of_three() -> None:
    with pytest.raises(
        OptionError, match=r"recompute: 'yes' says what layers keep, .* without stages= it is None, True"
    ):
        planned(recompute="yes")


def test_what_blocks_wait_for_on_gpus() -> None:
    """Zeros that the compiler cannot know, of what was before: numbers stay, and nothing is emitted elsewhere."""
    x, w = np.arange(16.0, dtype=np.float32).reshape(8, 2), np.ones((2, 2), np.float32)

    def run(platform: str) -> tuple[Any, str]:
        def local(x: Any, w: Any) -> Any:
            order = Order.on(platform, "x")
            inside = order.inline()
            assert order.body().in_turn == inside.in_turn == order.in_turn == (platform == "cpu")
            earlier = jax.lax.psum(x @ w, "x")
            order.communicated(earlier)
            (held, other) = order.after([x, w], (0,), [earlier], inside)
            assert other is w and (inside.gate is not None) == (platform in ("cpu", "gpu"))
            assert bool(order.seen) == (platform == "cpu")
            return jax.lax.psum(inside.after_loop(held * 2), "x")

        mesh = Mesh(np.array(jax.devices()), "x")
        fun = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P("x"), P()), out_specs=P(), check_vma=False))
        return fun(x, w), fun.lower(x, w).as_text()

    numbers, texts = zip(*map(run, ("tpu", "gpu")), strict=True)
    np.testing.assert_array_equal(numbers[0], numbers[1])
    assert "shift_right_logical" in texts[1] and "shift_right_logical" not in texts[0]


@pytest.mark.full
def test_a_recomputed_plan_compiled_for_gpus() -> None:
    """Blocks begin when the plan says: the compiled peak is near the planned one, and below that of keeping all."""
    pytest.importorskip("jax_cuda12_plugin", reason="needs the extra verify-cuda")
    make, args = gpt(layers=4, hidden=512, heads=8, seq=256, vocab=2048, batch=64)
    options: dict[str, Any] = {"cluster": "dgx-h100", "mesh": (8,), "donate_argnums": 0}
    free = autopar.parallelize(make, **options)
    limit = int(0.6 * free.plan(*args).predictions.peak_memory_bytes)
    less = autopar.parallelize(make, recompute=True, memory_bytes=limit, **options)
    peaks = {}
    for name, step_ in (("free", free), ("less", less)):
        (peak,) = [f for f in verify_step(step_, *args).figures if f.name == "peak memory"]
        assert peak.planned is not None
        peaks[name] = peak.compiled
    assert peaks["less"] < 0.75 * peaks["free"] and peaks["less"] < 1.2 * limit
