"""Reshardings: every element comes once, bounds are bounds, ratios are the literature's, sizes stay bounded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from autopar.ir.cluster import LinkSpec
from autopar.ir.errors import OptionError
from autopar.ir.graph import TensorType
from autopar.ir.resharding import CrossValue, HostLinks, Network
from autopar.resharding.bound import bound_of
from autopar.resharding.chunks import MAX_CHUNKS, Chunking, best_chunks
from autopar.resharding.groups import groups_of
from autopar.resharding.planning import plan_resharding, reshard_cost
from autopar.resharding.senders import Crossing, Demand, aggregated, contended, send_and_relay, spread
from autopar.resharding.split import split_streams
from autopar.resharding.streams import concurrent_s, loads_of
from autopar.resharding.tiles import work_of
from autopar.resharding.transfer_strategies import STRATEGIES
from benchmarks.resharding_simulation import chunked_s, serial_s
from tests.null.resharding_cases import (
    INTRA,
    NIC,
    Problem,
    between,
    density_s,
    network,
    problems,
    rows,
    run,
    spec,
)
from tests.shares import each

QUICK = settings(max_examples=150, derandomize=True, suppress_health_check=list(HealthCheck))
R, S0, S1, S01 = spec("", ""), spec("0", ""), spec("1", ""), spec("01", "")
RS0, RS1, RS01 = spec("", "0"), spec("", "1"), spec("", "01")


@pytest.mark.slow
@pytest.mark.parametrize("name", each(3, ["auto", *STRATEGIES]))
@QUICK
@given(problems())
def test_every_element_comes_once(name: str, problem: Problem) -> None:
    plan = plan_resharding(*problem, strategy=name, chunking=Chunking(chunk_bytes=24.0))
    run(plan)
    assert plan.bound_s <= plan.fluid_s <= plan.time_s


@pytest.mark.slow
@QUICK
@given(problems())
def test_slices_tile_each_value(problem: Problem) -> None:
    work = work_of(*problem)
    for index, value in enumerate(problem.values):
        seen = np.zeros(value.type.shape, int)
        for unit in range(work.first[index], work.first[index + 1]):
            seen[tuple(slice(*bounds) for bounds in work.box(unit))] += 1
        assert (seen == 1).all()
    assert work.elements.sum() == sum(v.type.size for v in problem.values)


@pytest.mark.slow
@settings(parent=QUICK, max_examples=500)
@given(problems())
def test_bounds_equal_enumeration(problem: Problem) -> None:
    work = work_of(*problem)
    groups = groups_of(work)
    bound = bound_of(work, groups)
    demands = [(g.bytes, endpoints) for g in groups for _, endpoints in g.targets]
    by_host = [
        density_s([d for d in demands if work.at_host[d[1][0]] == host], work.rate)
        for host in set(work.at_host.tolist())
    ]
    assert bound.receive_s == pytest.approx(max(by_host, default=0.0), rel=1e-6, abs=1e-15)
    if sum(len(set(g.holders)) for g in groups) and len({e for g in groups for e in g.holders}) <= 12:
        sources = density_s([(g.bytes, g.holders) for g in groups], work.rate)
        if contended(groups):
            assert bound.send_s >= sources * (1 - 1e-6)
        else:
            assert bound.send_s == pytest.approx(sources, rel=1e-6)


@pytest.mark.slow
@settings(parent=QUICK, max_examples=50)
@given(problems())
def test_no_strategy_beats_the_bound_and_the_default_is_the_best(problem: Problem) -> None:
    bounded(problem)


@pytest.mark.full
@QUICK
@given(problems())
def test_no_strategy_beats_the_bound_of_more_problems(problem: Problem) -> None:
    bounded(problem)


def bounded(problem: Problem) -> None:
    work = work_of(*problem)
    groups = groups_of(work)
    bound_s = bound_of(work, groups).time_s
    plans = {name: plan_resharding(*problem, strategy=name) for name in STRATEGIES}
    for name, plan in plans.items():
        planned = STRATEGIES[name](work, groups)
        assert concurrent_s(work, planned.streams, staged=planned.staged) >= bound_s * (1 - 1e-6)
        assert serial_s(work, planned.streams) >= bound_s * (1 - 1e-6) * (work.nics == len(work.network.hosts))
        assert chunked_s(plan, problem.network) >= bound_s * (1 - 1e-6)
    best = plan_resharding(*problem)
    assert 0.95 * best.time_s <= max(bound_s, min(plan.time_s for plan in plans.values())) * (1 + 1e-9)


def test_shares_sum_to_the_bytes_and_are_balanced() -> None:
    random = np.random.default_rng(0)
    for _ in range(40):
        rate = random.uniform(1.0, 3.0, 6)
        demands = [
            Demand(
                float(random.integers(1, 100)), tuple(sorted(random.choice(6, random.integers(1, 5), replace=False)))
            )
            for _ in range(8)
        ]
        joint, place = aggregated(demands)
        assert sum(d.bytes for d in joint) == pytest.approx(sum(d.bytes for d in demands))
        assert [joint[p].options for p in place] == [d.options for d in demands]
        seconds, shares = spread(joint, rate)
        load = np.zeros(6)
        for demand, share in zip(joint, shares, strict=True):
            assert share.sum() == pytest.approx(demand.bytes, rel=1e-9)
            assert (share >= 0).all()
            load[list(demand.options)] += share
        assert (load / rate).max() == pytest.approx(seconds, rel=1e-6)
        assert seconds == pytest.approx(density_s(demands, rate), rel=1e-6)


def test_what_targets_pass_on_is_counted() -> None:
    # Hosts 0 and 1 send a unit each, hosts 0, 1 and 2 want one that host 3 holds: 5 copies in all, from 4 hosts.
    crossings = [Crossing(1.0, (0,), (4,), 1), Crossing(1.0, (1,), (5,), 1), Crossing(1.0, (3,), (0, 1, 2), 3)]
    rate = np.ones(6)
    trees, chains = (send_and_relay(crossings, rate, chains=chains) for chains in (False, True))
    assert trees.time_s == pytest.approx(1.25)
    assert chains.time_s == pytest.approx(1.5)
    for sent in (trees, chains):
        assert sent.sent[2].sum() + sent.relayed[2].sum() == pytest.approx(3.0)
        assert sent.sent[2].sum() >= 1 - 1e-9


def relayed_trees() -> Problem:
    """The case above as a resharding: two parts of a dimension on three hosts, the third has none."""
    a, b, c = rows(3, 1, 0, 0), rows(2, 1, 3, 3), rows(1, 1, 5, 5)
    forward = CrossValue(type=TensorType(shape=(2, 40), dtype="int8"), src=0, src_spec=S0, dst=1, dst_spec=S0)
    back = CrossValue(type=TensorType(shape=(1, 40), dtype="int8"), src=2, src_spec=R, dst=0, dst_spec=R)
    return Problem((forward, back), (a, b, c), network(6))


def test_trees_where_chains_are_not_enough() -> None:
    plan = plan_resharding(*relayed_trees(), strategy="split_broadcast")
    assert plan.bound_s == pytest.approx(50 / NIC.bytes_per_s)
    assert plan.ratio == pytest.approx(1.0, abs=1e-6)
    assert any(hop.source != i - 1 for t in plan.transfers for i, hop in enumerate(t.hops))
    run(plan)


BIG = (960, 64)
LITERATURE = {
    "c1": (between(BIG, (2, 4), S0, (2, 4), S0), (4, 4), (1.075, 1.075), 1, 1),
    "c2": (between(BIG, (2, 4), R, (2, 4), S0), (4, 4), (1.075, 1.075), 2, 1),
    "c3": (between(BIG, (2, 4), RS0, (2, 4), S0), (7.5, 4), (1.95, 1.075), 1.5, 1),
    "c4": (between(BIG, (2, 4), RS01, (2, 4), S01), (1.875, 1), (1.875, 1), 1.875, 1),
    "c5": (between(BIG, (2, 4), S1, (2, 4), S0), (7, 4), (1.825, 1.075), 2, 1),
    "c6": (between(BIG, (2, 4), S0, (3, 4), S0), (8, 4), (2.05, 1.05), 2, 1),
    "c7": (between(BIG, (1, 4), S01, (2, 4), R), (8, 8), (2.075, 2.075), 1, 1),
    "c9": (between(BIG, (2, 4), RS0, (2, 4), spec("", "", "0")), (7.5, 4), (1.2, 1.075), 1.5, 1),
    "R(2h) → S⁰(3h)": (between(BIG, (2, 4), R, (3, 4), S0), None, None, 2, 4 / 3),
    "R(3h) → S⁰(4h)": (between(BIG, (3, 4), R, (4, 4), S0), None, None, 3, 1.5),
    "R(2h) → S⁰(5h)": (between(BIG, (2, 4), R, (5, 4), S0), None, None, 2, 1.2),
    "S⁰(3h) → S⁰(4h)": (between(BIG, (3, 4), S0, (4, 4), S0), None, None, 3, 1),
    "R(3h) → S⁰(4h) × 3": (between(BIG, (3, 4), R, (4, 4), S0, copies=3), None, None, 3, 1),
}
LITERATURE["c9"] = (
    between((16, 16, 16), (2, 4), spec("", "0", ""), (2, 4), spec("", "", "0")), *LITERATURE["c9"][1:]
)  # fmt: skip


@pytest.mark.parametrize("name", LITERATURE)
def test_ratios_of_the_literature(name: str) -> None:
    problem, send_recv, gather, first, greedy = LITERATURE[name]
    work = work_of(*problem)
    groups = groups_of(work)
    bound_s = bound_of(work, groups).time_s
    expected = {"send_recv": send_recv, "scatter_all_gather": gather, "broadcast": (first, None)}
    for strategy, ratios in {**expected, "broadcast_greedy": (greedy, None)}.items():
        planned = STRATEGIES[strategy](work, groups)
        if ratios is None:
            continue
        serial, concurrent = ratios
        assert serial_s(work, planned.streams, staged=planned.staged) / bound_s == pytest.approx(serial), strategy
        if concurrent is not None:
            found = concurrent_s(work, planned.streams, staged=planned.staged) / bound_s
            assert found == pytest.approx(concurrent), strategy
    assert plan_resharding(*problem, strategy="split_broadcast").ratio <= 1.02


def test_one_to_many() -> None:
    for hosts, local, serial in ((1, 1, (1, 1)), (1, 2, (2, 1.05)), (1, 3, (3, 3)), (4, 2, (8, 4.05))):
        problem = between((2**10,), (1, 1), spec(""), (hosts, local), spec(""))
        work = work_of(*problem)
        groups = groups_of(work)
        bound_s = bound_of(work, groups).time_s
        for name, ratio in zip(("send_recv", "scatter_all_gather"), serial, strict=True):
            planned = STRATEGIES[name](work, groups)
            assert serial_s(work, planned.streams, staged=planned.staged) / bound_s == pytest.approx(ratio)


def scaled(problem: Problem, seconds: float = 64e6 / 3.125e9) -> Problem:
    """The problem with 50 µs a chunk and NICs at which its bound is ``seconds``."""
    bound_s = reshard_cost(*problem).bound_s
    hosts = tuple(
        HostLinks(
            nics=h.nics,
            nic=LinkSpec(latency_s=50e-6, bytes_per_s=NIC.bytes_per_s * bound_s / seconds),
            intra_host=replace(INTRA, bytes_per_s=INTRA.bytes_per_s * bound_s / seconds),
        )
        for h in problem.network.hosts
    )
    return problem._replace(network=Network(hosts=hosts))


@pytest.mark.parametrize(
    "problem",
    [
        between((960, 640), (2, 4), S1, (2, 4), S0),
        between((960, 640), (2, 4), S0, (3, 4), S0),
        between((961, 643), (2, 4), R, (3, 4), S0),
        between((961, 643), (1, 4), R, (5, 2), R),
        between((961, 643), (2, 4), R, (3, 4), R, rails=True),
        between((961, 643), (2, 4), S01, (4, 4), R, back=True),
        between((960, 640), (3, 1), S0, (1, 1), R),  # three senders share what one host takes in
        between((3400, 39), (3, 2), RS01, (2, 2), spec("0", "1")),  # streams of one piece beside streams of two
    ],
)
def test_chunks_come_near_the_bound(problem: Problem) -> None:
    plan = plan_resharding(*scaled(problem), chunking=Chunking(min_chunk_bytes=1.0))
    assert plan.ratio <= 1.005
    assert max(t.chunks for t in plan.transfers) <= MAX_CHUNKS + 1
    simulated = chunked_s(plan, scaled(problem).network)
    assert plan.bound_s < simulated <= 1.05 * plan.bound_s
    assert simulated == pytest.approx(plan.time_s, rel=0.015)


def test_a_lone_chain_takes_what_the_formula_says() -> None:
    problem = between((8000,), (1, 1), spec(""), (4, 1), spec(""), dtype="int8")
    plan = plan_resharding(*problem, strategy="broadcast", chunking=Chunking(in_flight=1, chunk_bytes=1000.0))
    transfer_s, latency_s, count = 8000 / NIC.bytes_per_s, NIC.latency_s, 8
    expected = (count + 3) * (transfer_s / count + latency_s)
    assert chunked_s(plan, problem.network, in_flight=1) == pytest.approx(expected)
    hidden = chunked_s(plan, problem.network, in_flight=8)
    assert hidden == pytest.approx(transfer_s * (1 + 3 / count) + 4 * latency_s)
    assert best_chunks(4, 3.0, 1.0) == 3.0


def test_rails_share_the_work() -> None:
    plan = plan_resharding(*between((4800,), (2, 4), spec(""), (1, 4), spec(""), rails=True))
    assert plan.bound_s == pytest.approx(4800 * 4 / 4 / NIC.bytes_per_s)
    assert plan.ratio == pytest.approx(1.0, abs=1e-3)
    work = work_of(plan.values, plan.meshes, network(3, 4))
    into = loads_of(work, split_streams(work, groups_of(work))).into[8:12]
    np.testing.assert_allclose(into, 4800.0, rtol=1e-3)
    run(plan)


def test_inside_a_host_nothing_takes_the_network() -> None:
    problem = Problem(
        (CrossValue(type=TensorType(shape=(64,), dtype="int8"), src=0, src_spec=spec(""), dst=1, dst_spec=spec("")),),
        (rows(1, 2, 0, 0), rows(1, 2, 0, 2)),
        network(1),
    )
    plan = plan_resharding(*problem)
    assert plan.nic_busy_s == (0.0,)
    assert plan.bound_s == pytest.approx(64 / INTRA.bytes_per_s)
    assert plan.ratio == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("units", [64, 1024, 4096])
@pytest.mark.parametrize("replicas", [False, True])
def test_many_unit_tasks_are_few_transfers(units: int, replicas: bool) -> None:
    local = {64: 4, 1024: 8, 4096: 8}[units]
    hosts = int(units**0.5) // local
    plan = plan_resharding(*between((2048, 2048), (hosts, local), S01, (hosts, local), RS01, back=replicas))
    assert len({(t.value, t.box) for t in plan.transfers}) == units * (2 if replicas else 1)
    assert len(plan.transfers) <= 2 * units * (2 if replicas else 1)


@pytest.mark.slow
@QUICK
@given(problems())
def test_sizes_stay_bounded(problem: Problem) -> None:
    plan = plan_resharding(*problem, strategy="split_broadcast")
    work = work_of(*problem)
    groups = groups_of(work)
    endpoints = len(work.rate)
    assert len(plan.transfers) <= work.num_units + 4 * endpoints + 16 * len(groups) * (contended(groups) + 1)
    for stream in range(plan.streams):
        transfers = [t for t in plan.transfers if t.stream == stream]
        assert sum(t.chunks for t in transfers) <= MAX_CHUNKS + len(transfers)


def test_costs_are_those_of_the_plan() -> None:
    problem = between((961, 643), (2, 4), R, (3, 4), S0)
    plan, cost = plan_resharding(*problem), reshard_cost(*problem)
    assert cost[:3] == (plan.strategy, plan.time_s, plan.bound_s)
    assert max(max(busy_s) for _, *busy_s in cost.nics) == max(plan.nic_busy_s)
    assert reshard_cost(*problem) is cost
    assert str(plan_resharding(*problem)) == str(plan)


def test_unknown_options_are_refused() -> None:
    problem = between((8,), (1, 1), spec(""), (1, 1), spec(""))
    with pytest.raises(
        OptionError, match=r"unknown resharding strategy 'brodcast' \(did you mean broadcast\?\): known"
    ):
        plan_resharding(*problem, strategy="brodcast")
    with pytest.raises(OptionError, match="chunks in flight, their number and their bytes must be positive"):
        plan_resharding(*problem, chunking=Chunking(in_flight=0))


def test_streams_beside_others_are_cut_alike() -> None:
    problem = scaled(between((3400, 39), (3, 2), RS01, (2, 2), spec("0", "1")))
    plan = plan_resharding(*problem, chunking=Chunking(min_chunk_bytes=1.0))
    assert plan.streams > 1
    for stream in range(plan.streams):
        assert sum(t.chunks for t in plan.transfers if t.stream == stream) >= 16


def test_chunks_are_not_large_where_latency_allows() -> None:
    """64 MiB from host to host: in chunks of a MiB without a chain too; in fewer where one would take less than its
    latency."""
    size = 64 << 20
    for latency_s, least, most in ((1e-5, 64, 64), (4e-3, 8, 17)):
        nic = LinkSpec(latency_s=latency_s, bytes_per_s=1e9)
        values, meshes, _ = between((size // 4,), (1, 1), spec(""), (1, 1), spec(""))
        [transfer] = plan_resharding(values, meshes, network(2, nic=nic)).transfers
        assert least <= transfer.chunks <= most
