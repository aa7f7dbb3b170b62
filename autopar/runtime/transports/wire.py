"""Small messages between processes: a TCP connection to each peer, bytes pushed as soon as they are computed.

`jax_transfer` asks for every array and takes about a millisecond until it is there (measured, two cores); this takes a
tenth of that, but what is pushed stands in the taker's memory until it is taken. So it is for messages of at most
`SMALL_BYTES`. Whoever connects shows a secret first; nothing that comes is interpreted but as bytes of a number.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import select
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.ir.errors import ReshardingError

SMALL_BYTES = 64 * 2**10
"""Larger messages are better asked for (chosen: those of a step together stay below what its arrays take)."""
SECRET_BYTES = 32
CONNECT_S = 60.0
"""For a peer to accept (chosen: as long as a busy machine may take)."""
_HEADER = struct.Struct("!QQ")
"""A message's number, its bytes."""


class PeerLostError(ReshardingError):
    """The other end of a connection is gone."""


class Wire:
    """This process's end, for one thread that pushes and takes. It binds to ``host``; ``peers`` has to be set, once all
    are up, to device id → the address of its process.

    Args:
        secret: `SECRET_BYTES` that all processes know.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        assert len(secret) == SECRET_BYTES
        self._secret = secret
        self._server = socket.create_server((host, 0))
        self.address = f"{host}:{self._server.getsockname()[1]}"
        self.peers: Mapping[int, str] = {}
        self._outgoing: dict[int, _Outgoing] = {}
        self._come: dict[int, np.ndarray[Any, Any]] = {}
        self._poll = select.epoll()
        self._incoming: dict[int, Callable[[], None]] = {}
        """What to do when there is something to read, by file number."""
        self._open: dict[int, socket.socket] = {}
        self._listen(self._server, self._accept)
        self._bell, bell = socket.socketpair()
        """Rung by a thread that could not send something."""
        self._listen(bell, self._check)

    def push(self, device: int, number: int, data: jax.Array) -> None:
        """Sends ``data`` (numbers, not keys, on one device; they may not be there yet) to the process that has
        ``device``, as message ``number``; ``data`` may be donated at once."""
        outgoing = self._outgoing.get(device)
        if outgoing is None:
            outgoing = self._outgoing[device] = self._connected(device)
        outgoing.send(number, data)

    def take(self, number: int) -> np.ndarray[Any, Any]:
        """Message ``number``, once it is there: (bytes,), uint8, memory that is nobody else's.

        Raises:
            PeerLostError: a connection was lost meanwhile.
            Exception: what was pushed could not be computed; the error is its.
        """
        while number not in self._come:
            found = self._poll.poll()
            self._check()  # first: that a peer is lost may be due to it
            for file, _ in found:
                self._incoming[file]()
        return self._come.pop(number)

    def flush(self) -> None:
        """Returns when all that was pushed has left. Raises as `take` does."""
        for outgoing in set(self._outgoing.values()):
            outgoing.flush()
        self._check()

    def _check(self) -> None:
        for outgoing in self._outgoing.values():
            outgoing.check()

    def close(self) -> None:
        """Closes all connections; what was pushed and not sent is lost."""
        for outgoing in set(self._outgoing.values()):
            outgoing.close()
        for connection in self._open.values():
            connection.close()
        self._poll.close()
        self._bell.close()

    def _connected(self, device: int) -> _Outgoing:
        """The connection to the process of a device."""
        address = self.peers.get(device)
        if address is None:
            raise ReshardingError(f"no process is known that has device {device}; known: {sorted(self.peers)}")
        same = (x for x in self._outgoing.values() if x.address == address)
        return next(same, None) or _Outgoing(address, self._secret, self._bell)

    def _listen(self, connection: socket.socket, hear: Callable[[], None]) -> None:
        file = connection.fileno()
        self._open[file] = connection
        self._incoming[file] = hear
        self._poll.register(file, select.EPOLLIN)

    def _accept(self) -> None:
        connection, peer = self._server.accept()
        self._listen(connection, partial(self._shown, connection, f"{peer[0]}:{peer[1]}"))

    def _shown(self, connection: socket.socket, peer: str) -> None:
        """Hears who shows the secret from now on, and nobody else."""
        try:
            shown = connection.recv(SECRET_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            shown = b""
        file = connection.fileno()
        if hmac.compare_digest(shown, self._secret):
            self._incoming[file] = _Incoming(connection, peer, self._come).read
            return
        del self._incoming[file], self._open[file]
        self._poll.unregister(file)
        connection.close()


class _Incoming:
    """Puts the messages of one connection where they are taken from, ``come``."""

    def __init__(self, connection: socket.socket, peer: str, come: dict[int, np.ndarray[Any, Any]]) -> None:
        self._socket, self._peer, self._come = connection, peer, come
        self._memory = memoryview(bytearray(_HEADER.size + SMALL_BYTES))
        self._stop = 0
        """So much of the memory is filled."""

    def read(self) -> None:
        """What has come meanwhile; of the last message perhaps only a part."""
        try:
            count = self._socket.recv_into(self._memory[self._stop :])
            if not count:
                raise ConnectionResetError("closed by the other end")
        except OSError as error:
            raise PeerLostError(f"the connection from {self._peer} was lost: {error}") from error
        self._stop += count
        at = 0
        while self._stop - at >= _HEADER.size:
            number, size = _HEADER.unpack_from(self._memory, at)
            if size > SMALL_BYTES:
                raise ReshardingError(f"message {number} has {size} bytes; they are at most {SMALL_BYTES}")
            stop = at + _HEADER.size + size
            if stop > self._stop:
                break
            self._come[number] = np.frombuffer(bytes(self._memory[at + _HEADER.size : stop]), np.uint8)
            at = stop
        rest = self._stop - at
        if at and rest:
            self._memory[:rest] = bytes(self._memory[at : self._stop])
        self._stop = rest


class _Outgoing:
    """A connection to one peer. What is not computed yet, and what its buffer has no room for, waits in a thread of its
    own; the rest goes at once. ``bell``: written to, by such a thread, when something could not be sent."""

    def __init__(self, address: str, secret: bytes, bell: socket.socket) -> None:
        self.address, self._bell = address, bell
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), CONNECT_S)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(secret)
        self._lock = threading.Lock()
        """Held while a message is written."""
        self._later: queue.SimpleQueue[tuple[int, jax.Array] | threading.Event | None] = queue.SimpleQueue()
        self._queued = self._left = 0
        """Messages that waited, and those that wait no more: each is counted by one thread."""
        self._error: Exception | None = None
        threading.Thread(target=self._send_later, name="autopar wire", daemon=True).start()

    def send(self, number: int, data: jax.Array) -> None:
        self.check()
        ready: bool = data.is_ready()  # pyright: ignore[reportAttributeAccessIssue] - it has it
        if not ready or not self._lock.acquire(blocking=False):
            self._queued += 1
            self._later.put((number, _copy(data)))
            return
        rest: memoryview | None = None
        try:
            message = memoryview(_message(number, data))
            rest = message[_sent_at_once(self._socket, message) :]
        except OSError as error:
            raise self._lost(error) from error
        finally:
            if not rest:  # all is written, or nothing more will be
                self._lock.release()
        if rest:
            threading.Thread(target=self._finish, args=(rest,), name="autopar wire", daemon=True).start()

    def check(self) -> None:
        """Raises what kept something from being sent."""
        if self._error is not None:
            raise self._lost(self._error)

    def flush(self) -> None:
        """Returns when nothing waits any more, be it sent or not."""
        if self._queued != self._left:
            reached = threading.Event()
            self._later.put(reached)
            reached.wait()
        with self._lock:  # the rest of a message is written
            pass

    def _lost(self, error: Exception) -> Exception:
        """What is raised for an error of a connection; others are what they are."""
        return (
            PeerLostError(f"the connection to {self.address} was lost: {error}")
            if isinstance(error, OSError)
            else error
        )

    def close(self) -> None:
        self._later.put(None)
        self._socket.close()

    def _finish(self, rest: memoryview) -> None:
        """Writes what is left of a message; the lock is held for it."""
        try:
            self._socket.sendall(rest)
        except OSError as error:
            self._fails(error)
        finally:
            self._lock.release()

    def _send_later(self) -> None:
        while (found := self._later.get()) is not None:
            if isinstance(found, threading.Event):
                found.set()
                continue
            try:
                if self._error is None:
                    message = _message(*found)
                    with self._lock:
                        self._socket.sendall(message)
            except Exception as error:  # noqa: BLE001 - raised by `check`
                self._fails(error)
            del found  # not kept until there is another
            self._left += 1

    def _fails(self, error: Exception) -> None:
        """Nothing more is sent; the peer sees the connection end."""
        self._error = error
        with contextlib.suppress(OSError):  # it has ended, or `close` was called
            self._bell.send(b"!")
            self._socket.shutdown(socket.SHUT_RDWR)


def _message(number: int, data: jax.Array) -> bytes:
    host = np.asarray(data).tobytes()
    return _HEADER.pack(number, len(host)) + host


def _sent_at_once(connection: socket.socket, data: memoryview) -> int:
    """How much of ``data`` the connection took without waiting."""
    try:
        return connection.send(data, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return 0


_copy = jax.jit(jnp.copy)
