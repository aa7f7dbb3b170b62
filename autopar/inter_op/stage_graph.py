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

from collections.abc import Sequence
from dataclasses import replace

from autopar.inter_op.graph_builder import Alike, GraphBuilder, digest
from autopar.inter_op.stage_update import StageUpdate
from autopar.ir.graph import Constant, Node, Operand, Phase, TensorType
from autopar.ir.layers import MADE, RECEIVE, REMAT, SEND, LayeredGraph, Port, PortPhase, StageGraph


def stage_graph(
    layered: LayeredGraph, start: int, stop: int, remat: Sequence[str], alike: Alike | None = None
) -> StageGraph:
    """The graph of layers ``start`` to ``stop`` as one stage.

    Args:
        remat: what each of these layers keeps of its forward pass, a name of `ir.layers.REMAT` each.
        alike: what stages of the same step have in common, made once; learns what is made here.
    """
    return _Stage(layered, start, stop, remat, alike or Alike()).run()


class _Stage:  # a `stage_update.Around`
    def __init__(self, layered: LayeredGraph, start: int, stop: int, remat: Sequence[str], alike: Alike) -> None:
        self.layered, self.start, self.stop = layered, start, stop
        self.layers = layered.layers[start:stop]
        self.remat = [REMAT.index(name) for name in remat]
        self.top, self.body = GraphBuilder(alike), GraphBuilder(alike)
        self.names: dict[int, Operand] = {}
        """Value of the step → value in the body."""
        self.consts: list[tuple[int, int, int]] = []
        self.const_values: list[int] = []
        self.receives: list[Port] = []
        self.sends: list[Port] = []
        self.parts: dict[int, list[Operand]] = {}
        """Value of the step → parts of its cotangent."""
        self.kept: list[tuple[dict[int, Operand], object]] = []
        """Per layer: what the values of its joint graph are in the body, and what these follow from."""

    def run(self) -> StageGraph:
        layered = self.layered
        self._arguments()
        read = {v for layer in self.layers for v in layer.operands}
        self.trained = layered.summed(read)
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
        top.append(
            Node(
                id=loop, primitive="scan", params=params, operands=tuple(operands), results=results,
                operand_types=tuple(top.type_of(o) for o in operands),
                result_types=tuple(top.values[r] for r in results), bodies=(body,),
                digest=digest(f"{params} {operands} {body.fingerprint}"),
            ),
            MADE,
        )  # fmt: skip
        gradients = dict(zip(self.trained, results, strict=False))
        update = StageUpdate(self, gradients, dict(zip(combined, results[len(carry) :], strict=True)))
        outputs, state = update.run()
        donated = tuple(i for i, _ in state if self.arguments[i][0] in layered.donated)
        graph = top.done(outputs)
        graph = replace(
            graph,
            state=state,
            donated=donated,
            fingerprint=digest(f"{graph.fingerprint} {state} {donated}", 16),
            arg_paths=tuple(self._path(i) for i in range(len(graph.inputs))),
        )
        return StageGraph(
            start=self.start,
            stop=self.stop,
            graph=graph,
            loop=loop,
            boundary=boundary,
            inputs=tuple(self.arguments),
            input_values=tuple(layered.value_of.get(where, -1) for where in self.arguments),
            receives=tuple(self.receives),
            sends=tuple(self.sends),
            origins=tuple(top.origins),
            body_origins=tuple(self.body.origins),
        )

    def _path(self, i: int) -> str:
        argument, start, stop = self.arguments[i]
        return self.layered.arg_paths[argument] + (f"[{start}:{stop}]" if stop else "")

    def _arguments(self) -> None:
        """Arguments and slices that the stage's layers read: inputs of the stage, constants of its loop. What a
        microbatch reads of the batch comes in with each microbatch."""
        layered = self.layered
        self.arguments: list[tuple[int, int, int]] = []
        self.top_of: dict[tuple[int, int, int], int] = {}
        self.top_consts: list[int] = []
        before = dict(zip(layered.before_values, layered.before_per_microbatch, strict=True))
        for layer in self.layers:
            for v in layer.operands:
                where = layered.argument_of.get(v)
                if v in self.names or (where is None and before.get(v, True)):
                    continue
                if where is not None and layered.per_microbatch[where[0]]:
                    continue
                self.names[v] = self.body.input(layered.values[v])
                self.const_values.append(self.body.inputs[-1])
                if where is None:
                    self.top_consts.append(self.receive(self.top, v, layered.values[v], "before"))
                else:
                    self.top_consts.append(self.argument(where, layered.values[v]))

    def argument(self, where: tuple[int, int, int], value_type: TensorType) -> int:
        if where not in self.top_of:
            self.top_of[where] = self.top.input(value_type)
            self.arguments.append(where)
        return self.top_of[where]

    def receive(self, builder: GraphBuilder, value: int, value_type: TensorType, phase: PortPhase) -> int:
        node = len(builder.nodes)
        kind: Phase = "forward" if phase == "forward" else "backward" if phase == "backward" else "update"
        [made] = builder.add(RECEIVE, (), (value_type,), kind)
        self.receives.append(Port(value=value, phase=phase, node=node, stored=made, type=value_type))
        return made

    def send(self, builder: GraphBuilder, value: int, what: Operand, phase: PortPhase) -> None:
        kind: Phase = "forward" if phase == "forward" else "backward" if phase == "backward" else "update"
        if not isinstance(what, int):
            [what] = builder.add("add_any", (what, Constant(type=what.type, value=0)), (what.type,), kind)
        node = len(builder.nodes)
        builder.add(SEND, (what,), (), kind)
        self.sends.append(Port(value=value, phase=phase, node=node, stored=what, type=builder.values[what]))

    def _forward(self, number: int, operands: Sequence[int]) -> None:
        layered, layer = self.layered, self.layers[number]
        for v in operands:
            if v not in self.names:
                self.names[v] = self.receive(self.body, v, layered.values[v], "forward")
        kind = layered.kinds[layer.kind]
        graph = kind.joint[self.remat[number]] if layered.loss >= 0 else kind.forward
        given = [self.names[v] for v in operands]
        names: dict[int, Operand] = dict(zip(graph.inputs, given, strict=False))
        ahead = next((n.id for n in graph.nodes if n.phase == "backward"), len(graph.nodes))
        key = layer.kind, self.remat[number]
        made = self.body.copy_all(graph.nodes[:ahead], names, self.start + number, key, given)
        for v, output in zip(layer.results, graph.outputs, strict=False):
            self.names[v] = names[output] if isinstance(output, int) else output
        self.kept.append((names, made))

    def _send_results(self, number: int) -> None:
        for v in self.layers[number].results:
            if any(not self.start <= k < self.stop for k in self.layered.users.get(v, ())):
                self.send(self.body, v, self.names[v], "forward")

    def _backward(self, number: int) -> None:
        layered, layer, (names, ahead) = self.layered, self.layers[number], self.kept[number]
        kind = layered.kinds[layer.kind]
        graph = kind.joint[self.remat[number]]
        count = len(layer.operands)
        for slot, seed in zip(graph.inputs[count:], kind.seeds, strict=True):
            names[slot] = self._cotangent(layer.results[seed])
        given = [names[slot] for slot in graph.inputs[count:]]
        backward = [node for node in graph.nodes if node.phase == "backward"]
        self.body.copy_all(backward, names, self.start + number, ahead, given)
        for position, output in zip(kind.wrt, graph.outputs[len(layer.results) :], strict=True):
            v = layer.operands[position]
            part = names[output] if isinstance(output, int) else output
            self.parts.setdefault(v, []).append(part)
        for v in dict.fromkeys(layer.operands[p] for p in kind.wrt):
            made = layered.makers.get(v)
            first_here = next(k for k in layered.users[v] if k >= self.start)
            if made is not None and made < self.start and first_here == self.start + number:
                self.send(self.body, v, self._sum(self.parts[v]), "backward")

    def _cotangent(self, v: int) -> Operand:
        """The cotangent of a value that is made here, from all of its users."""
        layered = self.layered
        value_type = layered.values[v]
        parts = list(self.parts.get(v, ()))
        later = {k for k in layered.users.get(v, ()) if k >= self.stop}
        if later and self._differentiated(v, later):
            parts.append(self.receive(self.body, v, value_type, "backward"))
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
