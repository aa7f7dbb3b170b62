"""Meshes of the same devices in different shapes: a value lies on the same devices by either's spec and by the common
mesh's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.inter_op.candidates import Builder
from autopar.inter_op.common_mesh import common_mesh, spec_in
from autopar.inter_op.layer_problems import parts_of
from autopar.ir.cluster import LinkSpec, LogicalMesh, MeshAxis
from autopar.ir.graph import TensorType
from autopar.ir.pipeline import CutValue
from autopar.ir.presets import cluster_from_text
from autopar.ir.sharding import ShardingSpec
from benchmarks.small_steps import random_case


def mesh(*sizes: int) -> LogicalMesh:
    axes = tuple(
        MeshAxis(name=name, size=n, link=LinkSpec(latency_s=1e-6, bytes_per_s=1e9 * n))
        for name, n in zip("xyz", sizes, strict=False)
    )
    device = cluster_from_text("dgx-h100").groups[0].device
    return LogicalMesh(axes=axes, device_ids=tuple(range(7, 7 + int(np.prod(sizes)))), device=device)


def lies(logical: LogicalMesh, spec: ShardingSpec) -> np.ndarray:
    """int64[dimensions, devices]: which part of each dimension a device has."""
    places = dict(zip(logical.axis_names, np.indices(logical.shape).reshape(len(logical.shape), -1), strict=True))
    sizes = dict(zip(logical.axis_names, logical.shape, strict=True))
    rows = []
    for dim in spec.dims:
        part = np.zeros(logical.num_devices, np.int64)
        for axis in dim:
            part = part * sizes[axis] + places[axis]
        rows.append(part)
    return np.array(rows)


SHAPES = [(8,), (2, 4), (4, 2), (2, 2, 2), (1, 8), (8, 1), (2, 1, 4)]


@pytest.mark.parametrize("shapes", list(itertools.combinations_with_replacement(SHAPES, 2)), ids=str)
def test_specs_of_both_meshes_lie_as_they_did(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    one, two = (mesh(*shape) for shape in shapes)
    common = common_mesh(one, two)
    assert common is not None
    assert common.mesh.num_devices == 8 and common.mesh.device_ids == one.device_ids
    for logical, parts in ((one, common.of_one), (two, common.of_two)):
        for places in itertools.product((0, 1, None), repeat=len(logical.axes)):
            dims = tuple(
                tuple(a for a, d in zip(logical.axis_names, places, strict=True) if d == dim) for dim in (0, 1)
            )
            spec = ShardingSpec(dims=dims)
            np.testing.assert_array_equal(lies(logical, spec), lies(common.mesh, spec_in(spec, parts)))


def test_the_coarsest_with_the_finer_links() -> None:
    common = common_mesh(mesh(8), mesh(2, 4))
    assert common is not None and common.mesh.shape == (2, 4)
    assert [axis.link.bytes_per_s for axis in common.mesh.axes] == [2e9, 4e9]
    assert common.of_one["x"] == common.mesh.axis_names
    same = common_mesh(mesh(2, 4), mesh(2, 4))
    assert same is not None and same.mesh.shape == (2, 4)


def test_partial_sums_keep_their_axes() -> None:
    common = common_mesh(mesh(8), mesh(2, 4))
    assert common is not None
    spec = spec_in(ShardingSpec(dims=((),), unreduced=("x",)), common.of_one)
    assert spec.unreduced == common.mesh.axis_names


def test_axes_that_overlap_have_none() -> None:
    assert common_mesh(mesh(2, 3), mesh(3, 2)) is None


def test_stages_of_the_same_devices_move_what_lies_elsewhere() -> None:
    """Rows over all devices by either mesh stay where they are; what one mesh has whole is sliced or gathered."""
    graph = random_case(np.random.default_rng(0)).layered
    builder = Builder(parts_of(graph, ["none"]), cluster_from_text("dgx-h100"), [], [])
    flat, square = mesh(4), mesh(2, 2)
    rows = ShardingSpec(dims=(("x",), ())), ShardingSpec(dims=(("x", "y"), ()))
    whole = ShardingSpec(dims=((), ()))

    def moved(src: LogicalMesh, have: ShardingSpec, dst: LogicalMesh, want: ShardingSpec) -> float:
        value_type = TensorType(shape=(64, 64), dtype="float32")
        value = CutValue(value=0, name="x", type=value_type, src_spec=have, dst_spec=want)
        return builder._moved(value, src, dst)  # pyright: ignore[reportPrivateUsage]

    assert moved(flat, rows[0], square, rows[1]) == 0.0 == moved(square, rows[1], flat, rows[0])
    tiles = ShardingSpec(dims=(("x",), ("y",)))
    assert moved(flat, rows[0], square, tiles) > 0.0 < moved(square, tiles, flat, rows[0])
    gathered = moved(flat, rows[0], square, whole)
    assert gathered > 0.0 and gathered == moved(square, rows[1], flat, whole)
    assert moved(flat, whole, square, whole) == 0.0
