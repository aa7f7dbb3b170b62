"""Train steps on which planning a pipeline failed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import autopar
from autopar.ir.layers import LayeredGraph
from autopar.ir.presets import cluster_from_text
from autopar.layering.layers import layered
from autopar.pipelines import Pipeline, PipelineOptions, plan_pipeline


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def layers_of(loss: Callable[..., Any], params: Any, batch: Any) -> LayeredGraph:
    """A step of plain gradient descent, in layers."""

    def step(params: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = autopar.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return layered(step, (params, batch), num_microbatches=4, donate_argnums=(0,)).graph


def planned(graph: LayeredGraph, **options: Any) -> Pipeline:
    return plan_pipeline(graph, cluster_from_text("cpu:2"), PipelineOptions(workers=1, **options))


def test_a_layer_of_scalars_alone() -> None:
    """Where the loss is divided by a number in a layer of its own, that layer's loop has no inputs."""

    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = autopar.layer_boundary(jnp.tanh(x @ w))
        return autopar.layer_boundary(jnp.sum(x * x)) / 1024.0

    graph = layers_of(loss, [f32(16, 16), f32(16, 16)], f32(64, 16))
    assert len(graph.layers[-1].operands) == 1
    assert graph.values[graph.layers[-1].operands[0]].shape == ()
    got = planned(graph, num_stages=2)
    assert got.plan.stages[-1].stop == len(graph.layers)
