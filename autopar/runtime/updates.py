"""The update of a stage, in rounds → functions of its tasks (`runtime.stages`), ready for `jax.jit`.

A round runs the nodes that `inter_op.update_rounds` says, each layer's with its own shardings (`update_round.Round`);
between two rounds stages exchange what others need, whole on every device of their meshes (`update_values`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.runtime.one_program.collective_order import Order
from autopar.runtime.one_program.reshard_whole import carried
from autopar.runtime.stage_arrays import Array, Key, StageTask
from autopar.runtime.update_round import Round
from autopar.runtime.update_values import UpdateValues


def gradients(update: UpdateValues) -> StageTask | None:
    """The task after the last backward task: gradient sums → parts of gradients that other stages take. None where
    there are none."""
    values = [v for v in update.schedule.gradient_parts if ("gradient", v, True) in update.stage.crossing]
    if not values:
        return None
    takes = {a.key: a for v in values for x, _, i in update.givers(v) for a in [update.stage.sums(x)[i]]}
    gives: list[Array] = []
    for v in values:
        crossing = update.stage.crossing["gradient", v, True]
        gives.append(Array(("send", v), crossing.type, crossing.src_spec))

    def local(xs: Sequence[Any], order: Order) -> list[Any]:
        given = dict(zip(takes, xs, strict=True))
        return [update.parts_of_gradient(v, array.spec, given, order) for v, array in zip(values, gives, strict=True)]

    return update.stage.task(tuple(takes.values()), gives, local)


def rounds(update: UpdateValues) -> list[StageTask]:
    """The tasks of all rounds, in order."""
    return [_round(update, r) for r in range(update.schedule.rounds + 1)]


def _round(update: UpdateValues, r: int) -> StageTask:
    takes = list(update.takes[r].arrays.values())
    made_now = update.held_first(r)
    gives = [update.crossed(o, update.number) for o in update.sends(r)]
    gives += [array for j, o in update.gives(r) for array in update.output_arrays(j, o)]
    copies = [(o, array) for j, o in update.gives(r) for array in update.new_values(j)]
    gives += [array for _, array in copies]
    gives += made_now.values()

    def local(xs: Sequence[Any], order: Order) -> list[Any]:
        run = Round(update, {a.key: x for a, x in zip(takes, xs, strict=True)}, order, r)
        run.all(update.positions(r))
        out: dict[Key, Any] = {}
        for o in update.sends(r):
            out["crossing", o, update.number] = run.mine(o)
        for j, o in update.gives(r):
            for array, x in zip(update.output_arrays(j, o), run.output(o, j), strict=True):
                out[array.key] = x
        for o, array in copies:
            held, lowering = run.output_held(o), run.lowerings[update.parts(o)[0].layer]
            out[array.key] = carried(held.arrays[()], held.base, array.spec, lowering.emit)
        for key in made_now:
            _, k, (stored, steps), own = key
            out[key] = run.value(k, stored, own).arrays[steps]
        return [out[a.key] for a in gives]

    return update.stage.task(takes, gives, local)
