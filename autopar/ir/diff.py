"""What differs between two plans: `differences`, and as text `diff_text`.

In: plans ``a`` and ``b``. Out: tables, none where their digests agree. Arguments are matched by path, collectives by
kind and axes, layers, stages by number, cuts by source, target and phase; wall times are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autopar.ir.asked_text import config_text
from autopar.ir.layer_text import indices_text, shardings_diff
from autopar.ir.pipeline import Cut
from autopar.ir.pipeline_text import cut_bytes, remat_text, submesh_text
from autopar.ir.pipelined import Pipelined
from autopar.ir.plan import ArgPlan, OneProgram, Plan
from autopar.ir.plan_text import how_text
from autopar.ir.pretty import cluster_text, fold_paths, sum_collectives
from autopar.ir.serde import digest
from autopar.ir.text import bytes_text, percent_text, seconds_text, table

Measure: TypeAlias = tuple[str, float | None, float | None, Callable[[float], str]]
"""A predicted figure: its name, the old and the new value (None: the plan does not say it), how one is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One table of what differs.

    ``titles``: of the columns; none where the rows are the old and the new text. ``right``: columns of figures. Without
    rows the heading says all.
    """

    heading: str
    titles: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    right: tuple[int, ...] = ()


def diff_text(a: Plan, b: Plan) -> str:
    """The differences from ``a`` to ``b``; empty for plans of equal digest."""
    lines: list[str] = []
    for found in differences(a, b):
        rows = [found.titles, *found.rows] if found.titles else found.rows
        lines += [found.heading, *(table(rows, right=found.right) if rows else []), ""]
    return "\n".join(lines).rstrip() + "\n" if lines else ""


def differences(a: Plan, b: Plan) -> tuple[Difference, ...]:
    """The differences from ``a`` to ``b``; none for plans of equal digest."""
    if digest(a) == digest(b):
        return ()
    found = _setting(a, b)
    match a.body, b.body:
        case Pipelined() as left, Pipelined() as right:
            found += [*_order(left, right), *_stages(a, b), *_cuts(a, b), *_shardings(left, right)]
        case _:
            pass
    found += _arguments("arguments", a, b, a.inputs, b.inputs)
    found += _arguments("results", a, b, a.outputs, b.outputs)
    match a.body, b.body:
        case OneProgram(), OneProgram():
            found += [*_collectives(a, b), *_recomputed(a, b), *_replicated(a, b)]
        case _:
            pass
    found += _predictions(a, b)
    inside = (
        "the plans look the same to a user, but not inside: strategies of operators, costs of layers, the places\n"
        "of collectives, or rates of the cluster differ"
    )
    return tuple(found) or (Difference(heading=inside),)


def _table(heading: str, rows: Sequence[Sequence[str]], right: tuple[int, ...] = ()) -> list[Difference]:
    """A table whose first row is its columns' titles; none where there is no other."""
    titles, *rest = (tuple(row) for row in rows)
    return [Difference(heading=heading, titles=titles, rows=tuple(rest), right=right)] if rest else []


def _setting(a: Plan, b: Plan) -> list[Difference]:
    pairs = [
        ("function", f"{a.name} ({a.fingerprint[:12]})", f"{b.name} ({b.fingerprint[:12]})"),
        ("cluster", cluster_text(a.cluster), cluster_text(b.cluster)),
        ("runs as", how_text(a), how_text(b)),
        ("asked for", config_text(a.config), config_text(b.config)),
    ]
    if isinstance(a.body, OneProgram) and isinstance(b.body, OneProgram):
        old, new = a.body.sharding.report, b.body.sharding.report
        pairs.append(("solver", f"{old.solver}, {old.status}", f"{new.solver}, {new.status}"))
    return [
        Difference(heading=what, rows=((f"- {left}",), (f"+ {right}",))) for what, left, right in pairs if left != right
    ]


