"""The text form of plans: what `autopar inspect` and `print(plan)` show.

In: a `Plan`. Out: plain text in sections (a heading in column 0, its rows indented), for terminals of 100 columns and
for pipes alike; or the same facts as plain JSON values (`plan_facts`); `explain_text`: what a plan was chosen from and
what its time goes into.
"""

from __future__ import annotations

import math
from dataclasses import fields

from autopar.ir.error_bands import error_band
from autopar.ir.graph import TensorType
from autopar.ir.layer_text import indices_text
from autopar.ir.pipeline_text import cut_bytes, pipeline_facts, pipeline_text
from autopar.ir.pipelined import Pipelined, PipelineOptions
from autopar.ir.plan import ArgPlan, OneProgram, Place, Plan, PlanConfig
from autopar.ir.presets import GPU_REPORTED, JAX_FRACTION
from autopar.ir.pretty import clip, cluster_text, facts, fold_paths, mesh_text, shard_bytes
from autopar.ir.program_text import program_facts, program_text
from autopar.ir.serde import JsonData, digest, encode
from autopar.ir.sharding import Pin, ShardingSpec
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.spending import spending
from autopar.ir.text import bytes_text, percent_text, seconds_text, si_text, table

KINDS, SHOWN = 4, 0.01
"""Kinds of memory that are shown, and from which part of a peak on."""
DEAREST = 3
"""Operators that are named as the dearest."""


