"""A train step cut into layers: what inter-operator planning sees.

The forward pass of the loss, for one microbatch and not yet differentiated, is a sequence of layers. Layers that
compute the same on the same shapes share a `LayerKind`, so that everything about them is found out once. A layer reads
*values*: arguments of the step, results of earlier layers, constants. It gives results, and in the backward pass it
takes the cotangents of its results and gives those of its operands.

A value with several users has as many parts of its cotangent; they are added up, wherever the layers run. For arguments
that are trained the sum over users and microbatches is the gradient, which the update takes.

    once a step       before: arguments → values that layers read beside arguments (mostly empty)
    per microbatch    layers[0] … layers[n−1] forwards, then backwards
    once a step       update: gradients, loss and other results, arguments → the step's results
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from autopar.ir.errors import VerifyError
from autopar.ir.graph import Graph, TensorType

RECEIVE, SEND = "stage_recv", "stage_send"
"""The operators of a stage's graph that take a value from another stage, and give it one."""
REMAT = ("none", "dots", "full")
"""What a layer keeps of its forward pass for its backward pass: all that is needed; its operands, results of
contractions without batch dimensions, and what contractions and reductions make that is little beside what they read
(of attention all but the scores and what is made of each of them); only its operands."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What equal layers compute.

    ``forward`` maps operands to results. ``joint[k]`` is forward and backward under ``REMAT[k]``, what it recomputes
    included: its inputs are the operands, then the cotangents of results ``seeds``; its outputs are the results, then
    the cotangents of operands ``wrt``. Nodes of the backward pass have phase ``backward`` and follow those of the
    forward pass. ``joint`` is empty for a step without a backward pass.
    """

    forward: Graph
    joint: tuple[Graph, ...]
    seeds: tuple[int, ...]
    wrt: tuple[int, ...]

    @cached_property
    def activation_bytes(self) -> int:
        """Of what a microbatch's forward pass keeps for its backward pass where it keeps all, beside operands."""
        if not self.joint:
            return 0
        graph, made, read = self.joint[0], set[int](), set[int]()
        for node in graph.nodes:
            if node.phase == "backward":
                read.update(v for v in node.operands if isinstance(v, int))
            else:
                made.update(node.results)
        return sum(graph.values[v].size_bytes for v in made & read)

    def verify(self) -> None:
        """Raises VerifyError where graphs disagree about operands, results and cotangents."""
        types, results = self.forward.values, self.forward.outputs
        self.forward.verify()
        for graph in self.joint:
            graph.verify()
            if len(graph.inputs) != len(self.forward.inputs) + len(self.seeds):
                raise VerifyError(f"a joint graph takes {len(graph.inputs)} values")
            if len(graph.outputs) != len(results) + len(self.wrt):
                raise VerifyError(f"a joint graph gives {len(graph.outputs)} values")
            given = [graph.values[v] for v in graph.inputs[: len(self.forward.inputs)]]
            if given != [types[v] for v in self.forward.inputs]:
                raise VerifyError("a joint graph's operands have other types than the forward pass's")
            if any(not 0 <= i < len(results) for i in self.seeds):
                raise VerifyError(f"a joint graph's cotangents are of results {self.seeds} of {len(results)}")
            if any(not 0 <= i < len(self.forward.inputs) for i in self.wrt):
                raise VerifyError(f"a joint graph gives cotangents of operands {self.wrt}")
            phases = [node.phase == "backward" for node in graph.nodes]
            if sorted(phases) != phases:
                raise VerifyError("nodes of the forward pass follow the backward pass")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """``operands`` and ``results`` are values of the LayeredGraph, in the order of the kind's inputs and outputs.
    ``name`` is for people; ``sources`` are the user's lines it begins and ends with."""

    kind: int
    operands: tuple[int, ...]
    results: tuple[int, ...]
    name: str = ""
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Value ``value`` is rows ``start`` to ``stop`` of argument ``argument``: what one layer of a scan reads of
    stacked parameters. Its gradient, and its part of the update, are the same rows."""

    value: int
    argument: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What says how to go about a step in layers, which takes little to find out: ``layers[k]`` is what layer k
    computes, one object of equal layers; ``arguments`` and ``trained`` are types of what the step is given, and of what
    it takes gradients by, if it does (``trains``)."""

    layers: tuple[LayerKind, ...]
    arguments: tuple[TensorType, ...]
    trained: tuple[TensorType, ...]
    trains: bool


