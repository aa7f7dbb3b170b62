"""The layers of a train step, run one by one, give the step's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import autopar
from autopar.frontend.gradient import value_and_grad
from autopar.frontend.layering import layered
from autopar.ir.layers import REMAT
from tests.compare import assert_close
from tests.layer_reference import Reference
from tests.models import Model, build

TOLERANCE = 1e-9
WIDTH = 6


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def compare(step: Any, args: Any, *, remats: Any = REMAT, want: Any = None, **options: Any) -> Any:
    """Runs the layered step, and holds it against ``step`` without layers; returns the graph."""
    want = jax.jit(step)(*args) if want is None else want
    found = layered(step, args, **options)
    run = Reference(found)
    for remat in remats:
        assert_close(run(*args, remat=remat), want, TOLERANCE, least_norm=1e-6)
    return found.graph


def options_of(model: Model) -> dict[str, Any]:
    return {k: v for k, v in model.kwargs.items() if k in ("batch_argnums", "static_argnums", "donate_argnums")}


QUICK = ("mlp", "lstm")
REST = ("gpt_scan_dropout", "gpt_tied", "moe", "gpt", "gpt_scan", "gpt_remat", "gpt_scan_remat", "gpt_dropout",
        "encoder_decoder", "conv_net", "resnet", "unet", "dlrm",
        "flax_linen", "flax_nnx", "equinox", "haiku")  # fmt: skip


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.full) for n in REST)])
def test_models(name: str) -> None:
    model = build(name, "float64")
    want = jax.jit(model.step)(*model.args)
    for n, remats in ((1, ("dots",)), (2, ("full",)), (4, ("none",))):
        compare(model.step, model.args, remats=remats, want=want, num_microbatches=n, **options_of(model))


# --- small steps with one thing each ---------------------------------------------------------------------------


def weights(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape) * WIDTH**-0.5


PARAMS = [weights(WIDTH, WIDTH, seed=k) for k in range(6)]
X = weights(8, WIDTH, seed=9) * 3


def step_of(loss: Any, has_aux: bool = False) -> Any:
    def step(params: Any, batch: Any, *rest: Any) -> Any:
        value, grads = value_and_grad(loss, has_aux=has_aux)(params, batch, *rest)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, grads

    return step


@jax.custom_vjp
def straight_through(x: Any) -> Any:
    return jnp.round(4 * x) / 4


straight_through.defvjp(lambda x: (straight_through(x), x), lambda x, g: (g * (jnp.abs(x) < 1),))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_skips_tied_weights_and_custom_rules(n: int) -> None:
    def loss(params: Any, x: Any) -> Any:
        h, kept = x @ params[0], x
        for k, w in enumerate(params[1:]):
            h = straight_through(jnp.tanh(h @ w))
            kept = h if k == 1 else kept
            h = h + kept if k == 3 else h
        return jnp.mean((h @ params[0].T) ** 2)

    graph = compare(step_of(loss), (PARAMS, X), layers=5, num_microbatches=n)
    assert len(graph.layers) == 5 and any(len(users) > 1 for users in graph.users.values())


@pytest.mark.parametrize("n", [1, 2])
def test_what_else_the_update_takes(n: int) -> None:
    def loss(params: Any, batch: Any, scale: Any) -> Any:
        x, mask = batch
        for w in params:
            x = jnp.tanh(x @ w)
        mean = jnp.sum(x * mask) / jnp.sum(mask)
        penalty = sum(jnp.sum(w**2) for w in params)
        aux = {"max": jnp.max(x), "rows": x[:, 0], "exp": jnp.exp(mean), "count": jnp.sum(mask), "scale": scale, "n": 3}
        return mean * scale + 1e-2 * penalty, aux

    mask = (weights(8, WIDTH, seed=3) > 0).astype(float)
    compare(step_of(loss, True), (PARAMS[:3], (X, mask), np.asarray(2.0)), num_microbatches=n, remats=("none",))


def test_a_scan_over_layers_that_only_infers() -> None:
    stacked = np.stack(PARAMS)

    def infer(w: Any, x: Any) -> Any:
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]

    graph = compare(infer, (stacked, X), remats=("none",))
    assert len(graph.layers) == len(PARAMS)
    assert [(s.start, s.stop) for s in graph.slices] == [(k, k + 1) for k in range(len(PARAMS))]


@pytest.mark.parametrize("n", [1, 2])
def test_what_comes_before_the_loss(n: int) -> None:
    def loss(params: Any, x: Any, same: Any, key: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w.astype(jnp.float64))
            x = x * jax.random.bernoulli(key, 0.7, x.shape)
            key, _ = jax.random.split(key)
        return jnp.mean(x * same[0][0, 0])

    def step(params: Any, x: Any, count: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(0), count)
        halves = [w.astype(jnp.float32) for w in params]
        value, grads = value_and_grad(loss)(halves, x, halves, key)  # read again, not differentiated by
        return [p - g for p, g in zip(params, grads, strict=True)], value, count + 1

    args = (PARAMS[:3], X, np.asarray(3, np.int32))
    want = jax.jit(step)(*args)
    found = layered(step, args, num_microbatches=n)
    assert_close(Reference(found)(*args), want, 2e-7)
    assert not any(found.graph.arguments[i] in found.graph.trained for i in range(3))


def test_arguments_that_are_read_differentiated_and_not() -> None:
    def step(params: Any, x: Any) -> Any:
        loss = lambda p, x, q, r: jnp.mean(jnp.tanh(jnp.tanh(x @ p) @ q) @ r @ params)
        value, grads = value_and_grad(loss, (0, 2))(params, x, params, 2 * params)
        return params - grads[0] + 2 * grads[1], value

    graph = compare(step, (PARAMS[0], X), remats=("none",))
    assert len(graph.trained) == 2


@pytest.mark.parametrize("reverse", [False, True])
def test_scans_with_casts_results_and_numbers(reverse: bool) -> None:
    def loss(params: Any, x: Any) -> Any:
        def turn(x: Any, layer: Any) -> Any:
            w, b, k = layer
            x = autopar.layer_boundary(jnp.tanh(x @ w + b)) / (1 + k)
            return x, jnp.sum(x)

        halves = (2 * params["w"]).astype(jnp.float64)
        x, sums = lax.scan(turn, x, (halves, params["b"], jnp.arange(4)), reverse=reverse)
        x, _ = lax.scan(lambda x, _: (jnp.sin(x), None), x, None, length=2)
        return jnp.mean(x) + jnp.sum(sums * jnp.arange(4.0)), sums

    params = {"w": weights(4, WIDTH, WIDTH), "b": weights(4, WIDTH)}
    for n in (1, 2):
        graph = compare(step_of(loss, True), (params, X), num_microbatches=n, remats=("full",))
        assert len(graph.slices) == 8 and len(graph.layers) == 5
        assert graph.layers[1].kind == graph.layers[2].kind  # the turn's number is an operand


def test_a_stacked_argument_read_otherwise_keeps_its_scan_whole() -> None:
    def loss(params: Any, x: Any) -> Any:
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)
        return jnp.mean(x) + 1e-2 * jnp.sum(params**2)

    graph = compare(step_of(loss), (weights(4, WIDTH, WIDTH), X), remats=("none",))
    assert graph.slices == () and any(n.primitive == "scan" for k in graph.kinds for n in k.forward.nodes)


@pytest.mark.parametrize("name", ["finite", "multi"])
def test_conds_around_the_optimizer_are_taken_apart(name: str) -> None:
    adam = optax.adam(1e-2)
    tx = optax.apply_if_finite(adam, 3) if name == "finite" else optax.MultiSteps(adam, 2).gradient_transformation()

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    def step(state: Any, x: Any) -> Any:
        params, opt = state
        value, grads = value_and_grad(loss)(params, x)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), jnp.nan_to_num(value)

    state = (PARAMS[:3], jax.tree.map(np.asarray, tx.init(PARAMS[:3])))
    graph = compare(step, (state, X), remats=("none",))
    assert {w[0] for w in graph.update_layers} == {0, 1, 2}
    for bad in (np.inf,) if name == "finite" else ():
        compare(step, (state, X * bad), remats=("none",))


def test_inference() -> None:
    def forward(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return {"out": x, "again": x, "in": params[0], "one": 1.0}

    graph = compare(forward, (PARAMS, X), remats=("none",))
    assert len(graph.layers) == 6
