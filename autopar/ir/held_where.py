"""Where arguments lie, a pipeline's batch included (`held_where`), and what of them is on a device (`most_bytes`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from autopar.ir.graph import TensorType
from autopar.ir.plan import ArgPlan, Place, Plan
from autopar.ir.pretty import shard_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One argument, or rows of it, on one stage: ``type`` is that of the part which the stage has at a time (of a
    pipeline's batch one microbatch), ``device_bytes`` what of it is on a device."""

    argument: ArgPlan
    place: Place
    type: TensorType
    device_bytes: int


def held_where(plan: Plan, number: int, *, result: bool = False) -> tuple[Held, ...]:
    """Where argument (or ``result``) ``number`` lies; of examples that a pipeline's stages are given, each
    microbatch's."""
    argument = (plan.outputs if result else plan.inputs)[number]
    held = [_held(plan, argument, place, place.type_of(argument.type)) for place in argument.places]
    if argument.fed_type is not None:
        held += [_held(plan, argument, place, argument.fed_type) for place in argument.fed]
    return tuple(held)


def most_bytes(held: Iterable[Held]) -> int:
    """Bytes of all of ``held`` on a device of the stage that has most of them; 0 of nothing."""
    stages: Counter[int] = Counter()
    for one in held:
        stages[one.place.stage] += one.device_bytes
    return max(stages.values(), default=0)


def _held(plan: Plan, argument: ArgPlan, place: Place, value_type: TensorType) -> Held:
    size = shard_bytes(value_type, place.spec, plan.meshes[place.stage])
    return Held(argument=argument, place=place, type=value_type, device_bytes=size)
