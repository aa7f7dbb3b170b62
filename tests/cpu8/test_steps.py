"""One `Step`, whatever it runs as: what one program and stages have in common, and what is said where they have not."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.ir.errors import (
    CheckError,
    InfeasibleError,
    LoweringError,
    MicrobatchError,
    OptionError,
    PlanMismatchError,
    TraceError,
)
from tests.clusters import SLOW_8
from tests.compare import assert_close
from tests.option_pairs import batch, create, train
from tests.shares import each

ONE: dict[str, Any] = {"cluster": SLOW_8}
TWO: dict[str, Any] = {**ONE, "num_microbatches": 2, "stages": 2, "schedule": "1f1b", "workers": 1}
BOTH = pytest.mark.parametrize("options", each(2, [pytest.param(ONE, id="one"), pytest.param(TWO, id="two")]))


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Any:
    """What autopar says."""
    with caplog.at_level(logging.WARNING, "autopar"):
        yield lambda: [r.getMessage() for r in caplog.records]


@BOTH
def test_the_same_methods(options: dict[str, Any], tmp_path: Path) -> None:
    step = autopar.parallelize(train, **options, donate_argnums=0)
    assert repr(step) == "<step train: not planned yet>"
    for method in (step.init, step.abstract, step.loader, step.follow):
        with pytest.raises(PlanMismatchError, match="needs a plan"):
            method(create)
    for method in (step.trace, step.compiled):
        with pytest.raises(PlanMismatchError, match="needs a plan"):
            method()
    plan = step.plan(jax.eval_shape(create), batch())
    assert repr(plan) in repr(step) and "s a step>" in repr(plan)
    state, want = step.init(create), create()
    with step.trace(tmp_path / "trace.json") as traced, step.loader(lambda n: map(batch, range(n, 2))) as batches:
        for number, each in enumerate(batches):
            state, loss = step(state, each)
            want, expected = jax.jit(train)(want, batch(number))
            assert_close(jax.tree.map(np.asarray, (state, loss)), (want, expected), 1e-5)
    assert len(traced.steps) == 2 and (tmp_path / "trace.json").exists()
    assert all(worker.peak_bytes > 0 for worker in traced.steps[0].workers)

    def loss_of(weights: Any, batch: Any) -> Any:
        x = batch["x"]
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    # cut as the step is, as a loss has no layers of its own
    evaluate = step.follow(loss_of, follow_args={"args[0]": "args[0]['w']"})
    assert_close(np.asarray(evaluate(state["w"], batch(5))), loss_of(want["w"], batch(5)), 1e-5)
    step.close()


@BOTH
def test_check(options: dict[str, Any]) -> None:
    report = autopar.check(train, args=(create(), batch()), num_steps=2, **options)
    assert report.agrees and [leaf.path for leaf in report.leaves][-1] == "out[1]"
    with pytest.raises(CheckError, match=r"is a ShapeDtypeStruct"):
        autopar.check(train, args=(jax.eval_shape(create), batch()), **options)
    with pytest.raises(CheckError, match="returns its new state"):
        autopar.check(lambda s, b: train(s, b)[1], args=(create(), batch()), num_steps=2, **options)


def test_check_of_stages_names_what_differs() -> None:
    def wrong(state: Any, batch: Any) -> Any:
        return train(state, batch)

    step = autopar.parallelize(wrong, **TWO)
    step.plan(create(), batch())
    executor = step.compiled()
    step._entries[next(iter(step._entries))].executor = lambda leaves: [2 * x for x in executor(leaves)]  # type: ignore[assignment]
    step._entries[next(iter(step._entries))].executor.closed = False  # type: ignore[attr-defined]
    with pytest.raises(CheckError, match=r"differ: out\[0\]\['n'\] \(stages "):
        autopar.check(step, args=(create(), batch()))


@BOTH
def test_a_step_that_was_given_a_plan(options: dict[str, Any], tmp_path: Path, messages: Any) -> None:
    plan = autopar.parallelize(train, **options).plan(create(), batch())
    plan.save(tmp_path / "plan.json")
    step = autopar.parallelize(train, plan=tmp_path / "plan.json")
    state = step.init(create)  # before the step has been traced
    assert all(x.sharding.mesh.size <= 8 for x in jax.tree.leaves(state) if isinstance(x, jax.Array))
    assert_close(jax.tree.map(np.asarray, state), create(), 1e-6)
    assert_close(jax.tree.map(np.asarray, step(state, batch())), jax.jit(train)(create(), batch()), 1e-5)
    with pytest.raises(PlanMismatchError, match="no argument of the planned step has the tree"):
        autopar.parallelize(train, plan=plan).init(lambda: jnp.ones(3))
    other = {"mesh": 4} if options is ONE else {"stages": (3, None)}
    for name, value in {"num_microbatches": 8, "forbid": "all-gather", "recompute": False, **other}.items():
        with pytest.raises(OptionError, match=f"^{name}: the plan that is given was made with"):
            autopar.parallelize(train, plan=plan, **{name: value})
    with pytest.raises(OptionError, match=r"^cluster: the plan that is given is for"):
        autopar.parallelize(train, plan=plan, cluster="cpu:4")
    with pytest.raises(OptionError, match=r"^plan: the one that is given is of (one program|stages), and"):
        autopar.parallelize(train, plan=plan, **{"stages": 2} if options is ONE else {"mesh": 8})
    assert messages() == []
    old = replace(plan.data, provenance=replace(plan.data.provenance, jax_version="0.0.1"))
    autopar.parallelize(train, plan=old)
    assert "the plan was made with jax 0.0.1, this is" in messages()[0]


@BOTH
def test_other_shapes_are_planned_again_and_said(options: dict[str, Any], messages: Any) -> None:
    step = autopar.parallelize(train, **options)
    step(create(), batch())
    step(create(), batch(1))
    assert messages() == []
    half = jax.tree.map(lambda x: x[:16], batch())
    assert_close(jax.tree.map(np.asarray, step(create(), half)), jax.jit(train)(create(), half), 1e-5)
    assert messages() == ["train is planned for the second time: args[1]['x'] is float32[16,16], was float32[32,16]"]


@BOTH
def test_weak_types_alone_plan_and_compile_nothing_anew(options: dict[str, Any], messages: Any) -> None:
    step = autopar.parallelize(train, **options)
    state = {**create(), "n": 0}  # as flax's TrainState has its step
    state, _ = step(state, batch())
    first = step.compiled()
    plan = step.last_plan
    for count in (state["n"], jnp.int32(1), 1):
        state, _ = step({**state, "n": count}, batch())
        assert int(state["n"]) == 2
    assert step.last_plan is not None and plan is not None and step.last_plan.data is plan.data
    assert messages() == []
    if options is TWO:
        assert step.compiled() is first


def test_what_one_program_alone_can_do() -> None:
    step = autopar.parallelize(train, **TWO)
    with pytest.raises(LoweringError, match="is planned in 2 stages, which are many programs"):
        step.lower(create(), batch())
    with pytest.raises(TraceError, match="runs as a pipeline, which is no JAX program"):
        jax.jit(step)(create(), batch())
    with pytest.raises(PlanMismatchError, match="has 2 stages, on meshes of their own"):
        _ = step.plan(create(), batch()).in_specs


def test_stages_with_layers_before_all_parameters_and_a_key_for_both() -> None:
    fixed = 0.1 * np.ones((16, 16), np.float32)

    def noisy(state: Any, batch: Any) -> Any:
        def loss_of(weights: Any, batch: Any) -> Any:
            x = jnp.tanh(jnp.tanh(batch["x"] @ fixed) @ fixed)  # no gradient goes here
            for w in weights:
                x = jnp.tanh(x @ w)
            return jnp.mean((x - batch["y"]) ** 2)

        loss, grads = autopar.value_and_grad(loss_of)(state["w"], batch)
        key, *each = jax.random.split(state["key"], 5)
        new = [w - g + jax.random.normal(k, w.shape) for w, g, k in zip(state["w"], grads, each, strict=True)]
        return {"w": new, "key": key}, loss

    got = want = {"w": create()["w"], "key": jax.random.key(1)}
    step = autopar.parallelize(noisy, **TWO, layers=6)
    for seed in range(2):
        (got, loss), (want, expected) = step(got, batch(seed)), jax.jit(noisy)(want, batch(seed))
        assert_close(jax.tree.map(np.asarray, (got["w"], loss)), (want["w"], expected), 1e-5)
        key = got["key"].copy()
        assert np.array_equal(jax.random.key_data(key), jax.random.key_data(want["key"]))


def test_positions_that_are_none() -> None:
    with pytest.raises(
        OptionError, match="donate_argnums: train takes 2 arguments by position; there is no argument 2"
    ):
        autopar.parallelize(train, donate_argnums=2)
    with pytest.raises(
        OptionError, match="static_argnums: train takes 2 arguments by position; there is no argument -3"
    ):
        autopar.parallelize(train, static_argnums=(-3,))
    with pytest.raises(OptionError, match=r"donate_argnums: got 'state', of type str; expected int"):
        autopar.parallelize(train, donate_argnums="state")  # type: ignore[call-overload]
    autopar.parallelize(lambda *args: args, donate_argnums=7)


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        ({"mesh": 3}, ("the plan uses 3 of the cluster's 8 devices",
                       "args[1]['x']: no axis of the mesh divides the 32 examples: they are not split")),
        ({"mesh": 8, "num_microbatches": 8},
         ("args[1]['x']: no axis of the mesh divides the 4 examples of a microbatch: they are not split",)),
        ({"stages": 2, "submeshes": ["1x2"], "num_microbatches": 2, "schedule": "1f1b", "workers": 1},
         ("the plan uses 4 of the cluster's 8 devices",)),
        ({"stages": 2, "submeshes": ["1x4"], "num_microbatches": 16, "schedule": "1f1b", "mesh": 4, "workers": 1},
         ("args[1]['x']: no axis of the mesh of stage 0 and 1 divides the 2 examples of a microbatch: they are not "
          "split",)),
    ],
)  # fmt: skip
def test_what_is_left_over_is_in_the_plans_notes(options: dict[str, Any], notes: tuple[str, ...]) -> None:
    plan = autopar.parallelize(train, cluster=SLOW_8, **options).plan(create(), batch())
    assert plan.provenance.notes[: len(notes)] == notes


def test_what_is_not_looked_for_is_in_the_plans_notes() -> None:
    def scaled(state: Any, scale: Any, batch: Any) -> Any:
        return train(state, {**batch, "x": scale * batch["x"]})

    def plain(state: Any, batch: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(batch["x"] @ w[0]))(state["w"])

    def notes(step: Any, *args: Any, **options: Any) -> tuple[str, ...]:
        return autopar.parallelize(step, cluster=SLOW_8, **options).plan(*args).provenance.notes

    single = jax.tree.map(lambda x: x[:1], batch())
    assert notes(train, create(), single, mesh=8)[-1] == "one microbatch: the batch is one example"
    none, wrong = jnp.float32(1), jnp.ones(16)
    assert notes(scaled, create(), none, batch(), mesh=8)[-1].startswith("one microbatch: no argument carries a batch")
    taken = "the batch is taken to be args[1], of 16 examples; batch_argnums= says otherwise"
    assert taken in notes(scaled, create(), wrong, batch(), mesh=8)
    assert taken not in notes(scaled, create(), wrong, batch(), mesh=8, batch_argnums="batch")
    why = "the step takes no gradients by autopar.value_and_grad"
    assert notes(plain, create(), batch(), mesh=8) == (f"one microbatch: {why}",)
    (note,) = notes(plain, create(), batch())
    assert note == f"no stages: {why}, so that there is one microbatch, which fills no stages"
    with pytest.raises(MicrobatchError, match=r"plain has num_microbatches=2 but no autopar\.value_and_grad"):
        notes(plain, create(), batch(), num_microbatches=2, stages=2)


def test_meshes_that_were_tried_are_named() -> None:
    with pytest.raises(InfeasibleError, match=r"no plan.* fits memory_bytes=3000 .* Tried were meshes 8, 2x4"):
        autopar.parallelize(train, memory_bytes=3000, cluster=SLOW_8, recompute=False, num_microbatches=1).plan(
            create(), batch()
        )


def test_a_step_gets_more_options() -> None:
    step = autopar.parallelize(autopar.parallelize(train, num_microbatches=4, **ONE), memory_bytes=10**8)
    config = step.plan(create(), batch()).data.config
    assert (config.num_microbatches, config.memory_bytes) == (4, 10**8)
