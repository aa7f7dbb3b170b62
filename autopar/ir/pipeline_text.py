"""The text form of pipeline plans: what `autopar inspect` and `print(plan)` show of them.

In: a `PipelineFile`. Out: plain text in sections (a heading in column 0, its rows indented), or the same facts as plain
JSON values (`pipeline_facts`); `explain_text`: what a plan was chosen from and what its time goes into.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.ir.layer_text import indices_text, shardings_text, split_text
from autopar.ir.pipeline import Cut, Stage
from autopar.ir.pipeline_file import PipelineConfig, PipelineFile, PipelineOptions
from autopar.ir.plan_files import pipeline_digest
from autopar.ir.pretty import cluster_text, fold_paths, shard_bytes
from autopar.ir.serde import JsonData, encode
from autopar.ir.text import bytes_text, percent_text, seconds_text, table

COLUMNS = 100
"""Of a terminal, for lines that are cut."""


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _bound(axes: tuple[int, ...] | None) -> str:
    """What the batch is bound to, as `autopar plan --batch-axes` takes it."""
    return "free" if axes is None else "+".join(map(str, axes)) or "whole"


def config_text(config: PipelineConfig) -> str:
    """What was asked for, in one line, defaults left out."""
    options, default = config.options, PipelineOptions()
    parts = [f"{config.num_microbatches} microbatch{'es' if config.num_microbatches > 1 else ''}"]
    if config.layers is not None:
        parts.append("layers by name" if config.layers == "names" else f"{config.layers} layers")
    if options.schedules is not None:
        parts.append("schedules " + ", ".join(options.schedules))
    if options.num_stages is not None:
        parts.append(f"{options.num_stages} stage{'s' if options.num_stages > 1 else ''}")
    if options.starts is not None:
        parts.append("stages from layers " + ", ".join(map(str, options.starts)))
    if options.submeshes is not None:
        parts.append("submeshes " + ", ".join(map(_shape, options.submeshes)))
    if options.logical_shapes is not None:
        parts.append("mesh shapes " + ", ".join(map(_shape, options.logical_shapes)))
    if options.batch_axes is not None:
        parts.append("batch " + ", ".join(map(_bound, options.batch_axes)))
    if options.whole_examples:
        parts.append("whole examples")
    if options.uniform:
        parts.append("uniform stages")
    if options.memory_bytes is not None:
        parts.append(f"memory {bytes_text(options.memory_bytes)}")
    if options.remat != default.remat:
        parts.append("remat " + ", ".join(options.remat))
    if options.forbid:
        parts.append("forbid " + ", ".join(options.forbid))
    return "; ".join(parts)


def remat_text(stage: Stage) -> str:
    """What a stage's layers keep: ``full``, or ``3 none, 1 full`` where they differ."""
    kinds = dict.fromkeys(stage.remat)
    if len(kinds) == 1:
        return stage.remat[0]
    return ", ".join(f"{stage.remat.count(kind)} {kind}" for kind in kinds)


def submesh_text(plan: PipelineFile, stage: Stage) -> str:
    """Hosts that a stage is on, and its devices on each: ``2x8``."""
    host_of = [
        (g, h) for g, group in enumerate(plan.cluster.groups) for h in range(group.hosts)
        for _ in range(group.devices_per_host)
    ]  # fmt: skip
    hosts = len({host_of[d] for d in stage.mesh.device_ids})
    return f"{hosts}x{stage.mesh.num_devices // hosts}"


def cut_bytes(cut: Cut) -> int:
    """Bytes of the whole values that cross, for one microbatch or once a step."""
    return sum(value.type.size_bytes for value in cut.values)


def cut_ratio(cut: Cut) -> float:
    """A cut's time over its lower bound; inf where the bound is 0 and it takes time."""
    return cut.time_s / cut.bound_s if cut.bound_s else (math.inf if cut.time_s else 1.0)


def _head(plan: PipelineFile) -> list[str]:
    made = plan.provenance
    kinds = len({layer.kind for layer in plan.layers})
    used = sum(w.num_devices for w in plan.predictions.workers)
    unused = plan.cluster.num_devices - used
    rows = [
        ["digest", pipeline_digest(plan)[:16] + f" (autopar {made.autopar_version}, jax {made.jax_version})"],
        ["cluster", cluster_text(plan.cluster)],
        ["asked for", config_text(plan.config)],
        ["layers", f"{len(plan.layers)} of {kinds} kind{'s' if kinds > 1 else ''}"],
    ]
    if unused:
        rows.append(["unused", f"{unused} of {plan.cluster.num_devices} devices have no stage"])
    return [f"pipeline plan of {plan.name}", *table(rows), ""]


