"""Steps that infer, and states, that lie where a train step's pipeline has them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.frontend.layering.layers import layered
from autopar.inter_op.follow import matched
from autopar.ir.errors import OptionError, PlanMismatchError
from autopar.ir.graph import TensorType
from autopar.ir.layer_sharding import joins
from autopar.ir.plan import Place
from autopar.ir.sharding import ShardingSpec
from tests.clusters import SLOW_8
from tests.models import build
from tests.null.test_pipeline_plans import make

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("following")]  # what all share is made once

BATCH, WIDTH, LAYERS = 1024, 512, 4


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, "float32")


def adam(params: Any) -> Any:
    return {"mu": params, "nu": params, "step": jax.ShapeDtypeStruct((), "int32")}


def train_step(state: Any, x: Any) -> Any:
    """As `make`'s, with moments."""
    forward = make()[0].forward  # type: ignore[attr-defined]
    loss, grads = autopar.value_and_grad(lambda p, x: jnp.mean((forward(p, x) - x) ** 2))(state["params"], x)
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
    nu = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g**2, state["nu"], grads)
    params = jax.tree.map(lambda p, m, n: p - 0.1 * m / (jnp.sqrt(n) + 1e-8), state["params"], mu, nu)
    return {"params": params, "mu": mu, "nu": nu, "step": state["step"] + 1}, loss


PARAMS = make()[1][0]
STATE = {"params": PARAMS, **adam(PARAMS)}
X = shape(BATCH, WIDTH)


@pytest.fixture(scope="module")
def trained() -> autopar.Step[..., Any]:
    step = autopar.parallelize(
        train_step, cluster=SLOW_8, num_microbatches=4, stages=2, submeshes=["1x4"], schedule="1f1b",
        donate_argnums=0, workers=1,
    )  # fmt: skip
    step.plan(STATE, X)
    return step


def planned(step: autopar.Step[..., Any]) -> autopar.StepPlan:
    assert step.last_plan is not None
    return step.last_plan


def eval_step(state: Any, x: Any) -> Any:
    return jnp.mean((make()[0].forward(state["params"], x) - x) ** 2)  # type: ignore[attr-defined]


def of_params(params: Any, x: Any) -> Any:
    return eval_step({"params": params}, x)


def of_one_array(w: Any, x: Any) -> Any:
    return jnp.sum(w) + jnp.mean(x)


def with_more(state: Any, w: Any, x: Any) -> Any:
    return jnp.sum(make()[0].forward(state["params"], x) @ w)  # type: ignore[attr-defined]


def where(plan: autopar.StepPlan) -> dict[str, Any]:
    return {
        a.path + p.rows: (p.type_of(a.type), plan.stages.stages[p.stage].mesh.device_ids, p.spec)
        for a in plan.data.inputs
        for p in a.places
    }


def test_an_eval_step_of_the_same_state(trained: autopar.Step[..., Any]) -> None:
    plan, followed = planned(trained.follow(eval_step, STATE, X)), planned(trained)
    assert plan.stages.schedule.name == "inference"
    assert [s.mesh for s in plan.stages.stages] == [s.mesh for s in followed.stages.stages]
    have, known = where(plan), where(followed)
    assert len(have) == 2 * LAYERS
    assert all(known[path] == place for path, place in have.items())
    assert any(spec.dims != ((), ()) for _, _, spec in have.values())
    assert {(c.source, c.target, c.phase) for c in plan.stages.cuts} == {(0, 1, "forward")}
    plan.data.verify()
    assert plan.simulate().makespan_s == plan.predictions.step_s
    assert plan.digest == trained.follow(eval_step).plan(STATE, X).digest


def test_layers_have_their_arguments_as_they_lie(trained: autopar.Step[..., Any]) -> None:
    """Not only the first reader of each: nothing is resharded before a step."""
    plan = trained.follow(eval_step).plan(STATE, X)
    known = where(planned(trained))
    graph = layered(eval_step, (STATE, X), platform=plan.data.cluster.platform).graph
    assert graph.fingerprint == plan.data.fingerprint
    paths = graph.arg_paths
    pipelined = plan.data.pipelined
    for k, layer in enumerate(pipelined.layers):
        for (_, argument, start, stop), spec in zip(layer.wiring.inputs, pipelined.sharding_of(k).inputs, strict=True):
            assert known[paths[argument] + (f"[{start}:{stop}]" if stop else "")][2] == spec
    assert not [j for j in joins([x.wiring for x in pipelined.layers]) if j.phase == "argument"]


