"""The text form of plans, section by section: what `autopar inspect` shows beyond `glance`.

In: a `Plan`. Out: plain text in sections (a heading in column 0, its rows indented), for terminals of 100 columns and
for pipes alike; or the same facts as plain JSON values (`plan_facts`).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from autopar.ir.asked_text import config_text
from autopar.ir.error_bands import error_band
from autopar.ir.errors import OptionError
from autopar.ir.held_where import Held, held_where, most_bytes
from autopar.ir.in_words import in_words
from autopar.ir.layer_text import collectives_text, indices_text, operators_text
from autopar.ir.pipeline_text import cut_bytes, pipeline_facts, schedule_text, stages_text
from autopar.ir.pipelined import Pipelined
from autopar.ir.plan import ArgPlan, OneProgram, Plan
from autopar.ir.presets import GPU_REPORTED, JAX_FRACTION
from autopar.ir.pretty import clip, cluster_text, facts, fold_paths, mesh_text
from autopar.ir.program_text import program_collectives, program_facts, program_operators, solver_text
from autopar.ir.serde import JsonData, digest, encode
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.spending import spending
from autopar.ir.text import bytes_text, percent_text, seconds_text, si_text, table

LIMIT = 40
"""Rows of a table, unless all are asked for."""

LEAST_SHARE = 1e-3
"""A part of the step that is told."""

DEAREST = 3
"""Operators that are named as the dearest."""

Section: TypeAlias = Callable[[Plan, int | None], list[str]]


def plan_text(plan: Plan, *, limit: int | None = LIMIT) -> str:
    """The whole plan for a reader; at most ``limit`` rows a table (None: all)."""
    lines = [*_head(plan), *_predicted(plan), *_spent(plan)]
    for section in SECTIONS.values():
        lines += section(plan, limit)
    return "\n".join(lines).rstrip() + "\n"


def section_text(plan: Plan, name: str, *, limit: int | None = LIMIT, pattern: str = "") -> str:
    """One of SECTIONS. ``pattern``: of ``args`` only those whose paths have it, * for any text. Raises OptionError
    where none has."""
    lines = _args(plan, limit, pattern) if name == "args" else SECTIONS[name](plan, limit)
    return "\n".join(lines).rstrip() + "\n"


def plan_facts(plan: Plan) -> dict[str, JsonData]:
    """What `plan_text` shows, unfolded and unformatted, as values for json.dumps; SI units in the names."""
    p, made = plan.predictions, plan.provenance
    match plan.body:
        case OneProgram(sharding=sharding):
            body = program_facts(sharding)
        case Pipelined():
            body = pipeline_facts(plan)

    def argument(a: ArgPlan, held: tuple[Held, ...]) -> dict[str, JsonData]:
        return {
            "path": a.path,
            "shape": list(a.type.shape),
            "dtype": a.type.dtype,
            "role": a.role,
            "places": [
                {
                    "stage": one.place.stage,
                    "rows": [one.place.start, one.place.stop] if one.place.stop else None,
                    "dims": [list(axes) for axes in one.place.spec.dims],
                    "unreduced": list(one.place.spec.unreduced),
                    "bytes_per_device": one.device_bytes,
                }
                for one in held
            ],
            "donated_to": a.donated_to if a.donated_to >= 0 else None,
            "becomes": a.becomes if a.becomes >= 0 else None,
        }

    return {
        "name": plan.name,
        "in_words": in_words(plan),
        "digest": digest(plan),
        "schema_version": plan.schema_version,
        "spending": encode(spending(plan)),
        "cluster": {"name": plan.cluster.name, "devices": plan.cluster.num_devices},
        "config": encode(plan.config),
        "predictions": {
            **encode(p),
            "bubble": p.bubble,
            "workers": [{**encode(w), "bubble": p.bubble_of(i)} for i, w in enumerate(p.workers)],
            "error_bands": {
                name: encode(band)
                for name in dict.fromkeys(mesh.device.name for mesh in plan.meshes)
                if (band := error_band(name)) is not None
            },
        },
        "arguments": [argument(a, held_where(plan, i)) for i, a in enumerate(plan.inputs)],
        "results": [argument(a, held_where(plan, i, result=True)) for i, a in enumerate(plan.outputs)],
        **body,
        "considered": [encode(c) for c in made.considered],
        "planning_s": math.fsum(s for _, s in made.seconds),
        "planning_phases_s": dict(made.seconds),
        "ended": None if made.ended is None else {**encode(made.ended), "gap": made.ended.gap(p.step_s)},
        "notes": list(made.notes),
        "autopar_version": made.autopar_version,
        "jax_version": made.jax_version,
    }


def explain_text(plan: Plan) -> str:
    """What a plan was chosen from, where the devices' time goes, what bounds its memory and its transfers."""
    return section_text(plan, "why", limit=None)


