"""Arrays from mesh to mesh of one process: what arrives is what was sent, wherever it lies."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from autopar.ir.cluster import LinkSpec, LogicalMesh, MeshAxis
from autopar.ir.graph import TensorType
from autopar.ir.resharding import CrossValue, network_of, place
from autopar.ir.sharding import ShardingSpec
from autopar.resharding.planning import plan_resharding
from autopar.runtime.moves import Moves, resharded
from autopar.runtime.partition_specs import partition_spec
from tests.clusters import SLOW_8

LINK = LinkSpec(latency_s=1e-6, bytes_per_s=1e9)
SPECS = [ShardingSpec(dims=d) for d in (((), ()), (("x",), ()), ((), ("x",)), (("x",), ("y",)), (("y", "x"), ()))]
T = TensorType(shape=(8, 4), dtype="float32")


def mesh(shape: tuple[int, ...], first: int) -> LogicalMesh:
    axes = tuple(MeshAxis(name=n, size=s, link=LINK) for n, s in zip("xy", shape, strict=False))
    count = int(np.prod(shape))
    return LogicalMesh(axes=axes, device_ids=tuple(range(first, first + count)), device=SLOW_8.groups[0].device)


def on(logical: LogicalMesh) -> Mesh:
    return Mesh(np.array(jax.devices())[list(logical.device_ids)].reshape(logical.shape), logical.axis_names)


def between(src: LogicalMesh, have: ShardingSpec, dst: LogicalMesh, want: ShardingSpec) -> Moves:
    value = CrossValue(type=T, src=0, src_spec=have, dst=1, dst_spec=want)
    plan = plan_resharding([value], [place(src, SLOW_8), place(dst, SLOW_8)], network_of(SLOW_8))
    return Moves(plan, [0], dict(enumerate(jax.devices())), [on(src), on(dst)])


@pytest.mark.parametrize("first", [0, 4])
def test_every_sharding_to_every_other(first: int) -> None:
    """Between meshes apart, and of the same devices; what arrives is memory of its own."""
    src = mesh((2, 2), 0)
    values = np.arange(32, dtype=np.float32).reshape(T.shape)
    for dst in (mesh((2, 2), first), mesh((4, 1), first)):
        for have, want in itertools.product(SPECS, SPECS):
            sent = jax.device_put(values, NamedSharding(on(src), partition_spec(have)))
            move = between(src, have, dst, want) if first else resharded([want], on(dst))
            [got] = move(sent)
            assert got.sharding == NamedSharding(on(dst), partition_spec(want)), (have, want)
            np.testing.assert_array_equal(np.asarray(got), values)
            sent.delete()
            np.testing.assert_array_equal(jax.numpy.copy(got), values)


class OneAtATime:
    """An array that gives half of its parts to a thread that asks while another does, as JAX's may."""

    def __init__(self, x: jax.Array) -> None:
        self.x, self.asking = x, threading.Semaphore(1)

    @property
    def addressable_shards(self) -> Any:
        alone = self.asking.acquire(blocking=False)
        time.sleep(0.02)
        shards = self.x.addressable_shards
        if not alone:
            return shards[: len(shards) // 2]
        self.asking.release()
        return shards


def test_two_workers_take_the_same_array() -> None:
    src, dst = mesh((2, 2), 0), mesh((2, 2), 4)
    values = np.arange(32, dtype=np.float32).reshape(T.shape)
    sent: Any = OneAtATime(jax.device_put(values, NamedSharding(on(src), partition_spec(SPECS[1]))))
    moves = [between(src, SPECS[1], dst, SPECS[k]) for k in (0, 2, 3)]
    with ThreadPoolExecutor(len(moves)) as pool:
        for [got] in pool.map(lambda move: move(sent), moves):
            np.testing.assert_array_equal(np.asarray(got), values)
