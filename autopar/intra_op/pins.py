"""Pins, shardings that the user fixed, → the values of a graph that they mean, checked.

A target is a glob over argument and result paths (``args[0]['layers']*``, ``out[0]*``; ``*`` and ``?`` are
wildcards, brackets are not) or ``name:…`` for a value that `jax.ad_checkpoint.checkpoint_name` named, in bodies too.
Where several pins meet the same value, the last one holds.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from autopar.ir.cluster import LogicalMesh
from autopar.ir.errors import ShardingError
from autopar.ir.graph import Graph, Node, TensorType
from autopar.ir.sharding import Pin

PinnedDims: TypeAlias = tuple[tuple[str, ...] | None, ...]
"""Mesh axes per dimension, as many as the value has; None for a dimension that is left to the planner."""

NAME = "name:"
"""What the target of a pin of an intermediate begins with."""
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Pins:
    """Pinned dimensions by position among the graph's inputs, among its outputs, and by name of an intermediate."""

    inputs: Mapping[int, PinnedDims] = field(default_factory=dict)
    outputs: Mapping[int, PinnedDims] = field(default_factory=dict)
    names: Mapping[str, PinnedDims] = field(default_factory=dict)

    def apart(self, graph: Graph) -> tuple[tuple[int, int], ...]:
        """Those pairs (input, output) of ``graph.state`` that are pinned to different shardings."""
        return tuple(
            (i, j)
            for i, j in graph.state
            if i in self.inputs and j in self.outputs and self.inputs[i] != self.outputs[j]
        )


def on_mesh(metadata: Sequence[Pin], mesh: LogicalMesh) -> tuple[tuple[Pin, ...], tuple[str, ...]]:
    """(pins of a model library's metadata that name no axis but those of ``mesh``; names that are none, sorted)."""
    axes = set(mesh.axis_names)
    named = [(pin, {name for dim in pin.dims for name in dim or ()}) for pin in metadata]
    unknown = set[str]().union(*(names for _, names in named)) - axes
    return tuple(pin for pin, names in named if names <= axes), tuple(sorted(unknown))


def resolve_pins(graph: Graph, mesh: LogicalMesh, pins: Sequence[Pin]) -> Pins:
    """What ``pins`` mean for ``graph`` on ``mesh``.

    Raises:
        ShardingError: a pin matches nothing, names no axis of the mesh or one twice, has more dimensions than a value
            that it matches, does not divide one of them, or contradicts the pin of a donated argument.
    """
    inputs: dict[int, PinnedDims] = {}
    outputs: dict[int, PinnedDims] = {}
    names: dict[str, PinnedDims] = {}
    for pin in pins:
        _check_axes(pin, mesh)
        if pin.target.startswith(NAME):
            name = pin.target.removeprefix(NAME)
            names[name] = _by_name(graph, mesh, pin, name)
            continue
        meant = pattern(pin.target)
        taken = [(inputs, i, path) for i, path in enumerate(graph.arg_paths) if meant.fullmatch(path)]
        made = [(outputs, i, path) for i, path in enumerate(graph.out_paths) if meant.fullmatch(path)]
        if not taken and not made:
            raise ShardingError(no_match(pin.target, [*graph.arg_paths, *graph.out_paths], "argument or result"))
        for table, i, path in taken + made:
            value = graph.inputs[i] if table is inputs else graph.outputs[i]
            t = graph.values[value] if isinstance(value, int) else value.type
            table[i] = _dims(pin, path, t, mesh)
    found = Pins(inputs=inputs, outputs=outputs, names=names)
    for i, j in found.apart(graph):
        if i in graph.donated:
            raise ShardingError(
                f"{graph.arg_paths[i]} is donated to {graph.out_paths[j]}, so that both have one sharding, but they "
                f"are pinned to {_text(inputs[i])} and {_text(outputs[j])}. Pin one of them, or both alike"
            )
    return found


def pinner(pins: Pins, logical: LogicalMesh) -> Callable[[Node], PinnedDims | None]:
    """What a node's result is pinned to: by name, or by a sharding constraint in the user's code. What is returned
    raises ShardingError for a constraint that names no axis of the mesh, or does not divide."""

    def pin_of(node: Node) -> PinnedDims | None:
        if node.primitive == "name":
            return pins.names.get(str(node.params.get("name")))
        if node.primitive == "sharding_constraint" and node.params.get("pin") is not None:
            return _constraint(node, logical)
        return None

    return pin_of


