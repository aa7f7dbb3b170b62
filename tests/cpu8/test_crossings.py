"""What a resharding says arrives bit by bit: between processes, whichever devices each of them has, and on the devices
of one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from autopar.ir.resharding import PlacedMesh, ReshardingPlan
from autopar.ir.sharding import ShardingSpec
from autopar.resharding.transfer_strategies import STRATEGIES
from autopar.runtime import moves, tiles
from autopar.runtime.crossing import Crossing
from autopar.runtime.moves import Moves
from autopar.runtime.partition_specs import partition_spec
from autopar.runtime.pieces import array_of
from autopar.runtime.tiles import stretches
from autopar.runtime.transports.jax_transfer import JaxTransfer
from autopar.runtime.transports.wire import SECRET_BYTES, Wire
from benchmarks.resharding_cases import Case, side
from tests.compare import OPTIMISED
from tests.resharding_values import DTYPES, SMALL, bits_of, chain, planned, random_case, random_value

DEVICES = dict(enumerate(jax.devices()))
CASE = Case(name="S0 -> S1", shape=(8, 12), src=side((2, 2), "S0R"), dst=side((2, 2), "RS01"))
SECRET = bytes(SECRET_BYTES)
QUIETED = ("float8_e3m4", "float8_e4m3")
"""XLA's CPU client cuts and joins these as float16, by which NaNs lose their payload (jaxlib 0.10.2)."""
QUICK = ("bool", "bfloat16", "float64", "float8_e4m3fn", "int4", "key<fry>")


@pytest.fixture(autouse=True)
def _cut_and_joined_as_users_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as the tests' other programs are, those that cut bfloat16 quieten its NaNs, too (jaxlib 0.10.2)."""
    cut = jax.jit(tiles._cut, static_argnums=1, compiler_options=OPTIMISED)
    assemble = jax.jit(tiles._assembled, static_argnums=(0, 1), compiler_options=OPTIMISED)
    for module in (moves, tiles):
        monkeypatch.setattr(module, "cut", cut)
        monkeypatch.setattr(module, "assemble", assemble)


def mesh_of(placed: PlacedMesh) -> Mesh:
    grid = np.array([DEVICES[d] for d in placed.mesh.device_ids]).reshape(placed.mesh.shape)
    return Mesh(grid, placed.mesh.axis_names)


def sharded(plan: ReshardingPlan, host: Sequence[np.ndarray[Any, Any]]) -> list[jax.Array]:
    out: list[jax.Array] = []
    for value, x in zip(plan.values, host, strict=True):
        out.append(
            array_of(value.type, x, NamedSharding(mesh_of(plan.meshes[value.src]), partition_spec(value.src_spec)))
        )
    return out


def values_of(plan: ReshardingPlan) -> list[np.ndarray[Any, Any]]:
    return [random_value(value.type, seed) for seed, value in enumerate(plan.values)]


def check(plan: ReshardingPlan, got: dict[int, jax.Array], host: Sequence[np.ndarray[Any, Any]]) -> None:
    assert got
    for v, x in got.items():
        value = plan.values[v]
        assert (x.shape, str(x.dtype)) == (value.type.shape, value.type.dtype)
        assert x.sharding == NamedSharding(mesh_of(plan.meshes[value.dst]), partition_spec(value.dst_spec))
        for shard in x.addressable_shards:
            assert bits_of(shard.data) == bits_of(np.ascontiguousarray(host[v][shard.index]))


@contextmanager
def processes(plan: ReshardingPlan, kind: str) -> Iterator[list[tuple[Any, dict[int, Any]]]]:
    """Each mesh is one process: its transport and devices."""
    made: list[tuple[Any, dict[int, Any]]] = []
    for placed in plan.meshes:
        devices = {d: DEVICES[d] for d in placed.mesh.device_ids}
        made.append((
            Wire("127.0.0.1", SECRET) if kind == "wire" else JaxTransfer(list(devices.values()), "127.0.0.1"), devices,
        ))  # fmt: skip
    try:
        yield made
    finally:
        for transport, _ in made:
            if kind == "wire":
                transport.close()


def between(plan: ReshardingPlan, kind: str = "wire", values: Sequence[int] | None = None, turns: int = 1) -> None:
    """All values over, each turn others; and the bytes that each process sent are those of the plan."""
    values = range(len(plan.values)) if values is None else values
    with processes(plan, kind) as made:
        peers = {d: transport.address for transport, devices in made for d in devices}
        crossings = [
            Crossing(plan, values, 5, devices, peers, mesh_of(plan.meshes[m]))
            for m, (_, devices) in enumerate(made)
        ]  # fmt: skip
        coming = [[c.fetch(t, 3, turn) for c, (t, _) in zip(crossings, made, strict=True)] for turn in range(turns)]
        for turn in range(turns):
            host = values_of(plan)
            arrays = sharded(plan, host)
            for c, (transport, _) in zip(crossings, made, strict=True):
                c.offer(transport, 3, turn, [arrays[v] for v in c.leaving])
            found: dict[int, jax.Array] = {}
            for c, mine in zip(crossings, coming[turn], strict=True):
                found |= dict(zip(c.arriving, c.make(mine), strict=True))
            assert set(found) == set(values)
            check(plan, found, host)
        wanted = {(i, j): 0 for i in range(len(made)) for j in range(len(made)) if i != j}
        of = {d: i for i, (_, devices) in enumerate(made) for d in devices}
        for t in plan.transfers:
            if t.value in values:
                size = t.elements * item_bytes(plan, t.value) * turns
                for leg in t.legs:
                    if of[leg.giver] != of[leg.taker]:
                        wanted[of[leg.giver], of[leg.taker]] += size
        for (i, j), size in wanted.items():
            assert made[i][0].sent.get(made[j][0].address, 0) == size


