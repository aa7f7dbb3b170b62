"""The dynamic program over stages against all cuts; ranges of layers against all layouts; submeshes on hosts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from autopar.inter_op.cells import Cells
from autopar.inter_op.ranges import FIELDS
from autopar.inter_op.stage_dp import Limits, Partition, partitions
from autopar.inter_op.submesh import Submesh, logical_shapes, part_of, place, submeshes
from autopar.ir.cluster import ClusterSpec
from autopar.ir.presets import cluster_from_text

STATE, ACTIVATION, CONTEXT, KEPT, RESULTS, TRANSIENT = (
    FIELDS.index(f"{n}_bytes") for n in ("state", "activation", "weight_context", "weight_kept", "results", "transient")
)


def random_cells(rng: np.random.Generator, layers: int, sizes: tuple[int, ...], options: int) -> list[Cells]:
    """Costs of ranges that grow with their length; now and then those behind the first layer are equal."""
    out, equal = [], bool(rng.integers(2))
    for size in sizes:
        cost = np.full((options, layers, layers + 1, len(FIELDS)), np.inf)
        for option, start in itertools.product(range(options), range(layers)):
            for stop in range(start + 1, layers + 1):
                cost[option, start, stop] = rng.random(len(FIELDS)) * (stop - start) / size**0.7
        number = every_range(layers)
        for start, stop in itertools.combinations(range(1, layers + 1 if equal else 1), 2):
            number[start, stop] = number[1, 1 + stop - start]
        out.append(Cells.of(Submesh(0, 1, size), float(rng.uniform(1.0, 4.0)), [(number, table(cost))]))
    return out


def every_range(layers: int) -> np.ndarray:
    """A number for each range, in order of starts."""
    number = np.full((layers, layers + 1), -1)
    number[np.triu_indices(layers, 1, layers + 1)] = np.arange(layers * (layers + 1) // 2)
    return number


def table(cost: np.ndarray) -> np.ndarray:
    """float64[option, number, field] by `every_range` of float64[option, start, stop, field]."""
    return cost[:, *np.nonzero(every_range(cost.shape[1]) >= 0)]


def fitting(cell: Cells) -> Cells:
    """Without ranges that hold too much."""
    return Cells.of(cell.submesh, cell.memory_bytes, [(cell.number, cell.cost)], trains=True)


def all_cuts(layers: int, most: int) -> Iterator[list[tuple[int, int]]]:
    for count in range(1, most + 1):
        for inner in itertools.combinations(range(1, layers), count - 1):
            ends = (0, *inner, layers)
            yield list(itertools.pairwise(ends))


def seconds_of(cost: np.ndarray, m: int) -> np.ndarray:
    return cost[..., :3].sum(-1) + cost[..., 3:5].sum(-1) / m


def held(cost: np.ndarray, limits: Limits, after: int) -> np.ndarray:
    """With one microbatch between both halves of its backward pass where weight gradients wait; the others hold what
    they need of one half or what they wait with."""
    more = cost[..., ACTIVATION]
    one = cost[..., STATE] + np.maximum(cost[..., RESULTS], cost[..., TRANSIENT] + more)
    if limits.contexts:
        kept = np.minimum(cost[..., KEPT], np.minimum(cost[..., CONTEXT], more))
        one = one + cost[..., CONTEXT] - np.where(np.isfinite(kept), kept, 0.0)
        more = np.maximum(cost[..., CONTEXT], more)
    waiting = limits.in_flight(after) - 1
    return one + waiting * more if waiting else one


def room_for(used: list[Submesh], limits: Limits) -> bool:
    return all(sum(s.size for s in used if s.group == g) <= n for g, n in enumerate(limits.devices))


def brute(cells: list[Cells], limits: Limits) -> dict[int, float]:
    """Number of stages → the least T."""
    best: dict[int, float] = {}
    m = limits.num_microbatches
    for ranges in all_cuts(cells[0].layers, limits.most_stages):
        if len(ranges) < limits.least_stages:
            continue
        for picked in itertools.product(range(len(cells)), repeat=len(ranges)):
            if not room_for([cells[c].submesh for c in picked], limits):
                continue
            times, sums = [], 0.0
            for number, ((start, stop), c) in enumerate(zip(ranges, picked, strict=True)):
                after = len(ranges) - 1 - number
                cost = cells[c].at(start, stop)
                fits = seconds_of(cost, m)[held(cost, limits, after) <= cells[c].memory_bytes]
                if not len(fits):
                    break
                times.append(fits.min())
                sums += times[-1] + (limits.cut_s[stop] * (1 - limits.hidden) if after else 0.0)
            else:
                total = (m - 1) * max(times) + sums
                best[len(ranges)] = min(best.get(len(ranges), math.inf), total)
    return best


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("seed", range(30))
def test_partitions_are_the_best_of_all(seed: int, groups: int) -> None:
    """The best for any number of stages that is no worse than all with fewer, and the best of all."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(2, 6))
    cells = random_cells(rng, layers, (1, 2, 4)[: int(rng.integers(1, 4))], int(rng.integers(1, 3)))
    devices = (int(rng.integers(2, 7)),)
    if groups == 2:
        cells += [replace(c, submesh=replace(c.submesh, group=1)) for c in random_cells(rng, layers, (1, 2), 1)]
        devices = (*devices, int(rng.integers(1, 4)))
    limits = Limits(
        devices=devices,
        most_stages=4,
        num_microbatches=int(rng.integers(1, 9)),
        in_flight=lambda a: a + 1,
        cut_s=rng.random(layers + 1) * 0.2,
        hidden=float(rng.choice([0.0, 1.0])),
        least_stages=int(rng.integers(1, 3)),
        contexts=bool(rng.integers(2)),
        step=1.0,
    )
    wanted, found = brute(cells, limits), partitions([fitting(cell) for cell in cells], limits)
    assert bool(wanted) == bool(found)
    if wanted:
        assert found[0].estimate_s == pytest.approx(min(wanted.values()))
        one = partitions(cells, Limits(**{**_fields(limits), "wanted": 1}))
        assert one[0].estimate_s == pytest.approx(min(wanted.values()))
    for partition in found:
        assert partition.estimate_s >= wanted[len(partition.stages)] * (1 - 1e-9)
        check(partition, layers, cells, limits)


