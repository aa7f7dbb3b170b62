"""A step's state after a call lies as the next one wants it, donated or not: nothing is compiled or moved again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.arrays import Array, Piece
from autopar.ir.errors import ArgumentError
from tests.clusters import SLOW_8
from tests.compare import assert_close, assert_same_collectives
from tests.models import build
from tests.null.test_state import STEPS
from tests.shares import each

TOLERANCE = 2e-5


def numbers(shapes: Any) -> Any:
    """Arrays of these shapes: floats are positive, as squares that an optimizer keeps, integers 0."""
    rng = np.random.default_rng(0)

    def made(s: Any) -> Any:
        floats = jnp.issubdtype(s.dtype, jnp.floating)
        return jnp.asarray(rng.uniform(0.01, 0.1, s.shape) if floats else np.zeros(s.shape), s.dtype)

    return jax.tree.map(made, shapes)


def state_of(name: str, out: Any, count: int) -> tuple[Any, ...]:
    """The next call's ``count`` first arguments, of what a step of `STEPS` returned."""
    return out[0] if name == "adam" else out[:count]


def test_rows_that_no_stage_has() -> None:
    array = Array((8,), np.dtype("f4"), (Piece(0, 0, 4, jnp.zeros(4)),))
    with pytest.raises(ArgumentError, match=r"autopar.Array\(float32\[8\] .*: no stage has rows 4 to 8"):
        array.whole()


@pytest.mark.parametrize("donates", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize("name", each(3, STEPS))
def test_the_second_call_compiles_and_moves_nothing(name: str, donates: bool, caplog: pytest.LogCaptureFixture) -> None:
    step, shapes = STEPS[name]()
    count = len(shapes) - 1
    donated = tuple(range(count)) if donates else ()
    parallel = autopar.parallelize(step, mesh=(2, 4), batch_argnums=count, batch_axis="x", donate_argnums=donated)
    *first, batch = numbers(shapes)
    plain = jax.jit(step)
    once = plain(*first, batch)
    want = plain(*state_of(name, once, count), batch)
    out = parallel(*jax.tree.map(jnp.copy, first), batch)
    assert_close(out, once, TOLERANCE)
    [entry] = parallel._entries.values()
    leaves, tree = jax.tree.flatten(batch)
    executor: Any = entry.executor
    there = executor.in_shardings[len(jax.tree.leaves(first)) :]
    batch = jax.tree.unflatten(tree, map(jax.device_put, leaves, there))
    caplog.clear()
    with jax.log_compiles(), caplog.at_level("WARNING"), jax.transfer_guard_device_to_device("disallow_explicit"):
        out = parallel(*state_of(name, out, count), batch)
    assert not caplog.records
    assert_close(out, want, TOLERANCE)
    compiled = executor._compiled
    ins, outs = compiled.input_shardings[0], compiled.output_shardings
    planned = entry.plan.data.inputs[entry.plan.num_consts :]
    assert [a.becomes >= 0 for a in planned].count(True) == len(jax.tree.leaves(first))
    for a, mine in zip(planned, ins, strict=True):
        assert a.becomes < 0 or mine.is_equivalent_to(outs[a.becomes], len(a.type.shape)), a.path
    assert_same_collectives(entry.plan, compiled.as_text())


def places(leaf: Any) -> list[Any]:
    """Where a leaf's pieces lie."""
    if not isinstance(leaf, Array):
        return [leaf.sharding]
    return sorted((p.stage, p.start, p.stop, str(p.array.sharding)) for p in leaf.pieces)


@pytest.mark.parametrize(
    ("name", "donates"),
    [
        pytest.param("gpt_tied", False, marks=pytest.mark.full),
        pytest.param("gpt_tied", True, marks=pytest.mark.full),
        pytest.param("gpt_scan", False, marks=pytest.mark.full),
    ],
)
@pytest.mark.usefixtures("float64")
def test_stages_have_their_state_where_they_want_it(name: str, donates: bool) -> None:
    """A weight that two stages read, and weights that each stage has rows of."""
    model = build(name, "float64")
    step = autopar.parallelize(
        model.step, cluster=SLOW_8, num_microbatches=4, stages=2, submeshes=["1x4"], recompute="none", schedule="1f1b",
        workers=1, donate_argnums=0 if donates else (),
    )  # fmt: skip
    step.plan(*model.args)
    wanted = step.abstract(lambda: model.args[0])
    assert any(isinstance(leaf, Array) for leaf in jax.tree.leaves(wanted))
    plain, want = jax.jit(model.step), model.args
    args = model.fresh_args()
    for _ in range(2):
        out, expected = step(*args), plain(*want)
        assert list(map(places, jax.tree.leaves(out[0]))) == list(map(places, jax.tree.leaves(wanted)))
        args, want = model.next_args(out), model.next_args(expected)
    assert_close(jax.tree.map(np.asarray, out), jax.device_get(expected), 1e-9)
