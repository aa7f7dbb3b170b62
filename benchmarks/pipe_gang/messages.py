"""What a gang's driver and its workers say to each other: pickled, one message and its answer at a time.

They stand in a module of their own: a worker runs as ``__main__``, and what is defined there has no name elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from autopar.ir.resharding import ReshardingPlan
from autopar.ir.resharding_program import Instruction
from autopar.runtime.resharding_interpreter import TileKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Take the plan's ``devices`` for this process's, in order, and listen at ``address``. Answer: the server's."""

    devices: tuple[int, ...]
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to run from now on; ``peers``: device id → its process's server."""

    plan: ReshardingPlan
    instructions: Mapping[int, tuple[Instruction, ...]]
    peers: Mapping[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Source tiles in host memory (`pieces.host_of`)."""

    tiles: Mapping[TileKey, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run what was loaded; give up after ``deadline_s``."""

    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Collect:
    """Answer: (value, device) → the tile that arrived last, in host memory, or with ``digests`` its SHA-256."""

    digests: bool


Message: TypeAlias = Start | Load | Put | Run | Collect


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a message was answered with."""

    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """``summary`` in one line; ``trace`` where it happened."""

    summary: str
    trace: str
