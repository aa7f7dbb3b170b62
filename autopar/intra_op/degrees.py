"""Degrees of parallelism → what they leave of a strategy graph's states: `degree_states`.

In: a StrategyGraph, `Degrees`, and where examples are. Out: the allowed states of clusters. The batch and positions are
bound to their axes in all that has them (`batch_bound`); of weights, the optimizer's state and sums of gradients it is
said how they lie (`_state`); all else follows from solving.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.intra_op.batch_bound import Bound, ExampleDims, Found, bound_states, own_products
from autopar.intra_op.batch_dims import dim_names
from autopar.intra_op.flatten import Flat
from autopar.intra_op.seeds import ENTRIES, parameters
from autopar.intra_op.strategy_graph import StrategyGraph
from autopar.ir.cluster import LogicalMesh
from autopar.ir.degrees import EXPERTS, SEQUENCE, TENSOR, Degrees
from autopar.ir.errors import OptionError, ShardingError
from autopar.ir.graph import Graph
from autopar.primitives import record_of

Code = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Met:
    """``allowed``: cluster → bool[states]. ``by``: the degrees by which some weight is split, or some operator's
    positions."""

    allowed: dict[int, NDArray[np.bool]]
    by: frozenset[str]


def degree_states(graph: StrategyGraph, degrees: Degrees, found: Found, bound: Bound, loop: int) -> Met:
    """What is left by ``degrees``, and by ``bound`` (`bound_by`, or more).

    Args:
        found: where examples are, and experts.
        loop: the position of the scan over microbatches, −1 where there is none.

    Raises:
        ShardingError: an argument would have to lie in two ways.
    """
    allowed = bound_states(graph, found, bound)
    if not degrees:
        return Met(allowed, frozenset())
    state = _state(graph, degrees, found, bound.axes or (), loop)
    for cluster, mask in state.allowed.items():
        both = mask & allowed.get(cluster, True)
        if not both.any():
            raise ShardingError(f"{degrees}: no layout has both this and the batch split over {bound.axes}")
        allowed[cluster] = both
    splits = any(found.positions[0]) and degrees.sequence is not None
    return Met(allowed, state.by | ({SEQUENCE} if splits else set()))


def bound_by(degrees: Degrees, axes: Sequence[str], batch_axes: tuple[str, ...] | None = None) -> Bound:
    """What is bound on a mesh of these axes; ``batch_axes``: those that the user named."""
    if batch_axes is None and degrees:
        batch_axes = degrees.batch_axes(axes)
    return Bound(
        axes=batch_axes,
        positions=None if degrees.sequence is None else (SEQUENCE,),
        experts=None if degrees.experts is None else EXPERTS,
    )


def check_met(degrees: Degrees, by: Collection[str]) -> None:
    """Raises ShardingError for a degree by which nothing is split."""
    what = {
        TENSOR: "no weight of a product or lookup has a dimension that it divides",
        EXPERTS: "no weights are those of experts: stacked ones, each taken by a product of its own, in a number that "
        "it divides",
        SEQUENCE: "no argument that carries the batch has positions, a second dimension, that reach an operator",
    }
    for name, why in what.items():
        degree = getattr(degrees, name)
        if degree is not None and degree > 1 and name not in by:
            raise ShardingError(f"{name}={degree}: {why}")


def check_examples(
    graph: Graph, logical: LogicalMesh, degrees: Degrees, batch: Mapping[int, int], num_microbatches: int
) -> None:
    """Raises OptionError where the axes of ``logical`` that degrees split the batch over do not divide a microbatch.

    Args:
        batch: graph input → its batch dimension.
    """
    if not batch:
        raise OptionError(f"{degrees}: no argument is known to carry the batch; name it in batch_argnums")
    names = degrees.batch_axes(logical.axis_names)
    parts = math.prod(axis.size for axis in logical.axes if axis.name in names)
    for i, dim in batch.items():
        examples = graph.values[graph.inputs[i]].shape[dim]
        if examples % (parts * num_microbatches):
            each = f", in {num_microbatches} microbatches" if num_microbatches > 1 else ""
            raise OptionError(
                f"{degrees}: the batch is split over {parts} devices, which do not divide the {examples} examples of "
                f"{graph.arg_paths[i]}{each}"
            )


def microbatch_loop(graph: Graph, num_microbatches: int) -> int:
    """The position of the scan over microbatches in a whole step, −1 where there is none."""
    if num_microbatches == 1:
        return -1
    scans = (p for p, n in enumerate(graph.nodes) if n.primitive == "scan" and n.params["length"] == num_microbatches)
    return next(scans, -1)


def _state(graph: StrategyGraph, degrees: Degrees, found: Found, batch_axes: Sequence[str], loop: int) -> Met:
    """How state may lie: what a step is given, but for examples."""
    mesh, flat = graph.mesh, graph.flat
    given = {c for n in flat.args if not any(found.batch[1][c := graph.class_of[n]])}
    weights = {graph.class_of[n] for n in _weights(flat, loop)} & given
    shapes = {graph.classes[c].signature.result_types[0].shape: dim for c in weights for dim in found.experts[1][c][0]}
    shared = [a for a, name in enumerate(mesh.names) if name in batch_axes]
    tensor, experts = (mesh.names.index(n) if n in mesh.names else -1 for n in (TENSOR, EXPERTS))
    out: dict[int, NDArray[np.bool]] = {}
    met = set[str]()

    def parts(code: Code, but: int = -1) -> int:
        return math.prod(mesh.sizes[a] for a in shared if code[a] >= 0 and a != but)

    def keep(c: int, rule: Callable[[Sequence[Code]], Iterator[bool]]) -> None:
        """Only those states of class c whose codes ``rule`` allows."""
        this = graph.classes[c]
        signature = this.signature
        codes = mesh.space(signature.result_types[0]).codes
        mask = np.array(list(rule([codes[k] for k in signature.results[0]])), bool)[this.follow]
        out[this.cluster] = mask & out.get(this.cluster, np.ones(len(mask), bool))
        if not out[this.cluster].any():
            raise ShardingError(f"{degrees}: no layout has all of the step's state as that wants it")

    def only(codes: Sequence[Code], good: Callable[[Code], bool]) -> Callable[[Code], bool]:
        """``good`` where any code is; else all are."""
        return good if any(map(good, codes)) else lambda code: True

    def of_state(c: int, weight: bool) -> Callable[[Sequence[Code]], Iterator[bool]]:
        shape = graph.classes[c].signature.result_types[0].shape

        def rule(codes: Sequence[Code]) -> Iterator[bool]:
            asked: list[Callable[[Code], bool]] = [lambda code: -2 not in code]
            own = -1
            if experts >= 0 and shape in shapes:  # an expert's, or its optimizer's state
                own, dim = experts, shapes[shape]
                if weight and any(code[experts] == dim for code in codes):
                    met.add(EXPERTS)
                    asked.append(lambda code: code[experts] == dim)
            if tensor >= 0 and weight and len(shape) >= 2 and any(code[tensor] >= 0 for code in codes):
                met.add(TENSOR)
                asked.append(lambda code: code[tensor] >= 0)
            if degrees.zero is not None:
                left = [code for code in codes if all(good(code) for good in asked)]
                split = degrees.zero == 3 or (degrees.zero > 0 and not weight)
                most = max((parts(code, own) for code in left), default=1) if split else 1
                asked.append(only(left, lambda code: parts(code, own) == most))
            return (all(good(code) for good in asked) for code in codes)

        return rule

    def of_sum(codes: Sequence[Code]) -> Iterator[bool]:
        most = max(parts(code) for code in codes if -2 not in code) if (degrees.zero or 0) >= 2 else 1
        good = only(codes, lambda code: parts(code) == most and (most == 1 or -2 not in code))
        return (good(code) for code in codes)

    for n in flat.args:
        c = graph.class_of[n]
        if c in weights or (c in given and flat.operand_types[n]):
            keep(c, of_state(c, c in weights))
    if degrees.zero is not None:
        of_weights = {graph.classes[c].signature.result_types[0].shape for c in weights}
        for n in _sums(flat, loop):
            if flat.result_types[n][0].shape in of_weights:
                keep(graph.class_of[n], of_sum)
    return Met(out, frozenset(met))


def _weights(flat: Flat, loop: int) -> set[int]:
    """Arguments that the loss is made of: those that a forward or backward pass, or a microbatch, reads, and what
    looks like them in steps whose passes are not known (`parameters`)."""
    found, microbatch = parameters(flat), flat.children.get((0, loop), ())
    arguments = set(flat.args)
    for n, node in enumerate(flat.node):
        enters = flat.kind[n] == "const_in" and flat.region[n] in microbatch
        if enters or (node is not None and node.phase != "update"):
            sources = flat.source[flat.first_edge[n] : flat.first_edge[n + 1]]
            found |= {flat.maker[value] for value in sources if value >= 0} & arguments
    return found


def argument_roles(flat: Flat, batch: Collection[int], loop: int) -> tuple[str, ...]:
    """One of `ir.plan.ROLES` for each of a graph's inputs; those numbered in ``batch`` are examples. ``loop``: as
    `degree_states`."""
    weights = _weights(flat, loop)
    return tuple(
        "batch" if i in batch
        else "weights" if n in weights
        else "optimizer state" if flat.operand_types[n]
        else "other"
        for i, n in enumerate(flat.args)
    )  # fmt: skip


def _sums(flat: Flat, loop: int) -> Iterator[int]:
    """Carries of the loop over microbatches."""
    regions = flat.children.get((0, loop), ())
    return (n for n, kind in enumerate(flat.kind) if kind == "carry" and flat.region[n] in regions)


def expert_dims(graph: StrategyGraph) -> list[tuple[int, ExampleDims]]:
    """Of weights that are experts', (class, the dimension along which products take one each), for
    `find_examples`."""
    weights = {graph.class_of[n] for n in parameters(graph.flat)}
    found: dict[int, int] = {}
    for this in graph.classes:
        if this.signature.rule is None:
            continue
        for i, dims in enumerate(this.signature.rule.operands[:2]):
            for d, names in enumerate(dims):
                if names and own_products(this.signature, names):
                    for p, r in this.inputs[i]:
                        _trace_back(graph, p, r, d, weights, found, set())
    return [(c, ExampleDims(experts=frozenset({dim}))) for c, dim in found.items()]


def _trace_back(
    graph: StrategyGraph, c: int, result: int, dim: int, weights: set[int], found: dict[int, int],
    seen: set[tuple[int, int, int]],
) -> None:  # fmt: skip
    """Adds the weights that dimension ``dim`` of a class's result is one of, through cheap operators alone."""
    this = graph.classes[c]
    node = this.signature.node
    if (c, result, dim) in seen:
        return
    seen.add((c, result, dim))
    if this.signature.kind == "arg":
        if c in weights:
            found.setdefault(c, dim)
        return
    cheap = this.signature.kind in ("copy", *ENTRIES) if node is None else record_of(node.primitive).traits.fusible
    if not cheap:
        return
    operands, results = dim_names(this.signature)
    name = results[result][dim]
    for names, sources in zip(operands, this.inputs, strict=True):
        for d, other in enumerate(names):
            if name and other == name:
                for p, r in sources:
                    _trace_back(graph, p, r, d, weights, found, seen)
