"""Graphs as plan files have them: what occurs often is stored once.

A deep step is the same operators over and over, on other values. So a file has a table of the operators that differ in
more than that. A node is its operator and operands, each a value's id or, below 0, constant −1 − o; of what repeats an
earlier node only that is said (`ir.repetitions`). What follows from the rest is not stored: ids (nodes are numbered in
order; values are the inputs, then all results), the types of operands and, of graphs as they were traced, digests and
fingerprints, which are thus those of what the file says. So a file grows with the number of distinct layers; with that
of all layers only by what they read and give, and by the names of arguments.

`stored` and `stored_layers` → `graph_of` and `layers_of`. Reading raises VerifyError where a number is out of its
table's range; agreement inside a graph is `Graph.verify`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar, cast

from autopar.ir.errors import VerifyError
from autopar.ir.graph import (
    Constant,
    Graph,
    Json,
    Node,
    Operand,
    Phase,
    TensorType,
    graph_fingerprint,
    node_digest,
    one_nan,
    types_text,
)
from autopar.ir.layers import Layer, LayeredGraph, LayerKind, Slice, layered_fingerprint
from autopar.ir.repetitions import folded, shortened, spelled_out, unfolded

T = TypeVar("T")
Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Numbers in order as ranges, (start, stop) each."""
_NUMBER = "$number"
"""The only key of an object that stands for a number that JSON does not have; its value is Python's text of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredConstant:
    """``value`` is a text, Python's, for what is no number of JSON: infinities, NaN, complex numbers."""

    type: int
    value: bool | int | float | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredOperator:
    """A `Node` without operands and results: types, bodies and ``hidden`` (−1: none) by their numbers."""

    primitive: str
    params: dict[str, Any]
    result_types: tuple[int, ...]
    bodies: tuple[int, ...]
    phase: Phase
    source: str
    hidden: int
    hidden_runs: int
    flops: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGraph:
    """A graph: the types of its inputs, ``length`` nodes by their rows. ``digests`` of its nodes, and ``fingerprint``,
    where they do not follow from what is stored; else empty."""

    inputs: tuple[int, ...]
    length: int
    nodes: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    arg_paths: Runs
    out_paths: Runs
    state: tuple[tuple[int, int], ...]
    donated: tuple[int, ...]
    digests: tuple[str, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """What graphs refer to by number. A graph's bodies are graphs before it."""

    types: tuple[TensorType, ...]
    constants: tuple[StoredConstant, ...]
    paths: tuple[tuple[int, str], ...]
    """Of each how many of its characters the one before begins with, too, and the others."""
    operators: tuple[StoredOperator, ...]
    graphs: tuple[StoredGraph, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWhole:
    """A whole step's graph: the last of the table."""

    tables: Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKind:
    """A `LayerKind`, its graphs by number."""

    forward: int
    joint: tuple[int, ...]
    seeds: tuple[int, ...]
    wrt: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayers:
    """A `LayeredGraph`: types and graphs by number, flags as the positions of those that are set. ``update_layers`` are
    numbers among ``owners``."""

    tables: Tables
    name: str
    num_microbatches: int
    values: tuple[int, ...]
    arguments: tuple[int, ...]
    argument_types: tuple[int, ...]
    arg_paths: Runs
    per_microbatch: tuple[int, ...]
    slices: tuple[Slice, ...]
    kinds: tuple[StoredKind, ...]
    layers: tuple[Layer, ...]
    loss: int
    trained: tuple[int, ...]
    combined: tuple[int, ...]
    update: int
    owners: tuple[tuple[int, ...], ...]
    update_layers: tuple[int, ...]
    fingerprint: str
    before: int | None
    before_values: tuple[int, ...]
    before_per_microbatch: tuple[int, ...]
    index: int
    examples: tuple[tuple[int, int], ...]


def stored(graph: Graph) -> StoredWhole:
    """``graph`` as it is stored. Raises VerifyError where nodes or values are not numbered in order, or a node's
    operands have other types than their values."""
    writer = _Writer()
    writer.graph(graph)
    return StoredWhole(tables=writer.tables())


def graph_of(whole: StoredWhole) -> Graph:
    """The graph that `stored` was given. Raises VerifyError where the tables are no graph's."""
    graphs = _Reader(whole.tables).graphs
    return _at(graphs, len(graphs) - 1, "graph", "the step")


def stored_layers(layered: LayeredGraph) -> StoredLayers:
    """``layered`` as it is stored. Raises VerifyError as `stored` does."""
    writer = _Writer()
    before = None if layered.before is None else writer.graph(layered.before)
    kinds = tuple(
        StoredKind(
            forward=writer.graph(kind.forward), joint=tuple(map(writer.graph, kind.joint)), seeds=kind.seeds,
            wrt=kind.wrt,
        )
        for kind in layered.kinds
    )  # fmt: skip
    update = writer.graph(layered.update)
    owners: dict[tuple[int, ...], int] = {}
    update_layers = tuple(_number(owners, where) for where in layered.update_layers)
    return StoredLayers(
        name=layered.name,
        num_microbatches=layered.num_microbatches,
        values=writer.types_of(layered.values),
        arguments=layered.arguments,
        argument_types=writer.types_of(layered.argument_types),
        arg_paths=writer.paths_of(layered.arg_paths),
        per_microbatch=_set(layered.per_microbatch),
        slices=layered.slices,
        kinds=kinds,
        layers=layered.layers,
        loss=layered.loss,
        trained=layered.trained,
        combined=layered.combined,
        update=update,
        owners=tuple(owners),
        update_layers=update_layers,
        fingerprint="" if layered.fingerprint == layered_fingerprint(layered) else layered.fingerprint,
        before=before,
        before_values=layered.before_values,
        before_per_microbatch=_set(layered.before_per_microbatch),
        index=layered.index,
        examples=layered.examples,
        tables=writer.tables(),
    )


def layers_of(layers: StoredLayers) -> LayeredGraph:
    """The step in layers that `stored_layers` was given. Raises VerifyError where a number is of nothing that there
    is."""
    reader = _Reader(layers.tables)

    def graph(number: int, where: str) -> Graph:
        return _at(reader.graphs, number, "graph", where)

    kinds = tuple(
        LayerKind(
            forward=graph(kind.forward, f"kind {k}"),
            joint=tuple(graph(number, f"kind {k}") for number in kind.joint),
            seeds=kind.seeds,
            wrt=kind.wrt,
        )
        for k, kind in enumerate(layers.kinds)
    )
    for k, layer in enumerate(layers.layers):
        _at(kinds, layer.kind, "kind", f"layer {k} {layer.name}")
    made = LayeredGraph(
        name=layers.name,
        num_microbatches=layers.num_microbatches,
        values=reader.types_of(layers.values, "values"),
        arguments=layers.arguments,
        argument_types=reader.types_of(layers.argument_types, "argument_types"),
        arg_paths=reader.paths_of(layers.arg_paths, "arg_paths"),
        per_microbatch=_flags(layers.per_microbatch, len(layers.arguments), "per_microbatch"),
        slices=layers.slices,
        kinds=kinds,
        layers=layers.layers,
        loss=layers.loss,
        trained=layers.trained,
        combined=layers.combined,
        update=graph(layers.update, "update"),
        update_layers=tuple(_at(layers.owners, n, "owner", "update_layers") for n in layers.update_layers),
        fingerprint=layers.fingerprint,
        before=None if layers.before is None else graph(layers.before, "before"),
        before_values=layers.before_values,
        before_per_microbatch=_flags(
            layers.before_per_microbatch, len(layers.before_values), "before_per_microbatch"
        ),
        index=layers.index,
        examples=layers.examples,
    )  # fmt: skip
    return made if made.fingerprint else replace(made, fingerprint=layered_fingerprint(made))


class _Writer:
    """The tables while they grow."""

    def __init__(self) -> None:
        self._types: dict[TensorType, int] = {}
        self._constants: dict[tuple[int, str], tuple[int, StoredConstant]] = {}
        self._paths: dict[str, int] = {}
        self._operators: dict[tuple[object, ...], tuple[int, StoredOperator]] = {}
        self._graphs: dict[StoredGraph, int] = {}
        self._texts: dict[int, tuple[dict[str, Any], str]] = {}
        """Text of parameters, by the id of the dictionary that nodes share."""

    def tables(self) -> Tables:
        """All that was referred to."""
        return Tables(
            types=tuple(self._types),
            constants=tuple(constant for _, constant in self._constants.values()),
            paths=shortened(list(self._paths)),
            operators=tuple(operator for _, operator in self._operators.values()),
            graphs=tuple(self._graphs),
        )

    def types_of(self, types: Iterable[TensorType]) -> tuple[int, ...]:
        """Their numbers."""
        return tuple(_number(self._types, t) for t in types)

    def paths_of(self, paths: Iterable[str]) -> Runs:
        """Their numbers, as ranges."""
        out: list[tuple[int, int]] = []
        for number in (_number(self._paths, path) for path in paths):
            if out and out[-1][1] == number:
                out[-1] = out[-1][0], number + 1
            else:
                out.append((number, number + 1))
        return tuple(out)

    def graph(self, graph: Graph) -> int:
        """The number of ``graph``, its bodies before it. Raises VerifyError as `stored`."""
        order = [*graph.inputs, *(r for node in graph.nodes for r in node.results)]
        if order != list(range(len(graph.values))):
            raise VerifyError("a graph's values are not numbered in order: its inputs, then the results of its nodes")
        rows: list[tuple[int, ...]] = []
        digests: list[str] = []
        traced = True
        for position, node in enumerate(graph.nodes):
            types = tuple(graph.values[o] if isinstance(o, int) else o.type for o in node.operands)
            if node.id != position or node.operand_types != types:
                raise VerifyError(f"{node} is node {position}; its operands are {', '.join(map(str, types))}")
            if node.result_types != tuple(graph.values[r] for r in node.results):
                raise VerifyError(f"{node}: its results have other types than their values")
            rows.append((self._operator(node), *map(self._operand, node.operands)))
            digests.append(node.digest)
            text = types_text(node.result_types)
            traced &= node.digest == node_digest(
                node.primitive, self._text(node.params), node.operands, text, node.bodies
            )
        told = graph_fingerprint(graph.values, graph.nodes, graph.inputs, graph.outputs, graph.arg_paths)
        made = StoredGraph(
            inputs=self.types_of(graph.values[v] for v in graph.inputs),
            length=len(rows),
            nodes=folded(rows),
            outputs=tuple(map(self._operand, graph.outputs)),
            arg_paths=self.paths_of(graph.arg_paths),
            out_paths=self.paths_of(graph.out_paths),
            state=graph.state,
            donated=graph.donated,
            digests=() if traced else tuple(digests),
            fingerprint="" if graph.fingerprint == told else graph.fingerprint or "none",
        )
        return _number(self._graphs, made)

    def _operand(self, operand: Operand) -> int:
        if isinstance(operand, int):
            return operand
        # 0, 0.0, −0.0 and False are equal, and not the same
        key = _number(self._types, operand.type), repr(operand.value)
        found = self._constants.get(key)
        if found is None:
            value = operand.value
            text = isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value))
            constant = StoredConstant(type=key[0], value=repr(value) if text else cast("bool | float", value))
            found = self._constants[key] = len(self._constants), constant
        return -1 - found[0]

    def _operator(self, node: Node) -> int:
        types, bodies = self.types_of(node.result_types), tuple(map(self.graph, node.bodies))
        hidden = -1 if node.hidden is None else self.graph(node.hidden)
        key = (
            node.primitive, self._text(node.params), types, bodies, node.phase, node.source, hidden, node.hidden_runs,
            node.flops,
        )  # fmt: skip
        found = self._operators.get(key)
        if found is None:
            operator = StoredOperator(
                primitive=node.primitive, params={k: _plain(v) for k, v in node.params.items()}, result_types=types,
                bodies=bodies, phase=node.phase, source=node.source, hidden=hidden, hidden_runs=node.hidden_runs,
                flops=node.flops,
            )  # fmt: skip
            found = self._operators[key] = len(self._operators), operator
        return found[0]

    def _text(self, params: dict[str, Any]) -> str:
        found = self._texts.get(id(params))
        if found is None:
            found = self._texts[id(params)] = params, repr(params)
        return found[1]