def _predicted(plan: PipelineFile) -> list[str]:
    p = plan.predictions
    tight = max(p.workers, key=lambda w: w.peak_bytes / w.limit_bytes)
    rows = [
        ["step time", f"{seconds_text(p.step_s)}; bubble {percent_text(p.bubble, 1)} of the devices' time"],
        ["busiest", f"a worker runs for {seconds_text(p.compute_s)}, a link for {seconds_text(p.communication_s)}"],
        ["peak memory", f"{bytes_text(tight.peak_bytes)} of {bytes_text(tight.limit_bytes)} a device "
         f"({percent_text(tight.peak_bytes, tight.limit_bytes)}), on worker {p.workers.index(tight)}"],
    ]  # fmt: skip
    return ["predicted, by simulation", *table(rows), ""]


def _stages(plan: PipelineFile) -> list[str]:
    schedule = plan.plan.schedule
    count, meshes = len(plan.plan.stages), len(schedule.tasks)
    on = f" on {meshes} meshes" if meshes != count else ""
    rows = [["stage", "layers", "submesh", "devices", "mesh", "remat"]]
    costs = [
        [
            "stage",
            "forward",
            "backward",
            "grad sync",
            "update",
            "in flight",
            "state",
            "activations",
            "transient",
            "peak",
        ]
    ]
    for number, stage in enumerate(plan.plan.stages):
        worker, cost = schedule.mesh_of_stage[number], stage.cost
        rows.append([
            str(number), indices_text(stage.layers), submesh_text(plan, stage),
            indices_text(sorted(stage.mesh.device_ids)), _shape(stage.mesh.shape), remat_text(stage),
        ])  # fmt: skip
        costs.append([
            str(number), seconds_text(cost.forward_s), seconds_text(cost.backward_s), seconds_text(cost.grad_sync_s),
            seconds_text(cost.update_s), str(schedule.in_flight[number]), bytes_text(cost.state_bytes),
            bytes_text(cost.activation_bytes), bytes_text(cost.transient_bytes),
            bytes_text(plan.predictions.workers[worker].peak_bytes),
        ])  # fmt: skip
    lines = [f"stages: {count}{on}", *table(rows, right=(0,)), ""]
    lines += ["per microbatch (forward, backward, activations) and step, on a device of the stage"]
    return [*lines, *table(costs, right=range(len(costs[0]))), ""]


def _schedule(plan: PipelineFile, limit: int | None) -> list[str]:
    schedule = plan.plan.schedule
    lines = [f"schedule: {schedule.name}, {schedule.num_microbatches} microbatches; order of tasks"]
    workers = list(enumerate(schedule.tasks))
    for worker, tasks in workers if limit is None else workers[:limit]:
        text = f"  worker {worker:<{len(str(len(workers) - 1))}} "
        for task in tasks:
            if limit is not None and len(text) + len(str(task)) + 5 > COLUMNS:
                text += " ..."
                break
            text += f" {task}"
        lines.append(text)
    if limit is not None and len(workers) > limit:
        lines.append(f"  ... {len(workers) - limit} more workers (--all shows them)")
    return [*lines, ""]


def _cuts(plan: PipelineFile, limit: int | None) -> list[str]:
    cuts = plan.plan.cuts
    if not cuts:
        return ["cuts: none; one stage has all layers" if len(plan.plan.stages) == 1 else "cuts: nothing crosses", ""]
    rows = [["from", "to", "phase", "values", "bytes", "time", "bound", "time/bound", "shardings"]]
    for cut in cuts if limit is None else cuts[:limit]:
        ratio = cut_ratio(cut)
        specs = dict.fromkeys(f"{v.src_spec} -> {v.dst_spec}" for v in cut.values)
        rows.append([
            str(cut.source), str(cut.target), cut.phase, str(len(cut.values)), bytes_text(cut_bytes(cut)),
            seconds_text(cut.time_s), seconds_text(cut.bound_s),
            "no bound" if math.isinf(ratio) else f"{ratio:.3g}",
            next(iter(specs), "") + (f" and {len(specs) - 1} more" if len(specs) > 1 else ""),
        ])  # fmt: skip
    heading = f"cuts: {len(cuts)} between stages; forward and backward for each microbatch, the others once a step"
    more = [f"  ... {len(cuts) - limit} more cuts (--all shows them)"] if limit and len(cuts) > limit else []
    return [heading, *table(rows, right=(0, 1, 3, 4, 5, 6, 7)), *more, ""]


