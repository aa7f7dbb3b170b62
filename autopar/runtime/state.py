"""Where a plan has the leaves of a state, and making it there: of each leaf, every part on the devices that want it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from autopar.arrays import Array, Piece
from autopar.ir.plan import Plan
from autopar.runtime.executor import Wanted
from autopar.runtime.part import leaf_rows
from autopar.runtime.partition_specs import partition_spec


def abstract(plan: Plan, meshes: Sequence[Mesh], wanted: Wanted) -> list[Any]:
    """Leaves as `jax.ShapeDtypeStruct`s with shardings, where several stages have one as `autopar.Array`s of such;
    ``meshes``: of each stage."""
    return [_leaf(leaf, mine) for leaf, mine in zip(wanted.leaves, _pieces(plan, meshes, wanted), strict=True)]


def init(plan: Plan, meshes: Sequence[Mesh], wanted: Wanted) -> list[Any]:
    """Leaves, made by a program for each stage: no device ever holds the whole state."""
    pieces = _pieces(plan, meshes, wanted)
    made: dict[tuple[int, int], jax.Array] = {}
    for stage in sorted({piece.stage for mine in pieces for piece in mine}):
        spots = [(i, p) for i, mine in enumerate(pieces) for p in mine if p.stage == stage]
        rows, where = [(i, p.start, p.stop) for i, p in spots], [p.array.sharding for _, p in spots]
        found = leaf_rows(wanted.function, wanted.args, wanted.kwargs, rows, where)
        made.update({(i, id(p)): x for (i, p), x in zip(spots, found, strict=True)})
    there = [[replace(p, array=made[i, id(p)]) for p in mine] for i, mine in enumerate(pieces)]
    return [_leaf(leaf, mine) for leaf, mine in zip(wanted.leaves, there, strict=True)]


def _pieces(plan: Plan, meshes: Sequence[Mesh], wanted: Wanted) -> list[list[Piece]]:
    """The pieces of each leaf: where stages read it, or where no stage does, on the first device."""
    out: list[list[Piece]] = []
    for a, leaf in zip(wanted.numbers, wanted.leaves, strict=True):
        mine: list[Piece] = []
        for place in plan.inputs[a].places:
            shape = (place.stop - place.start, *leaf.shape[1:]) if place.stop else leaf.shape
            sharding = NamedSharding(meshes[place.stage], partition_spec(place.spec))
            there = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)
            mine.append(Piece(place.stage, place.start, place.stop, there))
        if not mine:
            first = SingleDeviceSharding(meshes[0].devices.flat[0])
            mine.append(Piece(-1, 0, 0, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=first)))
        out.append(mine)
    return out


def _leaf(leaf: Any, pieces: Sequence[Piece]) -> Any:
    """A leaf of its pieces."""
    if len(pieces) == 1 and pieces[0].stop == 0:
        return pieces[0].array
    return Array(leaf.shape, leaf.dtype, tuple(pieces))
