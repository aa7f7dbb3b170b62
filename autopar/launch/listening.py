"""Who listens where on this machine: the kernel's tables of TCP sockets, and whose they are (Linux)."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_LISTENS = "0A"
"""The state of a socket, in the kernel's tables."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Listener:
    """A socket that listens. ``address``: 0.0.0.0 or :: for all interfaces."""

    port: int
    address: str
    pid: int
    process: str

    @property
    def everywhere(self) -> bool:
        """True where it listens on all interfaces."""
        return self.address in ("0.0.0.0", "::")


def listeners(pids: Iterable[int]) -> list[Listener]:
    """Sockets that processes ``pids`` listen on, by port; none of processes that this user may not look into."""
    sockets = {inode: (address, port) for table in ("tcp", "tcp6") for inode, address, port in _table(table)}
    out: set[Listener] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{entry}"))
                    if found and found[1] in sockets:
                        address, port = sockets[found[1]]
                        out.add(Listener(port=port, address=address, pid=pid, process=_name(pid)))
    return sorted(out)


def below(pid: int) -> list[int]:
    """Numbers of the processes that ``pid`` has started, and of those that these have."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                stat = Path("/proc", entry, "stat").read_text()
                parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    out, left = list[int](), [pid]
    while left:
        children = parents.get(left.pop(), [])
        out += children
        left += children
    return out


def _table(name: str) -> list[tuple[str, str, int]]:
    try:
        lines = Path("/proc/net", name).read_text().splitlines()[1:]
    except OSError:
        return []
    out: list[tuple[str, str, int]] = []
    for line in lines:
        fields = line.split()
        if fields[3] == _LISTENS:
            address, _, port = fields[1].partition(":")
            out.append((fields[9], _address(address), int(port, 16)))
    return out


def _address(text: str) -> str:
    """From the kernel's hexadecimal words, each in the machine's byte order (here: little-endian)."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    found = socket.inet_ntop(family, b"".join(words))
    return found.removeprefix("::ffff:")


def _name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    scripts = [w for w in words[1:] if w.endswith((b".py", b".main"))] if b"python" in words[0] else []
    return Path((scripts or words)[0].decode(errors="replace").split(" ")[0]).name
