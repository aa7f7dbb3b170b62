"""`step.loader` of pipelines in this process: the same call as on a Ray (tests/ray/test_ray_data.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.data import Loader
from autopar.ir.errors import DataError, PlanMismatchError
from tests.clusters import SLOW_8

pytestmark = pytest.mark.xdist_group("pipeline data")  # one process makes what all tests of the file share

ROWS, WIDTH = 8, 4


def train(params: Any, scale: float, x: Any, key: Any, y: Any) -> Any:
    """``scale`` is static."""

    def loss(params: Any, x: Any, y: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w) * scale
        return jnp.mean((x - y["of"]) ** 2)

    value, grads = autopar.value_and_grad(loss)(params, x, y)
    noise = jax.random.normal(key, ())
    return [p - 0.1 * g + 1e-3 * noise for p, g in zip(params, grads, strict=True)], value


def batch(number: int) -> Any:
    rng = np.random.default_rng(number)
    x, y = (rng.normal(size=(ROWS, WIDTH)).astype(np.float32) for _ in range(2))
    return x, {"of": y}


def source(start: int) -> Iterator[Any]:
    return map(batch, range(start, 3))


@pytest.fixture(scope="module")
def step() -> Any:
    made = autopar.parallelize(
        train, cluster=SLOW_8, stages=2, num_microbatches=2, static_argnums=1, batch_argnums=(2, -1),
        workers=1, layers=2, schedule="1f1b", submeshes=["1x2"],
    )  # fmt: skip
    with pytest.raises(PlanMismatchError, match=r"train\.loader needs a plan"):
        made.loader(source)
    x, y = batch(0)
    made.plan(params(), 1.0, x, jax.random.key(0), y)
    return made


def params() -> list[Any]:
    return [jnp.full((WIDTH, WIDTH), 0.1 * (i + 1)) for i in range(2)]


def test_arguments_that_carry_examples_come_together(step: Any) -> None:
    state = want = params()
    key, numbers = jax.random.key(5), list[int]()
    with step.loader(source) as loader:
        assert isinstance(loader, Loader)
        for number, (x, y) in enumerate(loader):
            state, loss = step(state, 1.0, x, key, y)
            want, expected = step(want, 1.0, batch(number)[0], key, batch(number)[1])
            jax.tree.map(np.testing.assert_array_equal, (state, loss), (want, expected))
            numbers.append(loader.state()["batch"])
    assert numbers == [1, 2, 3]
    with step.loader(lambda start: (x for x, _ in source(start)), 2, start={"batch": 2}) as loader:
        (x,) = loader
    np.testing.assert_array_equal(x, batch(2)[0])


def failing(start: int) -> Iterator[Any]:
    yield batch(0)
    raise KeyError("no such file")


def late(start: int) -> Iterator[Any]:
    time.sleep(1)
    yield batch(0)


def of(value: Any) -> Callable[[int], Any]:
    return lambda start: iter([value])


X, Y = batch(0)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (of(X), r"0: another tree than the step takes: it lacks \[0\], \[1\]\['of'\] and has a leaf by itself$"),
        (of([X, Y]), r"0: another tree than the step takes: the step takes PyTreeDef\(\(.*, the source gave .*\(\["),
        (of((X[:6], Y)), r"leaf \[0\]: the step takes float32\[8,4\]; the source gave float32\[6,4\]. Convert it"),
        (of((X.astype("f8"), Y)), r"leaf \[0\]: the step takes float32\[8,4\]; the source gave float64\[8,4\]"),
        (of((X, {"of": "text"})), r"leaf \[1\]\['of'\]: str of dtype <U4; expected numbers"),
        (late, r"batch 0: the source gave none within 0.3 s \(deadline_s=\)"),
    ],
)
def test_what_does_not_fit_is_named(step: Any, source: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        next(step.loader(source, deadline_s=0.3))


def test_what_cannot_be_a_source(step: Any) -> None:
    loader = step.loader(failing)
    next(loader)
    with pytest.raises(KeyError, match="no such file"):
        next(loader)
    with pytest.raises(DataError, match="source: a list; expected a function of the number of batches"):
        step.loader([batch(0)])
    for argnums in (1, 5, "x"):
        with pytest.raises(DataError, match=rf"argnums: the step has no argument {argnums!r} .* it has \[0, 2, 3, 4\]"):
            step.loader(source, argnums)
    with pytest.raises(DataError, match=r"args\[3\]: a source gives numbers, not random keys"):
        step.loader(source, (2, 3))
