"""Stages that are only checked: equal layers are traced once, whatever their number."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import autopar
from autopar.runtime.one_program.lower import Lowering
from benchmarks.layers import f32


def chain(layers: int, odd: int | None = None) -> tuple[Any, Any]:
    """A step of equal layers, ``odd`` a wider one, and what it takes."""

    def loss(params: Any, x: Any) -> Any:
        for up, down in params:
            x = x + jax.numpy.tanh(x @ up) @ down
        return (x**2).mean()

    def step(params: Any, x: Any) -> Any:
        value, grads = autopar.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    inner = [48 if k == odd else 32 for k in range(layers)]
    return step, ([(f32(16, n), f32(n, 16)) for n in inner], f32(8, 16))


def traced(monkeypatch: pytest.MonkeyPatch, layers: int, odd: int | None = None) -> int:
    """How many parts of layers are traced until a plan of two stages is checked."""
    step, args = chain(layers, odd)
    counted: list[str] = []
    run = Lowering.run

    def counting(self: Any, *given: Any) -> list[Any]:
        counted.append("")
        return run(self, *given)

    planned = autopar.parallelize(
        step, cluster="cpu:4", stage_starts=[0, layers // 2], submeshes=["1x2"], num_microbatches=2, recompute="none",
        layers=layers, workers=1,
    )  # fmt: skip
    with monkeypatch.context() as patched:
        patched.setattr(Lowering, "run", counting)
        planned.plan(*args)
    return len(counted)


@pytest.mark.slow
def test_equal_layers_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    few = traced(monkeypatch, 6)
    assert traced(monkeypatch, 12) == few
    assert traced(monkeypatch, 12, odd=2) > few
