"""Reshardings inside one process: every element arrives bit by bit, from arrays and from tiles, and bad input is
refused."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from autopar.ir.errors import ReshardingError, ReshardingTimeoutError
from autopar.ir.resharding import ReshardingPlan, Transfer
from autopar.ir.resharding_program import Recv, Relay, Send
from autopar.ir.sharding import ShardingSpec
from autopar.resharding.emit import emit
from autopar.resharding.transfer_strategies import STRATEGIES
from autopar.runtime.pieces import WantedTile, array_of, stretches
from autopar.runtime.reshard import named_sharding, reshard, reshard_tiles
from autopar.runtime.resharding_interpreter import WINDOW, Part, run_streams
from autopar.runtime.transports import Edge
from autopar.runtime.transports.local import LocalTransport
from benchmarks.resharding_cases import Case, side
from tests.resharding_values import (
    DTYPES,
    bits_of,
    chain,
    planned,
    random_case,
    random_value,
    source_tiles,
    wanted_bits,
)

DEVICES = dict(enumerate(jax.devices()))
CASE = Case(name="S0 -> S1", shape=(8, 12), src=side((2, 2), "S0R"), dst=side((2, 2), "RS01"))


def values_of(plan: ReshardingPlan) -> list[np.ndarray[Any, Any]]:
    return [random_value(value.type, seed) for seed, value in enumerate(plan.values)]


def arrays_of(plan: ReshardingPlan, values: list[np.ndarray[Any, Any]]) -> list[jax.Array]:
    return [
        array_of(v.type, value, named_sharding(v.src_spec, plan.meshes[v.src], DEVICES))
        for v, value in zip(plan.values, values, strict=True)
    ]


def assert_arrives(plan: ReshardingPlan) -> None:
    values = values_of(plan)
    got = reshard_tiles(plan, source_tiles(plan, values, DEVICES), DEVICES)
    wanted = wanted_bits(plan, values)
    assert got.keys() == wanted.keys()
    for (v, d), tile in got.items():
        assert str(tile.dtype) == plan.values[v].type.dtype
        assert tile.devices() == {DEVICES[d]}
        assert bits_of(tile) == wanted[v, d], (v, d)


@pytest.mark.parametrize("seed", range(60))
def test_tiles_of_any_shape_arrive(seed: int) -> None:
    assert_arrives(planned(random_case(seed, ragged=True, back=seed % 3 == 0)))


@pytest.mark.parametrize("seed", range(100, 130))
def test_arrays_arrive(seed: int) -> None:
    plan = planned(random_case(seed, ragged=False, back=seed % 3 == 0))
    values = values_of(plan)
    for value, host, array in zip(plan.values, values, reshard(plan, arrays_of(plan, values), DEVICES), strict=True):
        assert (array.shape, str(array.dtype)) == (value.type.shape, value.type.dtype)
        assert array.sharding == named_sharding(value.dst_spec, plan.meshes[value.dst], DEVICES)
        assert bits_of(array) == bits_of(host)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_arrives(dtype: str) -> None:
    assert_arrives(planned(replace(CASE, shape=(7, 11), dtype=dtype), chunk_bytes=16.0))


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_every_strategy_arrives(strategy: str) -> None:
    case = Case(name="R -> S0", shape=(16, 3), src=side((2, 1), "RR"), dst=side((3, 2), "S0R"))
    assert_arrives(planned(case, strategy=strategy))


def test_values_of_several_tensors_both_ways_arrive() -> None:
    assert_arrives(planned(replace(CASE, copies=3, back=True)))


def test_chunks_arrive_through_relays() -> None:
    plan = chain(6, 99, 10)
    assert sum(isinstance(i, Relay) for todo in emit(plan).values() for i in todo) == 4
    assert_arrives(plan)


def test_a_scalar_arrives() -> None:
    plan = chain(3, 1, 1, "float64")
    (value,), (transfer,) = plan.values, plan.transfers
    empty = ShardingSpec(dims=())
    value = replace(value, type=replace(value.type, shape=()), src_spec=empty, dst_spec=empty)
    scalar = replace(plan, values=(value,), transfers=(replace(transfer, box=()),))
    scalar.verify()
    assert_arrives(scalar)


def test_results_are_of_their_own_memory() -> None:
    plan = planned(CASE)
    values = values_of(plan)
    arrays = arrays_of(plan, values)
    first = reshard(plan, arrays, DEVICES)
    arrays[0].delete()
    reshard(plan, arrays_of(plan, [~value for value in values]), DEVICES)
    assert bits_of(first[0]) == bits_of(values[0])


@pytest.mark.parametrize("seed", range(40))
def test_stretches_cover_what_they_are_asked_for_in_order(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(0, 4)))
    size = int(np.prod(shape))
    start, stop = sorted(draw.randint(0, size) for _ in range(2))
    numbers = np.arange(size).reshape(shape)
    boxes = [numbers[s].reshape(-1) for s in stretches(shape, start, stop)]
    assert np.concatenate([[], *boxes]).tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_arrays_that_do_not_divide_are_refused() -> None:
    plan = planned(replace(CASE, shape=(8, 11)))
    array = jax.device_put(np.zeros((8, 11), np.int32), named_sharding(*_source(plan)))
    with pytest.raises(ReshardingError, match=r"dimension 1 \(11 elements\) is split in 4 parts.*reshard_tiles"):
        reshard(plan, [array], DEVICES)


def _source(plan: ReshardingPlan) -> tuple[Any, Any, Mapping[int, jax.Device]]:
    return plan.values[0].src_spec, plan.meshes[plan.values[0].src], DEVICES


def test_what_does_not_fit_the_plan_is_refused() -> None:
    plan = planned(CASE)
    (array,) = arrays_of(plan, values_of(plan))
    with pytest.raises(ReshardingError, match="got 0 arrays; the plan has 1 values"):
        reshard(plan, [], DEVICES)
    with pytest.raises(ReshardingError, match=r"got float32\[8, 12\], expected int32\[8, 12\]"):
        reshard(plan, [array.astype(np.float32)], DEVICES)
    with pytest.raises(ReshardingError, match=r"device 0 .* holds \(\(0, 4\), \(0, 12\)\); in the array it holds"):
        reshard(plan, [jax.device_put(array, DEVICES[0])], DEVICES)
    with pytest.raises(ReshardingError, match="it holds nothing"):
        reshard(plan, [jax.device_put(array, DEVICES[7])], DEVICES)
    with pytest.raises(ReshardingError, match=r"devices \[7\] are not given"):
        reshard(plan, [array], {d: DEVICES[d] for d in range(7)})
    with pytest.raises(ReshardingError, match="each its own"):
        reshard(plan, [array], {**DEVICES, 7: DEVICES[0]})
    tiles = source_tiles(plan, values_of(plan), DEVICES)
    with pytest.raises(ReshardingError, match="no tile is given for device 2"):
        reshard_tiles(plan, {key: tile for key, tile in tiles.items() if key != (0, 2)}, DEVICES)
    with pytest.raises(ReshardingError, match=r"tile of device 2: got int32\[4, 12\] on .*expected int32\[4, 12\] on"):
        reshard_tiles(plan, {**tiles, (0, 2): tiles[0, 0]}, DEVICES)


def test_a_stream_asks_for_few_chunks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, most = [0], [0]

    class Counting(LocalTransport):
        def fetch(self, edge: Edge, chunk: int, size_bytes: int) -> jax.Array:
            ahead[0] += 1
            most[0] = max(most[0], ahead[0])
            return super().fetch(edge, chunk, size_bytes)

    def land(tile: WantedTile, transfer: Transfer, index: int, data: jax.Array) -> None:
        ahead[0] -= 1
        landed(tile, transfer, index, data)

    landed = WantedTile.land
    monkeypatch.setattr(WantedTile, "land", land)
    plan = chain(2, 999, 10)
    part = Part(plan=plan, instructions=emit(plan), devices=DEVICES)
    run_streams(part, source_tiles(plan, values_of(plan), DEVICES), Counting(DEVICES, 9.0), 60.0)
    assert (ahead[0], most[0]) == (0, WINDOW + 1)


@pytest.mark.parametrize("lost", [Send, Relay, Recv])
def test_instructions_that_are_missing_end_in_an_error_at_the_deadline(lost: type) -> None:
    plan = chain(4, 99, 10)
    instructions = {d: tuple(i for i in todo if not isinstance(i, lost)) for d, todo in emit(plan).items()}
    part = Part(plan=plan, instructions=instructions, devices=DEVICES)
    tiles = source_tiles(plan, values_of(plan), DEVICES)
    with pytest.raises(ReshardingTimeoutError, match=r"was not (offered|acknowledged) within 0\.5 s"):
        run_streams(part, tiles, LocalTransport(DEVICES, 0.5), 20.0)
    with pytest.raises(ReshardingTimeoutError, match=r"streams were done after 0\.5 s"):
        run_streams(part, tiles, LocalTransport(DEVICES, 3.0), 0.5)


def test_instructions_of_another_plan_are_refused() -> None:
    plan = planned(CASE)
    tiles = source_tiles(plan, values_of(plan), DEVICES)
    other = planned(CASE, chunk_bytes=8.0)
    with pytest.raises(ReshardingError, match="does not fit transfer"):
        run_streams(
            Part(plan=plan, instructions=emit(other), devices=DEVICES), tiles, LocalTransport(DEVICES, 1.0), 9.0
        )
    with pytest.raises(ReshardingError, match="none of"):
        run_streams(Part(plan=plan, instructions={9: ()}, devices=DEVICES), tiles, LocalTransport(DEVICES, 1.0), 9.0)
