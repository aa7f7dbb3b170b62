"""What is traced once: a step, whatever the number of microbatches; its update, at no microbatch's size; and of stages
that are only checked equal layers, of which two in a row are lowered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest

import autopar
from autopar.frontend.layering import layered
from autopar.runtime.one_program.lowering import Lowering
from autopar.runtime.stages import layers_apart, without_repeats
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


def block(p: Any, x: Any) -> Any:
    return x + jax.numpy.tanh(x @ p[0]) @ p[1]


def plain(params: Any, x: Any) -> Any:
    for p in params:
        x = block(p, x)
    return x


def read_again(params: Any, x: Any) -> Any:
    """What layer 3 gives is read by the next and by the last."""
    kept = plain(params[:4], x)
    return plain(params[4:], kept) + kept


def tied(params: Any, x: Any) -> Any:
    """The weights of layer 1 are those of layer 5."""
    for k in range(len(params)):
        x = block(params[1 if k == 5 else k], x)
    return x


def by_turns(params: Any, x: Any) -> Any:
    for k, p in enumerate(params):
        x = block(p, x) if k % 2 else block(p, jax.numpy.sin(x))
    return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "starts", "left_out"),
    [
        (plain, [0], {3, 4, 5, 6}),
        (plain, [0, 4], {3, 6}),
        (read_again, [0], {4, 5, 6}),
        (tied, [0], {4}),
        (by_turns, [0], set[int]()),
    ],
)
def test_of_equal_layers_in_a_row_two_are_lowered(
    model: Callable[..., Any], starts: list[int], left_out: set[int]
) -> None:
    """Layers 0 and 7 hold what comes in and the loss; the plan's check passes whatever they read of one another."""

    def step(params: Any, x: Any) -> Any:
        value, grads = autopar.value_and_grad(lambda p, x: (model(p, x) ** 2).mean())(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    planned = autopar.parallelize(
        step, cluster="cpu:4", stage_starts=starts, submeshes=["1x2"], num_microbatches=2, recompute="none", layers=8,
        workers=1,
    )  # fmt: skip
    args = [(f32(16, 32), f32(32, 16))] * 8, f32(8, 16)
    graph, pipelined = layered(step, args, num_microbatches=2, layers=8).graph, planned.plan(*args).data.pipelined
    apart = layers_apart(graph, pipelined)
    here = [k for s in range(len(starts)) for k in without_repeats(graph, pipelined, apart, s)]
    assert set(range(8)) - set(here) == left_out


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


def counted(ways: Sequence[Any] = ()) -> tuple[Any, Any, list[int], list[int]]:
    """A step, what it takes, and with how many examples its loss and its update were traced; ``ways``: around the
    gradient."""
    losses, updates = list[int](), list[int]()

    def loss(params: Any, x: Any) -> Any:
        losses.append(x.shape[0])
        return (plain(params, x) ** 2).mean()

    gradient: Any = autopar.value_and_grad(loss)
    for way in ways:
        gradient = way(gradient)

    def step(params: Any, x: Any) -> Any:
        value, grads = gradient(params, x)
        updates.append(x.shape[0])
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step, ([(f32(16, 32), f32(32, 16))] * 4, f32(16, 16)), losses, updates


def caught(gradient: Any) -> Any:
    """As users wrap what may fail."""

    def run(*args: Any) -> Any:
        try:
            return gradient(*args)
        except Exception as error:
            raise ValueError("the gradient failed") from error

    return run


@pytest.mark.parametrize("ways", [(), (caught,), (jax.jit,), (caught, jax.jit, caught)])
def test_a_microbatch_ends_at_its_gradient(ways: Sequence[Any]) -> None:
    step, args, losses, updates = counted(ways)
    plain_step, *_ = counted()
    found = layered(step, args, num_microbatches=4)
    assert found.graph.fingerprint == layered(plain_step, args, num_microbatches=4).graph.fingerprint
    assert losses == [16, 4]
    assert updates == [16]


def test_gradients_that_are_only_looked_at_end_nothing() -> None:
    """What a step evaluates in the abstract is no part of it."""
    losses, updates = list[int](), list[int]()

    def loss(params: Any, x: Any) -> Any:
        losses.append(x.shape[0])
        return (plain(params, x) ** 2).mean()

    def step(params: Any, x: Any) -> Any:
        like = jax.eval_shape(autopar.grad(lambda p, x: (plain(p, x) ** 3).mean()), params, x)
        value, grads = autopar.value_and_grad(loss)(params, x)
        updates.append(x.shape[0])
        return jax.tree.map(lambda p, g, t: p - 0.1 * g.astype(t.dtype), params, grads, like), value

    assert len(layered(step, counted()[1], num_microbatches=4).graph.layers) > 1
    assert losses == [16, 4]
    assert updates == [16]


def test_a_gradient_that_jit_has_traced_before_is_found() -> None:
    """At this size nothing of it is run again, and the marker is an equation of what jit has kept."""
    step, args, losses, updates = counted((jax.jit,))
    jax.eval_shape(step, args[0], f32(4, 16))
    before = len(losses), len(updates)
    assert layered(step, args, num_microbatches=4).graph.layers
    assert losses[before[0] :] == [16]
    assert updates[before[1] :] == [16, 4]


@pytest.mark.slow
def test_numbers_of_microbatches_share_the_steps_trace() -> None:
    step, args, losses, updates = counted()
    autopar.parallelize(step, cluster="cpu:4", num_microbatches="auto", stages=2, workers=1).plan(*args)
    assert losses.count(16) == updates.count(16) == 1
    assert len(losses) > 2
    assert set(updates) == {16}