def _bounds(plan: Plan) -> list[str]:
    rows = _program_rows(plan, plan.body.sharding) if isinstance(plan.body, OneProgram) else _stage_rows(plan)
    workers = plan.predictions.workers
    tight = max(range(len(workers)), key=lambda w: workers[w].peak_bytes / workers[w].limit_bytes)
    spare = workers[tight].limit_bytes - workers[tight].peak_bytes
    whose = "" if isinstance(plan.body, OneProgram) else f"worker {tight} has the least to spare: "
    rows.append(["memory", f"{whose}{bytes_text(spare)} a device{'' if whose else ' to spare'}"])
    return ["where time and memory go", *table(rows), ""]


def _program_rows(plan: Plan, sharding: ShardingPlan) -> list[list[str]]:
    p = plan.predictions
    part = percent_text(p.communication_s / p.step_s, 1) if p.step_s else "none"
    every_s = math.fsum(c.time_s for c in sharding.collectives)
    hidden = f", of {seconds_text(every_s)} in all" if every_s > (1 + LEAST_SHARE) * p.communication_s else ""
    rows = [
        ["collectives", f"{part} of the step: {seconds_text(p.communication_s)}{' that show' * bool(hidden)}{hidden}"]
    ]
    if sharding.collectives:
        worst = max(sharding.collectives, key=lambda c: c.time_s)
        what = f"{worst.kind} over {', '.join(worst.axes)} for {worst.where}"
        rows.append(["dearest", f"{what}: {seconds_text(worst.time_s)}"])
    return rows


def _stage_rows(plan: Plan) -> list[list[str]]:
    p, m = plan.predictions, plan.pipelined.plan.schedule.num_microbatches
    times = [s.cost.forward_s + s.cost.backward_s for s in plan.pipelined.plan.stages]
    slowest = max(range(len(times)), key=times.__getitem__)
    mean = math.fsum(times) / len(times)
    slow, average, saved = map(seconds_text, (times[slowest], mean, (m - 1) * (times[slowest] - mean)))
    rows = [
        ["bubble", f"{percent_text(p.bubble, 1)} of the devices' time: {seconds_text(p.bubble * p.step_s)} a step"],
        ["slowest", f"stage {slowest} takes {slow} a microbatch, {average} on average; equal ones would save {saved}"],
    ]
    cuts = [cut for cut in plan.pipelined.plan.cuts if cut.time_s]
    if cuts:
        worst = max(cuts, key=lambda cut: cut.time_s)
        text = f"stage {worst.source} to {worst.target}, {worst.phase}: {bytes_text(cut_bytes(worst))} in "
        bound = seconds_text(worst.bound_s)
        rows.append(["crossing", f"{text}{seconds_text(worst.time_s)}, at least {bound} by any resharding"])
    return rows


# Sections ---------------------------------------------------------------------------------------------


def _head(plan: Plan) -> list[str]:
    made = plan.provenance
    rows = [
        ("digest", digest(plan)[:16] + f" (autopar {made.autopar_version}, jax {made.jax_version})"),
        ("cluster", cluster_text(plan.cluster)),
        ("asked for", config_text(plan.config)),
        ("runs as", how_text(plan)),
    ]
    unused = plan.cluster.num_devices - sum(w.num_devices for w in plan.predictions.workers)
    if unused:
        rows.append(("unused", f"{unused} of {plan.cluster.num_devices} devices"))
    return [f"plan of {plan.name}: {in_words(plan)}", *facts(rows), ""]


