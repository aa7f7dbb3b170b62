"""What a stage runs once a step: the part of the update that its layers own.

What other stages make comes in through ports: parts of the gradient of what several stages train, and scalars. Arrays
that a loop over layers reads by rows are updated by rows too: each layer its own, which is what the nodes of the update
do that several layers share. Such a node stands here once for each layer of the stage, in the layer's share of rows.
So does a join (`frontend.layering.joins`), of the one operand that the layer makes.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from autopar.inter_op.graph_builder import GraphBuilder
from autopar.ir.graph import Node, Operand, TensorType
from autopar.ir.layers import LayeredGraph, PortPhase, Slice
from autopar.primitives import joined_by
from autopar.primitives.elementwise import JOIN

ALONG_MICROBATCHES: dict[str, Any] = {"axes": (0,)}
_OPERATOR: dict[Any, dict[str, Any]] = {op: {"op": op} for op in ("add_any", "max", "min")}
"""Parameters of a layer's own join: equal ones in all layers."""


class Around(Protocol):
    """The stage that the update is a part of."""

    layered: LayeredGraph
    start: int
    stop: int
    top: GraphBuilder
    arguments: list[tuple[int, int, int]]

    def argument(self, where: tuple[int, int, int], value_type: TensorType) -> int:
        """The id of the stage's input for ``where``: (argument, first row, last row + 1); rows 0, 0 for all of it."""
        ...

    def receive(self, builder: GraphBuilder, value: int, value_type: TensorType, phase: PortPhase) -> int:
        """Adds a port through which ``value`` of the step comes in; returns its id in the builder's graph."""
        ...

    def send(self, builder: GraphBuilder, value: int, what: Operand, phase: PortPhase) -> None:
        """Adds a port through which ``what`` goes out as ``value`` of the step."""
        ...


