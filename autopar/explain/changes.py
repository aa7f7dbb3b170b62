"""Where two plans of one step spend their seconds otherwise: `spent_on`, `changes`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.ir.pipelined import Pipelined
from autopar.ir.plan import OneProgram, Plan
from autopar.ir.strategy import Collective

LEAST_S = 1e-9
"""Seconds below which a difference is none."""


def spent_on(operators: Iterable[tuple[str, str, float]], collectives: Iterable[Collective]) -> dict[str, float]:
    """Seconds by what they are for, in words: the operators of each source line, (primitive, source, seconds), and the
    collectives for each."""
    found: dict[str, float] = {}
    for primitive, source, seconds in operators:
        text = f"{primitive} ({source})" if source else primitive
        found[text] = found.get(text, 0.0) + seconds
    for row in collectives:
        text = f"{row.kind} over {','.join(row.axes)} for {row.where}"
        found[text] = found.get(text, 0.0) + row.time_s
    return found


def of_plan(plan: Plan) -> dict[str, float]:
    """`spent_on` of a whole plan; of a pipeline, of all its layers, one device of each."""
    match plan.body:
        case OneProgram(sharding=sharding):
            shardings, between = [sharding], []
        case Pipelined() as body:
            shardings = [body.shardings[layer.sharding] for layer in body.layers]
            between = [row for stage in body.between for row in stage]
    operators = [(o.primitive, o.source, o.time_s) for sharding in shardings for o in sharding.operators]
    return spent_on(operators, [*(c for sharding in shardings for c in sharding.collectives), *between])


def changes(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """(what, seconds more) where two differ, the most first."""
    every = ((what, after.get(what, 0.0) - before.get(what, 0.0)) for what in dict.fromkeys((*before, *after)))
    return tuple(sorted((c for c in every if abs(c[1]) > LEAST_S), key=lambda c: (-abs(c[1]), c[0])))
