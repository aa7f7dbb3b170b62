"""The tasks of stages, lowered as a plan says, give the numbers of the layers run one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

import autopar
from autopar.frontend.layering.layers import Layered
from autopar.runtime.in_process import PipelineExecutor
from autopar.runtime.stage_arrays import Array, StageTask, outer_shape, outer_spec
from autopar.runtime.stages import StageLowering, layers_apart
from autopar.verify.hlo_collectives import parse_collectives, tally
from tests.clusters import SLOW_8
from tests.compare import assert_close
from tests.layer_reference import Reference
from tests.models import build

TOLERANCE = 1e-9
MICROBATCHES = 2


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


class Stages:
    """The stages of a plan on this process's devices; what crosses goes through the host."""

    def __init__(self, layered: Layered, plan: autopar.StepPlan) -> None:
        self.graph = layered.graph
        devices = jax.devices()
        self.stages: list[StageLowering] = []
        self.meshes: list[Mesh] = []
        layers = layers_apart(layered.graph, plan.data.pipelined)
        for number, stage in enumerate(plan.stages.stages):
            array = np.array([devices[d] for d in stage.mesh.device_ids]).reshape(stage.mesh.shape)
            self.meshes.append(Mesh(array, stage.mesh.axis_names))
            self.stages.append(StageLowering(layered, plan.data.pipelined, layers, number, "cpu"))
        self.tasks = [(s.begin(), s.forward(), s.backward()) for s in self.stages]
        self.jitted: dict[int, Any] = {}

    def run(self, stage: int, task: StageTask, known: dict[Any, Any], whole: dict[Any, Any]) -> dict[Any, Any]:
        """Its arrays by key. ``known``: arrays of the stage; ``whole``: values of the step, by name without a spec."""
        mesh = self.meshes[stage]
        if id(task) not in self.jitted:
            shardings = [NamedSharding(mesh, outer_spec(a.spec)) for a in task.gives]
            self.jitted[id(task)] = jax.jit(task.run, out_shardings=shardings)
        given: list[Any] = []
        for array in task.takes:
            x = known.get(array.key)
            if x is None:
                if array.key[0] == "sum":
                    x = np.zeros(outer_shape(array.type, array.spec, self.stages[stage].axis_sizes), array.type.dtype)
                else:
                    x = whole[array.key[:-1]]
                x = jax.device_put(x, NamedSharding(mesh, outer_spec(array.spec)))
            given.append(x)
        found = {a.key: x for a, x in zip(task.gives, self.jitted[id(task)](*given), strict=True)}
        taken = {a.key: x for a, x in zip(task.takes, given, strict=True)}
        return found | {key: taken[source] for key, source in task.same}


def whole_of(array: Array, x: Any) -> Any:
    return np.asarray(x).sum(0) if array.spec.unreduced else x


def compare(layered: Layered, plan: autopar.StepPlan, args: Any) -> None:
    """Loss and gradients of all microbatches, and what crosses, against the layers one by one."""
    graph = layered.graph
    reference, stages = Reference(layered), Stages(layered, plan)
    flat = [jnp.asarray(x) for x in (*layered.consts, *jax.tree_util.tree_leaves((args, {})))]
    once = reference._run(layered.before, flat)
    arguments = {("argument", a, 0, 0): x for a, x in enumerate(flat)}
    arguments |= {("argument", s.argument, s.start, s.stop): flat[s.argument][s.start : s.stop] for s in graph.slices}
    before = {("before", v): x for v, x in zip(graph.before_values, once, strict=True)}
    held: list[dict[Any, Any]] = []
    for s, (begin, _, _) in enumerate(stages.tasks):
        held.append(stages.run(s, begin, {}, {**arguments, **before}))
    want: dict[int, Any] = {}
    for number in range(graph.num_microbatches):
        env = reference._given(flat, once, number)
        given = {("receive", v): x for v, x in env.items()}
        for layer in graph.layers:
            results = reference._run(layered.kinds[layer.kind].forward, [env[v] for v in layer.operands])
            env.update(zip(layer.results, results, strict=True))
        crossing: dict[Any, Any] = {}
        for s, (_, forward, _) in enumerate(stages.tasks):
            found = stages.run(s, forward, held[s], {**given, **crossing})
            for array in forward.gives:
                if array.key[0] in ("send", "combined"):
                    assert_close(whole_of(array, found[array.key]), env[array.key[1]], TOLERANCE, least_norm=1e-6)
                if array.key[0] == "send":
                    crossing["receive", array.key[1]] = found[array.key]
            held[s] |= found
        crossing = {}
        for s, (_, _, backward) in reversed(list(enumerate(stages.tasks))):
            found = stages.run(s, backward, held[s], crossing)
            for array in backward.gives:
                if array.key[0] == "send":
                    key = ("receive", array.key[1])
                    crossing[key] = crossing.get(key, 0) + np.asarray(found[array.key])
                else:
                    held[s][array.key] = found[array.key]
        for v, gradient in reference._backward(env, "none").items():
            want[v] = want[v] + gradient if v in want else gradient
    check_gradients(stages, held, want)


