"""A connection to a peer, and one from it: frames as they are written (`Outgoing`) and read (`Incoming`).

A frame is a header (message, chunk, bytes) and a chunk's bytes, which go from the source's memory to the target's
without a copy on the way. A frame of chunk `ASKED` and no bytes asks for a message. Relayed chunks are written first:
others wait for them.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from typing import Any, Protocol

import numpy as np

from autopar.runtime.transports import PeerLostError

CONNECT_S = 60.0
"""For a peer to accept (chosen: as long as a busy machine may take)."""
READ_BYTES = 256 * 2**10
"""Read at a time where no large chunk is under way (chosen)."""
TOGETHER = 64
"""Frames written in one call at most (chosen)."""
ASKED = 0xFFFFFFFF
_HEADER = struct.Struct("!QII")
"""A message's number, the chunk, its bytes."""
Frame = tuple[int, int, Any]
"""Message, chunk, and the source that has it."""


class Outgoing:
    """A connection to one peer, and the frames that wait for it."""

    def __init__(self, address: str, shown: bytes) -> None:
        self.address = address
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), CONNECT_S)
        self.socket.sendall(shown)
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.turn = threading.Lock()
        """Held while frames are written."""
        self.full = False
        """The listening thread goes on writing when there is room."""
        self.asks: deque[int] = deque()
        self.relayed: deque[Frame] = deque()
        self.offered: deque[Frame] = deque()
        self._pending: dict[int, tuple[list[Frame], deque[Frame], bool]] = {}
        """Message → frames that nobody has asked for yet, where they will wait, whether these are its last."""
        self._wanted: set[int] = set()
        """Messages that were asked for and are not all here."""
        self._writing: list[memoryview] = []

    @property
    def queued(self) -> bool:
        """Something may be written."""
        return bool(self._writing or self.asks or self.relayed or self.offered)

    @property
    def left(self) -> bool:
        """Something is to be written, be it asked for or not."""
        return self.queued or bool(self._pending)

    def put(self, frames: list[Frame], where: deque[Frame], *, asked: bool, last: bool) -> None:
        """Frames of one message wait for their turn, or until they are asked for."""
        number = frames[0][0]
        if not asked and number not in self._wanted:
            before = self._pending.get(number)
            self._pending[number] = (frames if before is None else before[0] + frames, where, last)
            return
        where.extend(frames)
        if last:
            self._wanted.discard(number)

    def wanted(self, number: int) -> None:
        """A message was asked for."""
        frames, where, last = self._pending.pop(number, ((), self.offered, False))
        where.extend(frames)
        if not last:
            self._wanted.add(number)

    def write(self) -> int:
        """Writes as much as the connection takes; returns how many bytes of payload were begun."""
        payload = 0
        while self._writing or self.queued:
            if not self._writing:
                payload += self._take()
            try:
                count = self.socket.sendmsg(self._writing)
            except BlockingIOError:
                self.full = True
                break
            while count:
                if count < len(self._writing[0]):
                    self._writing[0] = self._writing[0][count:]
                    break
                count -= len(self._writing.pop(0))
        return payload

    def _take(self) -> int:
        """The next frames, as they are to be written."""
        payload = 0
        while len(self._writing) < 2 * TOGETHER and payload < READ_BYTES:
            if self.asks:
                self._writing.append(memoryview(_HEADER.pack(self.asks.popleft(), ASKED, 0)))
                continue
            waiting = self.relayed or self.offered
            if not waiting:
                break
            number, chunk, source = waiting.popleft()
            data = source.read(chunk)
            self._writing.append(memoryview(_HEADER.pack(number, chunk, len(data))))
            if len(data):
                self._writing.append(memoryview(data))
            payload += len(data)
        return payload


class Listener(Protocol):
    """Who is told what comes."""

    def asked(self, peer: str, number: int) -> None:
        """A process has made room for a message."""

    def room(self, number: int, chunk: int, size: int) -> np.ndarray[Any, Any] | None:
        """Where a chunk that begins to come is to land; None: anywhere."""

    def came(self, number: int, chunk: int, data: np.ndarray[Any, Any], *, placed: bool) -> None:
        """A chunk is there, ``placed``: where it is to land; else ``data`` may be written to afterwards."""


class Incoming:
    """What comes over one connection."""

    def __init__(self, connection: socket.socket, peer: str, wire: Listener) -> None:
        self._socket, self._peer, self._wire = connection, peer, wire
        self._memory = memoryview(bytearray(READ_BYTES))
        self._stop = 0
        """So much of the memory is filled."""
        self._chunk: tuple[int, int, np.ndarray[Any, Any], bool] | None = None
        """Message, chunk, memory and whether it is the target's, of a chunk that comes apart from the memory."""
        self._got = 0

    def read(self, _: int) -> None:
        """What has come meanwhile; of the last frame perhaps only a part."""
        try:
            into = self._memory[self._stop :] if self._chunk is None else self._chunk[2][self._got :].data
            count = self._socket.recv_into(into)
            if not count:
                raise ConnectionResetError("closed by the other end")
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerLostError(f"the connection from {self._peer} was lost: {error}") from error
        if self._chunk is None:
            self._stop += count
            self._frames()
            return
        number, chunk, memory, placed = self._chunk
        self._got += count
        if self._got == len(memory):
            self._chunk = None
            self._wire.came(number, chunk, memory, placed=placed)

    def _frames(self) -> None:
        """All whole frames of the memory; the rest of the last one goes where it is to land."""
        at = 0
        while self._stop - at >= _HEADER.size:
            number, chunk, size = _HEADER.unpack_from(self._memory, at)
            at += _HEADER.size
            if chunk == ASKED:
                self._wire.asked(self._peer, number)
                continue
            there = np.frombuffer(self._memory[at : min(self._stop, at + size)], np.uint8)
            at += len(there)
            if len(there) == size:
                self._wire.room(number, chunk, size)
                self._wire.came(number, chunk, there, placed=False)
                continue
            room = self._wire.room(number, chunk, size)
            memory = np.empty(size, np.uint8) if room is None else room
            memory[: len(there)] = there
            self._chunk, self._got = (number, chunk, memory, room is not None), len(there)
        rest = self._stop - at
        if at and rest:
            self._memory[:rest] = bytes(self._memory[at : self._stop])
        self._stop = rest