@dataclass(frozen=True, kw_only=True)
class LayeredGraph:
    """A step in layers, for ``num_microbatches``.

    Attributes:
        values: types, as one microbatch has them; arguments that carry no batch are whole.
        arguments: value of each flat argument of the step (closed-over constants first), as ``arg_paths`` names them;
            −1 for one that no layer reads as such. A trained argument that layers read by rows has one all the same.
        argument_types: types of the whole arguments.
        per_microbatch: flags arguments of which a microbatch reads its examples.
        slices: values that are rows of arguments.
        layers, kinds: see above; layers in order of execution.
        loss: the value that is differentiated; −1 where nothing is.
        trained: values that the update takes gradients by, in order: arguments, or values of ``before``. The gradient
            of an argument that is read by rows is put together from those of its `Slice`s.
        update: what runs once a step. Inputs: gradients of ``trained``, then ``combined``, then all arguments.
            Outputs: the step's. Its ``state`` and ``donated`` say whose new values they are.
        combined: results of layers, loss first, that the update takes after combining over microbatches.
        update_layers: per node of ``update``: the layers whose stages run it. Several for scalars and for what is made
            of scalars alone: all compute the same. Several also for what belongs to arguments that are read by rows:
            each layer works on the rows that it reads, and a scalar that is reduced from them (``reduce_sum``,
            ``reduce_max``, ``reduce_min``) is then a part, to be combined by that operator. Where such an argument's
            update does not treat rows apart, it is one layer's, which needs the whole gradient.
        before: what runs once a step, before the layers: arguments → ``before_values``. Every stage computes for itself
            what its layers read of these (keys, scalars, casts outside the loss; for microbatches also what takes the
            whole batch, the denominator of a masked mean say).
        before_per_microbatch: flags those of which a microbatch reads its examples.
        index: the value that is the microbatch's number, int32 scalar; −1 where no layer asks.
        examples: (value, dimension) of the values that are a microbatch's examples: along which dimension they lie.
    """

    name: str
    num_microbatches: int
    values: tuple[TensorType, ...]
    arguments: tuple[int, ...]
    argument_types: tuple[TensorType, ...]
    arg_paths: tuple[str, ...]
    per_microbatch: tuple[bool, ...]
    slices: tuple[Slice, ...]
    kinds: tuple[LayerKind, ...]
    layers: tuple[Layer, ...]
    loss: int
    trained: tuple[int, ...]
    combined: tuple[int, ...]
    update: Graph
    update_layers: tuple[tuple[int, ...], ...]
    fingerprint: str
    before: Graph | None = None
    before_values: tuple[int, ...] = ()
    before_per_microbatch: tuple[bool, ...] = ()
    index: int = -1
    examples: tuple[tuple[int, int], ...] = ()

    @property
    def outline(self) -> Outline:
        """As it is without the update."""
        return Outline(
            layers=tuple(self.kinds[layer.kind] for layer in self.layers), arguments=self.argument_types,
            trained=tuple(self.values[v] for v in self.trained), trains=self.loss >= 0,
        )  # fmt: skip

    def _verify_numbers(self) -> None:
        if self.num_microbatches < 1:
            raise VerifyError(f"{self.num_microbatches} microbatches")
        count = len(self.arguments)
        if not len(self.argument_types) == len(self.arg_paths) == len(self.per_microbatch) == count:
            raise VerifyError("arguments, their types, paths and flags differ in number")
        if len(self.before_per_microbatch) != len(self.before_values):
            raise VerifyError("before_values and their flags differ in number")
        made = [v for layer in self.layers for v in (*layer.operands, *layer.results)]
        given = [*self.before_values, *(s.value for s in self.slices), *self.trained, *self.combined]
        for v in (*made, *given):
            if not 0 <= v < len(self.values):
                raise VerifyError(f"value {v} of {len(self.values)}, which does not exist")
        for v in (*self.arguments, self.index, self.loss):
            if not -1 <= v < len(self.values):
                raise VerifyError(f"value {v} of {len(self.values)}, which does not exist")
        for s in self.slices:
            shape = self.argument_types[s.argument].shape if 0 <= s.argument < count else ()
            if not (shape and 0 <= s.start < s.stop <= shape[0]):
                raise VerifyError(f"value {s.value} is rows {s.start} to {s.stop} of argument {s.argument}")
        if self.before is not None and len(self.before.inputs) != count:
            raise VerifyError("what is before the layers does not take the arguments")
        for number, layer in enumerate(self.layers):
            forward = self.kinds[layer.kind].forward if 0 <= layer.kind < len(self.kinds) else None
            if forward is None:
                raise VerifyError(f"layer {number} {layer.name}: kind {layer.kind} of {len(self.kinds)}")
            if (len(layer.operands), len(layer.results)) != (len(forward.inputs), len(forward.outputs)):
                raise VerifyError(f"layer {number} {layer.name}: operands or results are not its kind's")

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """All graphs that it runs: what is before the layers, each kind's passes, the update."""
        passes = (graph for kind in self.kinds for graph in (kind.forward, *kind.joint))
        return (*(() if self.before is None else (self.before,)), *passes, self.update)

    @cached_property
    def makers(self) -> dict[int, int]:
        """Value → the layer that makes it."""
        return {v: k for k, layer in enumerate(self.layers) for v in layer.results}

    @cached_property
    def users(self) -> dict[int, tuple[int, ...]]:
        """Value → layers that read it, in order."""
        out: dict[int, list[int]] = {}
        for k, layer in enumerate(self.layers):
            for v in dict.fromkeys(layer.operands):
                out.setdefault(v, []).append(k)
        return {v: tuple(found) for v, found in out.items()}

    @cached_property
    def updates(self) -> tuple[tuple[int, ...], ...]:
        """Layer → the positions of the nodes of ``update`` that its stage runs."""
        out: list[list[int]] = [[] for _ in self.layers]
        for p, where in enumerate(self.update_layers):
            for k in where:
                out[k].append(p)
        return tuple(map(tuple, out))

    @cached_property
    def state(self) -> tuple[tuple[int, int], ...]:
        """(argument, output) pairs of the step: the output is the argument's new value, and has its sharding."""
        first = len(self.trained) + len(self.combined)
        return tuple((i - first, j) for i, j in self.update.state)

    @cached_property
    def state_of(self) -> dict[int, int]:
        """Output of the step → the argument whose new value it is."""
        return {j: a for a, j in self.state}

    @cached_property
    def donated(self) -> frozenset[int]:
        """Arguments whose buffer the new value takes."""
        first = len(self.trained) + len(self.combined)
        return frozenset(i - first for i in self.update.donated)

    @cached_property
    def consumed(self) -> frozenset[int]:
        """Arguments whose memory the step takes: donated, and not returned as they are."""
        first, stays = len(self.trained) + len(self.combined), set(self.update.outputs)
        return frozenset(a for a in self.donated if self.update.inputs[first + a] not in stays)

    @cached_property
    def argument_of(self) -> dict[int, tuple[int, int, int]]:
        """Value → (argument, first row, last row + 1) that it is; rows 0, 0 for all of it."""
        whole = {v: (a, 0, 0) for a, v in enumerate(self.arguments) if v >= 0}
        return whole | {s.value: (s.argument, s.start, s.stop) for s in self.slices}

    @cached_property
    def value_of(self) -> dict[tuple[int, int, int], int]:
        """The inverse of ``argument_of``; of several values the first."""
        return {where: v for v, where in reversed(self.argument_of.items())}

    @cached_property
    def gradients(self) -> dict[int, tuple[int, bool]]:
        """Value whose cotangents are summed over microbatches, of ``trained`` and then of rows of these → (the value
        of ``update`` that its gradient is, or is rows of; is it rows), in the order that stages carry the sums."""
        if self.loss < 0:
            return {}
        out = {v: (self.update.inputs[i], False) for i, v in enumerate(self.trained)}
        of = {self.argument_of[v][0]: slot for v, (slot, _) in out.items() if v in self.argument_of}
        return out | {s.value: (of[s.argument], True) for s in self.slices if s.argument in of}

    @cached_property
    def _sum_places(self) -> dict[int, int]:
        return {v: i for i, v in enumerate(self.gradients)}

    def summed(self, values: Iterable[int]) -> list[int]:
        """Those of ``values`` that are in ``gradients``, in its order."""
        return sorted(self._sum_places.keys() & set(values), key=self._sum_places.__getitem__)

    @cached_property
    def slices_of(self) -> dict[int, dict[int, Slice]]:
        """Argument → layer → the rows that it reads."""
        out: dict[int, dict[int, Slice]] = {}
        for each in self.slices:
            for k in self.users.get(each.value, ()):
                out.setdefault(each.argument, {})[k] = each
        return out

    @cached_property
    def rows_together(self) -> dict[frozenset[int], tuple[int, dict[int, Slice]]]:
        """Layers that read an argument by rows → (how many rows it has, which each reads)."""
        return {frozenset(found): (self.argument_types[a].shape[0], found) for a, found in self.slices_of.items()}

    @cached_property
    def update_slots(self) -> dict[int, int]:
        """Value of ``update`` → which of its inputs it is."""
        return {v: i for i, v in enumerate(self.update.inputs)}

    @cached_property
    def update_outputs(self) -> dict[int, tuple[int, ...]]:
        """Value of ``update`` → which of its outputs it is."""
        out: dict[int, list[int]] = {}
        for j, o in enumerate(self.update.outputs):
            if isinstance(o, int):
                out.setdefault(o, []).append(j)
        return {v: tuple(found) for v, found in out.items()}

    @cached_property
    def update_elsewhere(self) -> dict[int, frozenset[int]]:
        """Value that a node of ``update`` makes → layers that have a node that reads it and do not have that one."""
        layers, readers, out = self.update_layers, self.update_readers, dict[int, frozenset[int]]()
        for node, makers in zip(self.update.nodes, layers, strict=True):
            for r in node.results:
                if apart := frozenset(k for q in readers.get(r, ()) for k in layers[q]).difference(makers):
                    out[r] = apart
        return out

    @cached_property
    def update_readers(self) -> dict[int, tuple[int, ...]]:
        """Value of ``update`` → positions of the nodes that read it."""
        out: dict[int, list[int]] = {}
        for p, node in enumerate(self.update.nodes):
            for o in node.operands:
                if isinstance(o, int):
                    out.setdefault(o, []).append(p)
        return {v: tuple(found) for v, found in out.items()}

    def verify(self) -> None:
        """Raises VerifyError where layers do not fit their kinds, what is told of arguments or of values is of others
        than there are, or a value is used before it is made."""
        for kind in self.kinds:
            kind.verify()
        self.update.verify()
        if self.before is not None:
            self.before.verify()
        known = {v for v in self.arguments if v >= 0} | {s.value for s in self.slices} | set(self.before_values)
        known |= {self.index} if self.index >= 0 else set()
        self._verify_numbers()
        if len(self.before_values) != (len(self.before.outputs) if self.before is not None else 0):
            raise VerifyError("before_values are not what is computed before the layers")
        for v, dim in self.examples:
            if v not in known or not 0 <= dim < len(self.values[v].shape):
                raise VerifyError(f"examples: value {v} is no input of the layers with a dimension {dim}")
        for number, layer in enumerate(self.layers):
            forward = self.kinds[layer.kind].forward
            for v, slot in zip(layer.operands, forward.inputs, strict=True):
                if v not in known:
                    raise VerifyError(f"layer {number} {layer.name}: reads value {v} before it is made")
                if self.values[v] != forward.values[slot]:
                    raise VerifyError(f"layer {number} {layer.name}: value {v} is {self.values[v]}")
            for v in layer.results:
                if v in known:
                    raise VerifyError(f"layer {number} {layer.name}: value {v} is made twice")
                known.add(v)
        for v in (*self.trained, *self.combined):
            if v not in known:
                raise VerifyError(f"value {v} goes into the update and is never made")
        if len(self.update.inputs) != len(self.trained) + len(self.combined) + len(self.arguments):
            raise VerifyError("the update does not take gradients, combined results and arguments")
        if len(self.update_layers) != len(self.update.nodes):
            raise VerifyError("update_layers does not say where each node of the update runs")
        if any(not 0 <= k < len(self.layers) for where in self.update_layers for k in where):
            raise VerifyError("a node of the update runs in a layer that does not exist")


