"""Rows of a stacked argument that one layer reads together: one operand of the layer, which cuts it.

What stages own of a stacked argument, and update, are rows, each layer its own, and the same ones of all arguments that
the same layers read (`inter_op.stage_update`). Where layers share rows (two scans over the same weights), read rows
that do not lie together, or begin within a turn of a scan, all of them read all of the argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax

from autopar.frontend.layering.inputs import FROM_ARGUMENT, FROM_ROW, Input
from autopar.frontend.layering.surgery import plain
from autopar.jax_compat import Jaxpr, JaxprEqn, Var


def grouped(bodies: Sequence[Jaxpr], inputs: Mapping[Var, Input]) -> tuple[list[Jaxpr], dict[Var, Input]]:
    """(layers that read at most one operand of each stacked argument, sources of the operands that are new).
    ``bodies``: a jaxpr for each layer, which reads rows one by one; ``inputs``: where these variables come from."""
    rows = [[v for v in body.invars if v in inputs and inputs[v].source == FROM_ROW] for body in bodies]
    whole = {s.which: v for v, s in inputs.items() if s.source == FROM_ARGUMENT}
    read: dict[int, dict[int, frozenset[int]]] = {}
    """Argument → layer → rows of it that the layer reads, if any."""
    for k, mine in enumerate(rows):
        for a in dict.fromkeys(inputs[v].which for v in mine):
            read.setdefault(a, {})[k] = frozenset(inputs[v].at for v in mine if inputs[v].which == a)
    ways: dict[frozenset[int], list[Any]] = {}
    """Layers → how they divide the arguments that they read together."""
    for a, found in read.items():
        ways.setdefault(frozenset(found), []).append((whole[a].aval.shape[0], found))
    fresh: dict[Var, Input] = {}
    operands: dict[tuple[int, int], tuple[Var, int]] = {}
    """(argument, row) → the operand that has it, and where."""
    for a, found in read.items():
        like, groups = whole[a].aval, list(found.values())
        first, *others = ways[frozenset(found)]
        together = all(max(group) - min(group) + 1 == len(group) for group in groups)
        shared = sum(map(len, groups)) > len(frozenset().union(*groups))
        if shared or not together or any(way != first for way in others):
            operands.update(((a, at), (whole[a], at)) for at in range(like.shape[0]))
            continue
        for group in groups:
            if len(group) > 1:
                start = min(group)
                v = Var(like.update(shape=(len(group), *like.shape[1:])))
                fresh[v] = replace(inputs[whole[a]], source=FROM_ROW, at=start, count=len(group))
                operands.update(((a, at), (v, at - start)) for at in group)
    return [_cutting(body, mine, inputs, operands) for body, mine in zip(bodies, rows, strict=True)], fresh


def _cutting(
    body: Jaxpr, rows: Sequence[Var], inputs: Mapping[Var, Input], operands: Mapping[tuple[int, int], tuple[Var, int]]
) -> Jaxpr:
    """A layer that cuts its rows out of ``operands``."""
    cuts: list[JaxprEqn] = []
    of: dict[Var, Var] = {}
    for v in rows:
        operand, at = operands.get((inputs[v].which, inputs[v].at), (v, 0))
        if operand is v:
            continue
        of[v] = operand
        struct = jax.ShapeDtypeStruct(operand.aval.shape, operand.aval.dtype)
        [cut] = jax.make_jaxpr(lambda x, at=at: lax.slice_in_dim(x, at, at + 1))(struct).jaxpr.eqns
        cuts.append(cut.replace(invars=[operand], outvars=[v], source_info=body.eqns[0].source_info))
    if not cuts:
        return body
    return plain(body, list(dict.fromkeys(of.get(v, v) for v in body.invars)), body.outvars, [*cuts, *body.eqns])
