"""Two logical meshes of the same devices → one whose axes are parts of both's, in which specs of either can be written.

Interleaved stages of one mesh may have it in different shapes, say 4 and 2 × 2: what crosses between them is resharded
inside the mesh, as between layers of one stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.cluster import LogicalMesh, MeshAxis
from autopar.ir.sharding import ShardingSpec

Parts = Mapping[str, tuple[str, ...]]
"""Axis → the axes of the common mesh that it consists of, major to minor."""


@dataclass(frozen=True, slots=True)
class CommonMesh:
    """``mesh``, and what the axes of either mesh are in it."""

    mesh: LogicalMesh
    of_one: Parts
    of_two: Parts


def common_mesh(one: LogicalMesh, two: LogicalMesh) -> CommonMesh | None:
    """The coarsest mesh that both are coarser than, each axis with the link of the finer of the two axes that it is
    part of; None where axes overlap without one being part of the other (2 × 3 and 3 × 2)."""
    assert one.device_ids == two.device_ids, "meshes of other devices"
    ends = sorted({*_ends(one.axes), *_ends(two.axes)})
    if any(b % a for a, b in itertools.pairwise(ends)):
        return None
    axes: list[MeshAxis] = []
    for number, (start, stop) in enumerate(itertools.pairwise(ends)):
        over = [axis for mesh in (one, two) for axis, a, b in _spans(mesh.axes) if a <= start and stop <= b]
        finer = min(over, key=lambda axis: axis.size)
        axes.append(replace(finer, name=f"{number}", size=stop // start))
    mesh = replace(one, axes=tuple(axes))
    return CommonMesh(mesh, _parts(one.axes, mesh.axes), _parts(two.axes, mesh.axes))


def spec_in(spec: ShardingSpec, parts: Parts) -> ShardingSpec:
    """``spec`` on the common mesh: each axis replaced by those it consists of (``parts``)."""
    dims = tuple(tuple(part for axis in dim for part in parts[axis]) for dim in spec.dims)
    return ShardingSpec(dims=dims, unreduced=tuple(part for axis in spec.unreduced for part in parts[axis]))


def _ends(axes: Sequence[MeshAxis]) -> list[int]:
    """Products of the leading axis sizes, from 1 on."""
    return list(itertools.accumulate((axis.size for axis in axes), lambda a, b: a * b, initial=1))


def _spans(axes: Sequence[MeshAxis]) -> list[tuple[MeshAxis, int, int]]:
    """Axes with the products before and after them."""
    ends = _ends(axes)
    return list(zip(axes, ends[:-1], ends[1:], strict=True))


def _parts(axes: Sequence[MeshAxis], common: Sequence[MeshAxis]) -> Parts:
    return {
        axis.name: tuple(part.name for part, a, b in _spans(common) if start <= a and b <= stop)
        for axis, start, stop in _spans(axes)
    }
