"""What every transport has to do. A new one is added to `SIDES`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import pytest

from autopar.ir.errors import ReshardingError, ReshardingTimeoutError
from autopar.runtime.transports import Edge, Transport
from autopar.runtime.transports.by_process import ByProcess
from autopar.runtime.transports.jax_transfer import ACKNOWLEDGED, JaxTransfer
from autopar.runtime.transports.local import LocalTransport

DEVICES = dict(enumerate(jax.devices()[:3]))
WAIT_S = 15.0
SIZE = 5000


def local() -> dict[int, Transport]:
    return dict.fromkeys(DEVICES, LocalTransport(DEVICES, WAIT_S))


def jax_transfer() -> dict[int, Transport]:
    """Three servers, as of three processes."""
    sides = {i: JaxTransfer({i: device}, "127.0.0.1") for i, device in DEVICES.items()}
    for side in sides.values():
        side.peers = {i: s.address for i, s in sides.items()}
    return dict(sides)


def by_process() -> dict[int, Transport]:
    """Devices 0 and 1 in one process, 2 in another."""
    groups = ({0: DEVICES[0], 1: DEVICES[1]}, {2: DEVICES[2]})
    servers = [JaxTransfer(group, "127.0.0.1") for group in groups]
    for server in servers:
        server.peers = {0: servers[0].address, 1: servers[0].address, 2: servers[1].address}
    one, other = (ByProcess(g, LocalTransport(g, WAIT_S), s) for g, s in zip(groups, servers, strict=True))
    return {0: one, 1: one, 2: other}


SIDES: Mapping[str, Callable[[], dict[int, Transport]]] = {
    "local": local,
    "jax_transfer": jax_transfer,
    "by_process": by_process,
}
"""Name → device id → the transport of its process."""


@pytest.fixture(params=SIDES, scope="module")
def sides(request: pytest.FixtureRequest) -> Iterator[dict[int, Transport]]:
    yield SIDES[request.param]()


def data(seed: int, device: int, size: int = SIZE) -> tuple[bytes, jax.Array]:
    host = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return host.tobytes(), jax.device_put(host, DEVICES[device])


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Starts ``work``; call the result to wait for what it returns."""
    out: list[Any] = []
    thread = threading.Thread(target=lambda: out.append(work()), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(WAIT_S)
        assert out, "it does not end, or has failed"
        return out[0]

    return result


def fetched(side: Transport, edge: Edge, chunk: int, size: int = SIZE) -> np.ndarray[Any, Any]:
    """A chunk, once it has come; fails where it never does."""
    return in_thread(lambda: np.asarray(side.fetch(edge, chunk, size)))()


@pytest.mark.parametrize(("giver", "taker"), [(0, 1), (1, 2), (2, 0)])
def test_what_is_offered_arrives(sides: dict[int, Transport], giver: int, taker: int) -> None:
    edge = Edge(1, giver, taker)
    chunks = [data(seed, giver, SIZE + seed) for seed in range(5)]
    for i, (_, array) in enumerate(chunks):
        sides[giver].offer(edge, i, array)
    for i in (3, 0, 4, 1, 2):
        got = fetched(sides[taker], edge, i, SIZE + i)
        assert (got.shape, got.dtype) == ((SIZE + i,), np.uint8)
        assert got.tobytes() == chunks[i][0]


@pytest.mark.parametrize(("giver", "taker"), [(0, 1), (1, 2)])
def test_a_fetch_waits_for_its_offer(sides: dict[int, Transport], giver: int, taker: int) -> None:
    edge = Edge(2, giver, taker)
    got = in_thread(lambda: np.asarray(sides[taker].fetch(edge, 0, SIZE)).tobytes())
    time.sleep(0.2)
    want, array = data(0, giver)
    sides[giver].offer(edge, 0, array)
    assert got() == want


def test_each_taker_gets_its_own_offer(sides: dict[int, Transport]) -> None:
    (first, one), (second, other) = data(1, 0), data(2, 0)
    sides[0].offer(Edge(3, 0, 1), 0, one)
    sides[0].offer(Edge(3, 0, 2), 0, other)
    assert fetched(sides[2], Edge(3, 0, 2), 0).tobytes() == second
    assert fetched(sides[1], Edge(3, 0, 1), 0).tobytes() == first


def test_a_relay_passes_on_what_has_not_come_yet(sides: dict[int, Transport]) -> None:
    def relay() -> None:
        for chunk in range(4):
            sides[1].offer(Edge(4, 1, 2), chunk, sides[1].fetch(Edge(4, 0, 1), chunk, SIZE))

    relayed = in_thread(lambda: relay() or True)
    got = in_thread(lambda: [np.asarray(sides[2].fetch(Edge(4, 1, 2), c, SIZE)).tobytes() for c in range(4)])
    chunks = [data(seed, 0) for seed in range(4)]
    for chunk, (_, array) in enumerate(chunks):
        time.sleep(0.05)
        sides[0].offer(Edge(4, 0, 1), chunk, array)
    assert relayed()
    assert got() == [want for want, _ in chunks]


@pytest.mark.parametrize(("giver", "taker"), [(0, 1), (1, 2)])
def test_the_giver_waits_until_it_is_acknowledged(sides: dict[int, Transport], giver: int, taker: int) -> None:
    edge = Edge(5, giver, taker)
    for _ in range(2):  # edges and chunks may be used again
        acknowledged = threading.Event()
        waited = in_thread(lambda: sides[giver].wait_acknowledged(edge) or acknowledged.is_set())  # noqa: B023
        time.sleep(0.2)
        want, array = data(6, giver)
        sides[giver].offer(edge, 0, array)
        assert fetched(sides[taker], edge, 0).tobytes() == want
        acknowledged.set()
        sides[taker].acknowledge(edge)
        assert waited()


def test_many_threads_at_a_time(sides: dict[int, Transport]) -> None:
    def give(thread: int) -> bool:
        for chunk in range(40):
            sides[0].offer(Edge(10 + thread, 0, 2), chunk, data(100 * thread + chunk, 0)[1])
        return True

    def take(thread: int) -> bool:
        edge = Edge(10 + thread, 0, 2)
        return all(
            np.asarray(sides[2].fetch(edge, chunk, SIZE)).tobytes() == data(100 * thread + chunk, 0)[0]
            for chunk in range(40)
        )

    waits = [in_thread(lambda work=work, t=t: work(t)) for t in range(8) for work in (take, give)]
    assert all(wait() for wait in waits)


def test_local_waits_end_at_the_deadline() -> None:
    transport = LocalTransport(DEVICES, 0.05)
    with pytest.raises(ReshardingTimeoutError, match=r"chunk 3 of transfer 7, device 0 -> 1 was not offered within"):
        transport.fetch(Edge(7, 0, 1), 3, SIZE)
    with pytest.raises(ReshardingTimeoutError, match=r"transfer 7, device 0 -> 1 was not acknowledged within"):
        transport.wait_acknowledged(Edge(7, 0, 1))


def test_numbers_that_do_not_fit_are_refused() -> None:
    transport = JaxTransfer({0: DEVICES[0]}, "127.0.0.1")
    _, array = data(0, 0)
    with pytest.raises(ReshardingError, match="give larger ones"):
        transport.offer(Edge(0, 0, 1), ACKNOWLEDGED, array)
    with pytest.raises(ReshardingError, match=r"numbered below 2\^24"):
        transport.offer(Edge(1 << 24, 0, 1), 0, array)
    with pytest.raises(ReshardingError, match="no process is known that has device 5"):
        transport.fetch(Edge(0, 5, 0), 0, SIZE)
