"""What differs between two plans, as text.

In: plans ``a`` and ``b``. Out: lines in sections, empty where their digests agree. Arguments are matched by
path, collectives by kind and axes; wall times are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

from autopar.ir.plan import ArgPlan, Plan
from autopar.ir.pretty import cluster_text, config_text, fold_paths, mesh_text, sum_collectives
from autopar.ir.serde import digest
from autopar.ir.text import bytes_text, seconds_text, table

Measure: TypeAlias = tuple[str, float, float, Callable[[float], str]]
"""A predicted figure: its name, the old and the new value, how one is written."""


def diff_text(a: Plan, b: Plan) -> str:
    """The differences from ``a`` to ``b``; empty for plans of equal digest."""
    if digest(a) == digest(b):
        return ""
    lines = _setting(a, b)
    lines += _arguments("arguments", a.inputs, b.inputs)
    lines += _arguments("results", a.outputs, b.outputs)
    lines += _collectives(a, b)
    lines += _recomputed(a, b)
    lines += _replicated(a, b)
    lines += _predictions(a, b)
    if not lines:
        lines = [
            "the plans look the same to a user, but not inside: operators' strategies, the places of collectives,",
            "or rates of the cluster differ",
        ]
    return "\n".join(lines).rstrip() + "\n"


def _setting(a: Plan, b: Plan) -> list[str]:
    pairs = (
        ("function", f"{a.name} ({a.fingerprint[:12]})", f"{b.name} ({b.fingerprint[:12]})"),
        ("cluster", cluster_text(a.cluster), cluster_text(b.cluster)),
        ("mesh", mesh_text(a.sharding.mesh), mesh_text(b.sharding.mesh)),
        ("asked for", config_text(a.config), config_text(b.config)),
        ("solver", f"{a.sharding.report.solver}, {a.sharding.report.status}",
         f"{b.sharding.report.solver}, {b.sharding.report.status}"),
    )  # fmt: skip
    lines: list[str] = []
    for what, left, right in pairs:
        if left != right:
            lines += [what, f"  - {left}", f"  + {right}", ""]
    return lines


def _arguments(heading: str, a: Sequence[ArgPlan], b: Sequence[ArgPlan]) -> list[str]:
    left, right = {x.path: x for x in a}, {x.path: x for x in b}
    changed: list[tuple[str, tuple[str, str]]] = []
    for path in [*left, *(p for p in right if p not in left)]:
        old, new = left.get(path), right.get(path)
        if old is None or new is None or old.type != new.type:
            pair = tuple(f"{x.type} {x.spec}" if x else "absent" for x in (old, new))
        else:
            pair = str(old.spec), str(new.spec)
        before, after = pair
        if before != after:
            changed.append((path, (before, after)))
    if not changed:
        return []
    rows = [["path", "count", "a", "b"]]
    for fold in fold_paths(changed):
        rows.append([fold.path, str(len(fold.rows)), *changed[fold.rows[0]][1]])
    return [f"{heading}: {len(changed)} changed", *table(rows, right=(1,)), ""]


def _collectives(a: Plan, b: Plan) -> list[str]:
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
    return ["collectives", *table(rows, right=(2, 4, 6)), ""] if len(rows) > 1 else []


def _recomputed(a: Plan, b: Plan) -> list[str]:
    left, right = (Counter(r.what for r in plan.sharding.recompute) for plan in (a, b))
    rows = [
        [what, f"{left[what]} -> {right[what]}"]
        for what in sorted(left.keys() | right.keys())
        if left[what] != right[what]
    ]
    return ["recomputed", *table(rows), ""] if rows else []


def _replicated(a: Plan, b: Plan) -> list[str]:
    def count(plan: Plan) -> dict[tuple[str, str], int]:
        out: dict[tuple[str, str], int] = {}
        for row in plan.sharding.replicated:
            key = (row.primitive, row.why)
            out[key] = out.get(key, 0) + row.count
        return out

    left, right = count(a), count(b)
    rows = [
        [primitive, f"{left.get((primitive, why), 0)} -> {right.get((primitive, why), 0)}", why]
        for primitive, why in sorted(left.keys() | right.keys())
        if left.get((primitive, why)) != right.get((primitive, why))
    ]
    return ["replicated for lack of a rule", *table(rows), ""] if rows else []


def _predictions(a: Plan, b: Plan) -> list[str]:
    p, q = a.predictions, b.predictions
    measures = (
        ("step time", p.step_s, q.step_s, seconds_text),
        ("compute", p.compute_s, q.compute_s, seconds_text),
        ("communication", p.communication_s, q.communication_s, seconds_text),
        ("peak memory", p.peak_memory_bytes, q.peak_memory_bytes, bytes_text),
        ("arguments", p.argument_bytes, q.argument_bytes, bytes_text),
    )
    return measured("predicted, per device and step", measures)


def measured(title: str, measures: Sequence[Measure]) -> list[str]:
    """Lines of a table of the measures that differ: old, new, change in percent. Empty where none does."""
    rows = [
        [name, f"{text(old)} -> {text(new)}", f"{100 * (new - old) / old:+.3g} %" if old else ""]
        for name, old, new, text in measures
        if old != new
    ]
    return [title, *table(rows), ""] if rows else []
