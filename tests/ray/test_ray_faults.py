"""Workers that die or fail, and drivers that end: the error says which worker, where and why; nobody is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import autopar
from autopar import checkpoint
from autopar.ir.errors import NoRoomError, WorkerError
from autopar.runtime.on_ray import gang as ganging
from autopar.runtime.on_ray import ray_cluster as starting
from autopar.runtime.on_ray.gang import Calls, Gang
from autopar.runtime.on_ray.messages import Failed
from autopar.runtime.on_ray.process import Process
from autopar.runtime.on_ray.worker import identity
from tests.ports import free_ports
from tests.processes import left, sleeper
from tests.ray.conftest import HEADS
from tests.ray.steps import Failing, FailingLater, X, init, mistaken, train

OPTIONS: Any = {"schedule": "1f1b", "submeshes": ["1x1"], "workers": 1, "layers": 2, "stages": 2}
ROOT = Path(__file__).parents[2]
GONE_S = 60.0
"""For the processes of a driver that has ended (chosen; 1 to 3 s on an idle machine, 30 were seen on a busy one)."""


def compiled(ray_cluster: Any, step: Any, deadline_s: float = 60.0) -> Any:
    """What runs the step."""
    far = autopar.parallelize(step, cluster=ray_cluster, num_microbatches=2, deadline_s=deadline_s, **OPTIONS)
    far.plan(jax.eval_shape(init, jax.random.key(0)), X)
    return far.compiled()


def test_errors_of_the_users_code_come_back(ray_cluster: Any) -> None:
    """When a worker traces, and when it runs a task: with the traceback, the stage and the instruction."""
    with pytest.raises(
        WorkerError, match=r"load: worker \d \(process \d+\) failed at tracing and compiling: .*mistake"
    ) as e:
        compiled(ray_cluster, Failing())
    assert "tests/ray/steps.py" in e.value.__notes__[0] and "ZeroDivisionError" in e.value.__notes__[0]
    far = compiled(ray_cluster, FailingLater())
    pids = list(far.pids)
    where = r"failed at instruction \d+: run .*, the forward and backward of stage 1, microbatch 1: .*mistake"
    with pytest.raises(WorkerError, match=rf"step: worker 1 \(process \d+\) {where}") as e:
        far([*init(jax.random.key(0)), X])
    assert "tests/ray/steps.py" in e.value.__notes__[0], "no traceback of the worker"
    assert not left(pids, GONE_S), "workers outlive their gang"


def test_one_that_stalls_is_told_from_one_that_is_slow(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is asked for, and however long that may take: a save has minutes, a restore half an hour."""
    monkeypatch.setattr(ganging, "PULSE_S", 0.2)
    monkeypatch.setattr(ganging, "SILENT_S", 2.0)
    far = autopar.parallelize(train, cluster=ray_cluster, num_microbatches=2, **OPTIONS)
    far.plan(jax.eval_shape(init, jax.random.key(0)), X)
    state = far.init(init, jax.random.key(0))
    gang = next(iter(jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "keeper")))).keeper.gang
    assert gang.ask("__ray_call__", [(lambda _: time.sleep(5),)] * 2, 60.0) == [None, None]  # slow
    os.kill(gang.pids[1], signal.SIGSTOP)
    said = rf"^(boxes|snapshot): not done within \d+ s: worker 1 \(process {gang.pids[1]}\) does not answer at all"
    with pytest.raises(WorkerError, match=said):
        checkpoint.save(tmp_path, state, step=1).wait()
    assert not left(gang.pids, GONE_S)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.full
def test_an_error_inside_a_task_is_the_workers_that_ran_it(ray_cluster: Any) -> None:
    """What is sent is still being computed when the next stage begins to wait for it."""
    here = autopar.parallelize(mistaken, cluster="cpu:4", num_microbatches=1, **{**OPTIONS, "submeshes": ["1x2"]})
    plan = here.plan(jax.eval_shape(init, jax.random.key(0)), X)
    far = here.with_options(cluster=ray_cluster, plan=plan, deadline_s=200)
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"(?s)step: worker 0 \(process \d+\) failed at .*a mistake of the user's"):
        far(init(jax.random.key(0)), X)
    assert time.monotonic() - started < 100, "the deadline was waited for"  # workers start and compile meanwhile


