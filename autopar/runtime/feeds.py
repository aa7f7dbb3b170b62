"""What a stage reads of the batch, placed microbatch by microbatch: a step holds two of them, not all.

In: values on the host or on devices, with where examples are in them. Out: `Feed.take`, called by the stage's worker.
Of n microbatches, number j has examples j, j + n, … (`microbatch.replay.split_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from autopar.frontend.microbatch.replay import apart
from autopar.primitives.kinds import Rows
from autopar.runtime.interpreter import Arrays
from autopar.runtime.pieces import put

Source: TypeAlias = Callable[[int], Any]
"""Microbatch → value."""


class Feed:
    """What one stage reads of the batch.

    Args:
        fixed: arrays that are the same for all microbatches, placed.
        sources: key → the value for each microbatch, and where that is to lie.
        count: of microbatches.
    """

    def __init__(self, fixed: Arrays, sources: Mapping[Any, tuple[Source, NamedSharding]], count: int) -> None:
        self.fixed, self.sources = fixed, sources
        self._ahead: dict[int, list[jax.Array]] = {}
        self._left = set(range(count))

    @property
    def keys(self) -> tuple[Any, ...]:
        """Keys of the arrays that `take` gives, in order."""
        return (*self.fixed, *self.sources)

    def take(self, microbatch: int) -> list[jax.Array]:
        """The arrays of a microbatch, once; those of the next are sent on their way."""
        self._left.remove(microbatch)
        found = self._ahead.pop(microbatch, None)
        found = self._placed(microbatch) if found is None else found
        if microbatch + 1 in self._left and microbatch + 1 not in self._ahead:
            self._ahead[microbatch + 1] = self._placed(microbatch + 1)
        return [*self.fixed.values(), *found]

    def _placed(self, microbatch: int) -> list[jax.Array]:
        return [put(source(microbatch), sharding) for source, sharding in self.sources.values()]


def parts(x: Any, rows: Rows, count: int) -> Source:
    """The microbatches of a value. Those of one on the host are copies: its memory is the caller's again when the step
    returns."""
    if not isinstance(x, np.ndarray):
        return lambda j: _part(x, rows, count, j)
    value, axis, shape = apart(x, rows, count)
    value = np.moveaxis(value, axis, 0)
    return lambda j: np.array(value[j], order="C").reshape(shape)


def _taken(x: Any, rows: Rows, count: int, j: Any) -> Any:
    value, axis, shape = apart(x, rows, count)
    return lax.dynamic_index_in_dim(value, j, axis, keepdims=False).reshape(shape)


_part = jax.jit(_taken, static_argnums=(1, 2))
