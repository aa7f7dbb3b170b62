"""`serial`: n microbatches give the full batch's step, or are refused with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar.gradient import grad, value_and_grad
from autopar.ir.errors import MicrobatchError
from autopar.microbatch import serial

BATCH, TIME, WIDTH, CLASSES = 8, 6, 8, 5


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def params() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"a": (WIDTH, WIDTH), "b": (WIDTH,), "out": (WIDTH, CLASSES), "layers": (3, WIDTH, WIDTH)}
    return {k: jnp.asarray(rng.normal(size=s) * 0.4) for k, s in shapes.items()}


def batch() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {
        "x": jnp.asarray(rng.normal(size=(BATCH, TIME, WIDTH))),
        "y": jnp.asarray(rng.integers(0, CLASSES, (BATCH, TIME))),
        "mask": jnp.asarray(rng.random((BATCH, TIME)) > 0.3),
        "row": jnp.asarray(rng.integers(0, CLASSES, BATCH)),
    }


def step_of(loss: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """Three Adam steps' worth of state: (params, optimizer state)."""
    optimizer = optax.adam(1e-2)

    def step(state: Any, data: Any, *rest: Any) -> Any:
        weights, opt = state
        value, grads = value_and_grad(loss, has_aux=has_aux)(weights, data, *rest)
        updates, opt = optimizer.update(grads, opt, weights)
        return (optax.apply_updates(weights, updates), opt), value, grads

    return step


def state_of(weights: Any) -> Any:
    return weights, optax.adam(1e-2).init(weights)


def close(a: Any, b: Any, tolerance: float = 2e-13) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for path, x in jax.tree_util.tree_flatten_with_path(a)[0]:
        y = dict(jax.tree_util.tree_flatten_with_path(b)[0])[path]
        assert x.shape == y.shape and x.dtype == y.dtype, path
        scale = max(1.0, float(np.abs(np.asarray(y, np.float64)).max(initial=0)))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path))


def exact(loss: Callable[..., Any], *rest: Any, aux: bool = False, weights: Any = None, ns: Any = (2, 4)) -> None:
    """Three steps with n microbatches equal three steps with the full batch."""
    step = step_of(loss, aux)
    data = batch()
    reference, serials = jax.jit(step), {n: jax.jit(serial(step, n)) for n in ns}
    start = state_of(params() if weights is None else weights)
    wanted = start
    found = dict.fromkeys(ns, start)
    for _ in range(3):
        wanted, *values = reference(wanted, data, *rest)
        for n in ns:
            found[n], *others = serials[n](found[n], data, *rest)
            close(others, values)
    for n in ns:
        close(found[n], wanted, 1e-9)  # Adam divides by tiny second moments


def tokens(p: Any, data: Any) -> Any:
    h = jnp.tanh(data["x"] @ p["a"] + p["b"])
    return jax.nn.log_softmax(h @ p["out"])


def picked(p: Any, data: Any) -> Any:
    return -jnp.take_along_axis(tokens(p, data), data["y"][..., None], -1)[..., 0]


