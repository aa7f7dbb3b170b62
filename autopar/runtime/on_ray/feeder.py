"""A worker's part of batches that are drawn on its host: `Feeder`. The driver's part is `loader`.

Each process that reads something of the batch draws from a source of its own, in a thread, and keeps what its stages
read in host memory.
"""

from __future__ import annotations

import threading
import traceback
from typing import Any

import numpy as np
from ray import cloudpickle

from autopar.data import Loader, read_ahead
from autopar.ir.errors import DataError
from autopar.runtime.batches import Signature, batch_of
from autopar.runtime.on_ray.messages import DRAWN, Draw, Drawn, Open, Rows


class Feeder:
    """The loaders of a worker's process.

    Args:
        held: its arrays by number, with the rows that they are; what is drawn is put there.
    """

    def __init__(self, held: dict[int, tuple[Rows, Any]]) -> None:
        self._held = held
        self._loaders: dict[int, Loader] = {}
        self._lock = threading.Lock()

    def open(self, order: Open, signature: Signature) -> None:
        """Begins to draw batches for a loader. Raises DataError where ``order`` cannot be followed."""
        batch = batch_of(signature, order.argnums)

        def source(start: int) -> Any:
            return cloudpickle.loads(order.source)(start)

        def read(given: Any, number: int) -> dict[int, np.ndarray[Any, Any]]:
            return batch.read(given, number, order.wanted)

        self._loaders[order.loader] = read_ahead(
            source, read, prefetch=order.prefetch, start=order.start, deadline_s=order.deadline_s
        )

    def draw(self, order: Draw) -> Drawn:
        """Keeps the next batch of a loader, once it is there; what the source raises is in the answer. In a thread of
        the actor's beside others."""
        loader = self._loaders.get(order.loader)
        if loader is None:
            return Drawn(over=True)  # closed meanwhile; nobody listens
        try:
            leaves: dict[int, np.ndarray[Any, Any]] = next(loader)
        except StopIteration:
            return Drawn(over=True)
        except Exception as error:  # noqa: BLE001 - told to the driver, which raises it
            said = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
            return Drawn(over=True, error=said, trace=traceback.format_exc())
        with self._lock:
            if order.loader in self._loaders:
                self._held.update({order.numbers[a]: (DRAWN, x) for a, x in leaves.items()})
        return Drawn(over=False)

    def close(self, loader: int, *, wait: bool) -> None:
        """Ends a loader's thread; ``wait``: True: waits for a source that is at a batch. What was drawn stays until the
        driver lets go of it."""
        with self._lock:
            found = self._loaders.pop(loader, None)
        if found is not None:
            found.close(*() if wait else (0.0,))
