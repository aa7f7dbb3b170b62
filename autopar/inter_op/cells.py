"""What a submesh can do with ranges of layers: `Cells`, in which stages are looked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.inter_op.ranges import FIELDS
from autopar.inter_op.submesh import Submesh

_STATE, _ACTIVATION = FIELDS.index("state_bytes"), FIELDS.index("activation_bytes")
_CONTEXT, _KEPT = FIELDS.index("weight_context_bytes"), FIELDS.index("weight_kept_bytes")
_TRANSIENT = FIELDS.index("transient_bytes")


@dataclass(frozen=True)
class Cells:
    """All that a submesh can do.

    Attributes:
        memory_bytes: of each of its devices.
        layers: of the step.
        starts, stops: int64[ranges]: the ranges of layers start … stop − 1 that it may have, in order.
        cost: float64[option, range, field]: the `FIELDS` of a StageCost, inf where it cannot; options are logical
            shapes, what the batch is bound to, and prices.
        batch_axes: per option what the batch is bound to there; empty where it is bound nowhere.
    """

    submesh: Submesh
    memory_bytes: float
    layers: int
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    cost: NDArray[np.float64]
    batch_axes: tuple[tuple[int, ...] | None, ...] = ()

    @classmethod
    def of(
        cls, submesh: Submesh, memory_bytes: float, tables: Sequence[NDArray[np.float64]],
        beside_bytes: NDArray[np.float64] | None = None, batch_axes: tuple[tuple[int, ...] | None, ...] = (), *,
        trains: bool | None = None,
    ) -> Cells:  # fmt: skip
        """Those of several ``tables``, float64[option, start, stop, field] each.

        Args:
            beside_bytes: float64[start, stop]: bytes that tasks need beside what the tables say.
            trains: without ranges of which no option fits, by what it holds of a microbatch at least (activations too
                where the step trains); None: with all.
        """
        layers = tables[0].shape[1]
        can = np.triu(np.ones((layers, layers + 1), bool), 1)
        if trains is not None:
            held = [t[..., _STATE] + t[..., _ACTIVATION] if trains else t[..., _STATE] for t in tables]
            can &= np.min([each.min(0) for each in held], axis=0) <= memory_bytes
        starts, stops = np.nonzero(can)
        cost = np.concatenate([table[:, starts, stops] for table in tables])
        if beside_bytes is not None:
            cost[..., _TRANSIENT] += beside_bytes[starts, stops]
        return cls(submesh, memory_bytes, layers, starts, stops, cost, batch_axes)

    def at(self, start: int, stop: int) -> NDArray[np.float64]:
        """float64[option, field]: the cost of a range; inf where that is none of its ranges."""
        number = self.number(start, stop)
        return np.full((len(self.cost), len(FIELDS)), np.inf) if number < 0 else self.cost[:, number]

    def number(self, start: int, stop: int) -> int:
        """The number of a range among its ranges; -1 where it is none."""
        return int(self._numbers[start, stop])

    def spread(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64[start, stop] of float64[range]; inf where there is no range."""
        out = np.full((self.layers, self.layers + 1), np.inf)
        out[self.starts, self.stops] = values
        return out

    @cached_property
    def _numbers(self) -> NDArray[np.int64]:
        out = np.full((self.layers, self.layers + 1), -1)
        out[self.starts, self.stops] = np.arange(len(self.starts))
        return out

    @cached_property
    def microbatch_s(self) -> NDArray[np.float64]:
        """float64[option, range]: seconds of a microbatch, forward and backward."""
        return self.cost[..., 0] + self.cost[..., 1] + self.cost[..., 2]

    @cached_property
    def once_s(self) -> NDArray[np.float64]:
        """float64[option, range]: seconds of what runs once a step."""
        return self.cost[..., 3] + self.cost[..., 4]

    def stage_s(self, num_microbatches: int) -> NDArray[np.float64]:
        """float64[option, range]: t of a stage, seconds of a microbatch's forward and backward and of its part of what
        runs once a step."""
        return self.microbatch_s + self.once_s / num_microbatches

    def held_bytes(self, in_flight: int, contexts: bool) -> NDArray[np.float64]:
        """float64[option, range]: bytes that a device holds with that many microbatches in flight. ``contexts``: see
        `stage_dp.Limits`."""
        first, more = self.held_waiting if contexts else self.held
        return first + (in_flight - 1) * more

    @cached_property
    def held(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """float64[option, range] each: bytes a device with one microbatch in flight (inf: cannot be), and for each one
        more."""
        activation = self.cost[..., _ACTIVATION]
        return _can(self.cost[..., _STATE] + self.cost[..., _TRANSIENT] + activation, activation)

    @cached_property
    def held_waiting(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """As `held`, where weight gradients wait: one is between both halves of its backward pass; the others hold
        their activations or what they wait with."""
        held, activation = self.held
        context = self.cost[..., _CONTEXT]
        kept = np.minimum(self.cost[..., _KEPT], np.minimum(context, activation))
        with np.errstate(invalid="ignore"):  # inf less inf
            return _can(held + context - kept, np.maximum(context, activation))


def _can(first: NDArray[np.float64], more: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Both; where it cannot be, inf bytes, and none more: whatever is in flight, it is inf bytes."""
    can = np.isfinite(first) & np.isfinite(more)
    return np.where(can, first, np.inf), np.where(can, more, 0.0)
