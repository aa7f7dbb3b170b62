"""At least the prior art: the cases that Alpa's tests asserted, each at most the stated number of collectives.

The step is planned for 4 devices and compiled for 4 host devices. Counted are the instructions of the
compiled program (a combined collective once), loops multiplied out, scalars aside.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

import autopar
from autopar.ir.cluster import ClusterSpec
from autopar.verify.hlo_collectives import instruction_counts, parse_collectives
from tests.clusters import cluster
from tests.compare import graph_of, total_flops
from tests.models import alpa_cases
from tests.models.base import Model

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def cluster_of_4(latency_s: float) -> ClusterSpec:
    """4 devices on which dot products are worth splitting, and elementwise work is not worth a collective."""
    return cluster(4, flops_per_s=1e12, memory_bytes_per_s=1e14, latency_s=latency_s)


NARROW_S, WIDE_S = 2e-8, 2e-7
"""Latencies for models of a few megaFLOPs and of ten times that."""

ON_DEMAND = ("all-gather", "reduce-scatter", "all-to-all")
"""Collectives that Alpa's tests allowed for experts (all-gather, all-to-all) and ZeRO (reduce-scatter) only."""


def compile_case(
    model: Model, mesh: tuple[int, ...], latency_s: float = NARROW_S, **options: Any
) -> tuple[Any, Counter[str], Any]:
    """The plan, collective instructions executed per step by kind, and the rows behind them."""
    step = autopar.parallelize(model.step, cluster=cluster_of_4(latency_s), mesh=mesh, **model.kwargs, **options)
    plan = step.plan(*model.args)
    assert plan.predictions.flops <= 0.5 * total_flops(graph_of(model.step, *model.args)), "work is not split"
    rows = parse_collectives(step.lower(*model.args).compile().as_text())
    return plan, instruction_counts(rows, times_trips=True), rows


@dataclass(frozen=True, kw_only=True)
class Case:
    """``most``: per kind, how many Alpa needed; kinds not named: none."""

    name: str
    model: Any
    meshes: tuple[tuple[int, ...], ...]
    most: dict[str, int]
    latency_s: float = NARROW_S
    forbid: tuple[str, ...] = ON_DEMAND


LINES = ((4,), (1, 4), (4, 1))
CASES = (
    Case(name="mlp-data", model=lambda: alpa_cases.mlp(batch=256, hidden=32), meshes=LINES, most={"all-reduce": 1}),
    Case(
        name="mlp-wide",
        model=lambda: alpa_cases.mlp(batch=32, hidden=256),
        meshes=LINES,
        most={"all-reduce": 5},
        latency_s=WIDE_S,
    ),
    # On (2, 2): activations over one axis (5), gradients over the other, combined (1).
    Case(name="mlp-2d", model=lambda: alpa_cases.mlp(batch=256, hidden=32), meshes=((2, 2),), most={"all-reduce": 6}),
    Case(
        name="transformer-data",
        model=lambda: alpa_cases.transformer(batch=64, seq=64, hidden=32),
        meshes=LINES,
        most={"all-reduce": 1},
    ),
    Case(
        name="transformer-wide",
        model=lambda: alpa_cases.transformer(batch=8, seq=8, hidden=128),
        meshes=LINES,
        most={"all-reduce": 7},
        latency_s=WIDE_S,
    ),
    Case(
        name="transformer-wide-remat",
        model=lambda: alpa_cases.transformer(batch=8, seq=8, hidden=128, remat=True),
        meshes=LINES,
        most={"all-reduce": 11},
        latency_s=WIDE_S,
    ),
    Case(
        name="transformer-2d",
        model=lambda: alpa_cases.transformer(batch=8, seq=8, hidden=128),
        meshes=((2, 2),),
        most={"all-reduce": 8},
        latency_s=WIDE_S,
    ),
    Case(
        name="conv-data",
        model=lambda: alpa_cases.conv(batch=16, size=16, channels=4),
        meshes=LINES,
        most={"all-reduce": 1},
    ),
    Case(
        name="conv-wide",
        model=lambda: alpa_cases.conv(batch=16, size=16, channels=256),
        meshes=LINES,
        most={"all-reduce": 3},
        latency_s=WIDE_S,
    ),
    Case(
        name="moe",
        model=alpa_cases.moe,
        meshes=LINES,
        most={"all-reduce": 1, "all-to-all": 4},
        forbid=("reduce-scatter",),
    ),
)


