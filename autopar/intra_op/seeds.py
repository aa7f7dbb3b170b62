"""The plans that people make by hand, as restrictions of the problem: floors for the solver, and forced methods.

A method says how the step's arguments lie, and what operators may split; what is left open follows from solving the
restricted problem:

- data parallel: the batch is split over every axis that divides it, and so is all that has a batch dimension
  (`batch_factors`); everything else is whole, or partial sums on their way to the one reduction of each gradient;
- ZeRO-2 (Rajbhandari et al., "ZeRO", SC 2020): as data parallel, the optimizer's state split; what has no batch
  dimension (gradients, updates) is free to follow it;
- ZeRO-3: parameters split too;
- tensor parallel: the batch whole everywhere, every parameter of rank ≥ 2 split, other dimensions free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.intra_op.batch_dims import batch_factors, dimension
from autopar.intra_op.evaluate import Evaluator
from autopar.intra_op.flatten import Flat
from autopar.intra_op.reduce.core import core_of
from autopar.intra_op.reduce.run import lighten
from autopar.intra_op.solvers.prices import Pricing
from autopar.intra_op.specs import Mesh
from autopar.intra_op.strategies import Signature
from autopar.intra_op.strategy_graph import StrategyGraph
from autopar.ir.graph import TensorType
from autopar.ir.plan import FORCED_METHODS
from autopar.ir.strategy import Problem
from autopar.primitives import record_of

FREE_INSIDE = ("zero3", "tensor_parallel")
"""Methods whose arguments, split as they are, leave little to gain: starts for the solver with the rest free."""
STEPS = 4
"""Rounds of message passing that a seed gets: it is a start, not a result."""
GAP = 1e-4
"""Relative gap at which message passing for a seed ends."""

ENTRIES = ("const_in", "xs", "carry", "branch_in", "loop_out")
Allowed = Callable[[tuple[int, ...]], bool]


def parameters(flat: Flat) -> set[int]:
    """Argument nodes that reach a matmul, convolution or lookup through cheap operators: weights, as opposed to the
    state of an optimizer, which only reaches outputs."""
    traits = [record_of(node.primitive).traits if (node := flat.node[n]) is not None else None for n in flat.example]
    ends = [t is not None and (t.contraction or t.looks_up) for t in traits]
    cheap = [t.fusible if t is not None else flat.kind[n] in ENTRIES for t, n in zip(traits, flat.example, strict=True)]
    reaches = [False] * len(flat.kind)
    before = -1
    while before != (before := sum(reaches)):  # a loop's end comes after its start: once more where there are loops
        for n in range(len(flat.kind) - 1, -1, -1):
            key, node = flat.key[n], flat.node[n]
            if ends[key] or (reaches[n] and cheap[key] and (node is None or node.phase != "update")):
                for value in flat.source[flat.first_edge[n] : flat.first_edge[n + 1]]:
                    if value >= 0:
                        reaches[flat.maker[value]] = True
        if not flat.span:
            break
    return {n for n in flat.args if reaches[n]}


@dataclass(frozen=True, slots=True)
class ArgumentKind:
    """What a method knows of arguments: their class, type, batch dimension (None: no batch), whether they are state
    that the step replaces, and whether they are weights."""

    index: int
    type: TensorType
    batch_dim: int | None
    replaced: bool
    weight: bool


def argument_kinds(graph: StrategyGraph, batch: Mapping[int, int]) -> tuple[ArgumentKind, ...]:
    """The kinds of the step's arguments, each once. ``batch`` maps graph inputs to their batch dimension."""
    flat, weights = graph.flat, parameters(graph.flat)
    kinds = (
        ArgumentKind(
            graph.class_of[n], flat.result_types[n][0], batch.get(position), bool(flat.operand_types[n]), n in weights
        )
        for position, n in enumerate(flat.args)
    )
    return tuple(dict.fromkeys(kinds))


def restriction(graph: StrategyGraph, method: str, batch: Mapping[int, int]) -> dict[int, Any]:
    """Cluster → bool[states]: those that ``method``, one of `FORCED_METHODS`, allows. ``batch`` maps positions of graph
    inputs to their batch dimension."""
    arguments = _arguments(graph, method, argument_kinds(graph, batch))
    return _inside(graph, method, batch, batch_factors(graph, batch), arguments)


