"""What a step knows of one kind of call: `Entry`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.frontend.arguments import Args, CallKey, is_weak
from autopar.frontend.layering.layers import Layered
from autopar.ir.plan import ArgPlan
from autopar.jax_compat import trace_settings
from autopar.runtime.executor import Executor
from autopar.runtime.one_program.executor import ProgramExecutor
from autopar.step.planning import Bound
from autopar.step.step_plan import StepPlan


@dataclass
class Entry:
    """What is known for one `Arguments.key`."""

    key: CallKey
    statics: tuple[tuple[int, Any], ...]
    num_args: int
    bound: Bound[Any]
    program: ProgramExecutor | None = None
    """Of a plan of one program, compiled only where it runs in this process."""
    executor: Executor | None = None

    @property
    def plan(self) -> StepPlan:
        """The plan, with the step's trees."""
        return self.bound.plan

    def is_for(self, leaves: Sequence[Any], tree: Any, args: Args) -> bool:
        """True where it is compiled, and the call may be for it: what executors do not look at is equal."""
        if self.executor is None or tree != self.key.tree or self.key.settings != trace_settings():
            return False
        for i, value in self.statics:
            if type(args[i]) is not type(value) or args[i] != value:
                return False
        return tuple(map(is_weak, leaves)) == self.key.weak_types

    def runs_as(self, other: Entry) -> bool:
        """True where it is the same program as another's, though its key differs: for weak types, say."""
        mine, its = self.bound.traced, other.bound.traced
        if self.plan.data is not other.plan.data or self.key.settings != other.key.settings:
            return False
        if len(mine.closed_over) != len(its.closed_over):
            return False
        if any(a is not b for a, b in zip(mine.closed_over, its.closed_over, strict=True)):
            return False
        return isinstance(mine, Layered) or mine.out_avals == its.out_avals

    def results(self, outs: Sequence[Any]) -> Any:
        """Flat results as the step returns them."""
        return jax.tree_util.tree_unflatten(self.plan.out_tree, outs)

    def differs(self, known: Entry) -> str:
        """How its arguments differ from an earlier call's."""
        told = (_differs(a, b) for a, b in zip(known.plan.data.inputs, self.plan.data.inputs, strict=False))
        return next(filter(None, told), "other arguments")


def _differs(known: ArgPlan, now: ArgPlan) -> str:
    """How an argument differs from an earlier call's, if it does."""
    return "" if (known.path, known.type) == (now.path, now.type) else f"{now.path} is {now.type}, was {known.type}"


def ordinal(number: int) -> str:
    """Of a number past the first."""
    return {2: "second", 3: "third"}.get(number, f"{number}th")
