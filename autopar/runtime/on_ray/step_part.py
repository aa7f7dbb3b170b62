"""What one process of a Ray runs of a step: `StepPart`, of a pipeline (`worker_stages`) or of one program
(`worker_program`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from jax.sharding import Sharding

from autopar.arrays import Array, Piece
from autopar.jax_compat import Device
from autopar.runtime.batches import Signature
from autopar.runtime.on_ray.messages import Job, Offered, Others, Rows
from autopar.runtime.tracing import TransferWatch, WorkerWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """Where a part runs: the plan's devices that its worker has, ``local`` those of this process, which others reach
    at ``address``."""

    job: Job
    devices: Mapping[int, Device]
    local: Mapping[int, Device]
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What a step notes that is traced."""

    worker: WorkerWatch
    transfers: TransferWatch


class StepPart(Protocol):
    """A step's part that is traced and compiled."""

    @property
    def signature(self) -> Signature:
        """The whole step's arguments."""
        ...

    @property
    def consumed(self) -> Collection[int]:
        """Arguments whose memory the step takes."""
        ...

    @property
    def wanted(self) -> Mapping[int, Collection[Rows]]:
        """Argument → rows that the part reads."""
        ...

    @property
    def offered(self) -> Offered:
        """What others have to know of it."""
        ...

    def place(self, argument: int, rows: Rows) -> Sharding:
        """The sharding that rows of an argument are to have."""
        ...

    def connect(self, others: Others) -> None:
        """Told of the others, when all are loaded."""
        ...

    def begin(self, number: int, values: Mapping[int, Array]) -> None:
        """Places what step ``number`` starts from; what it takes of ``values``, by argument, may go afterwards."""
        ...

    def run(self, watch: Watch | None) -> Mapping[int, list[Piece]]:
        """Runs the step that was begun: output → its pieces."""
        ...

    def sent(self) -> None:
        """Waits until what the step sends has left."""
        ...

    @property
    def sent_bytes(self) -> Mapping[str, int]:
        """Address of another process → bytes of values that it has been sent so far."""
        ...

    def where(self) -> str:
        """What it is doing, in words."""
        ...
