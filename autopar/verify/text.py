"""A `Verification` as text: tables of what was planned and what was compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.ir.text import bytes_text, rate_text, seconds_text, table

if TYPE_CHECKING:
    from autopar.verify.verdict import CollectiveFigure, Figure, Verification


def verification_text(found: Verification) -> str:
    """All of it: first whether it agrees."""
    bad = sum(not each.agrees for each in (*found.collectives, *found.figures))
    verdict = "agrees" if not bad else f"{bad} figure{'s' if bad > 1 else ''} past the tolerance"
    t = found.tolerances
    lines = [
        f"{found.name} for {found.cluster}, compiled by {found.compiler}: {verdict}",
        f"  collectives equal in bytes; memory within {t.memory:.0%}, at most {t.memory_under:.0%} under; time within "
        f"{t.time:.0%}; FLOPs (of products, once compiled) at most {t.flops_under:.0%} under",
        "",
    ]
    if found.collectives:
        rows = [["collective", "axes", "group", "planned", "bytes", "compiled", "bytes", ""]]
        lines += ["collectives", *table([*rows, *map(_collective, found.collectives)], right=(2, 3, 4, 5, 6)), ""]
    rows = [["figure", "planned", "compiled", "difference", ""], *map(_figure, found.figures)]
    lines += ["figures", *table(rows, right=(1, 2, 3))]
    if len(found.programs) > 1:
        lines += ["", *_programs(found)]
    if found.notes:
        lines += ["", "notes", *(f"  {note}" for note in found.notes)]
    return "\n".join(lines)


def _collective(row: CollectiveFigure) -> list[str]:
    return [
        row.kind, ", ".join(row.axes), str(row.group), str(row.planned_runs), bytes_text(row.planned_bytes),
        str(row.compiled_runs), bytes_text(row.compiled_bytes), "" if row.agrees else "differs",
    ]  # fmt: skip


def _value(number: float | None, unit: str) -> str:
    if number is None:
        return ""
    if unit == "s":
        return seconds_text(number)
    return bytes_text(number) if unit == "bytes" else rate_text(number, "")


def _figure(row: Figure) -> list[str]:
    off = row.relative
    difference = "" if off is None else f"{off:+.1%}"
    planned, compiled = _value(row.planned, row.unit), _value(row.compiled, row.unit)
    return [row.name, planned, compiled, difference, "" if row.agrees else "past the tolerance"]


def _programs(found: Verification) -> list[str]:
    rows = [["stage", "task", "runs", "FLOPs", "traffic", "time", "arguments", "more"]]
    for p in found.programs:
        rows.append([
            str(p.stage), p.task, str(p.runs), rate_text(p.estimate.flops, ""), bytes_text(p.estimate.memory_bytes),
            seconds_text(p.estimate.seconds), bytes_text(p.memory.argument_bytes), bytes_text(p.memory.more_bytes),
        ])  # fmt: skip
    return ["programs", *table(rows, right=(0, 2, 3, 4, 5, 6, 7))]
