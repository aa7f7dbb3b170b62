"""`Executor`: a planned step that runs, whatever it runs as.

Three kinds: one program on one mesh (`one_program.executor`), a pipeline on this process's devices (`in_process`), a
pipeline on a Ray (`on_ray.executor`). They know flat arguments and results; trees are `step.Step`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from autopar.runtime.batches import Batch, StepSource
from autopar.runtime.part import Leaf
from autopar.runtime.tracing import Traced


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What ``function(*args, **kwargs)`` returns, as flat arguments of a step: ``numbers``, closed-over constants
    counted, and ``leaves``, their `jax.ShapeDtypeStruct`s."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    numbers: tuple[int, ...]
    leaves: tuple[Any, ...]


class Executor(Protocol):
    """A step of one plan, compiled for devices or workers."""

    @property
    def closed(self) -> bool:
        """True where what it ran on has ended."""
        ...

    def __call__(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """The step's flat results for its flat arguments, closed-over constants left out; arrays that lie elsewhere
        are moved.

        Raises TypeError or ValueError where an argument has another shape or dtype.
        """
        ...

    def init(self, wanted: Wanted) -> list[Leaf]:
        """Arguments, every part of them made where the step wants it: no device ever holds the whole."""
        ...

    def abstract(self, wanted: Wanted) -> list[Any]:
        """What `init` would return, with nothing made, as `autopar.restore` takes it."""
        ...

    def loader(self, batch: Batch, source: StepSource, *, prefetch: int, start: Any, deadline_s: float | None) -> Any:
        """Batches for the step, drawn ahead where they are needed; see `Step.loader`."""
        ...

    def trace(
        self, path: str | os.PathLike[str] | None, *, memory: bool, alone: bool
    ) -> AbstractContextManager[Traced]:
        """Within it, steps note what runs when; see `Step.trace`."""
        ...

    def close(self) -> None:
        """Ends what it runs on, where that is its own."""
        ...