@pytest.mark.full
def test_who_only_lost_another_is_not_to_blame(ray_cluster: Any) -> None:
    """The one that failed by itself is, though it is heard later."""
    import ray

    gang = Gang([[Process(platform="cpu", devices=1)]] * 2)

    @ray.remote
    def later(after: Failed) -> Failed:
        time.sleep(0.5)
        return after

    lost, own = (
        Failed(summary=f"{why} ended", where="step", trace=why, lost=why == "connection")
        for why in ("connection", "task")
    )
    with pytest.raises(WorkerError, match=r"step: worker 1 \(process \d+\) failed at step: task ended"):
        gang.collect(Calls(method="step", waiting={ray.put(lost): 0, later.remote(own): 1}), 60)
    assert gang.closed


@pytest.mark.full
def test_a_mesh_that_ends_with_its_first_host(ray_cluster: Any) -> None:
    """Its other processes lose their group with it; that one of them is heard of first is no matter."""
    import ray
    from ray.exceptions import RayActorError

    gang = Gang([[Process(platform="cpu", devices=1)] * 2])
    second, where = gang._actors[1], gang._actors[1].where.remote()
    assert isinstance(ray.get(where), str)
    os.kill(gang.pids[1], signal.SIGKILL)
    with pytest.raises(RayActorError):
        while True:
            ray.get(second.where.remote())
    os.kill(gang.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"^step: worker 0, host 0 of its mesh \(process {gang.pids[0]}\) died"):
        gang.collect(Calls(method="step", waiting={second.where.remote(): 1}), 60)


def test_a_mesh_that_loses_another_host(ray_cluster: Any) -> None:
    gang = Gang([[Process(platform="cpu", devices=1)] * 2])
    os.kill(gang.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"^draw: worker 0, host 1 of its mesh \(process {gang.pids[1]}\) died"):
        gang.collect(Calls(method="draw", waiting={gang._actors[1].where.remote(): 1}), 60)


@pytest.mark.full
def test_who_was_ended_for_another_is_not_to_blame(ray_cluster: Any) -> None:
    """A save beside a step hears of a death first, and ends all workers."""
    gang = Gang([[Process(platform="cpu", devices=1)]] * 2)
    actor = gang._actors[0]
    gang._end(WorkerError("write: worker 1 died"))
    with pytest.raises(WorkerError, match=r"^step: the workers were ended: write: worker 1 died$"):
        gang.collect(Calls(method="step", waiting={actor.live.remote(): 0}), 60)


@pytest.mark.full
def test_messages_that_only_some_got_end_the_gang(ray_cluster: Any) -> None:
    gang = Gang([[Process(platform="cpu", devices=1)]] * 2)
    with pytest.raises(TypeError):
        gang.ask("fetch", [((),), (threading.Lock(),)], 60)
    assert gang.closed
    with pytest.raises(WorkerError, match="the workers were ended: "):
        gang.ask("live", [()] * 2, 60)
    gang = Gang([[Process(platform="cpu", devices=1)]])
    with pytest.raises(TypeError):
        gang.ask("fetch", [(threading.Lock(),)], 60)
    assert [live.arrays for live in gang.ask("live", [()], 60)] == [0]
    gang.close()


def test_workers_are_not_placed_where_nothing_answers(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr("autopar.runtime.on_ray.gang.silent_nodes", lambda: [n["NodeID"] for n in ray.nodes()])
    monkeypatch.setattr("autopar.runtime.on_ray.gang.ROOM_S", 3.0)
    with pytest.raises(NoRoomError, match="no room for 1 worker within 3 s"):
        Gang([[Process(platform="cpu", devices=1)]])


def test_a_host_is_lost_whole(tmp_path: Path) -> None:
    """With its daemon, which Ray goes on counting for a while: training goes on without it (`tests.ray.lost_host`)."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.ray.lost_host", str(free_ports(*HEADS).head), str(tmp_path)], cwd=ROOT, text=True,
        env=_environment(), capture_output=True, timeout=400, check=False,
    )  # fmt: skip
    print(run.stdout)
    assert run.returncode == 0, run.stderr
    assert re.search(r"hosts: \d say Ray, 1 answer", run.stdout)  # Ray's threads write between the lines
    assert "devices of a stage: [1]" in run.stdout


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, *(pytest.param(x, marks=pytest.mark.full) for x in (signal.SIGINT, signal.SIGTERM))]
)
def test_a_driver_that_ends_leaves_nothing(how: signal.Signals) -> None:
    """Interrupted, ended or killed: neither its workers, nor the Ray that it started, nor that one's folder."""
    with _started(str(free_ports(*HEADS).head)) as driver:
        processes = _running(driver)
        told = "\0".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in processes)
        folder = Path(re.findall(r"(?:^|[\0=])(/[^\0=]*/autopar-ray-\w+)", told)[0])  # may be an option's value
        assert folder.is_dir()
        assert len(processes) > 5, "Ray's daemons are not among them"
        driver.send_signal(how)
        _, error = driver.communicate(timeout=60)
        assert how != signal.SIGINT or "KeyboardInterrupt" in error
        assert not left(processes, GONE_S)
        assert not folder.exists()


