"""The benchmark on real links: it says when it cannot run, measures what arrives, and leaves nothing behind."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.inter_op.crossing import cut_resharding
from autopar.inter_op.program.emit import emit
from autopar.inter_op.program.simulate import simulate
from autopar.inter_op.schedules import make_schedule
from autopar.ir.cluster import MeshAxis
from autopar.ir.graph import TensorType
from autopar.ir.pipeline import Cut, CutValue
from autopar.ir.resharding import place
from autopar.ir.sharding import ShardingSpec
from benchmarks import resharding_hosts
from benchmarks.host_workers import HostError, Workers, places_of, workers
from benchmarks.namespaces import NamespaceError, network
from benchmarks.resharding_cases import CASES, Case, side
from tests.null.pipelines import pipeline, stage_cost

ROOT = Path(__file__).parents[2]
ROWS = ShardingSpec(dims=(("x",), ()))


def _refused() -> str:
    """Why namespaces cannot be made here, or nothing."""
    try:
        with network(1, 1e9):
            return ""
    except NamespaceError as error:
        return str(error)


REFUSED = _refused()
needs_namespaces = pytest.mark.skipif(bool(REFUSED), reason=REFUSED or "-")


def namespaces_of(pid: int) -> list[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line.startswith(f"autopar{pid}-")]


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert resharding_hosts.main([]) == 2
    assert "network namespaces need root" in capsys.readouterr().out


def test_without_iproute_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda command: None)
    assert resharding_hosts.main([]) == 2
    assert "'ip' is not installed" in capsys.readouterr().out


@needs_namespaces
def test_namespaces_are_removed_after_a_failure() -> None:
    with pytest.raises(ZeroDivisionError), network(2, 1e9):
        assert len(namespaces_of(os.getpid())) == 3
        raise ZeroDivisionError
    assert not namespaces_of(os.getpid())


@needs_namespaces
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_namespaces_are_removed_after_an_interrupt(sent: signal.Signals) -> None:
    code = (
        "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # where a shell ignores it
        "from benchmarks.namespaces import network\n"
        "with network(2, 1e9) as hosts:\n    print(flush=True)\n    time.sleep(600)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert child.stdout is not None
    with child, child.stdout:
        try:
            child.stdout.readline()
            assert len(namespaces_of(child.pid)) == 3
            child.send_signal(sent)
            assert child.wait(60) != 0
        finally:
            child.kill()
    assert not namespaces_of(child.pid)


@needs_namespaces
def test_values_arrive_over_the_links() -> None:
    """Through relays, from and to meshes of several hosts."""
    case = Case(name="R -> S", shape=(16, 1024), src=side((2, 2), "RR"), dst=side((2, 2), "S1R"))
    plan = resharding_hosts.plan_of(case, 8e6)
    assert any(len(t.legs) > 1 for t in plan.transfers)
    with network(4, 1e9) as hosts:
        measured = resharding_hosts.run_plan(plan, hosts, 2)
    assert measured.median_s > 0.9 * plan.bound_s  # the link's bandwidth is limited


@needs_namespaces
def test_what_crosses_is_what_the_plan_says() -> None:
    """The bytes that each process has sent each other."""
    case = Case(name="R -> R", shape=(16, 1024), src=side((1, 2), "RR"), dst=side((3, 2), "RR"))
    plan = resharding_hosts.plan_of(case, 1e6)
    wanted: dict[tuple[int, int], int] = {}
    with network(4, 1e9) as hosts, workers(places_of(plan.meshes, hosts)) as gang:
        gang.all("load", plan)
        gang.all("cross")
        sent = gang.all("sent")
        of = {d: i for i, place in enumerate(gang.places) for d in place.devices}
        for transfer in plan.transfers:
            for leg in transfer.legs:
                if of[leg.giver] != of[leg.taker]:
                    ends = of[leg.giver], of[leg.taker]
                    wanted[ends] = wanted.get(ends, 0) + 4 * transfer.elements
    found = {(i, gang.addresses.index(a)): n for i, mine in enumerate(sent) for a, n in mine.items() if n}
    assert found == wanted


@needs_namespaces
def test_a_pipelines_step_takes_what_its_tasks_take() -> None:
    """Two stages of 20 and 40 ms a microbatch, and transfers that hide behind them."""
    cluster = resharding_hosts.four_hosts()
    value = CutValue(
        value=0, name="x", type=TensorType(shape=(4, 64), dtype="float32"), src_spec=ROWS, dst_spec=ROWS
    )  # fmt: skip
    plan = pipeline(make_schedule("1f1b", 2, 4), stage_cost(forward_s=0.02, input_grad_s=0.02, weight_grad_s=0.02), ())
    axis = MeshAxis(name="x", size=4, link=resharding_hosts.LINK)
    meshes = [replace(plan.stages[0].mesh, axes=(axis,), device_ids=tuple(range(4 * s, 4 * s + 4))) for s in range(2)]
    stages = tuple(replace(stage, mesh=mesh) for stage, mesh in zip(plan.stages, meshes, strict=True))
    cuts = tuple(
        Cut(source=s, target=1 - s, phase=phase, values=(value,), time_s=0.0, bound_s=0.0, receive_bytes=0.0)
        for s, phase in enumerate(("forward", "backward"))
    )
    plan = replace(plan, stages=stages, cuts=cuts)
    plan = replace(plan, cuts=tuple(replace(c, time_s=cut_resharding(plan, c, cluster).time_s) for c in cuts))
    simulated_s = simulate(emit(plan)).makespan_s
    placed = [place(mesh, cluster) for mesh in meshes]
    with network(2, 1e9) as hosts, workers(places_of(placed, hosts)) as gang:
        gang.all("pipeline", plan, cluster, 2, None)
        times = [resharding_hosts.crossed_s(gang, "step") for _ in range(3)]
    assert simulated_s < min(times)


@needs_namespaces
def test_a_process_that_ends_is_an_error() -> None:
    plan = resharding_hosts.plan_of(resharding_hosts.SINGLE, 64e6)  # half a second
    with network(2, 1e9) as hosts, workers(places_of(plan.meshes, hosts)) as gang:
        gang.all("load", plan)
        timer = threading.Timer(0.2, gang.children[0].kill)
        timer.start()
        with pytest.raises(HostError, match="cross: a process has ended with -9"):
            gang.all("cross")
        timer.join()


@needs_namespaces
def test_values_that_differ_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = resharding_hosts.plan_of(resharding_hosts.SINGLE, 1e6)
    ask = Workers.all
    monkeypatch.setattr(Workers, "all", lambda it, method, *x: [False] if method == "check" else ask(it, method, *x))
    with network(2, 1e9) as hosts, pytest.raises(AssertionError, match="other values arrived than were sent"):
        resharding_hosts.run_plan(plan, hosts, 1)
    assert not namespaces_of(os.getpid())


def test_cases_are_made_to_divide() -> None:
    for case in CASES:
        plan = resharding_hosts.plan_of(case, 1e6)
        for value in plan.values:
            for index, spec in ((value.src, value.src_spec), (value.dst, value.dst_spec)):
                sizes = {axis.name: axis.size for axis in plan.meshes[index].mesh.axes}
                for n, axes in zip(value.type.shape, spec.dims, strict=True):
                    assert n % math.prod(sizes[a] for a in axes) == 0
