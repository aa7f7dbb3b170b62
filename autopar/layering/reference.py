"""A layered step run layer by layer, eagerly and on one device: what it means.

For every microbatch the layers run forwards, then each one's joint graph backwards; cotangents of a value with several
users are added up, gradients over the microbatches too, and the update runs once. The result is the step's. This is
what runtimes are held against; it computes every forward pass twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.ir.layers import REMAT
from autopar.layering.layers import Layered
from autopar.microbatch.kinds import Kind, Max, Min, Rows, Same
from autopar.microbatch.replay import join_rows, split_rows


def run_layered(
    layered: Layered, args: Sequence[Any], kwargs: dict[str, Any] | None = None, remat: str = "none"
) -> Any:
    """The step's results.

    Args:
        layered: the step in layers.
        args, kwargs: its dynamic arguments: arrays, static ones left out.
        remat: what every layer keeps, one of `REMAT`.
    """
    graph, n = layered.graph, layered.graph.num_microbatches
    flat = [*layered.consts, *jax.tree_util.tree_leaves((tuple(args), kwargs or {}))]
    flat = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in flat]
    once = jax.core.eval_jaxpr(layered.before, [], *flat)
    gradients: dict[int, Any] = {}
    parts: list[list[Any]] = [[] for _ in graph.combined]
    for number in range(n):
        env = _given(layered, flat, once, number)
        for layer in graph.layers:
            operands = [env[v] for v in layer.operands]
            results = jax.core.eval_jaxpr(layered.kinds[layer.kind].forward, [], *operands)
            env.update(zip(layer.results, results, strict=True))
        for kept, v in zip(parts, graph.combined, strict=True):
            kept.append(env[v])
        for v, gradient in _backward(layered, env, remat).items():
            gradients[v] = gradients[v] + gradient if v in gradients else gradient
    combined = [_combined(kind, values, n) for kind, values in zip(layered.combine, parts, strict=True)]
    sums = [gradients[v] for v in graph.trained]
    out = jax.core.eval_jaxpr(layered.update, [], *sums, *combined, *flat)
    return jax.tree_util.tree_unflatten(layered.call.out_tree, out)


def _given(layered: Layered, flat: Sequence[Any], once: Sequence[Any], number: int) -> dict[int, Any]:
    """What layers read beside each other's results, for one microbatch."""
    graph, n = layered.graph, layered.graph.num_microbatches

    def rows(value: Any, kind: Rows | None) -> Any:
        return value if kind is None or n == 1 else split_rows(value, kind, n)[number]

    env = {v: rows(x, k) for v, x, k in zip(graph.arguments, flat, layered.rows, strict=True) if v >= 0}
    env.update((v, rows(x, k)) for v, x, k in zip(graph.before_values, once, layered.before_rows, strict=True))
    env.update((s.value, flat[s.argument][s.start : s.stop]) for s in graph.slices)
    if graph.index >= 0:
        env[graph.index] = jnp.int32(number)
    return env


def _backward(layered: Layered, env: dict[int, Any], remat: str) -> dict[int, Any]:
    """Gradients of one microbatch, by trained value; those of rows stand where the whole argument's do."""
    graph = layered.graph
    if graph.loss < 0:
        return {}
    cotangents: dict[int, Any] = {graph.loss: jnp.ones((), env[graph.loss].dtype)}
    for layer in reversed(graph.layers):
        kind = graph.kinds[layer.kind]
        seeds = [layer.results[i] for i in kind.seeds]
        given = [cotangents[v] if v in cotangents else jnp.zeros_like(env[v]) for v in seeds]
        joint = layered.kinds[layer.kind].joint[REMAT.index(remat)]
        out = jax.core.eval_jaxpr(joint, [], *(env[v] for v in layer.operands), *given)
        for i, x in zip(kind.wrt, out[len(layer.results) :], strict=True):
            v = layer.operands[i]
            cotangents[v] = cotangents[v] + x if v in cotangents else x
    value_of = {a: v for a, v in enumerate(graph.arguments) if v >= 0}
    for s in graph.slices:
        if s.value in cotangents:
            whole = cotangents.setdefault(value_of[s.argument], jnp.zeros_like(env[value_of[s.argument]]))
            cotangents[value_of[s.argument]] = whole.at[s.start : s.stop].add(cotangents[s.value])
    return {v: cotangents[v] for v in graph.trained}


def _combined(kind: Kind, values: Sequence[Any], n: int) -> Any:
    if n == 1 or isinstance(kind, Same):
        return values[0]
    stacked = jnp.stack(values)
    match kind:
        case Rows():
            return join_rows(stacked, kind, n)
        case Max():
            return stacked.max(0)
        case Min():
            return stacked.min(0)
        case _:
            return stacked.sum(0)
