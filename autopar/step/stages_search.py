"""A step in stages: the numbers of microbatches that are tried, and which is best (`StagesSearch`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autopar.frontend.layering.layers import Layered
from autopar.ir.errors import InfeasibleError, MicrobatchError, SolverTimeoutError
from autopar.ir.plan import PlanConfig
from autopar.step.microbatch_counts import MicrobatchCounts
from autopar.step.planning import TASK_S, Bound, Forms, plan_stages

COUNTS = 6
"""Numbers of microbatches that are tried at most, of a kind of plan."""
ALONE = 4
"""Of these, of a single stage beside several."""
MARGIN = 1.01
"""One program is preferred to stages that are less than this times as fast: figures are no better than that."""
LEAST_TASKS = 4
"""Tasks of each microbatch, in two stages."""
HOPE = 0.9
"""Numbers of microbatches are not tried where what they leave to do is, times this, no less than one program takes
(chosen: the work is extrapolated)."""


class StagesSearch:
    """The search for a step's plan in stages. ``lost`` is told of every plan that another is better than."""

    def __init__(self, forms: Forms, counts: MicrobatchCounts, lost: Callable[[Bound[Any]], None]) -> None:
        self.forms, self.counts, self.watch = forms, counts, forms.request.watch
        self._lost = lost
        self._busy_s: dict[int, float] = {}
        """Number of microbatches → seconds that the busiest stage has to do in it."""

    def best(
        self, config: PlanConfig, counts: Sequence[int], below_s: float, *, alone: bool
    ) -> tuple[Bound[Layered], float]:
        """The step in stages, and seconds of the fastest single stage seen: in as many microbatches as are best, if
        that is one of those that may take less than ``below_s``, which one program takes: `MicrobatchCounts.first`,
        those `keeping` all, or the next that fit; of several stages more as long as that is faster, at first two
        numbers at a time, up to a usual number, beyond it where layers compute again, else fewer; of one stage the
        other way round. Then, where there is no one program and ``alone``, one stage (`_or_alone`).

        Args:
            counts: numbers of microbatches, ascending.
            below_s: infinite where nothing else was found.
            alone: whether a single stage can be at all.

        Raises:
            InfeasibleError, SolverTimeoutError, MicrobatchError, …: as `plan_stages`, of the first number.
        """
        usual = self.counts.usual(counts)
        while usual and counts[usual] * LEAST_TASKS * TASK_S >= below_s:
            usual -= 1
        first = min(usual, self.counts.first(counts))
        if len(counts) > 1:
            first = self.counts.keeping(counts, first, self.forms.outline, config.memory_bytes)
        left = COUNTS

        def at(number: int) -> tuple[Bound[Layered], float]:
            nonlocal left
            left -= 1
            found = plan_stages(self.forms, replace(config, num_microbatches=counts[number]))
            self._busy_s[counts[number]] = max(w.busy_s for w in found[0].plan.data.predictions.workers)
            return found

        number, lacking = first, list[InfeasibleError | SolverTimeoutError]()
        while True:
            try:
                best = at(number)
                break
            except (InfeasibleError, SolverTimeoutError) as error:
                lacking.append(error)
            except MicrobatchError:
                if not lacking:
                    raise
            number += 1
            if number == len(counts) or left == 0 or self.watch.over():
                raise lacking[0]
        seen = set(range(first, number + 1))
        for stride in (2, 1, -1) if best[0].is_several else (-1, 1):
            before = number
            while left and (then := number + stride) not in seen and 0 <= then < len(counts):
                if stride > 0 and then > usual and not best[0].computes_again:
                    break
                if best[0].step_s > below_s and HOPE * self._work_s(counts[then]) >= below_s:
                    break
                if self.watch.over():
                    return best
                seen.add(then)
                try:
                    found, alone_s = at(then)
                except (InfeasibleError, SolverTimeoutError, MicrobatchError):  # fewer microbatches hold more
                    break
                if found.step_s >= best[0].step_s:
                    self._lost(found)
                    break
                self._lost(best[0])
                best, number = (found, min(alone_s, best[1])), then
            if number != before and abs(stride) == 1:
                break
        return self._or_alone(config, counts, best) if alone and below_s == math.inf and best[0].is_several else best

    def _work_s(self, count: int) -> float:
        """Seconds that the busiest stage has to do in ``count`` microbatches, as those tell that were tried: no less
        than in fewer, and not less than on the line through two, W + f count."""
        tried = sorted(self._busy_s)
        least_s = max((self._busy_s[n] for n in tried if n <= count), default=0.0)
        if len(tried) < 2 or count >= tried[0]:
            return least_s
        one, two = tried[:2]
        each_s = (self._busy_s[two] - self._busy_s[one]) / (two - one)
        return self._busy_s[one] - max(0.0, each_s) * (one - count)

    def _or_alone(
        self, config: PlanConfig, counts: Sequence[int], best: tuple[Bound[Layered], float]
    ) -> tuple[Bound[Layered], float]:
        """``best``, several stages, or a single one where that is faster: in as few microbatches as fit, for it gathers
        the state of each, and in more as long as that is faster. Where the number of microbatches is given, the search
        for stages had one among them; where cuts or meshes are, or devices of several kinds, there is none."""
        asked = config.stages
        assert asked is not None
        several = (asked.stages or (1,))[0] > 1 or (asked.virtual_stages or 1) > 1
        if len(counts) == 1 or several or asked.starts or asked.submeshes:
            return best
        one, alone = replace(config, stages=replace(asked, stages=(1, 1))), None
        for count in counts[:ALONE]:
            if self.watch.over():
                break
            try:
                found, found_s = plan_stages(self.forms, replace(one, num_microbatches=count))
            except (InfeasibleError, SolverTimeoutError, MicrobatchError):
                continue
            if alone is not None and found.step_s >= alone.step_s:
                self._lost(found)
                break
            if alone is not None:
                self._lost(alone)
            alone, best = found, (best[0], min(best[1], found_s))
        if alone is None:
            return best
        faster = alone.step_s <= MARGIN * best[0].step_s
        self._lost(best[0] if faster else alone)
        return (alone, best[1]) if faster else best
