"""What each mesh axis splits of a plan's work, in the words of those who lay out models by hand: `axis_uses`.

In: what was decided, and where examples are in what the graph is given. Out: for every axis the FLOPs of products and
attention of a step, before anything is split, by what the axis splits of them (`ir.sharding_plan.SPLITS`). A factor
(loop dimension) of an operator that runs along examples, or along their positions, is known from the batch
(`batch_bound`); one that a product only repeats, and that runs along stacked weights, is of experts; all others are
features: of data that would be tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from autopar.intra_op.batch_bound import ExampleDims, Found, find_examples, own_products
from autopar.intra_op.decisions import Decisions
from autopar.intra_op.degrees import expert_dims
from autopar.ir.sharding_plan import AxisUse
from autopar.primitives import record_of


def where_examples_are(out: Decisions, batch: Iterable[tuple[int, int]]) -> Found:
    """Where examples and experts are in all that a whole step computes; ``batch``: (graph input, batch dimension)."""
    flat, known = out.graph.flat, expert_dims(out.graph)
    for i, dim in batch:
        n = flat.args[i]
        given = flat.result_types[n][0]
        dims = ExampleDims.of_batch(given, dim)
        if len(given.shape) == 2 and not given.dtype.startswith(("int", "uint")):  # rows of features, not of tokens
            dims = replace(dims, positions=frozenset())
        known.append((out.graph.class_of[n], dims))
    return find_examples(out.graph, known)


def axis_uses(out: Decisions, found: Found) -> tuple[AxisUse, ...]:
    """The work of each mesh axis of more than one device, in their order; nothing where no examples are known."""
    mesh, spent = out.graph.mesh, [dict[str, float]() for _ in out.graph.mesh.names]
    if not any(map(any, found.batch[1])):
        return ()
    for c, this in enumerate(out.graph.classes):
        node, s = this.signature.node, out.strategy[c]
        if node is None or this.signature.rule is None or this.copy_of is not None:
            continue
        traits = record_of(node.primitive).traits
        if not traits.contraction and not traits.attends:
            continue
        flops = float(np.max(this.signature.flops)) * this.trips * len(this.members)
        for axis, option in enumerate(this.signature.options[s]):
            what = _what(out, found, c, this.signature.names[option])
            spent[axis][what] = spent[axis].get(what, 0.0) + flops
    return tuple(
        AxisUse(axis=name, flops=tuple(sorted(mine.items()))) for name, mine in zip(mesh.names, spent, strict=True)
    )


def _what(out: Decisions, found: Found, c: int, factor: str) -> str:
    """What a factor of class c's operator runs along."""
    if not factor or factor.startswith("+"):
        return "nothing"
    if factor in found.batch[0][c]:
        return "examples"
    if factor in found.experts[0][c] and own_products(out.graph.classes[c].signature, {factor}):
        return "experts"
    return "positions" if factor in found.positions[0][c] else "features"
