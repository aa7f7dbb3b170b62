"""All that is known of a pipeline schedule: `ScheduleRecord`, of which each schedule's file exports one.

Whoever searches, builds, refines or checks pipelines asks the record for a property, never for a name. The registry is
`autopar.inter_op.schedules.SCHEDULES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from autopar.ir.errors import VerifyError
from autopar.ir.pipeline import PipelinePlan, Schedule

ScheduleOptions: TypeAlias = tuple[tuple[str, int], ...]
"""What a schedule is given beside its numbers of meshes and microbatches, by name; () is what it does by default."""

_VERIFIED = tuple(product(range(1, 6), range(1, 8)))
"""Numbers of meshes and microbatches that `ScheduleRecord.verify` builds."""


def _default_only(num_microbatches: int) -> tuple[ScheduleOptions, ...]:
    return ((),)


def _none(plan: PipelinePlan) -> tuple[ScheduleOptions, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRecord:
    """One way to order the tasks of a pipeline, for any number p of meshes and m of microbatches. `verify` enforces:

    build: ``(p, m, **options)`` → the order, a `Schedule` of that name. Durations do not matter.
    in_flight: ``(p, m, **options)`` → of each stage the most microbatches that it holds at a time: what ``build`` says,
        without the tasks. The dynamic program asks it what a stage must have memory for.
    in_flight_by_stages_after: True where what a stage holds does not depend on how many stages come before it: one run
        of the dynamic program cuts for every number of stages. False: it runs for one number at a time.
    hides: the part of a transfer's time, 0 to 1, that the dynamic program's estimate leaves out because compute hides
        it (guessed: the simulator decides).
    trains: True where there is a backward pass.
    splits_backward: True where weight gradients are tasks of their own, and wait with what they read.
    on_one_stage: True where a single stage runs it. The other schedules ask for two meshes at least: on one they all
        come to the same. Of those that train, and of those that do not, one does: `plain_schedule`.
    chunks: numbers of stages a mesh that are tried, 2 or more, ascending, and how many is its option ``chunks``: on
        equal meshes only, that fill a group of hosts. Empty: a stage a mesh, on any meshes.
    options: the names of what ``build`` and ``in_flight`` take beside p and m.
    tried: ``(m)`` → options that are tried on each choice of stages near a good one, the default first.
    distinct: ``(m)`` → all options that give orders of their own on some number of meshes: an exhaustive search's.
    suited: ``(plan)`` → options that the times of a plan under this schedule suggest.
    """

    name: str
    build: Callable[..., Schedule]
    in_flight: Callable[..., tuple[int, ...]]
    in_flight_by_stages_after: bool
    hides: float
    trains: bool = True
    splits_backward: bool = False
    on_one_stage: bool = False
    chunks: tuple[int, ...] = ()
    options: tuple[str, ...] = ()
    tried: Callable[[int], tuple[ScheduleOptions, ...]] = _default_only
    distinct: Callable[[int], tuple[ScheduleOptions, ...]] = _default_only
    suited: Callable[[PipelinePlan], tuple[ScheduleOptions, ...]] = _none

    @property
    def chunked(self) -> bool:
        """True where a mesh has several stages: on equal meshes only."""
        return bool(self.chunks)

    def verify(self) -> None:
        """Raises VerifyError where the record contradicts itself or what it builds (of few meshes and microbatches).
        That the orders can be run and hold no more than they say is `inter_op.check_schedule`'s."""
        if not 0 <= self.hides <= 1:
            self._wrong(f"hides is {self.hides}, not from 0 to 1")
        if any(v < 2 for v in self.chunks) or list(self.chunks) != sorted(set(self.chunks)):
            self._wrong(f"chunks are {self.chunks}; 2 or more, ascending")
        if self.chunked != ("chunks" in self.options):
            self._wrong("chunks are tried of those schedules that have the option chunks, and of no others")
        if self.chunked and self.on_one_stage:
            self._wrong("a single stage runs it, but a mesh has several")
        for p, m in _VERIFIED:
            if self.tried(m)[:1] != ((),):
                self._wrong(f"tried({m}) does not begin with the default, ()")
            chunked = tuple((("chunks", v),) for v in self.chunks)
            for options in dict.fromkeys(chunked or (*self.tried(m), *self.distinct(m))):
                self._verify_built(p, m, options)
        if self.in_flight_by_stages_after != all(self._holds_by_stages_after(p, m) for p, m in _VERIFIED):
            self._wrong(f"in_flight_by_stages_after is {self.in_flight_by_stages_after}, but in_flight says otherwise")

    def _verify_built(self, p: int, m: int, options: ScheduleOptions) -> None:
        given = dict(options)
        case = f"of {p} meshes and {m} microbatches" + "".join(f", {k} {v}" for k, v in options)
        if unknown := sorted(set(given) - set(self.options)):
            self._wrong(f"{unknown[0]} is none of its options ({', '.join(self.options) or 'there are none'})")
        made = self.build(p, m, **given)
        if made.name != self.name:
            self._wrong(f"that {case} is named {made.name}")
        if made.in_flight != self.in_flight(p, m, **given):
            self._wrong(f"in_flight says {self.in_flight(p, m, **given)}, that {case} says {made.in_flight}")
        if (made.num_stages, len(made.tasks)) != (p * given.get("chunks", 1), p):
            self._wrong(f"that {case} has {made.num_stages} stages on {len(made.tasks)} meshes")
        phases = {task.phase for tasks in made.tasks for task in tasks}
        backward = {"input_grad", "weight_grad"} if self.splits_backward else {"backward"}
        if phases != {"forward"} | (backward if self.trains else set[str]()):
            self._wrong(f"that {case} has tasks of phases {', '.join(sorted(phases))}")

    def _holds_by_stages_after(self, p: int, m: int) -> bool:
        """True where one mesh more in front changes nothing for the others."""
        held = self.in_flight(p, m)
        return self.in_flight(p + 1, m)[-len(held) :] == held

    def _wrong(self, text: str) -> None:
        raise VerifyError(f"schedule {self.name}: {text}")

    def __str__(self) -> str:
        backward = ("split" if self.splits_backward else "whole") if self.trains else "none"
        meshes = f"equal ones, {', '.join(map(str, self.chunks))} stages each" if self.chunked else "any, a stage each"
        return "\n".join((
            self.name,
            f"  options: {', '.join(self.options) or 'none'}",
            f"  backward pass: {backward}",
            f"  meshes: {meshes}; {'also one' if self.on_one_stage else 'two at least'}",
            f"  in flight: follows from {'the stages after' if self.in_flight_by_stages_after else 'all stages'}",
            f"  hides of a transfer: {self.hides:g}",
        ))  # fmt: skip
