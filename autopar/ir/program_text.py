"""The text form of how one program is sharded: its operators and collectives, what is recomputed, replicated, assumed.

In: an `ir.plan.OneProgram`. Out: sections of lines for `ir.plan_text`, plain JSON values (`program_facts`).
"""

from __future__ import annotations

import math

from autopar.ir.layer_text import specs_text, split_text
from autopar.ir.plan import Predictions
from autopar.ir.pretty import clip, runs_of, sum_collectives
from autopar.ir.serde import JsonData, encode
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.text import bytes_text, percent_text, seconds_text, si_text, table


def program_operators(sharding: ShardingPlan, predictions: Predictions, limit: int | None) -> list[str]:
    """Lines on operators, the dearest first, and on those that are recomputed, replicated or assumed about; at most
    ``limit`` rows a table (None: all)."""
    return [
        *_operators(sharding, predictions.step_s, limit), *_recomputed(sharding, predictions.step_s, limit),
        *_replicated(sharding, predictions.flops, limit), *_assumptions(sharding, limit),
    ]  # fmt: skip


def program_facts(sharding: ShardingPlan) -> dict[str, JsonData]:
    """The same as plain values."""
    mesh, report = sharding.mesh, sharding.report
    return {
        "mesh": {
            "shape": list(mesh.shape),
            "axes": [{"name": a.name, "size": a.size, **encode(a.link)} for a in mesh.axes],
        },
        "collectives": [encode(c) for c in sharding.collectives],
        "recompute": [encode(r) for r in sharding.recompute],
        "replicated": [encode(r) for r in sharding.replicated],
        "assumptions": [encode(a) for a in sharding.assumptions],
        "solver": {**encode(report), "gap": report.gap},
    }


def _operators(sharding: ShardingPlan, step_s: float, limit: int | None) -> list[str]:
    rows = [["phase", "count", "operator", "time", "of the step", "split", "shardings", "source"]]
    for row in sorted(sharding.operators, key=lambda row: -row.time_s):
        strategy = sharding.strategies[row.strategy]
        rows.append([
            row.phase, str(row.count), row.primitive, seconds_text(row.time_s), percent_text(row.time_s, step_s),
            split_text(strategy), specs_text(strategy), row.source,
        ])  # fmt: skip
    shown, more = clip(rows, limit, "operators")
    count = sum(row.count for row in sharding.operators)
    return [f"operators: {count}", *table(shown, right=(1, 3, 4)), *more, ""] if count else []


def program_collectives(sharding: ShardingPlan, limit: int | None) -> list[str]:
    """Lines on collectives, summed up, and the dearest (None: each)."""
    sums = sum_collectives(sharding.collectives)
    if not sums:
        return ["collectives: none", ""]
    rows = [["kind", "over", "dtype", "ops", "runs", "bytes", "time"]]
    for s in sums:
        about = "~" if s.assumed else ""
        rows.append(
            [
                s.kind,
                ",".join(s.axes),
                ",".join(s.dtypes),
                str(s.ops),
                f"{about}{s.runs}",
                about + bytes_text(s.bytes),
                about + seconds_text(s.time_s),
            ]
        )
    total = bytes_text(sum(s.bytes for s in sums))
    spent = seconds_text(math.fsum(s.time_s for s in sums))
    beside = ", some of it beside compute" if any(c.beside for c in sharding.collectives) else ""
    moves = f"a step moves {total} per device in {spent}"
    lines = [f"collectives: {sum(s.ops for s in sums)} in the program; {moves}{beside}"]
    lines += table(rows, right=(3, 4, 5, 6))
    if any(s.assumed for s in sums):
        lines.append("  ~ : some run in a loop of unknown length, counted with the trips assumed below")
    dearest = sorted(sharding.collectives, key=lambda c: (-c.time_s, c.where, c.kind))
    shown = dearest if limit is None else dearest[: min(5, limit)]
    lines.append("  dearest:" if len(shown) < len(dearest) else "  each:")
    each = [
        [seconds_text(c.time_s), c.kind, ",".join(c.axes),
         f"{'~' if c.trips_assumed else ''}{runs_of(c)} x {bytes_text(c.operand_bytes)}", c.where]
        for c in shown
    ]  # fmt: skip
    return [*lines, *table(each, right=(0,), indent="    "), ""]


def _replicated(sharding: ShardingPlan, flops: float | None, limit: int | None) -> list[str]:
    rows = sharding.replicated
    if not rows:
        return ["replicated for lack of a rule: none", ""]
    mine = math.fsum(r.flops for r in rows)
    lines = [
        f"replicated for lack of a rule: {sum(r.count for r in rows)} operators, "
        f"{percent_text(mine, flops or 0.0)} of the FLOPs"
    ]
    cells = [["operator", "count", "FLOPs", "bytes", "where", "why"]]
    cells += [
        [r.primitive, str(r.count), si_text(r.flops).strip(), bytes_text(r.bytes), r.source, r.why]
        for r in sorted(rows, key=lambda r: (-r.flops, -r.bytes, r.primitive, r.source))
    ]
    shown, more = clip(cells, limit, "operators")
    return [*lines, *table(shown, right=(1, 2, 3)), *more, ""]


def _recomputed(sharding: ShardingPlan, step_s: float, limit: int | None) -> list[str]:
    rows = sharding.recompute
    if not rows:
        return []
    sums: dict[str, list[float]] = {}
    for r in rows:
        row = sums.setdefault(r.what, [0, 0.0, 0.0])
        row[0] += 1
        row[1] += r.saved_bytes
        row[2] += r.cost_s
    saved, spent = math.fsum(r.saved_bytes for r in rows), math.fsum(r.cost_s for r in rows)
    lines = [
        f"recomputed: {len(rows)} value{'s' if len(rows) > 1 else ''}; {bytes_text(saved)} per device not held "
        f"meanwhile, for {seconds_text(spent)} ({percent_text(spent, step_s)} of the step)"
    ]
    cells = [["operator", "count", "not held", "time"]]
    dearest = sorted(sums.items(), key=lambda item: (-item[1][1], -item[1][2], item[0]))
    cells += [[what, str(int(n)), bytes_text(size), seconds_text(time)] for what, (n, size, time) in dearest]
    shown, more = clip(cells, limit, "operators")
    return [*lines, *table(shown, right=(1, 2, 3)), *more, ""]


def _assumptions(sharding: ShardingPlan, limit: int | None) -> list[str]:
    rows = sharding.assumptions
    if not rows:
        return []
    cells = [["operator", "count", "assumed", "where", "why"]]
    cells += [[r.primitive, str(r.count), r.assumed, r.source, r.why] for r in rows]
    shown, more = clip(cells, limit, "operators")
    return ["assumed, for the step does not say it", *table(shown, right=(1,)), *more, ""]


def solver_text(sharding: ShardingPlan) -> list[str]:
    """A line on how the plan was found, and how far from the best it may be."""
    report = sharding.report
    status = report.status.replace("_", " ")
    text = (
        f"{report.solver}, {status}: no plan under {seconds_text(report.bound_s)}, "
        f"gap {round(100 * report.gap, 6):.3g} %"
    )
    if report.problem_gap < report.gap:
        text += f" (of its problem {round(100 * report.problem_gap, 6):.3g} %)"
    return [f"solved by {text}, took {seconds_text(report.seconds)}", ""]
