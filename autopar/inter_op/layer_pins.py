"""Pins, shardings that the user fixed, → what they say of each layer's inputs: `pins_of_layers`, `on_mesh`.

A pin of an argument holds on every stage that has it, or some of its rows; its axes are looked up in the stage's mesh.
A pin of a result holds for the argument whose new value that is. A pin of a named intermediate holds in every layer
that has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.intra_op.pins import NAME, PinnedDims, Pins, dims_on, no_match, pattern
from autopar.ir.cluster import LogicalMesh
from autopar.ir.errors import ShardingError
from autopar.ir.graph import Graph, Node, TensorType
from autopar.ir.layers import LayeredGraph, StageGraph
from autopar.ir.sharding import Pin


@dataclass(frozen=True, slots=True)
class Pinned:
    """What a pin meets in a layer: input ``at`` of its graph, called ``path``; with −1 the intermediate ``path``."""

    at: int
    path: str
    type: TensorType
    pin: Pin


def pins_of_layers(
    layered: LayeredGraph, layers: Sequence[StageGraph], pins: Sequence[Pin]
) -> tuple[tuple[Pinned, ...], ...]:
    """What is pinned in each layer; of several pins that meet the same value the last.

    Raises:
        ShardingError: a pin matches nothing, or a result that is no argument's new value.
    """
    arguments: dict[int, Pin] = {}
    new = {j: i for i, j in layered.state}
    for pin in pins:
        if pin.target.startswith(NAME):
            continue
        found = pattern(pin.target)
        taken = [i for i, path in enumerate(layered.arg_paths) if found.fullmatch(path)]
        made = [j for j, path in enumerate(layered.update.out_paths) if found.fullmatch(path)]
        if not taken and not made:
            known = [*layered.arg_paths, *layered.update.out_paths]
            raise ShardingError(no_match(pin.target, known, "argument or result"))
        for j in made:
            if j not in new:
                raise ShardingError(
                    f"pin {pin.target!r}: {layered.update.out_paths[j]} is no argument's new value; in stages only "
                    "arguments, what they become, and named intermediates can be pinned"
                )
        arguments.update(dict.fromkeys([*taken, *(new[j] for j in made)], pin))
    named = {pin.target.removeprefix(NAME): pin for pin in pins if pin.target.startswith(NAME)}
    out = tuple(tuple(_of_layer(layered, layer, arguments, named)) for layer in layers)
    met = {one.path for mine in out for one in mine if one.at < 0}
    for name, pin in named.items():
        if name not in met:
            known = {str(node.params.get("name")) for layer in layers for node, _ in _names(layer.graph)}
            raise ShardingError(no_match(pin.target, [NAME + k for k in sorted(known)], "intermediate of a layer"))
    return out


def on_mesh(pinned: Sequence[Pinned], mesh: LogicalMesh) -> Pins:
    """What a layer's pins are on a stage's mesh. Raises ShardingError where one names no axis of it, has more
    dimensions than its value, or does not divide one of them."""
    inputs: dict[int, PinnedDims] = {}
    names: dict[str, PinnedDims] = {}
    for one in pinned:
        dims = dims_on(one.pin, one.path, one.type, mesh)
        if one.at < 0:
            names[one.path] = dims
        else:
            inputs[one.at] = dims
    return Pins(inputs=inputs, names=names)


def _of_layer(
    layered: LayeredGraph, layer: StageGraph, arguments: Mapping[int, Pin], named: Mapping[str, Pin]
) -> Iterator[Pinned]:
    graph = layer.graph
    for at, (argument, _, _) in enumerate(layer.inputs):
        if argument in arguments:
            yield Pinned(at, layered.arg_paths[argument], graph.values[graph.inputs[at]], arguments[argument])
    if named:
        seen = set[str]()
        for node, name in _names(graph):
            if name in named and name not in seen:
                seen.add(name)
                yield Pinned(-1, name, node.result_types[0], named[name])


def _names(graph: Graph) -> Iterator[tuple[Node, str]]:
    for node in graph.nodes:
        if node.primitive == "name":
            yield node, str(node.params.get("name"))
        for body in node.bodies:
            yield from _names(body)
