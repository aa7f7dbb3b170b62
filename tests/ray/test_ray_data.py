"""Batches that workers draw themselves: their numbers, what the driver sends, ends, errors, positions, threads."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.ir.errors import DataError, WorkerError
from autopar.runtime.on_ray.executor import RayExecutor
from tests.clusters import cluster
from tests.compare import assert_close
from tests.ray.steps import Watched, init, labelled, labelled_batch

OPTIONS: Any = {"schedule": "1f1b", "submeshes": ["1x1"], "workers": 1, "layers": 3, "stages": 3}
SOON_S = 20.0


@pytest.fixture(scope="module")
def step(ray_cluster: Any) -> Iterator[Any]:
    """Three workers; the second reads nothing of the batch."""
    with jax.enable_x64(True):
        far = planned(ray_cluster)
    yield far
    far.close()


@pytest.fixture(scope="module")
def pids(step: Any) -> tuple[int, ...]:
    """Its workers' processes."""
    with jax.enable_x64(True):
        return step.compiled().pids


def planned(cluster: Any, **options: Any) -> Any:
    step = autopar.parallelize(labelled, cluster=cluster, num_microbatches=2, **{**OPTIONS, **options})
    step.plan(jax.eval_shape(init, jax.random.key(0)), labelled_batch(0))
    return step


def same(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), found, wanted)


def soon(done: Callable[[], bool]) -> None:
    stop_s = time.monotonic() + SOON_S
    while not done():
        assert time.monotonic() < stop_s
        time.sleep(0.05)


