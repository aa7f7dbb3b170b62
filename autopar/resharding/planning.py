"""`plan_resharding`: values, meshes and a network → a ReshardingPlan; `reshard_cost`: what it takes.

The strategy ``auto`` is the one that ends first by the cost model (`chunks.time_of`), split broadcasts preferred, of
those that are worth trying (`transfer_strategies.worth_trying`).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autopar.ir.errors import OptionError
from autopar.ir.resharding import CrossValue, Hop, Network, PlacedMesh, ReshardingPlan, Transfer
from autopar.resharding.bound import bound_of
from autopar.resharding.chunks import Chunking, chunk_bytes_of, time_of
from autopar.resharding.groups import groups_of
from autopar.resharding.streams import concurrent_s, loads_of
from autopar.resharding.tiles import Work, work_of
from autopar.resharding.transfer_strategies import STRATEGIES, Planned, worth_trying

GAIN = 0.95
"""A later strategy of `STRATEGIES` is preferred where it takes at most this part of the time (chosen: latencies are
known less well than bandwidths, so what needs less bandwidth is preferred where times are near)."""
TOLERANCE = 1e-6
"""What a bound may lie above a plan's time for: the linear programs' accuracy."""
WHOLE = Chunking(max_chunks=1)
"""Copies between devices of a host are dispatched one by one, which takes longer than a chunk of one (measured: about
12 µs a copy; a link of 300 GB/s moves 1 MB in 3)."""
CACHED_COSTS = 65536
"""Costs that `reshard_cost` keeps."""


class Cost(NamedTuple):
    """The ``strategy`` that was chosen, ``time_s`` with chunks and latency, ``bound_s`` the lower bound of any plan;
    ``nics``: of each host whose NICs are used (host, seconds that the busiest sends, that it receives)."""

    strategy: str
    time_s: float
    bound_s: float
    nics: tuple[tuple[int, float, float], ...]


class _Chosen(NamedTuple):
    work: Work
    strategy: str
    planned: Planned
    chunk_bytes: list[float]
    time_s: float
    fluid_s: float
    bound_s: float


def plan_resharding(
    values: Sequence[CrossValue],
    meshes: Sequence[PlacedMesh],
    network: Network,
    *,
    strategy: str = "auto",
    chunking: Chunking | None = None,
) -> ReshardingPlan:
    """Plans all of ``values`` together: they share links at one time.

    Args:
        values: each with the meshes, by index in ``meshes``, and the specs that it comes from and goes to.
        meshes: those of all values; no device is in two.
        strategy: ``auto``, or one of `STRATEGIES`.
        chunking: how streams are cut into chunks; default `Chunking()`, or `WHOLE` inside one host.

    Raises:
        ReshardingError: meshes are empty or overlap, values or specs do not fit them or the network.
        OptionError: there is no such strategy, or chunking is malformed.
    """
    chosen = _choose(tuple(values), tuple(meshes), network, strategy, chunking)
    work = chosen.work
    plan = ReshardingPlan(
        meshes=work.meshes,
        values=work.values,
        transfers=_transfers(chosen),
        strategy=chosen.strategy,
        time_s=chosen.time_s,
        fluid_s=chosen.fluid_s,
        bound_s=chosen.bound_s,
        nic_busy_s=_nic_busy_s(chosen),
    )
    plan.verify()
    return plan


@lru_cache(maxsize=CACHED_COSTS)
def reshard_cost(
    values: tuple[CrossValue, ...], meshes: tuple[PlacedMesh, ...], network: Network, strategy: str = "auto"
) -> Cost:
    """What `plan_resharding` gives for the same takes, cached. Raises as it does."""
    chosen = _choose(values, meshes, network, strategy, None)
    return Cost(chosen.strategy, chosen.time_s, chosen.bound_s, _nics(chosen))


def _choose(
    values: tuple[CrossValue, ...], meshes: tuple[PlacedMesh, ...], network: Network, strategy: str,
    chunking: Chunking | None,
) -> _Chosen:  # fmt: skip
    if strategy != "auto" and strategy not in STRATEGIES:
        near = difflib.get_close_matches(strategy, STRATEGIES, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise OptionError(f"unknown resharding strategy {strategy!r}{hint}: known are auto, {', '.join(STRATEGIES)}")
    if chunking is None:
        chunking = WHOLE if len({host for mesh in meshes for host in mesh.hosts}) == 1 else Chunking()
    chunking.verify()
    work = work_of(values, meshes, network)
    groups = groups_of(work)
    bound_s = bound_of(work, groups).time_s
    latency_s = _latency_s(work) if bound_s > 0 else 0.0
    best: _Chosen | None = None
    tried = [name for name in STRATEGIES if worth_trying(name, work)] if strategy == "auto" else [strategy]
    for name in tried:
        planned = STRATEGIES[name](work, groups)
        fluid_s = concurrent_s(work, planned.streams, staged=planned.staged)
        assert bound_s <= fluid_s * (1 + TOLERANCE), (bound_s, fluid_s, name)
        bound_s = min(bound_s, fluid_s)
        sizes = chunk_bytes_of(work, planned.streams, fluid_s, chunking)
        time_s = time_of(work, planned.streams, sizes, fluid_s)
        if best is None or time_s < GAIN * best.time_s:
            best = _Chosen(work, name, planned, sizes, time_s, fluid_s, bound_s)
        if GAIN * best.time_s <= bound_s + latency_s:
            break
    assert best is not None
    return best


def _latency_s(work: Work) -> float:
    """What something that crosses takes at least beside its bytes: one hop, over a NIC where no host has both ends."""
    pairs = set(zip(work.holders.tolist(), work.wanters.tolist(), strict=True))
    apart = all(work.hosts_of_set[h].keys().isdisjoint(work.hosts_of_set[w]) for h, w in pairs)
    hosts = work.network.hosts
    return min(host.nic.latency_s if apart else min(host.nic.latency_s, host.intra_host.latency_s) for host in hosts)


def _nics(chosen: _Chosen) -> tuple[tuple[int, float, float], ...]:
    work = chosen.work
    loads = loads_of(work, chosen.planned.streams)
    sends, receives = np.zeros((2, len(work.network.hosts)))
    for busy_s, size in ((sends, loads.out), (receives, loads.into)):
        np.maximum.at(busy_s, work.at_host[: work.nics], (size / work.rate)[: work.nics])
    used = np.flatnonzero(sends + receives).tolist()
    return tuple((host, float(sends[host]), float(receives[host])) for host in used)


def _nic_busy_s(chosen: _Chosen) -> tuple[float, ...]:
    busy_s = {host: max(sends_s, receives_s) for host, sends_s, receives_s in _nics(chosen)}
    return tuple(busy_s.get(host, 0.0) for host in range(len(chosen.work.network.hosts)))


def _transfers(chosen: _Chosen) -> tuple[Transfer, ...]:
    work = chosen.work
    ids = work.device_ids.tolist()
    value, item = work.value.tolist(), work.item_bytes.tolist()
    boxes: dict[int, tuple[tuple[int, int], ...]] = {}
    out: list[Transfer] = []
    for number, (stream, size) in enumerate(zip(chosen.planned.streams, chosen.chunk_bytes, strict=True)):
        for unit, start, stop, sender, hops in stream.pieces:
            if unit not in boxes:
                boxes[unit] = work.box(unit)
            out.append(
                Transfer(
                    value=value[unit],
                    box=boxes[unit],
                    start=start,
                    stop=stop,
                    sender=ids[sender],
                    hops=tuple(
                        Hop(device=ids[way.device], source=way.source, copies=tuple(ids[c] for c in way.copies))
                        for way in hops
                    ),
                    chunk_elements=max(1, min(stop - start, math.ceil(size / item[value[unit]] - TOLERANCE))),
                    stream=number,
                )
            )
    return tuple(out)
