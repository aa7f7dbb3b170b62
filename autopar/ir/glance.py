"""A plan at a glance: what `print(plan)` shows, and `autopar inspect` before it is asked for more.

In: a `Plan`. Out: lines of at most `WIDTH` columns, one screen of them: what the plan is in the field's words, what a
step takes, where its time and its memory go, what lies where, and what it was chosen from. Each part has a section of
its own in `ir.plan_text`, which shows all of it.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence

from autopar.ir.held_where import Held, held_where, most_bytes
from autopar.ir.in_words import in_words
from autopar.ir.layer_text import indices_text
from autopar.ir.pipelined import Pipelined
from autopar.ir.plan import ArgPlan, Considered, OneProgram, Place, Plan
from autopar.ir.plan_text import SECTIONS, ended_text, how_text, predicted_facts
from autopar.ir.pretty import cluster_text, facts, fold_paths
from autopar.ir.serde import digest
from autopar.ir.spending import spending
from autopar.ir.text import bytes_text, percent_text, seconds_text, table

WIDTH = 100
ROWS = 7
"""Of a table, before the rest is summed up."""
BAR = 24
"""Columns of a bar that stands for the whole."""


def glance(plan: Plan) -> str:
    """One screen on a plan."""
    lines = [
        f"plan of {plan.name}: {in_words(plan)}", *_facts(_head(plan)), "",
        *_time(plan), *_memory(plan), *_stages(plan), *_held(plan), *_chosen(plan), *_notes(plan),
        f"more: {' '.join(f'--{name}' for name in SECTIONS)} --all --json",
    ]  # fmt: skip
    return "\n".join(_fitting(lines)).rstrip() + "\n"


def _fitting(lines: Iterable[str]) -> Iterable[str]:
    """Lines of text go on below, indented; rows of tables are cut."""
    for line in lines:
        if len(line) <= WIDTH:
            yield line
        elif "  " in line.strip():
            yield line[: WIDTH - 1] + "…"
        else:
            yield from textwrap.wrap(line, WIDTH, subsequent_indent=_indent(line) + "    ", break_long_words=False)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _facts(rows: Sequence[tuple[str, str]]) -> Iterable[str]:
    """(name, text) rows; long texts go on in their column."""
    for line in facts(rows):
        column = len(line) - len(line[2:].partition("  ")[2].lstrip())
        yield from textwrap.wrap(line, WIDTH, subsequent_indent=" " * column, break_long_words=False)


def _head(plan: Plan) -> list[tuple[str, str]]:
    made = plan.provenance
    return [
        ("cluster", cluster_text(plan.cluster)),
        ("runs as", how_text(plan)),
        *predicted_facts(plan),
        ("digest", digest(plan)[:16] + f" (autopar {made.autopar_version}, jax {made.jax_version})"),
    ]


def _bars(heading: str, parts: Sequence[tuple[str, float]], whole: float, text: str) -> list[str]:
    """A table of parts of a whole, with bars; ``text`` is the whole as it is written."""
    if not parts or not whole:
        return []
    unit = seconds_text if heading == "time" else bytes_text
    shown = [*parts[:ROWS]]
    if len(parts) > ROWS:
        shown[-1] = (f"{len(parts) - ROWS + 1} others", math.fsum(size for _, size in parts[ROWS - 1 :]))
    rows = [[heading, f"of {text}", "", ""]]
    rows += [
        [what, unit(size), percent_text(size, whole), "█" * round(BAR * min(1.0, size / whole))] for what, size in shown
    ]
    first, *others = table(rows, right=(1, 2))
    return [first.strip(), *others, ""]


def _time(plan: Plan) -> list[str]:
    step_s = plan.predictions.step_s
    found = sorted(((row.what, row.seconds - row.beside) for row in spending(plan).rows), key=lambda row: -row[1])
    parts = [(what, seconds) for what, seconds in found if seconds > 0]
    where = "" if isinstance(plan.body, OneProgram) else ", on the busiest worker"
    lines = _bars("time", parts, step_s, seconds_text(step_s) + where)
    dearest = "; ".join(f"{what} {seconds_text(s)}" for what, s in spending(plan).dearest[:3])
    return [*lines[:-1], f"  dearest: {dearest}", ""] if lines and dearest else lines


def _memory(plan: Plan) -> list[str]:
    tight = max(plan.predictions.workers, key=lambda w: w.peak_bytes / w.limit_bytes)
    return _bars("memory", tight.held, tight.peak_bytes, f"{bytes_text(tight.peak_bytes)} at the peak")


def _stages(plan: Plan) -> list[str]:
    """Stages of a pipeline, those that are alike in a row."""
    if not isinstance(plan.body, Pipelined):
        return []
    pipeline = plan.pipelined.plan
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, stage in enumerate(pipeline.stages):
        each = (
            str(len(stage.layers)), str(stage.mesh.num_devices), "x".join(map(str, stage.mesh.shape)),
            seconds_text(stage.cost.forward_s), seconds_text(stage.cost.backward_s),
        )  # fmt: skip
        groups.setdefault(each, []).append(number)
    rows = [["stages", "layers", "devices", "mesh", "forward", "backward", "peak"]]
    for each, numbers in groups.items():
        peaks = [plan.predictions.workers[pipeline.schedule.mesh_of_stage[s]].peak_bytes for s in numbers]
        least, most = bytes_text(min(peaks)), bytes_text(max(peaks))
        rows.append([indices_text(numbers), *each, most if least == most else f"{least} to {most}"])
    heading, *others = table(rows[: ROWS + 1], right=range(1, 7))
    more = [f"  ... {len(rows) - 1 - ROWS} more kinds of stages (--stages)"] if len(rows) > ROWS + 1 else []
    return [heading.strip(), *others, *more, ""]


def _held(plan: Plan) -> list[str]:
    """What lies where: the batch by name, all else by its role."""
    rows = [["arguments", "arrays", "bytes", "a device", ""]]
    held = [held_where(plan, i) for i in range(len(plan.inputs))]
    batch = [i for i, a in enumerate(plan.inputs) if a.role == "batch"]
    for fold in fold_paths([(plan.inputs[i].path, (plan.inputs[i].type, _how(held[i], True))) for i in batch])[:3]:
        mine = [batch[r] for r in fold.rows]
        rows.append(_row(f"batch {fold.path}", [plan.inputs[i] for i in mine], [held[i] for i in mine], True))
    for role in ("weights", "optimizer state", "other"):
        mine = [i for i, a in enumerate(plan.inputs) if a.role == role]
        if mine:
            rows.append(_row(role, [plan.inputs[i] for i in mine], [held[i] for i in mine], False))
    heading, *others = table(rows, right=(1, 2, 3))
    return [heading.strip(), *others, ""]


def _row(name: str, arguments: Sequence[ArgPlan], held: Sequence[tuple[Held, ...]], in_full: bool) -> list[str]:
    every = [one for each in held for one in each]
    size = bytes_text(sum(a.type.size_bytes for a in arguments))
    return [name, str(len(arguments)), size, bytes_text(most_bytes(every)), _how(every, in_full)]


def _how(held: Sequence[Held], in_full: bool) -> str:
    """``99.2 % split over x·y``: which axes split most bytes; ``in_full``: types and shardings."""
    if in_full:
        return " or ".join(dict.fromkeys(f"{_type(one)} {one.place.spec}" for one in held))
    total: dict[str, int] = {}
    for one in held:
        axes = _axes(one.place)
        total[axes] = total.get(axes, 0) + one.type.size_bytes
    every = sum(total.values())
    parts = sorted(total.items(), key=lambda item: (-item[1], item[0]))
    said = [f"{percent_text(size, every)} {axes}" for axes, size in parts[:2] if size]
    return ", ".join(said) + (" …" if len(parts) > 2 else "") if len(parts) > 1 else next(iter(total), "")


def _type(held: Held) -> str:
    part = held.type != held.argument.type and not held.place.rows
    return f"{held.type}{' a microbatch' if part else ''}"


def _axes(place: Place) -> str:
    axes = sorted({axis for dim in place.spec.dims for axis in dim})
    return f"split over {'·'.join(axes)}" if axes else "whole"


def _chosen(plan: Plan) -> list[str]:
    """What the plan was chosen from, the nearest first."""
    made, mine = plan.provenance, plan.predictions.step_s
    lost = sorted((c for c in made.considered if c.step_s > mine), key=lambda c: c.step_s)
    said = [f"{_short(c.name)} {100 * (c.step_s / mine - 1):+.3g} %{_fits(c)}" for c in lost[:3]]
    if not mine or not said:
        return []
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    return [f"chosen before {', '.join(said)}{more}", ""]


def _short(name: str) -> str:
    return textwrap.shorten(name, 40, placeholder=" …")


def _fits(considered: Considered) -> str:
    return "" if considered.fits else " (does not fit)"


def _notes(plan: Plan) -> list[str]:
    ended = ended_text(plan)
    notes = [*([ended] if ended else []), *plan.provenance.notes]
    if not notes:
        return []
    more = [f"  ... {len(notes) - 3} more (--why)"] if len(notes) > 3 else []
    return ["notes", *(f"  - {note}" for note in notes[:3]), *more, ""]
