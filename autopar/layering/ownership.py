"""Where every node of the update runs: which layers' stages.

A node that makes something of more than one element runs at one layer: that of the gradients and trained arguments
that it is connected with, by way of values of more than one element. Nodes that make scalars run where what they read
lies, if that is one layer (the partial sum of a norm); else with every layer that needs the result, the scalars being
exchanged. What is made of scalars alone, or of nothing, runs where it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.graph import Graph


def update_layers(
    update: Graph, gradients: Sequence[int], owners: Sequence[int], arguments: dict[int, int], last: int
) -> tuple[tuple[int, ...], ...]:
    """Layers per node of ``update``.

    Args:
        update: the graph.
        gradients: its inputs that are gradients.
        owners: the layer that owns each of them.
        arguments: value of an input that is an argument → the layer that owns it, for those that layers read.
        last: the layer that runs what nothing else says (it has the loss).
    """
    parent = list(range(len(update.values)))

    def root(v: int) -> int:
        while parent[v] != v:
            parent[v] = parent[parent[v]]
            v = parent[v]
        return v

    inputs = set(update.inputs)
    gradient = dict(zip(gradients, owners, strict=True))
    leaves = inputs - set(gradient)
    large = [t.size > 1 for t in update.values]
    floating: set[int] = set()  # values that only scalars and leaves without an owner went into
    for node in update.nodes:
        read = [v for v in node.operands if isinstance(v, int) and large[v]]
        results = [v for v in node.results if large[v]]
        joined = [v for v in read if v not in leaves and v not in floating]
        if not joined and not any(v in arguments for v in read) and not (set(read) & leaves):
            floating.update(results)
            continue
        for a in (*joined, *results):
            parent[root(a)] = root((*joined, *results)[0])
    owned: dict[int, int] = {}
    for v, layer in gradient.items():
        owned[root(v)] = min(owned.get(root(v), layer), layer)
    for node in update.nodes:
        for v in node.operands:
            if isinstance(v, int) and v in arguments and large[v]:
                for r in (*node.results, *(o for o in node.operands if isinstance(o, int) and o not in leaves)):
                    if large[r] and r not in floating:
                        owned.setdefault(root(r), arguments[v])
    state = _state(update, owned, root, leaves, large)
    # forward: the layers that a value's parts come from
    places: dict[int, frozenset[int]] = {}
    for v in update.inputs:
        if v in gradient:
            places[v] = frozenset((gradient[v],))
        elif v in state:
            places[v] = frozenset((state[v],))
        else:
            places[v] = frozenset()
    fixed: list[int | None] = []
    for node in update.nodes:
        read = frozenset[int]().union(*(places[v] for v in node.operands if isinstance(v, int)))
        home = next((owned[root(v)] for v in node.results if large[v] and root(v) in owned), None)
        if home is None and not any(large[v] and v not in floating for v in node.results):
            from_large = [v for v in node.operands if isinstance(v, int) and large[v] and v not in floating]
            homes = {owned.get(root(v), state.get(v, last)) for v in from_large}
            home = min(homes) if from_large else None
        elif home is None:
            home = last
        fixed.append(home)
        for v in node.results:
            places[v] = frozenset((home,)) if home is not None else read
    # backward: what is made of scalars runs where it is needed
    needed: dict[int, set[int]] = {}
    outputs = {v for v in update.outputs if isinstance(v, int)}
    readers = _scalar_readers(update, fixed, large)
    paired = {o: i for i, o in update.donated}
    for position, v in enumerate(update.outputs):
        if isinstance(v, int):
            source = update.inputs[paired[position]] if position in paired else -1
            needed.setdefault(v, set()).update(readers.get(source, ()))
    out: list[tuple[int, ...]] = [()] * len(update.nodes)
    for k in range(len(update.nodes) - 1, -1, -1):
        node, home = update.nodes[k], fixed[k]
        if home is not None:
            where = {home}
        else:
            where = set().union(*(needed.get(v, set()) for v in node.results))
            if not where and outputs & set(node.results):
                origin = places[node.results[0]]
                where = {max(origin)} if origin else {last}
            where = where or {last}
        out[k] = tuple(sorted(where))
        for v in node.operands:
            if isinstance(v, int):
                needed.setdefault(v, set()).update(where)
    return tuple(out)


def _state(
    update: Graph, owned: dict[int, int], root: object, leaves: set[int], large: Sequence[bool]
) -> dict[int, int]:
    """Leaves of more than one element → the layer whose nodes read them first."""
    state: dict[int, int] = {}
    for node in update.nodes:
        homes = [owned[root(v)] for v in node.results if large[v] and root(v) in owned]  # type: ignore[operator]
        if homes:
            for v in node.operands:
                if isinstance(v, int) and v in leaves and large[v]:
                    state.setdefault(v, homes[0])
    return state


def _scalar_readers(update: Graph, fixed: Sequence[int | None], large: Sequence[bool]) -> dict[int, set[int]]:
    """Scalar inputs → layers that need them, through scalars made of them too: a state like a count of steps is kept
    up to date wherever it is read."""
    needed: dict[int, set[int]] = {}
    for k in range(len(update.nodes) - 1, -1, -1):
        node, home = update.nodes[k], fixed[k]
        where = {home} if home is not None else set().union(*(needed.get(v, set()) for v in node.results))
        for v in node.operands:
            if isinstance(v, int) and not large[v]:
                needed.setdefault(v, set()).update(where)
    return needed