def _order(a: Pipelined, b: Pipelined) -> list[Difference]:
    left, right = a.plan.schedule, b.plan.schedule
    same = (left.name, left.num_microbatches, left.mesh_of_stage) == (
        right.name, right.num_microbatches, right.mesh_of_stage
    )  # fmt: skip
    differs = same and left.tasks != right.tasks
    return [Difference(heading="schedule", rows=(("the order of tasks differs",),))] if differs else []


def _arguments(heading: str, a: Plan, b: Plan, left: Sequence[ArgPlan], right: Sequence[ArgPlan]) -> list[Difference]:
    old, new = _where(a, left), _where(b, right)
    changed: list[tuple[str, tuple[str, str]]] = []
    for path in dict.fromkeys((*old, *new)):
        pair = old.get(path), new.get(path)
        if pair[0] == pair[1]:
            continue
        typed = pair[0] is None or pair[1] is None or pair[0][0] != pair[1][0]
        texts = ["absent" if x is None else f"{x[0]} {x[1]}" if typed else x[1] for x in pair]
        changed.append((path, (texts[0], texts[1])))
    rows = [["path", "count", "a", "b"]]
    for fold in fold_paths(changed) if changed else ():
        rows.append([fold.path, str(len(fold.rows)), *changed[fold.rows[0]][1]])
    return _table(f"{heading}: {len(changed)} changed", rows, right=(1,))


def _where(plan: Plan, arguments: Sequence[ArgPlan]) -> dict[str, tuple[str, str]]:
    """Path, rows included → type, and the shardings that it has, on which stages."""
    out: dict[str, tuple[str, str]] = {}
    for argument in arguments:
        fed = argument.fed if argument.fed_type is not None else ()  # microbatch by microbatch
        if not argument.places and not fed:
            out[argument.path] = str(argument.type), "on no stage"
        for place in (*argument.places, *fed):
            text = f"{place.spec} on stage {place.stage}" if len(plan.meshes) > 1 else str(place.spec)
            path = argument.path + place.rows
            text = f"{out[path][1]}; {text}" if path in out else text
            out[path] = str(place.type_of(argument.type)), text
    return out


def _stages(a: Plan, b: Plan) -> list[Difference]:
    def cells(plan: Plan, number: int) -> list[str]:
        if number >= len(plan.pipelined.plan.stages):
            return ["none", "", "", "", "", "", ""]
        stage = plan.pipelined.plan.stages[number]
        return [
            indices_text(stage.layers), submesh_text(plan.cluster, stage),
            "x".join(map(str, stage.mesh.shape)), remat_text(stage), "fused" if stage.fused else "",
            seconds_text(stage.cost.forward_s + stage.cost.backward_s),
            bytes_text(stage.cost.state_bytes),
        ]  # fmt: skip

    rows = [["stage", "", "layers", "submesh", "mesh", "remat", "", "time", "state"]]
    changed = 0
    for number in range(max(len(a.pipelined.plan.stages), len(b.pipelined.plan.stages))):
        left, right = cells(a, number), cells(b, number)
        if left != right:
            changed += 1
            rows += [[str(number), "-", *left], ["", "+", *right]]
    return _table(f"stages: {changed} changed", rows, right=(0, 7, 8))


def _size(cut: Cut) -> str:
    return bytes_text(cut_bytes(cut))


def _time(cut: Cut) -> str:
    return seconds_text(cut.time_s)


def _cuts(a: Plan, b: Plan) -> list[Difference]:
    left = {(cut.source, cut.target, cut.phase): cut for cut in a.pipelined.plan.cuts}
    right = {(cut.source, cut.target, cut.phase): cut for cut in b.pipelined.plan.cuts}

    def text(cut: Cut | None, of: Callable[[Cut], str]) -> str:
        return of(cut) if cut is not None else "none"

    rows = [["from", "to", "phase", "bytes", "", "time", ""]]
    for key in sorted(left.keys() | right.keys()):
        old, new = left.get(key), right.get(key)
        cells: list[str] = []
        for of in (_size, _time):
            cells += [text(old, of) + " ->", text(new, of)]
        if old is None or new is None or cut_bytes(old) != cut_bytes(new) or old.time_s != new.time_s:
            rows.append([str(key[0]), str(key[1]), key[2], *cells])
    return _table(f"cuts: {len(rows) - 1} changed", rows, right=(0, 1, 3, 5))


