"""Where arguments lie, the batch of a pipeline included: `held_where`."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.graph import TensorType
from autopar.ir.layers import LayeredGraph
from autopar.ir.pipelined import Pipelined
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
    """Where argument (or ``result``) ``number`` lies. Of examples that a pipeline's stages are given, each
    microbatch's, as the first layer of each stage reads it; nothing where the plan has no graph to tell."""
    argument = (plan.outputs if result else plan.inputs)[number]
    if argument.places or result or not isinstance(plan.body, Pipelined):
        return tuple(_held(plan, argument, place, place.type_of(argument.type)) for place in argument.places)
    layered = plan.step.graph if plan.step is not None else None
    if not isinstance(layered, LayeredGraph) or (value := layered.arguments[number]) < 0:
        return ()
    found: dict[int, Held] = {}
    home = plan.body.plan.home
    for k, layer in enumerate(plan.body.layers):
        for port, spec in zip(layer.wiring.receives, plan.body.sharding_of(k).receives, strict=True):
            if port == (value, "forward"):
                place = Place(stage=home[k], spec=spec)
                found.setdefault(home[k], _held(plan, argument, place, layered.values[value]))
    return tuple(found.values())


def _held(plan: Plan, argument: ArgPlan, place: Place, value_type: TensorType) -> Held:
    size = shard_bytes(value_type, place.spec, plan.meshes[place.stage])
    return Held(argument=argument, place=place, type=value_type, device_bytes=size)
