"""Why no pipeline was found, by how much what there is misses, and the nearest things that would do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.inter_op.candidates import Simulated
from autopar.inter_op.cells import Cells
from autopar.inter_op.cuts import Cuts
from autopar.inter_op.least_memory import least_memory
from autopar.inter_op.ranges import FIELDS
from autopar.inter_op.schedules import SCHEDULES
from autopar.inter_op.search_space import chunk_counts
from autopar.inter_op.stage_layouts import MOST_STAGES, ruled_out_by
from autopar.ir.text import bytes_text


def why_none_is_built(cuts: Cuts, cells: Sequence[Cells], pins_refused: str) -> str:
    """Why nothing could be built, by how much it misses, and the nearest things that would fit."""
    memory = min(c.memory_bytes for c in cells)
    limits = cuts.leanest()
    need = least_memory(cuts.at_starts(cells), limits)
    if need <= 1 and (apart := _apart(cuts, cells)):
        return apart
    if need <= 1:
        return (
            f"no pipeline of {cuts.layered.name} under {', '.join(cuts.schedules)} can be built on "
            f"{cuts.cluster.name} with {cuts.m} microbatches, though memory would do. "
            f"Allow other schedules ({cuts.plain.name}), numbers of stages or submeshes"
        )
    if need == float("inf"):
        return (
            f"no cut of {cuts.count} layers into stages suits {cuts.cluster.name} as it was asked for, under "
            f"{', '.join(cuts.schedules)}; interleaved schedules want equal meshes, with "
            f"{', '.join(map(str, chunk_counts(SCHEDULES)))} stages each{pins_refused}"
        )
    text = (
        f"no cut of {cuts.count} layers into stages fits {bytes_text(memory)} a device on {cuts.cluster.name}: the "
        f"leanest needs {bytes_text(need * memory)}, {bytes_text((need - 1) * memory)} "
        f"({_percent(need - 1)}) more. What would fit: a limit of {bytes_text(need * memory)}"
    )
    options = cuts.options
    if options.starts is not None or options.stages is not None:
        every = min(cuts.count, cuts.cluster.num_devices, MOST_STAGES)
        free = least_memory(cells, replace(limits, most_stages=every, least_stages=1))
        text += f"; other stages ({bytes_text(free * memory)} a device)" if free < need else ""
    for times in (2, 4, 8):
        devices = tuple(times * d for d in limits.devices)
        _, asked = options.stages or (1, None)
        most = asked or min(cuts.count, sum(devices), MOST_STAGES)
        more = least_memory(cuts.at_starts(cells), replace(limits, devices=devices, most_stages=most))
        if more <= 1:
            text += f"; {times} times as many hosts ({bytes_text(more * memory)} a device)"
            break
    if cuts.layered.loss >= 0 and "full" not in options.remat:
        text += '; recomputing layers (recompute="full")'
    tried = ", ".join(dict.fromkeys(str(cell.submesh) for cell in cells))
    return f"{text}. More microbatches than {cuts.m} lower what activations take. Tried were submeshes {tried}"


def why_none_fits(found: Sequence[Simulated], memory: int | None) -> str:
    """Which of pipelines that do not fit lacks least, and how much."""
    step = min(found, key=lambda s: s.fullest(memory)[0])
    part, peak = step.fullest(memory)
    return (
        f"no pipeline fits the devices' memory when it is simulated, of {len(found)} that were tried. The nearest: "
        f"{step.built.text} needs {bytes_text(peak)} of {bytes_text(peak / part)} a device ({_percent(part - 1)} "
        f"more than there is); a limit of {bytes_text(peak)} would fit it"
    )


def _apart(cuts: Cuts, cells: Sequence[Cells]) -> str:
    """Which layers cannot be on one stage, as nothing that was asked for lets their layouts meet; "" where all
    can."""
    seconds = np.min([c.spread(c.cost[..., FIELDS.index("forward_s")].min(axis=0)) for c in cells], axis=0)
    pairs = [k for k in range(cuts.count - 1) if not np.isfinite(seconds[k, k + 2])]
    asked = ruled_out_by(cuts.options)
    if not pairs or not asked:
        return ""
    names = cuts.layered.layers
    return (
        f"no stage of {cuts.layered.name} was found that has both {names[pairs[0]].name} and "
        f"{names[pairs[0] + 1].name} (layers {pairs[0]} and {pairs[0] + 1}) under {' and '.join(asked)}: none of "
        "the layouts that were tried for them meet without what is ruled out. Leave one of these out, or begin a "
        "stage between them"
    )


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %" if part >= 1 else f"{100 * part:.3g} %"