LOSSES: dict[str, Callable[..., Any]] = {
    "mean": lambda p, d: picked(p, d).mean(),
    "sum": lambda p, d: picked(p, d).sum(),
    "masked mean": lambda p, d: (picked(p, d) * d["mask"]).sum() / jnp.maximum(d["mask"].sum(), 1),
    "where mean": lambda p, d: jnp.mean(picked(p, d), where=d["mask"]),
    "mean and L2": lambda p, d: picked(p, d).mean() + 1e-2 * sum(jnp.vdot(x, x) for x in jax.tree.leaves(p)),
    "L2 first, scaled": lambda p, d: 3.0 * (jnp.sum(p["a"] ** 2) - picked(p, d).mean()) / 7.0,
    "mean of means": lambda p, d: picked(p, d).mean(0).mean(),
    "per example": lambda p, d: jax.vmap(lambda x, y: picked(p, {"x": x, "y": y}).mean())(d["x"], d["y"]).mean(),
    "own row": lambda p, d: -tokens(p, d).mean(1)[jnp.arange(BATCH), d["row"]].mean(),
    "batch in shape": lambda p, d: picked(p, d).sum() / d["x"].shape[0],
    "flattened": lambda p, d: jnp.tanh(d["x"].reshape(-1, WIDTH) @ p["a"]).reshape(d["x"].shape).sum(),
    "one-hot": lambda p, d: -(tokens(p, d) * jax.nn.one_hot(d["y"], CLASSES)).sum(-1).mean(),
    "optax": lambda p, d: optax.softmax_cross_entropy_with_integer_labels(d["x"] @ p["out"], d["y"]).mean(),
    "layers": lambda p, d: jnp.sum(
        jax.lax.scan(lambda h, w: (jax.nn.gelu(h @ w), None), d["x"], p["layers"])[0] ** 2
    ),
    "remat masked": lambda p, d: jax.checkpoint(
        lambda p, d: (picked(p, d) * d["mask"]).sum() / d["mask"].sum() + jnp.sum(p["b"] ** 2)
    )(p, d),
    "over examples": lambda p, d: jax.lax.map(lambda x: jnp.sum(jnp.sin(x @ p["a"])), d["x"]).mean(),
    "time scan": lambda p, d: jax.lax.scan(
        lambda h, x: (jnp.tanh(h @ p["a"] + x), jnp.sum(h**2)), jnp.zeros((BATCH, WIDTH)), d["x"].swapaxes(0, 1)
    )[1].mean() if False else _time_scan(p, d),
    "two views": lambda p, d: _two_views(p, d),
    "embedding": lambda p, d: jnp.tanh(p["out"].T[d["y"]] * d["x"]).mean(),
    "segment sum": lambda p, d: jnp.sum(
        p["out"].T * jnp.zeros((CLASSES, WIDTH)).at[d["y"].reshape(-1)].add(d["x"].reshape(-1, WIDTH))
    ),
    "no batch at all": lambda p, d: jnp.sum(p["a"] ** 2),
    "pool": lambda p, d: nn.max_pool(jnp.tanh(d["x"] @ p["a"]), (2,), (2,)).mean(),
    "data normalised": lambda p, d: picked(p, {**d, "x": (d["x"] - d["x"].mean(0)) / d["x"].std(0)}).mean(),
    "sorted data": lambda p, d: jnp.mean(jnp.tanh(jnp.sort(d["x"], 0) @ p["a"]) * d["x"]),
    "conv": lambda p, d: jnp.mean(
        jax.lax.conv_general_dilated(d["x"], p["layers"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")) ** 2
    ),
    "attention": lambda p, d: _attention(p, d),
    "while": lambda p, d: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1]), (0, d["x"]))[1].mean()
    * jnp.sum(p["a"]),
    "cond": lambda p, d: jax.lax.cond(
        p["b"][0] > 0, lambda h: jnp.sum(jnp.sin(h)), lambda h: jnp.sum(h**2), d["x"] @ p["a"]
    ),
    "carried sum": lambda p, d: _carried_sum(p, d),
    "bilinear sum": lambda p, d: jnp.einsum("bti,btj,ij->", d["x"], d["x"], p["a"]),
}


def _time_scan(p: Any, d: Any) -> Any:
    def turn(h: Any, x: Any) -> Any:
        h = jnp.tanh(h @ p["a"] + x)
        return h, h

    start = jnp.zeros((d["x"].shape[0], WIDTH))
    return jnp.mean(jax.lax.scan(turn, start, d["x"].swapaxes(0, 1))[1] ** 2)


def _two_views(p: Any, d: Any) -> Any:
    both = jnp.concatenate([d["x"], d["x"] + 0.1])
    h = jnp.tanh(both @ p["a"])
    one, two = h[: d["x"].shape[0]], h[d["x"].shape[0] :]
    return jnp.mean((one - two) ** 2 * 3 + one)


