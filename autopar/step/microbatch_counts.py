"""Numbers of microbatches that a step may be planned in, and with which of them to begin: `MicrobatchCounts`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.frontend.microbatch.batch_args import batch_leaves
from autopar.ir.layers import Outline
from autopar.ir.plan import PlanConfig
from autopar.step.planning import Forms

MOST = 32
"""The most microbatches that are tried where fewer fit as well, on few devices; else two for each device (guessed)."""


class MicrobatchCounts:
    """Those of a call whose gradient is marked."""

    def __init__(self, forms: Forms) -> None:
        self.forms, self.cluster = forms, forms.request.cluster

    def batch(self) -> int:
        """The examples of the batch. Raises MicrobatchError where there is none."""
        arguments = self.forms.request.arguments
        dynamic, _ = arguments.split(self.forms.args)
        return batch_leaves(dynamic, self.forms.kwargs, arguments.batch_argnums, 1)[1]

    def every(self, config: PlanConfig) -> list[int]:
        """Numbers to try, ascending (`counts_of`): of one that was asked for, this. Raises as `batch`."""
        if not self.forms.request.asked.auto:
            return [config.num_microbatches]
        return counts_of(self.batch(), self._batch_parts(config), self.cluster.num_devices)

    def usual(self, counts: Sequence[int]) -> int:
        """The position of the most microbatches that are tried where fewer examples need not be."""
        most = max(MOST, 2 * self.cluster.num_devices)
        return sum(count <= most for count in counts[1:])

    def first(self, counts: Sequence[int]) -> int:
        """The position with which a search for stages begins: the most microbatches that have an example for each host
        of one of two stages (one stage is best in fewer, many in more), or `usual`."""
        hosts = sum(group.hosts for group in self.cluster.groups)
        return min(self.usual(counts), sum(count * hosts <= 2 * self.batch() for count in counts[1:]))

    def keeping(self, counts: Sequence[int], number: int, outline: Outline, memory_bytes: int | None) -> int:
        """The position, ``number`` or later, of the fewest microbatches of which two at a time keep all that their
        backward passes read, beside the state, so that nothing has to be computed again; ``number`` where none do.

        Args:
            counts: numbers to try, ascending.
            number: position to begin with.
            outline: the step's layers with all examples.
            memory_bytes: limit per device, if there is one beside its memory.
        """
        groups = self.cluster.groups
        has = sum(g.num_devices * min(memory_bytes or math.inf, g.device.usable_bytes) for g in groups)
        state = sum(t.size_bytes for t in (*outline.arguments, *outline.trained))  # with sums of gradients
        kept = sum(layer.activation_bytes for layer in outline.layers)
        return next((n for n in range(number, len(counts)) if state + 2 * kept / counts[n] <= has), number)

    def _batch_parts(self, config: PlanConfig) -> int:
        """How many devices have examples of their own, at least, by the degrees that were asked for."""
        stages, devices = config.stages, self.cluster.num_devices
        degrees = config.degrees
        if not degrees or config.batch_axis is not None or (stages is not None and stages.batch_axes is not None):
            return 1
        if stages is not None:
            _, most = stages.stages or (1, None)
            devices = max(1, devices // most) if most is not None else degrees.experts or 1
        if degrees.names is None:
            return devices
        sizes = degrees.shape(devices)
        return 1 if sizes is None else math.prod(sizes[: len(degrees.batch_axes(degrees.names))])


def counts_of(batch: int, parts: int, devices: int) -> list[int]:
    """Numbers of microbatches worth trying, ascending: of the divisors of ``batch`` (examples) from each power of two
    to the next, the one whose microbatches most of ``devices`` can share, the least of these. Of a batch that is a
    power of two, all powers of two up to it. Each of ``parts`` devices is to have the same number of a microbatch's
    examples, but for one microbatch."""
    lower = [count for count in range(1, math.isqrt(batch) + 1) if batch % count == 0]
    best = {1: (math.gcd(batch, devices), -1)}
    for count in {*lower, *(batch // count for count in lower)}:
        examples = batch // count
        if examples % parts == 0:
            found = (math.gcd(examples, devices), -count)
            best[count.bit_length()] = max(found, best.get(count.bit_length(), found))
    return sorted(-count for _, count in best.values())


def peak_at(count: int, seen: Sequence[tuple[int, float]]) -> float:
    """What a plan in ``count`` microbatches holds, about: a + b/count, by the last two of (microbatches, peak) that
    were seen; at least, of one, as all of it may shrink."""
    (m, peak), *_ = reversed(seen)
    if len(seen) == 1:
        return peak * m / count
    n, more = seen[-2]
    part = (more - peak) / (1 / n - 1 / m)
    return peak - part * (1 / m - 1 / count)