def item_bytes(plan: ReshardingPlan, v: int) -> int:
    return random_value(replace(plan.values[v].type, shape=(1,)), 0).nbytes


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("seed", [pytest.param(n, marks=() if n < 112 else pytest.mark.full) for n in range(100, 150)])
def test_arrays_of_all_kinds_cross(seed: int) -> None:
    plan = planned(random_case(seed, ragged=False, back=seed % 3 == 0))
    between(plan)
    host = values_of(plan)
    meshes = [mesh_of(placed) for placed in plan.meshes]
    for v in range(len(plan.values)):
        if plan.values[v].type.dtype not in (*SMALL, *QUIETED):
            [got] = Moves(plan, [v], DEVICES, meshes)(sharded(plan, host)[v])
            check(plan, {v: got}, host)


@pytest.mark.parametrize("kind", ["wire", "jax_transfer"])
@pytest.mark.parametrize("dtype", [pytest.param(d, marks=() if d in QUICK else pytest.mark.full) for d in DTYPES])
def test_every_dtype_crosses(dtype: str, kind: str) -> None:
    between(planned(replace(CASE, dtype=dtype), chunk_bytes=16.0), kind)


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_every_strategy(strategy: str) -> None:
    case = Case(name="R -> S0", shape=(16, 3), src=side((2, 1), "RR"), dst=side((2, 2), "S0R"))
    plan = planned(case, strategy=strategy)
    between(plan)
    host = values_of(plan)
    [got] = Moves(plan, [0], DEVICES, [mesh_of(placed) for placed in plan.meshes])(*sharded(plan, host))
    check(plan, {0: got}, host)


@pytest.mark.parametrize("kind", ["wire", "jax_transfer"])
def test_several_tensors_both_ways_in_several_turns(kind: str) -> None:
    between(planned(replace(CASE, copies=3, back=True)), kind, turns=3)


def test_what_is_not_sent_is_left_out() -> None:
    between(planned(replace(CASE, copies=3)), values=(0, 2))


@pytest.mark.parametrize("kind", ["wire", "jax_transfer"])
def test_relays_between_processes(kind: str) -> None:
    """A chain over five hosts, each a process."""
    plan = chain(6, 300_000, 50_000)
    mesh = plan.meshes[1]
    apart = [plan.meshes[0].mesh.device_ids, *((d,) for d in mesh.mesh.device_ids)]
    made: list[tuple[Any, dict[int, Any]]] = []
    for ids in apart:
        devices = {d: DEVICES[d] for d in ids}
        made.append((
            Wire("127.0.0.1", SECRET) if kind == "wire" else JaxTransfer(list(devices.values()), "127.0.0.1"), devices,
        ))  # fmt: skip
    peers = {d: transport.address for transport, devices in made for d in devices}
    host = values_of(plan)
    one = [Crossing(plan, [0], 0, devices, peers, mesh_of(mesh)) for _, devices in made]
    coming = [c.fetch(t, 0, 0) for c, (t, _) in zip(one, made, strict=True)]
    one[0].offer(made[0][0], 0, 0, sharded(plan, host))
    for c, mine, (transport, _) in list(zip(one, coming, made, strict=True))[1:]:
        mine.arrival.wait()
        [tile] = mine.tiles
        got = tile.arrays()[0] if tile.on_device else tile.host()
        assert bits_of(got) == bits_of(host[0])
        assert c.arriving == (0,)
        transport.flush()
    sent = [transport.sent.get(made[n + 1][0].address, 0) for n, (transport, _) in enumerate(made[:-1])]
    assert sent == [host[0].nbytes] * 5
    for transport, _ in made:
        if kind == "wire":
            transport.close()


def test_results_are_of_their_own_memory() -> None:
    """What has arrived may be donated, and stays what it is when the source goes."""
    plan = planned(CASE)
    with processes(plan, "wire") as made:
        peers = {d: transport.address for transport, devices in made for d in devices}
        pair = [Crossing(plan, [0], 0, devices, peers, mesh_of(plan.meshes[1])) for _, devices in made]
        host = values_of(plan)
        [array] = sharded(plan, host)
        coming = pair[1].fetch(made[1][0], 0, 0)
        pair[0].offer(made[0][0], 0, 0, [array])
        [got] = pair[1].make(coming)
        array.delete()
        more = jax.jit(lambda x: x + 1, donate_argnums=0)(got)
        np.testing.assert_array_equal(more, host[0] + 1)
        np.testing.assert_array_equal(coming.tiles[0].host(), host[0][:, :3])  # relays may still read it


def test_an_empty_array() -> None:
    plan = planned(replace(CASE, shape=(8, 12)))
    value = replace(plan.values[0], type=replace(plan.values[0].type, shape=(8, 0)))
    empty = replace(plan, values=(value,), transfers=())
    empty.verify()
    between(empty)
    host = values_of(empty)
    [got] = Moves(empty, [0], DEVICES, [mesh_of(placed) for placed in plan.meshes])(*sharded(empty, host))
    check(empty, {0: got}, host)


def test_a_scalar() -> None:
    plan = chain(3, 1, 1, "float64")
    (value,), (transfer,) = plan.values, plan.transfers
    none = ShardingSpec(dims=())
    value = replace(value, type=replace(value.type, shape=()), src_spec=none, dst_spec=none)
    between(replace(plan, values=(value,), transfers=(replace(transfer, box=()),)))


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
