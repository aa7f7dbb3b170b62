"""Messages over TCP: a connection to each peer, and a thread that listens to all, lands chunks where they belong and
passes them on.

What can be written at once is written by whoever offers it; what a connection (`transports.connection`) has no room for
is written by the listening thread when it has. What is offered before it is computed waits in a thread of its own, in
order.

Whoever connects shows a secret first, soon, and few wait to do so at a time: others are hung up on. Nothing that comes
is interpreted but as bytes of a number.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from autopar.ir.errors import ReshardingError
from autopar.runtime.transports import SMALL_BYTES, Fetch, Offer, PeerLostError, is_small
from autopar.runtime.transports.connection import Incoming, Outgoing

SECRET_BYTES = 32
SHOW_S = 10.0
"""For who has connected to show the secret (chosen; peers write it as they connect)."""
STRANGERS = 256
"""Who have not shown it yet; the one that is silent for longest makes room for one more (chosen)."""
NAME_BYTES = 64
"""Of an address, with zeros behind it."""
APART_S = 1e-3
"""So long after a thread that waited has listened another one does, which would be woken for each frame as well
(measured: 35 ms instead of 16 for a step of 600 messages on two cores)."""


class Wire:
    """This process's end. It binds to ``host``; see `Transport`.

    Args:
        secret: `SECRET_BYTES` that all processes know.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        assert len(secret) == SECRET_BYTES
        self._secret = secret
        self._server = socket.create_server((host, 0))
        self._server.setblocking(False)
        self.address = f"{host}:{self._server.getsockname()[1]}"
        self.sent: dict[str, int] = {}
        self._changed = threading.Condition()
        """Of what follows."""
        self._error: Exception | None = None
        self._landing: dict[int, _Landing] = {}
        """What was fetched and has not landed."""
        self._early: dict[int, list[tuple[int, np.ndarray[Any, Any]]]] = {}
        """Chunks of small messages that nobody has fetched yet."""
        self._outgoing: dict[str, Outgoing] = {}
        self._poll = select.epoll()
        self._ready: dict[int, Callable[[int], None]] = {}
        """What to do when something happens on a file."""
        self._open: dict[int, socket.socket] = {}
        self._strangers: dict[int, float] = {}
        """Who has not shown the secret: file → when it connected. The oldest is first."""
        self._spare = open(os.devnull, "rb")  # noqa: SIM115 - closed with all connections
        """Given up where no other descriptor is left, to hang up on who connects."""
        self._listen(self._server, self._accept)
        self._bell, bell = socket.socketpair()
        bell.setblocking(False)
        self._listen(bell, partial(self._rung, bell))
        self._hearing = threading.Lock()
        """Held while what has come is dealt with."""
        self._waiting = threading.Lock()
        """Held by the thread that listens because it waits itself: what it waits for reaches it without another."""
        self._awaited: _Arrival | None = None
        """What that thread waits for,"""
        self._waiter = 0
        """and which it is;"""
        self._heard_s = 0.0
        """when one did so last."""
        self._computed: queue.SimpleQueue[list[Offer] | threading.Event | None] = queue.SimpleQueue()
        """What waits to be computed."""
        self._waits = 0
        self._threads = [
            threading.Thread(target=run, name=f"autopar wire {name}", daemon=True)
            for name, run in (("listens", self._listens), ("waits", self._send_later))
        ]
        for thread in self._threads:
            thread.start()

    # --- what others call ------------------------------------------------------------------------------------------

    def offer(self, offers: Sequence[Offer]) -> None:
        """See `Transport.offer`."""
        self._check()
        if self._waits or not all(offer.source.is_ready() for offer in offers):
            with self._changed:
                self._waits += 1
            self._computed.put(list(offers))
        else:
            self._send(offers)

    def fetch(self, fetches: Sequence[Fetch]) -> _Arrival:
        """See `Transport.fetch`."""
        self._check()
        arrival = _Arrival(self, len(fetches))
        early: list[tuple[_Landing, int, np.ndarray[Any, Any]]] = []
        asked: dict[Outgoing, None] = {}
        with self._changed:
            for fetch in fetches:
                landing = _Landing(fetch, arrival, [(n, self._to(peer)) for n, peer in fetch.relays])
                self._landing[fetch.number] = landing
                early += [(landing, *found) for found in self._early.pop(fetch.number, ())]
                if not is_small(fetch.target.sizes):
                    peer = self._to(fetch.peer)
                    peer.asks.append(fetch.number)
                    asked[peer] = None
        for peer in asked:
            self._write(peer)
        for landing, chunk, data in early:
            landing.target.write(chunk, data)
            self._landed(landing, chunk)
        return arrival

    def flush(self) -> None:
        """See `Transport.flush`."""
        if self._waits:
            reached = threading.Event()
            self._computed.put(reached)
            reached.wait()
        with self._changed:
            self._changed.wait_for(lambda: self._error or not any(x.left for x in self._outgoing.values()))
        self._check()

    def close(self) -> None:
        """Closes all connections; what was offered and not sent is lost."""
        self._fail(ReshardingError("the connection was closed"))
        self._computed.put(None)
        for thread in self._threads:
            thread.join()
        for connection in (*self._open.values(), *(x.socket for x in self._outgoing.values()), self._bell):
            connection.close()
        self._spare.close()
        self._poll.close()

    # --- sending -----------------------------------------------------------------------------------------------------

    def _to(self, peer: str) -> Outgoing:
        """The connection to a process. Raises PeerLostError where it does not answer."""
        if peer not in self._outgoing:
            try:
                connected = Outgoing(peer, self._secret + self.address.encode().ljust(NAME_BYTES, b"\0"))
            except OSError as error:
                raise PeerLostError(f"{peer} cannot be reached: {error}") from error
            self._outgoing[peer] = connected
            self._ready[connected.socket.fileno()] = partial(self._has_room, connected)
            self._poll.register(connected.socket.fileno(), select.EPOLLRDHUP)
            self.sent.setdefault(peer, 0)
        return self._outgoing[peer]

    def _send(self, offers: Sequence[Offer]) -> None:
        """What is computed, as far as it is asked for."""
        peers: dict[Outgoing, None] = {}
        with self._changed:
            for offer in offers:
                peer = self._to(offer.peer)
                chunks = [(offer.number, chunk, offer.source) for chunk in range(len(offer.source.sizes))]
                peer.put(chunks, peer.offered, asked=is_small(offer.source.sizes), last=True)
                peers[peer] = None
        for peer in peers:
            self._write(peer)

    def _send_later(self) -> None:
        while (found := self._computed.get()) is not None:
            if isinstance(found, threading.Event):
                found.set()
                continue
            try:
                if self._error is None:
                    _wait_for(found)
                    self._send(found)
            except Exception as error:  # noqa: BLE001 - raised by `_check`
                self._fail(error)
            del found  # not kept until there is another
            with self._changed:
                self._waits -= 1

    def _has_room(self, peer: Outgoing, events: int) -> None:
        """A connection has room again, or is lost."""
        if events & ~select.EPOLLOUT:
            raise PeerLostError(f"the connection to {peer.address} was lost: closed by the other end")
        self._poll.modify(peer.socket.fileno(), select.EPOLLRDHUP)
        peer.full = False
        self._write(peer)

    def _write(self, peer: Outgoing) -> None:
        """Writes what there is, until a connection has no more room; by one thread at a time."""
        while peer.queued and not peer.full and peer.turn.acquire(blocking=False):
            try:
                sent = peer.write()
                if peer.full:
                    self._poll.modify(peer.socket.fileno(), select.EPOLLOUT | select.EPOLLRDHUP)
            except OSError as error:
                self._fail(PeerLostError(f"the connection to {peer.address} was lost: {error}"))
                return
            finally:
                peer.turn.release()
            self.sent[peer.address] += sent
        if not peer.left:
            with self._changed:
                self._changed.notify_all()

    # --- receiving ---------------------------------------------------------------------------------------------------

    def _listens(self, arrival: _Arrival | None = None) -> None:
        """Until something fails; or what is waited for has come. The thread that waits for nothing leaves it to the
        other as long as that listens."""
        try:
            while self._error is None and (arrival is None or arrival.left):
                if arrival is None and (self._waiter or time.monotonic() - self._heard_s < APART_S):
                    time.sleep(APART_S)
                else:
                    self._hear(self._poll.poll(SHOW_S if self._strangers else None))
        except Exception as error:  # noqa: BLE001 - raised by `_check`
            self._fail(error)

    def _hear(self, found: Sequence[tuple[int, int]]) -> None:
        with self._hearing:
            for file, events in found:
                if file in self._ready:  # else another thread has heard that it ended
                    self._ready[file](events)
            while self._strangers and time.monotonic() - next(iter(self._strangers.values())) > SHOW_S:
                self._hang_up(next(iter(self._strangers)))

    def _rung(self, bell: socket.socket, _: int) -> None:
        """Wakes who waits and listens; all who listen where nothing works any more."""
        if self._error is None and self._waiter in (0, threading.get_ident()):
            with contextlib.suppress(BlockingIOError):
                bell.recv(64)

    def _listen(self, connection: socket.socket, hear: Callable[[int], None]) -> None:
        file = connection.fileno()
        self._open[file] = connection
        self._ready[file] = hear
        self._poll.register(file, select.EPOLLIN)

    def _accept(self, _: int) -> None:
        try:
            connection, peer = self._server.accept()
        except BlockingIOError:
            return
        except OSError:
            self._refuse()
            return
        connection.setblocking(False)
        while len(self._strangers) >= STRANGERS:  # one that has meanwhile shown it is none
            self._ready[next(iter(self._strangers))](0)
        self._strangers[connection.fileno()] = time.monotonic()
        self._listen(connection, partial(self._shown, connection, f"{peer[0]}:{peer[1]}"))

    def _shown(self, connection: socket.socket, peer: str, events: int) -> None:
        """Hears who shows the secret and address from now on, and nobody else. ``events`` 0: who has not by now is hung
        up on."""
        shown = b""
        try:
            shown = connection.recv(SECRET_BYTES + NAME_BYTES)
        except BlockingIOError:
            if events:  # of another connection, which had its number
                return
        except OSError:
            pass
        if not hmac.compare_digest(shown[:SECRET_BYTES], self._secret):
            self._hang_up(connection.fileno())
            return
        del self._strangers[connection.fileno()]
        name = shown[SECRET_BYTES:].rstrip(b"\0").decode()
        self._ready[connection.fileno()] = Incoming(connection, name or peer, self).read

    def _refuse(self) -> None:
        """Hangs up on who connects, where no descriptor is left for it, by giving up the spare one."""
        self._spare.close()
        with contextlib.suppress(OSError):
            self._server.accept()[0].close()
        try:
            self._spare = open(os.devnull, "rb")  # noqa: SIM115 - as above
        except OSError:  # another thread was faster
            time.sleep(APART_S)

    def _hang_up(self, stranger: int) -> None:
        """Closes the connection of one who has not shown the secret."""
        del self._strangers[stranger], self._ready[stranger]
        self._poll.unregister(stranger)
        self._open.pop(stranger).close()

    def room(self, number: int, chunk: int, size: int) -> np.ndarray[Any, Any] | None:
        """Where a chunk that begins to come is to land; None: anywhere. Raises ReshardingError for one that nobody
        asked for and that is not small."""
        landing = self._landing.get(number)
        if landing is None:
            if size > SMALL_BYTES:
                raise ReshardingError(f"message {number} has {size} bytes, and nobody has asked for it")
            return None
        if size != landing.target.sizes[chunk]:
            raise ReshardingError(
                f"chunk {chunk} of message {number} has {size} bytes, not {landing.target.sizes[chunk]}"
            )
        return landing.target.room(chunk)

    def came(self, number: int, chunk: int, data: np.ndarray[Any, Any], *, placed: bool) -> None:
        """A chunk is there, ``placed``: where it is to land; else ``data`` may be written to afterwards."""
        with self._changed:
            landing = self._landing.get(number)
            if landing is None:
                self._early.setdefault(number, []).append((chunk, data.copy()))
                return
        if not placed:
            landing.target.write(chunk, data)
        self._landed(landing, chunk)

    def asked(self, peer: str, number: int) -> None:
        """A process has made room for a message."""
        with self._changed:
            to = self._to(peer)
            to.wanted(number)
        self._write(to)

    def _landed(self, landing: _Landing, chunk: int) -> None:
        fetch = landing.fetch
        with self._changed:
            landing.left -= 1
            for number, peer in landing.relays:
                frames = [(number, chunk, landing.target)]
                peer.put(frames, peer.relayed, asked=is_small(fetch.target.sizes), last=not landing.left)
            if not landing.left:
                del self._landing[fetch.number]
                landing.arrival.left -= 1
                if not landing.arrival.left:
                    self._changed.notify_all()
                    if landing.arrival is self._awaited and threading.get_ident() != self._waiter:
                        self._bell.send(b"!")
        for _, peer in landing.relays:
            self._write(peer)

    # --- failure -----------------------------------------------------------------------------------------------------

    def wait_for(self, arrival: _Arrival) -> None:
        """See `Arrival.wait`."""
        if arrival.left and self._waiting.acquire(blocking=False):
            try:
                self._awaited, self._waiter = arrival, threading.get_ident()
                self._listens(arrival)
            finally:
                self._awaited, self._waiter, self._heard_s = None, 0, time.monotonic()
                self._waiting.release()
        with self._changed:
            self._changed.wait_for(lambda: self._error or not arrival.left)
        if arrival.left:
            self._check()

    def _check(self) -> None:
        """Raises what went wrong."""
        if self._error is not None:
            raise self._error

    def _fail(self, error: Exception) -> None:
        """Nothing more is sent or heard; all who wait raise the error, and peers see the connections end."""
        with self._changed:
            if self._error is not None:
                return
            self._error = error
            self._changed.notify_all()
        for peer in list(self._outgoing.values()):
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._bell.send(b"!")


def _wait_for(offers: Sequence[Offer]) -> None:
    for offer in offers:
        offer.source.wait()


class _Arrival:
    """``left`` of the messages that were fetched together have not landed."""

    def __init__(self, wire: Wire, left: int) -> None:
        self._wire, self.left = wire, left

    def wait(self) -> None:
        self._wire.wait_for(self)


class _Landing:
    """``left`` chunks of a message are still to come."""

    def __init__(self, fetch: Fetch, arrival: _Arrival, relays: Sequence[tuple[int, Outgoing]]) -> None:
        self.fetch, self.target, self.arrival, self.relays = fetch, fetch.target, arrival, relays
        self.left = len(fetch.target.sizes)