def _params() -> list[Any]:
    return [
        pytest.param(
            case,
            mesh,
            id=f"{case.name}-{'x'.join(map(str, mesh))}",
            marks=[] if mesh == case.meshes[0] and n % 3 == 0 else [pytest.mark.full],
        )
        for n, case in enumerate(CASES)
        for mesh in case.meshes
    ]


@pytest.mark.parametrize(("case", "mesh"), _params())
def test_at_most_alpas_collectives(case: Case, mesh: tuple[int, ...]) -> None:
    plan, counts, _ = compile_case(case.model(), mesh, case.latency_s, forbid=case.forbid)
    rows = "\n".join(f"{c.count} × {c.kind} {c.axes} {c.operand_bytes} B, {c.where}" for c in plan.sharding.collectives)
    assert sum(counts[k] for k in KINDS) <= sum(case.most.values()), f"{dict(counts)}\n{rows}"


def _sharded(plan: Any, *, moments: bool, params: bool) -> dict[str, bool]:
    out: dict[str, bool] = {}
    for arg in plan.data.inputs:
        is_moment = "['opt']" in arg.path
        is_param = "['params']" in arg.path and not is_moment
        if len(arg.type.shape) > 1 and ((is_moment and moments) or (is_param and params)):
            out[arg.path] = any(arg.spec.dims)
    assert out
    return out


@pytest.mark.parametrize("mesh", [(4,), (1, 4)], ids=str)
def test_data_parallel_replicates_parameters(mesh: tuple[int, ...]) -> None:
    plan, counts, _ = compile_case(alpa_cases.mlp(batch=256, hidden=32), mesh, method="data_parallel")
    assert counts["all-reduce"] == 1
    assert sum(counts.values()) == 1
    assert not any(_sharded(plan, moments=True, params=True).values())


@pytest.mark.parametrize("method", ["zero2", "zero3"])
@pytest.mark.parametrize("mesh", [(4,), (1, 4)], ids=str)
def test_zero_scatters_and_gathers(method: str, mesh: tuple[int, ...]) -> None:
    plan, counts, _ = compile_case(alpa_cases.mlp(batch=256, hidden=32), mesh, method=method)
    assert counts["all-reduce"] == 0, counts
    assert counts["reduce-scatter"] > 0 and counts["all-gather"] > 0, counts
    assert counts["all-to-all"] == counts["collective-permute"] == 0
    assert all(_sharded(plan, moments=True, params=method == "zero3").values())


def test_wide_mlp_alternates_column_and_row() -> None:
    plan, _, _ = compile_case(alpa_cases.mlp(batch=32, hidden=256), (4,), WIDE_S, forbid=ON_DEMAND)
    kernels = [arg for arg in plan.data.inputs if "['params']" in arg.path and arg.path.endswith("['w']")]
    split = [[bool(axes) for axes in arg.spec.dims] for arg in kernels if "['opt']" not in arg.path]
    assert len(split) == 6
    assert all(sum(s) == 1 for s in split)
    assert all(a != b for a, b in itertools.pairwise(split))


def test_moe_shards_experts_by_expert() -> None:
    plan, _, _ = compile_case(alpa_cases.moe(), (1, 4), forbid=("reduce-scatter",))
    for name in ("up", "down"):
        (arg,) = [a for a in plan.data.inputs if a.path.endswith(f"['params']['{name}']")]
        assert arg.spec.dims[0], arg


def test_gradients_are_reduced_once_per_step_not_per_microbatch() -> None:
    model = alpa_cases.mlp(batch=256, hidden=32)
    _, whole, _ = compile_case(model, (1, 4), forbid=ON_DEMAND)
    plan, counts, rows = compile_case(model, (1, 4), forbid=ON_DEMAND, num_microbatches=2)
    assert counts["all-reduce"] <= 1, counts
    assert sum(counts.values()) == sum(whole.values())
    assert all(c.trips == 1 for c in plan.sharding.collectives if c.operand_bytes > 8)
    assert all(r.trips == 1 for r in rows if r.operand_bytes > 8)
