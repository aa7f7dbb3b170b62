"""An array from one mesh of this process's devices to another, without waiting for its bytes.

`jax.device_put` between meshes of different shapes waits for the producer, and would hold up whoever dispatches (see
docs/decisions/017). So pieces are cut on the source devices, each is put on one device, and tiles are made of them
there; all of that is only dispatched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from autopar.ir.cluster import LogicalMesh
from autopar.ir.errors import ReshardingError
from autopar.ir.graph import TensorType
from autopar.ir.resharding import Box, tile_box
from autopar.ir.sharding import ShardingSpec
from autopar.jax_compat import Copies, Device
from autopar.runtime.partition_specs import partition_spec
from autopar.runtime.pieces import key_implementation, shards_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """``box`` of the value from source device number ``source``, whose tile is ``tile``."""

    source: int
    tile: Box
    box: Box


class Route:
    """How ``value_type`` gets from ``src`` in ``src_spec`` to ``dst`` in ``dst_spec``, whosever devices these are.

    Attributes:
        sources, targets: the plan's device ids.
        boxes: the tile of each target.
        pieces: what each target's tile is made of.

    Raises:
        ReshardingError: partial sums are to be moved.
    """

    def __init__(
        self, value_type: TensorType, src: LogicalMesh, src_spec: ShardingSpec, dst: LogicalMesh, dst_spec: ShardingSpec
    ) -> None:
        if src_spec.unreduced or dst_spec.unreduced:
            raise ReshardingError(f"{value_type} is to cross between meshes as {src_spec} -> {dst_spec}: partial sums")
        self.type, self.spec = value_type, dst_spec
        self.sources, self.targets = src.device_ids, dst.device_ids
        tiles = [tile_box(value_type, src_spec, src, i) for i in range(src.num_devices)]
        self.boxes = [tile_box(value_type, dst_spec, dst, i) for i in range(dst.num_devices)]
        self.same = tiles == self.boxes
        """Every target's tile is one that a source has, in the same order."""
        self.keys = key_implementation(value_type) is not None
        """Its elements are PRNG keys."""
        self.pieces = [_pieces(box, tiles, src.device_ids, dst.device_ids[i], i) for i, box in enumerate(self.boxes)]

    def cut(self, x: jax.Array, devices: Mapping[int, Device]) -> list[list[jax.Array | None]]:
        """For each target the pieces of its tile, on the source devices; None where that is another process's.
        ``devices``: plan's id → the device, of this process at least."""
        shards = {shard.device: shard.data for shard in shards_of(x)}
        cuts: dict[tuple[int, Box], jax.Array] = {}
        for piece in (piece for pieces in self.pieces for piece in pieces):
            data = shards.get(devices.get(self.sources[piece.source]))
            if data is not None and (piece.source, piece.box) not in cuts:
                whole = piece.box == piece.tile
                cuts[piece.source, piece.box] = data if whole else _slice(data, *_within(piece.box, piece.tile))
        return [[cuts.get((piece.source, piece.box)) for piece in pieces] for pieces in self.pieces]

    def tile(self, target: int, arrived: Sequence[jax.Array]) -> jax.Array:
        """The tile of target number ``target`` from its pieces, which are on its device."""
        if len(arrived) == 1:
            return arrived[0]
        box = self.boxes[target]
        starts = tuple(tuple(a - b for (a, _), (b, _) in zip(p.box, box, strict=True)) for p in self.pieces[target])
        return _assemble(tuple(b - a for a, b in box), starts, *arrived)

    def array(self, tiles: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
        """The value on the target mesh from its tiles, those of this process."""
        sharding = NamedSharding(mesh, partition_spec(self.spec))
        return jax.make_array_from_single_device_arrays(self.type.shape, sharding, list(tiles))


class Move:
    """A route between meshes of this process; between two of the same devices, of which other processes have some, a
    program of all these processes.

    Args:
        devices: the plan's device id → the device, of this process.
        mesh: the target's.
        own: True: what stays on its device is copied, as one of the two may be donated.
    """

    def __init__(self, route: Route, devices: Mapping[int, Device], mesh: Mesh, own: bool = False) -> None:
        self.route, self.devices, self.mesh, self.own = route, devices, mesh, own
        self.sharding = NamedSharding(mesh, partition_spec(route.spec))
        self.alone = [SingleDeviceSharding(devices[d]) for d in route.targets if d in devices]
        self.together = None if self.sharding.is_fully_addressable else jax.jit(jnp.copy, out_shardings=self.sharding)
        self.same = self.together is None and route.same and not (own and set(route.sources) & set(route.targets))
        """All is copied as it is."""

    def tiles(self, x: jax.Array) -> list[jax.Array]:
        """The tiles of the value on the target's devices, in their order; only dispatched."""
        route = self.route
        cuts = route.cut(x, self.devices)
        moves: list[tuple[int, int]] = []
        arrived: list[list[Any]] = [list(mine) for mine in cuts]
        for i, mine in enumerate(cuts):
            for n, piece in enumerate(route.pieces[i]):
                if self.own and route.sources[piece.source] == route.targets[i]:
                    arrived[i][n] = _copy(mine[n])
                else:
                    moves.append((i, n))
        copies = Copies([self.alone[i] for i, _ in moves], self.route.keys)
        landed = copies([arrived[i][n] for i, n in moves])
        for (i, n), y in zip(moves, landed, strict=True):
            arrived[i][n] = y
        return [route.tile(i, mine) for i, mine in enumerate(arrived)]

    def array(self, x: jax.Array) -> jax.Array:
        """The value on the target mesh; only dispatched."""
        return self.route.array(self.tiles(x), self.mesh) if self.together is None else self.together(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        return Moves([self])(x)[0]


class Moves:
    """Moves several arrays, each by its own move; those whose tiles stay as they are in one call."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self._apart = [(i, m) for i, m in enumerate(moves) if not m.same]
        self._whole = [i for i, m in enumerate(moves) if m.same]
        self._copy = Copies([moves[i].sharding for i in self._whole], any(m.route.keys for m in moves))

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        if not self._apart:
            return self._copy(arrays)
        out: list[Any] = list(arrays)
        for i, y in zip(self._whole, self._copy([arrays[i] for i in self._whole]), strict=True):
            out[i] = y
        for i, move in self._apart:
            out[i] = move.array(arrays[i])
        return out


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