def _layers(plan: PipelineFile, limit: int | None) -> list[str]:
    home = plan.plan.home
    groups: list[list[int]] = []
    keys: list[tuple[int, int, str, tuple[str, ...]]] = []
    for k, layer in enumerate(plan.layers):
        key = (layer.kind, home[k], plan.sharding_of(k).remat, layer.sources)
        if keys and keys[-1] == key:
            groups[-1].append(k)
        else:
            keys.append(key)
            groups.append([k])
    rows = [["layers", "kind", "stage", "remat", "source"]]
    for (kind, stage, remat, sources), group in zip(keys, groups, strict=True):
        rows.append([indices_text(group), str(kind), str(stage), remat, " to ".join(dict.fromkeys(sources))])
    shown = rows if limit is None else rows[: limit + 1]
    more = [f"  ... {len(rows) - len(shown)} more (--all shows them)"] if len(shown) < len(rows) else []
    return ["layers", *table(shown, right=(1, 2)), *more, ""]


def _arguments(plan: PipelineFile, limit: int | None) -> list[str]:
    placed = [(a.path + p.rows, p.type_of(a.type), p) for a in plan.inputs for p in a.places]
    if not placed:
        return []
    rows = [["path", "count", "type", "stages", "sharding", "per device"]]
    for fold in fold_paths([(path, (t, p.spec)) for path, t, p in placed]):
        _, value_type, first = placed[fold.rows[0]]
        mesh = plan.plan.stages[first.stage].mesh
        rows.append([
            fold.path, str(len(fold.rows)), str(value_type),
            indices_text(sorted({placed[r][2].stage for r in fold.rows})), str(first.spec),
            bytes_text(shard_bytes(value_type, first.spec, mesh)),
        ])  # fmt: skip
    shown = rows if limit is None else rows[: limit + 1]
    more = [f"  ... {len(rows) - len(shown)} more (--all shows them)"] if len(shown) < len(rows) else []
    return ["arguments that stages hold, each", *table(shown, right=(1, 5)), *more, ""]


def _why(plan: PipelineFile, limit: int | None) -> list[str]:
    simulated = sorted(plan.provenance.simulated, key=lambda row: row[1])
    lines: list[str] = []
    if simulated:
        best = simulated[0][1]
        rows = [["step time", "against the best", "pipeline"]]
        for text, seconds in simulated if limit is None else simulated[:limit]:
            against = f"{100 * (seconds / best - 1):+.3g} %" if best and seconds != best else ""
            rows.append([seconds_text(seconds), against, text])
        lines += [f"why: the fastest of {len(simulated)} that were simulated", *table(rows, right=(0, 1)), ""]
    made = plan.provenance
    if made.seconds:
        phases = ", ".join(f"{name} {seconds_text(s)}" for name, s in made.seconds)
        lines += [f"planning took {seconds_text(math.fsum(s for _, s in made.seconds))} ({phases})", ""]
    return [*lines, *(["notes", *(f"  - {note}" for note in made.notes), ""] if made.notes else [])]


