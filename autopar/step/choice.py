"""Which plan a call of a step gets: `plan_step`.

given, known       a plan that is there, where it is of this step
many equal layers  stages first, one of them allowed, and one program only where there are none: how long that search
                   takes follows mostly from the distinct layers                                          `_Choice.deep`
one program        at the fewest microbatches at which it fits as fast as without a limit, without the step's own
                   `jax.checkpoint`s where that fits, too                                              `_Choice.program`
stages             unless their work alone takes as long (`inter_op.work_bound`): first in as many microbatches as leave
                   each host of two stages an example, and more, or fewer, as long as that is faster    `_Choice.stages`
one of the two     one program, unless stages are faster by more than `MARGIN`                            `_Choice.best`

What lost is in the plan (`Provenance.considered`, ``notes``). Seconds of both kinds follow from one cost model but for
what a layer by itself may compute again; so stages have to beat the fastest single stage of their own search as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autopar.frontend.arguments import Args, Kwargs
from autopar.frontend.layering.layers import Layered
from autopar.frontend.trace import Traced
from autopar.frontend.user_rules import registered_rules
from autopar.inter_op.work_bound import least_in_stages_s
from autopar.inter_op.workers import expect
from autopar.intra_op.plan_search import SOLVE_S
from autopar.intra_op.refusals import OverLimitError
from autopar.ir.errors import AutoparError, InfeasibleError, MicrobatchError, PlanMismatchError, SolverTimeoutError
from autopar.ir.graph import Graph
from autopar.ir.plan import Considered, OneProgram, Plan, PlanConfig
from autopar.ir.text import seconds_text
from autopar.step.asked import pipeline_options
from autopar.step.ended import ended
from autopar.step.microbatch_counts import MicrobatchCounts, peak_at
from autopar.step.planning import TASK_S, Bound, Forms, Request, bound_to, plan_program, plan_stages
from autopar.step.stages_search import COUNTS, LEAST_TASKS, MARGIN, StagesSearch

CLOSE = 1.02
"""What computes again is not planned where what does not takes less than this times as long as in one microbatch."""
LIMITED_S = 15.0
"""Seconds that the solver has at most for one program that the limit slows, where stages fit (guessed)."""
SQUEEZED, MUCH = 3, 1.5
"""Numbers of microbatches in which plans of one program that compute again are tried beside one that does not, where
that takes this times as long as one that keeps all (chosen: each may take `LIMITED_S`)."""
DEEP_NODES, DEEP_SHARE = 4000, 0.25
"""Of so many operators of layers, and where the distinct ones are at most this part of them, layers are planned and no
whole step (chosen: a Llama of 32 layers, 6,000 operators, takes minutes as one program under a limit, and seconds in
layers)."""
NOT_WHOLE = (
    "many layers are equal: they were planned in stages, one or more. As one program (stages=1) the step takes longer "
    "to plan, and under a memory limit may compute less again"
)
UNMARKED = "the step takes no gradients by autopar.value_and_grad"
"""What rules out microbatches, and stages that are worth it."""


def plan_step(request: Request, args: Args, kwargs: Kwargs) -> Bound[Any]:
    """The plan of a call: the one that is given, one of a former call of the same graph, or the best that is found.

    Raises:
        PlanMismatchError: the plan that is given is of another step.
        InfeasibleError: nothing of the kinds that were asked for fits.
        SolverTimeoutError: nothing that fits was found in time.
        OptionError, ClusterError, ShardingError, RuleError, TraceError, MicrobatchError, LoweringError: as
            `planning.plan_program` and `planning.plan_stages`, of the kind that was asked for.
    """
    forms = Forms(request, args, kwargs)
    if request.given is not None:
        return bound_to(forms, request.given)
    for plan in request.known:
        try:
            return bound_to(forms, plan)
        except (PlanMismatchError, MicrobatchError):  # other shapes
            continue
    if request.follow is not None:
        return _following(forms)
    if request.asked.stages is not None and request.workers != 1 and request.cluster.num_devices > 1:
        expect()
    watch = request.watch
    with watch.interruptible():
        try:
            found = _Choice(forms).best()
        except SolverTimeoutError as error:
            if watch.interrupted:
                raise KeyboardInterrupt from error
            if not watch.cut:
                raise
            limit_s = request.asked.config.time_limit_s
            text = f"time_limit_s={limit_s:g}: {error}. Give it more time, or fix more (stages, mesh, layers)"
            raise SolverTimeoutError(text) from error
    return replace(found, plan=replace(found.plan, data=ended(found.plan.data, watch)))


def _following(forms: Forms) -> Bound[Any]:
    asked = forms.request.asked
    if asked.stages is not None and asked.program is None:
        return plan_stages(forms, asked.stages)[0]
    assert asked.program is not None
    return plan_program(forms, asked.program, checkpoints=forms.honours_remat)


@dataclass(frozen=True, kw_only=True)
class _Over:
    """How far one program is over the limit in ``count`` microbatches, of those that were tried (``counts``) the ones
    with which it needs least."""

    count: int
    error: OverLimitError
    counts: tuple[int, ...] = ()


class _Choice:
    """The search for a call's plan; what it saw is in ``rows`` and ``notes``."""

    def __init__(self, forms: Forms) -> None:
        self.forms, self.asked, self.watch = forms, forms.request.asked, forms.request.watch
        self.rows: list[Considered] = []
        self.notes: list[str] = []
        self.counts = MicrobatchCounts(forms)
        self._started_s = time.perf_counter()

    def best(self) -> Bound[Any]:
        """The best plan; raises as `plan_step`."""
        config = self.asked.program
        if config is None or self._unequal:  # one program is on devices of one kind
            assert self.asked.stages is not None
            return self._noted(self.stages(self.asked.stages, math.inf)[0], None)
        if self.asked.stages is None and not self.asked.auto and not self._own_checkpoints:
            return self._noted(self._alone(config), None)
        if self.deep:
            if (found := self._stages_or_why_not(None)) is not None:
                self.notes.append(NOT_WHOLE)
                return self._noted(found[0], None)
            if self.watch.over():
                raise SolverTimeoutError("; ".join(self.notes))
        lacking: InfeasibleError | SolverTimeoutError | None = None
        tried: dict[bool, Bound[Traced] | _Over] = {}
        try:
            tried = self._tried_freely(config)
        except (InfeasibleError, SolverTimeoutError) as error:  # whatever the limit
            lacking = error
        free = [x for x in tried.values() if isinstance(x, Bound)]
        program = self._fastest(free) if free else None
        stages = self._stages_or_why_not(program)
        if program is None:
            over = {x: y for x, y in tried.items() if isinstance(y, _Over)}
            try:
                program = self._limited(config, over, math.inf if stages is None else stages[0].step_s)
            except (InfeasibleError, SolverTimeoutError) as error:
                lacking = error
        if program is None:
            if stages is None:
                assert lacking is not None
                raise type(lacking)("; ".join([str(lacking), *self.notes])) from lacking
            return self._noted(stages[0], None)
        if stages is None:
            return self._noted(program, None)
        found, alone_s = stages
        alone_s = alone_s if found.is_several else math.inf
        if found.step_s * MARGIN < min(program.step_s, alone_s):
            return self._noted(found, program)
        return self._noted(program, found)

    @property
    def _unequal(self) -> bool:
        """True of a step that may be in stages on a cluster whose devices are of several kinds."""
        groups = self.forms.request.cluster.groups
        return self.asked.stages is not None and len({group.device for group in groups}) > 1

    @cached_property
    def deep(self) -> bool:
        """True of a step that may be in stages and has many layers, most of them equal."""
        if self.asked.stages is None or self.asked.program is None or self.forms.request.cluster.num_devices == 1:
            return False
        try:
            count = self.asked.stages.num_microbatches
            found = self.forms.outline if self.asked.auto else self.forms.layered(count).graph.outline
        except AutoparError:  # said where it is traced next
            return False
        sizes = [(id(kind), len(kind.joint[0].nodes) if kind.joint else 0) for kind in found.layers]
        whole, distinct = sum(size for _, size in sizes), sum(size for _, size in set(sizes))
        return found.trains and whole >= DEEP_NODES and distinct <= DEEP_SHARE * whole

    # --- one program -------------------------------------------------------------------------------------------------

    def _alone(self, config: PlanConfig) -> Bound[Traced]:
        """The step as one program, where nothing else may be."""
        try:
            return plan_program(self.forms, config, checkpoints=self.forms.honours_remat)
        except (InfeasibleError, SolverTimeoutError) as error:
            if not self.asked.no_stages:
                raise
            raise type(error)(f"{error}; stages were not looked for: {self.asked.no_stages}") from error

    @cached_property
    def _own_checkpoints(self) -> bool:
        """True where the step says by `jax.checkpoint` what to compute again, and the compiler would."""
        if (config := self.asked.program) is None or not self.forms.honours_remat:
            return False
        first = self._counts(config)[0]
        return has_checkpoints(self.forms.program(first, True).traced.graph)

    def _tried_freely(self, config: PlanConfig) -> dict[bool, Bound[Traced] | _Over]:
        """The step as one program that no limit slows, with its own `jax.checkpoint`s (True) and without, as far as
        that makes a difference."""
        counts, own = self._counts(config), self._own_checkpoints
        first = self.forms.honours_remat and not own
        tried = {first: self._freely(config, counts, first)}
        if own and not self._as_fast(tried[False]) and not self.watch.over():
            tried[True] = self._freely(config, counts, True)
        return tried

    def _limited(self, config: PlanConfig, over: Mapping[bool, _Over], stages_s: float) -> Bound[Traced] | None:
        """The step as one program where nothing fits as it is: what keeps the step's own checkpoints needs least, what
        does not may be faster. None where stages, of ``stages_s``, are faster than that can be. Raises as
        `plan_program`."""
        solve_s = LIMITED_S if stages_s < math.inf else SOLVE_S
        found: list[Bound[Traced]] = []
        lacking: InfeasibleError | SolverTimeoutError | None = None
        for checkpoints in sorted(over, reverse=True):
            least_s = over[checkpoints].error.step_s
            if found and self.watch.over():
                break
            if stages_s * MARGIN < least_s or any(x.step_s <= MARGIN * least_s for x in found):
                continue
            # sums of gradients are held between microbatches: without any, less may do; so it may with the most, where
            # there is nothing else
            most = over[checkpoints].counts[-1:] if stages_s == math.inf else ()
            for count in dict.fromkeys((over[checkpoints].count, self._counts(config)[0], *most)):
                try:
                    trial = replace(config, num_microbatches=count)
                    found.append(plan_program(self.forms, trial, checkpoints=checkpoints, solve_s=solve_s))
                    break
                except (InfeasibleError, SolverTimeoutError) as error:
                    lacking = lacking or error
        if not found and lacking is not None:
            tried = sorted({count for each in over.values() for count in each.counts})
            raise type(lacking)(f"{lacking}. Numbers of microbatches: {', '.join(map(str, tried))}") from lacking
        return self._fastest(found) if found else None

    def _as_fast(self, found: Bound[Traced] | _Over) -> bool:
        """True where what was found without the step's checkpoints is as fast as that would be without a limit: with
        them it cannot be faster by much."""
        return isinstance(found, Bound) and found.step_s <= CLOSE * min(
            (row.step_s for row in self.rows), default=math.inf
        )

    def _freely(self, config: PlanConfig, counts: Sequence[int], checkpoints: bool) -> Bound[Traced] | _Over:
        """The fastest plan that the limit does not slow, in as few microbatches as have one; else how far the leanest
        is over. What will not fit is left out (`peak_at`)."""
        number, usual, seen = 0, self.counts.usual(counts), list[tuple[int, float]]()
        over: _Over | None = None
        while True:
            trial = replace(config, num_microbatches=counts[number])
            try:
                found = plan_program(self.forms, trial, checkpoints=checkpoints, freely=True)
                return found if over is None else self._or_squeezed(found, over, config, checkpoints)
            except OverLimitError as error:
                name, peak = self._named(counts[number], checkpoints), error.peak_bytes
                if over is None or peak < over.error.peak_bytes:
                    over = _Over(count=counts[number], error=error)
                seen.append((counts[number], peak))
                over = replace(over, counts=tuple(count for count, _ in seen))
                self.rows.append(Considered(name=name, step_s=error.step_s, peak_bytes=peak, fits=False))
            except MicrobatchError as error:
                if over is None:
                    raise
                self.notes.append(f"no more microbatches: {error}")
                return over
            fits = [n for n in range(number + 1, len(counts)) if peak_at(counts[n], seen) <= over.error.limit_bytes]
            if len(seen) == COUNTS or (not fits and number >= usual):
                return over
            if self.watch.over() and not (fits and len(seen) == 1):  # a second is soon planned, stages are not
                return over
            number = fits[0] if fits else usual

    def _or_squeezed(self, found: Bound[Traced], over: _Over, config: PlanConfig, checkpoints: bool) -> Bound[Traced]:
        """``found``, or a plan in fewer microbatches, computing a little again, where that is faster: in those that
        nearly fit, or, where ``found`` takes much longer, the next that do."""
        if over.error.step_s * MARGIN >= found.step_s:
            return found
        counts = [n for n in self._counts(config) if over.count <= n < found.plan.data.config.num_microbatches]
        for count in counts[: SQUEEZED if found.step_s > MUCH * over.error.step_s else 1]:
            if self.watch.over():
                break
            trial = replace(config, num_microbatches=count)
            try:
                squeezed = plan_program(self.forms, trial, checkpoints=checkpoints, solve_s=LIMITED_S)
            except (InfeasibleError, SolverTimeoutError):  # its row says that it does not fit
                continue
            return self._fastest([found, squeezed])
        return found

    def _fastest(self, found: Sequence[Bound[Traced]]) -> Bound[Traced]:
        best = min(found, key=lambda x: x.step_s)
        for other in found:
            if other is not best:
                self._lost(other)
        return best

    # --- stages ------------------------------------------------------------------------------------------------------

    def _stages_or_why_not(self, program: Bound[Traced] | None) -> tuple[Bound[Layered], float] | None:
        """The step in stages, and seconds of the fastest single stage; None where that cannot be faster, or not be at
        all, with a note on why. Where nothing but stages was asked for, raises as `plan_stages`."""
        config = self.asked.stages
        if config is None:
            if self.asked.no_stages and program is None:
                self.notes.append(f"stages were not looked for: {self.asked.no_stages}")
            return None
        if program is not None and self.watch.over():
            self.notes.append("no stages: the search had ended")
            return None
        if (why := self._no_stages(config, program)) is not None:
            self.notes.append(f"no stages: {why}")
            return None
        try:
            return self.stages(config, math.inf if program is None else program.step_s)
        except KeyboardInterrupt:
            if program is None or not self.watch.over():
                raise
            self.notes.append("no stages: Ctrl-C came")
            return None
        except AutoparError as error:
            self.notes.append(f"no stages: {error}")
            return None

    def _no_stages(self, config: PlanConfig, program: Bound[Traced] | None) -> str | None:
        """Why a pipeline cannot be, or not be faster than ``program``."""
        request, counts = self.forms.request, self._counts(config)
        if program is not None and request.cluster.num_devices == 1:
            return "there is one device"
        if not self._marked():
            return f"{UNMARKED}, so that there is one microbatch, which fills no stages"
        if program is None:
            return None
        most_s = program.step_s / MARGIN
        if most_s <= counts[0] * LEAST_TASKS * TASK_S:
            return f"a step takes {seconds_text(program.step_s)}, and dispatching the tasks of two stages takes as long"
        try:
            graph = self.forms.layered(counts[0]).graph
        except AutoparError as error:
            return str(error)
        least_s = least_in_stages_s(graph, request.cluster, pipeline_options(config, None), registered_rules())
        if math.isinf(least_s):
            return f"no cut of {len(graph.layers)} layers into two stages or more has all devices"
        if most_s <= least_s:
            return f"by their work alone they take at least {seconds_text(least_s)}"
        return None

    def stages(self, config: PlanConfig, below_s: float) -> tuple[Bound[Layered], float]:
        """See `StagesSearch.best`."""
        search = StagesSearch(self.forms, self.counts, self._lost)
        return search.best(config, self._counts(config), below_s, alone=not self._unequal)

    # --- what both have ----------------------------------------------------------------------------------------------

    def _marked(self) -> bool:
        """True where the step's gradient is `autopar.value_and_grad`'s."""
        if self.deep:
            return True
        if self.asked.program is None:
            return self.forms.outline.trains
        return self.forms.program(self._first, self.forms.honours_remat).marked

    @property
    def _first(self) -> int:
        return self.asked.config.num_microbatches

    def _counts(self, config: PlanConfig) -> list[int]:
        """Numbers of microbatches to try, ascending (`counts_of`)."""
        if self.asked.auto and not self._marked():
            return [1]
        try:
            return self.counts.every(config)
        except MicrobatchError:  # `_why_one`
            return [1]

    def _why_one(self) -> str:
        """Why nothing but one microbatch was looked at, where the number was the planner's to choose; "" where more
        were."""
        if not self.asked.auto:
            return ""
        if not self._marked():
            return UNMARKED
        try:
            batch = self.counts.batch()
        except MicrobatchError as error:
            return str(error)
        return "" if batch > 1 else "the batch is one example"

    def _lost(self, found: Bound[Any]) -> None:
        plan = found.plan.data
        peak = plan.predictions.peak_memory_bytes
        self.rows.append(Considered(name=self._name(plan), step_s=found.step_s, peak_bytes=peak))

    def _name(self, plan: Plan) -> str:
        count = plan.config.num_microbatches
        if isinstance(plan.body, OneProgram):
            return self._named(count, plan.body.checkpoints)
        pipeline = plan.pipelined.plan
        stages = len(pipeline.stages)
        return f"{stages} stage{'s' if stages > 1 else ''}, {pipeline.schedule.name}, {count} microbatches"

    def _named(self, count: int, checkpoints: bool) -> str:
        kept = ", its checkpoints" if checkpoints and self._own_checkpoints else ""
        return f"one program, {count} microbatch{'es' if count > 1 else ''}{kept}"

    def _noted(self, chosen: Bound[Any], other: Bound[Any] | None) -> Bound[Any]:
        """The plan with what it was chosen from."""
        if other is not None:
            self._lost(other)
            best = [x for x in other.plan.data.provenance.considered if x.fits]
            self.rows += best if isinstance(other.plan.data.body, OneProgram) else []
        plan = chosen.plan.data
        if why := self._why_one():
            told = any(UNMARKED in note for note in self.notes)
            self.notes += [] if told else [f"one microbatch: {why}"]
        elif self.asked.auto and isinstance(plan.body, OneProgram):
            than = " than those that do not fit" if any(not row.fits for row in self.rows) else ""
            self.notes.append(f"more microbatches of one program{than} were not planned: they are never faster")
        made = plan.provenance
        # the step is traced before it is known what it is planned as, and once for all that are alike
        seconds = tuple((phase, self.forms.trace_s if phase == "trace" else s) for phase, s in made.seconds)
        if self.rows or self.notes:
            rest_s = time.perf_counter() - self._started_s - sum(spent for _, spent in seconds)
            seconds = (*seconds, ("other plans", max(0.0, rest_s)))
        provenance = replace(
            made,
            considered=(*made.considered, *self.rows),
            notes=(*made.notes, *self.notes),
            seconds=seconds,
        )
        return replace(chosen, plan=replace(chosen.plan, data=replace(plan, provenance=provenance)))


def has_checkpoints(graph: Graph) -> bool:
    """True where some of a graph is under `jax.checkpoint`."""
    return any(
        node.primitive in ("checkpoint", "remat2") or any(map(has_checkpoints, node.bodies)) for node in graph.nodes
    )