class _Reader:
    """The graphs of the tables, ``graphs``. Raises VerifyError where a number is out of range."""

    def __init__(self, tables: Tables) -> None:
        self.graphs: list[Graph] = []
        self._tables = tables
        for value_type in tables.types:
            value_type.verify()
        self._paths = spelled_out(tables.paths)
        self._constants = [
            Constant(type=_at(tables.types, c.type, "type", f"constant {k}"), value=_value(c.value, f"constant {k}"))
            for k, c in enumerate(tables.constants)
        ]
        self._results = [
            self.types_of(operator.result_types, f"operator {k}, {operator.primitive}")
            for k, operator in enumerate(tables.operators)
        ]
        self._params = [{k: _value_in(v) for k, v in operator.params.items()} for operator in tables.operators]
        self._texts = [(repr(p), types_text(r)) for p, r in zip(self._params, self._results, strict=True)]
        for number, graph in enumerate(tables.graphs):
            self.graphs.append(self._graph(graph, f"graph {number}"))

    def types_of(self, numbers: Iterable[int], where: str) -> tuple[TensorType, ...]:
        """The types of those numbers."""
        return tuple(_at(self._tables.types, number, "type", where) for number in numbers)

    def paths_of(self, runs: Runs, where: str) -> tuple[str, ...]:
        """The paths of those numbers."""
        for start, stop in runs:
            if not 0 <= start < stop <= len(self._paths):
                raise VerifyError(f"{where}: no paths {start} to {stop} of {len(self._paths)}")
        return tuple(path for start, stop in runs for path in self._paths[start:stop])

    def _graph(self, graph: StoredGraph, where: str) -> Graph:
        values = list(self.types_of(graph.inputs, where))
        inputs = tuple(range(len(values)))
        nodes: list[Node] = []
        if graph.digests and len(graph.digests) != graph.length:
            raise VerifyError(f"{where}: {len(graph.digests)} digests of {graph.length} nodes")
        for position, row in enumerate(unfolded(graph.nodes, graph.length, where)):
            nodes.append(self._node(position, row, values, graph.digests, where))
            values += nodes[-1].result_types
        outputs = tuple(self._operand(o, values, f"{where}, outputs") for o in graph.outputs)
        paths = self.paths_of(graph.arg_paths, where)
        told = graph.fingerprint or graph_fingerprint(values, nodes, inputs, outputs, paths)
        return Graph(
            values=tuple(values),
            nodes=tuple(nodes),
            inputs=inputs,
            outputs=outputs,
            arg_paths=paths,
            out_paths=self.paths_of(graph.out_paths, where),
            state=graph.state,
            donated=graph.donated,
            fingerprint="" if told == "none" else told,
        )

    def _node(
        self, position: int, row: tuple[int, ...], values: list[TensorType], digests: Sequence[str], where: str
    ) -> Node:
        where = f"{where}, node {position}"
        operator = _at(self._tables.operators, row[0], "operator", where)
        operands = tuple([self._operand(o, values, where) for o in row[1:]])
        results, params = self._results[row[0]], self._params[row[0]]
        params_text, results_text = self._texts[row[0]]
        bodies = tuple([_at(self.graphs, b, "graph before it", where) for b in operator.bodies])
        return Node(
            id=position,
            primitive=operator.primitive,
            params=params,
            operands=operands,
            results=tuple(range(len(values), len(values) + len(results))),
            operand_types=tuple([values[o] if isinstance(o, int) else o.type for o in operands]),
            result_types=results,
            bodies=bodies,
            phase=operator.phase,
            source=operator.source,
            digest=digests[position] if digests else node_digest(
                operator.primitive, params_text, operands, results_text, bodies
            ),
            hidden=None if operator.hidden == -1 else _at(self.graphs, operator.hidden, "graph before it", where),
            hidden_runs=operator.hidden_runs,
            flops=operator.flops,
        )  # fmt: skip

    def _operand(self, number: int, values: Sequence[TensorType], where: str) -> Operand:
        if number < 0:
            return _at(self._constants, -1 - number, "constant", where)
        if number >= len(values):
            raise VerifyError(f"{where}: value {number}, before which there are only {len(values)}")
        return number


