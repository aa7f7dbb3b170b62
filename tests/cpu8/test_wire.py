"""Small messages between processes: what is taken is what was pushed, from those who know the secret."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.ir.errors import ReshardingError
from autopar.runtime.transports.wire import SECRET_BYTES, SMALL_BYTES, Wire

SECRET = bytes(range(SECRET_BYTES))


@pytest.fixture
def ends() -> Iterator[tuple[Wire, Wire]]:
    """Of device 0 and of device 1, in one process."""
    wires = Wire("127.0.0.1", SECRET), Wire("127.0.0.1", SECRET)
    for wire in wires:
        wire.peers = {d: w.address for d, w in enumerate(wires)}
    yield wires
    for wire in wires:
        wire.close()


def test_bytes_of_every_dtype(ends: tuple[Wire, Wire]) -> None:
    here, there = ends
    with jax.enable_x64(True):
        made: list[Any] = [
            jnp.arange(6.0).reshape(2, 3), jnp.array([True, False]), jnp.array(1 + 2j), jnp.arange(3, dtype="bfloat16"),
            jnp.zeros((0, 4)), jnp.arange(SMALL_BYTES // 8), jnp.arange(3, dtype="int4").astype("int8"),
        ]  # fmt: skip
    for number, x in enumerate(made):
        here.push(1, number, x)
    for number, x in reversed(list(enumerate(made))):  # in any order
        got = there.take(number)
        assert got.dtype == np.uint8
        np.testing.assert_array_equal(got.view(x.dtype).reshape(x.shape), np.asarray(x))


def test_what_is_on_its_way_may_be_donated(ends: tuple[Wire, Wire]) -> None:
    """Numbers that are not there yet, of buffers that the next program takes over."""
    here, there = ends
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 2000, lambda _, y: jnp.tanh(y @ y), x))
    change = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.eye(64) * 0.5
    want = np.asarray(slow(x))
    pending = slow(x)
    here.push(1, 0, pending)
    here.push(1, 1, jnp.ones(3))
    change(pending).block_until_ready()
    np.testing.assert_array_equal(there.take(1).view(np.float32), np.ones(3))
    np.testing.assert_array_equal(there.take(0).view(np.float32).reshape(64, 64), want)


def test_what_was_sent_is_let_go_of(ends: tuple[Wire, Wire]) -> None:
    here, there = ends
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 2000, lambda _, y: jnp.tanh(y @ y), x))
    pending = slow(jnp.eye(61))
    here.push(1, 0, pending)
    there.take(0)
    stop_s = time.monotonic() + 10
    del pending
    while any(x.shape == (61, 61) for x in jax.live_arrays()):
        assert time.monotonic() < stop_s
        time.sleep(0.01)


def test_both_push_before_either_takes(ends: tuple[Wire, Wire]) -> None:
    """More than any buffer of the system holds: nobody waits for who does not listen."""
    count = 1000
    data = [jnp.full(SMALL_BYTES, k % 251, np.uint8) for k in range(8)]
    for number in range(count):
        for wire, device in zip(ends, (1, 0), strict=True):
            wire.push(device, number, data[number % 8])
    for number in range(count):
        for wire in ends:
            assert set(wire.take(number)) == {number % 8}


def test_strangers_are_not_heard(ends: tuple[Wire, Wire]) -> None:
    here, there = ends
    host, _, port = there.address.rpartition(":")
    assert host == "127.0.0.1"
    for shown in (b"", b"x" * SECRET_BYTES, b"GET / HTTP/1.1"):
        stranger = socket.create_connection((host, int(port)))
        stranger.sendall(shown)
        stranger.shutdown(socket.SHUT_WR)
        here.push(1, 7, jnp.ones(1))
        there.take(7)
        stranger.settimeout(20)
        here.push(1, 8, jnp.ones(1))
        there.take(8)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        stranger.close()
    idle = socket.create_connection((host, int(port)))  # shows nothing, and stays
    here.push(1, 9, jnp.ones(1))
    there.take(9)
    idle.close()


@pytest.mark.parametrize("wait", ["take", "flush"])
def test_an_error_of_what_was_pushed_comes_out_here(ends: tuple[Wire, Wire], wait: str) -> None:
    """Where the numbers are made, not only as a lost connection where they are waited for."""
    here, there = ends
    here.push(1, 0, jnp.ones(1))
    there.take(0)
    there.push(0, 0, jnp.ones(1))
    here.take(0)

    def mistaken(_: Any) -> Any:
        raise ZeroDivisionError("a mistake of the user's")

    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 20_000, lambda _, y: jnp.tanh(y @ y), x))
    pending = jax.jit(lambda x: jax.pure_callback(mistaken, x, x))(slow(jnp.eye(64)))
    assert not pending.is_ready()
    here.push(1, 1, pending)
    with pytest.raises(Exception, match="a mistake of the user's"):
        here.take(1) if wait == "take" else here.flush()
    with pytest.raises(ReshardingError, match="was lost: closed by the other end"):
        there.take(1)
    with pytest.raises(Exception, match="a mistake of the user's"):
        here.push(1, 2, jnp.ones(1))
    jax.jit(lambda x: jax.pure_callback(lambda y: y, x, x))(jnp.ones(1))  # or JAX raises the error again at exit


def test_a_flush_waits_until_all_has_left(ends: tuple[Wire, Wire]) -> None:
    here, there = ends
    here.flush()
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 20_000, lambda _, y: jnp.tanh(y @ y), x))
    here.push(1, 0, slow(jnp.eye(64)))
    outgoing = here._outgoing[1]
    assert (outgoing._queued, outgoing._left) == (1, 0)
    here.flush()
    assert outgoing._left == 1
    assert len(there.take(0)) == 64 * 64 * 4


def test_a_lost_connection_is_an_error(ends: tuple[Wire, Wire]) -> None:
    here, there = ends
    here.push(1, 0, jnp.ones(1))
    there.take(0)
    threading.Timer(0.2, here._outgoing[1]._socket.shutdown, (socket.SHUT_RDWR,)).start()
    with pytest.raises(ReshardingError, match=r"the connection from 127.0.0.1:\d+ was lost: closed by the other end"):
        there.take(1)
    with pytest.raises(ReshardingError, match=r"no process is known that has device 5; known: \[0, 1\]"):
        here.push(5, 0, jnp.ones(1))