def pipeline_text(plan: PipelineFile, *, limit: int | None = 40) -> str:
    """The whole plan for a reader; at most ``limit`` rows a table (None: all)."""
    lines = [
        *_head(plan), *_predicted(plan), *_stages(plan), *_schedule(plan, limit), *_cuts(plan, limit),
        *_layers(plan, limit), *shardings_text(plan, limit), *_arguments(plan, limit), *_why(plan, limit),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def explain_text(plan: PipelineFile) -> str:
    """What a plan was chosen from, where the devices' time goes, what bounds its memory and its transfers."""
    p, m = plan.predictions, plan.plan.schedule.num_microbatches
    times = [s.cost.forward_s + s.cost.backward_s for s in plan.plan.stages]
    slowest = max(range(len(times)), key=times.__getitem__)
    mean = math.fsum(times) / len(times)
    slow, average, saved = map(seconds_text, (times[slowest], mean, (m - 1) * (times[slowest] - mean)))
    rows = [
        ["bubble", f"{percent_text(p.bubble, 1)} of the devices' time: {seconds_text(p.bubble * p.step_s)} a step"],
        ["slowest", f"stage {slowest} takes {slow} a microbatch, {average} on average; equal ones would save {saved}"],
    ]
    cuts = [cut for cut in plan.plan.cuts if cut.time_s]
    if cuts:
        worst = max(cuts, key=lambda cut: cut.time_s)
        text = f"stage {worst.source} to {worst.target}, {worst.phase}: {bytes_text(cut_bytes(worst))} in "
        bound = seconds_text(worst.bound_s)
        rows.append(["crossing", f"{text}{seconds_text(worst.time_s)}, at least {bound} by any resharding"])
    tight = max(range(len(p.workers)), key=lambda w: p.workers[w].peak_bytes / p.workers[w].limit_bytes)
    spare = p.workers[tight].limit_bytes - p.workers[tight].peak_bytes
    rows.append(["memory", f"worker {tight} has the least to spare: {bytes_text(spare)} a device"])
    lines = [*_why(plan, None), "where time and memory go", *table(rows)]
    return "\n".join(lines).rstrip() + "\n"


def pipeline_facts(plan: PipelineFile) -> dict[str, JsonData]:
    """What `pipeline_text` shows, unfolded and unformatted, as values for json.dumps; SI units in the names."""
    p, schedule = plan.predictions, plan.plan.schedule
    return {
        "kind": plan.kind,
        "name": plan.name,
        "digest": pipeline_digest(plan),
        "schema_version": plan.schema_version,
        "cluster": {"name": plan.cluster.name, "devices": plan.cluster.num_devices},
        "config": encode(plan.config),
        "predictions": {
            "step_s": p.step_s, "bubble": p.bubble, "compute_s": p.compute_s, "communication_s": p.communication_s,
            "peak_bytes": p.peak_bytes,
            "workers": [{**encode(w), "bubble": p.bubble_of(i)} for i, w in enumerate(p.workers)],
            "links": [encode(link) for link in p.links],
        },
        "stages": [
            {"layers": [stage.start, stage.stop], "submesh": submesh_text(plan, stage),
             "worker": schedule.mesh_of_stage[i], "device_ids": list(stage.mesh.device_ids),
             "mesh_shape": list(stage.mesh.shape), "remat": list(stage.remat), "in_flight": schedule.in_flight[i],
             **encode(stage.cost)}
            for i, stage in enumerate(plan.plan.stages)
        ],
        "schedule": {"name": schedule.name, "num_microbatches": schedule.num_microbatches,
                     "tasks": [[str(task) for task in tasks] for tasks in schedule.tasks]},
        "cuts": [
            {"source": cut.source, "target": cut.target, "phase": cut.phase, "bytes": cut_bytes(cut),
             "time_s": cut.time_s, "bound_s": cut.bound_s, "receive_bytes": cut.receive_bytes,
             "values": [{"name": v.name, "type": str(v.type), "src": str(v.src_spec), "dst": str(v.dst_spec)}
                        for v in cut.values]}
            for cut in plan.plan.cuts
        ],
        "layers": [
            {"name": layer.name, "kind": layer.kind, "sources": list(layer.sources), "sharding": layer.sharding}
            for layer in plan.layers
        ],
        "shardings": [
            {"mesh_shape": [a.size for a in x.axes], "remat": x.remat, **encode(x.cost),
             "operators": [{"phase": o.phase, "primitive": o.primitive, "source": o.source, "count": o.count,
                            "split": split_text(x.strategies[o.strategy]),
                            "operands": [str(s) for s in x.strategies[o.strategy].operands],
                            "results": [str(s) for s in x.strategies[o.strategy].results]} for o in x.operators],
             "collectives": [encode(c) for c in x.collectives]}
            for x in plan.shardings
        ],
        "arguments": [
            {"path": a.path + p.rows, "shape": list(p.type_of(a.type).shape), "dtype": a.type.dtype, "stage": p.stage,
             "dims": [list(axes) for axes in p.spec.dims], "unreduced": list(p.spec.unreduced)}
            for a in plan.inputs
            for p in a.places
        ],
        "simulated": [{"pipeline": text, "step_s": seconds} for text, seconds in plan.provenance.simulated],
        "planning_phases_s": dict(plan.provenance.seconds),
        "autopar_version": plan.provenance.autopar_version,
        "jax_version": plan.provenance.jax_version,
    }  # fmt: skip
