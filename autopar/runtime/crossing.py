"""A resharding as one process takes part in it: the legs of its transfers that begin, pass or end here.

All processes number the legs of all transfers alike, so none has to tell another anything: a leg in one turn of one
step is a message (`transports`). A tile that several devices of a process want is landed once; a leg from a process to
itself moves nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from autopar.ir.resharding import Box, Leg, ReshardingPlan
from autopar.jax_compat import Device, FromHost
from autopar.runtime.moves import tiles_of
from autopar.runtime.partition_specs import partition_spec
from autopar.runtime.pieces import data_type, key_implementation, shards_of
from autopar.runtime.tiles import HeldTile, Piece, Room, WantedTile, Window
from autopar.runtime.transports import Arrival, Fetch, Offer, Transport

STEP_BITS = 20
"""Of a message's number; steps are counted anew after so many (chosen: no message of an earlier one is left then)."""


class Coming(NamedTuple):
    """What was asked for."""

    arrival: Arrival
    tiles: list[WantedTile]


class Crossing:
    """What this process has to do for a resharding. Its messages have numbers ``first`` up, in each turn (microbatch)
    ``legs`` more.

    Args:
        values: those that cross; what others would take is left out.
        here: the plan's device id → the device, of this process.
        peers: device id → address, of all.
        mesh: of the target, where this process has devices of it.

    Attributes:
        leaving, arriving: the values that have to be given to `offer`, and that `make` gives.
    """

    def __init__(
        self, plan: ReshardingPlan, values: Collection[int], first: int, here: Mapping[int, Device],
        peers: Mapping[int, str], mesh: Mesh | None,
    ) -> None:  # fmt: skip
        self._first = first
        self.legs = sum(len(t.legs) for t in plan.transfers)
        self._offers: list[tuple[int, Device, Window, int, str]] = []
        """Value, the device that has it, the piece, the leg and where it leads."""
        self._tiles: list[tuple[int, Box, list[Device]]] = []
        """Value, its box and the devices that want it."""
        self._fetches: list[tuple[int, Window, int, str, list[tuple[int, str]]]] = []
        """Tile, the piece, the leg, where it comes from and the legs that pass it on."""
        self._makes: list[tuple[int, list[int], _Made]] = []
        """Value, the tiles it is made of here, how."""
        sources = [plan.meshes[value.src].mesh.device_ids for value in plan.values]
        self._only = next(iter(here.values())) if len(here) == 1 == max(map(len, sources), default=0) else None
        """The device that has all of what leaves, where it is one."""
        self._types = [value.type for value in plan.values]
        tile_at: dict[tuple[int, int], int] = {}
        if mesh is not None:
            for v, value in enumerate(plan.values):
                if v in values and any(d in here for d in plan.meshes[value.dst].mesh.device_ids):
                    self._add_value(plan, v, here, mesh, tile_at)
        leg = first
        held = {v: tiles_of(plan, v, source=True) for v in range(len(plan.values))}
        for transfer in plan.transfers:
            v, legs = transfer.value, transfer.legs
            if v in values:
                t = plan.values[v].type
                for n, way in enumerate(legs):
                    if way.giver in here and way.after < 0 and way.taker not in here:
                        window = Window(t, transfer, held[v][way.giver])
                        self._offers.append((v, here[way.giver], window, leg + n, peers[way.taker]))
                    if way.taker in here and way.giver not in here:
                        tile = tile_at[v, way.taker]
                        relays = _passed_on(legs, n, here)
                        window = Window(t, transfer, self._tiles[tile][1])
                        on = [(leg + m, peers[legs[m].taker]) for m in relays]
                        self._fetches.append((tile, window, leg + n, peers[way.giver], on))
            leg += len(legs)
        self.leaving = tuple(dict.fromkeys(v for v, *_ in self._offers))
        self.arriving = tuple(v for v, _, _ in self._makes)

    def number(self, turn: int) -> int:
        """That of its first message in a turn."""
        return self._first + turn * self.legs

    def offer(self, transport: Transport, step: int, turn: int, arrays: Sequence[jax.Array]) -> None:
        """Sends what leaves, in the order of ``leaving``."""
        tiles: dict[tuple[int, Device], HeldTile] = {}
        for v, x in zip(self.leaving, arrays, strict=True):
            rank = len(self._types[v].shape)
            if self._only is not None:
                tiles[v, self._only] = HeldTile(x, rank)
                continue
            for shard in shards_of(x):
                tiles[v, shard.device] = HeldTile(shard.data, rank)
        more = turn * self.legs
        transport.offer([
            Offer(leg + more << STEP_BITS | step, peer, Piece(tiles[v, device], window))
            for v, device, window, leg, peer in self._offers
        ])  # fmt: skip

    def fetch(self, transport: Transport, step: int, turn: int) -> Coming:
        """Makes room for what arrives, and asks for it."""
        tiles = [WantedTile(self._types[v], box, devices) for v, box, devices in self._tiles]
        more = turn * self.legs
        fetches = [
            Fetch(leg + more << STEP_BITS | step, peer, Room(tiles[tile], window),
                  [(n + more << STEP_BITS | step, to) for n, to in relays])
            for tile, window, leg, peer, relays in self._fetches
        ]  # fmt: skip
        return Coming(arrival=transport.fetch(fetches), tiles=tiles)

    def make(self, coming: Coming) -> list[jax.Array]:
        """What has arrived, in the order of ``arriving``; waits for it."""
        coming.arrival.wait()
        return [make([coming.tiles[i] for i in mine]) for _, mine, make in self._makes]

    def _add_value(
        self, plan: ReshardingPlan, v: int, here: Mapping[int, Device], mesh: Mesh, tile_at: dict[tuple[int, int], int]
    ) -> None:
        value = plan.values[v]
        of_box: dict[Box, int] = {}
        mine: list[int] = []
        devices: list[Device] = []
        for d, box in tiles_of(plan, v, source=False).items():
            if d not in here:
                continue
            if box not in of_box:
                of_box[box] = len(self._tiles)
                self._tiles.append((v, box, []))
            self._tiles[of_box[box]][2].append(here[d])
            tile_at[v, d] = of_box[box]
            mine.append(of_box[box])
            devices.append(here[d])
        sharding = NamedSharding(mesh, partition_spec(value.dst_spec))
        inner, dtype = data_type(value.type)
        put = FromHost((*value.type.shape, *inner), dtype, sharding, devices)
        self._makes.append((v, mine, _Made(value.type.shape, sharding, devices, put, key_implementation(value.type))))


