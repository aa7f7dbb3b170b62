"""Why not as the user has it? `why_not` plans again with a pin, and says what changes."""

from __future__ import annotations

from dataclasses import replace

from autopar.explain.changes import changes, of_plan
from autopar.ir.errors import OptionError
from autopar.ir.plan import OneProgram, Plan
from autopar.ir.progress import Tell
from autopar.ir.sharding import Pin
from autopar.step.again import plan_again

OPEN = ("?", "*")
WHOLE = ("none", "_", "")


def pin_from_text(text: str) -> Pin:
    """``args[0].params.w1: data, None``: a path or ``name:…``, and for each dimension the mesh axes that split it:
    ``None`` or ``_`` for none, ``x+y`` for two, ``?`` for the planner's choice. Raises OptionError for anything else.
    """
    target, colon, dims = text.rpartition(":")
    if not colon or not target.strip():
        raise OptionError(f"{text!r}: write a path and the mesh axes of each dimension, 'args[0].w1: data, None' say")
    return Pin(target=target.strip(), dims=tuple(map(_axes, dims.strip().strip("[]()").split(","))))


def _axes(text: str) -> tuple[str, ...] | None:
    text = text.strip().strip("'\"")
    if text in OPEN:
        return None
    if text.lower() in WHOLE:
        return ()
    return tuple(axis.strip() for axis in text.replace("·", "+").split("+"))


def why_not(plan: Plan, pin: Pin, tell: Tell | None = None) -> tuple[Plan, tuple[tuple[str, float], ...]]:
    """The best plan with ``pin``, on the same mesh where the plan is one program, and where it spends more seconds
    (less: below 0). Raises as `step.again.plan_again`."""
    config = replace(plan.config, pins=(*plan.config.pins, pin))
    if isinstance(plan.body, OneProgram):
        mesh = plan.body.sharding.mesh
        config = replace(config, mesh_shape=mesh.shape, axis_names=mesh.axis_names)
    again = plan_again(replace(plan, config=config), {} if tell is None else {"progress": tell})
    return again, changes(of_plan(plan), of_plan(again))
