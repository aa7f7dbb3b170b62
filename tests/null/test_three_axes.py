"""Meshes of three axes: which there are, where they are looked for, and that they pay."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

import autopar
from autopar.cost.logical_meshes import logical_mesh, three_axis_shape
from autopar.inter_op.layer_layouts import RATES, _prices, _rates, rate_of
from autopar.inter_op.pipeline_search import _Planner
from autopar.ir.cluster import ClusterSpec, LinkSpec
from autopar.ir.errors import OptionError
from autopar.ir.layers import LayeredGraph
from autopar.ir.pipelined import PipelineOptions
from autopar.ir.plan_text import plan_text
from autopar.ir.presets import cluster_from_text
from benchmarks.models import chain_step
from tests.null.test_pipelines_regressions import f32, layers_of


@pytest.mark.parametrize(
    ("cluster", "shape"),
    [
        ("dgx-h100", (2, 2, 2)),
        ("dgx-h100:8", (8, 2, 4)),  # hosts, and the devices of one in halves
        ("gb200-nvl72", (18, 2, 2)),
        ("gb200-nvl72:2", (2, 18, 4)),  # domains, hosts of one, devices
        ("v5p-128", (4, 4, 4)),  # as the torus is
        ("v4-4096", (8, 16, 16)),
        ("v5e-64", (8, 2, 4)),
        ("v5p-128:2", (2, 16, 4)),  # slices stay apart
        ("cpu:4", None),
        ("cpu:6", None),
    ],
)  # fmt: skip
def test_shapes(cluster: str, shape: tuple[int, int, int] | None) -> None:
    made = cluster_from_text(cluster)
    (group,) = made.groups
    assert three_axis_shape(group) == shape
    if shape is not None:
        assert math.prod(shape) == made.num_devices
        assert [axis.size for axis in logical_mesh(made, shape).axes] == list(shape)


@pytest.mark.slow
def test_one_program_is_faster() -> None:
    """A product of three large dimensions, each over an axis, where bytes are all that links cost."""
    args = [f32(4096, 4096)] * 4, f32(4096, 4096)
    (group,) = cluster_from_text("dgx-h100").groups
    slow = replace(group, intra_host=LinkSpec(latency_s=1e-6, bytes_per_s=4e10))
    cluster = ClusterSpec(name="slow links", groups=(slow,))
    plans = [autopar.parallelize(chain_step, cluster=cluster, stages=1, mesh_axes=n).plan(*args) for n in (2, 3)]
    assert [len(plan.data.meshes[0].axes) for plan in plans] == [2, 3]
    assert plans[1].data.predictions.step_s < 0.95 * plans[0].data.predictions.step_s
    assert "meshes of up to 3 axes" in plan_text(plans[1].data)


@pytest.mark.slow
def test_stages_try_three_axes_where_the_best_cut_is() -> None:
    graph = products()
    cluster = cluster_from_text("dgx-h100:4")
    steps: dict[int, float] = {}
    for axes in (2, 3):
        options = PipelineOptions(workers=1, remat=("none",), mesh_axes=axes, stages=(2, 2))
        planner = _Planner(graph, cluster, options, None, None)
        made = planner.run()
        steps[axes] = made.step_s
        ranks = {
            cell.submesh: {len(option.table.mesh.shape) for option in mine}
            for cell, mine in zip(planner.builder.cells, planner.builder.options, strict=True)
        }
        used = {s for s, found in ranks.items() if 3 in found}
        if axes == 2:
            assert not used
        else:
            assert used and len(used) <= 2 < len(ranks)
            assert all(2 in ranks[s] for s in used if s.size > s.devices)
    assert steps[3] <= steps[2]


@pytest.mark.slow
def test_only_what_the_best_cut_has_is_solved() -> None:
    """Of its submeshes the layers that are there, and what these keep."""
    options = PipelineOptions(workers=1, mesh_axes=3, stages=(2, 2))
    planner = _Planner(products(), cluster_from_text("dgx-h100:4"), options, None, None)
    layouts = planner.layouts()
    parts = layouts.problems.parts
    assert len(parts.remats) == 3
    used = planner._used(planner.built(layouts)[0], parts)
    assert layouts.look_closer(used)
    closer = [t for found in layouts.found.values() for _, t in found if len(t.mesh.shape) == 3]
    assert len(closer) == len(used)
    for table in closer:
        solved = {(n, x.remat) for n, mine in zip(parts.number, table.layouts, strict=True) for x in mine}
        assert solved in [{(n, remat) for n, remat, _ in wanted} for wanted in used.values()]


def products() -> LayeredGraph:
    """Four layers of a product each."""

    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = autopar.layer_boundary(jnp.tanh(x @ w))
        return jnp.sum(x * x)

    return layers_of(loss, [f32(4096, 4096)] * 4, f32(4096, 4096))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"mesh_axes": 4}, "mesh_axes: 4 is not one of 2, 3"),
        ({"mesh_axes": True}, "mesh_axes: got True, of type bool; expected int"),
        ({"mesh_axes": 3, "mesh": 8}, "mesh_axes: mesh= says which meshes there are; leave one of them out"),
        ({"mesh_axes": 3, "tensor": 2}, "mesh_axes: beside tensor 2: degrees say which axes a mesh has"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        autopar.parallelize(chain_step, cluster="dgx-h100", **options)


def test_rates_are_those_wanted_and_the_next() -> None:
    wanted = frozenset({(0, "none", 0.1), (0, "dots", 0.01), (1, "full", 0.0), (2, "none", 0.01), (2, "none", 1.0)})
    assert [_rates(n, remat, None) for n, remat in ((0, "none"), (7, "dots"))] == [RATES["none"], RATES["dots"]]
    assert _rates(0, "none", wanted) == (0.01, 0.1, 1.0)
    assert _rates(0, "dots", wanted) == (0.1, 1.0)  # 0.01 is none of them: 0.1 is
    assert _rates(1, "full", wanted) == (0.01,)
    assert _rates(1, "none", wanted) == ()
    assert _rates(2, "none", wanted) == (0.01, 0.1, 1.0)
    for count in (1, 2, 64):
        prices = _prices(count)
        assert [rate_of(k, count) for k in range(len(prices))] == [rate for rate, _ in prices]
        assert {n for _, n in prices} <= {0, *range(1, count + 1)} and prices[0] == (0.0, 0)
