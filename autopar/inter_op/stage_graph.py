"""Layers ``start`` to ``stop`` of a step → the Graph of that stage, as intra-operator planning takes it.

    scan over microbatches   forward of the layers in order; backward in reverse order; gradients added to the carry
      stage_recv             what other stages make: activations, and cotangents of what they read
      stage_send             what other stages read
    update                   the part of it that the stage's layers own, once a step

The two operators stand for one end of a transfer between meshes: their sharding is free, and they cost nothing here,
because what crosses is planned, and paid, between the stages (`ir.pipeline.Cut`). Parts of the gradient of what
several stages train, new values of what several stages read, and scalars cross once a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.ir.graph import Constant, Graph, Node, Operand, Phase, TensorType
from autopar.ir.layers import RECEIVE, REMAT, SEND, LayeredGraph, Port, PortPhase, StageGraph


def stage_graph(layered: LayeredGraph, start: int, stop: int, remat: Sequence[str]) -> StageGraph:
    """The graph of a stage.

    Args:
        remat: what each of its layers keeps (`ir.layers.REMAT`).
    """
    return _Stage(layered, start, stop, remat).run()


NO_PARAMETERS: dict[str, Any] = {}
_ALONG_MICROBATCHES: dict[str, Any] = {"axes": (0,)}


@dataclass
class _Builder:
    """A graph being made; equal operands and parameters stay the same objects, so that equal nodes are found fast."""

    values: list[TensorType] = field(default_factory=list[TensorType])
    nodes: list[Node] = field(default_factory=list[Node])
    inputs: list[int] = field(default_factory=list[int])
    texts: dict[tuple[int, int, int], str] = field(default_factory=dict[tuple[int, int, int], str])
    """Parameters and types by identity, as text."""

    def value(self, value_type: TensorType) -> int:
        self.values.append(value_type)
        return len(self.values) - 1

    def input(self, value_type: TensorType) -> int:
        self.inputs.append(self.value(value_type))
        return self.inputs[-1]

    def type_of(self, operand: Operand) -> TensorType:
        return self.values[operand] if isinstance(operand, int) else operand.type

    def add(
        self,
        primitive: str,
        operands: Sequence[Operand],
        results: Sequence[TensorType],
        phase: Phase,
        params: dict[str, Any] = NO_PARAMETERS,
    ) -> tuple[int, ...]:
        """Appends an operator."""
        made = tuple(self.value(t) for t in results)
        types = tuple(self.type_of(o) for o in operands)
        text = (
            f"{primitive} {params} {[o if isinstance(o, int) else (str(o.type), o.value) for o in operands]} {results}"
        )
        self.nodes.append(
            Node(
                id=len(self.nodes), primitive=primitive, params=params, operands=tuple(operands), results=made,
                operand_types=types, result_types=tuple(results), phase=phase, digest=_digest(text),
            )
        )  # fmt: skip
        return made

    def copy(self, node: Node, names: dict[int, Operand]) -> None:
        """Appends a node of another graph; ``names`` says what its values are here."""
        operands = tuple(names[o] if isinstance(o, int) else o for o in node.operands)
        results = tuple(self.value(t) for t in node.result_types)
        names.update(zip(node.results, results, strict=True))
        self.nodes.append(replace(node, id=len(self.nodes), operands=operands, results=results))

    def done(self, outputs: Sequence[Operand]) -> Graph:
        """The graph; its fingerprint does not depend on where the nodes come from."""
        text = [f"{self._text(n)} {n.operands}" for n in self.nodes]
        types = [str(self.values[v]) for v in self.inputs]
        return Graph(
            values=tuple(self.values), nodes=tuple(self.nodes), inputs=tuple(self.inputs), outputs=tuple(outputs),
            fingerprint=_digest(repr((text, types, [o if isinstance(o, int) else str(o) for o in outputs])), 16),
        )  # fmt: skip

    def _text(self, node: Node) -> str:
        key = (id(node.params), id(node.operand_types), id(node.result_types))
        if key not in self.texts:
            types = [str(t) for t in (*node.operand_types, *node.result_types)]
            self.texts[key] = f"{node.params} {types}"
        bodies = [body.fingerprint for body in node.bodies]
        return f"{node.primitive} {self.texts[key]} {bodies} {node.flops} {node.phase}"


def _digest(text: str, size: int = 4) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


class _Stage:
    def __init__(self, layered: LayeredGraph, start: int, stop: int, remat: Sequence[str]) -> None:
        self.layered, self.start, self.stop = layered, start, stop
        self.layers = layered.layers[start:stop]
        self.remat = [REMAT.index(name) for name in remat]
        self.top, self.body = _Builder(), _Builder()
        self.names: dict[int, Operand] = {}
        """Value of the step → value in the body."""
        self.consts: list[tuple[int, int, int]] = []
        self.const_values: list[int] = []
        self.receives: list[Port] = []
        self.sends: list[Port] = []
        self.parts: dict[int, list[Operand]] = {}
        """Value of the step → parts of its cotangent."""
        self.kept: list[dict[int, Operand]] = []
        """Per layer: what the values of its joint graph are in the body."""

    def run(self) -> StageGraph:
        layered = self.layered
        self._arguments()
        read = {v for layer in self.layers for v in layer.operands}
        self.trained = [v for v in layered.trained if v in read] if layered.loss >= 0 else []
        sums = [self.body.input(layered.values[v]) for v in self.trained]
        for number, layer in enumerate(self.layers):
            self._forward(number, layer.operands)
            self._send_results(number)
        boundary = len(self.body.nodes)
        if layered.loss >= 0:
            for number in reversed(range(len(self.layers))):
                self._backward(number)
        carry: list[Operand] = []
        for v, total in zip(self.trained, sums, strict=True):
            parts = self.parts.get(v, [])
            carry.append(self._sum([total, *parts]))
        combined = [v for v in layered.combined if v in {r for layer in self.layers for r in layer.results}]
        return self._whole(carry, combined, boundary)

    def _whole(self, carry: list[Operand], combined: list[int], boundary: int) -> StageGraph:
        """The loop, and what follows it."""
        layered, top = self.layered, self.top
        body = self.body.done([*carry, *(self.names[v] for v in combined)])
        order = [*self.const_values, *body.inputs[len(self.const_values) :]]
        assert order == list(body.inputs)
        operands: list[Operand] = [*self.top_consts]
        operands += [Constant(type=layered.values[v], value=0) for v in self.trained]
        body_types = [self.body.type_of(o) for o in body.outputs]
        count = layered.num_microbatches
        stacked = [replace(t, shape=(count, *t.shape)) for t in body_types[len(carry) :]]
        results = tuple(top.value(t) for t in (*body_types[: len(carry)], *stacked))
        loop = len(top.nodes)
        params = {"num_consts": len(self.const_values), "num_carry": len(carry), "length": count}
        top.nodes.append(
            Node(
                id=loop, primitive="scan", params=params, operands=tuple(operands), results=results,
                operand_types=tuple(top.type_of(o) for o in operands),
                result_types=tuple(top.values[r] for r in results), bodies=(body,),
                digest=_digest(f"{params} {operands} {body.fingerprint}"),
            )
        )  # fmt: skip
        gradients = dict(zip(self.trained, results, strict=False))
        outputs, donated = self._update(gradients, dict(zip(combined, results[len(carry) :], strict=True)))
        graph = replace(top.done(outputs), donated=donated)
        graph = replace(graph, arg_paths=tuple(self._path(i) for i in range(len(graph.inputs))))
        return StageGraph(
            start=self.start,
            stop=self.stop,
            graph=graph,
            loop=loop,
            boundary=boundary,
            inputs=tuple(self.arguments),
            input_values=tuple(self._value_of(where) for where in self.arguments),
            receives=tuple(self.receives),
            sends=tuple(self.sends),
        )

    def _value_of(self, where: tuple[int, int, int]) -> int:
        return next((v for v, found in self.argument_of.items() if found == where), -1)

    def _path(self, i: int) -> str:
        argument, start, stop = self.arguments[i]
        return self.layered.arg_paths[argument] + (f"[{start}:{stop}]" if stop else "")

    def _arguments(self) -> None:
        """Arguments and slices that the stage's layers read: inputs of the stage, constants of its loop. What a
        microbatch reads of the batch comes in with each microbatch."""
        layered = self.layered
        self.argument_of = {v: (a, 0, 0) for a, v in enumerate(layered.arguments) if v >= 0}
        self.argument_of |= {s.value: (s.argument, s.start, s.stop) for s in layered.slices}
        self.arguments: list[tuple[int, int, int]] = []
        self.top_of: dict[tuple[int, int, int], int] = {}
        self.top_consts: list[int] = []
        before = dict(zip(layered.before_values, layered.before_per_microbatch, strict=True))
        for layer in self.layers:
            for v in layer.operands:
                where = self.argument_of.get(v)
                if v in self.names or (where is None and before.get(v, True)):
                    continue
                if where is not None and layered.per_microbatch[where[0]]:
                    continue
                self.names[v] = self.body.input(layered.values[v])
                self.const_values.append(self.body.inputs[-1])
                if where is None:
                    self.top_consts.append(self._receive(self.top, v, layered.values[v], "before"))
                else:
                    self.top_consts.append(self._argument(where, layered.values[v]))

    def _argument(self, where: tuple[int, int, int], value_type: TensorType) -> int:
        if where not in self.top_of:
            self.top_of[where] = self.top.input(value_type)
            self.arguments.append(where)
        return self.top_of[where]

    def _receive(self, builder: _Builder, value: int, value_type: TensorType, phase: PortPhase) -> int:
        node = len(builder.nodes)
        kind: Phase = "forward" if phase == "forward" else "backward" if phase == "backward" else "update"
        [made] = builder.add(RECEIVE, (), (value_type,), kind)
        self.receives.append(Port(value=value, phase=phase, node=node, stored=made, type=value_type))
        return made

    def _send(self, builder: _Builder, value: int, what: Operand, phase: PortPhase) -> None:
        if not isinstance(what, int):
            return  # a constant: made where it is read
        node = len(builder.nodes)
        kind: Phase = "forward" if phase == "forward" else "backward" if phase == "backward" else "update"
        builder.add(SEND, (what,), (), kind)
        self.sends.append(Port(value=value, phase=phase, node=node, stored=what, type=builder.values[what]))

    def _forward(self, number: int, operands: Sequence[int]) -> None:
        layered, layer = self.layered, self.layers[number]
        for v in operands:
            if v not in self.names:
                self.names[v] = self._receive(self.body, v, layered.values[v], "forward")
        kind = layered.kinds[layer.kind]
        graph = kind.joint[self.remat[number]] if layered.loss >= 0 else kind.forward
        given = [self.names[v] for v in operands]
        names: dict[int, Operand] = dict(zip(graph.inputs, given, strict=False))
        for node in graph.nodes:
            if node.phase == "backward":
                break
            self.body.copy(node, names)
        for v, output in zip(layer.results, graph.outputs, strict=False):
            self.names[v] = names[output] if isinstance(output, int) else output
        self.kept.append(names)

    def _send_results(self, number: int) -> None:
        for v in self.layers[number].results:
            if any(not self.start <= k < self.stop for k in self.layered.users.get(v, ())):
                self._send(self.body, v, self.names[v], "forward")

    def _backward(self, number: int) -> None:
        layered, layer, names = self.layered, self.layers[number], self.kept[number]
        kind = layered.kinds[layer.kind]
        graph = kind.joint[self.remat[number]]
        count = len(layer.operands)
        for slot, seed in zip(graph.inputs[count:], kind.seeds, strict=True):
            names[slot] = self._cotangent(layer.results[seed])
        for node in graph.nodes:
            if node.phase == "backward":
                self.body.copy(node, names)
        for position, output in zip(kind.wrt, graph.outputs[len(layer.results) :], strict=True):
            v = layer.operands[position]
            part = names[output] if isinstance(output, int) else output
            self.parts.setdefault(v, []).append(part)
        for v in dict.fromkeys(layer.operands[p] for p in kind.wrt):
            made = layered.makers.get(v)
            first_here = next(k for k in layered.users[v] if k >= self.start)
            if made is not None and made < self.start and first_here == self.start + number:
                self._send(self.body, v, self._sum(self.parts[v]), "backward")

    def _cotangent(self, v: int) -> Operand:
        """The cotangent of a value that is made here, from all of its users."""
        layered = self.layered
        value_type = layered.values[v]
        parts = list(self.parts.get(v, ()))
        later = {k for k in layered.users.get(v, ()) if k >= self.stop}
        if later and self._differentiated(v, later):
            parts.append(self._receive(self.body, v, value_type, "backward"))
        if v == layered.loss:
            parts.append(Constant(type=value_type, value=1))
        if not parts:
            return Constant(type=value_type, value=0)
        return self._sum(parts)

    def _differentiated(self, v: int, layers: set[int]) -> bool:
        """True where one of these layers gives a cotangent of v."""
        layered = self.layered
        return any(
            layered.layers[k].operands[p] == v for k in layers for p in layered.kinds[layered.layers[k].kind].wrt
        )

    def _sum(self, parts: Sequence[Operand]) -> Operand:
        total = parts[0]
        for part in parts[1:]:
            [total] = self.body.add("add_any", (total, part), (self.body.type_of(total),), "backward")
        return total

    def _update(
        self, gradients: dict[int, int], combined: dict[int, int]
    ) -> tuple[list[Operand], tuple[tuple[int, int], ...]]:
        """The stage's part of the update; returns the stage's outputs and (input, output) pairs of shared buffers."""
        layered, top = self.layered, self.top
        update = layered.update
        here = range(self.start, self.stop)
        positions = sorted({p for k in here for p in layered.updates[k]})
        mine = {r for p in positions for r in update.nodes[p].results}
        names: dict[int, Operand] = {}
        trained, total = len(layered.trained), len(layered.trained) + len(layered.combined)
        slot_of = {slot: i for i, slot in enumerate(update.inputs)}
        read = {o for p in positions for o in update.nodes[p].operands if isinstance(o, int)}
        taken = {slot_of[o] for o in read if o in slot_of and slot_of[o] < trained}
        for i, v in enumerate(layered.trained):
            users = layered.users.get(v, ())
            if v in gradients and i not in taken:
                self._send(top, v, gradients[v], "gradient")
            elif v in gradients:
                value: Operand = gradients[v]
                if any(k not in here for k in users):
                    part = self._receive(top, v, layered.values[v], "gradient")
                    [value] = top.add("add_any", (value, part), (layered.values[v],), "update")
                names[update.inputs[i]] = value
        wanted = {o for o in update.outputs if isinstance(o, int) and o in mine}
        for p in positions:
            node = update.nodes[p]
            for o in node.operands:
                if isinstance(o, int) and o not in names:
                    names[o] = self._outside(o, slot_of.get(o, -1), trained, total, combined)
            top.copy(node, names)
            for r in node.results:
                if any(not set(layered.update_layers[u]) & set(here) for u in layered.update_readers.get(r, ())):
                    self._send(top, r, names[r], "update")
        outputs: list[Operand] = []
        index: dict[int, int] = {}
        for j, o in enumerate(update.outputs):
            if isinstance(o, int) and o in wanted:
                index[j] = len(outputs)
                outputs.append(names[o])
        place = {where[0]: i for i, where in enumerate(self.arguments) if not where[2]}
        donated = tuple((place[a], index[j]) for a, j in layered.donated if a in place and j in index)
        return outputs, donated

    def _outside(self, o: int, slot: int, trained: int, total: int, combined: dict[int, int]) -> Operand:
        """What the update reads and the stage's nodes of it do not make."""
        layered, update = self.layered, self.layered.update
        value_type = update.values[o]
        if slot >= total:
            return self._argument((slot - total, 0, 0), value_type)
        if trained <= slot < total and layered.combined[slot - trained] in combined:
            stacked = combined[layered.combined[slot - trained]]
            [whole] = self.top.add("reduce_sum", (stacked,), (value_type,), "update", _ALONG_MICROBATCHES)
            return whole
        return self._receive(self.top, o, value_type, "update")
