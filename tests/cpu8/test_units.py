"""Steps that treat groups of examples as one: the smallest unit is found, microbatches of it are exact, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.frontend.gradient import grad_p, value_and_grad
from autopar.frontend.layering import layered
from autopar.frontend.microbatch import serial
from autopar.frontend.microbatch.units import plan_in_units, units
from autopar.ir.errors import MicrobatchError
from tests.layer_reference import Reference
from tests.shares import each

BATCH, TIME, WIDTH, EXPERTS, CAPACITY = 12, 4, 8, 4, 1


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def close(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        scale = max(1.0, float(np.abs(np.asarray(y, np.float64)).max(initial=0)))
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-9 * scale)


def data(batch: int = BATCH) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "x": jnp.asarray(rng.normal(size=(batch, TIME, WIDTH))),
        "y": jnp.asarray(rng.integers(0, WIDTH, (batch, TIME))),
    }


def weights() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.4)
    return {
        "in": make(WIDTH, WIDTH),
        "gate": make(WIDTH, EXPERTS),
        "up": make(EXPERTS, WIDTH, WIDTH),
        "out": make(WIDTH, WIDTH),
    }


def routed(p: Any, x: Any, group: int, capacity: int = CAPACITY) -> tuple[Any, Any, Any]:
    """[b, t, w] through the best expert of each token, groups of ``group`` tokens apart: as far as an expert has room,
    its tokens past ``capacity`` are dropped. Also the balance loss, a mean over groups, and how many were dropped."""
    tokens = x.reshape(-1, group, WIDTH)
    gates = jax.nn.softmax(tokens @ p["gate"])
    first = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS, dtype=x.dtype)
    place = ((jnp.cumsum(first, 1) - first) * first).sum(-1).astype(jnp.int32)
    slot = jax.nn.one_hot(place, capacity, dtype=x.dtype)
    combine = jnp.einsum("gs,gse,gsc->gsec", (gates * first).sum(-1), first, slot)
    h = jnp.einsum("gsec,gsd->egcd", (combine > 0).astype(x.dtype), tokens)
    h = jnp.tanh(jnp.einsum("egcd,edf->egcf", h, p["up"]))
    balance = (gates.mean(1) * first.mean(1)).sum(-1).mean() * EXPERTS
    return jnp.einsum("gsec,egcd->gsd", combine, h).reshape(x.shape), balance, (place >= capacity).sum()


def mixture(group_of: Callable[[int], int]) -> Callable[..., Any]:
    """A layer of experts, ``group_of(tokens)`` tokens to a group; auxiliary: balance and how many were dropped."""

    def loss(p: Any, d: Any) -> Any:
        x = d["x"] @ p["in"]
        y, balance, dropped = routed(p, x, group_of(x.shape[0] * TIME))
        picked = jnp.take_along_axis(jax.nn.log_softmax((x + y) @ p["out"]), d["y"][..., None], -1)
        return 0.01 * balance - picked.mean(), {"balance": balance, "dropped": dropped}

    return loss


def examples(count: int) -> Callable[[int], int]:
    """Groups of so many examples, whatever the batch."""
    return lambda _: count * TIME


def step_of(loss: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    def step(p: Any, d: Any) -> Any:
        value, grads = value_and_grad(loss, has_aux=has_aux)(p, d)
        return jax.tree.map(lambda x, g: x - 0.1 * g, p, grads), value, grads

    return step


def exact(loss: Callable[..., Any], n: int, *, has_aux: bool = False, layers: bool = False) -> Any:
    """Microbatches give the whole batch's numbers; ``layers``: also as a pipeline's layers."""
    step, args = step_of(loss, has_aux), (weights(), data())
    wanted = jax.jit(step)(*args)
    close(jax.jit(serial(step, n))(*args), wanted)
    if layers:
        close(Reference(layered(step, args, num_microbatches=n))(*args), wanted)
    return wanted


def unit_of(loss: Callable[..., Any], n: int) -> int:
    """How many examples the step is found to treat as one."""

    def marker(size: int) -> Any:
        jaxpr = jax.make_jaxpr(step_of(loss, True))(weights(), data(size)).jaxpr
        return next(e for e in jaxpr.eqns if e.primitive is grad_p)

    return BATCH // plan_in_units(marker(BATCH), marker, n, BATCH)[1].setting.batch


# --- exactness -------------------------------------------------------------------------------------------------


GROUPS = [(1, 3, False), (2, 2, True), (3, 4, False)]
MORE = [(2, 6, True), (4, 3, True), (2, 6, False), (4, 3, False), (6, 2, False)]


@pytest.mark.parametrize(
    ("group", "n", "layers"), [*GROUPS, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)]
)
def test_groups_are_exact_and_as_small_as_can_be(group: int, n: int, layers: bool) -> None:
    loss = mixture(examples(group))
    _, aux = exact(loss, n, has_aux=True, layers=layers)[1]
    assert aux["dropped"] > 0, "the capacity matters"
    assert unit_of(loss, n) == group


def test_the_examples_of_a_group_matter() -> None:
    """What all this is for: microbatches that tear groups apart would give another loss."""
    loss, d = mixture(examples(2)), data()
    whole = loss(weights(), d)[0]
    order = np.arange(BATCH).reshape(-1, 2)[::-1].reshape(-1)
    apart = np.arange(BATCH).reshape(2, -1).T.reshape(-1)
    assert abs(loss(weights(), jax.tree.map(lambda a: a[order], d))[0] - whole) < 1e-12
    assert abs(loss(weights(), jax.tree.map(lambda a: a[apart], d))[0] - whole) > 1e-6


def _numbered(p: Any, d: Any) -> Any:
    y, balance, _ = routed(p, d["x"] @ p["in"], 2 * TIME)
    at = jnp.arange(d["x"].shape[0])
    picked = y[at, d["y"][:, 0]]
    written = jnp.zeros_like(d["x"]).at[at, 0].add(jnp.sin(y[:, 1]))
    return picked.mean() + jnp.square(written).sum() + balance


def _masked(p: Any, d: Any) -> Any:
    y, balance, _ = routed(p, d["x"] @ p["in"], 2 * TIME)
    mask = d["y"] > 2
    return (y.sum(-1) * mask).sum() / mask.sum() + balance


def _dropout(p: Any, d: Any) -> Any:
    keep = jax.random.bernoulli(jax.random.key(3), 0.7, d["x"].shape)
    y, balance, _ = routed(p, jnp.where(keep, d["x"], 0.0) @ p["in"], 2 * TIME)
    return jnp.square(y).mean() + balance


def _bodies(p: Any, d: Any) -> Any:
    """Groups inside a scan over layers and a remat; a loop over examples beside them."""
    layer = jax.checkpoint(lambda x, _: (x + routed(p, x, 2 * TIME)[0], None))
    x, _ = jax.lax.scan(layer, d["x"] @ p["in"], None, length=2)
    return jnp.square(x).mean() + jax.lax.map(lambda e: jnp.sum(jnp.sin(e @ p["out"])), x).mean()


def _pairs(p: Any, d: Any) -> Any:
    """Examples two by two: what follows them is per group, then per example again."""
    h = (d["x"] @ p["in"]).reshape(-1, 2, TIME, WIDTH)
    return jnp.mean(jnp.sin(h - h.mean(1, keepdims=True)).reshape(d["x"].shape) * d["x"]) + jnp.mean(h[:, 0] * h[:, 1])


LOSSES = {
    "numbered": _numbered,
    "masked mean": _masked,
    "dropout": _dropout,
    "bodies": _bodies,
    "pairs": _pairs,
}


@pytest.mark.parametrize(
    ("name", "n"),
    [
        *(("masked mean", 3), ("bodies", 2), ("pairs", 6)),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("numbered", 2), ("numbered", 6), ("dropout", 6))),
    ],
)
def test_losses_with_groups_are_exact(name: str, n: int) -> None:
    exact(LOSSES[name], n, layers=n != 6)


def test_microbatches_of_groups_on_devices() -> None:
    """Split over devices: groups of two, microbatches of four examples, each on four devices as the plan has it."""
    loss = lambda p, d: mixture(examples(2))(p, d)[0]
    args = (weights(), data(16))
    wanted = jax.jit(step_of(loss))(*args)
    run = autopar.parallelize(step_of(loss), mesh="4", num_microbatches=4, method="data_parallel")
    close(run(*args), wanted)


# --- group sizes that follow from the batch -----------------------------------------------------------------------

RULES: dict[str, Callable[[int], int]] = {
    "at most 4 examples": lambda tokens: min(4 * TIME, tokens),
    "at most 100 tokens": lambda tokens: min(100, tokens),
    "two groups": lambda tokens: tokens // 2,
    "six groups": lambda tokens: tokens // 6,
    "a third, at least 2 examples": lambda tokens: max(2 * TIME, tokens // 3),
    "half an example": lambda tokens: TIME // 2,
}


@pytest.mark.parametrize("n", each(2, [2, 3, 6]))
@pytest.mark.parametrize("rule", RULES)
def test_a_group_size_by_the_batch_is_exact_or_refused(rule: str, n: int) -> None:
    loss = mixture(RULES[rule])
    group, tokens = RULES[rule](BATCH * TIME), BATCH // n * TIME
    kept = RULES[rule](tokens) == group and tokens % group == 0
    try:
        exact(loss, n, has_aux=True)
    except MicrobatchError:
        assert not kept
    else:
        assert kept


# --- refusals --------------------------------------------------------------------------------------------------


def test_a_microbatch_that_holds_no_whole_group() -> None:
    step = step_of(mixture(examples(2)), True)
    with pytest.raises(MicrobatchError, match=r"(?s)traced with 3 examples.*a microbatch must hold whole groups"):
        jax.eval_shape(serial(step, 4), weights(), data())
    with pytest.raises(MicrobatchError, match=r"(?s)traced with 3 examples.*a microbatch must hold whole groups"):
        layered(step, (weights(), data()), num_microbatches=4)
    with pytest.raises(MicrobatchError, match=r"reshape \(test_units.py:.* size of 6 with 12 examples and of 1 with 2"):
        jax.eval_shape(serial(step, 12), weights(), data())


def test_of_what_couples_all_examples_the_first_reason_is_said() -> None:
    def loss(p: Any, d: Any) -> Any:
        h = d["x"] @ p["in"]
        return jnp.mean(jnp.tanh(h - h.mean(0)))

    with pytest.raises(MicrobatchError, match=r"sub \(.*test_units.py:.*\) combines a value per example with a sum"):
        jax.eval_shape(serial(step_of(loss), 3), weights(), data())


def test_units() -> None:
    assert units(3, 12) == [1, 2, 4]
    assert units(12, 12) == [1]
