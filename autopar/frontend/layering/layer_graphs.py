"""A layer's forward jaxpr → its Graphs: forward, and forward with backward for each choice of `ir.layers.REMAT`.

The backward pass is `jax.vjp`'s of the (checkpointed) forward. Forward and backward are normalised apart, as they are
compiled apart: what the backward computes again is not merged with the forward's, and what one hands to the other are
the residuals. Those that are cheaply made of weights and literals alone (casts, masks) are made again instead, and so
is what a step of arithmetic makes of residuals that are there anyway (1 − tanh² of tanh): fused into its readers it
costs nothing, and nothing is held for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from autopar.frontend.layering.sequence import is_cheap
from autopar.frontend.layering.surgery import Env, plain, renamed, without_constants
from autopar.frontend.microbatch.inline import flatten
from autopar.frontend.normalise import normalise
from autopar.frontend.to_graph import to_graph
from autopar.frontend.traced_apart import traced_apart
from autopar.ir.errors import TraceError
from autopar.ir.graph import Graph
from autopar.ir.layers import REMAT, LayerKind
from autopar.jax_compat import ClosedJaxpr, Jaxpr, Var, dce, jaxpr_as_fun
from autopar.primitives import record_of

SMALL_PART = 8
"""A reduction's result is kept where it is at most one part in so many of what is reduced (guessed: between the
statistics of a softmax or a normalisation, one in thousands, and sums over a few experts or heads)."""


def _keeps_dots(primitive: Any, /, *avals: Any, **params: Any) -> bool:
    """JAX's policy, contractions without batch dimensions, and what is little beside what it is made of: a softmax's
    maxima and sums, and what attention gathers by it. Operators of packages may have a parameter called like that
    policy's first (equinox: ``prim``)."""
    if record_of(primitive.name).traits.reduces and "axes" in params:
        return math.prod(avals[0].shape[axis] for axis in params["axes"]) >= SMALL_PART
    if primitive.name == "dot_general":
        contracted, batch = params["dimension_numbers"]
        sums = math.prod(avals[0].shape[d] for d in contracted[0])
        taken = math.prod(avals[0].shape[d] for d in batch[0]) * sums
        return not batch[0] or min(x.size for x in avals) <= taken * sums
    return "prim" not in params and jax.checkpoint_policies.dots_with_no_batch_dims_saveable(
        primitive, *avals, **params
    )


_POLICIES = {"dots": _keeps_dots, "full": None}


@dataclass(frozen=True, kw_only=True)
class KindCode:
    """The jaxprs behind a LayerKind: ``user`` is the forward as it was traced, which is what is differentiated;
    equation i of ``forward`` and of ``joint[k]`` is node i of the kind's graphs."""

    user: Jaxpr
    forward: Jaxpr
    joint: tuple[Jaxpr, ...]


def make_kind(
    jaxpr: Jaxpr, weights: Sequence[bool], seeds: tuple[int, ...], wrt: tuple[int, ...], differentiated: bool
) -> tuple[LayerKind, KindCode]:
    """The kind whose forward is ``jaxpr``. What that has under `jax.checkpoint` is computed again where the layer is
    (``full``), and in loops; else the layer's own choice is what is kept.

    Args:
        jaxpr: operands → results, without constants.
        weights: flags operands that are arguments of which every microbatch has all.
        seeds: results that have a cotangent.
        wrt: operands whose cotangent is wanted.
        differentiated: False for a step that is forward only.

    Raises:
        TraceError: a derivative rule in it cannot be traced apart from the step.
    """
    forward = _normalised(jaxpr)
    keeping, _ = flatten(jaxpr, [], markers=False, checkpoints=True)
    joints: list[Jaxpr] = []
    graphs: list[Graph] = []
    for remat in REMAT if differentiated else ():
        try:
            joint, count = _joint(jaxpr if remat == "full" else keeping, weights, seeds, wrt, remat)
        except TraceError as error:
            raise TraceError(
                f"a layer cannot be differentiated by itself, as stages need it: {error}. As one program (stages=1) "
                "the step is differentiated whole"
            ) from error
        joints.append(joint)
        graph = _phased(to_graph(joint), count)
        graphs.append(graph)
    kind = LayerKind(forward=_phased(to_graph(forward), len(forward.eqns)), joint=tuple(graphs), seeds=seeds, wrt=wrt)
    return kind, KindCode(user=jaxpr, forward=forward, joint=tuple(joints))


def _normalised(jaxpr: Jaxpr, consts: Sequence[Any] = ()) -> Jaxpr:
    """Rematerialised bodies are inlined: the layer's own choice is what is kept."""
    closed, values = normalise(ClosedJaxpr(jaxpr, list(consts)), None, False)
    return without_constants(closed.jaxpr, values)


def _phased(graph: Graph, forward: int) -> Graph:
    """``graph`` with its first ``forward`` nodes as the forward pass and the others as the backward pass."""
    nodes = tuple(
        n if n.phase == phase else replace(n, phase=phase)
        for n, phase in ((n, "forward" if i < forward else "backward") for i, n in enumerate(graph.nodes))
    )
    return replace(graph, nodes=nodes)


