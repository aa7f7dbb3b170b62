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
_TRANSIENT, _RESULTS = FIELDS.index("transient_bytes"), FIELDS.index("results_bytes")


@dataclass(frozen=True)
class Cells:
    """All that a submesh can do.

    Attributes:
        memory_bytes: of each of its devices.
        number: int64[start, stop]: of layers start … stop − 1, one of ranges of which all is equal; -1 where it may not
            have them.
        cost: float64[option, number, field]: the `FIELDS` of a StageCost, inf where it cannot; options are logical
            shapes, what the batch is bound to, and prices.
        batch_axes: per option what the batch is bound to there; empty where it is bound nowhere.
    """

    submesh: Submesh
    memory_bytes: float
    number: NDArray[np.int64]
    cost: NDArray[np.float64]
    batch_axes: tuple[tuple[int, ...] | None, ...] = ()

    @classmethod
    def of(
        cls, submesh: Submesh, memory_bytes: float, tables: Sequence[tuple[NDArray[np.int64], NDArray[np.float64]]],
        beside_bytes: NDArray[np.float64] | None = None, batch_axes: tuple[tuple[int, ...] | None, ...] = (), *,
        trains: bool | None = None,
    ) -> Cells:  # fmt: skip
        """Those of several ``tables``, (number, cost) each as here.

        Args:
            beside_bytes: float64[start, stop]: bytes that tasks need beside what the tables say.
            trains: without ranges of which no option fits, by what it holds of a microbatch at least (activations too
                where the step trains); None: with all.
        """
        shape = tables[0][0].shape
        starts, stops = np.nonzero(np.triu(np.ones(shape, bool), 1))
        beside = np.zeros(len(starts)) if beside_bytes is None else beside_bytes[starts, stops]
        which = [number[starts, stops] for number, _ in tables]
        example, equal = _equal([*which, np.unique(beside, return_inverse=True)[1]])
        cost = np.concatenate([c[:, at[example]] for (_, c), at in zip(tables, which, strict=True)])
        cost[..., _TRANSIENT] += beside[example]
        can = np.ones(len(example), bool)
        if trains is not None:
            held = cost[..., _STATE] + cost[..., _ACTIVATION] if trains else cost[..., _STATE]
            can = held.min(0) <= memory_bytes
        number = np.full(shape, -1)
        number[starts, stops] = np.where(can, can.cumsum() - 1, -1)[equal]
        return cls(submesh, memory_bytes, number, cost[:, can], batch_axes)

    @property
    def layers(self) -> int:
        """Layers of the step."""
        return len(self.number)

    def at(self, start: int, stop: int) -> NDArray[np.float64]:
        """float64[option, field]: the cost of a range; inf where that is none of its ranges."""
        number = self.number[start, stop]
        return np.full((len(self.cost), len(FIELDS)), np.inf) if number < 0 else self.cost[:, number]

    def spread(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64[start, stop] of float64[number]; inf where there is no range."""
        return np.append(values, np.inf)[self.number]

    @cached_property
    def microbatch_s(self) -> NDArray[np.float64]:
        """float64[option, number]: seconds of a microbatch, forward and backward."""
        return self.cost[..., 0] + self.cost[..., 1] + self.cost[..., 2]

    @cached_property
    def once_s(self) -> NDArray[np.float64]:
        """float64[option, number]: seconds of what runs once a step."""
        return self.cost[..., 3] + self.cost[..., 4]

    def stage_s(self, num_microbatches: int) -> NDArray[np.float64]:
        """float64[option, number]: t of a stage, seconds of a microbatch's forward and backward and of its part of what
        runs once a step."""
        return self.microbatch_s + self.once_s / num_microbatches

    def held_bytes(self, in_flight: int, contexts: bool) -> NDArray[np.float64]:
        """float64[option, number]: bytes that a device holds with that many microbatches in flight. ``contexts``: see
        `stage_dp.Limits`."""
        first, more = self.held_waiting if contexts else self.held
        return first + (in_flight - 1) * more

    @cached_property
    def held(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """float64[option, number] each: bytes a device with one microbatch in flight (inf: cannot be), and for each one
        more."""
        activation = self.cost[..., _ACTIVATION]
        more = np.maximum(self.cost[..., _TRANSIENT] + activation, self.cost[..., _RESULTS])
        return _can(self.cost[..., _STATE] + more, activation)

    @cached_property
    def held_waiting(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """As `held`, where weight gradients wait: one is between both halves of its backward pass; the others hold
        their activations or what they wait with."""
        held, activation = self.held
        context = self.cost[..., _CONTEXT]
        kept = np.minimum(self.cost[..., _KEPT], np.minimum(context, activation))
        with np.errstate(invalid="ignore"):  # inf less inf
            return _can(held + context - kept, np.maximum(context, activation))


def _equal(which: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of what has equal numbers in each of ``which`` an example, and for each which of these it is like."""
    first, *others = {numbers.tobytes(): numbers for numbers in which}.values()
    for numbers in others:
        first = np.unique(first * (numbers.max() + 1) + numbers, return_inverse=True)[1]
    _, example, equal = np.unique(first, return_index=True, return_inverse=True)
    return example, equal


def _can(first: NDArray[np.float64], more: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Both; where it cannot be, inf bytes, and none more: whatever is in flight, it is inf bytes."""
    can = np.isfinite(first) & np.isfinite(more)
    return np.where(can, first, np.inf), np.where(can, more, 0.0)