def test_workers_draw_what_they_read(step: Any, pids: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """To the last bit what comes of batches that are sent; the driver sends none, and draws none."""
    source, sent = Watched(tmp_path, 3), list[Any]()
    messages = RayExecutor._messages
    monkeypatch.setattr(RayExecutor, "_messages", lambda *given: sent.extend(messages(*given)) or sent[-3:])
    state = start = step.init(init, jax.random.key(1))
    got = list[Any]()
    with step.loader(source) as loader:
        for number, batch in enumerate(loader):
            assert loader.state() == {"batch": number + 1}
            same(batch, labelled_batch(number))
            state, loss = step(state, batch)
            got.append((state, loss))
    assert len(got) == 3 and len(sent) == 9 and not any(message.given for (message,) in sent)
    first, second, third = pids
    assert source.readers("x") == {first} and source.readers("y") == source.readers("weight") == {third}
    assert source.readers("unread") == {first} and second != os.getpid()
    near = planned("cpu:4")
    state, here = start, jax.tree.map(np.asarray, start)
    for number, (batch, (far_state, far_loss)) in enumerate(zip(near.loader(source), got, strict=True)):
        state, loss = step(state, labelled_batch(number))
        here, value = near(here, batch)
        same((far_state, far_loss), (state, loss))
        same((far_state, far_loss), (here, value))
    assert any(message.given for (message,) in sent), "nothing was sent that a loader could save"


def test_a_batch_is_given_and_saved_as_other_arrays_are(step: Any, tmp_path: Path) -> None:
    state = step.init(init, jax.random.key(1))
    with step.loader(Watched(tmp_path, 2)) as loader:
        batch = next(loader)
    same(step(state, batch), step(state, {**batch, "y": labelled_batch(0)["y"]}))
    assert [sharding.mesh.size for sharding in batch["x"].shardings] == [1]
    autopar.save(tmp_path / "saves", batch, step=1).wait(60)
    same(autopar.restore(tmp_path / "saves"), labelled_batch(0))


@pytest.mark.full
def test_a_mesh_of_two_hosts(ray_cluster: Any, tmp_path: Path) -> None:
    """Both its processes draw; what nobody has any more is let go of."""
    spec = cluster(1, flops_per_s=1e10, memory_bytes_per_s=1e10, latency_s=1e-8, hosts=4)
    here = planned(spec, submeshes=["2x1"], stages=2, layers=2, batch_axis=0)
    far, source = here.with_options(cluster=ray_cluster, plan=here.last_plan), Watched(tmp_path, 2)
    far.plan(jax.eval_shape(init, jax.random.key(0)), labelled_batch(0))
    workers = far.compiled()
    state = want = far.init(init, jax.random.key(1))
    loader = far.loader(source)
    for number, batch in enumerate(loader):
        state, loss = far(state, batch)
        want, expected = far(want, labelled_batch(number))
        assert_close(jax.tree.map(np.asarray, (state, loss)), jax.tree.map(np.asarray, (want, expected)), 1e-12)
    assert source.readers("x") == set(workers.pids[:2]) and source.readers("y") == set(workers.pids[2:])
    (piece,) = batch["x"].pieces
    del batch
    far(state, labelled_batch(0))
    with pytest.raises(WorkerError, match=f"worker 0, host . of its mesh .* KeyError: {piece.number}"):
        workers.gang.ask("fetch", [((piece.number,),), ((),)], 60.0)


def test_it_goes_on_from_its_state(step: Any, tmp_path: Path) -> None:
    source = Watched(tmp_path, 4)
    with step.loader(source, prefetch=4) as loader:
        seen = [float(next(loader)["weight"]) for _ in range(2)]
    with step.loader(source, start=loader.state()) as loader:
        seen += [float(batch["weight"]) for batch in loader]
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(loader)
    assert seen == [1, 2, 3, 4]


class Uneven:
    """Ends one batch earlier in process ``pid``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __call__(self, start: int) -> Iterator[Any]:
        yield from map(labelled_batch, range(start, 2 - (os.getpid() == self.pid)))


class Failing(Uneven):
    """Raises there instead."""

    def __call__(self, start: int) -> Iterator[Any]:
        yield labelled_batch(0)
        if os.getpid() == self.pid:
            raise KeyError("no such file")
        yield labelled_batch(1)


class Short(Uneven):
    """Gives fewer rows there."""

    def __call__(self, start: int) -> Iterator[Any]:
        yield labelled_batch(0)
        batch = labelled_batch(1)
        yield {**batch, "y": batch["y"][:6]} if os.getpid() == self.pid else batch


class Slow(Uneven):
    """Takes its time there."""

    def __call__(self, start: int) -> Iterator[Any]:
        yield labelled_batch(0)
        if os.getpid() == self.pid:
            threading.Event().wait(SOON_S)
        yield labelled_batch(1)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Uneven, r"the source of worker 2 \(process {pid}\) ended before batch 1, which that of worker 0 .* has"),
        (Failing, r"the source of worker 2 \(process {pid}\) failed at batch 1: KeyError: 'no such file'"),
        (
            Short,
            r"worker 2 \(process {pid}\) .* leaf \['y'\]: the step takes float64\[8,8\]; the source gave .*\[6,8\]",
        ),
        (Slow, r"worker 2 \(process {pid}\) failed at batch 1: .* gave none within 1 s"),
    ],
)
def test_what_is_wrong_on_one_host_is_said_and_workers_live_on(step: Any, pids: Any, kind: Any, message: str) -> None:
    pid = pids[2]
    state = step.init(init, jax.random.key(1))
    with step.loader(kind(pid), deadline_s=1.0) as loader:
        state, _ = step(state, next(loader))
        for _ in range(2):
            with pytest.raises(DataError, match=message.format(pid=pid)) as e:
                next(loader)
        if kind is Failing:
            assert "test_ray_data.py" in e.value.__notes__[0], "no traceback of the worker"
    step(state, labelled_batch(0))


def test_a_loader_that_is_closed_or_dropped_ends_its_threads(step: Any, pids: Any, tmp_path: Path) -> None:
    source = Beating(tmp_path)
    with step.loader(source) as loader:
        soon(lambda: source.beating() == set(pids) - {pids[1]})
    assert not source.beating(), "closed, and its threads go on"
    with pytest.raises(DataError, match="closed"):
        next(loader)
    state = step.init(init, jax.random.key(1))
    loader = step.loader(source)
    step(state, next(loader))
    soon(lambda: len(source.beating()) == 2)
    del loader
    gc.collect()
    step(state, labelled_batch(0))  # tells the workers
    soon(lambda: not source.beating())


class Beating:
    """Batches without end; a source that is being drawn from has a file in ``folder`` for its process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, start: int) -> Iterator[Any]:
        mine = self.folder / str(os.getpid())
        mine.touch()
        try:
            while True:
                yield labelled_batch(0)
        finally:
            mine.unlink()

    def beating(self) -> set[int]:
        """Processes."""
        return {int(path.name) for path in self.folder.iterdir()}


def test_what_cannot_be_a_source(step: Any) -> None:
    with pytest.raises(DataError, match="source: a generator; expected a function of the number of batches"):
        step.loader(x for x in ())
    lock = threading.Lock()
    with pytest.raises(DataError, match="source: it cannot be sent to the workers"):
        step.loader(lambda start: iter([lock]))
    with pytest.raises(DataError, match=r"argnums: the step has no argument 2 .* it has \[0, 1\]"):
        step.loader(labelled_batch, 2)
    with pytest.raises(DataError, match="prefetch=0"):
        step.loader(labelled_batch, prefetch=0)


def test_a_worker_that_dies_is_a_workers_error(ray_cluster: Any, tmp_path: Path) -> None:
    far = planned(ray_cluster)
    first, *_ = far.compiled().pids
    loader = far.loader(Slow(first))
    next(loader)
    os.kill(first, 9)
    with pytest.raises(WorkerError, match=r"worker 0 .* died"):
        next(loader)
    loader.close()