def _number(table: dict[T, int], item: T) -> int:
    """The number of ``item`` in ``table``, where it is put if need be."""
    return table.setdefault(item, len(table))


def _at(table: Sequence[T], number: int, what: str, where: str) -> T:
    if not 0 <= number < len(table):
        raise VerifyError(f"{where}: {what} {number} of {len(table)}, which does not exist")
    return table[number]


def _set(flags: Sequence[bool]) -> tuple[int, ...]:
    return tuple(i for i, flag in enumerate(flags) if flag)


def _flags(positions: Sequence[int], count: int, where: str) -> tuple[bool, ...]:
    for position in positions:
        _at(range(count), position, "entry", where)
    there = set(positions)
    return tuple(i in there for i in range(count))


def _plain(value: Json) -> Json:
    """Parameters with numbers that JSON does not have as objects (`_NUMBER`)."""
    match value:
        case float() if not math.isfinite(value):
            return {_NUMBER: repr(value)}
        case tuple():
            return tuple(map(_plain, value))
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case _:
            return value


def _value_in(value: Json) -> Json:
    """What `_plain` was given."""
    match value:
        case dict() if set(value) == {_NUMBER} and isinstance(text := value[_NUMBER], str):
            return cast(float, _value(text, "a parameter"))
        case tuple():
            return tuple(map(_value_in, value))
        case dict():
            return {key: _value_in(item) for key, item in value.items()}
        case _:
            return value


def _value(value: bool | float | str | None, where: str) -> bool | int | float | complex | None:
    """A number, or what its text is. Raises VerifyError for a text that is no number."""
    if not isinstance(value, str):
        return value
    for number in _numbers(value):
        return number
    raise VerifyError(f"{where}: {value[:40]!r} is no number")


def _numbers(text: str) -> Iterator[float | complex]:
    for kind in (float, complex):
        try:
            yield one_nan(kind(text))
        except ValueError:
            continue
