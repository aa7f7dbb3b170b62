"""One example per microbatch: its program follows from two larger traces, and gives the full batch's numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.frontend.gradient import grad, value_and_grad
from autopar.frontend.layering import layered
from autopar.frontend.microbatch import one_unit, serial
from autopar.frontend.microbatch.inline import flatten
from autopar.frontend.microbatch.one_unit import traced_size
from autopar.ir.errors import MicrobatchError
from tests.layer_reference import Reference
from tests.microbatches import close
from tests.models import plain, vision
from tests.models.base import Model
from tests.shares import each

BATCH, TIME, WIDTH = 3, 6, 8
same = functools.partial(close, tolerance=1e-9, single=1e-9)
pytestmark = pytest.mark.usefixtures("float64")


def data(batch: int = BATCH) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "x": jnp.asarray(rng.normal(size=(batch, TIME, WIDTH))),
        "y": jnp.asarray(rng.integers(0, WIDTH, (batch, TIME))),
    }


def weights() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {k: jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) * 0.4) for k in ("a", "b")}


def step_of(loss: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    def step(p: Any, d: Any, *rest: Any) -> Any:
        value, grads = value_and_grad(loss, has_aux=has_aux)(p, d, *rest)
        return jax.tree.map(lambda x, g: x - 0.1 * g, p, grads), value, grads

    return step


def exact(loss: Callable[..., Any], *rest: Any, aux: bool = False, batch: int = BATCH) -> None:
    step = step_of(loss, aux)
    same(jax.jit(serial(step, batch))(weights(), data(batch), *rest), jax.jit(step)(weights(), data(batch), *rest))


# --- models ----------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"vocab": 16, "dim": 8, "heads": 2, "seq": 4, "batch": 4, "layers": 1, "clip": False}
MODELS: dict[str, Callable[[], Model]] = {
    "mlp": lambda: plain.mlp("float64", batch=4),
    "conv net": lambda: vision.conv_net("float64", batch=4, size=8, channels=4),
    "gpt, scan, remat, dropout": lambda: plain.gpt(
        "float64", plain.GPTConfig(**SMALL, scan=True, remat=True, dropout=0.2)
    ),
    "mixture of experts": lambda: plain.moe("float64", batch=4, seq=4, dim=8, hidden=8),
    "lstm": lambda: plain.lstm("float64", batch=4, seq=4, dim=8, hidden=8),
}


@pytest.mark.parametrize("name", each(2, MODELS))
def test_models_are_exact(name: str) -> None:
    model = MODELS[name]()
    assert model.loss_and_grad is not None
    found = jax.jit(serial(model.loss_and_grad, 4))(*model.grad_args)
    same(found, jax.jit(model.loss_and_grad)(*model.grad_args))


def layers_exact(step: Callable[..., Any], *args: Any, n: int) -> None:
    steps = layered(step, args, num_microbatches=n)
    same(Reference(steps)(*args), jax.jit(step)(*args))


def test_layers_of_an_unrolled_gpt_are_exact() -> None:
    model = plain.gpt("float64", plain.GPTConfig(**SMALL))
    layers_exact(model.step, *model.args, n=4)


def test_layers_with_a_part_before_them_are_exact() -> None:
    def loss(p: Any, d: Any) -> Any:
        mask = d["y"] > 2
        return (
            jnp.sin(d["x"] * SCALE @ p["a"]).reshape(-1, WIDTH).sum(-1).reshape(mask.shape) * mask
        ).sum() / mask.sum()

    layers_exact(step_of(loss), weights(), data(), n=BATCH)


def test_a_batch_of_two() -> None:
    assert [traced_size(8, 16), traced_size(8, 8), traced_size(2, 2)] == [2, 2, 3]
    exact(branching, batch=2)


def branching(p: Any, d: Any) -> Any:
    """Operations of which jax.numpy makes other equations with one example."""
    h = d["x"] @ p["a"]
    bias = jnp.broadcast_to(h[:, :1], h.shape) + h.reshape(-1, WIDTH).reshape(h.shape)
    picked = jnp.take_along_axis(jnp.tanh(bias), d["y"][..., None], -1).squeeze(-1)
    return picked.mean() + jnp.linalg.norm(h.reshape(h.shape[0], -1), axis=-1).mean()


def test_a_trace_of_one_example_would_differ() -> None:
    """What all this is for; if it fails, jax.numpy no longer branches and examples may be traced one by one."""

    def equations(batch: int) -> list[Any]:
        closed = jax.make_jaxpr(branching)(weights(), data(batch))
        flat, _ = flatten(closed.jaxpr, list(closed.consts), markers=True)
        return [(e.primitive.name, [len(jnp.shape(v.aval)) for v in e.outvars]) for e in flat.eqns]

    assert equations(3) == equations(2) != equations(1)
    exact(branching)


# --- bodies and derivative rules -------------------------------------------------------------------------------


def _multiply(backward: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    @jax.custom_vjp
    def apply(x: Any, w: Any, power: Any) -> Any:
        return x @ w**power, (x > 0).sum((1, 2))

    def forward(x: Any, w: Any, power: Any) -> Any:
        return apply(x, w, power), (x, w, jnp.ones((x.shape[0], 1, 1)))

    apply.defvjp(forward, backward)
    return apply


def _doubled(residuals: Any, cotangents: Any) -> Any:
    """Twice the gradient by w, so that a rule that is not used shows."""
    x, w, ones = residuals
    ct = (cotangents[0] * ones).reshape(-1, WIDTH).reshape(x.shape)
    return ct @ w.T, 2 * jnp.einsum("bti,btj->ij", x, ct), None


def _rule_by_batch(residuals: Any, cotangents: Any) -> Any:
    x, w, _ = residuals
    return cotangents[0] @ w.T / x.shape[0], jnp.einsum("bti,btj->ij", x, cotangents[0]), None


def _doubled_sine() -> Callable[..., Any]:
    @jax.custom_jvp
    def sine(x: Any, shift: Any) -> Any:
        return jnp.sin(x + shift), jnp.sign(x).astype(int)

    @sine.defjvp
    def _(primals: Any, tangents: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
        (x, shift), (dx, _) = primals, tangents
        out = sine(x, shift)
        return out, (2 * jnp.cos(x + shift) * dx.reshape(-1).reshape(x.shape), np.zeros(x.shape, jax.dtypes.float0))

    return sine


def _product() -> Callable[..., Any]:
    """A custom_jvp that is no elementwise operation: its derivative is checked over the batch."""

    @jax.custom_jvp
    def product(x: Any, w: Any) -> Any:
        return x @ w

    @product.defjvp
    def _(primals: Any, tangents: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
        (x, w), (dx, dw) = primals, tangents
        return x @ w, dx @ w + 3 * (x @ dw)

    return product


SCALE = np.arange(1.0, WIDTH + 1)


def _closing_over(x: Any, w: Any) -> Any:
    @jax.custom_jvp
    def scaled(x: Any) -> Any:
        return x * SCALE

    scaled.defjvp(lambda p, t: (scaled(p[0]), 5 * t[0]))
    return scaled(x) @ w


def _wave(order: int) -> Callable[..., Any]:
    """A function whose derivative is again one with a rule of its own, as jnp.sinc's is."""

    @jax.custom_jvp
    def wave(x: Any) -> Any:
        return jnp.sin(x + order * np.pi / 2)

    wave.defjvp(lambda p, t: (wave(p[0]), _wave(order + 1)(p[0]) * t[0]))
    return wave