def check(partition: Partition, layers: int, cells: list[Cells], limits: Limits) -> None:
    assert partition.stages[0].start == 0 and partition.stages[-1].stop == layers
    assert all(a.stop == b.start for a, b in itertools.pairwise(partition.stages))
    assert room_for([cells[s.cell].submesh for s in partition.stages], limits)
    times, m = [], limits.num_microbatches
    for after, s in enumerate(reversed(partition.stages)):
        cost = cells[s.cell].at(s.start, s.stop)[s.option]
        assert held(cost, limits, after) <= cells[s.cell].memory_bytes
        times.append(float(seconds_of(cost, m)))
    sent = sum(float(limits.cut_s[s.stop]) for s in partition.stages[:-1]) * (1 - limits.hidden)
    assert partition.estimate_s == pytest.approx((m - 1) * max(times) + sum(times) + sent)


def test_ranges_that_do_not_fit_are_left_out() -> None:
    """Those of which no option holds little enough, activations counted where the step trains."""
    rng = np.random.default_rng(0)
    (one, two), ranges = random_cells(rng, 6, (1, 2), 2), list(itertools.combinations(range(7), 2))
    for trains in (True, False):
        beside = rng.random((6, 7))
        cells = Cells.of(one.submesh, 1.0, [(c.number, c.cost) for c in (one, two)], beside, trains=trains)
        assert (cells.number >= 0).sum() == len({at for at in ranges if cells.number[at] >= 0}) < len(ranges)
        for at in ranges:
            want = np.concatenate([one.at(*at), two.at(*at)])
            held = want[:, STATE] + (want[:, ACTIVATION] if trains else 0.0)
            want[:, TRANSIENT] += beside[at]
            assert (cells.number[at] >= 0) == (held.min() <= 1.0)
            assert np.array_equal(cells.at(*at), want if held.min() <= 1.0 else np.full_like(want, np.inf))
            assert cells.spread(cells.once_s.min(0))[at] == cells.at(*at)[:, 3:5].sum(1).min()


