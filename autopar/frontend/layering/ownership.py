"""Where every node of the update runs: which layers' stages.

A node that makes something of more than one element (something *large*) runs at one layer: that of the gradient or the
trained argument that it is connected with by way of large values. Nodes that make scalars of large values run where
those lie (the partial sum of a norm); what is made of scalars alone, or of nothing, runs with every layer that needs
it, the scalars being exchanged.

A join (`frontend.layering.joins`) runs, each operand by itself, at the layer that makes that one.

The gradient of a stacked argument, of which several layers read rows, lies with all of them. What is connected with it
runs on the rows where they are, each layer's for itself, if all of that treats rows apart; a sum or maximum of
everything is then a partial one at each layer. If not, it is kept whole, at the first of these layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autopar.ir.graph import Graph, Node
from autopar.primitives import record_of
from autopar.primitives.elementwise import JOIN

Layers = tuple[int, ...]


def update_layers(
    update: Graph, gradients: Mapping[int, Layers], known: Mapping[int, Layers], last: int
) -> tuple[Layers, ...]:
    """Layers per node of ``update``.

    Args:
        update: the graph, with its pairs of old and new values.
        gradients: its inputs that are gradients → the layers that own them, several for stacked arguments.
        known: other inputs that have a place: arguments that layers read, results of layers.
        last: the layer that runs what nothing else says (it has the loss).
    """
    return _Owners(update, gradients, known, last).layers()


def origins(
    update: Graph, gradients: Mapping[int, Layers], known: Mapping[int, Layers], last: int
) -> dict[int, frozenset[int]]:
    """Value of ``update`` → the layers that make it, or what it is made of; none for what no layer has to do with.
    Arguments: those of `update_layers`."""
    owners = _Owners(update, gradients, known, last)
    return owners.origins([owners.place(node) for node in update.nodes])


class _Owners:
    def __init__(self, update: Graph, gradients: Mapping[int, Layers], known: Mapping[int, Layers], last: int) -> None:
        self.update = update
        self.gradients = gradients
        self.known = known
        self.last = last
        self.large = [t.size > 1 for t in update.values]
        self.leaves = set(update.inputs) - set(gradients)
        self.parent = list(range(len(update.values)))
        self.floating: set[int] = set()
        """Large values that are made of scalars alone."""
        self._join()
        self.home: dict[int, Layers] = self._homes()

    def layers(self) -> tuple[Layers, ...]:
        """Forward, every node that has large values finds its place; backward, scalars follow those that need them."""
        fixed = [self.place(node) for node in self.update.nodes]
        origin = self.origins(fixed)
        needed: dict[int, set[int]] = {}
        readers = self._needed(fixed, {})
        paired = {o: self.update.inputs[i] for i, o in self.update.state}
        outputs: set[int] = set()
        for position, v in enumerate(self.update.outputs):
            if isinstance(v, int):
                outputs.add(v)
                needed.setdefault(v, set()).update(readers.get(paired.get(position, -1), ()))
        out: list[Layers] = [()] * len(fixed)
        for k in range(len(fixed) - 1, -1, -1):
            node, home = self.update.nodes[k], fixed[k]
            where = set(home) if home is not None else set().union(*(needed.get(v, ()) for v in node.results))
            if not where:
                from_layers = origin[node.results[0]] if node.results else frozenset[int]()
                where = {max(from_layers)} if from_layers and outputs & set(node.results) else {self.last}
            out[k] = tuple(sorted(where))
            for i, v in enumerate(node.operands):
                if isinstance(v, int):
                    needed.setdefault(v, set()).update(_readers(node, i, where))
        return tuple(out)

    def origins(self, fixed: Sequence[Layers | None]) -> dict[int, frozenset[int]]:
        """Value → the layers where what makes it, or makes what it is made of, has its place (``fixed``, by node)."""
        origin = {v: frozenset(self.gradients.get(v) or self.known.get(v) or ()) for v in self.update.inputs}
        for node, home in zip(self.update.nodes, fixed, strict=True):
            read = frozenset[int]().union(*(origin[v] for v in node.operands if isinstance(v, int)))
            origin.update((v, frozenset(home) if home is not None else read) for v in node.results)
        return origin

    def _needed(self, fixed: Sequence[Layers | None], needed: dict[int, set[int]]) -> dict[int, set[int]]:
        """Scalars → layers that need them, by way of scalars too: a state like a count of steps is kept up to date
        wherever it is read."""
        for k in range(len(fixed) - 1, -1, -1):
            node, home = self.update.nodes[k], fixed[k]
            where = set(home) if home is not None else set().union(*(needed.get(v, ()) for v in node.results))
            for i, v in enumerate(node.operands):
                if isinstance(v, int) and (not self.large[v] or v in self.floating):
                    needed.setdefault(v, set()).update(_readers(node, i, where))
        return needed

    # --- large values ------------------------------------------------------------------------------------------

    def _root(self, v: int) -> int:
        while self.parent[v] != v:
            self.parent[v] = self.parent[self.parent[v]]
            v = self.parent[v]
        return v

    def _read(self, node: Node) -> list[int]:
        return [v for v in node.operands if isinstance(v, int) and self.large[v]]

    def _members(self, node: Node) -> list[int]:
        """Large values of the node that belong to somebody."""
        both = (*self._read(node), *(v for v in node.results if self.large[v]))
        return [v for v in both if v not in self.leaves and v not in self.floating]

    def _join(self) -> None:
        for node in self.update.nodes:
            if all(v in self.floating for v in self._read(node)):
                self.floating.update(v for v in node.results if self.large[v])
            members = self._members(node)
            for v in members[1:]:
                self.parent[self._root(v)] = self._root(members[0])

    def _homes(self) -> dict[int, Layers]:
        """Root of connected values → where they lie."""
        found: dict[int, set[Layers]] = {}
        for v, layers in self.gradients.items():
            found.setdefault(self._root(v), set()).add(layers)
        without = [node for node in self.update.nodes if (m := self._members(node)) and self._root(m[0]) not in found]
        for node in without:
            root = self._root(self._members(node)[0])
            for v in node.operands:
                if isinstance(v, int) and v in self.known and self.large[v]:
                    found.setdefault(root, set()).add(self.known[v])
        by_rows = self._by_rows({root for root, places in found.items() if any(len(p) > 1 for p in places)})
        homes: dict[int, Layers] = {}
        for root, places in found.items():
            apart = len(places) == 1 and (root in by_rows or len(next(iter(places))) == 1)
            homes[root] = next(iter(places)) if apart else (min(min(p) for p in places),)
        return homes

    def _by_rows(self, roots: set[int]) -> set[int]:
        """Those of ``roots`` whose every node treats rows apart."""
        good = set(roots)
        for node in self.update.nodes:
            members = self._members(node)
            root = self._root(members[0]) if members else -1
            if root in good and not self._rows_apart(node, {self.update.values[v].shape[0] for v in members}):
                good.discard(root)
        return good

    def _rows_apart(self, node: Node, counts: set[int]) -> bool:
        if len(counts) > 1:
            return False
        (rows,) = counts
        large = [self.update.values[v] for v in (*self._read(node), *node.results) if self.large[v]]
        if any(t.shape[0] != rows for t in large):
            return False
        record = record_of(node.primitive)
        if record.joined_by and not any(self.large[v] for v in node.results):
            return True
        if record.traits.reduces:
            return 0 not in node.params["axes"]
        placed = node.params.get("broadcast_dimensions")
        if placed is not None:
            return not self._read(node) or placed[0] == 0
        return record.traits.elementwise or record.traits.identity or record.traits.aliases

    def _picks(self, node: Node) -> bool:
        """Whether it takes one of many by a number that is fixed, as the key of a leaf from all leaves' keys: another
        one for each layer. The last layer does so for all of them, which differs from others anyway."""
        taken = record_of(node.primitive).traits.moves and not any(self.large[v] for v in node.results)
        return taken and any(v in self.floating for v in self._read(node))

    def place(self, node: Node) -> Layers | None:
        """Where the node runs for the large values that it makes or reads; None if it has none of its own."""
        if node.primitive == JOIN:
            return tuple(node.params["owners"])
        members = self._members(node)
        if members:
            return self.home.get(self._root(members[0]), (self.last,))
        if self._picks(node):
            return (self.last,)
        leaves = [v for v in self._read(node) if v in self.leaves]
        if leaves:  # a scalar of a large argument
            return next((self.known[v] for v in leaves if v in self.known), (self.last,))
        return None


def _readers(node: Node, operand: int, where: Collection[int]) -> Collection[int]:
    """The layers among those that run the node, ``where``, that read this operand."""
    return (node.params["owners"][operand],) if node.primitive == JOIN else where
