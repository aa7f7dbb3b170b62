"""The text form of a pipeline: its stages, schedule and cuts, and its layers.

In: an `ir.plan.Plan` of several stages. Out: sections of lines for `ir.plan_text`, plain JSON values
(`pipeline_facts`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.ir.cluster import ClusterSpec
from autopar.ir.layer_text import indices_text, split_text
from autopar.ir.pipeline import Cut, Stage
from autopar.ir.plan import Plan
from autopar.ir.resharding import place
from autopar.ir.serde import JsonData, encode
from autopar.ir.text import bytes_text, seconds_text, table

COLUMNS = 100
"""Of a terminal, for lines that are cut."""


def stages_text(plan: Plan, limit: int | None) -> list[str]:
    """Lines on stages, what crosses between them, and their layers; at most ``limit`` rows a table (None: all)."""
    return [*_stages(plan), *_cuts(plan, limit), *_layers(plan, limit)]


def pipeline_facts(plan: Plan) -> dict[str, JsonData]:
    """The same as plain values."""
    schedule = plan.pipelined.plan.schedule
    return {
        "stages": [
            {"layers": [stage.start, stage.stop], "submesh": submesh_text(plan.cluster, stage),
             "worker": schedule.mesh_of_stage[i], "device_ids": list(stage.mesh.device_ids),
             "mesh_shape": list(stage.mesh.shape), "remat": list(stage.remat), "fused": stage.fused,
             "in_flight": schedule.in_flight[i],
             "collectives_between_layers": [encode(c) for c in plan.pipelined.between[i]],
             **encode(stage.cost)}
            for i, stage in enumerate(plan.pipelined.plan.stages)
        ],
        "schedule": {"name": schedule.name, "num_microbatches": schedule.num_microbatches,
                     "tasks": [[str(task) for task in tasks] for tasks in schedule.tasks]},
        "cuts": [
            {"source": cut.source, "target": cut.target, "phase": cut.phase, "bytes": cut_bytes(cut),
             "time_s": cut.time_s, "bound_s": cut.bound_s, "receive_bytes": cut.receive_bytes,
             "strategy": cut.strategy, "gather_s": cut.gather_s,
             "values": [{"name": v.name, "type": str(v.type), "src": str(v.src_spec), "lands": str(v.lands),
                         "dst": str(v.dst_spec)}
                        for v in cut.values]}
            for cut in plan.pipelined.plan.cuts
        ],
        "layers": [
            {"name": layer.name, "kind": layer.kind, "sources": list(layer.sources), "sharding": layer.sharding}
            for layer in plan.pipelined.layers
        ],
        "shardings": [
            {"mesh_shape": [a.size for a in x.axes], "remat": x.remat, **encode(x.cost),
             "operators": [{"phase": o.phase, "primitive": o.primitive, "source": o.source, "count": o.count,
                            "split": split_text(x.strategies[o.strategy]),
                            "operands": [str(s) for s in x.strategies[o.strategy].operands],
                            "results": [str(s) for s in x.strategies[o.strategy].results]} for o in x.operators],
             "collectives": [encode(c) for c in x.collectives]}
            for x in plan.pipelined.shardings
        ],
    }  # fmt: skip


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def remat_text(stage: Stage) -> str:
    """What a stage's layers keep: ``full``, or ``3 none, 1 full`` where they differ."""
    kinds = dict.fromkeys(stage.remat)
    if len(kinds) == 1:
        return stage.remat[0]
    return ", ".join(f"{stage.remat.count(kind)} {kind}" for kind in kinds)


def submesh_text(cluster: ClusterSpec, stage: Stage) -> str:
    """Hosts that a stage is on, and its devices on each: ``2x8``."""
    hosts = len(set(place(stage.mesh, cluster).hosts))
    return f"{hosts}x{stage.mesh.num_devices // hosts}"


def cut_bytes(cut: Cut) -> int:
    """Bytes of the whole values that cross, for one microbatch or once a step."""
    return sum(value.type.size_bytes for value in cut.values)


def cut_ratio(cut: Cut) -> float:
    """A cut's time over its lower bound; inf where the bound is 0 and it takes time."""
    return cut.time_s / cut.bound_s if cut.bound_s else (math.inf if cut.time_s else 1.0)


def _stages(plan: Plan) -> list[str]:
    schedule = plan.pipelined.plan.schedule
    count, meshes = len(plan.pipelined.plan.stages), len(schedule.tasks)
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
    for number, stage in enumerate(plan.pipelined.plan.stages):
        worker, cost = schedule.mesh_of_stage[number], stage.cost
        rows.append([
            str(number), indices_text(stage.layers), submesh_text(plan.cluster, stage),
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
    lines += table(costs, right=range(len(costs[0])))
    if fused := [number for number, stage in enumerate(plan.pipelined.plan.stages) if stage.fused]:
        lines.append(
            f"a microbatch's forward task and the one after it are one executable: stage {indices_text(fused)}"
        )
    return [*lines, ""]


def schedule_text(plan: Plan, limit: int | None) -> list[str]:
    """Lines on each worker's order of tasks; ``limit``: so many workers, and as much of it as a line holds."""
    schedule = plan.pipelined.plan.schedule
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


def _cuts(plan: Plan, limit: int | None) -> list[str]:
    cuts = plan.pipelined.plan.cuts
    if not cuts:
        return [
            "cuts: none; one stage has all layers" if len(plan.meshes) == 1 else "cuts: nothing crosses",
            "",
        ]
    rows = [["from", "to", "phase", "values", "bytes", "time", "bound", "time/bound", "by", "shardings"]]
    for cut in cuts if limit is None else cuts[:limit]:
        ratio = cut_ratio(cut)
        specs = dict.fromkeys(f"{v.src_spec} -> {v.dst_spec}" for v in cut.values)
        way = cut.strategy or "the devices of both"
        rows.append([
            str(cut.source), str(cut.target), cut.phase, str(len(cut.values)), bytes_text(cut_bytes(cut)),
            seconds_text(cut.time_s), seconds_text(cut.bound_s),
            "no bound" if math.isinf(ratio) else f"{ratio:.3g}",
            f"{way}, gathered" if cut.gather_s else way,
            next(iter(specs), "") + (f" and {len(specs) - 1} more" if len(specs) > 1 else ""),
        ])  # fmt: skip
    heading = f"cuts: {len(cuts)} between stages; forward and backward for each microbatch, the others once a step"
    more = [f"  ... {len(cuts) - limit} more cuts (--all shows them)"] if limit and len(cuts) > limit else []
    return [heading, *table(rows, right=(0, 1, 3, 4, 5, 6, 7)), *more, ""]


def _layers(plan: Plan, limit: int | None) -> list[str]:
    home = plan.pipelined.plan.home
    groups: list[list[int]] = []
    keys: list[tuple[int, int, str, tuple[str, ...]]] = []
    for k, layer in enumerate(plan.pipelined.layers):
        key = (layer.kind, home[k], plan.pipelined.sharding_of(k).remat, layer.sources)
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
