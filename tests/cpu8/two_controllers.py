"""One of several processes of the user's own `jax.distributed` group that train with one plan, without Ray."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from autopar.data import shard_loader
from autopar.ir.errors import PlanMismatchError
from autopar.runtime.agreement import check_agreed
from autopar.runtime.pieces import put, whole_here
from examples.gpt.model import Batch, GPTConfig, init_params, loss_fn

STEPS, ROWS = 3, 8
CONFIG = GPTConfig(layers=1, hidden=32, heads=2, seq=16, vocab=64)


def sgd(params: Any, batch: Batch) -> tuple[Any, Any]:
    """A step without Adam, which makes much of what rounding leaves of a gradient that is zero."""
    loss, grads = jax.value_and_grad(loss_fn)(params, batch, CONFIG)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def batch(step: int) -> Batch:
    """The whole of it."""
    tokens = np.random.default_rng(step).integers(0, CONFIG.vocab, (ROWS, CONFIG.seq + 1), np.int32)
    return Batch(tokens[:, :-1], tokens[:, 1:])


def parts(first: int, rows: int) -> Iterator[Any]:
    """Of each batch the rows of one process."""
    for step in range(STEPS):
        yield jax.tree.map(lambda x: x[first : first + rows], batch(step))


def train(method: str, **options: Any) -> None:
    """Three steps against the plain step's."""
    index, count = jax.process_index(), jax.process_count()
    step = autopar.parallelize(sgd, method=method, donate_argnums=0, **options)
    key = jax.random.key(0)
    create = lambda key: init_params(key, CONFIG)
    plan = step.plan(jax.eval_shape(create, key), batch(0))
    assert [(g.hosts, g.devices_per_host) for g in plan.data.cluster.groups] == [(count, jax.local_device_count())]
    mesh = plan.jax_mesh()
    assert len({d.process_index for d in mesh.devices.flat}) == count
    state = step.init(create, key)
    is_spec = lambda s: isinstance(s, PartitionSpec)
    specs = plan.in_specs[1]
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=is_spec)
    spread = all(s and s[0] is not None and "x" in s[0] for s in jax.tree.leaves(specs, is_leaf=is_spec))
    rows = ROWS // count if spread else ROWS
    serial = jax.jit(sgd)
    alone = jax.device_put(create(key), jax.local_devices()[0])
    with shard_loader(parts(index * rows if spread else 0, rows), shardings, name=method) as loader:
        for number, given in enumerate(loader):
            state, loss = step(state, given)
            alone, wanted = serial(alone, batch(number))
            assert abs(float(loss) - float(wanted)) <= 1e-5 * abs(float(wanted)), (method, number, loss, wanted)
    assert number == STEPS - 1
    for mine, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(alone), strict=True):
        whole = np.asarray(wanted)
        for shard in mine.addressable_shards:
            far = np.max(np.abs(np.asarray(shard.data) - whole[shard.index]), initial=0.0)
            assert far <= 1e-5 * max(1e-6, np.max(np.abs(whole))), (method, far)


def disagree() -> None:
    """Both are told where their plans differ, and where the other does not come."""
    double = lambda x, y: x @ y
    shapes = (jnp.zeros((8, 8)), jnp.zeros((8, 8)))
    method = "zero3" if jax.process_index() else "data_parallel"
    step = autopar.parallelize(double, method=method, mesh=jax.device_count())
    try:
        step(*(np.zeros((8, 8), np.float32),) * 2)
    except PlanMismatchError as error:
        assert "different plans" in str(error) and "Plan once" in str(error), error
    else:
        raise AssertionError("two plans ran")
    if jax.process_index() == 0:
        try:
            check_agreed(step.plan(*shapes).data, jax.devices(), "alone", 0.5)
        except PlanMismatchError as error:
            assert "process 1 has not planned" in str(error), error
        else:
            raise AssertionError("process 1 was not waited for")
    check_agreed(step.plan(*shapes).data, jax.local_devices(), "own devices", 0.5)  # asks nobody


def keys() -> None:
    """PRNG keys, sharded over all processes or copied to them: put there without asking them, put from one sharding to
    another, and brought back whole."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    specs = [PartitionSpec(*dims) for dims in (("x", "y"), (None, "x"), (("y", "x"),), ())]
    for implementation in ("threefry2x32", "rbg"):
        alone = jax.random.split(jax.random.key(7, impl=implementation), (4, 2))
        words = np.asarray(jax.random.key_data(alone))
        for spec in specs:
            spread = put(alone, NamedSharding(mesh, spec))
            there = [(spread, spec), *((put(spread, NamedSharding(mesh, other)), other) for other in specs)]
            for moved, to in there:
                assert moved.sharding.is_equivalent_to(NamedSharding(mesh, to), alone.ndim), (moved.sharding, to)
                assert (moved.dtype, moved.shape) == (alone.dtype, alone.shape)
                for shard in moved.addressable_shards:
                    found = np.asarray(jax.random.key_data(shard.data))
                    np.testing.assert_array_equal(found, words[shard.index])
                whole = whole_here(moved)
                assert whole.dtype == alone.dtype and len(whole.devices()) == 1 and whole.is_fully_addressable
                np.testing.assert_array_equal(np.asarray(jax.random.key_data(whole)), words)


if __name__ == "__main__":
    port, index, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    assert "ray" not in sys.modules
    train("zero3")
    train("tensor_parallel", mesh=(2, 2))
    train("auto", mesh=(2, 2), batch_axis="x")
    disagree()
    keys()
    assert "ray" not in sys.modules
    print("done")
