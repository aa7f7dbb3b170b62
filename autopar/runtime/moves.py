"""Values from one mesh of this process's devices to another as their resharding says, without waiting for their bytes.

`jax.device_put` between meshes of different shapes waits for the producer, and would hold up whoever dispatches (see
docs/decisions/017). So chunks are cut on the source devices, go from device to device leg by leg of their transfers,
and tiles are made of them on the target devices; all of that is only dispatched, the copies that nothing is waited for
by (of all values: a sender's, then those of who had it from one, …) in one call each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from autopar.ir.resharding import Box, ReshardingPlan, tile_box
from autopar.ir.sharding import ShardingSpec
from autopar.jax_compat import Copies, Device
from autopar.runtime.partition_specs import partition_spec
from autopar.runtime.pieces import key_implementation, shards_of
from autopar.runtime.tiles import PlacedBox, Window, assemble, cut, layout

Move: TypeAlias = Callable[..., list[jax.Array]]
"""(arrays on one mesh) → the same on another; only dispatched."""


class _Tile(NamedTuple):
    """A target's tile: its shape, its boxes, and where the chunks are that they are made of."""

    shape: tuple[int, ...]
    boxes: tuple[PlacedBox, ...]
    chunks: list[int]


class Moves:
    """Brings ``values`` (positions in ``plan``'s) over.

    Args:
        devices: the plan's device id → the device, of this process.
        meshes: of JAX, of each of the plan's.
    """

    def __init__(
        self, plan: ReshardingPlan, values: Sequence[int], devices: Mapping[int, Device], meshes: Sequence[Mesh]
    ) -> None:
        self._types = [plan.values[v].type for v in values]
        keys = any(key_implementation(t) is not None for t in self._types)
        self._shardings = [
            NamedSharding(meshes[plan.values[v].dst], partition_spec(plan.values[v].dst_spec)) for v in values
        ]
        self._same = [n for n, v in enumerate(values) if _stays(plan, v)]
        """Each device's tile goes, as it is, to that device of the target which is at its place."""
        self._empty = [n for n, t in enumerate(self._types) if 0 in t.shape]
        self._copy_same = Copies([self._shardings[n] for n in self._same], keys)
        self._slots = 0
        """Chunks, on each device that has them."""
        self._cuts: list[tuple[int, Device, tuple[Any, ...] | None, list[int]]] = []
        """(number of the value, device, places of chunks or None for the tile as it is, where they go)"""
        self._levels: list[tuple[list[int], Copies, list[int]]] = []
        """Copies that follow each other: from where, how, where to."""
        self._tiles: list[tuple[int, list[_Tile]]] = []
        self._plan_apart(
            [(n, v) for n, v in enumerate(values) if n not in {*self._same, *self._empty}], plan, devices, keys
        )

    def _plan_apart(
        self, values: Sequence[tuple[int, int]], plan: ReshardingPlan, devices: Mapping[int, Device], keys: bool
    ) -> None:
        wanted = {v: n for n, v in values}
        held = {v: tiles_of(plan, v, source=True) for v in wanted}
        tiles = {v: tiles_of(plan, v, source=False) for v in wanted}
        at_sender: dict[tuple[int, int, Any], int] = {}
        cuts: dict[tuple[int, int], list[Any]] = {}
        levels: list[list[tuple[int, int, int]]] = []
        landed: dict[tuple[int, int], list[tuple[Window, list[int]]]] = {}
        for transfer in plan.transfers:
            v = transfer.value
            if v not in wanted:
                continue
            t = plan.values[v].type
            window = Window(t, transfer, held[v][transfer.sender])
            mine: list[int] = []
            for place in window.places:
                key = v, transfer.sender, place
                if key not in at_sender:
                    at_sender[key] = self._new()
                    cuts.setdefault((v, transfer.sender), []).append((place, at_sender[key]))
                mine.append(at_sender[key])
            having, depths = [mine], [0]
            for leg in transfer.legs:
                given, depth = having[leg.after + 1], depths[leg.after + 1]
                there = [self._new() for _ in given]
                while len(levels) <= depth:
                    levels.append([])
                levels[depth] += [(a, b, leg.taker) for a, b in zip(given, there, strict=True)]
                having.append(there)
                depths.append(depth + 1)
                at = landed.setdefault((v, leg.taker), [])
                at.append((Window(t, transfer, tiles[v][leg.taker]), there))
        for (v, d), found in cuts.items():
            places, slots = [place for place, _ in found], [slot for _, slot in found]
            box = held[v][d]
            whole = len(places) == 1 and places[0][2] < 0 and places[0][1] == tuple(b - a for a, b in box)
            self._cuts.append((wanted[v], devices[d], None if whole else tuple(places), slots))
        for level in levels:
            where = [SingleDeviceSharding(devices[taker]) for _, _, taker in level]
            self._levels.append(([a for a, _, _ in level], Copies(where, keys), [b for _, b, _ in level]))
        for n, v in values:
            made: list[_Tile] = []
            for d in plan.meshes[plan.values[v].dst].mesh.device_ids:
                found = landed[v, d]
                boxes, order = layout([window for window, _ in found])
                shape = tuple(b - a for a, b in tiles[v][d])
                made.append(_Tile(shape, boxes, [found[w][1][chunk] for w, chunk in order]))
            self._tiles.append((n, made))

    def _new(self) -> int:
        self._slots += 1
        return self._slots - 1

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        if len(self._same) == len(arrays):
            return self._copy_same(arrays)
        out: list[Any] = [None] * len(arrays)
        for n, y in zip(self._same, self._copy_same([arrays[n] for n in self._same]), strict=True):
            out[n] = y
        for n in self._empty:
            out[n] = jax.device_put(arrays[n], self._shardings[n])
        slots: list[Any] = [None] * self._slots
        shards = {n: {s.device: s.data for s in shards_of(arrays[n])} for n, _ in self._tiles}
        for n, device, places, where in self._cuts:
            x = shards[n][device]
            for slot, y in zip(where, [x] if places is None else cut(x, places), strict=True):
                slots[slot] = y
        for sources, copies, targets in self._levels:
            for slot, y in zip(targets, copies([slots[a] for a in sources]), strict=True):
                slots[slot] = y
        for n, tiles in self._tiles:
            made = [_assembled(tile, slots) for tile in tiles]
            out[n] = jax.make_array_from_single_device_arrays(self._types[n].shape, self._shardings[n], made)
        return out