def ended_text(plan: Plan) -> str:
    """Why planning ended before it was done, and how far the plan may be from the best; "" where it was done."""
    if (cut := plan.provenance.ended) is None:
        return ""
    return (
        f"not searched to the end: {cut.why}; {cut.what} takes at least {seconds_text(cut.bound_s)}, "
        f"{percent_text(cut.gap(plan.predictions.step_s), 1)} less than this plan"
    )


def how_text(plan: Plan) -> str:
    """One line: one program and its mesh, or stages, layers and schedule."""
    match plan.body:
        case OneProgram(sharding=sharding):
            return f"one program on mesh {mesh_text(sharding.mesh)}"
        case Pipelined(plan=pipeline, layers=layers):
            stages, meshes, schedule = len(pipeline.stages), len(pipeline.schedule.tasks), pipeline.schedule
            kinds = len({layer.kind for layer in layers})
            on = f" on {meshes} meshes" if meshes != stages else ""
            return (
                f"{stages} stage{'s' if stages > 1 else ''}{on}, {schedule.name}, {schedule.num_microbatches} "
                f"microbatch{'es' if schedule.num_microbatches > 1 else ''}; {len(layers)} layers of {kinds} "
                f"kind{'s' if kinds > 1 else ''}"
            )


def _predicted(plan: Plan) -> list[str]:
    one = isinstance(plan.body, OneProgram)
    heading = "predicted, per device and step" if one else "predicted, by simulation"
    return [heading, *facts(predicted_facts(plan)), ""]


def predicted_facts(plan: Plan) -> list[tuple[str, str]]:
    """(name, text) of what a step takes: time, what that means to people, memory, and how far it may be off."""
    p = plan.predictions
    tight = max(p.workers, key=lambda w: w.peak_bytes / w.limit_bytes)
    memory = f"{bytes_text(tight.peak_bytes)} of {bytes_text(tight.limit_bytes)} "
    memory += f"({percent_text(tight.peak_bytes, tight.limit_bytes)})"
    if isinstance(plan.body, OneProgram):
        spent = f"compute {seconds_text(p.compute_s)}, communication {seconds_text(p.communication_s)}"
        if p.hidden_s is not None and p.hidden_s > LEAST_SHARE * p.step_s:
            spent += f", and {seconds_text(p.hidden_s)} of it beside compute"
        rows = [("step time", f"{seconds_text(p.step_s)} ({spent})")]
    else:
        busy = f"a worker runs for {seconds_text(p.compute_s)}, a link for {seconds_text(p.communication_s)}"
        bubble = f"; bubble {percent_text(p.bubble, 1)} of the devices' time"
        rows = [("step time", seconds_text(p.step_s) + bubble), ("busiest", busy)]
        memory += f" a device, on worker {p.workers.index(tight)}"
    if said := rates_text(plan):
        rows.append(("that is", said))
    for name in dict.fromkeys(mesh.device.name for mesh in plan.meshes):
        if (band := error_band(name)) is not None:
            text = f"{band.low:.2f} to {band.high:.2f} times what is predicted of them on {name}"
            rows.append(("steps took", f"{text} (10th to 90th percentile of {band.runs} runs)"))
    rows.append(("peak memory", memory))
    if (fraction := _fraction(plan)) > JAX_FRACTION:
        rows.append(("  JAX needs", f"XLA_PYTHON_CLIENT_MEM_FRACTION={fraction:.2f} ({JAX_FRACTION} by default)"))
    if p.flops is not None:
        rows.append(("FLOPs", f"{si_text(p.flops)}FLOP a device"))
    return rows


def rates_text(plan: Plan) -> str:
    """What a step means to people."""
    found = spending(plan)
    rates = [(found.tokens_per_s, "tokens"), (found.examples_per_s, "examples")]
    said = [f"{si_text(rate)}{what} a second" for rate, what in rates if rate is not None][:1]
    if found.utilisation is not None:
        said.append(f"{percent_text(found.utilisation, 1)} of the peak FLOP/s for the model's FLOPs")
    return ", ".join(said)


