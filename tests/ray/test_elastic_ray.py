"""Workers that die or stall at given places: training goes on from the last checkpoint, as if nothing had been."""

from __future__ import annotations

import os
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar import checkpoint
from autopar.ir.errors import CheckpointError, WorkerError
from benchmarks.models import chain_loss
from tests.clusters import cluster
from tests.compare import assert_close
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
        pytest.param("forward", 12, True, marks=pytest.mark.full),
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


ROWS, WIDTH = 254, 251
"""Of `wide_step`: two hosts divide nothing of a microbatch, and what crosses are 16 chunks."""


def wide_init(key: Any) -> Any:
    return [jax.random.normal(k, (WIDTH, WIDTH), "float64") * WIDTH**-0.5 for k in jax.random.split(key, 2)]


def wide_step(params: Any, x: Any) -> Any:
    value, grads = autopar.value_and_grad(chain_loss)(params, x)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value


def wide_batch(i: int) -> Any:
    return np.random.default_rng(i).normal(size=(ROWS, WIDTH))


@pytest.mark.parametrize(
    "at", [pytest.param(n, marks=pytest.mark.full) for n in (17, *random.Random(24).sample(range(1, 96), 19))]
)
def test_a_relay_dies(ray_cluster: Any, tmp_path: Path, at: int, caplog: pytest.LogCaptureFixture) -> None:
    """What crosses goes to the first host of the second mesh, and from there to the other: at its ``at``-th chunk it is
    killed. The error names it, at once, and training goes on from the checkpoint."""
    flag, saves = tmp_path / "flag", tmp_path / "saves"
    three = cluster(1, flops_per_s=1e10, memory_bytes_per_s=1e10, latency_s=1e-8, hosts=3)
    options: Any = {
        "stages": 2, "num_microbatches": 2, "layers": 2, "workers": 1, "schedule": "1f1b", "submeshes": ["1x1", "2x1"],
        "resharding": "broadcast", "stage_starts": [0, 1],
    }  # fmt: skip
    near = autopar.parallelize(wide_step, cluster=three, **options)
    program = near.plan(jax.eval_shape(wide_init, jax.random.key(0)), wide_batch(0)).program
    [forward] = [t.resharding for t in program.transfers if t.source == 0]
    assert [[(leg.giver, leg.taker) for leg in t.legs] for t in forward.transfers] == [[(0, 1), (1, 2)]]
    assert forward.transfers[0].chunks == 16
    seen: list[tuple[int, float]] = []
    steps = 3
    autopar.run_elastic(
        Saboteur(wide_step, "relay", at, flag), partial(wide_init, jax.random.key(0)), wide_batch, steps=steps,
        path=saves, save_every=1, on_step=lambda i, loss: seen.append((i, float(loss))), cluster=ray_cluster,
        plan_for=lambda: three, deadline_s=DEADLINE_S, **options,
    )  # fmt: skip
    [failure] = [r for r in caplog.records if "restart 1 of" in r.getMessage()]
    assert f"worker 1, host 0 of its mesh (process {flag.read_text()}) died" in failure.getMessage()
    late_s = failure.created - flag.stat().st_mtime
    print(f"chunk {at}: {late_s:.2f} s from the failure to its error")
    assert late_s < 5.0
    params, serial = wide_init(jax.random.key(0)), jax.jit(wide_step)
    for i in range(steps):
        params, loss = serial(params, wide_batch(i))
        assert [x for j, x in seen if j == i][-1] == pytest.approx(float(loss), rel=1e-9)


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


FULL_SLICES = (("gpt_scan", 1), ("gpt_tied", 1), ("gpt_tied", 2))


@pytest.mark.parametrize(
    ("name", "hosts"), [("mlp", 1), *(pytest.param(*case, marks=pytest.mark.full) for case in FULL_SLICES)]
)
def test_workers_write_and_read_their_own_slices(
    ray_cluster: Any, tmp_path: Path, name: str, hosts: int, monkeypatch: Any
) -> None:
    """Two steps on Ray, saved beside a third; restored on Ray, and under another plan in this process. ``hosts``: of a
    mesh."""
    model = build(name, "float64")
    serial = jax.jit(model.step)
    known = {"donate_argnums": (0,)}
    here = autopar.parallelize(
        model.step, cluster=HOSTS[4] if hosts == 1 else SINGLE_4, num_microbatches=4, workers=1, stages=2,
        submeshes=[f"{hosts}x{2 // hosts}"], schedule="1f1b", **known,
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
        **known,
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