def test_parameters_by_themselves(trained: autopar.Step[..., Any]) -> None:
    """They could be the moments, by their shapes: where these lie alike, that does not matter; else it is said."""
    plan = trained.follow(of_params, follow_args={"args[0]": "args[0]['params']"}).plan(PARAMS, X)
    data = planned(trained).data
    known = where(planned(trained))
    assert {p.replace("args[0]", "args[0]['params']", 1): w for p, w in where(plan).items()}.items() <= known.items()
    whole = ShardingSpec(dims=((), ()))
    moved = tuple(
        replace(a, places=tuple(replace(p, spec=whole) for p in a.places)) if "'mu'" in a.path else a
        for a in data.inputs
    )
    other = trained.with_options(plan=replace(data, inputs=moved))
    other.plan(STATE, X)
    with pytest.raises(
        OptionError,
        match=r"follow: args\[0\] of of_params could be .*, which lie differently\. Say which: follow_args=",
    ):
        other.follow(of_params, PARAMS, X)


def test_a_name_is_no_beginning_of_a_longer_one() -> None:
    f32 = TensorType(shape=(8, 8), dtype="float32")
    place = {0: (f32, ShardingSpec(dims=((), ())))}
    found = matched(
        [("args[0].w", f32), ("args[0].w2", f32)], {"args[0].params.w": place, "args[0].w2": place},
        {"args[0].w": "args[0].params.w"}, "evaluate",
    )  # fmt: skip
    assert found == {"args[0].w": "args[0].params.w", "args[0].w2": "args[0].w2"}


def test_another_batch(trained: autopar.Step[..., Any]) -> None:
    plan = trained.follow(eval_step).plan(STATE, shape(64, WIDTH))
    assert plan.stages.schedule.num_microbatches == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) for n in ("gpt_tied", "gpt_scan", "moe")])
def test_models(name: str) -> None:
    """The loss of a model, on the pipeline of its train step."""
    model = build(name)
    given = {k: v for k, v in model.kwargs.items() if k in ("batch_argnums", "static_argnums", "donate_argnums")}
    step = autopar.parallelize(
        model.step, cluster=SLOW_8, num_microbatches=2, stages=2, submeshes=["1x4"], schedule="1f1b", workers=1, **given
    )
    known = where(step.plan(*model.args))
    assert model.loss is not None
    found = step.follow(model.loss, follow_args={"args[0]": "args[0]['params']"}).plan(*model.grad_args)
    for path, place in where(found).items():
        assert known[path.replace("args[0]", "args[0]['params']", 1)] == place


@pytest.mark.slow
def test_interleaved_stages_share_meshes() -> None:
    step = autopar.parallelize(
        train_step, cluster=SLOW_8, num_microbatches=4, stages=4, submeshes=["1x4"], schedule="interleaved_1f1b",
        workers=1,
    )  # fmt: skip
    plan = step.plan(STATE, X)
    found = step.follow(eval_step).plan(STATE, X)
    assert found.stages.schedule.mesh_of_stage == plan.stages.schedule.mesh_of_stage == (0, 1, 0, 1)
    assert found.simulate().makespan_s > 0


@pytest.mark.parametrize(
    ("step", "args", "options", "message"),
    [
        (train_step, (STATE, X), {}, "follow: train_step takes gradients; only a step that infers can follow another"),
        (eval_step, (STATE, X), {"stages": 2}, "stages: the plan that is followed says that; leave it out"),
        (eval_step, (STATE, X), {"cluster": "cpu:8"}, "cluster: the plan that is followed says that; leave it out"),
        (
            with_more,
            (STATE, shape(WIDTH, 9), X),
            {"batch_argnums": (2,)},
            "follow: args[1] of with_more (float32[512,9]) is no argument that the train step's stages hold",
        ),
        (
            eval_step,
            ({"params": {"layers": [{"up": shape(WIDTH, 8), "down": shape(8, WIDTH)}] * LAYERS}}, X),
            {},
            "follow: args[0]['params']['layers'][0]['up'] of eval_step is float32[512,8], but "
            "args[0]['params']['layers'][0]['up'] of the train step is float32[512,2048]. Plan for these shapes",
        ),
        (
            lambda params, x: eval_step({"params": {"layers": params["layers"][::-1]}}, x),
            (PARAMS, X),
            {"follow_args": {"args[0]": "args[0]['params']"}},
            "which lies on stage 0 of the train step, after a layer that runs on stage 1. Both steps must use their",
        ),
        (
            eval_step,
            (STATE, X),
            {"layers": 1},
            "Cut it where the train step is cut: layers=, or autopar.layer_boundary",
        ),
    ],
)
def test_what_cannot_follow(
    trained: autopar.Step[..., Any], step: Any, args: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        trained.follow(step, *args, **options)


# States ------------------------------------------------------------------------------------------------------------


def create_state(key: Any) -> Any:
    params = {"layers": [{k: jax.random.normal(key, s.shape) for k, s in layer.items()} for layer in PARAMS["layers"]]}
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "mu": zeros, "nu": zeros, "step": jnp.int32(0)}


