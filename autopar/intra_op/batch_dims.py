"""Which dimensions of which values are the batch's: what a forced method splits, or leaves whole.

In: a StrategyGraph and each batch argument's batch dimension. Out: for every class, the factors of its operator that
run along the batch. A dimension is the batch's if the factor that it is made of, its major one, is one of a dimension
that is the batch's: found by going through the graph forwards and backwards until nothing changes. Arguments other than
the batch have no such dimension, whatever reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.intra_op.strategies import Signature
from autopar.intra_op.strategy_graph import StrategyGraph

MAX_SWEEPS = 16
"""Sweeps over the graph, at most: a value in a loop needs a few (guessed; a sweep that changes nothing is the last)."""

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
    return spread(graph, dims)


def no_dims(graph: StrategyGraph) -> Dims:
    """No dimension of any result is known to be the batch's yet."""
    return [[set[int]() for _ in this.signature.result_types] for this in graph.classes]


def spread(graph: StrategyGraph, dims: Dims) -> list[frozenset[str]]:
    """The batch's factors of every class, from what ``dims`` says of some results; ``dims`` is completed in place."""
    classes = graph.classes
    names = [dim_names(this.signature) for this in classes]
    found = [set[str]() for _ in classes]
    for sweep in range(MAX_SWEEPS):
        order = range(len(classes)) if sweep % 2 == 0 else reversed(range(len(classes)))
        news = sum(_spread(graph, dims, found[c], *names[c], c) for c in order)
        if not news:
            break
    return [frozenset(f) for f in found]


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


def _spread(graph: StrategyGraph, dims: Dims, found: set[str], operands: Names, results: Names, c: int) -> bool:
    """Passes on what is known of class c's operands and results; True where that was news."""
    this, before = graph.classes[c], len(found)
    sides = [(names, dims[c][r], this.signature.kind) for r, names in enumerate(results)]
    for names, sources in zip(operands, this.inputs, strict=True):
        sides += [(names, dims[p][r], graph.classes[p].signature.kind) for p, r in sources]
    for names, known, _ in sides:
        found.update(names[d] for d in known)
    found.discard("")
    changed = len(found) > before
    for names, known, kind in sides if found else ():
        new = {d for d, name in enumerate(names) if name in found} - known
        if new and kind != "arg":
            known |= new
            changed = True
    return changed
