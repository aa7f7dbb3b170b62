"""What every transport has to do. A new one is added to `KINDS`."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.ir.errors import ReshardingError
from autopar.runtime.transports import SMALL_BYTES, Arrival, Fetch, Offer, PeerLostError, Transport
from autopar.runtime.transports import wire as wires
from autopar.runtime.transports.jax_transfer import CHUNK_BITS, JaxTransfer
from autopar.runtime.transports.wire import SECRET_BYTES, Wire

SECRET = bytes(range(SECRET_BYTES))
WAIT_S = 20.0
LARGE = SMALL_BYTES + 1


def wire(_: int) -> Wire:
    return Wire("127.0.0.1", SECRET)


def jax_transfer(device: int) -> JaxTransfer:
    return JaxTransfer([jax.devices()[device % jax.device_count()]], "127.0.0.1")


KINDS: Mapping[str, Callable[[int], Any]] = {"wire": wire, "jax_transfer": jax_transfer}
"""Name → number of a device → the transport of its process."""


@pytest.fixture(params=KINDS)
def sides(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """Of three processes, which are this one."""
    made = [KINDS[request.param](device) for device in range(3)]
    yield made
    for side in made:
        if isinstance(side, Wire):
            side.close()


@pytest.fixture
def ends() -> Iterator[tuple[Wire, Wire]]:
    wires = wire(0), wire(1)
    yield wires
    for each in wires:
        each.close()


class Given:
    """A `Source`: chunks of random bytes, or of an array that may still be computed."""

    def __init__(self, sizes: Sequence[int], seed: int = 0, pending: jax.Array | None = None) -> None:
        self.sizes = sizes
        draw = np.random.default_rng(seed)
        self.chunks = [draw.integers(0, 256, size, np.uint8) for size in sizes]
        self.pending = pending
        self.was_read = threading.Event()

    def is_ready(self) -> bool:
        return self.pending is None or self.pending.is_ready()

    def wait(self) -> None:
        jax.block_until_ready(self.pending)

    def read(self, chunk: int) -> np.ndarray[Any, Any]:
        self.was_read.set()
        return self.chunks[chunk]

    def array(self, chunk: int) -> jax.Array:
        self.was_read.set()
        return jax.device_put(self.chunks[chunk], jax.devices()[0])


class Landing:
    """A `Target`. ``scattered``: chunks have no place of their own."""

    def __init__(self, sizes: Sequence[int], device: int = 1, *, scattered: bool = False) -> None:
        self.sizes, self.device, self.scattered = sizes, jax.devices()[device % jax.device_count()], scattered
        self.chunks = [np.zeros(size, np.uint8) for size in sizes]

    def room(self, chunk: int) -> np.ndarray[Any, Any] | None:
        return None if self.scattered else self.chunks[chunk]

    def write(self, chunk: int, data: np.ndarray[Any, Any]) -> None:
        self.chunks[chunk][...] = data

    def read(self, chunk: int) -> np.ndarray[Any, Any]:
        return self.chunks[chunk]

    def put(self, chunk: int, data: jax.Array) -> None:
        self.write(chunk, np.asarray(data))


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


def waited(arrival: Arrival) -> None:
    assert in_thread(lambda: arrival.wait() or True)()


def same(source: Given, target: Landing) -> None:
    for chunk, want in enumerate(source.chunks):
        np.testing.assert_array_equal(target.chunks[chunk], want, str(chunk))


SIZES = [(7,), (1, 5), (SMALL_BYTES,), (LARGE,), (3 * LARGE, 1, LARGE // 3), (100,) * 50]


@pytest.mark.parametrize("fetched_first", [False, True])
@pytest.mark.parametrize("scattered", [False, True])
def test_what_is_offered_arrives(sides: list[Transport], *, fetched_first: bool, scattered: bool) -> None:
    sources = [Given(sizes, seed) for seed, sizes in enumerate(SIZES)]
    targets = [Landing(sizes, scattered=scattered) for sizes in SIZES]
    offers = [Offer(n, sides[1].address, source) for n, source in enumerate(sources)]
    fetches = [Fetch(n, sides[0].address, target) for n, target in enumerate(targets)]
    if fetched_first:
        arrival = sides[1].fetch(fetches)
        time.sleep(0.1)
        sides[0].offer(offers)
    else:
        sides[0].offer(offers)
        time.sleep(0.1)
        arrival = sides[1].fetch(fetches[::-1])
    waited(arrival)
    for source, target in zip(sources, targets, strict=True):
        same(source, target)
    assert in_thread(lambda: sides[0].flush() or True)()
    assert sides[0].sent[sides[1].address] == sum(map(sum, SIZES))
    assert not sides[1].sent.get(sides[0].address)


def test_one_source_to_several_and_back(sides: list[Transport]) -> None:
    source, back = Given((LARGE, 9)), Given((5,), 1)
    targets = [Landing((LARGE, 9), device) for device in (1, 2)]
    arrivals = [sides[i].fetch([Fetch(i, sides[0].address, t)]) for i, t in enumerate(targets, 1)]
    sides[0].offer([Offer(i, sides[i].address, source) for i in (1, 2)])
    sides[2].offer([Offer(3, sides[0].address, back)])
    got = Landing((5,), 0)
    waited(sides[0].fetch([Fetch(3, sides[2].address, got)]))
    same(back, got)
    for arrival, target in zip(arrivals, targets, strict=True):
        waited(arrival)
        same(source, target)


@pytest.mark.parametrize("sizes", [(4, 5, 6), (LARGE,) * 5])
@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_relay_passes_on(sides: list[Transport], sizes: tuple[int, ...], late: int) -> None:
    """Whoever comes last."""
    source, targets = Given(sizes), [Landing(sizes, device) for device in (1, 2)]
    arrivals: list[Arrival] = []
    acts = [
        lambda: sides[0].offer([Offer(1, sides[1].address, source)]),
        lambda: arrivals.append(sides[1].fetch([Fetch(1, sides[0].address, targets[0], [(2, sides[2].address)])])),
        lambda: arrivals.append(sides[2].fetch([Fetch(2, sides[1].address, targets[1])])),
    ]
    for act in (*acts[:late], *acts[late + 1 :]):
        act()
    time.sleep(0.1)
    acts[late]()
    for arrival in arrivals:
        waited(arrival)
    for target in targets:
        same(source, target)
    assert in_thread(lambda: sides[1].flush() or True)()
    assert sides[1].sent[sides[2].address] == sum(sizes)
    assert set(sides[0].sent) <= {sides[1].address}


def test_a_relay_passes_a_chunk_on_while_the_next_is_awaited(ends: tuple[Wire, Wire]) -> None:
    """Of a message in two chunks the second is held back: the first is at the end by then."""
    third = wire(2)
    try:
        released, first = threading.Event(), threading.Event()

        class Halting(Given):
            def read(self, chunk: int) -> np.ndarray[Any, Any]:
                if chunk:
                    assert released.wait(WAIT_S)
                return super().read(chunk)

        class Last(Landing):
            def room(self, chunk: int) -> np.ndarray[Any, Any] | None:
                first.set()
                return super().room(chunk)

        sizes = (LARGE * 8, LARGE * 8)
        source, middle, last = Halting(sizes), Landing(sizes), Last(sizes)
        one = ends[1].fetch([Fetch(1, ends[0].address, middle, [(2, third.address)])])
        two = third.fetch([Fetch(2, ends[1].address, last)])
        time.sleep(0.1)
        sent = in_thread(lambda: ends[0].offer([Offer(1, ends[1].address, source)]) or True)
        assert first.wait(WAIT_S)
        released.set()
        assert sent()
        waited(one)
        waited(two)
        same(source, last)
    finally:
        third.close()


def test_numbers_that_are_still_computed(sides: list[Transport]) -> None:
    """In order: what is ready later does not overtake."""
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 5000, lambda _, y: jnp.tanh(y @ y), x))
    sources = [Given((10,), 0, slow(jnp.eye(64) * 0.5)), Given((20,), 1)]
    targets = [Landing((10,)), Landing((20,))]
    for n, source in enumerate(sources):
        sides[0].offer([Offer(n, sides[1].address, source)])
    waited(sides[1].fetch([Fetch(n, sides[0].address, target) for n, target in enumerate(targets)]))
    for source, target in zip(sources, targets, strict=True):
        same(source, target)
    assert in_thread(lambda: sides[0].flush() or True)()


def test_both_offer_before_either_fetches(sides: list[Transport]) -> None:
    """More than any buffer of the system holds: nobody waits for who does not listen."""
    count = 400
    source = Given((SMALL_BYTES,))
    for n in range(count):
        for me, other in ((0, 1), (1, 0)):
            sides[me].offer([Offer(n, sides[other].address, source)])
    for me, other in ((0, 1), (1, 0)):
        targets = [Landing((SMALL_BYTES,), me) for _ in range(count)]
        waited(sides[me].fetch([Fetch(n, sides[other].address, target) for n, target in enumerate(targets)]))
        for target in targets:
            same(source, target)


def test_large_ones_wait_until_there_is_room_for_them(ends: tuple[Wire, Wire]) -> None:
    small, large = Given((8,)), Given((LARGE,))
    ends[0].offer([Offer(1, ends[1].address, large), Offer(2, ends[1].address, small)])
    assert small.was_read.wait(WAIT_S)
    assert not large.was_read.is_set()
    target = Landing((LARGE,))
    waited(ends[1].fetch([Fetch(1, ends[0].address, target)]))
    same(large, target)


def test_what_was_sent_is_let_go_of(ends: tuple[Wire, Wire]) -> None:
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 2000, lambda _, y: jnp.tanh(y @ y), x))
    source, target = Given((5,), pending=slow(jnp.eye(61))), Landing((5,))
    ends[0].offer([Offer(0, ends[1].address, source)])
    waited(ends[1].fetch([Fetch(0, ends[0].address, target)]))
    del source
    stop_s = time.monotonic() + WAIT_S
    while any(x.shape == (61, 61) for x in jax.live_arrays()):
        assert time.monotonic() < stop_s
        time.sleep(0.01)


def send(here: Wire, there: Wire, number: int) -> None:
    """A small message, and waits until it is there."""
    source, target = Given((3,), number), Landing((3,))
    here.offer([Offer(number, there.address, source)])
    waited(there.fetch([Fetch(number, here.address, target)]))
    same(source, target)


def test_strangers_are_not_heard(ends: tuple[Wire, Wire]) -> None:
    here, there = ends
    host, _, port = there.address.rpartition(":")
    assert host == "127.0.0.1"
    for n, shown in enumerate((b"", b"x" * SECRET_BYTES, b"GET / HTTP/1.1")):
        stranger = socket.create_connection((host, int(port)))
        stranger.sendall(shown)
        stranger.shutdown(socket.SHUT_WR)
        send(here, there, 2 * n)
        stranger.settimeout(WAIT_S)
        send(here, there, 2 * n + 1)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        stranger.close()
    idle = socket.create_connection((host, int(port)))  # shows nothing, and stays
    send(here, there, 100)
    idle.close()


def test_strangers_wait_neither_long_nor_many(ends: tuple[Wire, Wire], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires, "STRANGERS", 8)
    monkeypatch.setattr(wires, "SHOW_S", 0.5)
    host, _, port = ends[1].address.rpartition(":")
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(40)]
        source, target = Given((LARGE,)), Landing((LARGE,))
        ends[0].offer([Offer(1, ends[1].address, source)])
        waited(ends[1].fetch([Fetch(1, ends[0].address, target)]))
        same(source, target)
        assert len(ends[1]._strangers) <= 8
        for one in silent:  # all are hung up on, though nothing else happens
            one.settimeout(WAIT_S)
            assert one.recv(1) == b""


def test_no_descriptor_for_who_connects(ends: tuple[Wire, Wire], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is hung up on; those who are connected go on."""
    source, target = Given((5, LARGE)), Landing((5, LARGE))
    ends[0].offer([Offer(1, ends[1].address, Given((LARGE,)))])
    waited(ends[1].fetch([Fetch(1, ends[0].address, Landing((LARGE,)))]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    host, _, port = ends[1].address.rpartition(":")
    with socket.socket() as stranger:
        highest, fill = max(map(int, os.listdir("/proc/self/fd"))), [os.open(os.devnull, os.O_RDONLY)]
        while fill[-1] < highest:
            fill.append(os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(fill) + 1, hard))
        try:
            stranger.settimeout(WAIT_S)
            stranger.connect((host, int(port)))
            assert stranger.recv(1) == b""
            ends[0].offer([Offer(2, ends[1].address, source)])
            waited(ends[1].fetch([Fetch(2, ends[0].address, target)]))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for file in fill:
                os.close(file)
    same(source, target)


def test_a_peer_that_does_not_answer_is_lost(ends: tuple[Wire, Wire]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(PeerLostError, match=f"{nobody} cannot be reached: .*refused"):
        ends[0].offer([Offer(1, nobody, Given((5,)))])
    with pytest.raises(PeerLostError, match=f"{nobody} cannot be reached"):
        ends[0].fetch([Fetch(1, nobody, Landing((LARGE,)))])


@pytest.mark.parametrize("wait", ["fetch", "flush"])
def test_an_error_of_what_was_offered_comes_out_here(ends: tuple[Wire, Wire], wait: str) -> None:
    """Where the numbers are made, not only as a lost connection where they are waited for."""
    here, there = ends
    send(here, there, 0)
    send(there, here, 1)

    def mistaken(_: Any) -> Any:
        raise ZeroDivisionError("a mistake of the user's")

    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 20_000, lambda _, y: jnp.tanh(y @ y), x))
    pending = jax.jit(lambda x: jax.pure_callback(mistaken, x, x))(slow(jnp.eye(64)))
    assert not pending.is_ready()
    here.offer([Offer(2, there.address, Given((3,), pending=pending))])
    with pytest.raises(Exception, match="a mistake of the user's"):
        here.fetch([Fetch(3, there.address, Landing((3,)))]).wait() if wait == "fetch" else here.flush()
    with pytest.raises(PeerLostError, match="was lost: closed by the other end"):
        there.fetch([Fetch(2, here.address, Landing((3,)))]).wait()
    with pytest.raises(Exception, match="a mistake of the user's"):
        here.offer([Offer(4, there.address, Given((3,)))])
    jax.jit(lambda x: jax.pure_callback(lambda y: y, x, x))(jnp.ones(1))  # or JAX raises the error again at exit