def check_gradients(stages: Stages, held: list[dict[Any, Any]], want: dict[int, Any]) -> None:
    """Sums of all layers that read a trained value, against the reference's gradient."""
    graph = stages.graph
    by_value: dict[int, Any] = {}
    rows = {s.value: s for s in graph.slices}
    argument_value = dict(enumerate(graph.arguments))
    for s, (_, _, backward) in enumerate(stages.tasks):
        for layer in stages.stages[s].layers:
            read = set(graph.layers[layer.number].operands)
            of_argument = {v: a for a, v in enumerate(graph.arguments)}
            stacked = {of_argument[v] for v in graph.trained if v in of_argument}
            trained = [v for v in graph.trained if v in read]
            trained += [x.value for x in graph.slices if x.argument in stacked and x.value in read]
            sums = [a for a in backward.gives if a.key[:2] == ("sum", layer.number)]
            assert len(sums) == len(trained)
            for v, array in zip(trained, sums, strict=True):
                part = np.asarray(whole_of(array, held[s][array.key]))
                if v in rows:
                    whole = argument_value[rows[v].argument]
                    total = by_value.setdefault(whole, np.zeros(graph.values[whole].shape))
                    total[rows[v].start : rows[v].stop] += part
                else:
                    by_value[v] = by_value.get(v, 0) + part
    assert set(by_value) == set(want)
    for v, gradient in want.items():
        assert_close(by_value[v], gradient, TOLERANCE, least_norm=1e-6)


QUICK = ("mlp",)
REST = ("gpt_tied", "gpt", "gpt_scan", "gpt_dropout", "moe", "conv_net", "unet", "encoder_decoder", "gpt_scan_dropout")


def planned(name: str) -> tuple[Layered, autopar.StepPlan, Any]:
    """A model in layers, on two stages of 2 x 2 devices that are worth sharding for, and its arguments."""
    model = build(name, "float64")
    options = {k: v for k, v in model.kwargs.items() if k in ("batch_argnums", "static_argnums", "donate_argnums")}
    step = autopar.parallelize(
        model.step, cluster=SLOW_8, num_microbatches=MICROBATCHES, stages=2, submeshes=["1x4"], mesh="2x2",
        schedule="1f1b", workers=1, **options,
    )  # fmt: skip
    plan = step.plan(*model.args)
    return layers_of(step), plan, model.args


def layers_of(step: autopar.Step[..., Any]) -> Layered:
    """The planned step in layers."""
    executor = step.compiled()
    assert isinstance(executor, PipelineExecutor)
    return executor.layered


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.full) for n in REST)])
def test_models_on_two_stages(name: str) -> None:
    compare(*planned(name))


def test_a_value_that_skips_layers_is_kept_once() -> None:
    """By the layer that reads it next and the one that it reaches, in one stage."""

    def loss(weights: Any, x: Any) -> Any:
        start = x = autopar.layer_boundary(jnp.tanh(x @ weights[0]))
        for w in weights[1:-1]:
            x = autopar.layer_boundary(jnp.tanh(x @ w))
        return jnp.mean((jnp.concatenate([x, start], 1) @ weights[-1]) ** 2)

    def step(weights: Any, x: Any) -> Any:
        value, grads = autopar.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    weights = [jnp.full((8, 8), 0.1 * k + 0.1) for k in range(3)] + [jnp.full((16, 8), 0.1)]
    args = weights, jnp.linspace(0.0, 1.0, 16 * 8).reshape(16, 8)
    parallel = autopar.parallelize(
        step, cluster="cpu:1", num_microbatches=MICROBATCHES, stages=1, schedule="1f1b", recompute="full"
    )
    plan = parallel.plan(*args)
    layers = layers_of(parallel)
    compare(layers, plan, args)
    [stage] = Stages(layers, plan).stages
    kept = [array for array in stage.forward().gives if array.key[0] == "kept"]
    size = sum(array.type.size_bytes for array in kept)
    assert size == plan.stages.stages[0].cost.activation_bytes
    assert len({array.key for array in kept}) == len(kept) < sum(len(x.tasks.forward.gives) for x in stage.layers)


def test_the_collectives_of_tasks_are_the_plans() -> None:
    """Of every microbatch: those in the compiled programs are those of the stage's layers, and of chains between."""
    layers, plan, _ = planned("gpt_tied")
    stages = Stages(layers, plan)
    for number, (_, *tasks) in enumerate(stages.tasks):
        lowered, mesh = stages.stages[number], plan.stages.stages[number].mesh
        found: Counter[Any] = Counter()
        for task in tasks:
            structs = [
                jax.ShapeDtypeStruct(
                    outer_shape(a.type, a.spec, lowered.axis_sizes), a.type.dtype,
                    sharding=NamedSharding(stages.meshes[number], outer_spec(a.spec)),
                )
                for a in task.takes
            ]  # fmt: skip
            shardings = [NamedSharding(stages.meshes[number], outer_spec(a.spec)) for a in task.gives]
            text = jax.jit(task.run, out_shardings=shardings).lower(*structs).compile().as_text()
            known, unknown = tally(parse_collectives(text), mesh.shape, mesh.axis_names)
            assert not unknown
            found += known
        assert found == wanted(layers, plan, number)
        assert {kind for kind, _, _ in found} >= {"all-gather", "reduce-scatter"}


def wanted(layers: Layered, plan: autopar.StepPlan, number: int) -> Counter[Any]:
    """What a stage's layers and the chains between them move for a microbatch, as `hlo_collectives.tally` has it."""
    file, stage = plan.data.pipelined, plan.stages.stages[number]
    out: Counter[Any] = Counter()
    for c in (*(c for k in stage.layers for c in file.sharding_of(k).collectives), *file.between[number]):
        if c.trips % MICROBATCHES == 0:
            out[c.kind, tuple(sorted(c.axes)), c.operand_bytes] += c.count * c.trips // MICROBATCHES
    return out
