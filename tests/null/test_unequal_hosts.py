"""Two groups of hosts with other devices, memory and links: planned, saved, shown and simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.cli import main
from autopar.ir.cluster import ClusterSpec, DeviceSpec, HostGroup, LinkSpec
from autopar.ir.errors import ClusterError
from tests.null.test_pipeline_plans import make

pytestmark = pytest.mark.xdist_group("unequal hosts")  # one process makes what all tests of the file share

LARGE = 1 << 34


def group(faster: float, memory_bytes: int = LARGE, inside: float = 50e9) -> HostGroup:
    """A host with two devices, ``faster`` times as fast as 1 TFLOP/s."""
    device = DeviceSpec(
        name=f"made-up x {faster:g}",
        memory_bytes=memory_bytes,
        flops_per_s=(("float32", faster * 1e12),),
        memory_bytes_per_s=faster * 1e13,
    )
    link = LinkSpec(latency_s=1e-6, bytes_per_s=inside)
    nic = LinkSpec(latency_s=1e-5, bytes_per_s=10e9)
    return HostGroup(hosts=1, devices_per_host=2, device=device, intra_host=link, nics_per_host=1, nic=nic)


def cluster(*groups: HostGroup, between: float = 10e9) -> ClusterSpec:
    return ClusterSpec(name="made-up", groups=groups, between=LinkSpec(latency_s=1e-5, bytes_per_s=between))


def planned(on: ClusterSpec, **options: Any) -> autopar.StepPlan:
    step, args = make(layers=8)
    given: dict[str, Any] = {"cluster": on, "num_microbatches": 8, "stages": (1, None), "workers": 1, **options}
    return autopar.parallelize(step, **given).plan(*args)


def layers_on(plan: autopar.StepPlan) -> dict[str, int]:
    """Layers by the name of their device."""
    out: dict[str, int] = {}
    for stage in plan.stages.stages:
        out[stage.mesh.device.name] = out.get(stage.mesh.device.name, 0) + stage.stop - stage.start
    return out


SLOW, FAST = group(1.0), group(4.0)


@pytest.fixture(scope="module")
def alone() -> autopar.StepPlan:
    return planned(cluster(FAST))


@pytest.fixture(scope="module")
def both() -> autopar.StepPlan:
    return planned(cluster(SLOW, FAST))


@pytest.mark.slow
def test_a_faster_group_gets_more_layers(both: autopar.StepPlan, alone: autopar.StepPlan) -> None:
    """Four times as fast: about four of five layers. The group that comes second in the cluster may be first."""
    found = layers_on(both)
    assert found["made-up x 4"] >= 3 * found["made-up x 1"] > 0
    assert both.predictions.step_s < 0.95 * alone.predictions.step_s


@pytest.mark.slow
def test_one_program_is_not_looked_for_unasked() -> None:
    plan = planned(cluster(group(1), group(2)), stages=None)
    assert set(layers_on(plan)) <= {"made-up x 1", "made-up x 2"} and plan.stages.stages
    with pytest.raises(ClusterError, match="would mix devices"):
        planned(cluster(group(1), group(2)), stages=1, mesh="2x2", workers=None)


@pytest.mark.slow
def test_the_order_of_groups_does_not_matter(both: autopar.StepPlan) -> None:
    assert planned(cluster(FAST, SLOW)).predictions.step_s == pytest.approx(both.predictions.step_s)


@pytest.mark.slow
def test_equal_groups_are_as_good_as_a_group_of_two_hosts() -> None:
    apart = planned(cluster(FAST, FAST), schedule="1f1b", submeshes=["1x2"], stages=2)
    assert list(layers_on(apart).values()) == [8]
    assert [s.stop - s.start for s in apart.stages.stages] == [4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("between", [1e9, 1e7])
def test_slow_links_to_slow_devices_are_left_alone(alone: autopar.StepPlan, between: float) -> None:
    """No plan is slower than that of the faster group alone, whatever its schedule."""
    found = planned(cluster(SLOW, FAST, between=between))
    assert found.predictions.step_s <= alone.predictions.step_s * (1 + 1e-9)
    if between == 1e7:
        assert set(layers_on(found)) == {"made-up x 4"}


@pytest.mark.slow
def test_each_group_has_its_own_memory() -> None:
    """The faster devices hold one of eight layers and no more; none is given what does not fit it."""
    tight = planned(cluster(SLOW, group(4.0, 20_000_000)))
    found = layers_on(tight)
    assert found["made-up x 1"] > found["made-up x 4"] > 0
    for worker, stage in zip(tight.predictions.workers, tight.stages.stages, strict=True):
        assert worker.peak_bytes <= stage.mesh.device.memory_bytes


@pytest.mark.slow
def test_links_inside_a_group_are_its_own() -> None:
    """Where devices of one group talk slowly, stages there are not spread over both."""
    found = planned(cluster(FAST, group(4.0, inside=1e8)), schedule="1f1b")
    wide = [s for s in found.stages.stages if s.mesh.num_devices > 1]
    assert all(set(s.mesh.device_ids) == {0, 1} for s in wide)


@pytest.mark.slow
def test_from_file_to_text(both: autopar.StepPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "both.json"
    both.save(path)
    assert autopar.load_plan(path).data == both.data
    assert autopar.load_plan(path).simulate().makespan_s == both.predictions.step_s
    assert main(["inspect", str(path), "--all"]) == 0
    text = capsys.readouterr().out
    assert "1 host x 2 made-up x 1 (17.2 GB each), 50 GB/s; 1 host x 2 made-up x 4 (17.2 GB each), 50 GB/s" in text
    assert "layers on (1,2) of group 1" in text
    assert main(["simulate", str(path)]) == 0
    assert f"{len(both.stages.stages)} stages on {len(both.predictions.workers)} workers" in capsys.readouterr().out
