"""A small train step, its data by number, and what an undisturbed run of it gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar import checkpoint

WIDTH = 8
STEPS = 7


def init() -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    return {"w": [jax.random.normal(k, (WIDTH, WIDTH)) * WIDTH**-0.5 for k in keys], "seen": jnp.zeros((), jnp.int32)}


def train(state: Any, x: Any) -> Any:
    def loss(ws: Any) -> Any:
        y = x
        for w in ws:
            y = jnp.tanh(y @ w)
        return jnp.mean((y - x) ** 2)

    value, grads = autopar.value_and_grad(loss)(state["w"])
    return {"w": [w - 0.1 * g for w, g in zip(state["w"], grads)], "seen": state["seen"] + 1}, value


def batch_at(i: int) -> Any:
    return np.random.default_rng(i).normal(size=(8, WIDTH))


def undisturbed() -> tuple[list[float], Any]:
    state, losses = init(), []
    for i in range(STEPS):
        state, value = jax.jit(train)(state, batch_at(i))
        losses.append(float(value))
    return losses, state


def through_a_failure(fail: Callable[[], None], path: Path, **options: Any) -> Any:
    """The state after an elastic run on a Ray, of whose workers ``fail`` ends some after step 4 of seven; checkpoints
    under ``path`` are of every second. Losses and state are those of an undisturbed run. Prints how long it took until
    a step was done again."""
    seen: list[tuple[int, float]] = []
    times_s: list[float] = []

    def on_step(i: int, loss: Any) -> None:
        if len(times_s) == 1:
            times_s.append(time.monotonic())
        seen.append((i, float(loss)))
        if i == 4 and not times_s:
            while checkpoint.latest(path) != 4:  # it is written beside the steps
                time.sleep(0.01)
            fail()
            times_s.append(time.monotonic())

    state = autopar.run_elastic(
        train, init, batch_at, steps=STEPS, path=path, save_every=2, on_step=on_step, stages=2, num_microbatches=2,
        layers=3, workers=1, schedule="1f1b", **options,
    )  # fmt: skip
    hold(seen, state, [*range(5), *range(4, STEPS)])
    print(f"recovered in {times_s[1] - times_s[0]:.1f} s")
    return state


def hold(seen: Sequence[tuple[int, float]], state: Any, order: list[int]) -> None:
    """The losses seen are those of an undisturbed run, at the steps in ``order``; so is the state."""
    losses, want = undisturbed()
    assert [i for i, _ in seen] == order
    np.testing.assert_allclose([x for _, x in seen], [losses[i] for i in order], rtol=1e-9)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-9, atol=1e-12), state, want)
