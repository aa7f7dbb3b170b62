"""Workers that die or stall at given places: training goes on from the last checkpoint, as if nothing had been."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar import checkpoint
from autopar.ir.errors import CheckpointError, WorkerError
from tests.clusters import cluster
from tests.compare import FAST_COMPILE, assert_close
from tests.elastic_runs import STEPS, batch_at, hold, init, train
from tests.models import build
from tests.ray.saboteur import Saboteur

HOSTS = {n: cluster(n, flops_per_s=1e10, memory_bytes_per_s=1e10, latency_s=1e-8) for n in (2, 4)}
SINGLE_4 = cluster(1, flops_per_s=1e10, memory_bytes_per_s=1e10, latency_s=1e-8, hosts=4)
DEADLINE_S = 300.0
"""For steps that nobody stops, on a machine that does other things too."""
STALLED_S = 30.0
OPTIONS: Any = {"stages": 2, "num_microbatches": 2, "layers": 3, "workers": 1, "schedule": "1f1b"}


@pytest.mark.parametrize(
    ("place", "at", "drawn"),
    [
        ("forward", 12, True),
        pytest.param("stall", 12, True, marks=pytest.mark.full),
        pytest.param("transfer", 25, False, marks=pytest.mark.full),
        pytest.param("message", 25, True, marks=pytest.mark.full),
        ("checkpoint", 2, False),
    ],
)
def test_training_goes_on(ray_cluster: Any, tmp_path: Path, place: str, at: int, drawn: bool) -> None:
    """At the last microbatch of step 5, somewhere in the middle, or in the second checkpoint (of step 4). ``drawn``: by
    the workers."""
    flag, saves = tmp_path / "flag", tmp_path / "saves"
    seen: list[tuple[int, float]] = []
    ended: list[float] = []
    complete: list[int | None] = []
    deadline_s = STALLED_S if place == "stall" else DEADLINE_S

    def on_step(i: int, loss: Any) -> None:
        if flag.exists() and not ended:
            ended.append(time.time() - flag.stat().st_mtime)
        seen.append((i, float(loss)))

    def there() -> Any:
        complete.append(checkpoint.latest(saves))
        return HOSTS[4 if len(complete) == 1 or place != "forward" else 2]  # a host is lost with its worker

    batches = Counted()
    state = autopar.run_elastic(
        Saboteur(train, place, at, flag), init, batches, steps=STEPS, path=saves, save_every=2, keep=None,
        on_step=on_step, cluster=ray_cluster, plan_for=there, deadline_s=deadline_s, draw_on_hosts=drawn, **OPTIONS,
    )  # fmt: skip
    assert batches.calls == 1 if drawn else batches.calls > len(seen), "who has drawn?"
    assert not os.path.exists(f"/proc/{flag.read_text()}"), "the worker that failed is still there"
    steps = [i for i, _ in seen]
    restored = next(k for k in range(1, len(steps)) if steps[k] <= steps[k - 1])
    assert complete == [None, steps[restored] or None], "not from the last complete checkpoint"
    assert steps == [*range(restored), *range(steps[restored], STEPS)]
    assert place != "checkpoint" or complete[1] == 2, "the checkpoint before is damaged"
    hold(seen, state, steps)
    assert checkpoint.steps(saves) == (2, 4, 6, 7)
    assert not list(saves.glob("*tmp*")), "what was interrupted is still there"
    late_s = deadline_s if place == "stall" else 0.0
    print(f"{place}: {ended[0] - late_s:.1f} s from the failure (stall: its deadline) to the first step done again")
    sizes = {len(x.devices) for x in state["w"][0].keeper.loaded}
    assert sizes == ({1} if place == "forward" else {2})


class Counted:
    """`batch_at`, with how often this process has called it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, i: int) -> Any:
        self.calls += 1
        return batch_at(i)


def _fetched(_: Any) -> Any:
    raise AssertionError("numbers came to the driver")


def host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


