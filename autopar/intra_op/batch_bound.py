"""The batch, positions and experts bound to mesh axes, examples kept whole: which states of a strategy graph do as the
user wants.

In: a StrategyGraph, where examples are in what it receives, and a `Bound`. Out: the allowed states of its clusters
(`bound_states`), and where examples are in all that it computes (`find_examples`).

``axes``            an operator that has the batch among its factors (`batch_dims`) splits it over exactly these axes.
                    This is what Alpa's option ``force_batch_dim_to_mesh_dim`` says of its products and convolutions.
``positions``       the same of positions, the first dimension of an example, and over these axes.
``experts``         a product that each expert has of its own splits them over this axis, and the batch over the others
                    of ``axes``; what else has both does either that, or splits the batch over all of these. So examples
                    change places before and after the experts' products (Lepikhin et al., "GShard", ICLR 2021).
``whole_examples``  no operator splits an example: its positions, its rows of pixels. Alpa's products cannot: batch and
                    positions are one dimension there.

Other dimensions, and operators without these (weights, their gradients and updates), are left to the solver. So with
both, on a mesh of (data parallel, operator parallel) devices with the batch bound to the first axis, every product is
data parallel over the first axis, and operator parallel or replicated over the second.

Where a rule cannot split the batch so (fewer groups of examples that are routed together than devices), the operator
takes what comes nearest: no other axis, and as many of the bound ones as it can.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.intra_op.batch_dims import Dims, Ties, dimension, no_dims
from autopar.intra_op.specs import Mesh
from autopar.intra_op.strategies import Signature
from autopar.intra_op.strategy_graph import StrategyGraph
from autopar.ir.graph import TensorType
from autopar.primitives import record_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """``axes``: names of the mesh axes that the batch is split over, alone; those of size 1 split nothing; None: the
    solver's choice. ``positions``: the same of examples' positions. ``experts``: the axis, one of ``axes``, that
    experts are split over. ``whole_examples``: True where no operator may split an example."""

    axes: tuple[str, ...] | None = None
    positions: tuple[str, ...] | None = None
    experts: str | None = None
    whole_examples: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleDims:
    """Of one value: the dimensions along which examples lie, those along which one example does, of these the ones of
    its positions, and those along which experts do, one after the other."""

    batch: frozenset[int] = frozenset()
    within: frozenset[int] = frozenset()
    positions: frozenset[int] = frozenset()
    experts: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.batch or self.within or self.experts)

    @classmethod
    def of_batch(cls, value_type: TensorType, dim: int) -> ExampleDims:
        """Of a batch along dimension ``dim``."""
        within = frozenset(range(len(value_type.shape))) - {dim}
        return cls(batch=frozenset({dim}), within=within, positions=frozenset(sorted(within)[:1]))


@dataclass(frozen=True, slots=True)
class Found:
    """`ExampleDims` of all that a graph computes: factors per class, dimensions per class and result."""

    batch: tuple[list[frozenset[str]], Dims]
    within: tuple[list[frozenset[str]], Dims]
    positions: tuple[list[frozenset[str]], Dims]
    experts: tuple[list[frozenset[str]], Dims]

    def of(self, sources: Collection[tuple[int, int]]) -> ExampleDims:
        """Where examples are in a value that is one of ``sources``, (class, result), at a time."""
        return ExampleDims(
            batch=frozenset(d for c, r in sources for d in self.batch[1][c][r]),
            within=frozenset(d for c, r in sources for d in self.within[1][c][r]),
            positions=frozenset(d for c, r in sources for d in self.positions[1][c][r]),
            experts=frozenset(d for c, r in sources for d in self.experts[1][c][r]),
        )


def find_examples(graph: StrategyGraph, known: Sequence[tuple[int, ExampleDims]]) -> Found:
    """Where examples, and experts, are in a graph; ``known`` are (class, where they are in its first result)."""
    ties = Ties(graph)

    def found(which: str) -> tuple[list[frozenset[str]], Dims]:
        dims = no_dims(graph)
        for c, of in known:
            dims[c][0] |= getattr(of, which)
        return ties.spread(dims), dims

    return Found(found("batch"), found("within"), found("positions"), found("experts"))


def bound_states(graph: StrategyGraph, found: Found, bound: Bound) -> dict[int, NDArray[np.bool]]:
    """Cluster → bool[states]: those in which most of its classes do as ``bound`` says; clusters that it leaves free are
    not in it."""
    scores: dict[int, Any] = {}
    memo: dict[Any, Any] = {}

    def over(axes: Sequence[str] | None) -> NDArray[np.bool]:
        return np.array([name in (axes or ()) for name in graph.mesh.names], bool)

    wanted, apart, none = over(bound.axes), over(bound.positions), over(())
    of_experts = over(None if bound.experts is None else (bound.experts,))
    for c, this in enumerate(graph.classes):
        batch = found.batch[0][c] if bound.axes is not None else frozenset[str]()
        positions = found.positions[0][c] - batch if bound.positions is not None else frozenset[str]()
        within = found.within[0][c] - batch - positions if bound.whole_examples else frozenset[str]()
        experts = found.experts[0][c] - batch - positions if bound.experts is not None else frozenset[str]()
        if not batch and not positions and not within:
            continue
        key = (id(this.signature), batch, positions, within, experts)
        if key not in memo:
            apart_too = ((positions, apart), (within - experts, none))
            whole = ((batch, wanted), (experts, none), *apart_too)
            moved = ((experts, of_experts), (batch, wanted & ~of_experts), *apart_too)
            ways = [whole, moved] if experts else [((batch, wanted), *apart_too)]
            if experts and own_products(this.signature, experts):
                ways = [moved]
            memo[key] = np.any([_bound_to(graph.mesh, this.signature, way) for way in ways], axis=0)
        size = graph.classes[graph.roots[this.cluster]].signature.size
        scores.setdefault(this.cluster, np.zeros(size))
        scores[this.cluster] += memo[key][this.follow]
    return {cluster: score == score.max() for cluster, score in scores.items()}


def own_products(signature: Signature, factors: Collection[str]) -> bool:
    """True of a product that one of ``factors`` only repeats: both operands and the result have it, or, of the groups
    of a ragged product, the weights or the result alone."""
    rule, node = signature.rule, signature.node
    if rule is None or node is None or not record_of(node.primitive).traits.contraction or len(rule.operands) < 2:
        return False
    results, operands = (
        [{name for dim in side for name in dim} for side in sides] for sides in (rule.results, rule.operands)
    )
    split = [f.name for f in rule.factors if f.kind != "whole" and f.name in factors]
    return any(
        all(name in side for side in (*operands[:2], *results))
        or sum(name in side for side in (*operands, *results)) == 1
        for name in split
    )


def _bound_to(mesh: Mesh, signature: Signature, way: Sequence[tuple[frozenset[str], NDArray[np.bool]]]) -> Any:
    """bool[strategies]: those that come nearest to splitting factors over the axes given with them, in this order."""
    allowed = np.ones(signature.size, bool)
    for factors, axes in way:
        allowed = _nearest(_along(mesh, signature, factors), axes, allowed)
    return allowed


def _along(mesh: Mesh, signature: Signature, factors: frozenset[str]) -> Any:
    """bool[strategies, axes]: where a mesh axis splits one of ``factors``."""
    if signature.node is not None and signature.rule is not None:
        return np.array([name in factors for name in signature.names])[signature.options]
    made = bool(signature.result_types) and signature.kind not in ("ys", "out", "pred")
    value_type = (signature.result_types if made else signature.operand_types)[0]
    column = (signature.results if made else signature.operands)[0]
    codes = np.array([mesh.space(value_type).codes[c] for c in column]).reshape(len(column), mesh.rank)
    return np.isin(codes, [d for d in range(len(value_type.shape)) if dimension(d) in factors])


def _nearest(along: Any, wanted: Any, allowed: Any) -> Any:
    """bool[strategies]: of those allowed, the ones that come nearest to splitting over all wanted axes and no other."""
    others, kept = (along & ~wanted).sum(axis=1), (along & wanted).sum(axis=1)
    fewest = allowed & (others == others[allowed].min())
    return fewest & (kept == kept[fewest].max())
