"""Which dimensions of which values are the batch's: what a forced method splits, or leaves whole.

In: a StrategyGraph and each batch argument's batch dimension. Out: for every class, the factors of its operator that
run along the batch. A dimension is the batch's if the factor that it is made of, its major one, is one of a dimension
that is the batch's: passed on from neighbour to neighbour until nothing changes. Arguments other than the batch have no
such dimension, whatever reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.intra_op.strategies import Signature
from autopar.intra_op.strategy_graph import StrategyGraph

Dims = list[list[set[int]]]
"""Per class and result: the dimensions that are the batch's."""
Names = list[list[str]]
"""Per tensor and dimension: the factor that it is made of, '' for none that could be split."""


def dimension(d: int) -> str:
    """The name used for dimension d in place of a factor where there is no operator: at inputs, outputs and copies."""
    return f"d{d}"


def batch_factors(graph: StrategyGraph, batch: Mapping[int, int]) -> list[frozenset[str]]:
    """The batch's factors of every class; ``batch`` maps positions of graph inputs to their batch dimension."""
    dims = no_dims(graph)
    for position, dim in batch.items():
        dims[graph.class_of[graph.flat.args[position]]][0].add(dim)
    return Ties(graph).spread(dims)


def no_dims(graph: StrategyGraph) -> Dims:
    """No dimension of any result is known to be the batch's yet."""
    return [[set[int]() for _ in this.signature.result_types] for this in graph.classes]


class Ties:
    """How the dimensions of a graph's values belong together."""

    def __init__(self, graph: StrategyGraph) -> None:
        made: dict[int, tuple[Names, Names]] = {}
        self._sides: list[list[tuple[list[str], int, int]]] = []
        self._users: list[list[int]] = [[] for _ in graph.classes]
        for c, this in enumerate(graph.classes):
            if id(this.signature) not in made:
                made[id(this.signature)] = dim_names(this.signature)
            operands, results = made[id(this.signature)]
            sides = [(names, c, r) for r, names in enumerate(results)]
            for names, sources in zip(operands, this.inputs, strict=True):
                sides += [(names, producer, r) for producer, r in sources]
            self._sides.append(sides)
            for producer in {producer for _, producer, _ in sides[len(results) :]}:
                self._users[producer].append(c)
        self._given = [this.signature.kind == "arg" for this in graph.classes]

    def spread(self, dims: Dims) -> list[frozenset[str]]:
        """The batch's factors of every class, from what ``dims`` says of some results; ``dims`` is completed in
        place."""
        found = [set[str]() for _ in dims]
        todo = dict.fromkeys(near for c, known in enumerate(dims) if any(known) for near in (c, *self._users[c]))
        while todo:
            c = next(iter(todo))
            del todo[c]
            for at in self._visit(c, dims, found[c]):
                todo.update(dict.fromkeys((at, *self._users[at])))
        return [frozenset(f) for f in found]

    def _visit(self, c: int, dims: Dims, found: set[str]) -> set[int]:
        """Passes on what is known of class c's operands and results; the classes of whose results more is known now."""
        sides, changed = self._sides[c], set[int]()
        for names, at, r in sides:
            found.update(names[d] for d in dims[at][r])
        found.discard("")
        for names, at, r in sides if found else ():
            if self._given[at]:
                continue
            new = {d for d, name in enumerate(names) if name in found} - dims[at][r]
            if new:
                dims[at][r] |= new
                changed.add(at)
        return changed


def dim_names(signature: Signature) -> tuple[Names, Names]:
    """How the dimensions of one class's operands and results belong together."""
    rule, types = signature.rule, (*signature.operand_types, *signature.result_types)
    if rule is not None:
        sizes = {f.name: f.size for f in rule.factors}
        tensors = [
            [next((n for n in dim if sizes[n] > 1), "") for dim in tensor] for tensor in (*rule.operands, *rule.results)
        ]
    elif signature.kind in ("arg", "pred"):
        tensors = [[""] * len(t.shape) for t in types]
    else:  # scanned values have a leading dimension more on one side
        rank = min(len(t.shape) for t in types)
        tensors = [[""] * (len(t.shape) - rank) + [dimension(d) for d in range(rank)] for t in types]
    count = len(signature.operand_types)
    return tensors[:count], tensors[count:]
