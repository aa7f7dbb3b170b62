"""For which equation of the user's code a collective runs, in words.

In: planning nodes of the flattened step. Out: ``dot_general (model.py:88)``. A value that enters a loop is named after
the operator inside that reads it first, one that leaves a loop or the step after the operator that it comes from.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

from autopar.intra_op.strategy_graph import StrategyGraph
from autopar.ir.graph import Node

_ENTERS = {
    "branch_in": "operand of branches",
    "carry": "carry of a loop",
    "const_in": "constant of a loop",
    "loop_out": "result of a loop",
    "recv": "receive",
    "xs": "scanned input",
}
_LEAVES = {
    "arg": "new state",
    "branch_out": "result of branches",
    "out": "result",
    "pred": "predicate",
    "send": "send",
    "ys": "stacked output",
}
"""Kind of planning node → what the value that it takes is: named after its reader, or its maker."""


class Spot(NamedTuple):
    """Where one or several equal collectives belong: to the readers at ``position`` of the values of a pattern
    (`uses.Pattern`), to the members of a class (their own collectives), or to a planning node (likewise). ``number`` is
    that of the pattern, class or node, ``before`` words to begin with."""

    kind: Literal["pattern", "class", "node"]
    number: int
    position: int = 0
    before: str = ""


class Places:
    """Spots in words, with a source line wherever one is known."""

    def __init__(self, graph: StrategyGraph) -> None:
        self.graph, self.flat = graph, graph.flat
        self.made: dict[int, Node | None] = {}
        self.read: dict[int, Node | None] = {}

    def texts(self, spot: Spot) -> Counter[str]:
        """What to call the collectives of a spot, and how many are called so."""
        if spot.kind == "node":
            return Counter([spot.before + self.text(spot.number)])
        if spot.kind == "class":
            return Counter(spot.before + self.text(n) for n in self.graph.classes[spot.number].members)
        uses = self.graph.uses
        edges = uses.edges(spot.number, spot.position)
        pairs = zip(uses.user[edges].tolist(), uses.maker[uses.value[edges]].tolist(), strict=True)
        return Counter(spot.before + self.text(reader, maker) for reader, maker in pairs)

    def text(self, reader: int, maker: int = -1) -> str:
        """Planning node ``reader`` wants a value that ``maker`` makes (-1: its own collective), in words."""
        node, kind = self.flat.node[reader], self.flat.kind[reader]
        if node is not None and (node.source or maker < 0):
            return _named(node)
        made, read = self._maker(maker), self._reader(reader) if node is None else None
        if kind in _ENTERS and read is not None and (read.source or made is None):
            return f"{_ENTERS[kind]}, for {_named(read)}"
        word = node.primitive if node is not None else {**_ENTERS, **_LEAVES}[kind]
        return f"{word}, from {_named(made)}" if made is not None else word

    def _maker(self, n: int) -> Node | None:
        """The nearest operator that planning node n's value comes from and that has a source line (what autopar or jax
        add has none), else the nearest of all."""
        if n not in self.made:
            self.made[n] = self._nearest(n)
        return self.made[n]

    def _nearest(self, n: int) -> Node | None:
        queue, seen, nearest = [n], {n}, None
        while queue:
            n = queue.pop(0)
            node = self.flat.node[n]
            if node is not None and node.source:
                return node
            nearest = nearest or node
            for link in reversed(self.flat.links[n]):  # of a carry, the value at the loop's end first
                if link is not None and link[0] not in seen:
                    seen.add(link[0])
                    queue.append(link[0])
        return nearest

    def _reader(self, n: int) -> Node | None:
        """The first operator that reads planning node n's value, through others that only pass it on."""
        if n not in self.read:
            columns = self.flat.columns()
            first, end = self.flat.first_value[n], self.flat.first_value[n + 1]
            users = columns.user[(columns.source >= first) & (columns.source < end)]
            users = users[users > n]
            reader = int(users.min()) if len(users) else -1
            node = None if reader < 0 else self.flat.node[reader]
            self.read[n] = self._reader(reader) if node is None and reader >= 0 else node
        return self.read[n]


def _named(node: Node) -> str:
    return f"{node.called} ({node.source})" if node.source else node.called