def _constraint(node: Node, logical: LogicalMesh) -> PinnedDims:
    shape = node.result_types[0].shape
    sizes = {a.name: a.size for a in logical.axes}
    dims = tuple(node.params["pin"]["dims"]) + ((),) * (len(shape) - len(node.params["pin"]["dims"]))
    for d, axes in enumerate(dims):
        parts = 1
        for axis in axes or ():
            if axis not in sizes:
                raise ShardingError(
                    f"{node}: with_sharding_constraint names mesh axis {axis!r}; the plan's mesh has "
                    f"{', '.join(sizes)}. Pass mesh= a jax.sharding.Mesh with the axis names that your code uses"
                )
            parts *= sizes[axis]
        if shape[d] % parts:
            raise ShardingError(
                f"{node}: with_sharding_constraint cannot shard dimension {d} (size {shape[d]}) over {'·'.join(axes)} "
                f"(size {parts}): not divisible. Pad to {-(-shape[d] // parts) * parts} or drop the constraint"
            )
    return dims


def pattern(target: str) -> re.Pattern[str]:
    """What matches the paths that a target stands for, in full."""
    wild = {"*": ".*", "?": "."}
    return re.compile("".join(wild.get(c) or re.escape(c) for c in target), re.DOTALL)


def no_match(target: str, known: Sequence[str], what: str) -> str:
    """What to say of a pin that matches none of ``known``, which are each a ``what``."""
    near = difflib.get_close_matches(target, known, n=_SHOWN, cutoff=0.4) or list(known[:_SHOWN])
    more = "" if len(near) >= len(known) else f" and {len(known) - len(near)} more"
    listed = f"there are {', '.join(near)}{more}" if near else "there are none"
    return f"pin {target!r} matches no {what}: {listed}. * and ? stand for any characters, brackets for themselves"


def _named(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        if node.primitive == "name":
            yield node
        for body in node.bodies:
            yield from _named(body)


def _by_name(graph: Graph, mesh: LogicalMesh, pin: Pin, name: str) -> PinnedDims:
    known = {str(node.params.get("name")): None for node in _named(graph)}
    nodes = [node for node in _named(graph) if node.params.get("name") == name]
    if not nodes:
        listed = ", ".join(known) or "none"
        raise ShardingError(
            f"pin {pin.target!r} matches no intermediate: the step names {listed}. Name a value by "
            f"jax.ad_checkpoint.checkpoint_name(x, {name!r})"
        )
    found = {_dims(pin, str(node), node.result_types[0], mesh): node for node in nodes}
    if len(found) > 1:
        (_, one), (_, other), *_ = found.items()
        raise ShardingError(
            f"pin {pin.target!r} meets values of different rank: {one}: {one.result_types[0]} and {other}: "
            f"{other.result_types[0]}. Give them different names"
        )
    return next(iter(found))


def _check_axes(pin: Pin, mesh: LogicalMesh) -> None:
    axes = [axis for dim in pin.dims for axis in dim or ()]
    for axis in axes:
        if axis not in mesh.axis_names:
            raise ShardingError(
                f"pin {pin.target!r}: {_text(pin.dims)} names axis {axis!r}; the mesh is {mesh}. Use its axis names, "
                "or give mesh= a jax.sharding.Mesh with names of your own"
            )
        if axes.count(axis) > 1:
            raise ShardingError(
                f"pin {pin.target!r}: {_text(pin.dims)} uses mesh axis {axis!r} twice. An axis can split one dimension "
                "only"
            )


def dims_on(pin: Pin, where: str, t: TensorType, mesh: LogicalMesh) -> PinnedDims:
    """What ``pin`` is for one value, ``where``, on ``mesh``: as many dimensions as it has. Raises ShardingError as
    `resolve_pins`."""
    _check_axes(pin, mesh)
    return _dims(pin, where, t, mesh)


def _dims(pin: Pin, where: str, t: TensorType, mesh: LogicalMesh) -> PinnedDims:
    """``pin`` for one value: as many dimensions as it has."""
    if len(pin.dims) > len(t.shape):
        raise ShardingError(
            f"{where}: pin {pin.target!r} has {len(pin.dims)} dimensions, {_text(pin.dims)}, for a value of rank "
            f"{len(t.shape)}, {t}. Leave out the last {len(pin.dims) - len(t.shape)}, or match fewer values"
        )
    sizes = {axis.name: axis.size for axis in mesh.axes}
    for d, axes in enumerate(pin.dims):
        shards = math.prod(sizes[axis] for axis in axes or ())
        if t.shape[d] % shards:
            named = " × ".join(f'"{axis}" (size {sizes[axis]})' for axis in axes or ())
            raise ShardingError(
                f"{where}: cannot shard dimension {d} (size {t.shape[d]}) over mesh axis {named}, as pin "
                f"{pin.target!r} says: not divisible. Pad to {-(-t.shape[d] // shards) * shards}, pin another "
                "dimension, or leave this one out"
            )
    return pin.dims + ((),) * (len(t.shape) - len(pin.dims))


def _text(dims: PinnedDims) -> str:
    def entry(axes: tuple[str, ...] | None) -> str:
        if axes is None:
            return "UNCONSTRAINED"
        return repr(axes[0]) if len(axes) == 1 else repr(axes or None)

    return f"PartitionSpec({', '.join(map(entry, dims))})"
