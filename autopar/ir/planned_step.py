"""The step that a plan is of, as planning had it: what it takes to plan it again, and to tell that the plan is its.

`verify_shardings` and `verify_layers` hold a plan's decisions against the graph that they are about.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.ir.cluster import Platform
from autopar.ir.errors import VerifyError
from autopar.ir.graph import Graph, Operand, TensorType
from autopar.ir.layers import LayeredGraph
from autopar.ir.pipelined import PlannedLayer
from autopar.ir.sharding import Pin, ShardingSpec
from autopar.ir.sharding_plan import RegionPlan, ShardingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A step, and what planning knew of it. With a cluster and a plan's configuration this is all that planning takes.

    Attributes:
        graph: of one program, as it was traced: what `ShardingPlan.recompute` says is not carried out in it. Of stages,
            the step in layers.
        user_rules: sharding rules by name that its operators have: (primitive or ffi target, text).
        batch_inputs: of one program, (position among the graph's inputs, dimension) of those that carry the batch.
        metadata: pins that a model library keeps beside its parameters.
        undoes_remat: platforms whose compiler merges again what is computed twice.
        freely: of one program, True where only plans were looked for that the limit on memory does not slow.
        follows: True where arguments lie where another plan has them.
        notes: of tracing.
    """

    graph: Graph | LayeredGraph
    user_rules: tuple[tuple[str, str], ...] = ()
    batch_inputs: tuple[tuple[int, int], ...] = ()
    metadata: tuple[Pin, ...] = ()
    undoes_remat: tuple[Platform, ...] = ()
    freely: bool = False
    follows: bool = False
    notes: tuple[str, ...] = ()

    @property
    def arguments(self) -> Iterator[tuple[str, TensorType]]:
        """Path and type of each flat argument, closed-over constants first."""
        match self.graph:
            case Graph() as graph:
                return zip(graph.arg_paths, (graph.values[v] for v in graph.inputs), strict=True)
            case LayeredGraph() as layered:
                return zip(layered.arg_paths, layered.argument_types, strict=True)

    @property
    def results(self) -> Iterator[tuple[str, TensorType]]:
        """Path and type of each flat result."""
        graph = self.graph if isinstance(self.graph, Graph) else self.graph.update
        return zip(graph.out_paths, (_type(o, graph) for o in graph.outputs), strict=True)

    @property
    def new_values(self) -> dict[int, int]:
        """Flat argument → the result that is its new value."""
        return dict(self.graph.state)

    def verify(self) -> None:
        """Raises VerifyError where the graph is malformed, or the batch's dimensions are of inputs that it does not
        have."""
        self.graph.verify()
        whole = self.graph if isinstance(self.graph, Graph) else self.graph.update
        if len(whole.arg_paths) != len(whole.inputs) or len(whole.out_paths) != len(whole.outputs):
            raise VerifyError("the step's graph does not name all arguments and results")
        for i, dim in self.batch_inputs:
            known = isinstance(self.graph, Graph) and 0 <= i < len(self.graph.inputs)
            if not known or not 0 <= dim < len(whole.values[whole.inputs[i]].shape):
                raise VerifyError(f"no input {i} of the step has a dimension {dim}, along which the batch would lie")


def verify_layers(planned: Sequence[PlannedLayer], layered: LayeredGraph) -> None:
    """Raises VerifyError unless ``planned`` are the layers of ``layered``, and read and give values that it has."""
    if len(planned) != len(layered.layers):
        raise VerifyError(f"the plan has {len(planned)} layers, its graph {len(layered.layers)}")
    for k, (mine, layer) in enumerate(zip(planned, layered.layers, strict=True)):
        if (mine.name, mine.kind, mine.sources) != (layer.name, layer.kind, layer.sources):
            raise VerifyError(f"layer {k} is {mine.name} in the plan, {layer.name} in its graph, or of another kind")


def verify_shardings(sharding: ShardingPlan, graph: Graph) -> None:
    """Raises VerifyError unless ``sharding`` is of ``graph``'s nodes: each has a strategy, or a region for each of its
    bodies, with as many shardings of as many dimensions as it has operands and results. Where values are computed
    again, the nodes of their graph are more than it has, and only what is to be computed again is looked at."""
    again: dict[tuple[int, ...], list[int]] = {}
    for row in sharding.recompute:
        again.setdefault(row.path, []).append(row.value)
        at = graph
        for position in row.path:
            if not 0 <= position < len(at.nodes) or not at.nodes[position].bodies:
                raise VerifyError(f"recomputed value {row.value}: node {position} on the way to it has no body")
            at = at.nodes[position].bodies[0]
        if not 0 <= row.value < len(at.values) or not all(0 <= p < len(at.nodes) for p in row.consumers):
            raise VerifyError(f"value {row.value}, or one of its readers {row.consumers}, does not exist")

    def check(region: RegionPlan, graph: Graph, path: tuple[int, ...], where: str) -> None:
        inside = any(p[: len(path)] == path for p in again)
        _specs_fit(region.inputs, [graph.values[v] for v in graph.inputs], f"{where}, inputs")
        _specs_fit(region.outputs, [_type(o, graph) for o in graph.outputs], f"{where}, outputs")
        if inside:
            return
        if len(region.nodes) != len(graph.nodes):
            raise VerifyError(f"{where}: decisions for {len(region.nodes)} nodes, the graph has {len(graph.nodes)}")
        for value, spec in (*region.rebased, *region.copies):
            if not 0 <= value < len(graph.values):
                raise VerifyError(f"{where}: a sharding of value {value}, which does not exist")
            _specs_fit([spec], [graph.values[value]], f"{where}, value {value}")
        bodies = dict(region.bodies)
        for position, (number, node) in enumerate(zip(region.nodes, graph.nodes, strict=True)):
            if (number < 0) != bool(node.bodies) or len(bodies.get(position, ())) != len(node.bodies):
                raise VerifyError(f"{where}: {node} has {len(node.bodies)} bodies, other than its decisions say")
            if number >= 0:
                strategy = sharding.strategies[number]
                _specs_fit(strategy.operands, node.operand_types, f"{where}, operands of {node}")
                _specs_fit(strategy.results, node.result_types, f"{where}, results of {node}")
            for body, inner in zip(bodies.get(position, ()), node.bodies, strict=True):
                check(body, inner, (*path, position), f"{where}.{position}")

    check(sharding.root, graph, (), "step")


def _specs_fit(specs: Sequence[ShardingSpec], types: Sequence[TensorType], where: str) -> None:
    if [len(spec.dims) for spec in specs] != [len(t.shape) for t in types]:
        raise VerifyError(f"{where}: shardings {', '.join(map(str, specs))} are not of {', '.join(map(str, types))}")


def _type(operand: Operand, graph: Graph) -> TensorType:
    return graph.values[operand] if isinstance(operand, int) else operand.type