@pytest.mark.parametrize("numbers", [((0, 1, 0, 1), (0, 1, 0, 1)), ((0, 1, 0, 1), (0, 0, 1, 1))])
def test_ranges_are_one_where_all_tables_have_them_as_one(numbers: tuple[tuple[int, ...], ...]) -> None:
    """And where as much is needed beside them."""
    rng = np.random.default_rng(0)
    ranges = [(0, 1), (0, 2), (1, 2), (0, 3)]
    tables = []
    for each in numbers:
        number = np.full((3, 4), -1)
        number[tuple(zip(*ranges, strict=True))], number[1, 3], number[2, 3] = each, 2, 3
        tables.append((number, rng.random((2, 4, len(FIELDS)))))
    for beside, distinct in ((np.zeros((3, 4)), 4 if numbers[0] == numbers[1] else 6), (rng.random((3, 4)), 6)):
        cells = Cells.of(Submesh(0, 1, 1), 1e9, tables, beside)
        assert len(cells.cost[0]) == distinct
        for at in itertools.combinations(range(4), 2):
            want = np.concatenate([cost[:, number[at]] for number, cost in tables])
            want[:, TRANSIENT] += beside[at]
            assert np.array_equal(cells.at(*at), want)


def test_a_slower_slowest_stage_may_be_better_in_all() -> None:
    """Two stages of 1 s each and 0.5 s between them, 5.5 s for 4 microbatches; one of 1.2 s takes 4.8 s."""
    cost = np.full((1, 2, 3, len(FIELDS)), np.inf)
    cost[0, 0, 1], cost[0, 1, 2], cost[0, 0, 2] = 0.0, 0.0, 0.0
    wide = np.full_like(cost, np.inf)
    wide[0, 0, 2] = 0.0
    cost[0, 0, 1, 0], cost[0, 1, 2, 0], cost[0, 0, 2, 0], wide[0, 0, 2, 0] = 1.0, 1.0, 2.0, 1.2
    cells = [Cells.of(Submesh(0, 1, n), 1e9, [(every_range(2), table(c))]) for n, c in ((1, cost), (2, wide))]
    limits = Limits(
        devices=(2,), most_stages=2, num_microbatches=4, in_flight=lambda a: 1, cut_s=np.array([0, 0.5, 0]), step=1.0
    )
    found = partitions(cells, limits)
    assert [(len(p.stages), p.estimate_s) for p in found] == [(1, pytest.approx(4.8)), (2, pytest.approx(5.5))]


@pytest.mark.parametrize("seed", range(10))
def test_coarser_bounds_cost_little(seed: int) -> None:
    """With the default step between bounds T is at most 1 % above the best."""
    rng = np.random.default_rng(100 + seed)
    cells = random_cells(rng, 6, (1, 2), 2)
    fine = Limits(
        devices=(6,), most_stages=4, num_microbatches=16, in_flight=lambda a: a + 1, cut_s=np.zeros(7), step=1.0
    )
    exact, coarse = (
        partitions(cells, limits) for limits in (fine, Limits(**{**_fields(fine), "step": 1.01}))
    )  # fmt: skip
    assert bool(exact) == bool(coarse)
    if exact:
        assert coarse[0].estimate_s <= 1.01 * exact[0].estimate_s


def _fields(limits: Limits) -> dict[str, object]:
    return {name: getattr(limits, name) for name in limits.__slots__}


def test_two_groups_of_hosts_are_counted_apart() -> None:
    """A stage on one group's devices leaves the other's alone."""
    cost = np.full((1, 2, 3, len(FIELDS)), np.inf)
    cost[0, 0, 1], cost[0, 1, 2], cost[0, 0, 2] = 1.0, 1.0, 2.0
    slow = np.where(np.isfinite(cost), 1.5 * cost, np.inf)
    cells = [Cells.of(Submesh(g, 1, 1), 1e9, [(every_range(2), table(c))]) for g, c in enumerate((cost, slow))]
    limits = Limits(devices=(1, 1), most_stages=2, num_microbatches=8, in_flight=lambda a: 1, cut_s=np.zeros(3))
    found = partitions(cells, limits)
    assert sorted(s.cell for s in found[0].stages) == [0, 1]


