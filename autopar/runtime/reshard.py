"""A resharding inside one process: arrays on source meshes → arrays on destination meshes, as a plan says.

The same instructions and interpreter as over several processes (`gang.Gang`), over `LocalTransport`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from autopar.ir.errors import ReshardingError
from autopar.ir.graph import TensorType
from autopar.ir.resharding import PlacedMesh, ReshardingPlan, tile_box
from autopar.ir.sharding import ShardingSpec
from autopar.jax_compat import Device
from autopar.resharding.emit import emit
from autopar.runtime.resharding_interpreter import Part, TileKey, run_streams
from autopar.runtime.transports.local import LocalTransport

DEADLINE_S = 600.0
"""When a resharding inside one process gives up (chosen; it includes the time to compute its sources)."""


def reshard(
    plan: ReshardingPlan,
    arrays: Sequence[jax.Array],
    devices: Mapping[int, Device],
    *,
    deadline_s: float = DEADLINE_S,
) -> list[jax.Array]:
    """Brings ``arrays``, one for each of the plan's values, over. It returns when all has arrived, which is after
    the sources were computed.

    Args:
        devices: the plan's device id → the device, for all of its meshes, all of this process.
        deadline_s: when it gives up.

    Returns: for each value an array of the same shape and dtype, sharded over the destination mesh (a NamedSharding).

    Raises:
        ReshardingError: an array is not of its value's type or sharded otherwise, a device is missing, or a value does
            not divide: arrays of JAX have equal shards; use `reshard_tiles`.
        ReshardingTimeoutError: not done after ``deadline_s``.
    """
    if len(arrays) != len(plan.values):
        raise ReshardingError(f"got {len(arrays)} arrays; the plan has {len(plan.values)} values")
    _check_devices(plan, devices)
    tiles: dict[TileKey, jax.Array] = {}
    for v, (value, array) in enumerate(zip(plan.values, arrays, strict=True)):
        if (array.shape, str(array.dtype)) != (value.type.shape, value.type.dtype):
            raise ReshardingError(
                f"value {v}: got {array.dtype}{list(array.shape)}, expected {value.type.dtype}{list(value.type.shape)}"
            )
        for spec, mesh in ((value.src_spec, value.src), (value.dst_spec, value.dst)):
            _check_divides(f"value {v} ({value.type})", value.type, spec, plan.meshes[mesh])
        shards = {shard.device: shard for shard in array.addressable_shards}
        mesh = plan.meshes[value.src].mesh
        for i, d in enumerate(mesh.device_ids):
            shard, box = shards.get(devices[d]), tile_box(value.type, value.src_spec, mesh, i)
            index = () if shard is None else shard.index
            got = tuple(s.indices(n)[:2] for s, n in zip(index, value.type.shape, strict=False))
            if shard is None or got != box:
                raise ReshardingError(
                    f"value {v} ({value.type}): the plan's source is {value.src_spec}, so device {d} ({devices[d]}) "
                    f"holds {box}; in the array it holds {'nothing' if shard is None else got}. Put the array on the "
                    f"source mesh with that sharding"
                )
            tiles[v, d] = shard.data
    out = reshard_tiles(plan, tiles, devices, deadline_s=deadline_s)
    results: list[jax.Array] = []
    for v, value in enumerate(plan.values):
        mesh = plan.meshes[value.dst].mesh
        parts = [out[v, d] for d in mesh.device_ids]
        sharding = named_sharding(value.dst_spec, plan.meshes[value.dst], devices)
        results.append(jax.make_array_from_single_device_arrays(value.type.shape, sharding, parts))
    return results


def reshard_tiles(
    plan: ReshardingPlan,
    tiles: Mapping[TileKey, jax.Array],
    devices: Mapping[int, Device],
    *,
    deadline_s: float = DEADLINE_S,
) -> dict[TileKey, jax.Array]:
    """`reshard` for tiles of any shapes: (value, device id) → the tile, an array on that device alone.

    Raises:
        ReshardingError: a tile or a device is missing, or a tile is not of its type.
        ReshardingTimeoutError: not done after ``deadline_s``.
    """
    _check_devices(plan, devices)
    part = Part(plan=plan, instructions=emit(plan), devices=devices)
    return run_streams(part, tiles, LocalTransport(devices, deadline_s), deadline_s)


def named_sharding(spec: ShardingSpec, mesh: PlacedMesh, devices: Mapping[int, Device]) -> jax.sharding.NamedSharding:
    """JAX's sharding of ``spec`` over a mesh of ``devices``."""
    grid = np.array([devices[d] for d in mesh.mesh.device_ids]).reshape(mesh.mesh.shape)
    dims = (axes if len(axes) > 1 else axes[0] if axes else None for axes in spec.dims)
    return jax.sharding.NamedSharding(jax.sharding.Mesh(grid, mesh.mesh.axis_names), jax.sharding.PartitionSpec(*dims))


def _check_devices(plan: ReshardingPlan, devices: Mapping[int, Device]) -> None:
    ids = [d for mesh in plan.meshes for d in mesh.mesh.device_ids]
    missing = [d for d in ids if d not in devices]
    if missing:
        raise ReshardingError(f"the plan's devices {missing} are not given; given are {sorted(devices)}")
    if len({devices[d] for d in ids}) < len(ids):
        raise ReshardingError("two of the plan's devices are the same device here; give each its own")


def _check_divides(what: str, type: TensorType, spec: ShardingSpec, mesh: PlacedMesh) -> None:
    sizes = {axis.name: axis.size for axis in mesh.mesh.axes}
    for dim, axes in enumerate(spec.dims):
        parts = 1
        for axis in axes:
            parts *= sizes[axis]
        if type.shape[dim] % parts:
            raise ReshardingError(
                f"{what}: dimension {dim} ({type.shape[dim]} elements) is split in {parts} parts ({spec}), which are "
                f"not equal; a jax.Array cannot be sharded so. Use reshard_tiles, which takes single tiles"
            )