def _fraction(plan: Plan) -> float:
    """Of what a GPU's driver reports, what a plan's fullest device needs, in hundredths rounded up; 0 of others."""
    meshes = plan.body.worker_meshes() if isinstance(plan.body, Pipelined) else plan.meshes
    parts = [
        worker.peak_bytes / (GPU_REPORTED * mesh.device.memory_bytes)
        for worker, mesh in zip(plan.predictions.workers, meshes, strict=True)
        if mesh.device.platform == "gpu" and mesh.device.reserved_bytes
    ]
    return math.ceil(100 * max(parts, default=0.0)) / 100


def _spent(plan: Plan) -> list[str]:
    """Where a step's seconds go."""
    found, step_s = spending(plan), plan.predictions.step_s
    rows = [["", "time", "of the step", "beside compute"]]
    for spent in found.rows:
        beside = seconds_text(spent.beside) if spent.beside else ""
        rows.append([spent.what, seconds_text(spent.seconds), percent_text(spent.seconds, step_s), beside])
    where = " (the busiest worker)" if isinstance(plan.body, Pipelined) else ""
    lines = [f"where the time goes{where}", *table(rows, right=(1, 2, 3)), ""] if found.rows else []
    dearest = [f"{name} {seconds_text(seconds)}" for name, seconds in found.dearest[:DEAREST]]
    return [*lines, *(["dearest: " + "; ".join(dearest), ""] if dearest else [])]


def _args(plan: Plan, limit: int | None, pattern: str = "") -> list[str]:
    """The batch first. Raises OptionError where nothing has ``pattern`` in its path."""
    found = re.compile(".*".join(map(re.escape, pattern.split("*"))))
    inputs = [i for i, a in enumerate(plan.inputs) if found.search(a.path)]
    outputs = [i for i, a in enumerate(plan.outputs) if found.search(a.path)]
    if pattern and not inputs and not outputs:
        every = [fold.path for fold in fold_paths([(a.path, None) for a in (*plan.inputs, *plan.outputs)])]
        near = difflib.get_close_matches(pattern, every, n=3, cutoff=0.3) or every[:3]
        raise OptionError(f"no argument or result has {pattern!r} in its path; near to that: {', '.join(near)}")
    inputs.sort(key=lambda i: plan.inputs[i].role != "batch")
    lines = _arguments("arguments", [held_where(plan, i) for i in inputs], plan, limit) if inputs or not pattern else []
    if outputs or not pattern:
        lines += _arguments("results", [held_where(plan, i, result=True) for i in outputs], plan, limit)
    return lines


def _arguments(heading: str, arguments: Sequence[tuple[Held, ...]], plan: Plan, limit: int | None) -> list[str]:
    """A table of paths, how many, type, sharding, bytes of all of them on a device, what becomes of each (state,
    donated); of a pipeline the stages that hold it, and bytes on a device of the one that has most of them. Those that
    differ in an index only are one row."""
    held = [one for each in arguments for one in each]
    several = len(plan.meshes) > 1
    rows = [["path", "count", "type", *(["stages"] if several else []), "sharding", "per device", ""]]
    keys = [
        (one.argument.path + one.place.rows, (one.type, one.place.spec, _fate(one.argument), one.device_bytes))
        for one in held
    ]
    for fold in fold_paths(keys):
        mine = [held[r] for r in fold.rows]
        value_type, spec, fate, _ = keys[fold.rows[0]][1]
        stages = [indices_text(sorted({one.place.stage for one in mine}))] if several else []
        size = bytes_text(most_bytes(mine))
        rows.append([fold.path, str(len(mine)), str(value_type), *stages, str(spec), size, fate])
    total = "" if several else f", {bytes_text(sum(one.device_bytes for one in held))} per device"
    shown, more = clip(rows, limit, "rows")
    shown = shown if held else []
    return [f"{heading}: {len(arguments)} arrays{total}", *table(shown, right=(1, 5 if several else 4)), *more, ""]


def _fate(argument: ArgPlan) -> str:
    """``donated``: its new value takes its buffer; ``state``: it has one, of its own."""
    return "donated" if argument.donated_to >= 0 else "state" if argument.becomes >= 0 else ""


