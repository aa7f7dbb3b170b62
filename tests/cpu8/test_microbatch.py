"""`serial`: n microbatches give the full batch's step, or are refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from autopar.frontend.gradient import grad, value_and_grad
from autopar.frontend.microbatch import serial
from autopar.ir.errors import MicrobatchError
from tests.microbatches import BATCH, CLASSES, TIME, WIDTH, batch, close, exact, params, state_of, step_of
from tests.shares import each

pytestmark = pytest.mark.usefixtures("float64")


def tokens(p: Any, data: Any) -> Any:
    h = jnp.tanh(data["x"] @ p["a"] + p["b"])
    return jax.nn.log_softmax(h @ p["out"])


def picked(p: Any, data: Any) -> Any:
    return -jnp.take_along_axis(tokens(p, data), data["y"][..., None], -1)[..., 0]


doubled_p = Primitive("doubled_of_a_package")
"""Linear, so that its own derivative rule uses it on tangents."""
doubled_p.def_impl(lambda x: 2.0 * x)
doubled_p.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
mlir.register_lowering(doubled_p, mlir.lower_fun(lambda x: 2.0 * x, multiple_results=False))
ad.deflinear2(doubled_p, lambda cotangent, _: [doubled_p.bind(cotangent)])


LOSSES: dict[str, Callable[..., Any]] = {
    "mean": lambda p, d: picked(p, d).mean(),
    "linear, of a package": lambda p, d: doubled_p.bind(picked(p, d)).mean(),
    "sum": lambda p, d: picked(p, d).sum(),
    "masked mean": lambda p, d: (picked(p, d) * d["mask"]).sum() / jnp.maximum(d["mask"].sum(), 1),
    "where mean": lambda p, d: jnp.mean(picked(p, d), where=d["mask"]),
    "mean and L2": lambda p, d: picked(p, d).mean() + 1e-2 * sum(jnp.vdot(x, x) for x in jax.tree.leaves(p)),
    "L2 first, scaled": lambda p, d: 3.0 * (jnp.sum(p["a"] ** 2) - picked(p, d).mean()) / 7.0,
    "mean of means": lambda p, d: picked(p, d).mean(0).mean(),
    "per example": lambda p, d: jax.vmap(lambda x, y: picked(p, {"x": x, "y": y}).mean())(d["x"], d["y"]).mean(),
    "own row": lambda p, d: -tokens(p, d).mean(1)[jnp.arange(d["row"].size), d["row"]].mean(),
    "batch in shape": lambda p, d: picked(p, d).sum() / d["x"].shape[0],
    "flattened": lambda p, d: jnp.tanh(d["x"].reshape(-1, WIDTH) @ p["a"]).reshape(d["x"].shape).sum(),
    "one-hot": lambda p, d: -(tokens(p, d) * jax.nn.one_hot(d["y"], CLASSES)).sum(-1).mean(),
    "optax": lambda p, d: optax.softmax_cross_entropy_with_integer_labels(d["x"] @ p["out"], d["y"]).mean(),
    "layers": lambda p, d: jnp.sum(jax.lax.scan(lambda h, w: (jax.nn.gelu(h @ w), None), d["x"], p["layers"])[0] ** 2),
    "remat masked": lambda p, d: jax.checkpoint(
        lambda p, d: (picked(p, d) * d["mask"]).sum() / d["mask"].sum() + jnp.sum(p["b"] ** 2)
    )(p, d),
    "numbered, remat in remat": lambda p, d: jax.checkpoint(
        lambda x: (
            jnp.sin(x * jnp.arange(len(x))).mean() + jax.checkpoint(lambda x: jnp.cos(x - jnp.arange(len(x))).sum())(x)
        )
    )((d["x"] @ p["b"]).mean(1)),
    "own row, remat": lambda p, d: jax.checkpoint(lambda h, rows: jnp.sin(h[rows, d["row"]]).mean())(
        tokens(p, d).mean(1), jnp.arange(d["row"].size)
    ),
    "over examples": lambda p, d: jax.lax.map(lambda x: jnp.sum(jnp.sin(x @ p["a"])), d["x"]).mean(),
    "time scan": lambda p, d: _time_scan(p, d),
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
    "while": lambda p, d: (
        jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1]), (0, d["x"]))[1].mean() * jnp.sum(p["a"])
    ),
    "cond": lambda p, d: jax.lax.cond(
        p["b"][0] > 0, lambda h: jnp.sum(jnp.sin(h)), lambda h: jnp.sum(h**2), d["x"] @ p["a"]
    ),
    "batch size in a branch": lambda p, d: (
        jax.lax.cond(p["b"][0] > -9, lambda w: jnp.sum(w**2) / d["x"].shape[0], jnp.sum, p["a"]) * d["x"].mean()
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

    return jax.lax.scan(turn, (d["x"], 0.5), p["layers"])[0][1]


@pytest.mark.parametrize("name", each(2, LOSSES))
def test_losses_are_exact(name: str) -> None:
    exact(LOSSES[name], ns=(2 + 2 * (list(LOSSES).index(name) % 2),))


def test_adam_and_several_counts() -> None:
    exact(LOSSES["masked mean"], optimizer=optax.adam(1e-2), ns=(2, 4))


def test_one_example_per_microbatch() -> None:
    exact(LOSSES["attention"], ns=(8,))


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


def test_auxiliary_results_combine_by_what_they_are() -> None:
    exact(lambda p, d: (LOSSES["mean"](p, d), {k: f(p, d) for k, f in AUX.items()}), aux=True, ns=(2, 4))


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
    "product of sums": (
        lambda p, d: jnp.mean(d["x"] @ p["a"]) * jnp.mean(d["x"] @ p["b"]),
        r"mul \(.*\) is not linear",
    ),
    "sort": (lambda p, d: jnp.sum(jnp.sort(d["x"] @ p["b"], 0)[:, 0] * d["x"][:, 0, 0]), r"sort \(.*\) runs along"),
    "cumsum": (lambda p, d: jnp.mean(jnp.sin(jnp.cumsum(d["x"] @ p["a"], 0))), r"cumsum \(.*\) runs along the batch"),
    "contrastive": (_contrastive, r"dot_general \(.*\) pairs examples with one another"),
    "roll": (lambda p, d: jnp.mean((d["x"] @ p["a"]) * jnp.roll(d["x"] @ p["a"], 1, 0)), r"slice \(.*\)"),
    "first example": (lambda p, d: jnp.mean((d["x"] @ p["a"])[0]), "by their position in the batch"),
    "maximum": (lambda p, d: (d["x"] @ p["a"]).max(), r"reduce_max|the loss is a maximum over the batch"),
    "softmax over batch": (lambda p, d: jax.nn.softmax(d["x"] @ p["a"], axis=0)[:, 0].mean(), "one microbatch alone"),
    "place by the batch size": (
        lambda p, d: jnp.mean((d["x"] @ p["a"])[:, d["x"].shape[0] - 3]),
        r"slice \(.*\) slices at a place that depends on the batch size",
    ),
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


# --- models, custom rules --------------------------------------------------------------------------------------


class _Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.Dense(12, param_dtype=jnp.float64)(x)
        x = nn.LayerNorm(param_dtype=jnp.float64)(nn.relu(x))
        x = nn.Dropout(0.2, deterministic=not train)(x)
        x = nn.MultiHeadDotProductAttention(num_heads=2, param_dtype=jnp.float64)(x, x)
        return nn.Dense(CLASSES, param_dtype=jnp.float64)(x)


def test_flax_module() -> None:
    net = _Net()
    weights = net.init(jax.random.key(0), batch()["x"], False)["params"]

    def loss(p: Any, d: Any, key: Any) -> Any:
        logits = net.apply({"params": p}, d["x"], True, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, d["y"]).mean()

    exact(loss, jax.random.key(2), weights=weights)


def _custom(backward: Callable[[Any, Any], Any], forward: Callable[[Any, Any], Any] = jnp.dot) -> Callable[..., Any]:
    @jax.custom_vjp
    def apply(x: Any, w: Any) -> Any:
        return forward(x, w)

    apply.defvjp(lambda x, w: (forward(x, w), (x, w)), backward)
    return apply


def test_custom_derivatives_are_checked() -> None:
    def honest(res: Any, ct: Any) -> Any:
        x, w = res
        return ct @ w.T, 2 * jnp.einsum("bti,btj->ij", x, ct)

    def dishonest(res: Any, ct: Any) -> Any:
        x, w = res
        return ct @ w.T, jnp.einsum("bti,btj->ij", x, ct) / x.shape[0]

    @jax.custom_jvp
    def by_batch(x: Any) -> Any:
        return jnp.sin(x)

    by_batch.defjvp(lambda p, t: (by_batch(p[0]), t[0] / p[0].shape[0]))
    refused(lambda p, d: by_batch(d["x"] @ p["a"]).mean(), "a derivative rule that uses the batch size")
    exact(lambda p, d: jnp.tanh(_custom(honest)(d["x"], p["a"])).mean())
    refused(lambda p, d: jnp.tanh(_custom(dishonest)(d["x"], p["a"])).mean(), "derivative rules")
    clip = _custom(lambda res, ct: (jnp.zeros(()), jnp.clip(ct, -1, 1)), lambda x, w: w * 1.0)
    refused(lambda p, d: jnp.mean(d["x"] @ clip(0.0, p["a"])), "do not add up over microbatches")
    mean = _custom(lambda res, ct: (jnp.zeros_like(res[0]), ct * jnp.ones_like(res[1])), lambda x, w: (x @ w).mean())
    refused(lambda p, d: mean(d["x"], p["a"]), "a body that needs the full batch's size")


def test_gradients_by_the_batch_itself() -> None:
    def step(p: Any, d: Any) -> Any:
        return value_and_grad(lambda p, x: jnp.sin(x @ p["a"]).mean(), argnums=(0, 1))(p, d["x"])

    close(jax.jit(serial(step, 4))(params(), batch()), jax.jit(step)(params(), batch()))


def test_gradient_penalty_inside_the_loss() -> None:
    def loss(p: Any, d: Any) -> Any:
        inner = grad(lambda x: jnp.sin(x @ p["a"]).sum())(d["x"])
        return jnp.mean(inner**2)

    exact(loss)


def test_two_markers_in_nested_jit_with_work_outside() -> None:
    def step(state: Any, d: Any) -> Any:
        fake, real = state
        x = (d["x"] - d["x"].mean(0)).reshape(-1, WIDTH)  # couples examples, but outside the marker

        @jax.jit
        def first(fake: Any) -> Any:
            return value_and_grad(lambda p: (jnp.tanh(x @ p["a"]).mean(), jnp.tanh(x @ p["a"])), has_aux=True)(fake)

        (_, made), g = first(fake)
        made = made - made.mean(0)
        r = grad(lambda p: jnp.mean((made @ p["a"]) ** 2))(real)
        down = lambda p, g: jax.tree.map(lambda a, b: a - 0.1 * b, p, g)
        return down(fake, g), down(real, r), made

    state = params(), params()
    close(jax.jit(serial(step, 2))(state, batch()), jax.jit(step)(state, batch()))


def test_one_loop_that_carries_the_gradients() -> None:
    step = serial(step_of(LOSSES["mean and L2"]), 4)
    loops = [e for e in jax.make_jaxpr(step)(state_of(params()), batch()).jaxpr.eqns if e.primitive.name == "scan"]
    assert len(loops) == 1 and loops[0].params["length"] == 4
    carried = [v.aval.shape for v in loops[0].outvars]
    assert sorted(carried) == sorted([(), *(x.shape for x in jax.tree.leaves(params()))]), "no residuals, no batch"


def test_microbatches_are_strided() -> None:
    def step(p: Any, d: Any) -> Any:
        return grad(lambda p: jnp.mean(d["x"] @ p["a"]))(p)

    text = str(jax.make_jaxpr(serial(step, 2))(params(), batch()))
    assert "new_sizes=(4, 2, 6, 8)" in text and "permutation=(1, 0, 2, 3)" in text


def test_eager_and_plain() -> None:
    step = step_of(LOSSES["mean"])
    close(serial(step, 2)(state_of(params()), batch()), step(state_of(params()), batch()))
    assert serial(step, 1) is step


# --- arguments -------------------------------------------------------------------------------------------------


def test_batch_argnums() -> None:
    def step(d: Any, p: Any, *, extra: Any) -> Any:
        return grad(lambda p: jnp.mean((d["x"] @ p["a"]) * extra[..., None] * d["t"]))(p)

    data = {"x": batch()["x"].swapaxes(0, 1), "t": jnp.arange(1.0, WIDTH + 1)}
    extra = batch()["mask"].T * 1.0
    found = serial(step, 2, {0: {"x": 1, "t": None}, "extra": -1})(data, params(), extra=extra)
    close(found, step(data, params(), extra=extra))


@pytest.mark.parametrize(
    ("n", "argnums", "match"),
    [
        (16, None, r"args\[1\]\['mask'\]: the batch has 8 examples, fewer than num_microbatches=16. Use a batch of"),
        (
            3,
            None,
            r"8 examples, which num_microbatches=3 does not divide. Use num_microbatches=2 or 4, or a batch of 6",
        ),
        (2, (5,), r"batch_argnums names argument 5, but the call has 2 positional arguments"),
        (2, {"data": 0}, r"batch_argnums names the keyword 'data', but the call has no keywords"),
        (2, {1: 3}, r"its batch dimension is 3, but its shape is \(8, 6\)"),
        (2, {1: {"x": 0}}, r"is no pytree prefix of the argument"),
        (2, {1: {"x": 0, "y": 1, "mask": None, "row": None}}, r"disagree about its size: .*\['x'\]: 8, .*\['y'\]: 6"),
        (2, {0: None}, r"no argument carries a batch"),
    ],
)
def test_bad_batches(n: int, argnums: Any, match: str) -> None:
    with pytest.raises(MicrobatchError, match=match):
        serial(step_of(LOSSES["mean"]), n, argnums)(state_of(params()), batch())


def test_steps_that_cannot_be_microbatched() -> None:
    def unmarked(p: Any, d: Any) -> Any:
        return jax.grad(lambda p: LOSSES["mean"](p, d))(p)

    def fixed(p: Any, d: Any) -> Any:
        return grad(lambda p: jnp.mean((d["x"] @ p["a"]) * jnp.ones((BATCH, 1, 1))))(p)

    def looped(p: Any, d: Any) -> Any:
        return jax.lax.scan(lambda p, _: (grad(lambda p: LOSSES["mean"](p, d))(p), None), p, None, length=2)[0]

    def branching(p: Any, d: Any) -> Any:
        f = jnp.sin if d["x"].shape[0] == BATCH else jnp.cos
        return grad(lambda p: jnp.mean(f(d["x"] @ p["a"])))(p)

    for step, match in (
        (unmarked, "unmarked has num_microbatches=2 but no autopar.value_and_grad or autopar.grad"),
        (fixed, "fixed cannot be traced with 4 examples, one of 2 microbatches, though it can with all 8"),
        (looped, r"scan \(test_microbatch.py:\d+\) holds an autopar.value_and_grad in its body"),
        (branching, r"sin \(test_microbatch.py:\d+\): the loss is another program.*this operation is cos instead"),
    ):
        with pytest.raises(MicrobatchError, match=match):
            serial(step, 2)(params(), batch())
    with pytest.raises(MicrobatchError, match="num_microbatches must be at least 1, got 0"):
        serial(unmarked, 0)