class _Made:
    """Makes a value of ``shape`` of tiles that have landed, those of ``devices`` in turn."""

    def __init__(
        self, shape: tuple[int, ...], sharding: NamedSharding, devices: Sequence[Device], put: FromHost,
        keys: str | None,
    ) -> None:  # fmt: skip
        self._shape, self._sharding, self._devices, self._put, self._keys = shape, sharding, devices, put, keys

    def __call__(self, tiles: Sequence[WantedTile]) -> jax.Array:
        if tiles[0].on_device:
            of = {x.device: x for tile in dict.fromkeys(tiles) for x in tile.arrays()}
            arrays = [of[device] for device in self._devices]
            return jax.make_array_from_single_device_arrays(self._shape, self._sharding, arrays)
        host = {tile: tile.host() for tile in dict.fromkeys(tiles)}
        out = self._put([host[tile] for tile in tiles])
        return out if self._keys is None else jax.random.wrap_key_data(out, impl=self._keys)


def _passed_on(legs: Sequence[Leg], at: int, here: Mapping[int, Device]) -> list[int]:
    """The legs that lead out of this process what leg ``at`` brought into it."""
    out: list[int] = []
    for n in range(at + 1, len(legs)):
        if legs[n].after == at:
            out += _passed_on(legs, n, here) if legs[n].taker in here else [n]
    return out
