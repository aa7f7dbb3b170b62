"""Planning nodes → classes of nodes that share one decision.

Two nodes are of one class when their strategies are the same and so are those of everything within two hops
(Weisfeiler–Leman colour refinement, two rounds over producers and users). Solving over classes makes
planning time grow with distinct blocks, not with depth: every plan of the folded problem is a plan of
the whole one with exactly its cost; what folding gives up is only plans in which equal blocks differ.

A chain of equal single-matmul layers wants neighbours that differ (column, then row split), so the
parity of a node's depth, counted in matmuls, is part of its colour. Small graphs are not folded at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.intra_op.flatten import Flat
from autopar.intra_op.hashing import mixed, numbered

UNFOLDED_NODES = 500
"""Graphs of at most so many planning nodes are solved node by node (measured: below it folding gains nothing)."""

ROUNDS = 2
"""Rounds of refinement: hops around two nodes within which all must be alike."""


def fold(flat: Flat, unfolded_nodes: int = UNFOLDED_NODES) -> Any:
    """int64[planning nodes]: the class of each, numbered by first member. In graphs of at most ``unfolded_nodes``
    each is a class of its own."""
    count = len(flat.kind)
    if count <= unfolded_nodes:
        return np.arange(count)
    at = flat.columns()
    operand = np.arange(len(at.user)) - at.first_edge[at.user]
    linked = at.source >= 0
    producer = np.where(linked, at.maker[at.source], -1)
    result = np.where(linked, at.source - at.first_value[producer], -1)
    colour = mixed(at.region, at.key, np.array(flat.depth) % 2)
    for _ in range(ROUNDS):
        made = np.zeros(count, np.uint64)
        np.add.at(made, at.user, mixed(np.where(linked, colour[producer], np.uint64(0)), result, operand))
        reads = mixed(colour[at.user], operand, result)[linked]
        _, distinct = np.unique(mixed(reads, producer[linked]), return_index=True)  # a set: equal users count once
        used = np.zeros(count, np.uint64)
        np.add.at(used, producer[linked][distinct], reads[distinct])
        colour = mixed(colour, made, used)
    return numbered(colour)[0]