def _shardings(a: Pipelined, b: Pipelined) -> list[Difference]:
    count, rows = shardings_diff(a, b)
    return _table(f"shardings: {count} layer{'s' if count > 1 else ''} changed", rows)


def _collectives(a: Plan, b: Plan) -> list[Difference]:
    left = {(s.kind, s.axes): s for s in sum_collectives(a.sharding.collectives)}
    right = {(s.kind, s.axes): s for s in sum_collectives(b.sharding.collectives)}
    rows = [["kind", "over", "runs", "", "bytes", "", "time", ""]]
    for key in [*left, *(k for k in right if k not in left)]:
        old, new = left.get(key), right.get(key)
        cells = [
            f"{(old.runs if old else 0)} ->", f"{(new.runs if new else 0)}",
            f"{bytes_text(old.bytes if old else 0)} ->", bytes_text(new.bytes if new else 0),
            f"{seconds_text(old.time_s if old else 0)} ->", seconds_text(new.time_s if new else 0),
        ]  # fmt: skip
        if old is None or new is None or (old.runs, old.bytes, old.time_s) != (new.runs, new.bytes, new.time_s):
            rows.append([key[0], ",".join(key[1]), *cells])
    return _table("collectives", rows, right=(2, 4, 6))


def _recomputed(a: Plan, b: Plan) -> list[Difference]:
    left, right = (Counter(r.what for r in plan.sharding.recompute) for plan in (a, b))
    rows = [
        (what, f"{left[what]} -> {right[what]}")
        for what in sorted(left.keys() | right.keys())
        if left[what] != right[what]
    ]
    return [Difference(heading="recomputed", rows=tuple(rows))] if rows else []


def _replicated(a: Plan, b: Plan) -> list[Difference]:
    def count(plan: Plan) -> dict[tuple[str, str], int]:
        out: dict[tuple[str, str], int] = {}
        for row in plan.sharding.replicated:
            key = (row.primitive, row.why)
            out[key] = out.get(key, 0) + row.count
        return out

    left, right = count(a), count(b)
    rows = [
        (primitive, f"{left.get((primitive, why), 0)} -> {right.get((primitive, why), 0)}", why)
        for primitive, why in sorted(left.keys() | right.keys())
        if left.get((primitive, why)) != right.get((primitive, why))
    ]
    return [Difference(heading="replicated for lack of a rule", rows=tuple(rows))] if rows else []


def _predictions(a: Plan, b: Plan) -> list[Difference]:
    p, q = a.predictions, b.predictions
    measures: tuple[Measure, ...] = (
        ("step time", p.step_s, q.step_s, seconds_text),
        ("bubble", _bubble(a), _bubble(b), lambda part: percent_text(part, 1)),
        ("compute", p.compute_s, q.compute_s, seconds_text),
        ("communication", p.communication_s, q.communication_s, seconds_text),
        ("peak memory", p.peak_memory_bytes, q.peak_memory_bytes, bytes_text),
        ("arguments", p.argument_bytes, q.argument_bytes, bytes_text),
    )
    rows = [
        (name, f"{'?' if old is None else text(old)} -> {'?' if new is None else text(new)}",
         f"{100 * (new - old) / old:+.3g} %" if old and new is not None else "")
        for name, old, new, text in measures
        if old != new
    ]  # fmt: skip
    return [Difference(heading="predicted", rows=tuple(rows))] if rows else []


def _bubble(plan: Plan) -> float | None:
    return plan.predictions.bubble if isinstance(plan.body, Pipelined) else None