def plan_text(plan: Plan, *, limit: int | None = 40) -> str:
    """The whole plan for a reader; at most ``limit`` rows a table (None: all)."""
    match plan.body:
        case OneProgram(sharding=sharding):
            body = program_text(sharding, plan.predictions, limit)
        case Pipelined():
            body = pipeline_text(plan, limit)
    lines = [
        *_head(plan), *_predicted(plan), *_arguments("arguments", plan.inputs, plan, limit),
        *_arguments("results", plan.outputs, plan, limit), *body, *_why(plan, limit),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def plan_facts(plan: Plan) -> dict[str, JsonData]:
    """What `plan_text` shows, unfolded and unformatted, as values for json.dumps; SI units in the names."""
    p, made = plan.predictions, plan.provenance
    match plan.body:
        case OneProgram(sharding=sharding):
            body = program_facts(sharding)
        case Pipelined():
            body = pipeline_facts(plan)

    def argument(a: ArgPlan) -> dict[str, JsonData]:
        return {
            "path": a.path,
            "shape": list(a.type.shape),
            "dtype": a.type.dtype,
            "places": [
                {
                    "stage": place.stage,
                    "rows": [place.start, place.stop] if place.stop else None,
                    "dims": [list(axes) for axes in place.spec.dims],
                    "unreduced": list(place.spec.unreduced),
                    "bytes_per_device": _held_bytes(a, place, plan),
                }
                for place in a.places
            ],
            "donated_to": a.donated_to if a.donated_to >= 0 else None,
            "becomes": a.becomes if a.becomes >= 0 else None,
        }

    return {
        "name": plan.name,
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
        "arguments": [argument(a) for a in plan.inputs],
        "results": [argument(a) for a in plan.outputs],
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
    rows = _program_rows(plan, plan.body.sharding) if isinstance(plan.body, OneProgram) else _stage_rows(plan)
    workers = plan.predictions.workers
    tight = max(range(len(workers)), key=lambda w: workers[w].peak_bytes / workers[w].limit_bytes)
    spare = workers[tight].limit_bytes - workers[tight].peak_bytes
    rows.append(["memory", f"worker {tight} has the least to spare: {bytes_text(spare)} a device"])
    lines = [*_why(plan, None), "where time and memory go", *table(rows)]
    return "\n".join(lines).rstrip() + "\n"


def _program_rows(plan: Plan, sharding: ShardingPlan) -> list[list[str]]:
    p = plan.predictions
    part = percent_text(p.communication_s / p.step_s, 1) if p.step_s else "none"
    rows = [["collectives", f"{part} of the step: {seconds_text(p.communication_s)}"]]
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


# What was asked for -------------------------------------------------------------------------------------


def pin_text(pin: Pin) -> str:
    """``[x,?]``: as a sharding, with ? for a dimension that is left to the planner."""
    return str(ShardingSpec(dims=tuple(("?",) if axes is None else axes for axes in pin.dims)))


def config_text(config: PlanConfig) -> str:
    """What was asked for, in one line, defaults left out."""
    default = PlanConfig()
    parts = [f"method {config.method}"] if config.stages is None or config.method != default.method else []
    for field in fields(PlanConfig):
        value = getattr(config, field.name)
        if field.name == "method" or value == getattr(default, field.name):
            continue
        match field.name:
            case "mesh_shape":
                parts.append("mesh " + _shape(value))
            case "memory_bytes":
                parts.append(f"memory {bytes_text(value)}")
            case "num_microbatches":
                parts.append(f"{value} microbatches")
            case "forbid":
                parts.append("forbid " + ", ".join(value))
            case "pins":
                parts += [f"pin {pin.target} {pin_text(pin)}" for pin in config.pins]
            case "mesh_axes":
                parts.append(f"meshes of up to {value} axes")
            case "axis_names":
                parts.append("axes " + ", ".join(value))
            case "time_limit_s":
                parts.append(f"time limit {seconds_text(value)}")
            case "layers":
                parts.append("layers by name" if value == "names" else f"{value} layers")
            case "degrees":
                parts.append(str(value))
            case "stages":
                parts += _stage_options(value)
            case _:
                parts.append(f"{field.name} {value}")
    return "; ".join(parts)


def _stage_options(options: PipelineOptions) -> list[str]:
    parts = ["in stages"]
    if options.schedules is not None:
        parts.append("schedules " + ", ".join(options.schedules))
    if options.stages is not None:
        least, most = options.stages
        parts.append(
            f"{least} stage{'s' if least > 1 else ''}" if least == most else f"{least} to {most or 'any'} stages"
        )
    if options.virtual_stages is not None:
        parts.append(f"{options.virtual_stages} stage{'s' if options.virtual_stages > 1 else ''} on a mesh")
    if options.starts is not None:
        parts.append("stages from layers " + ", ".join(map(str, options.starts)))
    if options.submeshes is not None:
        parts.append("submeshes " + ", ".join(map(_shape, options.submeshes)))
    if options.logical_shapes is not None:
        parts.append("mesh shapes " + ", ".join(map(_shape, options.logical_shapes)))
    if options.mesh_axes != PipelineOptions().mesh_axes:
        parts.append(f"meshes of up to {options.mesh_axes} axes")
    if options.batch_axes is not None:
        parts.append("batch " + ", ".join(map(_bound, options.batch_axes)))
    if options.whole_examples:
        parts.append("whole examples")
    if options.uniform:
        parts.append("uniform stages")
    if options.resharding != "auto":
        parts.append(f"resharding {options.resharding}")
    if options.remat != PipelineOptions().remat:
        parts.append("remat " + ", ".join(options.remat))
    return parts


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _bound(axes: tuple[int, ...] | None) -> str:
    """What the batch is bound to, as `autopar plan --batch-axis` takes it."""
    return "free" if axes is None else "+".join(map(str, axes)) or "whole"


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
    return [f"plan of {plan.name}", *facts(rows), ""]


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
    p = plan.predictions
    tight = max(p.workers, key=lambda w: w.peak_bytes / w.limit_bytes)
    memory = f"{bytes_text(tight.peak_bytes)} of {bytes_text(tight.limit_bytes)} "
    memory += f"({percent_text(tight.peak_bytes, tight.limit_bytes)})"
    match plan.body:
        case OneProgram():
            spent = f" (compute {seconds_text(p.compute_s)}, communication {seconds_text(p.communication_s)})"
            rows = [("step time", seconds_text(p.step_s) + spent), ("peak memory", memory)]
            heading = "predicted, per device and step"
        case Pipelined():
            busy = f"a worker runs for {seconds_text(p.compute_s)}, a link for {seconds_text(p.communication_s)}"
            bubble = f"; bubble {percent_text(p.bubble, 1)} of the devices' time"
            where = f" a device, on worker {p.workers.index(tight)}"
            rows = [("step time", seconds_text(p.step_s) + bubble), ("busiest", busy), ("peak memory", memory + where)]
            heading = "predicted, by simulation"
    if p.argument_bytes is not None:
        rows[-1] = (rows[-1][0], f"{rows[-1][1]}; arguments {bytes_text(p.argument_bytes)}")
    held = [f"{kind} {bytes_text(size)}" for kind, size in tight.held[:KINDS] if size >= SHOWN * tight.peak_bytes]
    if held:
        rows.append(("  of these", ", ".join(held)))
    if (fraction := _fraction(plan)) > JAX_FRACTION:
        rows.append(("  JAX needs", f"XLA_PYTHON_CLIENT_MEM_FRACTION={fraction:.2f} ({JAX_FRACTION} by default)"))
    if p.flops is not None:
        rows.append(("FLOPs", f"{si_text(p.flops)}FLOP"))
    for name in dict.fromkeys(mesh.device.name for mesh in plan.meshes):
        if (band := error_band(name)) is not None:
            rows.append(
                (
                    "steps took",
                    f"{band.low:.2f} to {band.high:.2f} times that on {name} "
                    f"(10th to 90th percentile of {band.runs} runs)",
                )
            )
    return [heading, *facts(rows), "", *_spent(plan)]


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
    """What a step means to people, and where its seconds go."""
    found, step_s = spending(plan), plan.predictions.step_s
    rates = [(found.tokens_per_s, "tokens"), (found.examples_per_s, "examples")]
    said = [f"{si_text(rate)}{what} a second" for rate, what in rates if rate is not None][:1]
    if found.utilisation is not None:
        said.append(f"{percent_text(found.utilisation, 1)} of the peak FLOP/s for the model's FLOPs")
    rows = [["", "time", "of the step", "beside compute"]]
    for spent in found.rows:
        beside = seconds_text(spent.beside) if spent.beside else ""
        rows.append([spent.what, seconds_text(spent.seconds), percent_text(spent.seconds, step_s), beside])
    where = " (the busiest worker)" if isinstance(plan.body, Pipelined) else ""
    lines = [f"  {', '.join(said)}"] if said else []
    lines += [f"where the time goes{where}", *table(rows, right=(1, 2, 3)), ""] if found.rows else [""]
    dearest = [f"{name} {seconds_text(seconds)}" for name, seconds in found.dearest[:DEAREST]]
    return [*lines, *(["dearest: " + "; ".join(dearest), ""] if dearest else [])]


def _held_bytes(argument: ArgPlan, place: Place, plan: Plan) -> int:
    return shard_bytes(place.type_of(argument.type), place.spec, plan.meshes[place.stage])


def _arguments(heading: str, arguments: tuple[ArgPlan, ...], plan: Plan, limit: int | None) -> list[str]:
    """A table of paths, how many, type, sharding, bytes a device, what becomes of each (state, donated); of a pipeline
    the stages that hold it. Those that differ in an index only are one row."""
    held = [(a, place) for a in arguments for place in a.places]
    several = len(plan.meshes) > 1
    rows = [["path", "count", "type", *(["stages"] if several else []), "sharding", "per device", ""]]

    def row(a: ArgPlan, place: Place) -> tuple[TensorType, ShardingSpec, str]:
        return place.type_of(a.type), place.spec, _fate(a)

    for fold in fold_paths([(a.path + place.rows, row(a, place)) for a, place in held]):
        mine = [held[r] for r in fold.rows]
        value_type, spec, fate = row(*mine[0])
        each = [_held_bytes(a, place, plan) for a, place in mine]
        stages = [indices_text(sorted({place.stage for _, place in mine}))] if several else []
        size = bytes_text(each[0] if several else sum(each))
        rows.append([fold.path, str(len(mine)), str(value_type), *stages, str(spec), size, fate])
    total = "" if several else f", {bytes_text(sum(_held_bytes(a, place, plan) for a, place in held))} per device"
    shown, more = clip(rows, limit, "rows")
    shown = shown if held else []
    return [f"{heading}: {len(arguments)} arrays{total}", *table(shown, right=(1, 5 if several else 4)), *more, ""]


def _fate(argument: ArgPlan) -> str:
    """``donated``: its new value takes its buffer; ``state``: it has one, of its own."""
    return "donated" if argument.donated_to >= 0 else "state" if argument.becomes >= 0 else ""


def _why(plan: Plan, limit: int | None) -> list[str]:
    made, mine = plan.provenance, plan.predictions.step_s
    lines: list[str] = []
    if made.considered:
        rows = [["plan", "step time", "against this", "peak memory", ""]]
        if all(c.step_s != mine for c in made.considered):
            rows.append(["this plan", seconds_text(mine), "", bytes_text(plan.predictions.peak_memory_bytes), ""])
        for c in sorted(made.considered, key=lambda c: c.step_s):
            against = f"{100 * (c.step_s / mine - 1):+.3g} %" if mine and c.step_s != mine else ""
            peak = "" if c.peak_bytes is None else bytes_text(c.peak_bytes)
            rows.append([c.name, seconds_text(c.step_s), against, peak, "" if c.fits else "does not fit"])
        shown, more = clip(rows, limit, "plans")
        lines += ["compared under the same cost model", *table(shown, right=(1, 2, 3)), *more, ""]
    if (cut := made.ended) is not None:
        lines += [
            f"not searched to the end: {cut.why}; {cut.what} takes at least {seconds_text(cut.bound_s)}, "
            f"{percent_text(cut.gap(mine), 1)} less than this plan",
            "",
        ]
    if made.seconds:
        phases = ", ".join(f"{name} {seconds_text(s)}" for name, s in made.seconds)
        lines += [f"planning took {seconds_text(math.fsum(s for _, s in made.seconds))} ({phases})", ""]
    return [*lines, *(["notes", *(f"  - {note}" for note in made.notes), ""] if made.notes else [])]
