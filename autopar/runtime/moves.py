"""An array from one mesh of this process's devices to another, without waiting for its bytes.

`jax.device_put` between meshes of different shapes waits for the producer, and would hold up whoever dispatches (see
docs/decisions/017). So pieces are cut on the source devices, each is put on one device, and tiles are made of them
there; all of that is only dispatched.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from autopar.ir.cluster import LogicalMesh
from autopar.ir.errors import ReshardingError
from autopar.ir.graph import TensorType
from autopar.ir.resharding import Box, tile_box
from autopar.ir.sharding import ShardingSpec
from autopar.step_plan import partition_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """``box`` of the value from source device number ``source``, whose tile is ``tile``."""

    source: int
    tile: Box
    box: Box


_SHARDS = threading.Lock()
"""An array keeps its parts once it has been asked for them; a second thread that asks meanwhile may get some of them
only (seen with JAX 0.10). Workers that take the same scalar in an exchange do so."""


class Move:
    """``value_type`` from ``src`` in ``src_spec`` to ``dst`` in ``dst_spec``; call it with the array.

    Args:
        devices: the plan's device id → the device.
        mesh: ``dst`` as a mesh of these.
        own: what stays on its device is copied, as one of the two may be donated.

    Raises:
        ReshardingError: partial sums are to be moved.
    """

    def __init__(
        self, value_type: TensorType, src: LogicalMesh, src_spec: ShardingSpec, dst: LogicalMesh,
        dst_spec: ShardingSpec, devices: Mapping[int, jax.Device], mesh: Mesh, own: bool = False,
    ) -> None:  # fmt: skip
        if src_spec.unreduced or dst_spec.unreduced:
            raise ReshardingError(f"{value_type} is to cross between meshes as {src_spec} -> {dst_spec}: partial sums")
        self.shape, self.own = value_type.shape, own
        self.sharding = NamedSharding(mesh, partition_spec(dst_spec))
        self.sources = [devices[d] for d in src.device_ids]
        self.targets = [devices[d] for d in dst.device_ids]
        tiles = [tile_box(value_type, src_spec, src, i) for i in range(src.num_devices)]
        self.boxes = [tile_box(value_type, dst_spec, dst, i) for i in range(dst.num_devices)]
        self.pieces = [_pieces(box, tiles, src.device_ids, dst.device_ids[i], i) for i, box in enumerate(self.boxes)]

    def __call__(self, x: jax.Array) -> jax.Array:
        with _SHARDS:
            shards = {shard.device: shard.data for shard in x.addressable_shards}
        cuts: dict[tuple[int, Box], jax.Array] = {}
        tiles: list[jax.Array] = []
        for target, box, pieces in zip(self.targets, self.boxes, self.pieces, strict=True):
            arrived: list[jax.Array] = []
            for piece in pieces:
                key = (piece.source, piece.box)
                if key not in cuts:
                    data = shards[self.sources[piece.source]]
                    cuts[key] = data if piece.box == piece.tile else _slice(data, *_within(piece.box, piece.tile))
                stays = self.own and self.sources[piece.source] == target
                arrived.append(_copy(cuts[key]) if stays else jax.device_put(cuts[key], target))
            if len(arrived) == 1:
                tiles.append(arrived[0])
            else:
                starts = tuple(tuple(a - b for (a, _), (b, _) in zip(p.box, box, strict=True)) for p in pieces)
                tiles.append(_assemble(tuple(b - a for a, b in box), starts, *arrived))
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, tiles)


def _pieces(box: Box, tiles: Sequence[Box], ids: Sequence[int], target: int, turn: int) -> list[_Piece]:
    """What a target's tile is made of: of equal source tiles the target's own, else each target's turn of them."""
    holders: dict[Box, list[int]] = {}
    for i, tile in enumerate(tiles):
        holders.setdefault(tile, []).append(i)
    out: list[_Piece] = []
    for tile, mine in holders.items():
        shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, tile, strict=True))
        if any(a >= b for a, b in shared):
            continue
        own = [i for i in mine if ids[i] == target]
        out.append(_Piece(source=own[0] if own else mine[turn % len(mine)], tile=tile, box=shared))
    return out


def _within(box: Box, tile: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    starts = tuple(a - c for (a, _), (c, _) in zip(box, tile, strict=True))
    return starts, tuple(b - c for (_, b), (c, _) in zip(box, tile, strict=True))


def _sliced(x: Any, starts: tuple[int, ...], limits: tuple[int, ...]) -> Any:
    return lax.slice(x, starts, limits)


def _assembled(shape: tuple[int, ...], starts: tuple[tuple[int, ...], ...], *pieces: Any) -> Any:
    out = jnp.zeros(shape, pieces[0].dtype)
    for start, piece in zip(starts, pieces, strict=True):
        out = lax.dynamic_update_slice(out, piece, start)
    return out


_copy = jax.jit(jnp.copy)
_slice = jax.jit(_sliced, static_argnums=(1, 2))
_assemble = jax.jit(_assembled, static_argnums=(0, 1))
