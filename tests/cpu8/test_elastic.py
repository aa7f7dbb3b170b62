"""`autopar.run_elastic` on devices of this process: failures are raised by the data source; tests/ray has real ones."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar import checkpoint
from autopar.elastic.start import without_hosts
from autopar.ir.errors import CheckpointError, ClusterError, DataError, OptionError, WorkerError
from autopar.ir.presets import cluster_from_text
from tests.clusters import SLOW_8, cluster
from tests.elastic_runs import STEPS, batch_at, hold, init, train


class Disturbed:
    """A data source that fails when it is first asked for some steps, and what was seen of the run."""

    def __init__(self, *fail_at: int, then: Callable[[], None] = lambda: None) -> None:
        self.fail_at, self.then = list(fail_at), then
        self.seen: list[tuple[int, float]] = []

    def __call__(self, i: int) -> Any:
        if i and i in self.fail_at:
            self.fail_at.remove(i)
            self.then()
            raise WorkerError(f"step {i}: worker 1 died")
        return batch_at(i)

    def on_step(self, i: int, loss: Any) -> None:
        self.seen.append((i, float(loss)))


def run(path: Path, source: Disturbed, **more: Any) -> Any:
    options: dict[str, Any] = {"steps": STEPS, "save_every": 2, "cluster": SLOW_8, **more}
    return autopar.run_elastic(train, init, source, path=path, on_step=source.on_step, **options)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("options", [{}, {"stages": 2, "num_microbatches": 2, "submeshes": ["1x2"],
                         "layers": 3, "workers": 1, "schedule": "1f1b"}], ids=["shards", "pipeline"])  # fmt: skip
def test_a_disturbed_run_is_an_undisturbed_one(options: Any, tmp_path: Path) -> None:
    source = Disturbed(1, 5)
    state = run(tmp_path, source, **options)
    hold(source.seen, state, [0, 0, 1, 2, 3, 4, 4, 5, 6])
    assert checkpoint.steps(tmp_path) == (4, 6, 7)
    again = Disturbed()
    state = run(tmp_path, again, **options)  # the program, started again
    assert not again.seen
    assert int(state["seen"]) == STEPS


@pytest.mark.usefixtures("float64")
def test_fewer_devices_are_planned_for_anew(tmp_path: Path) -> None:
    there = [SLOW_8]
    asked: list[int] = []

    def now() -> Any:
        asked.append(there[0].num_devices)
        return there[0]

    source = Disturbed(
        3, then=lambda: there.__setitem__(0, cluster(4, flops_per_s=1e10, memory_bytes_per_s=1e10, latency_s=1e-8))
    )
    state = run(tmp_path, source, cluster=None, plan_for=now)
    assert asked == [8, 4]
    hold(source.seen, state, [0, 1, 2, 2, 3, 4, 5, 6])
    assert all(len(x.sharding.device_set) == 4 for x in jax.tree.leaves(state))


@pytest.mark.usefixtures("float64")
def test_restarts_without_a_checkpoint_between_are_counted(tmp_path: Path) -> None:
    source = Disturbed(5, 5, 5, 5)
    with pytest.raises(WorkerError, match="worker 1 died") as caught:
        run(tmp_path, source, max_restarts=2)
    assert caught.value.__notes__ == ["3 failures without a new checkpoint (max_restarts=2)"]
    assert [i for i, _ in source.seen] == [0, 1, 2, 3, 4, 4, 4]
    patient = Disturbed(5, 5, 6, 6)
    state = run(tmp_path, patient, max_restarts=2)  # the checkpoint of step 6 comes between
    hold(patient.seen, state, [4, 4, 4, 5, 6])


@pytest.mark.usefixtures("float64")
def test_a_save_that_dies_with_its_worker_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.checkpoint import saving

    write, calls = saving.write_slices, []

    def dies(folder: Any, *rest: Any) -> int:
        calls.append(folder)
        if len(calls) == 2:
            raise WorkerError("write: worker 0 died")
        return write(folder, *rest)

    monkeypatch.setattr(saving, "write_slices", dies)
    source = Disturbed()
    state = run(tmp_path, source)
    order = [i for i, _ in source.seen]
    hold(source.seen, state, order)
    restored = next(k for k in range(1, len(order)) if order[k] <= order[k - 1])
    assert order[restored] == 2, "not from the last complete checkpoint"


@pytest.mark.usefixtures("float64")
def test_what_the_user_raises_comes_out_when_the_save_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.checkpoint import saving

    write = saving.write_slices
    monkeypatch.setattr(saving, "write_slices", lambda *given: (time.sleep(0.5), write(*given))[1])

    def stop(i: int, _: Any) -> None:
        if i == 2:
            raise StopIteration("early")

    with pytest.raises(StopIteration, match="early"):
        autopar.run_elastic(
            train, init, batch_at, path=tmp_path, steps=STEPS, save_every=2, cluster=SLOW_8, on_step=stop
        )
    assert checkpoint.steps(tmp_path) == (2,)


@pytest.mark.usefixtures("float64")
def test_data_that_end_before_the_steps_are_an_error(tmp_path: Path) -> None:
    """Not the end of the training; what was trained until then is saved."""
    rest = iter([batch_at(i) for i in range(4)])
    with pytest.raises(DataError, match=r"batch 3: batch_at raised StopIteration, and 7 steps are asked for"):
        autopar.run_elastic(train, init, lambda _: next(rest), path=tmp_path, steps=STEPS, save_every=2, cluster=SLOW_8)
    assert checkpoint.steps(tmp_path) == (2, 3)
    source = Disturbed()
    state = run(tmp_path, source)
    assert [i for i, _ in source.seen] == [3, 4, 5, 6] and int(state["seen"]) == STEPS


@pytest.mark.usefixtures("float64")
def test_a_checkpoint_newer_than_the_steps_is_not_their_result(tmp_path: Path) -> None:
    run(tmp_path, Disturbed())
    with pytest.raises(CheckpointError, match=r"has a checkpoint of step 7, and steps=5 ends before it"):
        run(tmp_path, Disturbed(), steps=5)


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
def test_checkpoints_that_do_not_fit_name_the_leaf(tmp_path: Path) -> None:
    other = jax.eval_shape(init)
    source = Disturbed()
    for step, change, message in (
        (
            1,
            {"w": [np.zeros((4, 4))] * 3},
            r"leaf \['w'\]\[0\]: the tree given wants float64 of shape \(8, 8\), the ch",
        ),
        (2, {"w": [np.zeros((8, 8))] * 2}, r"leaf \['w'\]\[2\] is not in the checkpoint"),
        (3, {"w": [np.zeros((8, 8))] * 4}, r"1 stored leaves are not in the tree given: \['w'\]\[3\]"),
        (
            4,
            {"seen": np.zeros((), np.int64)},
            r"leaf \['seen'\]: .* wants int32 of shape \(\), the checkpoint has int64",
        ),
    ):
        tree = {"w": [np.zeros(x.shape, x.dtype) for x in other["w"]], "seen": np.zeros((), np.int32), **change}
        autopar.save(tmp_path, tree, step=step).wait(60)
        with pytest.raises(CheckpointError, match=message):
            run(tmp_path, source)
    (tmp_path / "5" / "default").mkdir(parents=True)
    (tmp_path / "5" / "commit_success.txt").write_text("somebody else's")
    with pytest.raises(CheckpointError, match="_METADATA is missing: not a pytree that autopar or Orbax wrote"):
        run(tmp_path, source)
    assert not source.seen


def test_options_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="save_every: 0; expected a number of 1 or more"):
        run(tmp_path, Disturbed(), save_every=0)
    with pytest.raises(OptionError, match="give the plain function"):
        autopar.run_elastic(autopar.parallelize(train), init, batch_at, steps=1, path=tmp_path)
    with pytest.raises(OptionError, match="deadline_s: only steps on a Ray have one"):
        run(tmp_path, Disturbed(), deadline_s=3.0)
    with pytest.raises(OptionError, match="draw_on_hosts: only steps on a Ray have other hosts"):
        run(tmp_path, Disturbed(), draw_on_hosts=True)


def test_hosts_that_do_not_answer_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Ray says of them yet."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'autopar[ray]'")
    from autopar.runtime.on_ray.live_nodes import alive_hosts, silent_nodes

    with socket.create_server(("127.0.0.1", 0)) as up, socket.create_server(("127.0.0.1", 0)) as down:
        ports = [x.getsockname()[1] for x in (up, down)]
        nodes = [
            {"Alive": True, "NodeID": str(port), "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
            for port in ports
        ]
        nodes.append({**nodes[0], "Alive": False})
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        assert (alive_hosts(), silent_nodes()) == (2, [])
        down.close()
        assert (alive_hosts(), silent_nodes()) == (1, [str(ports[1])])


def test_a_cluster_with_fewer_hosts() -> None:
    three = cluster_from_text("dgx-a100:3")
    assert without_hosts(three, 0) is three
    assert without_hosts(three, 1).num_devices == 16
    with pytest.raises(ClusterError, match="of 3 hosts 3 are gone"):
        without_hosts(three, 3)
    two_kinds = dataclasses.replace(three, groups=three.groups * 2)
    with pytest.raises(ClusterError, match="1 hosts are gone, and nothing says of which of its 2 groups"):
        without_hosts(two_kinds, 1)
