"""Small steps for tests on Ray: a chain of matrix products, its gradients clipped by their norm."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from benchmarks.models import chain_loss
from tests.ray.saboteur import before_forward

WIDTH, LAYERS, ROWS = 8, 4, 8
X = np.random.default_rng(9).normal(size=(ROWS, WIDTH))


def init(key: Any) -> list[Any]:
    """Float64 (WIDTH, WIDTH) each."""
    return [jax.random.normal(k, (WIDTH, WIDTH), "float64") * WIDTH**-0.5 for k in jax.random.split(key, LAYERS)]


def train(params: Any, x: Any) -> Any:
    """Clipped gradient descent: (new parameters, loss)."""
    value, grads = autopar.value_and_grad(chain_loss)(params, x)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
    return [p - 0.1 * g / (1 + norm) for p, g in zip(params, grads, strict=True)], value


def keeping(state: Any, x: Any) -> Any:
    """A state of which the step returns parts as they are, or as others, and writes parts that it does not read."""
    new, value = train(state["w"], x)
    grown = [n - w for n, w in zip(new, state["w"], strict=True)]
    return {
        "w": new, "before": state["w"], "frozen": state["frozen"], "grown": grown, "last": value,
    }, value  # fmt: skip


def keeping_init(key: Any) -> Any:
    """Of `keeping`."""
    w = init(key)
    zeros = [jnp.zeros_like(x) for x in w]
    return {"w": w, "before": zeros, "frozen": jnp.ones(3), "grown": list(zeros), "last": jnp.zeros(())}


class Failing:
    """`train`, which raises where a worker traces it."""

    __name__ = "failing"

    def __init__(self) -> None:
        self.driver = os.getpid()

    def __call__(self, params: Any, x: Any) -> Any:
        if os.getpid() != self.driver:
            self.in_worker()
        return train(params, x)

    def in_worker(self) -> None:
        """Before a worker traces."""
        raise ZeroDivisionError("a mistake of the user's")


class FailingLater(Failing):
    """`train`, whose second forward task in a worker raises."""

    def in_worker(self) -> None:
        """Patches the worker."""
        count = 0

        def forward(stage: int) -> None:
            nonlocal count
            count += stage == 1
            if count == 2:
                raise ZeroDivisionError("a mistake of the user's")

        before_forward(forward)


def mistaken(params: Any, x: Any) -> Any:
    """As `train`, of a first layer that fails when it is computed, after a while."""

    def late(_: Any) -> Any:
        time.sleep(0.2)
        raise ZeroDivisionError("a mistake of the user's")

    def loss(params: Any, x: Any) -> Any:
        x = jnp.tanh(x @ params[0])
        x = x + jax.pure_callback(late, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x))
        for w in params[1:]:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    value, grads = autopar.value_and_grad(loss)(params, x)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value


def labelled(params: Any, batch: Any) -> Any:
    """As `train`: inputs that the first layer reads, labels and a weight of all examples that the loss does."""

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2) * batch["weight"]

    value, grads = autopar.value_and_grad(loss)(params, batch)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value


def labelled_batch(number: int) -> dict[str, np.ndarray]:
    """Of `labelled`."""
    rng = np.random.default_rng(number)
    rows = {name: rng.normal(size=(ROWS, WIDTH)) for name in ("x", "y")}
    return {**rows, "weight": np.array(1.0 + number), "unread": np.arange(float(ROWS))}


class Watched:
    """Batches of `labelled`, ``count`` of them; leaves note in ``folder`` which process reads them."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count

    def __call__(self, start: int) -> Iterator[Any]:
        for number in range(start, self.count):
            yield {name: Leaf(self.folder, name, x) for name, x in labelled_batch(number).items()}

    def readers(self, name: str) -> set[int]:
        """Processes that have read a leaf."""
        return {int(path.name.split()[1]) for path in self.folder.glob(f"{name} *")}


class Leaf:
    """An array that is read when it is asked for."""

    def __init__(self, folder: Path, name: str, value: np.ndarray) -> None:
        self.folder, self.name, self.value = folder, name, value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        (self.folder / f"{self.name} {os.getpid()}").touch()
        return self.value