def _operators(plan: Plan, limit: int | None) -> list[str]:
    match plan.body:
        case OneProgram(sharding=sharding):
            return program_operators(sharding, plan.predictions, limit)
        case Pipelined() as pipelined:
            return operators_text(pipelined, limit)


def _collectives(plan: Plan, limit: int | None) -> list[str]:
    match plan.body:
        case OneProgram(sharding=sharding):
            return program_collectives(sharding, limit)
        case Pipelined() as pipelined:
            return collectives_text(pipelined)


def _memory(plan: Plan, limit: int | None) -> list[str]:
    """What a device of each worker holds when it holds most; workers that hold alike once."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, worker in enumerate(plan.predictions.workers):
        alike.setdefault((worker.live, worker.peak_bytes, worker.limit_bytes), []).append(number)
    lines: list[str] = []
    for numbers in alike.values():
        worker = plan.predictions.workers[numbers[0]]
        where = f" of worker{'s' if len(numbers) > 1 else ''} {indices_text(numbers)}" if len(alike) > 1 else ""
        lines.append(
            f"memory of a device{where} at its peak: {bytes_text(worker.peak_bytes)} of "
            f"{bytes_text(worker.limit_bytes)} ({percent_text(worker.peak_bytes, worker.limit_bytes)})"
        )
        if not worker.live:
            continue
        kinds = [["kind", "bytes", "of the peak"]]
        kinds += [[kind, bytes_text(size), percent_text(size, worker.peak_bytes)] for kind, size in worker.held]
        lines += [*table(kinds, right=(1, 2)), ""]
        rows = [["", "kind", "what", "count"]]
        rows += [[bytes_text(row.bytes), row.kind, row.what, str(row.count)] for row in worker.live]
        shown, more = clip(rows, limit, "rows")
        lines += [*table(shown, right=(0, 3)), *more, ""]
    return lines if lines[-1:] == [""] else [*lines, ""]


def _stages(plan: Plan, limit: int | None) -> list[str]:
    if isinstance(plan.body, Pipelined):
        return stages_text(plan, limit)
    return ["stages: none, it is one program", ""]


def _schedule(plan: Plan, limit: int | None) -> list[str]:
    if isinstance(plan.body, Pipelined):
        return schedule_text(plan, limit)
    count = plan.config.num_microbatches
    return [f"schedule: one program, {count} microbatch{'es, one after the other' if count > 1 else ''}", ""]


def _why(plan: Plan, limit: int | None) -> list[str]:
    made, mine = plan.provenance, plan.predictions.step_s
    lines = solver_text(plan.body.sharding) if isinstance(plan.body, OneProgram) else []
    if made.considered:
        rows = [["plan", "step time", "against this", "peak memory", ""]]
        peak = bytes_text(plan.predictions.peak_memory_bytes)
        own = next((c for c in made.considered if c.step_s == mine and c.fits), None)
        if own is None:
            rows.append(["this plan", seconds_text(mine), "", peak, ""])
        for c in sorted(made.considered, key=lambda c: c.step_s):
            against = f"{100 * (c.step_s / mine - 1):+.3g} %" if mine and c.step_s != mine else ""
            held = peak if c is own else "" if c.peak_bytes is None else bytes_text(c.peak_bytes)
            said = "this plan" if c is own else "" if c.fits else "does not fit"
            rows.append([c.name, seconds_text(c.step_s), against, held, said])
        shown, more = clip(rows, limit, "plans")
        lines += ["compared under the same cost model", *table(shown, right=(1, 2, 3)), *more, ""]
    lines += [said, ""] if (said := ended_text(plan)) else []
    if made.seconds:
        phases = ", ".join(f"{name} {seconds_text(s)}" for name, s in made.seconds)
        lines += [f"planning took {seconds_text(math.fsum(s for _, s in made.seconds))} ({phases})", ""]
    lines += _bounds(plan)
    return [*lines, *(["notes", *(f"  - {note}" for note in made.notes), ""] if made.notes else [])]


SECTIONS: dict[str, Section] = {
    "args": _args,
    "operators": _operators,
    "collectives": _collectives,
    "memory": _memory,
    "stages": _stages,
    "schedule": _schedule,
    "why": _why,
}
"""Name → its lines, of at most so many rows a table (None: all)."""
