"""What a step in two stages or more takes at least, by its work alone: before anything is searched.

With w_k seconds that layer k and its update take on one device, however few values it computes again, and stages of
layers [i_s, i_{s+1}) on n_s of N devices each (dividing what a device does never makes it less in total):

    T  ≥  min over the cuts  max_s  Σ_{i_s ≤ k < i_{s+1}} w_k / n_s

by dynamic programming over layers and devices. Where a mesh may have several stages that do not follow one another
(chunked schedules), Σ_k w_k / N. What crosses, and bubbles, are left out; so are more microbatches than the layers were
made for, which only add work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.inter_op.layer_problems import LayerProblems, parts_of
from autopar.inter_op.lower_bounds import work_s
from autopar.inter_op.schedules import SCHEDULES
from autopar.inter_op.submesh import Submesh, mesh_of, submeshes
from autopar.intra_op.mesh_problem import Asked
from autopar.intra_op.stage_costs import StageProblem
from autopar.ir.cluster import ClusterSpec
from autopar.ir.layers import LayeredGraph
from autopar.ir.pipelined import PipelineOptions


def least_in_stages_s(
    layered: LayeredGraph, cluster: ClusterSpec, options: PipelineOptions, user_rules: Mapping[str, str]
) -> float:
    """Seconds that a step takes at least in two stages or more, each on less than all devices; infinite where there is
    no such pipeline."""
    seconds = _layer_seconds(layered, cluster, options, user_rules)
    devices, sizes = cluster.num_devices, sorted({s.size for s in submeshes(cluster)})
    unit = math.gcd(devices, *sizes)
    sizes = [size // unit for size in sizes if size < devices]
    contiguous = _slowest_stage_s(seconds, sizes, devices // unit) / unit
    chunks = [v for schedule in SCHEDULES.values() if schedule.chunked for v in schedule.chunks]
    if len(seconds) >= 2 * min(chunks, default=len(seconds)):
        return min(contiguous, float(seconds.sum()) / devices)
    return contiguous


def least_work_s(
    layered: LayeredGraph, cluster: ClusterSpec, options: PipelineOptions, user_rules: Mapping[str, str]
) -> float:
    """Seconds that a step takes at least in any number of stages, one included: Σ_k w_k / N."""
    return float(_layer_seconds(layered, cluster, options, user_rules).sum()) / cluster.num_devices


def _layer_seconds(
    layered: LayeredGraph, cluster: ClusterSpec, options: PipelineOptions, user_rules: Mapping[str, str]
) -> NDArray[np.float64]:
    """float64[layers]: w, on the fastest kind of device."""
    parts = parts_of(layered, options.remat)
    problems = LayerProblems(parts, (), Asked(user_rules=user_rules))
    out = np.full(len(parts.example), np.inf)
    for group in range(len(cluster.groups)):
        mesh = mesh_of(cluster, Submesh(group, 1, 1), (1,), [0])
        for number in range(len(parts.example)):
            for remat in parts.remats:
                layout = StageProblem(parts.graphs[remat][number], problems.posed(number, remat, mesh), remat).solve()
                out[number] = min(out[number], work_s(layout.cost, layered.num_microbatches))
    return out[list(parts.number)]


def _slowest_stage_s(seconds: NDArray[np.float64], sizes: Sequence[int], devices: int) -> float:
    """The least that the slowest stage takes, over cuts into stages on ``sizes`` that have ``devices`` together;
    infinite where there is none."""
    count = len(seconds)
    before = np.concatenate([[0.0], np.cumsum(seconds)])
    best = np.full((count + 1, devices + 1), np.inf)  # of the first layers, on so many devices
    best[0, 0] = 0.0
    for stop in range(1, count + 1):
        for start in range(stop):
            for size in sizes:
                slowest = np.maximum(best[start, : devices + 1 - size], (before[stop] - before[start]) / size)
                np.minimum(best[stop, size:], slowest, out=best[stop, size:])
    return float(best[count, devices])