@pytest.mark.parametrize(
    ("name", "hosts"), [("gpt_scan", 1), *(pytest.param("gpt_tied", n, marks=pytest.mark.full) for n in (1, 2))]
)
def test_workers_write_and_read_their_own_slices(
    ray_cluster: Any, tmp_path: Path, name: str, hosts: int, monkeypatch: Any
) -> None:
    """Two steps on Ray, saved beside a third; restored on Ray, and under another plan in this process. ``hosts``: of a
    mesh."""
    model = build(name, "float64")
    serial = jax.jit(model.step, compiler_options=FAST_COMPILE)
    known = {"donate_argnums": (0,)}
    here = autopar.parallelize(
        model.step, cluster=HOSTS[4] if hosts == 1 else SINGLE_4, num_microbatches=4, workers=1, stages=2,
        submeshes=[f"{hosts}x{2 // hosts}"], schedule="1f1b", compiler_options=FAST_COMPILE, **known,
    )  # fmt: skip
    far = here.with_options(cluster=ray_cluster, plan=here.plan(*model.args), deadline_s=DEADLINE_S)
    args, want = model.fresh_args(), model.args
    for _ in range(2):
        args, want = model.next_args(far(*args)), model.next_args(serial(*want))
    with monkeypatch.context() as patch:
        patch.setattr(
            "autopar.runtime.on_ray.arrays.RemoteArray.host", lambda _: pytest.fail("numbers came to the driver")
        )
        save = autopar.save(tmp_path, {"state": args[0], "position": 2}, step=2)
        out = far(*args)  # donates what is being written
        folder = save.wait(60) / "default"
        target = {"state": far.abstract(lambda: model.args[0]), "position": 0}
        back = autopar.restore(tmp_path, target)
    writers = sorted(folder.glob("ocdbt.process_*"))
    assert len(writers) == 1 + 2 * hosts
    sizes = [sum(f.stat().st_size for f in w.glob("**/*") if f.is_file()) for w in writers]
    print("bytes of each writer", sizes)
    assert sizes[0] < min(sizes[1:]) / 4, "the driver wrote more than the position"
    assert back["position"] == 2
    assert_close(host(back["state"]), host(want[0]), 1e-9, least_norm=1e-6)
    expected = serial(*want)
    assert_close(host(out), host(expected), 1e-9, least_norm=1e-6)
    assert_close(host(far(back["state"], *args[1:])), host(expected), 1e-9, least_norm=1e-6)
    near = autopar.parallelize(
        model.step, cluster=HOSTS[4], num_microbatches=2, workers=1, stages=2, submeshes=["1x1"], schedule="gpipe",
        compiler_options=FAST_COMPILE, **known,
    )  # fmt: skip
    near.plan(*model.args)
    state = autopar.restore(tmp_path, {"state": near.abstract(lambda: model.args[0]), "position": 0})["state"]
    got = near(state, *args[1:])
    assert_close(host(got), host(expected), 1e-9, least_norm=1e-6)
    autopar.save(tmp_path, got[0], step=3).wait(60)
    live = autopar.restore(tmp_path, out[0], step=3)  # into the places of arrays that are there
    assert_close(host(live), host(expected[0]), 1e-9, least_norm=1e-6)
    with pytest.raises(CheckpointError, match=r"leaf \['state'\]\['opt'\].*: its array was donated or deleted"):
        autopar.save(tmp_path, {"state": args[0]}, step=4)
    with pytest.raises(CheckpointError, match=r"leaf \['state'\]\['opt'\].*: says where an array is to be"):
        autopar.save(tmp_path, target, step=4)
    with pytest.raises(CheckpointError, match=r"leaf \['opt'\].* is not in the checkpoint"):
        autopar.restore(tmp_path, far.abstract(lambda: model.args[0]), step=2)
    for writer in (tmp_path / "3").glob("default/ocdbt.process_*"):  # numbers, not the index: workers meet them
        data = max(writer.glob("d/*"), key=lambda file: file.stat().st_size)
        data.write_bytes(bytes(x ^ 1 for x in data.read_bytes()))
    with pytest.raises(CheckpointError, match=r"worker \d: .*leaf \['.*: its data is missing or damaged"):
        autopar.restore(tmp_path, out[0], step=3)
    assert_close(host(live), host(expected[0]), 1e-9, least_norm=1e-6)  # the workers are still there
    far.close()
    with pytest.raises(WorkerError, match="were shut down"):
        autopar.save(tmp_path, live, step=5)
    assert checkpoint.steps(tmp_path) == (2, 3)