def _nested(p: Any, d: Any) -> Any:
    """A while, a cond, a scan over examples, and gradients of gradients."""
    h = jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1].reshape(-1).reshape(c[1].shape)), (0, d["x"]))
    h = jax.lax.cond(p["b"][0, 0] > -9, lambda h: jnp.broadcast_to(h[:, :1], h.shape) @ p["a"], jnp.sin, h[1])
    each = jax.lax.map(lambda x: jnp.sum(jnp.sin(x @ p["a"])), d["x"])
    inner = grad(lambda x: jnp.sum(jnp.sin((x @ p["a"]).reshape(-1, WIDTH) @ p["b"])))(d["x"])
    return jnp.mean(jnp.square(h)) + each.mean() + jnp.mean(inner**2)


LOSSES: dict[str, Callable[..., Any]] = {
    "relu, gelu, silu": lambda p, d: jnp.mean(
        jax.nn.relu(d["x"] @ p["a"]) + jax.nn.gelu(d["x"] @ p["b"]) * jax.nn.silu(d["x"] @ p["a"])
    ),
    "logsumexp, softmax": lambda p, d: jnp.mean(
        jax.nn.logsumexp(d["x"] @ p["a"], axis=(1, 2)) + jax.nn.softmax(d["x"] @ p["b"], where=d["x"] > 0)[:, 0, 0]
    ),
    "relu of one number per example": lambda p, d: jax.nn.relu((d["x"] @ p["a"]).sum((1, 2))).mean(),
    "logaddexp": lambda p, d: jnp.mean(jnp.logaddexp(d["x"] @ p["a"], 0.5)),
    "derivative rules without end": lambda p, d: jnp.mean(_wave(0)(d["x"] @ p["b"])),
    "jit that closes over an array": lambda p, d: jnp.mean(jax.jit(lambda x: jnp.sin(x * SCALE))(d["x"] @ p["a"])),
    "custom_jvp": lambda p, d: jnp.mean(_doubled_sine()(d["x"] @ p["a"], 0.1)[0]),
    "custom_jvp of a product": lambda p, d: jnp.mean(jnp.tanh(_product()(d["x"], p["a"]))),
    "custom_jvp that closes over an array": lambda p, d: jnp.mean(_closing_over(jnp.tanh(d["x"] @ p["a"]), p["b"])),
    "custom_vjp": lambda p, d: jnp.mean(jnp.tanh(_multiply(_doubled)(d["x"] @ p["b"], p["a"], 2)[0])),
    "custom_vjp in a scan": lambda p, d: jnp.mean(
        jax.lax.scan(lambda h, _: (_multiply(_doubled)(h, p["a"], 2)[0], None), d["x"], None, length=2)[0]
    ),
    "custom_vjp in a remat": lambda p, d: jax.checkpoint(
        lambda w, x: jnp.mean(jnp.tanh(_multiply(_doubled)(x, w, 2)[0])),
        policy=jax.checkpoint_policies.save_only_these_names("h"),
    )(p["a"], d["x"]),
    "bodies": _nested,
    "numbered": lambda p, d: (d["x"] @ p["a"])[jnp.arange(d["x"].shape[0]), d["y"][:, 0]].mean(),
    "two views": lambda p, d: jnp.mean(jnp.tanh(jnp.concatenate([d["x"], d["x"]]) @ p["a"]).reshape(2, -1).sum(0) ** 2),
}