def resharded(specs: Sequence[ShardingSpec] | None, mesh: Mesh) -> Move:
    """Between two meshes of the same devices, in the same order: a program of all of them; ``specs`` None: whole on all
    of them. What comes out is no memory that goes in."""
    whole = NamedSharding(mesh, PartitionSpec())
    shardings: Any = whole if specs is None else [NamedSharding(mesh, partition_spec(spec)) for spec in specs]
    return jax.jit(lambda *xs: [jnp.copy(x) for x in xs], out_shardings=shardings)


def tiles_of(plan: ReshardingPlan, v: int, *, source: bool) -> dict[int, Box]:
    """Device → the tile that it has, or wants, of value ``v`` of a plan."""
    value = plan.values[v]
    mesh = plan.meshes[value.src if source else value.dst].mesh
    spec = value.src_spec if source else value.dst_spec
    return {d: tile_box(value.type, spec, mesh, i) for i, d in enumerate(mesh.device_ids)}


def _stays(plan: ReshardingPlan, v: int) -> bool:
    """Every source's tile goes as it is to the target at its place."""
    value = plan.values[v]
    src, dst = plan.meshes[value.src].mesh.device_ids, plan.meshes[value.dst].mesh.device_ids
    ways = {d: (t.sender, t.chunks) for t in plan.transfers if t.value == v for d in t.receivers if len(t.legs) == 1}
    tiles = list(tiles_of(plan, v, source=True).values()), list(tiles_of(plan, v, source=False).values())
    return (
        0 not in value.type.shape
        and tiles[0] == tiles[1]
        and all(ways.get(d) == (s, 1) for s, d in zip(src, dst, strict=True))
    )


def _assembled(tile: _Tile, slots: Sequence[Any]) -> Any:
    if len(tile.chunks) == 1 and tile.boxes[0][1] == tile.shape:
        return slots[tile.chunks[0]]  # in its box's shape: it is the only chunk
    return assemble(tile.shape, tile.boxes, *[slots[i] for i in tile.chunks])
