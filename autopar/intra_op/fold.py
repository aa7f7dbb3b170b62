"""Planning nodes → classes of nodes that share one decision.

Two nodes are of one class when their strategies are the same and so are those of everything within two hops
(Weisfeiler–Leman colour refinement, two rounds over producers and users). Solving over classes makes
planning time grow with distinct blocks, not with depth: every plan of the folded problem is a plan of
the whole one with exactly its cost; what folding gives up is only plans in which equal blocks differ.

A chain of equal single-matmul layers wants neighbours that differ (column, then row split), so the
parity of a node's depth, counted in matmuls, is part of its colour. Small graphs are not folded at all.
"""

from __future__ import annotations

from autopar.intra_op.flatten import Flat
from autopar.intra_op.specs import Interner

UNFOLDED_NODES = 500
"""Graphs of at most so many planning nodes are solved node by node (measured: below it folding gains nothing)."""

ROUNDS = 2


def fold(flat: Flat, signature_ids: list[int], unfolded_nodes: int = UNFOLDED_NODES) -> list[int]:
    """The class of each planning node, numbered by first member."""
    count = len(flat.kind)
    if count <= unfolded_nodes:
        return list(range(count))
    users: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
    for n, links in enumerate(flat.links):
        for i, link in enumerate(links):
            if link is not None:
                users[link[0]].append((n, i, link[1]))
    intern = Interner()
    colour = [intern((flat.region[n], signature_ids[n], flat.depth[n] % 2)) for n in range(count)]
    for _ in range(ROUNDS):
        intern = Interner()
        colour = [
            intern((
                colour[n],
                tuple((colour[link[0]], link[1]) if link is not None else -1 for link in flat.links[n]),
                tuple(sorted({(colour[u], i, r) for u, i, r in users[n]})),
            ))
            for n in range(count)
        ]  # fmt: skip
    renumber = Interner()
    return [renumber(c) for c in colour]