def layered_fingerprint(graph: LayeredGraph) -> str:
    """`LayeredGraph.fingerprint`: of the fingerprints of all its graphs, of what layers read and give."""
    digest = hashlib.sha256()
    for layer in graph.layers:
        kind = graph.kinds[layer.kind]
        passes = [g.fingerprint for g in (kind.forward, *kind.joint)]
        digest.update(repr((layer.kind, layer.operands, layer.results, passes)).encode())
    update = graph.update
    told = (update.fingerprint, update.state, graph.trained, graph.arg_paths, graph.num_microbatches)
    digest.update(repr(told).encode())
    if graph.before is not None and graph.before_values:
        digest.update(repr((graph.before.fingerprint, list(graph.before_values))).encode())
    return digest.hexdigest()


PortPhase: TypeAlias = Literal["before", "forward", "backward", "gradient", "update"]
"""When a value crosses between stages; see `ir.pipeline.CutPhase`. ``before``: once a step, before the layers; every
stage computes it for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One end of what crosses: ``value`` of the step (of ``update``: a value of its graph), in which phase, and
    the operator: position in the loop's body, or in the stage's graph where it crosses once a step. ``stored`` is the
    value in that graph."""

    value: int
    phase: PortPhase
    node: int
    stored: int
    type: TensorType


