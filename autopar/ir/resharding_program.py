"""What each device does: instructions of a resharding.

A transfer of K chunks is one instruction on each of its devices, which loops over the chunks. ``transfer`` indexes the
plan's transfers, which say the piece, and ``chunks`` is how many chunks it has. Instructions of different streams run
at the same time; those of one stream follow each other. On every device they stand in the order of the plan's
transfers, so that an interpreter that runs them one by one ends as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send every chunk of a piece that this device holds to each of ``to``."""

    transfer: int
    stream: int
    chunks: int
    to: tuple[int, ...]

    def __str__(self) -> str:
        return f"send t{self.transfer} ({self.chunks} chunks) to {', '.join(map(str, self.to))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recv:
    """Receive every chunk of a piece from ``source``."""

    transfer: int
    stream: int
    chunks: int
    source: int

    def __str__(self) -> str:
        return f"recv t{self.transfer} ({self.chunks} chunks) from {self.source}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """Receive every chunk of a piece from ``source``, keep it, and pass it to each of ``to`` while the next comes."""

    transfer: int
    stream: int
    chunks: int
    source: int
    to: tuple[int, ...]

    def __str__(self) -> str:
        return f"relay t{self.transfer} ({self.chunks} chunks) from {self.source} to {', '.join(map(str, self.to))}"


Instruction: TypeAlias = Send | Recv | Relay