def _joint(
    jaxpr: Jaxpr, weights: Sequence[bool], seeds: tuple[int, ...], wrt: tuple[int, ...], remat: str
) -> tuple[Jaxpr, int]:
    """(operands, cotangents of seeds) → (results, cotangents of wrt), and how many equations are the forward's."""
    run = jaxpr_as_fun(ClosedJaxpr(jaxpr, []))
    structs = [_struct(v.aval) for v in jaxpr.invars]
    trees: list[Any] = []

    def forward(*operands: Any) -> list[Any]:
        def chosen(*some: Any) -> tuple[list[Any], list[Any]]:
            full = list(operands)
            for i, x in zip(wrt, some, strict=True):
                full[i] = x
            results = run(*full)
            return [results[i] for i in seeds], [x for i, x in enumerate(results) if i not in seeds]

        if remat != "none":
            chosen = jax.checkpoint(chosen, prevent_cse=False, policy=_POLICIES[remat])
        seeded, pullback, others = jax.vjp(chosen, *(operands[i] for i in wrt), has_aux=True)
        rest, found = iter(others), dict(zip(seeds, seeded, strict=True))
        leaves, tree = jax.tree_util.tree_flatten(pullback)
        trees[:] = [tree]
        return [*(found[i] if i in found else next(rest) for i in range(len(jaxpr.outvars))), *leaves]

    ahead = traced_apart(forward, *structs)
    first = _normalised(ahead.jaxpr, ahead.consts)
    count = len(jaxpr.outvars)
    residuals = first.outvars[count:]
    cotangents = [_struct(jaxpr.outvars[i].aval) for i in seeds]

    def backward(leaves: list[Any], cts: list[Any]) -> list[Any]:
        return list(jax.tree_util.tree_unflatten(trees[0], leaves)(cts))

    back = traced_apart(backward, [_struct(v.aval) for v in residuals], cotangents)
    body = without_constants(back.jaxpr, back.consts)
    # the backward on operands and on what of the residuals is not made again
    operands = list(first.invars)
    prefix, again = _made_again(first, residuals, weights)
    kept = list(dict.fromkeys(v for v in residuals if isinstance(v, Var) and v not in again and v not in set(operands)))
    given = [*operands, *kept]
    fresh = [Var(v.aval) for v in body.invars[len(residuals) :]]
    env: Env = {}
    env.update(
        (v, again.get(r, r) if isinstance(r, Var) else r)
        for v, r in zip(body.invars[: len(residuals)], residuals, strict=True)
    )
    env.update(zip(body.invars[len(residuals) :], fresh, strict=True))
    eqns = renamed(body.eqns, env)
    outs = [env.get(v, v) if isinstance(v, Var) else v for v in body.outvars]
    second = _normalised(plain(first, [*given, *fresh], outs, [*prefix, *eqns]))
    # both behind one another
    used = {v for e in second.eqns for v in e.invars if isinstance(v, Var)}
    used |= {v for v in second.outvars if isinstance(v, Var)}
    needed = [v for v, inner in zip(given, second.invars, strict=False) if inner in used and v in set(kept)]
    ahead_only = dce(plain(first, operands, [*first.outvars[:count], *needed], first.eqns))
    env = dict(zip(second.invars, [*given, *fresh], strict=True))
    after = renamed(second.eqns, env)
    outs = [env.get(v, v) if isinstance(v, Var) else v for v in second.outvars]
    joint = plain(first, [*operands, *fresh], [*first.outvars[:count], *outs], [*ahead_only.eqns, *after])
    return joint, len(ahead_only.eqns)


def _made_again(first: Jaxpr, residuals: Sequence[Any], weights: Sequence[bool]) -> tuple[list[Any], Env]:
    """(equations that make residuals again of weights, literals and the other residuals, what those residuals
    become)."""
    wanted = {v for v in residuals if isinstance(v, Var)}
    light = {v for v, flag in zip(first.invars, weights, strict=True) if flag}
    there = light | wanted.intersection(first.invars)
    """What the backward pass has, or makes again."""
    kept = wanted.intersection(first.invars)
    chosen: list[Any] = []
    for eqn in first.eqns:
        operands = [v for v in eqn.invars if isinstance(v, Var)]
        if is_cheap(eqn) and all(v in light for v in operands):
            light.update(eqn.outvars)
        elif not record_of(eqn.primitive.name).arithmetic or not all(v in there for v in operands):
            kept.update(wanted.intersection(eqn.outvars))
            there |= wanted.intersection(eqn.outvars)
            continue
        there.update(eqn.outvars)
        chosen.append(eqn)
    again = [v for v in dict.fromkeys(r for r in residuals if isinstance(r, Var)) if v in there and v not in kept]
    given = [v for v in dict.fromkeys(r for r in residuals if isinstance(r, Var)) if v in kept]
    body = dce(plain(first, list(dict.fromkeys([*first.invars, *given])), again, chosen))
    env: Env = {}
    eqns = renamed(body.eqns, env)
    return eqns, {v: env[v] for v in again if v in env}


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))
