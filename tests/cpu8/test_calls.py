"""Every way to call a parallelized step gives what the step gives, from the plans and programs it needs and no more."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.ir.errors import ArgumentError, OptionError

W = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
X = np.random.default_rng(1).standard_normal((16, 16)).astype(np.float32)


def same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        w = jnp.asarray(w)
        assert (g.shape, g.dtype, g.weak_type) == (w.shape, w.dtype, w.weak_type)
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


def step(state: Any, batch: Any, *, scale: Any = 1.0) -> Any:
    loss, grads = autopar.value_and_grad(lambda w: jnp.mean((batch @ w["w"]) ** 2) * scale)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def state() -> Any:
    return {"w": jnp.asarray(W)}


def num_planned(parallel: Any) -> int:
    return len(parallel._entries)


def test_keywords_go_to_their_positions() -> None:
    parallel = autopar.parallelize(step, mesh=(2, 4), donate_argnums=0)
    want = step(state(), X)
    same(parallel(state(), X), want)
    given = state()
    same(parallel(batch=X, state=given), want)
    assert given["w"].is_deleted()  # donated though given by keyword
    assert num_planned(parallel) == 1
    with pytest.raises(TypeError, match="missing a required argument: 'batch'"):
        parallel(state=state())


def test_arguments_by_keyword_only_are_planned_too() -> None:
    def scaled(w: Any, x: Any, *, bias: Any) -> Any:
        return w * 2, x @ w + bias

    pins = {"kwargs['bias']": P("x")}
    parallel = autopar.parallelize(scaled, mesh=(8,), constraints=pins)
    bias = np.ones(32, np.float32)
    for _ in range(2):
        same(parallel(W, X, bias=bias), scaled(W, X, bias=bias))
    same(parallel(W, X, bias=jax.device_put(bias, jax.devices()[2])), scaled(W, X, bias=bias))
    assert num_planned(parallel) == 1
    assert parallel.plan(W, X, bias=bias).in_specs[1] == {"bias": P("x")}
    compiled = parallel.lower(W, X, bias=bias).compile()
    (*_, shardings), _ = compiled.input_shardings
    assert shardings == {"bias": NamedSharding(parallel.last_plan.jax_mesh(), P("x"))}
    same(autopar.parallelize(step, mesh=(8,))(state(), X, scale=2.0), step(state(), X, scale=2.0))


def test_shapes_in_turn_are_planned_once_each() -> None:
    parallel = autopar.parallelize(step, mesh=(8,))
    for _ in range(3):
        for batch in (X, X[:8]):
            same(parallel(state(), batch), step(state(), batch))
    assert num_planned(parallel) == 2
    assert parallel.last_plan is parallel.plan(state(), X[:8])


def test_static_arguments() -> None:
    def maybe(w: Any, train: bool, x: Any, times: int = 2) -> Any:
        return (x @ w * times) if train else x @ w

    parallel = autopar.parallelize(maybe, mesh=(8,), static_argnums=(1, 3))
    for train in (True, False, True):
        same(parallel(W, train, X), maybe(W, train, X))
    same(parallel(W, x=X, train=True), maybe(W, True, X))
    assert num_planned(parallel) == 2
    same(parallel(W, True, X, times=3), maybe(W, True, X, 3))
    assert len(parallel.plan(W, True, X).in_specs) == 2
    same(parallel.lower(W, True, X).compile()(W, X), maybe(W, True, X))


def test_static_arguments_with_microbatches() -> None:
    def train_step(w: Any, squared: bool, x: Any) -> Any:
        return autopar.grad(lambda w: jnp.mean((x @ w) ** 2 if squared else x @ w))(w)

    parallel = autopar.parallelize(train_step, mesh=(8,), static_argnums=1, num_microbatches=4, batch_argnums={"x": 0})
    for squared in (True, False):
        same(parallel(W, squared, x=X), train_step(W, squared, X))


def test_what_steps_return() -> None:
    assert autopar.parallelize(lambda w: None, mesh=(8,))(W) is None
    same(autopar.parallelize(lambda: jnp.ones(3), mesh=(8,))(), jnp.ones(3))
    got = autopar.parallelize(lambda w: (w, None, 0.5, {"n": 3, "w": w}), mesh=(8,))(W)
    same(got, (W, None, 0.5, {"n": 3, "w": W}))


def test_scalars_and_weak_types() -> None:
    def scaled(x: Any, rate: Any) -> Any:
        return x * rate, rate + 1

    parallel = autopar.parallelize(scaled, mesh=(8,), donate_argnums=1)
    half = X.astype(jnp.bfloat16)
    for rate in (0.5, np.float32(0.5), jnp.float32(0.5), jnp.asarray(0.5), 2, True):
        want = jax.jit(scaled)(half, rate)
        same(parallel(half, rate), want)
    same(parallel(np.arange(16), 2), jax.jit(scaled)(np.arange(16), 2))


def test_keys_typed_and_raw() -> None:
    def noisy(key: Any, x: Any) -> Any:
        return x + jax.random.normal(key, x.shape), jax.random.split(key)

    parallel = autopar.parallelize(noisy, mesh=(8,), constraints={"args[1]": P("x")})
    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        (got, keys), (want, wanted) = parallel(key, X), noisy(key, X)
        same(got, want)
        assert keys.dtype == wanted.dtype and bool((keys == wanted).all())


def test_x64_is_another_plan() -> None:
    parallel = autopar.parallelize(lambda x: (x.sum(0), jnp.arange(3.0)), mesh=(8,))
    wide = X.astype(np.float64)
    assert [v.dtype for v in parallel(wide)] == [jnp.float32] * 2
    with jax.enable_x64(True):
        assert [v.dtype for v in parallel(wide)] == [jnp.float64] * 2
    assert [v.dtype for v in parallel(wide)] == [jnp.float32] * 2
    assert num_planned(parallel) == 2


def test_arrays_that_lie_elsewhere_are_moved() -> None:
    parallel = autopar.parallelize(step, mesh=(2, 4), constraints={"args[0]*": P("x", "y")})
    want = step(state(), X)
    other = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    places = [jax.devices()[3], NamedSharding(other, P("b", "a")), NamedSharding(other, P())]
    for place in places * 2:
        same(parallel(jax.device_put(state(), place), jax.device_put(X, place)), want)
    assert num_planned(parallel) == 1


def test_closed_over_arrays() -> None:
    table = jnp.asarray(W) * 3
    parallel = autopar.parallelize(lambda x: x @ table + np.ones(32, np.float32), mesh=(8,))
    for call in (parallel, parallel, jax.jit(parallel)):
        same(call(X), X @ table + 1)
    fresh = autopar.parallelize(lambda x: x @ table * 3, mesh=(8,))
    same(jax.jit(fresh)(X), X @ table * 3)
    same(fresh(X), X @ table * 3)  # planned inside jax.jit, used outside


def test_partials_methods_and_callable_objects() -> None:
    class Layer:
        def __init__(self) -> None:
            self.w = jnp.asarray(W)

        def apply(self, x: Any) -> Any:
            return x @ self.w

        def __call__(self, x: Any) -> Any:
            return x @ self.w + 1

        @functools.partial(autopar.parallelize, mesh=(8,), static_argnums=0)
        def decorated(self, x: Any) -> Any:
            return x @ self.w + 2

    layer = Layer()
    for fun, name in ((layer.apply, "apply"), (layer, "Layer"), (functools.partial(jnp.matmul, X), "matmul")):
        parallel = autopar.parallelize(fun, mesh=(8,))
        assert parallel.plan(X).data.name == name
        same(parallel(X), fun(X))
    same(layer.decorated(X), layer.apply(X) + 2)
    assert Layer.decorated.last_plan is not None


def test_inside_jax_jit() -> None:
    parallel = autopar.parallelize(step, mesh=(8,))
    same(jax.jit(lambda s, x: parallel(parallel(s, x)[0], x))(state(), X), step(step(state(), X)[0], X))
    assert num_planned(parallel) == 1


def test_bare_and_with_options() -> None:
    @autopar.parallelize
    def bare(x: Any) -> Any:
        """Doubles."""
        return x * 2

    @autopar.parallelize(mesh="2x4", donate_argnums=(0,))
    def optioned(x: Any) -> Any:
        return x * 2

    same(bare(X), X * 2)
    same(optioned(jnp.asarray(X)), X * 2)
    assert (bare.__name__, bare.__doc__) == ("bare", "Doubles.")
    assert optioned.last_plan.data.sharding.mesh.shape == (2, 4)
    assert autopar.parallelize(lambda x: x, mesh=8).plan(X).data.sharding.mesh.shape == (8,)


def test_a_mesh_of_jax_gives_names_and_devices() -> None:
    mesh = Mesh(np.array(jax.devices()[:3:-1]).reshape(2, 2), ("data", "model"))
    parallel = autopar.parallelize(step, mesh=mesh, constraints={"args[0]*": P("data", "model"), "args[1]": P("data")})
    (new, _) = parallel(state(), X)
    assert new["w"].sharding.device_set == set(jax.devices()[4:])
    assert parallel.plan(state(), X).in_specs == ({"w": P("data", "model")}, P("data", None))
    made = parallel.init(lambda: {"w": jnp.ones(W.shape)})
    assert made["w"].sharding == NamedSharding(mesh, P("data", "model"))


def test_with_options_replaces_some_and_keeps_the_rest() -> None:
    parallel = autopar.parallelize(step, mesh=(2, 4), donate_argnums=0, constraints={"args[1]": P("y")})
    plan = parallel.plan(state(), X)
    other = parallel.with_options(cluster="dgx-h100:2", mesh=(16,), constraints={"args[1]": P("x")})
    assert other.plan(state(), X).data.cluster.name == "dgx-h100:2"
    assert other.plan(state(), X).in_specs[1] == P("x", None)
    assert other.plan(state(), X).data.inputs[0].donated_to == 0
    assert parallel.plan(state(), X) is plan
    replayed = autopar.parallelize(step, plan=plan, donate_argnums=0)
    assert replayed.plan(state(), X).digest == plan.digest
    assert replayed.with_options(mesh=(8,)).plan(state(), X).data.sharding.mesh.shape == (8,)
    with pytest.raises(OptionError, match="method: 'x' is not one of"):
        parallel.with_options(method="x")
    with pytest.raises(OptionError, match="meshes: parallelize has no such option"):
        parallel.with_options(meshes=(8,))


def test_a_step_is_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    """Though its state is made of NumPy arrays in the first call and of sharded ones after it."""
    parallel = autopar.parallelize(step, mesh=(2, 4), donate_argnums=0)
    made = {"w": W.copy()}
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for _ in range(3):
            made, _loss = parallel(made, X)
    compiled = [r.message for r in caplog.records if r.message.startswith("Finished XLA compilation of jit(step)")]
    assert len(compiled) == 1


@pytest.mark.parametrize("mesh", [(1,), (1, 1), Mesh(np.array(jax.devices()[:1]), ("x",))])
def test_one_device_is_a_mesh_too(mesh: Any) -> None:
    parallel = autopar.parallelize(step, mesh=mesh)
    plan = parallel.plan(state(), X)
    assert plan.sharding.collectives == ()
    same(parallel(state(), X), step(state(), X))


def test_loops_that_start_with_numbers_beside_collectives() -> None:
    """On CPU such a loop waits for collectives (`runtime.one_program.collective_order`): it keeps its values, and how
    weak their types are."""

    def loops(w: Any, x: Any) -> Any:
        rising, sums = jax.lax.scan(lambda c, row: (c * 2.0, (row @ w).sum()), 1.0, x)
        grown = jax.lax.fori_loop(0, 3, lambda i, c: c * 1.5, 2.0)
        turned = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, ~c[1]), (0, True))
        return jnp.sort(w, 0), rising, sums, grown, turned

    pins = {"args[0]": P("x"), "args[1]": P(None, None, "x")}
    parallel = autopar.parallelize(loops, mesh=(8,), constraints=pins)
    x = np.ones((4, 8, 16), np.float32)
    assert parallel.plan(W.T[:16, :16].copy(), x).sharding.collectives
    same(parallel(W.T[:16, :16].copy(), x), jax.jit(loops)(W.T[:16, :16].copy(), x))


def test_an_array_that_was_donated_is_refused_by_name() -> None:
    parallel = autopar.parallelize(step, mesh=(2, 4), donate_argnums=0)
    old = state()
    new, _ = parallel(old, X)
    for _ in range(2):  # the first call after compilation, and later ones
        with pytest.raises(
            ArgumentError, match=r"^step: args\[0\]\['w'\] has been deleted: an earlier call .* Pass what"
        ):
            parallel(old, X)
        new, _ = parallel(new, X)
    scaled = autopar.parallelize(lambda x, *, b: x * b, mesh=(8,))
    with pytest.raises(ArgumentError, match=r"kwargs\['b'\] has been deleted"):
        scaled(X, b=old["w"])


@pytest.mark.parametrize("kept", [False, True])
def test_one_array_in_two_places_of_what_is_donated(kept: bool) -> None:
    """As EMA parameters are the parameters at first; or donated here and kept there."""

    def ema(s: Any, b: Any) -> Any:
        return {"now": s["now"] + b.sum(), "mean": (s["now"] + s["mean"]) / 2}

    for size in (4, 16):  # 4 is not divided: whole on every device, so that no copy is made on the way
        x = jnp.arange(float(size))
        want = ema({"now": x, "mean": x}, x)
        parallel = autopar.parallelize(ema, mesh=(8,), donate_argnums=0)
        other = x if kept else np.arange(float(size), dtype=np.float32)
        same(parallel({"now": x, "mean": x}, other), want)
        if kept:
            np.testing.assert_array_equal(other, np.arange(size))


def test_debug_nans_names_the_operator() -> None:
    def logs(s: Any, x: Any) -> Any:
        return s * 2, jnp.log(x @ s - x).sum()

    parallel = autopar.parallelize(logs, mesh=(2, 4), donate_argnums=0)
    s = jnp.asarray(W[:, :16])
    with (
        jax.debug_nans(True),
        pytest.raises(
            FloatingPointError, match=r"logs: a result holds a NaN: the first NaN is made by log \(node \d+, te"
        ),
    ):
        parallel(s, jnp.asarray(X))
    assert not s.is_deleted()
    parallel(s, jnp.asarray(X))  # without the flag: donated, and no question asked
    assert s.is_deleted()
    with (
        jax.debug_infs(True),
        pytest.raises(FloatingPointError, match="an infinity: the first infinite is made by div"),
    ):
        autopar.parallelize(lambda x: 1 / x, mesh=(8,))(jnp.zeros(8))