@pytest.mark.parametrize("text", ["p3.16xlarge:4", "dgx-h100:3", "cpu:6"])
def test_submeshes_fill_a_cluster(text: str) -> None:
    """Any submeshes that add up to a cluster's devices, of sizes that divide each other, have places of their own."""
    cluster = cluster_from_text(text)
    kinds = list(submeshes(cluster))
    rng = np.random.default_rng(0)
    for _ in range(50):
        wanted: list[Submesh] = []
        left = cluster.num_devices
        while left:
            fits = [s for s in kinds if s.size <= left]
            wanted.append(fits[int(rng.integers(len(fits)))])
            left -= wanted[-1].size
        if _mixed(wanted, cluster):
            continue
        found = place(cluster, wanted)
        assert sorted(d for where in found for d in where) == list(range(cluster.num_devices))
        for submesh, where in zip(wanted, found, strict=True):
            assert len(where) == submesh.size
            hosts = {d // cluster.groups[0].devices_per_host for d in where}
            assert len(hosts) == submesh.hosts


def _mixed(wanted: list[Submesh], cluster: ClusterSpec) -> bool:
    """Parts of hosts that do not divide each other (2 and 3 of 6) may leave gaps."""
    width = cluster.groups[0].devices_per_host
    parts = {s.devices for s in wanted if s.devices < width}
    rest = sum(s.devices for s in wanted if s.devices < width) % width
    return any(max(a, b) % min(a, b) for a in parts for b in parts) or rest != 0


def test_submeshes_that_do_not_fit_are_refused() -> None:
    cluster = cluster_from_text("p3.16xlarge:2")
    with pytest.raises(ValueError, match="do not fit"):
        place(cluster, [Submesh(0, 2, 8), Submesh(0, 1, 4)])


def test_logical_shapes_have_all_devices() -> None:
    for submesh in submeshes(cluster_from_text("dgx-h100:4")):
        for shape in logical_shapes(cluster_from_text("dgx-h100:4"), submesh):
            assert math.prod(shape) == submesh.size
        assert part_of(cluster_from_text("dgx-h100:4"), submesh).num_devices == submesh.size


def test_hosts_and_parts_of_them() -> None:
    """Of few hosts any number; of many, numbers that divide theirs; of a host, parts that divide it."""

    def kinds(text: str) -> list[tuple[int, int]]:
        return [(s.hosts, s.devices) for s in submeshes(cluster_from_text(text))]

    parts = [(1, 1), (1, 2), (1, 4)]
    assert kinds("p3.16xlarge:3") == [*parts, (1, 8), (2, 8), (3, 8)]
    assert kinds("p3.16xlarge:6") == [*parts, (1, 8), (2, 8), (3, 8), (6, 8)]


def test_logical_shapes_by_name() -> None:
    cluster = cluster_from_text("dgx-h100:4")
    assert logical_shapes(cluster, Submesh(0, 1, 1)) == ((1,),)
    assert logical_shapes(cluster, Submesh(0, 1, 8)) == ((8,), (2, 4))
    assert logical_shapes(cluster, Submesh(0, 2, 8)) == ((2, 8), (4, 4))
    assert logical_shapes(cluster, Submesh(0, 4, 8)) == ((4, 8),)


def test_a_part_of_a_host_has_its_part_of_the_nics() -> None:
    cluster = cluster_from_text("dgx-h100:2")
    assert cluster.groups[0].nics_per_host == 8
    assert [part_of(cluster, Submesh(0, 1, k)).groups[0].nics_per_host for k in (1, 4, 8)] == [1, 4, 8]


def test_devices_of_a_second_group_follow_those_of_the_first() -> None:
    cluster = cluster_from_text("cpu:4")
    two = ClusterSpec(name="two", groups=(*cluster.groups, *cluster.groups), between=cluster.groups[0].nic)
    assert place(two, [Submesh(1, 1, 2), Submesh(0, 1, 4), Submesh(1, 1, 2)]) == ((4, 5), (0, 1, 2, 3), (6, 7))
