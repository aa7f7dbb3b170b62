"""A layered step run layer by layer on one device: what it means.

For every microbatch the layers run forwards, then each one's joint graph backwards; cotangents of a value with several
users are added up, gradients over the microbatches too, and the update runs once. The result is the step's. This is
what runtimes are held against; it computes every forward pass twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.frontend.layering.layers import Layered
from autopar.frontend.microbatch.replay import join_rows, split_rows
from autopar.ir.layers import REMAT
from autopar.jax_compat import Jaxpr
from autopar.primitives.kinds import Kind, Max, Min, Rows, Same


class Reference:
    """Runs a layered step; every kind of layer is compiled once."""

    def __init__(self, layered: Layered) -> None:
        self._layered = layered
        self._compiled: dict[int, Callable[..., list[Any]]] = {}

    def __call__(self, *args: Any, remat: str = "none", **kwargs: Any) -> Any:
        """The step's results.

        Args:
            args, kwargs: its dynamic arguments: arrays, static ones left out.
            remat: what every layer keeps, one of `REMAT`.
        """
        layered, graph = self._layered, self._layered.graph
        flat = [*layered.consts, *jax.tree_util.tree_leaves((args, kwargs))]
        flat = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in flat]
        once = self._run(layered.before, flat)
        gradients: dict[int, Any] = {}
        parts: list[list[Any]] = [[] for _ in graph.combined]
        for number in range(graph.num_microbatches):
            env = self._given(flat, once, number)
            for layer in graph.layers:
                results = self._run(layered.kinds[layer.kind].forward, [env[v] for v in layer.operands])
                env.update(zip(layer.results, results, strict=True))
            for kept, v in zip(parts, graph.combined, strict=True):
                kept.append(env[v])
            for v, gradient in self._backward(env, remat).items():
                gradients[v] = gradients[v] + gradient if v in gradients else gradient
        combined = [
            _combined(kind, values, graph.num_microbatches) for kind, values in zip(layered.combine, parts, strict=True)
        ]
        out = self._run(layered.update, [*(gradients[v] for v in graph.trained), *combined, *flat])
        return jax.tree_util.tree_unflatten(layered.call.out_tree, out)

    def _run(self, jaxpr: Jaxpr, operands: Sequence[Any]) -> list[Any]:
        if not jaxpr.outvars:
            return []
        run = self._compiled.get(id(jaxpr))
        if run is None:
            run = jax.jit(lambda *xs: jax.core.eval_jaxpr(jaxpr, [], *xs))
            self._compiled[id(jaxpr)] = run
        return run(*operands)

    def _given(self, flat: Sequence[Any], once: Sequence[Any], number: int) -> dict[int, Any]:
        """What layers read beside each other's results, for one microbatch."""
        layered, graph = self._layered, self._layered.graph
        n = graph.num_microbatches

        def rows(value: Any, kind: Rows | None) -> Any:
            return value if kind is None or n == 1 else split_rows(value, kind, n)[number]

        env = {v: rows(x, k) for v, x, k in zip(graph.arguments, flat, layered.rows, strict=True) if v >= 0}
        env.update((v, rows(x, k)) for v, x, k in zip(graph.before_values, once, layered.before_rows, strict=True))
        env.update((s.value, flat[s.argument][s.start : s.stop]) for s in graph.slices)
        if graph.index >= 0:
            env[graph.index] = jnp.int32(number)
        return env

    def _backward(self, env: dict[int, Any], remat: str) -> dict[int, Any]:
        """Gradients of one microbatch, by trained value; those of rows are put together."""
        layered, graph = self._layered, self._layered.graph
        if graph.loss < 0:
            return {}
        cotangents: dict[int, Any] = {graph.loss: jnp.ones((), env[graph.loss].dtype)}
        for layer in reversed(graph.layers):
            kind = graph.kinds[layer.kind]
            seeds = [layer.results[i] for i in kind.seeds]
            given = [cotangents[v] if v in cotangents else jnp.zeros_like(env[v]) for v in seeds]
            joint = layered.kinds[layer.kind].joint[REMAT.index(remat)]
            out = self._run(joint, [*(env[v] for v in layer.operands), *given])
            for i, x in zip(kind.wrt, out[len(layer.results) :], strict=True):
                v = layer.operands[i]
                cotangents[v] = cotangents[v] + x if v in cotangents else x
        for s in graph.slices:
            if s.value in cotangents:
                whole = graph.arguments[s.argument]
                so_far = cotangents.get(whole, jnp.zeros_like(env[whole]))
                cotangents[whole] = so_far.at[s.start : s.stop].add(cotangents[s.value])
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
