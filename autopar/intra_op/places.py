"""For which equation of the user's code a collective runs, in words.

In: planning nodes of the flattened step. Out: ``dot_general (model.py:88)``. A value that enters a loop is named after
the operator inside that reads it first, one that leaves a loop or the step after the operator that it comes from.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.intra_op.flatten import Flat
from autopar.ir.graph import Node

_ENTERS = {
    "branch_in": "operand of branches",
    "carry": "carry of a loop",
    "const_in": "constant of a loop",
    "loop_out": "result of a loop",
    "xs": "scanned input",
}
_LEAVES = {
    "arg": "donated result",
    "branch_out": "result of branches",
    "out": "result",
    "pred": "predicate",
    "ys": "stacked output",
}
"""Kind of planning node → what the value that it takes is: named after its reader, or its maker."""


@dataclass(frozen=True, slots=True)
class Place:
    """Planning node ``reader`` wants a value that ``maker`` makes (-1: its own collective)."""

    reader: int
    maker: int = -1
    before: str = ""


def place_text(flat: Flat, place: Place) -> str:
    """The place in words, with a source line wherever one is known."""
    node, kind = flat.node[place.reader], flat.kind[place.reader]
    if node is not None and (node.source or place.maker < 0):
        return place.before + _named(node)
    made, read = _maker(flat, place.maker), _reader(flat, place.reader) if node is None else None
    if kind in _ENTERS and read is not None and (read.source or made is None):
        return f"{place.before}{_ENTERS[kind]}, for {_named(read)}"
    word = node.primitive if node is not None else {**_ENTERS, **_LEAVES}[kind]
    return f"{place.before}{word}, from {_named(made)}" if made is not None else f"{place.before}{word}"


def _maker(flat: Flat, n: int) -> Node | None:
    """The nearest operator that planning node n's value comes from and that has a source line (what autopar or jax add
    has none), else the nearest of all."""
    queue, seen, nearest = [n], {n}, None
    while queue:
        n = queue.pop(0)
        node = flat.node[n]
        if node is not None and node.source:
            return node
        nearest = nearest or node
        for link in reversed(flat.links[n]):  # of a carry, the value at the loop's end first
            if link is not None and link[0] not in seen:
                seen.add(link[0])
                queue.append(link[0])
    return nearest


def _reader(flat: Flat, n: int) -> Node | None:
    """The first operator that reads planning node n's value, through others that only pass it on."""
    for reader in range(n + 1, len(flat.kind)):
        if any(link is not None and link[0] == n for link in flat.links[reader]):
            node = flat.node[reader]
            return node if node is not None else _reader(flat, reader)
    return None


def _named(node: Node) -> str:
    return f"{node.primitive} ({node.source})" if node.source else node.primitive