def _arguments(graph: StrategyGraph, method: str, kinds: Sequence[ArgumentKind]) -> dict[int, Any]:
    """What a method says of the step's arguments alone."""
    mesh = graph.mesh
    out: dict[int, Any] = {}
    for kind in kinds:
        if kind.batch_dim is not None:
            rule = _whole if method == "tensor_parallel" else _split_dim(mesh, kind.type, kind.batch_dim)
        elif not kind.replaced and not kind.weight:
            rule = _whole
        else:
            rule = _method_rule(method, kind.weight, mesh, kind.type)
        this = graph.classes[kind.index]
        codes = mesh.space(kind.type).codes
        mask = np.array([rule(codes[c]) for c in this.signature.results[0][this.follow]], bool)
        if mask.any():
            before = out.get(this.cluster, np.ones(len(mask), bool))
            out[this.cluster] = before & mask if (before & mask).any() else before
    return out


def _inside(
    graph: StrategyGraph,
    method: str,
    batch: Mapping[int, int],
    factors: Sequence[frozenset[str]],
    arguments: Mapping[int, Any],
) -> dict[int, Any]:
    """The restriction of arguments and of all that is made of them: of each cluster the states in which most of its
    classes do what the method says (all of them, but where a pin or a dimension that does not divide is in the way)."""
    types = [graph.flat.result_types[graph.flat.args[position]][0] for position in batch]
    parts = max((_batch_parts(graph.mesh, t, dim) for t, dim in zip(types, batch.values(), strict=True)), default=1)
    agree = [np.zeros(graph.classes[root].signature.size) for root in graph.roots]
    memo: dict[Any, Any] = {}
    for c, this in enumerate(graph.classes):
        if this.signature.kind != "arg":
            key = (id(this.signature), factors[c])
            if key not in memo:
                memo[key] = _follows(graph.mesh, this.signature, method, factors[c], parts)
            agree[this.cluster] += memo[key][this.follow]
    out: dict[int, Any] = {}
    for cluster, score in enumerate(agree):
        allowed = arguments.get(cluster, np.ones(len(score), bool))
        out[cluster] = allowed & (score == score[allowed].max())
    return out


def _batch_parts(mesh: Mesh, value_type: TensorType, dim: int) -> int:
    """Into how many parts the batch dimension of an argument is split at most."""
    codes = mesh.space(value_type).codes
    return max(_parts(mesh, c) for c in codes if all(d in (-1, dim) for d in c))


def _follows(mesh: Mesh, signature: Signature, method: str, factors: frozenset[str], parts: int) -> Any:
    """bool[strategies]: those that do what ``method`` says; ``factors``: the batch's, ``parts``: into how many."""
    sizes = np.array(mesh.sizes)
    if signature.node is not None:
        along = np.array([name in factors for name in signature.names])[signature.options]
        free = np.array([not name or name.startswith("+") for name in signature.names])[signature.options]
    else:
        made = signature.kind not in ("ys", "out", "pred")  # else the operand is the value as it is in its own body
        value_type = (signature.result_types if made else signature.operand_types)[0]
        column = (signature.results if made else signature.operands)[0]
        codes = np.array([mesh.space(value_type).codes[c] for c in column]).reshape(len(column), mesh.rank)
        along = np.isin(codes, [d for d in range(len(value_type.shape)) if dimension(d) in factors])
        free = codes < 0
    if method == "tensor_parallel":
        return ~along.any(axis=1)
    if method != "data_parallel" and not along.any():
        return np.ones(signature.size, bool)
    only = (along | free).all(axis=1)
    if signature.node is None or not only.any():
        return only
    split = np.where(along, sizes, 1).prod(axis=1)
    fits = only & (split <= parts)
    return fits & (split == split[fits].max())


def _method_rule(method: str, weight: bool, mesh: Mesh, value_type: TensorType) -> Allowed:
    if method == "tensor_parallel":
        return _some_split if len(value_type.shape) >= 2 and _splittable(mesh, value_type) else _any
    if method == "zero3" or (method == "zero2" and not weight):
        return _most_split(mesh, value_type)
    return _whole


