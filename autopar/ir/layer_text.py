"""The text form of layers' shardings: which operators of a pipeline's layers are split how, and what that moves.

In: an `ir.pipelined.Pipelined`. Out: sections of lines for `ir.pipeline_text` and `ir.diff`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from autopar.ir.layer_sharding import LayerSharding
from autopar.ir.pipelined import Pipelined
from autopar.ir.pretty import CollectiveSum, sum_collectives
from autopar.ir.sharding_plan import NodeStrategy, OperatorRow
from autopar.ir.text import bytes_text, seconds_text, table

CONTRACTIONS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
"""What is always shown; other operators mostly follow from these."""


def indices_text(numbers: Iterable[int]) -> str:
    """Ascending numbers, runs of them as ranges: ``0-3, 8``."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def split_text(strategy: NodeStrategy) -> str:
    """The mesh axes that split each factor of an operator: ``i:x k:y``; ``whole`` where none does."""
    return " ".join(f"{factor}:{','.join(axes)}" for factor, axes in strategy.factor_axes) or "whole"


def specs_text(strategy: NodeStrategy) -> str:
    """Specs of operands and results: ``[x,_] [_,_] -> [x,_]``."""
    return " ".join(map(str, strategy.operands)) + " -> " + " ".join(map(str, strategy.results))


def _rows(sharding: LayerSharding, limit: int | None) -> tuple[list[OperatorRow], int]:
    """(operators to show, how many operators are left out)."""
    every = sharding.operators
    if limit is None:
        return list(every), 0
    shown = [each for each in every if each.primitive in CONTRACTIONS][:limit]
    return shown, sum(e.count for e in every) - sum(e.count for e in shown)


def operators_text(plan: Pipelined, limit: int | None) -> list[str]:
    """Lines on the operators of every distinct sharding. ``limit``: how many of each, contractions only; None: all
    operators."""
    lines: list[str] = []
    for number, sharding in enumerate(plan.shardings):
        lines.append(f"{_heading(plan, number)}, remat {sharding.remat}")
        shown, others = _rows(sharding, limit)
        rows = [["phase", "count", "operator", "time", "split", "shardings", "source"]]
        for row in shown:
            strategy = sharding.strategies[row.strategy]
            rows.append([
                row.phase, str(row.count), row.primitive, seconds_text(row.time_s), split_text(strategy),
                specs_text(strategy), row.source,
            ])  # fmt: skip
        lines += table(rows, right=(1, 3)) if shown else []
        lines += [f"  ... {others} other operators (--all shows them)"] if others else []
        lines.append("")
    return lines


def collectives_text(plan: Pipelined) -> list[str]:
    """Lines on the collectives of every distinct sharding, and on those between layers."""
    m = plan.plan.schedule.num_microbatches
    lines: list[str] = []
    for number, sharding in enumerate(plan.shardings):
        sums = sum_collectives(sharding.collectives)
        spent = seconds_text(math.fsum(s.time_s for s in sums))
        takes = f"take a layer {spent} in a step of {m} microbatches" if sums else "none"
        lines += [f"collectives of {_heading(plan, number)}: {takes}", *map(_sum_text, sums), ""]
    for number, between in enumerate(plan.between):
        if between:
            lines += [f"between the layers of stage {number}", *map(_sum_text, sum_collectives(between)), ""]
    return lines


def _heading(plan: Pipelined, number: int) -> str:
    layers = [k for k, layer in enumerate(plan.layers) if layer.sharding == number]
    mesh = " x ".join(f"{a.size} ({a.name})" for a in plan.shardings[number].axes)
    return f"layer{'s' if len(layers) > 1 else ''} {indices_text(layers)} on mesh {mesh}"


def _sum_text(s: CollectiveSum) -> str:
    each = f"{s.runs} a step, {bytes_text(s.bytes)} a device in {seconds_text(s.time_s)}"
    return f"  {s.kind} over {','.join(s.axes)}: {each}"


def shardings_diff(a: Pipelined, b: Pipelined) -> tuple[int, list[list[str]]]:
    """How many layers' operators are sharded otherwise in ``b``, and a table of these layers and operators, its titles
    first; layers are matched by number."""
    groups: dict[tuple[int, int], list[int]] = {}
    for k, (left, right) in enumerate(zip(a.layers, b.layers, strict=False)):
        if _splits(a.shardings[left.sharding]) != _splits(b.shardings[right.sharding]):
            groups.setdefault((left.sharding, right.sharding), []).append(k)
    rows = [["layers", "operator", "a", "b"]]
    for (left, right), layers in groups.items():
        one, other = _splits(a.shardings[left]), _splits(b.shardings[right])
        changed = [key for key in dict.fromkeys((*one, *other)) if one.get(key) != other.get(key)]
        first = [key for key in changed if key[1] in CONTRACTIONS] or changed
        phase, primitive, source = first[0]
        rows.append([
            indices_text(layers), f"{phase} {primitive} ({source})",
            *("; ".join(found.get(first[0], ("none",))) for found in (one, other)),
        ])  # fmt: skip
        if len(changed) > 1:
            rows.append(["", f"and {len(changed) - 1} more", "", ""])
    return sum(map(len, groups.values())), rows


def _splits(sharding: LayerSharding) -> dict[tuple[str, str, str], tuple[str, ...]]:
    """(phase, operator, source line) → how those run, in order."""
    out: dict[tuple[str, str, str], tuple[str, ...]] = {}
    for row in sharding.operators:
        key = (row.phase, row.primitive, row.source)
        strategy = sharding.strategies[row.strategy]
        out[key] = (*out.get(key, ()), f"{row.count} {split_text(strategy)} {specs_text(strategy)}")
    return out
