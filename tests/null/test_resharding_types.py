"""Types of reshardings: tiles, placement, text, and what verify() refuses; the benchmark's case files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.cost.logical_meshes import logical_mesh
from autopar.ir.cluster import LinkSpec
from autopar.ir.errors import ReshardingError
from autopar.ir.graph import TensorType
from autopar.ir.presets import cluster_from_text
from autopar.ir.resharding import (
    Hop,
    Leg,
    Network,
    Transfer,
    network_of,
    part_bounds,
    place,
    tile_box,
)
from autopar.ir.sharding import ShardingSpec
from autopar.resharding.planning import plan_resharding
from benchmarks import resharding as benchmark
from benchmarks.resharding_cases import CASES, OWN_CASES, problem_of, random_cases, read_cases
from tests.null.resharding_cases import Problem, between, network, rows, spec


def test_tiles_are_cut_as_gspmd_cuts_them() -> None:
    assert part_bounds(10, 4) == ((0, 3), (3, 6), (6, 9), (9, 10))
    assert part_bounds(2, 3) == ((0, 1), (1, 2), (2, 2))
    assert part_bounds(0, 2) == ((0, 0), (0, 0))
    mesh = rows(2, 3, 0, 0).mesh
    value_type = TensorType(shape=(7, 4), dtype="int32")
    assert [tile_box(value_type, spec("10", ""), mesh, p)[0] for p in range(6)] == [
        (0, 2), (4, 6), (7, 7), (2, 4), (6, 7), (7, 7),
    ]  # fmt: skip
    counts = np.zeros((7, 4), int)
    for position in range(6):
        counts[tuple(slice(*b) for b in tile_box(value_type, spec("0", "1"), mesh, position))] += 1
    assert (counts == 1).all()


def test_meshes_are_placed_host_by_host() -> None:
    cluster = cluster_from_text("dgx-h100:2")
    placed = place(logical_mesh(cluster, (2, 8)), cluster)
    assert placed.hosts == (0,) * 8 + (1,) * 8
    assert placed.nics == tuple(range(8)) * 2
    one_nic = cluster_from_text("p3.16xlarge:3")
    assert place(logical_mesh(one_nic, (3, 8)), one_nic).nics == (0,) * 24
    assert [h.nics for h in network_of(one_nic).hosts] == [1, 1, 1]
    slow = LinkSpec(latency_s=1e-3, bytes_per_s=1e6)
    mixed = replace(cluster, groups=(*cluster.groups, *one_nic.groups), between=slow)
    assert [h.nics for h in network_of(mixed).hosts] == [8, 8, 1, 1, 1]
    assert {h.nic for h in network_of(mixed).hosts} == {slow}
    mesh = logical_mesh(mixed, (2,))
    assert place(replace(mesh, device_ids=(15, 16)), mixed).hosts == (1, 2)
    with pytest.raises(ReshardingError, match="device 40 is not in cluster dgx-h100:2, which has devices 0 to 39"):
        place(replace(mesh, device_ids=(0, 40)), mixed)


def refused(problem: Problem, message: str) -> None:
    with pytest.raises(ReshardingError, match=message):
        plan_resharding(*problem)


def test_bad_meshes_are_refused() -> None:
    good = between((8,), (1, 2), spec("1"), (1, 2), spec("1"))
    values, (a, b), links = good
    refused(
        Problem(values, (a, rows(1, 2, 1, 1)), links),
        r"meshes 0 and 1 overlap: both have device 1\. Meshes of a resharding are disjoint; inside one mesh, a",
    )
    refused(Problem(values, (a, rows(1, 0, 1, 2)), links), "mesh 1 is empty: a resharding needs devices on both sides")
    refused(
        Problem(values, (replace(a, hosts=(0,)), b), links),
        "mesh 0 has 2 devices, but 1 hosts and 2 NICs are given; give one of each per device",
    )
    twice = replace(a, mesh=replace(a.mesh, device_ids=(0, 0)))
    refused(Problem(values, (twice, b), links), r"mesh 0 names a device twice: \(0, 0\)")
    refused(good._replace(network=network(1)), "mesh 1: device 2 is on host 1; the network has hosts 0 to 0")
    refused(Problem(values, (replace(a, nics=(0, 1)), b), links), "mesh 0: device 1 uses NIC 1 of host 0, which has 1")
    refused(good._replace(network=Network(hosts=())), "the network has no hosts")
    none = replace(links.hosts[0], nics=0)
    refused(good._replace(network=Network(hosts=(none,) * 2)), "host 0 has 0 NICs; it needs at least 1")


def test_bad_values_are_refused() -> None:
    good = between((8, 4), (1, 2), spec("1", ""), (1, 2), spec("1", ""))

    def with_value(**changes: object) -> Problem:
        return good._replace(values=(replace(good.values[0], **changes),))

    refused(
        with_value(dst_spec=spec("1")),
        r"value 0 \(int32\[8,4\]\), destination spec \[a1\]: 1 dimensions, the value has 2",
    )
    refused(
        with_value(src_spec=spec("5", "")),
        r"value 0 \(int32\[8,4\]\), source spec \[a5,_\]: mesh 0 has no axis 'a5'; its axes are a0, a1",
    )
    refused(
        with_value(src_spec=ShardingSpec(dims=((), ()), unreduced=("a1",))),
        "partial sums over a1 cannot cross meshes; reduce them before",
    )
    refused(with_value(dst=0), "value 0 .*: source and destination are both mesh 0")
    refused(with_value(dst=2), "mesh 2 does not exist; there are 2")


def test_plans_that_do_not_fit_are_refused() -> None:
    plan = plan_resharding(*between((8,), (1, 2), spec("1"), (2, 1), spec("")), strategy="split_broadcast")
    plan.verify()
    first = plan.transfers[0]

    def changed(message: str, **changes: object) -> None:
        broken = replace(plan, transfers=(replace(first, **changes), *plan.transfers[1:]))
        with pytest.raises(ReshardingError, match=message):
            broken.verify()

    changed("device 1 does not hold it", sender=1)
    changed("device 0 does not want it", hops=(Hop(device=0, source=-1),))
    changed("device 3 gets 4 elements, its tile", hops=first.hops[:1])
    changed("device 2 gets 7 elements, its tile", stop=first.stop - 1)
    changed("no hops, or one that gets its chunks from a later one", hops=())
    changed("no hops, or one that gets", hops=(replace(first.hops[0], source=0), *first.hops[1:]))
    changed("copies leave the host of device 2", hops=(replace(first.hops[0], copies=(3,)),))
    changed("transfer 0: chunks of 0 elements", chunk_elements=0)
    changed("an empty piece, or one outside its box", stop=first.stop + 1)
    changed("there is no value 1", value=1)
    with pytest.raises(ReshardingError, match="device 2 gets 4 elements"):
        replace(plan, transfers=plan.transfers[1:]).verify()
    with pytest.raises(ReshardingError, match="times out of order"):
        replace(plan, bound_s=2 * plan.fluid_s).verify()


def test_text_of_a_plan() -> None:
    plan = plan_resharding(*between((8,), (1, 2), spec("1"), (2, 2), spec("")), strategy="split_broadcast")
    assert str(plan) == "\n".join(
        [
            "resharding of 1 values by split_broadcast: 0.021 ms, 1.000 times the bound, 2 transfers in 1 streams",
            "v0: int32[8] mesh 0 [a1] -> mesh 1 [_]",
            "v0[0:4] 0 -> 2+3 -> 4+5 in 1 chunks, stream 0",
            "v0[4:8] 1 -> 3+2 -> 5+4 in 1 chunks, stream 0",
        ]
    )
    tree = Transfer(
        value=0, box=((0, 9),), start=1, stop=8, sender=0, chunk_elements=3, stream=2,
        hops=(Hop(device=1, source=-1), Hop(device=2, source=0), Hop(device=3, source=0), Hop(device=4, source=-1)),
    )  # fmt: skip
    assert str(tree) == "v0[0:9](1:8) 0 -> 1 -> 2 -> (hop 0)3 -> (sender)4 in 3 chunks, stream 2"
    assert [tree.chunk(i) for i in range(3)] == [(1, 4), (4, 7), (7, 8)]


def test_the_legs_of_a_transfer() -> None:
    hops = (Hop(device=2, source=-1, copies=(3, 4)), Hop(device=5, source=0), Hop(device=6, source=-1))
    transfer = Transfer(value=0, box=((0, 9),), start=0, stop=9, sender=0, hops=hops, chunk_elements=2, stream=1)
    assert transfer.legs == (Leg(0, 2, -1), Leg(2, 3, 0), Leg(3, 4, 1), Leg(2, 5, 0), Leg(0, 6, -1))
    assert tuple(leg.taker for leg in transfer.legs) == transfer.receivers


CASE = {
    "shape": [6, 4],
    "dtype": "int32",
    "src": {"mesh": [2, 2], "spec": [[0], []]},
    "dst": {"mesh": [3, 1], "spec": [[], [0, 1]]},
}


def test_case_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cases.json"
    path.write_text(json.dumps([CASE, {**CASE, "name": "own", "rails": True, "back": True, "copies": 2}]))
    plain, own = read_cases(path)
    assert (plain.name, own.name) == ("case 0", "own")
    problem = problem_of(plain)
    assert str(problem.values[0]) == "int32[6,4] mesh 0 [a0,_] -> mesh 1 [_,a0·a1]"
    assert [m.hosts for m in problem.meshes] == [(0, 0, 1, 1), (2, 3, 4)]
    assert len(problem_of(own).values) == 4
    assert [h.nics for h in problem_of(own).network.hosts] == [2, 2, 1, 1, 1]
    monkeypatch.setattr(benchmark, "PLANNING_BARS_S", ())  # no test is timed
    assert benchmark.main(["--cases", str(path)]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[3]", "expected a list of cases"),
        (json.dumps({k: v for k, v in CASE.items() if k != "dst"}), "case 0: no 'dst'; a case has shape, dtype, src"),
        (json.dumps({**CASE, "shape": [6, -4]}), r"case 0: \[6, -4\] is not a list of numbers from 0 on"),
    ],
)
def test_damaged_case_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cases.json"
    path.write_text(text)
    with pytest.raises(ReshardingError, match=message):
        read_cases(path)
    with pytest.raises(SystemExit):
        benchmark.main(["--cases", str(path)])


def test_bad_cases_are_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cases.json"
    path.write_text(json.dumps([{**CASE, "dst": {"mesh": [3, 0], "spec": [[], []]}}, {**CASE, "dtype": "int33"}]))
    assert benchmark.main(["--cases", str(path)]) == 1
    out = capsys.readouterr().out
    assert "missed: case 0: mesh 1 is empty" in out
    assert "missed: case 1: unknown dtype 'int33'" in out


def test_built_in_cases_are_well_formed() -> None:
    for case in (*CASES, *OWN_CASES[:-1], *random_cases(20)):
        problem_of(case)
    assert random_cases(5, 3) == random_cases(5, 3)
    row = benchmark.measure(CASES[9])
    assert benchmark.misses(CASES[9], row._replace(cpu_s=0.0)) == []
    worse = row._replace(planned=1.03, chunks=1.06, cpu_s=1.0)
    missed = [line.split(": ")[1] for line in benchmark.misses(CASES[9], worse)]
    assert missed == [
        "1.0300 times the bound, bar 1.02",
        "chunks take 1.0600 times the bound, bar 1.05",
        f"planning 4 unit tasks took 1000 ms of CPU ({1e3 * row.planning_s:.0f} ms in all), bar 50 ms",
    ]