def is_place(x: Any) -> bool:
    return type(x) is tuple and all(isinstance(p, Place) for p in x)


def test_a_state_is_placed(trained: autopar.Step[..., Any]) -> None:
    state = jax.eval_shape(create_state, jax.random.key(0))
    plan = planned(trained)
    placed = plan.place(state)
    leaf = placed["params"]["layers"][3]["up"]
    assert [p.stage for p in leaf] == [1]
    flat = [
        (f"args[0]{jax.tree_util.keystr(path)}", parts)
        for path, parts in jax.tree_util.tree_flatten_with_path(placed, is_leaf=is_place)[0]
    ]
    assert flat == [(a.path, a.places) for a in plan.data.inputs if a.path != "args[1]"]
    assert plan.place(state, "args[0]") == placed


@pytest.mark.full
def test_rows_of_stacked_arrays_are_placed() -> None:
    model = build("gpt_scan")
    plan = autopar.parallelize(
        model.step, cluster=SLOW_8, num_microbatches=2, stages=2, submeshes=["1x4"], schedule="1f1b", workers=1,
        **{k: v for k, v in model.kwargs.items() if k in ("batch_argnums", "static_argnums", "donate_argnums")},
    ).plan(*model.args)  # fmt: skip
    placed = plan.place(model.args[0])
    parts = jax.tree.leaves(placed, is_leaf=is_place)
    assert any(len({p.stage for p in leaf if p.stop and p.start < 2}) == 2 for leaf in parts)


def test_states_that_are_no_argument(trained: autopar.Step[..., Any]) -> None:
    state = jax.eval_shape(create_state, jax.random.key(0))
    with pytest.raises(PlanMismatchError, match=r"no argument of train_step has these leaves \(args\[0\]: stages"):
        planned(trained).place({k: v for k, v in state.items() if k != "mu"})
    other = {**state, "step": jax.ShapeDtypeStruct((), "float32")}
    with pytest.raises(
        PlanMismatchError, match=re.escape("['step'] is float32[], stages hold args[0]['step']: int32[]")
    ):
        planned(trained).place(other)
    with pytest.raises(PlanMismatchError, match=re.escape("place: stages hold nothing of args[7]; there is args[0]")):
        planned(trained).place(state, "args[7]")


# Steps on one mesh ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded() -> Any:
    step = autopar.parallelize(train_step, cluster=SLOW_8, mesh=(2, 4), donate_argnums=0, method="zero3")
    step.plan(STATE, X)
    return step


def specs(plan: autopar.StepPlan) -> dict[str, Any]:
    return {a.path: a.spec for a in plan.data.inputs}


def test_an_eval_step_on_one_mesh(sharded: Any) -> None:
    found = specs(sharded.follow(eval_step, STATE, X).plan(STATE, X))
    known = specs(sharded.last_plan)
    assert {p: s for p, s in found.items() if p != "args[1]"} == {p: s for p, s in known.items() if p != "args[1]"}
    assert any(any(spec.dims) for spec in found.values())


def test_parameters_by_themselves_on_one_mesh(sharded: Any) -> None:
    step = sharded.follow(of_params, PARAMS, X, follow_args={"args[0]": "args[0]['params']"})
    assert isinstance(step, autopar.Step)
    found, known = specs(step.plan(PARAMS, X)), specs(sharded.last_plan)
    for path, spec in found.items():
        assert path == "args[1]" or spec == known[path.replace("args[0]", "args[0]['params']", 1)]
    with pytest.raises(OptionError, match=r"follow: args\[0\] of of_one_array \(float32\[3,3\]\) is no argument that"):
        sharded.follow(of_one_array, shape(3, 3), X)


def test_a_step_without_a_plan_cannot_be_followed() -> None:
    with pytest.raises(PlanMismatchError, match=r"train_step\.follow needs a plan: call train_step\.plan"):
        autopar.parallelize(train_step).follow(eval_step, STATE, X)