def _attention(p: Any, d: Any) -> Any:
    q, k, v = (d["x"] @ p["layers"][i] for i in range(3))
    q, k, v = (x.reshape(*x.shape[:2], 2, WIDTH // 2) for x in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    causal = jnp.tril(jnp.ones((TIME, TIME), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(d["x"].shape).var(-1).mean()


def _carried_sum(p: Any, d: Any) -> Any:
    def turn(carry: Any, w: Any) -> Any:
        h, total = carry
        h = jnp.tanh(h @ w)
        return (h, total + jnp.mean(h**2) + 0.1 * jnp.sum(w**2)), None

    return jax.lax.scan(turn, (d["x"], 0.0), p["layers"])[0][1]


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_exact(name: str) -> None:
    exact(LOSSES[name])


def test_one_example_per_microbatch() -> None:
    exact(LOSSES["masked mean"], ns=(8,))


AUX: dict[str, Callable[..., Any]] = {
    "per example": lambda p, d: tokens(p, d),
    "count": lambda p, d: (tokens(p, d).argmax(-1) == d["y"]).sum(),
    "argmax": lambda p, d: tokens(p, d).argmax(-1),
    "maximum": lambda p, d: tokens(p, d).max(),
    "minimum": lambda p, d: tokens(p, d).min(0),
    "any": lambda p, d: (tokens(p, d) > -0.2).any(),
    "all": lambda p, d: (tokens(p, d) < 0.2).all(),
    "accuracy": lambda p, d: (tokens(p, d).argmax(-1) == d["y"]).mean(),
    "batch size": lambda p, d: jnp.asarray(d["x"].shape[0]),
    "mask count": lambda p, d: d["mask"].sum(),
    "weight norm": lambda p, d: jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(p))),
    "perplexity": lambda p, d: jnp.exp(picked(p, d).mean()),
    "argmax over batch": lambda p, d: tokens(p, d)[:, 0, 0].argmax(),
    "variance over batch": lambda p, d: tokens(p, d).var(0),
    "median": lambda p, d: jnp.median(picked(p, d)),
    "transposed": lambda p, d: tokens(p, d).transpose(2, 1, 0),
    "flattened": lambda p, d: tokens(p, d).reshape(-1, CLASSES),
    "time first, flattened": lambda p, d: tokens(p, d).swapaxes(0, 1).reshape(-1, CLASSES),
    "the batch": lambda p, d: d["x"],
    "constant": lambda p, d: 3.5,
    "histogram": lambda p, d: jnp.zeros(CLASSES, int).at[tokens(p, d).argmax(-1).reshape(-1)].add(1),
}


@pytest.mark.parametrize("name", AUX)
def test_auxiliary_results_combine_by_what_they_are(name: str) -> None:
    exact(lambda p, d: (LOSSES["mean"](p, d), {"aux": AUX[name](p, d)}), aux=True)


def refused(loss: Callable[..., Any], match: str, *, aux: bool = False) -> None:
    with pytest.raises(MicrobatchError, match=match) as caught:
        jax.eval_shape(serial(step_of(loss, aux), 2), state_of(params()), batch())
    assert "test_microbatch.py:" in str(caught.value), "names the source line"


def _batch_norm(p: Any, d: Any) -> Any:
    h = d["x"] @ p["a"]
    return jnp.mean(jnp.tanh((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3)))


def _contrastive(p: Any, d: Any) -> Any:
    h = d["x"].mean(1) @ p["a"]
    return jax.nn.logsumexp(h @ h.T, axis=-1).mean()


REFUSALS: dict[str, tuple[Callable[..., Any], str]] = {
    "batch norm": (_batch_norm, r"sub \(.*\) combines a value per example with a sum over the batch \(as batch norm"),
    "nonlinear": (lambda p, d: jnp.sqrt(jnp.mean((d["x"] @ p["a"]) ** 2)), r"sqrt \(.*\) is not linear in a sum over"),
    "product of sums": (lambda p, d: jnp.mean(d["x"] @ p["a"]) * jnp.mean(d["x"] @ p["b"]), r"mul \(.*\) is not linear"),
    "sort": (lambda p, d: jnp.sum(jnp.sort(d["x"] @ p["b"], 0)[:, 0] * jnp.arange(BATCH)), r"sort \(.*\) runs along"),
    "cumsum": (lambda p, d: jnp.mean(jnp.sin(jnp.cumsum(d["x"] @ p["a"], 0))), r"cumsum \(.*\) runs along the batch"),
    "contrastive": (_contrastive, r"dot_general \(.*\) multiplies examples with one another"),
    "roll": (lambda p, d: jnp.mean((d["x"] @ p["a"]) * jnp.roll(d["x"] @ p["a"], 1, 0)), r"slice \(.*\)"),
    "first example": (lambda p, d: jnp.mean((d["x"] @ p["a"])[0]), "by their position in the batch"),
    "maximum": (lambda p, d: (d["x"] @ p["a"]).max(), r"reduce_max|the loss is a maximum over the batch"),
    "softmax over batch": (lambda p, d: jax.nn.softmax(d["x"] @ p["a"], axis=0)[:, 0].mean(), "one microbatch alone"),
    "groups": (lambda p, d: (d["x"] @ p["a"]).reshape(4, 2, -1).max(1).mean(), "splits or groups the batch"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_exact_is_refused(name: str) -> None:
    loss, match = REFUSALS[name]
    if name == "maximum":
        with pytest.raises(MicrobatchError, match="the loss is a maximum over the batch"):
            jax.eval_shape(serial(step_of(loss), 2), state_of(params()), batch())
        return
    refused(loss, match)