@pytest.mark.parametrize("name", each(2, LOSSES))
def test_losses_are_exact(name: str) -> None:
    exact(LOSSES[name])


def test_what_equal_layers_make_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is evaluated of equations beside those of one layer does not grow with layers."""
    seen: list[int] = []
    evaluate = jax.eval_shape

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen[-1] += 1
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(one_unit.jax, "eval_shape", counted)
    for layers in (2, 6):
        seen.append(0)

        def loss(p: Any, d: Any, layers: int = layers) -> Any:
            x = d["x"]
            for _ in range(layers):
                x = jnp.tanh(x.reshape(-1, WIDTH) @ p["a"]).reshape(x.shape)
            return jnp.mean(x)

        layered(step_of(loss), (weights(), data(4)), num_microbatches=4)
    assert 0 < seen[0] == seen[1]


# --- refusals --------------------------------------------------------------------------------------------------


def refused(loss: Callable[..., Any], match: str, batch: int = 6, **options: Any) -> None:
    with pytest.raises(MicrobatchError, match=match) as caught:
        jax.eval_shape(serial(step_of(loss, **options), batch), weights(), data(batch))
    assert "test_one_example.py:" in str(caught.value), "names the source line"


def _padded(d: Any) -> Any:
    """Examples, their number rounded up to the next multiple of four."""
    return jnp.pad(d["x"], ((0, -d["x"].shape[0] % 4), (0, 0), (0, 0)))


def _sliced_rule() -> Callable[..., Any]:
    @jax.custom_jvp
    def apply(x: Any) -> Any:
        return jnp.sin(x)

    apply.defjvp(lambda p, t: (apply(p[0]), jnp.cos(p[0]) * t[0] / p[0].shape[0]))
    return apply


def _symbolic() -> Callable[..., Any]:
    @jax.custom_jvp
    def apply(x: Any) -> Any:
        return jnp.sin(x)

    apply.defjvp(lambda p, t: (apply(p[0]), t[0]), symbolic_zeros=True)
    return apply


REFUSALS: dict[str, tuple[Callable[..., Any], str]] = {
    "no whole number": (
        lambda p, d: jnp.mean(_padded(d) @ p["a"]),
        r"pad \(.*\) has a size of 2 with 6 examples and of 2|pad \(.*\)",
    ),
    "pairs": (
        lambda p, d: jnp.mean(jnp.einsum("bti,cti->bc", d["x"] @ p["a"], d["x"]).reshape(-1)),
        r"reshape \(.*\) has shape \(36,\) with 6 examples and \(4,\) with 2, which is not linear",
    ),
    "half of them": (
        lambda p, d: jnp.mean((d["x"] @ p["a"])[: d["x"].shape[0] // 3 + 1]),
        r"slice \(.*\) has a size of 3 with 6 examples and of 1 with 2, which is not linear",
    ),
    "another program": (
        lambda p, d: jnp.mean((jnp.sin if d["x"].shape[0] > 2 else jnp.cos)(d["x"] @ p["a"])),
        r"sin \(.*\): the loss is another program.*is cos instead",
    ),
    "other operands": (
        lambda p, d: (lambda h, k: jnp.mean(h * k if d["x"].shape[0] > 2 else k * h))(d["x"] @ p["a"], d["x"] @ p["b"]),
        r"mul \(.*\): .* uses other operands",
    ),
    "rule by the batch size": (
        lambda p, d: jnp.mean(_multiply(_rule_by_batch)(d["x"], p["a"], 2)[0]),
        r"custom_vjp_call \(.*\) has derivative rules of its own: div.* in a derivative rule and uses the number",
    ),
    "jvp by the batch size": (
        lambda p, d: jnp.mean(_sliced_rule()(d["x"] @ p["a"])),
        r"custom_jvp_call \(.*\) has derivative rules of its own: div.* in a derivative rule and uses the number",
    ),
    "symbolic zeros": (lambda p, d: jnp.mean(_symbolic()(d["x"] @ p["a"])), r"custom_jvp_call \(.*\).* symbolic_zeros"),
    "batch norm": (
        lambda p, d: (lambda h: jnp.mean(jnp.tanh(h - h.mean(0))))(d["x"] @ p["a"]),
        r"sub \(.*\) combines a value per example with a sum over the batch",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_follow_is_refused(name: str) -> None:
    refused(*REFUSALS[name])


def test_a_step_for_one_size_only() -> None:
    def fixed(p: Any, d: Any) -> Any:
        return grad(lambda p: jnp.mean((d["x"] @ p["a"]) * jnp.ones((BATCH, 1, 1))))(p)

    for run in (lambda: serial(fixed, 3)(weights(), data()), lambda: layered(fixed, (weights(), data()),
                                                                             num_microbatches=3)):  # fmt: skip
        with pytest.raises(
            MicrobatchError, match="traced with 2 examples, from which the program of one example follo"
        ):
            run()
