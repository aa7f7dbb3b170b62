"""Batches from any iterator: order, ends, errors, positions, threads."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from autopar.data import Loader, shard_loader
from autopar.ir.errors import DataError
from tests.checkpoints import bits

SOON_S = 10.0


def rows() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))


def batches(count: int) -> Iterator[dict[str, np.ndarray]]:
    for i in range(count):
        yield {"x": np.full((8, 2), i, np.float32), "y": np.arange(8, dtype=np.int32) + i}


def threads() -> int:
    return sum(thread.name == "autopar-data" for thread in threading.enumerate())


def soon(done: Any) -> None:
    stop_s = time.monotonic() + SOON_S
    while not done():
        assert time.monotonic() < stop_s
        time.sleep(0.01)


@settings(max_examples=30)
@given(count=st.integers(0, 6), start=st.integers(0, 6), prefetch=st.integers(1, 8), function=st.booleans())
def test_each_batch_comes_once_and_in_order(count: int, start: int, prefetch: int, function: bool) -> None:
    start = min(start, count)
    source = (lambda at: list(batches(count))[at:]) if function else batches(count)
    with shard_loader(source, rows(), prefetch=prefetch, start=start) as loader:
        got = [(batch, loader.state()) for batch in loader]
    assert len(got) == count - start
    for i, (batch, wanted) in enumerate(zip(got, list(batches(count))[start:])):
        assert batch[1] == {"batch": start + i + 1}
        assert batch[0]["x"].sharding == rows()
        assert {k: bits(v) for k, v in batch[0].items()} == {k: bits(v) for k, v in wanted.items()}


def test_training_goes_on_with_the_data_that_was_not_seen(tmp_path: Any) -> None:
    with shard_loader(batches(9), rows(), prefetch=4) as loader:
        seen = [int(next(loader)["x"][0, 0]) for _ in range(4)]
        autopar.save(tmp_path, {"data": loader.state()}, step=4).wait(60)
    state = autopar.restore(tmp_path, {"data": {"batch": 0}})
    with shard_loader(batches(9), rows(), start=state["data"]) as loader:
        seen += [int(batch["x"][0, 0]) for batch in loader]
    assert seen == list(range(9))


def test_an_error_of_the_source_is_raised_at_its_batch_and_again() -> None:
    def failing() -> Iterator[np.ndarray]:
        yield np.zeros(8, np.float32)
        yield np.ones(8, np.float32)
        raise KeyError("no such file")

    loader = shard_loader(failing(), rows(), prefetch=4)
    time.sleep(0.1)  # the thread has met the error
    assert [int(next(loader)[0]) for _ in range(2)] == [0, 1]
    for _ in range(2):
        with pytest.raises(KeyError, match="no such file"):
            next(loader)
    soon(lambda: not loader._thread.is_alive())


def test_the_source_is_drawn_from_no_further_than_asked() -> None:
    drawn: list[int] = []

    def counted() -> Iterator[np.ndarray]:
        for i in range(100):
            drawn.append(i)
            yield np.zeros(8, np.float32)

    with shard_loader(counted(), rows(), prefetch=3) as loader:
        next(loader)
        soon(lambda: len(drawn) >= 5)
        time.sleep(0.3)
        assert len(drawn) == 5  # taken, three ready, one waiting for its place
    assert not loader._thread.is_alive()


def test_a_source_may_use_its_buffer_again() -> None:
    buffer = np.zeros((8, 100_000), np.float32)

    def reused() -> Iterator[np.ndarray]:
        for i in range(5):
            buffer[:] = i
            yield buffer

    got = list(shard_loader(reused(), rows(), prefetch=8))
    assert [float(batch.max()) for batch in got] == [float(batch.min()) for batch in got] == [0, 1, 2, 3, 4]


def test_a_loader_that_is_closed_or_dropped_ends_its_thread() -> None:
    before = threads()
    loader = shard_loader(batches(1000), rows())
    next(loader)
    loader.close()
    loader.close()
    with pytest.raises(DataError, match="closed"):
        next(loader)
    loader = shard_loader(batches(1000), rows())
    next(loader)
    del loader
    gc.collect()
    soon(lambda: threads() == before)


@pytest.mark.parametrize(
    ("source", "sharding", "message"),
    [
        ([np.zeros((7, 2), "f4")], None, r"batch 0: leaf \(the batch\): .*shape \(7, 2\), which does not divide"),
        ([{"a": [np.zeros((8, 2), "f8")]}], None, r"leaf \['a'\]\[0\]: float64 needs JAX's 64-bit types"),
        ([{"a": "text"}], None, r"leaf \['a'\]: str of dtype <U4; expected numbers"),
        ([{"a": np.zeros(8, "f4")}], {"b": rows()}, "batch 0: the shardings given do not fit the batch"),
    ],
)
def test_what_does_not_fit_is_named(source: Any, sharding: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        next(shard_loader(source, sharding or rows()))


def test_bad_arguments() -> None:
    with pytest.raises(DataError, match="prefetch=0"):
        shard_loader([], rows(), prefetch=0)
    for start in (-1, {"step": 1}, 1.5, True):
        with pytest.raises(DataError, match=r"start=.*expected what Loader.state"):
            shard_loader([], rows(), start=start)
    with pytest.raises(DataError, match="start is batch 3, but the source ends after 2"):
        next(shard_loader(batches(2), rows(), start=3))


def test_shardings_may_be_a_prefix_and_numbers_of_64_bits(float64: None) -> None:
    whole = NamedSharding(rows().mesh, PartitionSpec())
    source = [{"in": {"a": np.zeros((8, 2)), "b": np.zeros(16, np.int64)}, "out": (np.zeros(3),)}]
    batch = next(shard_loader(source, {"in": rows(), "out": (whole,)}))
    assert batch["in"]["b"].sharding == rows() and batch["in"]["b"].dtype == jnp.int64
    assert batch["out"][0].sharding == whole


def test_a_loader_is_an_iterator() -> None:
    loader = shard_loader(batches(3), rows())
    assert isinstance(loader, Loader) and iter(loader) is loader
    assert [int(batch["y"][0]) for batch in loader] == [0, 1, 2]
    assert list(loader) == []
