"""What differs between two pipeline plans, as text.

In: plans ``a`` and ``b``. Out: lines in sections, empty where their digests agree. Stages are matched by number,
cuts by source, target and phase; provenance is left out.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.ir.diff import measured
from autopar.ir.layer_text import indices_text, shardings_diff
from autopar.ir.pipeline import Cut
from autopar.ir.pipeline_file import PipelineFile
from autopar.ir.pipeline_text import config_text, cut_bytes, remat_text, submesh_text
from autopar.ir.plan_files import pipeline_digest
from autopar.ir.pretty import cluster_text, fold_paths
from autopar.ir.text import bytes_text, seconds_text, table


def pipeline_diff_text(a: PipelineFile, b: PipelineFile) -> str:
    """The differences from ``a`` to ``b``; empty for plans of equal digest."""
    if pipeline_digest(a) == pipeline_digest(b):
        return ""
    lines = [
        *_setting(a, b), *_stages(a, b), *_cuts(a, b), *shardings_diff(a, b), *_arguments(a, b), *_predictions(a, b)
    ]  # fmt: skip
    if not lines:
        lines = ["the plans look the same to a user, but not inside: layers' costs, or rates of the cluster differ"]
    return "\n".join(lines).rstrip() + "\n"


def _setting(a: PipelineFile, b: PipelineFile) -> list[str]:
    def schedule(plan: PipelineFile) -> str:
        found = plan.plan.schedule
        stages, meshes = found.num_stages, len(found.tasks)
        text = f"{found.name}, {found.num_microbatches} microbatches, {stages} stage{'s' if stages > 1 else ''}"
        return text + (f" on {meshes} meshes" if meshes != stages else "")

    pairs = (
        ("step in layers", f"{a.name} ({a.fingerprint[:12]})", f"{b.name} ({b.fingerprint[:12]})"),
        ("cluster", cluster_text(a.cluster), cluster_text(b.cluster)),
        ("asked for", config_text(a.config), config_text(b.config)),
        ("schedule", schedule(a), schedule(b)),
    )
    lines: list[str] = []
    for what, left, right in pairs:
        if left != right:
            lines += [what, f"  - {left}", f"  + {right}", ""]
    if not lines and a.plan.schedule.tasks != b.plan.schedule.tasks:
        lines += ["schedule", "  the order of tasks differs", ""]
    return lines


def _stages(a: PipelineFile, b: PipelineFile) -> list[str]:
    def cells(plan: PipelineFile, number: int) -> list[str]:
        if number >= len(plan.plan.stages):
            return ["none", "", "", "", "", ""]
        stage = plan.plan.stages[number]
        return [
            indices_text(stage.layers), submesh_text(plan, stage),
            "x".join(map(str, stage.mesh.shape)), remat_text(stage),
            seconds_text(stage.cost.forward_s + stage.cost.backward_s),
            bytes_text(stage.cost.state_bytes),
        ]  # fmt: skip

    rows = [["stage", "", "layers", "submesh", "mesh", "remat", "time", "state"]]
    changed = 0
    for number in range(max(len(a.plan.stages), len(b.plan.stages))):
        left, right = cells(a, number), cells(b, number)
        if left != right:
            changed += 1
            rows += [[str(number), "-", *left], ["", "+", *right]]
    return [f"stages: {changed} changed", *table(rows, right=(0, 6, 7)), ""] if changed else []


def _size(cut: Cut) -> str:
    return bytes_text(cut_bytes(cut))


def _time(cut: Cut) -> str:
    return seconds_text(cut.time_s)


def _cuts(a: PipelineFile, b: PipelineFile) -> list[str]:
    left = {(cut.source, cut.target, cut.phase): cut for cut in a.plan.cuts}
    right = {(cut.source, cut.target, cut.phase): cut for cut in b.plan.cuts}

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
    return [f"cuts: {len(rows) - 1} changed", *table(rows, right=(0, 1, 3, 5)), ""] if len(rows) > 1 else []


def _arguments(a: PipelineFile, b: PipelineFile) -> list[str]:
    def where(plan: PipelineFile) -> dict[str, str]:
        out: dict[str, str] = {}
        for argument in plan.inputs:
            for place in argument.places:
                text = f"{place.type_of(argument.type)} {place.spec} on stage {place.stage}"
                path = argument.path + place.rows
                out[path] = f"{out[path]}; {text}" if path in out else text
        return out

    left, right = where(a), where(b)
    changed = [
        (path, (left.get(path, "absent"), right.get(path, "absent")))
        for path in dict.fromkeys((*left, *right))
        if left.get(path) != right.get(path)
    ]
    if not changed:
        return []
    rows = [["path", "count", "a", "b"]]
    for fold in fold_paths(changed):
        rows.append([fold.path, str(len(fold.rows)), *changed[fold.rows[0]][1]])
    return [f"arguments: {len(changed)} changed", *table(rows, right=(1,)), ""]


def _percent(part: float) -> str:
    return f"{100 * part:.3g} %"


def _predictions(a: PipelineFile, b: PipelineFile) -> list[str]:
    p, q = a.predictions, b.predictions
    measures = (
        ("step time", p.step_s, q.step_s, seconds_text),
        ("bubble", p.bubble, q.bubble, _percent),
        ("busiest worker", p.compute_s, q.compute_s, seconds_text),
        ("busiest link", p.communication_s, q.communication_s, seconds_text),
        ("peak memory", p.peak_bytes, q.peak_bytes, bytes_text),
    )
    return measured("predicted, by simulation", measures)
