"""A user's shard_map in the step: one operator of fixed specs, and the collectives of its body.

In: its Node and the sizes of the plan's mesh axes. Out: `FixedSpecs`, where the body can run once per device inside
the plan, or the reason why it cannot, and every device has to run all of its shards. The body's own collectives are
read off `Node.hidden`, for the plan lists all there are. See docs/decisions/008-user-shard-maps.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from autopar.cost.roofline import while_trips
from autopar.ir.graph import Graph, Node, TensorType
from autopar.ir.sharding import ShardingSpec
from autopar.ir.strategy import CollectiveKind
from autopar.primitives import record_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSpecs:
    """Shardings of a shard_map's operands and results on the plan's mesh."""

    operands: tuple[ShardingSpec, ...]
    results: tuple[ShardingSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyCollective:
    """A collective of a body: ``operand_bytes`` per device before it, ``trips`` executions in one run of the body
    (``known`` False: assumed); ``reduction`` is the operation of an all-reduce."""

    kind: CollectiveKind
    axes: tuple[str, ...]
    operand_bytes: int
    dtype: str
    trips: int
    known: bool
    reduction: str
    primitive: str
    source: str


def fixed_specs(node: Node, axis_sizes: Mapping[str, int]) -> FixedSpecs | str:
    """The specs that a shard_map's in_specs and out_specs are on a mesh of ``axis_sizes`` (in the mesh's order), or
    the reason why it cannot run there."""
    params = node.params
    theirs = dict(cast("Sequence[tuple[str, int]]", params["mesh"]))
    if any(axis_sizes.get(axis) != size for axis, size in theirs.items()):
        wanted, have = (", ".join(f"{a}={n}" for a, n in m.items()) for m in (theirs, axis_sizes))
        return f"its mesh is {wanted}, the plan's {have}; give parallelize mesh= your jax.sharding.Mesh"
    if set(params["manual"]) != set(theirs):
        return f"it leaves mesh axes to the compiler, manual are {', '.join(params['manual']) or 'none'}"
    problem = next(_problems(node.hidden), None) if node.hidden is not None else "its body is hidden"
    if problem is not None:
        return problem
    out: list[tuple[ShardingSpec, ...]] = []
    sides = ((params["in_specs"], node.operand_types), (params["out_specs"], node.result_types))
    for side, (specs, types) in zip(("in_specs", "out_specs"), sides, strict=True):
        made: list[ShardingSpec] = []
        for i, (dims, value_type) in enumerate(zip(specs, types, strict=True)):
            spec = _spec(dims, value_type, tuple(axis_sizes))
            if isinstance(spec, str):
                return f"{side}[{i}] {spec}"
            made.append(spec)
        out.append(tuple(made))
    return FixedSpecs(operands=out[0], results=out[1])


def _spec(dims: Any, value_type: TensorType, order: tuple[str, ...]) -> ShardingSpec | str:
    if dims is None:
        return "holds partial sums"
    for axes in dims:
        if list(axes) != sorted(axes, key=order.index):
            return f"splits a dimension over {'·'.join(axes)}, against the order of the plan's mesh {', '.join(order)}"
    if value_type.is_key and any(dims):
        return "splits an array of PRNG keys, which no collective can move"
    return ShardingSpec(dims=(*(tuple(axes) for axes in dims), *((),) * (len(value_type.shape) - len(dims))))


def _problems(graph: Graph) -> Iterator[str]:
    for node in graph.nodes:
        collective = record_of(node.primitive).collective
        if collective is not None and collective.kind is None:
            yield f"its body holds a {node.primitive}"
        elif collective is not None and node.params.get("axis_index_groups") is not None:
            yield f"its body holds a {node.primitive} over axis_index_groups"
        for inner in (*node.bodies, *((node.hidden,) if node.hidden is not None else ())):
            yield from _problems(inner)


def body_collectives(node: Node) -> tuple[BodyCollective, ...]:
    """The collectives of a shard_map's body, loops multiplied out, all branches of conditionals; none of a body that is
    hidden."""
    return tuple(_collectives(node.hidden, 1, True, node.source)) if node.hidden is not None else ()


def _collectives(graph: Graph, trips: int, known: bool, source: str) -> Iterator[BodyCollective]:
    for node in graph.nodes:
        here = node.source or source
        collective = record_of(node.primitive).collective
        if collective is not None and collective.kind is not None:
            names = node.params[collective.axes]
            for value_type in node.operand_types:
                yield BodyCollective(
                    kind=collective.kind,
                    axes=(names,) if isinstance(names, str) else tuple(names),
                    operand_bytes=value_type.size_bytes,
                    dtype=value_type.dtype,
                    trips=trips,
                    known=known,
                    reduction=collective.reduction,
                    primitive=node.primitive,
                    source=here,
                )
        times, sure = node.params["length"] if node.primitive == "scan" else 1, known
        if node.primitive == "while":
            times, sure = while_trips(node), known and node.params["trips"] is not None
        for body in node.bodies:
            yield from _collectives(body, trips * times, sure, here)
