"""A Graph, made node by node; equal ones of one step are one, but for what names their arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from autopar.ir.graph import Graph, Json, Node, Operand, Phase, TensorType
from autopar.ir.layers import MADE, Origin

Retyped: TypeAlias = Callable[[TensorType], TensorType]

NO_PARAMETERS: dict[str, Json] = {}


class _Copy(NamedTuple):
    """A node of another graph, on other values; made once it is known that no equal graph was made before."""

    node: Node
    params: dict[str, Any]
    operands: tuple[Operand, ...]
    results: tuple[int, ...]
    operand_types: tuple[TensorType, ...]
    result_types: tuple[TensorType, ...]

    def made(self, number: int) -> Node:
        return replace(
            self.node, id=number, params=self.params, operands=self.operands, results=self.results,
            operand_types=self.operand_types, result_types=self.result_types,
        )  # fmt: skip


class _Copied(NamedTuple):
    """What `GraphBuilder.copy_all` added, and the names that follow from it."""

    values: list[TensorType]
    nodes: list[Node | _Copy]
    lines: list[Line]
    names: dict[int, Operand]


Exact: TypeAlias = int | tuple[TensorType, str]
"""An operand; of a constant its type and text, by which −0.0 is not 0.0."""
Line: TypeAlias = tuple[int, tuple[Exact, ...]]
"""(the number of what a node computes, its operands)."""


@dataclass(slots=True)
class Alike:
    """What the graphs of one step have in common."""

    texts: dict[str, int] = field(default_factory=dict[str, int])
    """What a node computes, as text → its number."""
    numbers: dict[object, tuple[int, object]] = field(default_factory=dict[object, tuple[int, object]])
    """The same by the identity of what the text follows from, and that itself, so that it stays."""
    copies: dict[object, _Copied] = field(default_factory=dict[object, _Copied])
    """(place, what was copied there) → what that added."""
    graphs: dict[object, Graph] = field(default_factory=dict[object, Graph])
    """What a graph follows from → the first of these."""

    def number(self, node: Node | _Copy) -> int:
        """The number of what a node computes: it with its parameters and types, whatever its operands are."""
        of = node.node if isinstance(node, _Copy) else node
        parts = (node.params, node.operand_types, node.result_types, of.bodies, of.hidden)
        key = (*map(id, parts), of.primitive, of.flops, of.phase, of.hidden_runs)
        found = self.numbers.get(key)
        if found is None:
            types = [str(t) for t in (*node.operand_types, *node.result_types)]
            bodies = [body.fingerprint for body in of.bodies]
            text = f"{of.primitive} {node.params} {types} {bodies} {of.flops} {of.phase}"
            text += f" {of.hidden.fingerprint} {of.hidden_runs}" if of.hidden is not None else ""
            found = self.numbers[key] = self.texts.setdefault(text, len(self.texts)), parts
        return found[0]


@dataclass(slots=True)
class GraphBuilder:
    """A graph being made. Operands and parameters that are the same objects in several nodes, or in several graphs with
    the same ``alike``, are known to be equal without a look."""

    alike: Alike = field(default_factory=Alike)
    values: list[TensorType] = field(default_factory=list[TensorType])
    nodes: list[Node | _Copy] = field(default_factory=list["Node | _Copy"])
    inputs: list[int] = field(default_factory=list[int])
    origins: list[Origin] = field(default_factory=list[Origin])
    """Of each node."""
    lines: list[Line] = field(default_factory=list["Line"])
    """Of each node, all that is to be the same in an equal graph."""

    def value(self, value_type: TensorType) -> int:
        """Adds a value; returns its id."""
        self.values.append(value_type)
        return len(self.values) - 1

    def input(self, value_type: TensorType) -> int:
        """Adds a value that is the graph's next input; returns its id."""
        self.inputs.append(self.value(value_type))
        return self.inputs[-1]

    def type_of(self, operand: Operand) -> TensorType:
        """The type of a value, or of a constant."""
        return self.values[operand] if isinstance(operand, int) else operand.type

    def add(
        self,
        primitive: str,
        operands: Sequence[Operand],
        results: Sequence[TensorType],
        phase: Phase,
        params: dict[str, Json] = NO_PARAMETERS,
    ) -> tuple[int, ...]:
        """Appends an operator that no equation stands for (`ir.layers.MADE`), ``results`` being the types of its
        results; returns their ids."""
        made = tuple(self.value(t) for t in results)
        types = tuple(self.type_of(o) for o in operands)
        text = (
            f"{primitive} {params} {[o if isinstance(o, int) else (str(o.type), o.value) for o in operands]} {results}"
        )
        self.append(
            Node(
                id=len(self.nodes), primitive=primitive, params=params, operands=tuple(operands), results=made,
                operand_types=types, result_types=tuple(results), phase=phase, digest=digest(text),
            ),
            MADE,
        )  # fmt: skip
        return made

    def append(self, node: Node | _Copy, origin: Origin) -> None:
        """Appends a node."""
        self.nodes.append(node)
        self.origins.append(origin)
        self.lines.append((self.alike.number(node), tuple(map(exact, node.operands))))

    def copy_all(
        self, nodes: Sequence[Node], names: dict[int, Operand], layer: int, key: object, given: Sequence[Operand]
    ) -> object:
        """As `copy` of each, or what that gave before where the same was copied to the same place. ``key`` and
        ``given``: what the nodes and the names that they read follow from; returns these with the place."""
        place = len(self.nodes), len(self.values), key, *map(exact, given)
        if (found := self.alike.copies.get(place)) is not None:
            self.values += found.values
            self.nodes += found.nodes
            self.lines += found.lines
            self.origins += [(layer, node.id) for node in nodes]
            names.update(found.names)
        else:
            for node in nodes:
                self.copy(node, names, layer=layer)
            first, value, results = place[0], place[1], [r for node in nodes for r in node.results]
            self.alike.copies[place] = _Copied(
                self.values[value:], self.nodes[first:], self.lines[first:], {r: names[r] for r in results}
            )
        return place

    def copy(
        self, node: Node, names: MutableMapping[int, Operand], types: Retyped | None = None, layer: int = -1
    ) -> None:
        """Appends a node of another graph; its origin is (``layer``, the node's id). ``names``: that graph's values →
        operands of this one, which learns the results. ``types``: what the types become, a parameter ``shape`` with
        them."""
        operands = tuple([names[o] if isinstance(o, int) else o for o in node.operands])
        result_types, operand_types, params = node.result_types, node.operand_types, node.params
        if types is not None:
            result_types, operand_types = tuple(map(types, result_types)), tuple(map(types, operand_types))
            if "shape" in params and result_types:
                params = {**params, "shape": result_types[0].shape}
        first = len(self.values)
        self.values += result_types
        results = tuple(range(first, len(self.values)))
        names.update(zip(node.results, results, strict=True))
        self.append(_Copy(node, params, operands, results, operand_types, result_types), (layer, node.id))

    def done(self, outputs: Sequence[Operand]) -> Graph:
        """The graph with these outputs; its fingerprint does not depend on where the nodes come from."""
        types = [str(self.values[v]) for v in self.inputs]
        ends = [exact(o) for o in outputs]
        key = (tuple(self.lines), tuple(types), tuple(self.inputs), tuple(ends))
        if key not in self.alike.graphs:
            texts = list(self.alike.texts)
            lines = [f"{texts[number]} {operands}" for number, operands in self.lines]
            self.alike.graphs[key] = Graph(
                values=tuple(self.values),
                nodes=tuple(n.made(i) if isinstance(n, _Copy) else n for i, n in enumerate(self.nodes)),
                inputs=tuple(self.inputs), outputs=tuple(outputs),
                fingerprint=digest(repr((lines, types, ends)), 16),
            )  # fmt: skip
        return self.alike.graphs[key]


def exact(operand: Operand) -> Exact:
    """What tells an operand from others."""
    return operand if isinstance(operand, int) else (operand.type, repr(operand.value))


def digest(text: str, size: int = 4) -> str:
    """BLAKE2b of a text, ``size`` bytes as hex digits."""
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()