Origin: TypeAlias = tuple[int, int]
"""(layer, equation) that a node of a stage's graph is a copy of. In the loop's body: the equation of the joint jaxpr
(of the forward one, where nothing is differentiated) of that layer's kind. Once a step: the equation of the update,
with its layer where every layer has its own, on its rows, else −1."""
MADE: Origin = (-1, -1)
"""What no equation stands for: the loop, ports, sums."""


@dataclass(frozen=True, kw_only=True)
class StageGraph:
    """``graph``'s only loop is at position ``loop``. ``boundary`` is the position in its body where the backward pass
    begins. ``inputs`` are the step's arguments (or slices: (argument, start, stop)) behind the graph's inputs,
    ``input_values`` the values of these that layers read, −1 for what only the update reads. ``origins`` say where the
    graph's nodes come from, ``body_origins`` those of the loop's body."""

    start: int
    stop: int
    graph: Graph
    loop: int
    boundary: int
    inputs: tuple[tuple[int, int, int], ...]
    input_values: tuple[int, ...]
    receives: tuple[Port, ...]
    sends: tuple[Port, ...]
    origins: tuple[Origin, ...]
    body_origins: tuple[Origin, ...]

    @property
    def body(self) -> Graph:
        """The body of its loop: what runs for every microbatch."""
        return self.graph.nodes[self.loop].bodies[0]
