"""Measured devices and links: in the cost model's terms, and of use to the planner."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh

from autopar.cli import main
from autopar.cost.collectives import collective_s
from autopar.ir.cluster import DeviceSpec, LinkSpec
from autopar.ir.errors import ClusterError
from autopar.ir.presets import cluster_from_text
from autopar.runtime.profile import HostMeasured, fit_link, launch_s, measure_link
from autopar.runtime.profile_hosts import cluster_from_hosts

LINK = LinkSpec(latency_s=1e-5, bytes_per_s=1e9)
MESSAGES = (1024, 2**24)


def device(rate: float) -> DeviceSpec:
    return DeviceSpec(
        name="cpu", memory_bytes=round(rate), flops_per_s=(("float32", rate), ("float64", rate / 2)),
        memory_bytes_per_s=rate,
    )  # fmt: skip


@given(
    size=st.integers(2, 64), alpha_s=st.floats(1e-7, 1e-3), bytes_per_s=st.floats(1e8, 1e12),
    kind=st.sampled_from(["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]),
)  # fmt: skip
def test_the_model_gives_back_what_was_measured(size: int, alpha_s: float, bytes_per_s: float, kind: str) -> None:
    link = LinkSpec(latency_s=alpha_s, bytes_per_s=bytes_per_s)
    times = [collective_s(kind, size, b, link) for b in MESSAGES]
    found = fit_link(kind, size, MESSAGES, times)
    if times[1] > 1.06 * times[0]:  # else the message's size does not show
        assert [collective_s(kind, size, b, found) for b in MESSAGES] == pytest.approx(times, rel=0.06)


@given(small=st.floats(1e-6, 1.0), large=st.floats(1e-6, 1.0))
def test_noise_gives_a_link_all_the_same(small: float, large: float) -> None:
    fit_link("all-reduce", 2, MESSAGES, [small, large]).verify()


def test_a_cluster_is_as_fast_as_its_slowest_host() -> None:
    hosts = [
        HostMeasured(device=device(r), devices=n, launch_s=1e-5, link=LINK) for r, n in ((4e9, 2), (2e9, 2), (8e9, 4))
    ]
    nic = LinkSpec(latency_s=1e-4, bytes_per_s=1e8)
    spec = cluster_from_hosts("mine", hosts, nic)
    assert [(g.hosts, g.devices_per_host) for g in spec.groups] == [(2, 2), (1, 4)]
    assert spec.groups[1].device == device(2e9) and spec.between == spec.groups[0].nic == nic
    alone = HostMeasured(device=device(1e9), devices=1, launch_s=1e-5, link=None)
    assert cluster_from_hosts("one", [alone], None).groups[0].intra_host.latency_s == 1e-5
    assert cluster_from_hosts("two", [alone, alone], nic).groups[0].intra_host == nic


def test_links_of_a_mesh() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2, 1), ("x", "y", "z"))
    for axis in ("x", "y"):
        measure_link(mesh, axis).verify()
    with pytest.raises(ClusterError, match="axis 'z' has one device"):
        measure_link(mesh, "z")
    assert 1e-7 < launch_s(jax.devices()[1], 20) < 1


def test_the_command_writes_what_the_planner_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "here.json"
    assert main(["profile", "--local", "--quick", "--out", str(out)]) == 0
    spec = cluster_from_text(str(out))
    assert spec.num_devices == len(jax.devices()) and spec.groups[0].device.name == "cpu"
    assert "links in a host" in capsys.readouterr().out
    target = f"{Path(__file__).parents[2] / 'examples' / 'gpt' / 'model.py'}:plan_target"
    plan = tmp_path / "plan.json"
    words = ["plan", target, "--cluster", str(out), "--set", "layers=1", "hidden=32", "heads=2", "vocab=64", "seq=16"]
    words += ["batch=8", "dtype=float32", "--stages", "1"]
    assert main([*words, "--out", str(plan)]) == 0