def _any(code: tuple[int, ...]) -> bool:
    return True


def _whole(code: tuple[int, ...]) -> bool:
    return all(d == -1 for d in code)


def _some_split(code: tuple[int, ...]) -> bool:
    return any(d >= 0 for d in code)


def _splittable(mesh: Mesh, value_type: TensorType) -> bool:
    return any(_some_split(c) for c in mesh.space(value_type).codes)


def _split_dim(mesh: Mesh, value_type: TensorType, dim: int) -> Allowed:
    """The batch dimension over as many devices as divide it, other dimensions whole."""
    codes = [c for c in mesh.space(value_type).codes if all(d in (-1, dim) for d in c)]
    most = max(codes, key=lambda c: _parts(mesh, c))
    return lambda code: code == most


def _most_split(mesh: Mesh, value_type: TensorType) -> Allowed:
    """Split as far as one dimension goes, else as far as several do."""
    codes = [c for c in mesh.space(value_type).codes if -2 not in c]
    most = max(_parts(mesh, c) for c in codes)
    return lambda code: -2 not in code and _parts(mesh, code) == most


def _parts(mesh: Mesh, code: tuple[int, ...]) -> int:
    parts = 1
    for axis, d in enumerate(code):
        parts *= mesh.sizes[axis] if d >= 0 else 1
    return parts


def restrict(problem: Problem, masks: Mapping[int, Any]) -> tuple[Problem, list[Any]]:
    """(the problem over the allowed states only, int64[kept states] of each node). ``masks``: node → bool[states]; all
    states of a node that is not there."""
    keep = [
        np.flatnonzero(masks[v]) if v in masks else np.arange(len(node.costs_s)) for v, node in enumerate(problem.nodes)
    ]
    if not masks:
        return problem, keep
    nodes = tuple(
        replace(node, costs_s=node.costs_s[k], usages=tuple((u[k], spans) for u, spans in node.usages))
        for node, k in zip(problem.nodes, keep, strict=True)
    )
    edges = tuple(replace(e, rows=e.rows[keep[e.a]], cols=e.cols[keep[e.b]]) for e in problem.edges)
    return replace(problem, nodes=nodes, edges=edges), keep


def _passed(problem: Problem, deadline: float) -> list[int] | None:
    """A good choice by a few passes of messages; None where a forbidden pair cannot be avoided."""
    core = core_of(problem)
    lighten(core)
    if core.infeasible:
        return None
    rest: dict[int, int] = {}
    if core.alive:
        pricing = Pricing(core)
        pricing.ascend(deadline, GAP, STEPS)
        if pricing.best is None:
            return None
        rest = {v: int(s) for v, s in zip(pricing.ledger.nodes, pricing.best, strict=True)}
    return core.restore(rest)


def seeds_for(
    graph: StrategyGraph, problem: Problem, batch: Mapping[int, int], deadline: float
) -> list[tuple[str, tuple[int, ...]]]:
    """(method, choice of states) of each method's plan that needs no forbidden collective; equal plans are kept, they
    are baselines too. Those without a name are plans in which a method's arguments are given and the rest is free
    (`FREE_INSIDE`): better starts, and no method's. After ``deadline`` (of time.perf_counter) each gets one round of
    message passing."""
    evaluate = Evaluator(problem)
    out: list[tuple[str, tuple[int, ...]]] = []
    kinds, factors = argument_kinds(graph, batch), batch_factors(graph, batch)
    arguments = {method: _arguments(graph, method, kinds) for method in FORCED_METHODS}
    starts = [(method, _inside(graph, method, batch, factors, masks)) for method, masks in arguments.items()]
    for method, masks in (*starts, *(("", arguments[method]) for method in FREE_INSIDE)):
        small, keep = restrict(problem, masks)
        choice = _passed(small, deadline)
        if choice is None:
            continue
        seed = tuple(int(k[s]) for k, s in zip(keep, choice, strict=True))
        if np.isfinite(evaluate.objective(seed)):
            out.append((method, seed))
    return out
