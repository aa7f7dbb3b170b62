"""A Graph, made node by node."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from autopar.ir.graph import Graph, Json, Node, Operand, Phase, TensorType
from autopar.ir.layers import MADE, Origin

Retyped: TypeAlias = Callable[[TensorType], TensorType]


NO_PARAMETERS: dict[str, Json] = {}


@dataclass(slots=True)
class GraphBuilder:
    """A graph being made; equal operands and parameters stay the same objects, so that equal nodes are found fast."""

    values: list[TensorType] = field(default_factory=list[TensorType])
    nodes: list[Node] = field(default_factory=list[Node])
    inputs: list[int] = field(default_factory=list[int])
    origins: list[Origin] = field(default_factory=list[Origin])
    """Of each node."""
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
        self.origins.append(MADE)
        text = (
            f"{primitive} {params} {[o if isinstance(o, int) else (str(o.type), o.value) for o in operands]} {results}"
        )
        self.nodes.append(
            Node(
                id=len(self.nodes), primitive=primitive, params=params, operands=tuple(operands), results=made,
                operand_types=types, result_types=tuple(results), phase=phase, digest=digest(text),
            )
        )  # fmt: skip
        return made

    def copy(
        self, node: Node, names: MutableMapping[int, Operand], types: Retyped | None = None, layer: int = -1
    ) -> None:
        """Appends a node of another graph; its origin is (``layer``, the node's id). ``names``: that graph's values →
        operands of this one, which learns the results. ``types``: what the types become, a parameter ``shape`` with
        them."""
        self.origins.append((layer, node.id))
        operands = tuple(names[o] if isinstance(o, int) else o for o in node.operands)
        result_types, operand_types, params = node.result_types, node.operand_types, node.params
        if types is not None:
            result_types, operand_types = tuple(map(types, result_types)), tuple(map(types, operand_types))
            if "shape" in params and result_types:
                params = {**params, "shape": result_types[0].shape}
        results = tuple(self.value(t) for t in result_types)
        names.update(zip(node.results, results, strict=True))
        self.nodes.append(
            replace(
                node, id=len(self.nodes), params=params, operands=operands, results=results,
                operand_types=operand_types, result_types=result_types,
            )
        )  # fmt: skip

    def done(self, outputs: Sequence[Operand]) -> Graph:
        """The graph with these outputs; its fingerprint does not depend on where the nodes come from."""
        text = [f"{self._text(n)} {n.operands}" for n in self.nodes]
        types = [str(self.values[v]) for v in self.inputs]
        return Graph(
            values=tuple(self.values), nodes=tuple(self.nodes), inputs=tuple(self.inputs), outputs=tuple(outputs),
            fingerprint=digest(repr((text, types, [o if isinstance(o, int) else str(o) for o in outputs])), 16),
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
