"""A Graph, made node by node."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from autopar.ir.graph import Graph, Json, Node, Operand, Phase, TensorType
from autopar.ir.layers import MADE, Origin

Retyped: TypeAlias = Callable[[TensorType], TensorType]
Copied: TypeAlias = "dict[object, tuple[list[TensorType], list[Node], list[str], dict[int, Operand]]]"
"""What is copied under which names → values, nodes and their texts, and the names that follow from it."""

NO_PARAMETERS: dict[str, Json] = {}


@dataclass(slots=True)
class GraphBuilder:
    """A graph being made; equal operands and parameters stay the same objects, so that equal nodes are found fast."""

    values: list[TensorType] = field(default_factory=list[TensorType])
    nodes: list[Node] = field(default_factory=list[Node])
    inputs: list[int] = field(default_factory=list[int])
    origins: list[Origin] = field(default_factory=list[Origin])
    """Of each node."""
    lines: list[str] = field(default_factory=list[str])
    """Each node as text."""
    texts: dict[tuple[int, int, int], str] = field(default_factory=dict[tuple[int, int, int], str])
    """Parameters and types by identity, as text."""

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

    def append(self, node: Node, origin: Origin) -> None:
        """Appends a node."""
        self.nodes.append(node)
        self.origins.append(origin)
        self.lines.append(f"{self._text(node)} {node.operands}")

    def copy_all(
        self, nodes: Sequence[Node], names: dict[int, Operand], layer: int, key: object, copied: Copied
    ) -> object:
        """As `copy` of each, or what that gave before where the same was copied to the same place: ``key``, of what the
        nodes and the names that they read follow from; returns it with the place."""
        place = len(self.nodes), len(self.values), key
        if place in copied:
            values, made, lines, after = copied[place]
            self.values += values
            self.nodes += made
            self.lines += lines
            self.origins += [(layer, node.id) for node in nodes]
            names.update(after)
        else:
            for node in nodes:
                self.copy(node, names, layer=layer)
            (first, value, _), results = place, [r for node in nodes for r in node.results]
            copied[place] = self.values[value:], self.nodes[first:], self.lines[first:], {r: names[r] for r in results}
        return place

    def copy(
        self, node: Node, names: MutableMapping[int, Operand], types: Retyped | None = None, layer: int = -1
    ) -> None:
        """Appends a node of another graph; its origin is (``layer``, the node's id). ``names``: that graph's values →
        operands of this one, which learns the results. ``types``: what the types become, a parameter ``shape`` with
        them."""
        operands = tuple(names[o] if isinstance(o, int) else o for o in node.operands)
        result_types, operand_types, params = node.result_types, node.operand_types, node.params
        if types is not None:
            result_types, operand_types = tuple(map(types, result_types)), tuple(map(types, operand_types))
            if "shape" in params and result_types:
                params = {**params, "shape": result_types[0].shape}
        results = tuple(self.value(t) for t in result_types)
        names.update(zip(node.results, results, strict=True))
        made = replace(
            node, id=len(self.nodes), params=params, operands=operands, results=results,
            operand_types=operand_types, result_types=result_types,
        )  # fmt: skip
        self.append(made, (layer, node.id))

    def done(self, outputs: Sequence[Operand]) -> Graph:
        """The graph with these outputs; its fingerprint does not depend on where the nodes come from."""
        types = [str(self.values[v]) for v in self.inputs]
        return Graph(
            values=tuple(self.values), nodes=tuple(self.nodes), inputs=tuple(self.inputs), outputs=tuple(outputs),
            fingerprint=digest(repr((self.lines, types, [o if isinstance(o, int) else str(o) for o in outputs])), 16),
        )  # fmt: skip

    def _text(self, node: Node) -> str:
        key = (id(node.params), id(node.operand_types), id(node.result_types))
        if key not in self.texts:
            types = [str(t) for t in (*node.operand_types, *node.result_types)]
            self.texts[key] = f"{node.params} {types}"
        bodies = [body.fingerprint for body in node.bodies]
        return f"{node.primitive} {self.texts[key]} {bodies} {node.flops} {node.fused} {node.phase}"


def digest(text: str, size: int = 4) -> str:
    """BLAKE2b of a text, ``size`` bytes as hex digits."""
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()