def test_what_a_killed_head_left_goes_with_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (gone, first), (used, second) = starting._new_folder(), starting._new_folder()
    with subprocess.Popen(["sleep", "60"], pass_fds=[second]) as head:
        os.close(first)
        os.close(second)
        another, third = starting._new_folder()
        os.close(third)
        assert not gone.exists() and used.exists() and another.exists()
        head.kill()
    fourth, lock = starting._new_folder()
    os.close(lock)
    assert [path for path in (used, another, fourth) if path.exists()] == [fourth]


@pytest.mark.full
def test_a_killed_worker_is_an_error_in_time(ray_cluster: Any) -> None:
    far = compiled(ray_cluster, train)
    *state, _ = far([*init(jax.random.key(0)), X])
    os.kill(far.pids[1], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerError, match=rf"step: worker 1 \(process {far.pids[1]}\) died"):
        far([*state, X])
    assert time.monotonic() - started < 10
    with pytest.raises(WorkerError, match=r"(?s)the workers were ended: step: worker 1 .*; make the state again: step"):
        far([*init(jax.random.key(0)), X])
    assert not left(list(far.pids), GONE_S)


def test_a_decorated_step_starts_workers_again(ray_cluster: Any) -> None:
    step = autopar.parallelize(train, cluster="ray", num_microbatches=2, **OPTIONS)
    start = init(jax.random.key(0))
    value = float(step(start, X)[1])
    workers: Any = step.compiled()
    os.kill(workers.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"step: worker 0 .* died"):
        step(start, X)
    assert float(step(start, X)[1]) == value
    again: Any = step.compiled()
    assert workers.closed and not again.closed
    step.close()
    assert again.closed and not left([*workers.pids, *again.pids], GONE_S)


def test_who_has_a_dead_workers_number_is_left_alone(ray_cluster: Any) -> None:
    """A process that got the number later, by its start time; what still is the worker is killed."""
    with sleeper() as other, sleeper() as late, sleeper() as own:
        assert len({identity(p.pid) for p in (other, late, own)}) == 3
        gang = Gang([[Process(platform="cpu", devices=1)]])
        [worker] = gang.pids
        gang.pids += [late.pid, own.pid, other.pid]
        of_late, _, started = identity(late.pid).rpartition(" ")
        assert Path(f"/proc/{late.pid}/stat").read_text().rpartition(")")[2].split()[19] == started
        gang._identities += [f"{of_late} {int(started) - 1}", identity(own.pid), ""]
        gang.close()
        assert own.wait(GONE_S) == -signal.SIGKILL
        assert not left([worker], GONE_S)
        assert late.poll() is None, "a process that has the number of a worker that is gone was killed"
        assert other.poll() is None, "a process of which nothing is known was killed"
    assert identity(own.pid) == ""


@contextlib.contextmanager
def _started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`tests.ray.driver`, which does not outlive the test."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.ray.driver", *arguments], cwd=ROOT, text=True, env=_environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as driver:  # fmt: skip
        try:
            yield driver
        finally:
            driver.kill()


def _environment() -> dict[str, str]:
    """Of a driver: the tests' without what they say of Ray and of devices."""
    return {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "JAX_NUM_CPU_DEVICES")}


def _running(driver: subprocess.Popen[str]) -> list[int]:
    """Waits until a driver runs steps. The processes that should not outlive it."""
    assert driver.stdout is not None
    pids: list[int] = []
    for line in driver.stdout:
        if line == "running\n":
            return pids
        pids.append(int(line))
    _, error = driver.communicate()
    raise AssertionError(f"the driver ended: {error}")