def test_a_lost_peer_is_an_error_for_all_who_wait(ends: tuple[Wire, Wire]) -> None:
    here, there = ends
    send(here, there, 0)
    arrival = there.fetch([Fetch(1, here.address, Landing((LARGE,)))])
    threading.Timer(0.2, here.close).start()
    with pytest.raises(PeerLostError, match=r"the connection (from|to) 127\.0\.0\.1:\d+ was lost"):
        arrival.wait()
    with pytest.raises(PeerLostError, match="was lost"):
        there.fetch([])


def test_who_only_sends_learns_that_its_peer_is_lost(ends: tuple[Wire, Wire]) -> None:
    """And does not look for it all the time."""
    here, there = ends
    send(here, there, 0)
    there.close()
    stop_s = time.monotonic() + WAIT_S
    with pytest.raises(PeerLostError, match=r"the connection to 127\.0\.0\.1:\d+ was lost"):
        while time.monotonic() < stop_s:
            here.fetch([])
            time.sleep(0.01)


def test_what_nobody_asked_for_is_refused(ends: tuple[Wire, Wire]) -> None:
    here, there = ends
    large = Given((LARGE,))
    peer = here._to(there.address)
    peer.put([(1, 0, large)], peer.offered, asked=True, last=True)
    here._write(peer)
    with pytest.raises(ReshardingError, match=f"message 1 has {LARGE} bytes, and nobody has asked for it"):
        while True:
            there.fetch([])
            time.sleep(0.01)


def test_chunks_that_do_not_fit_a_number_are_refused() -> None:
    side = jax_transfer(0)
    source = Given((1,) * ((1 << CHUNK_BITS) + 1))
    source.array = lambda chunk: jnp.zeros(1, jnp.uint8)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ReshardingError, match="give larger ones"):
        side._offer(0, "127.0.0.1:1", 1 << CHUNK_BITS, source.array(0))