class StageUpdate:
    """``gradients``: value that is trained (rows of an argument are values of their own) → its gradient; ``combined``:
    result of a layer → what all microbatches made of it, stacked."""

    def __init__(self, stage: Around, gradients: dict[int, int], combined: dict[int, int]) -> None:
        self.stage, self.layered, self.top = stage, stage.layered, stage.top
        self.gradients, self.combined = gradients, combined
        self.here = range(stage.start, stage.stop)
        self.update = self.layered.update
        self.slot_of = self.layered.update_slots
        self.names: dict[int, Operand] = {}
        """Value of the update → value of the stage's graph."""
        self.rows: dict[int, dict[int, Operand]] = {k: {} for k in self.here}
        """The same for values that a layer has its rows of."""
        self.spans: dict[tuple[int, int], Slice] = {}
        """(layer, value of the update) → which rows these are."""

    def run(self) -> tuple[list[Operand], tuple[tuple[int, int], ...]]:
        """Appends the update to the stage's graph; returns its outputs and (input, output) pairs of state."""
        layered, update, together = self.layered, self.update, self.layered.rows_together
        positions = sorted({p for k in self.here for p in layered.updates[k]})
        self._gradients({o for p in positions for o in update.nodes[p].operands if isinstance(o, int)})
        for p in positions:
            where = frozenset(layered.update_layers[p])
            if update.nodes[p].primitive == JOIN:
                self._copy_join(p, update.nodes[p])
            elif where in together and self._is_by_rows(update.nodes[p], together[where][0]):
                self._copy_rows(p, update.nodes[p], *together[where])
            else:
                self._copy(p, update.nodes[p])
        found = [(-1, o) for o in self.names] + [(k, o) for k in self.here for o in self.rows[k]]
        made = [(j, k, o) for k, o in found if o not in self.slot_of for j in layered.update_outputs.get(o, ())]
        outputs: list[Operand] = []
        index: dict[tuple[int, int, int], int] = {}
        for j, k, o in sorted(made):
            rows = self.spans[k, o] if k >= 0 else None
            where = (0, 0) if rows is None else (rows.start, rows.stop)
            index[layered.state_of.get(j, -1), *where] = len(outputs)
            outputs.append(self.names[o] if rows is None else self.rows[k][o])
        state = tuple((i, index[where]) for i, where in enumerate(self.stage.arguments) if where in index)
        return outputs, state

    def _gradients(self, read: set[int]) -> None:
        """Gradients that the update takes here; parts of others go to the stage that does."""
        layered = self.layered
        for v, gradient in self.gradients.items():
            slot, is_rows = layered.gradients[v]
            if is_rows:
                for k in self.here:
                    if k in layered.users[v]:
                        self.rows[k][slot] = gradient
            elif slot not in read:
                self.stage.send(self.top, v, gradient, "gradient")
            elif all(k in self.here for k in layered.users[v]):
                self.names[slot] = gradient
            else:
                part = self.stage.receive(self.top, v, layered.values[v], "gradient")
                [self.names[slot]] = self.top.add("add_any", (gradient, part), (layered.values[v],), "update")

    def _copy(self, p: int, node: Node) -> None:
        for o in node.operands:
            if isinstance(o, int) and o not in self.names:
                self.names[o] = self._outside(o)
        self.top.copy(node, self.names)
        self._send_results(node)

    def _is_by_rows(self, node: Node, length: int) -> bool:
        return any(t.shape[:1] == (length,) for t in (*node.operand_types, *node.result_types))

    def _copy_rows(self, p: int, node: Node, length: int, by_layer: dict[int, Slice]) -> None:
        """The node for every layer of the stage, on the layer's rows."""
        layers = [k for k in self.here if k in by_layer]
        for k in layers:
            each = by_layer[k]

            def mine(t: TensorType, each: Slice = each) -> TensorType:
                rows = each.stop - each.start
                return TensorType(shape=(rows, *t.shape[1:]), dtype=t.dtype) if t.shape[:1] == (length,) else t

            names = ChainMap(self.rows[k], self.names)
            for o, t in zip(node.operands, node.operand_types, strict=True):
                if not isinstance(o, int) or o in names:
                    continue
                slot = self.slot_of.get(o, -1)
                argument = slot - len(self.layered.trained) - len(self.layered.combined)
                if argument >= 0 and t.shape[:1] == (length,):
                    self.rows[k][o] = self.stage.argument((argument, each.start, each.stop), mine(t))
                else:
                    self.names[o] = self._outside(o)
            self.top.copy(node, names, mine, layer=k)
            self.spans.update(((k, r), each) for r in node.results)
        for r, t in zip(node.results, node.result_types, strict=True):
            if t.shape[:1] != (length,):
                self._join(node, r, t, layers)
        self._send_results(node)

    def _copy_join(self, p: int, node: Node) -> None:
        """What each layer of the stage has of a join: a part of its result, which the layer takes for all of it."""
        (result,), (value_type,) = node.results, node.result_types
        layers: list[int] = []
        for k, operand in zip(node.params["owners"], node.operands, strict=True):
            if k not in self.here:
                continue
            layers.append(k)
            if isinstance(operand, int) and operand not in self.names:
                self.names[operand] = self._outside(operand)
            mine = replace(node, operands=(operand,), operand_types=(value_type,), params=_OPERATOR[node.params["op"]])
            self.top.copy(mine, ChainMap(self.rows[k], self.names), layer=k)
        self._join(node, result, value_type, layers)
        self._send_results(node)

    def _join(self, node: Node, result: int, value_type: TensorType, layers: Sequence[int]) -> None:
        """What layers made of their rows, put together."""
        operator = joined_by(node)
        total = self.rows[layers[0]].pop(result)
        for k in layers[1:]:
            other = self.rows[k].pop(result)
            [total] = self.top.add(operator, (total, other), (value_type,), "update")
        self.names[result] = total

    def _send_results(self, node: Node) -> None:
        """Results that layers elsewhere read which do not make them for themselves."""
        for r in node.results:
            elsewhere = self.layered.update_elsewhere.get(r, ())
            if r in self.names and not all(k in self.here for k in elsewhere):
                self.stage.send(self.top, r, self.names[r], "update")

    def _outside(self, o: int) -> Operand:
        """What the update reads and the stage's nodes of it do not make."""
        layered = self.layered
        trained, slot, value_type = len(layered.trained), self.slot_of.get(o, -1), self.update.values[o]
        total = trained + len(layered.combined)
        if slot >= total:
            return self.stage.argument((slot - total, 0, 0), value_type)
        if trained <= slot < total and layered.combined[slot - trained] in self.combined:
            stacked = self.combined[layered.combined[slot - trained]]
            [whole] = self.top.add("reduce_sum", (stacked,), (value_type,), "update", ALONG_MICROBATCHES)
            return whole
        return self.stage.receive(self.top, o, value_type, "update")
