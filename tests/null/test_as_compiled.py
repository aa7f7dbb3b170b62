"""What compilers do to every program, in planning: what products read, which reduce-scatters stay, what is held."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.cost.collectives import combined_bytes
from autopar.cost.logical_meshes import logical_mesh
from autopar.cost.on_chip import FILLED, ON_CHIP_BYTES
from autopar.cost.scattering import LANES, stays_as_it_is, stays_in_rows, stays_scattered
from autopar.cost.tiling import padded, scattered
from autopar.frontend.layering.layers import layered
from autopar.frontend.trace import trace
from autopar.inter_op.layer_problems import LayerProblems, parts_of
from autopar.intra_op import peak, strategy_graph
from autopar.intra_op.flatten import Flat
from autopar.intra_op.overlap import aside
from autopar.intra_op.precision import as_read, moved_narrow
from autopar.intra_op.specs import Mesh
from autopar.ir import error_bands
from autopar.ir.cluster import Platform
from autopar.ir.error_bands import ErrorBand
from autopar.ir.errors import ClusterError
from autopar.ir.graph import TensorType
from autopar.ir.plan import Plan
from autopar.ir.plan_text import plan_text
from autopar.ir.presets import cluster_from_text
from autopar.runtime.compiling import compiler_options
from benchmarks.models import gpt, mlp

pytestmark = pytest.mark.slow


def planned(cluster: str, make: Any = mlp, *, sizes: dict[str, int], **options: Any) -> Plan:
    step, args = make(**sizes)
    return autopar.parallelize(step, cluster=cluster, donate_argnums=0, **options).plan(*args).data


WIDE = {"width": 1024, "batch": 2048}
GPT = {"layers": 2, "hidden": 256, "heads": 4, "seq": 64, "vocab": 512, "batch": 16}


# --- float32 products of default precision -------------------------------------------------------------------------


def test_products_read_bfloat16_on_tpus_alone() -> None:
    def step(x: Any, w: Any, v: Any) -> Any:
        y = jnp.tanh(x @ w)
        z = jnp.sin(x @ v)
        return jnp.cos(y.T) @ z + z

    a = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    graph = trace(step, a, a, a).graph
    assert as_read(graph, "gpu") is graph and not moved_narrow(graph)
    read = as_read(graph, "tpu")
    made = {n.primitive: n.result_types[0].dtype for n in read.nodes if n.primitive != "dot_general"}
    assert made["cos"] == "bfloat16", "a product alone reads it"
    assert made["sin"] == "float32", "an addition reads it, too"
    dots = [n for n in read.nodes if n.primitive == "dot_general"]
    assert all(t.dtype == "bfloat16" for n in dots for t in n.operand_types)
    assert all(t.dtype == "float32" for n in dots for t in n.result_types)
    assert moved_narrow(read) == {(8, 8)}
    assert read.values == graph.values, "the program does not change"


@pytest.mark.parametrize("precision", [jax.lax.Precision.HIGHEST, "float32"])
def test_products_of_a_stated_precision_read_what_there_is(precision: Any) -> None:
    a = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    graph = trace(lambda x, y: jnp.matmul(x, y, precision=precision), a, a).graph
    assert as_read(graph, "tpu").nodes == graph.nodes


def test_weights_are_gathered_at_half_their_bytes_on_tpus() -> None:
    gathered = {}
    for cluster in ("dgx-h100", "v5e-8"):
        plan = planned(cluster, sizes=WIDE, mesh=(8,), method="zero3")
        gathered[cluster] = sum(c.operand_bytes * c.count for c in plan.sharding.collectives if c.kind == "all-gather")
        wide = [c for c in plan.sharding.chains if c.type.dtype == "float32" and c.steps[0].kind == "all-gather"]
        assert wide, "chains are of the program's types"
    assert gathered["v5e-8"] == gathered["dgx-h100"] / 2


def test_what_products_alone_look_up_is_read_as_bfloat16() -> None:
    def step(table: Any, ids: Any, w: Any) -> Any:
        return table[ids] @ w

    table, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 8), (8, 8)))
    ids = jax.ShapeDtypeStruct((16,), jnp.int32)
    for fun, read in ((step, "bfloat16"), (lambda t, i, w: step(t, i, w) + t[i], "float32")):
        (looked_up, *_) = [n for n in as_read(trace(fun, table, ids, w).graph, "tpu").nodes if n.primitive == "gather"]
        assert looked_up.operand_types[0].dtype == read


def test_sums_of_what_is_looked_up_are_added_up_as_float32() -> None:
    """Each device holds a part of the table's rows, and gives zeros for others'."""

    def step(table: Any, ids: Any, w: Any) -> Any:
        return table[ids] @ w

    table, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1 << 20, 256), (256, 256)))
    ids = jax.ShapeDtypeStruct((4096,), jnp.int32)
    rows = PartitionSpec("x", None)
    planned = autopar.parallelize(step, cluster="v5e-8", mesh=(8,), constraints={"args[0]": rows}).plan(table, ids, w)
    found = {c.kind: c for c in planned.sharding.collectives}
    assert found["reduce-scatter"].dtype == "float32" and found["reduce-scatter"].operand_bytes == 4096 * 256 * 4


def test_chains_from_partial_sums_cost_what_float32_does() -> None:
    """Others of the same values what their rounded ones do."""
    logical = logical_mesh(cluster_from_text("v5e-8"), (8,))
    narrow = TensorType(shape=(4096, 256), dtype="bfloat16")
    wide = replace(narrow, dtype="float32")
    mesh = Mesh(logical, rounded={narrow.shape})
    sums = mesh.space(narrow).has_unreduced
    assert 0 < sums.sum() < len(sums)
    for combined in (False, True):
        rounds, wider, itself = mesh.costs(narrow, combined), mesh.costs(wide, combined), Mesh(logical).costs(narrow)
        np.testing.assert_array_equal(rounds[sums], wider[sums])
        if not combined:
            np.testing.assert_array_equal(rounds[~sums], itself[~sums])
            assert (wider >= rounds).all() and (itself < rounds).any()


def test_layers_know_what_is_rounded() -> None:
    step, args = gpt(layers=2, hidden=64, heads=4, seq=32, vocab=128, batch=8)
    graph = layered(step, args, num_microbatches=2).graph
    for cluster, known in (("v5e-8", True), ("dgx-h100", False)):
        problems = LayerProblems(parts_of(graph, ("none",)))
        assert bool(problems.mesh(logical_mesh(cluster_from_text(cluster), (8,))).rounded) == known


@pytest.mark.parametrize(
    ("length", "cluster", "kind"),
    [(1024, "v5e-8", "all-gather"), (1032, "v5e-8", "all-reduce"), (1032, "dgx-h100", "all-gather")],
)
def test_small_parts_of_vectors_are_gathered_by_all_reduces_on_tpus(length: int, cluster: str, kind: str) -> None:
    """Where they are no multiple of 128 elements; a product reads one of these rounded, but sums are float32."""
    b, v, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((length,), (length, 1), (4096, length)))
    pins = {"args[0]": PartitionSpec("x"), "args[1]": PartitionSpec("x", None), "args[2]": PartitionSpec("x", None)}
    step = autopar.parallelize(lambda b, v, x: (x + b) @ v, cluster=cluster, mesh=(8,), constraints=pins)
    found = step.plan(b, v, x).sharding.collectives
    assert {c.kind for c in found} == {kind} and sum(c.count for c in found) == 2
    sums = [c for c in found if c.kind == "all-reduce"]
    assert all(c.operand_bytes == 4 * length and c.dtype == "float32" for c in sums)


# --- reduce-scatters -------------------------------------------------------------------------------------------------


def test_which_reduce_scatters_stay() -> None:
    assert stays_as_it_is((128, 16, 64)) and stays_as_it_is((16, 128)) and not stays_as_it_is((16, 8, 1024))
    assert stays_in_rows((16, 8, 1024)) and stays_in_rows((2048,)) and not stays_in_rows((1024,))
    assert not stays_in_rows((2048 + LANES // 2,))
    assert not stays_scattered((4, 128)) and not stays_scattered((1000,)) and stays_scattered((4, 128, 1024))


def test_small_reduce_scatters_are_planned_as_what_becomes_of_them() -> None:
    plan = planned("v5e-8", gpt, sizes=GPT, mesh=(8,), method="zero3")
    for chain in plan.sharding.chains:
        for step in chain.steps:
            if step.kind == "reduce-scatter":
                parts = [math.prod(8 for _ in axes) for axes in chain.dst.dims]
                assert stays_scattered([n // p for n, p in zip(chain.type.shape, parts, strict=True)])


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", ["cpu:8", "dgx-h100"])
def test_what_is_held_is_the_peak(cluster: str) -> None:
    plan = planned(cluster, sizes=WIDE, mesh=(8,))
    (worker,) = plan.predictions.workers
    assert sum(size for _, size in worker.held) == pytest.approx(worker.peak_bytes, rel=1e-6)
    assert {"batch", "weights"} <= {kind for kind, _ in worker.held}
    assert [size for _, size in worker.held] == sorted((size for _, size in worker.held), reverse=True)


def test_what_stays_on_a_tpus_chip_needs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    there = planned("v5e-8", sizes=WIDE, mesh=(8,), method="zero3").predictions.peak_memory_bytes
    monkeypatch.setattr(peak, "ON_CHIP_BYTES", {})
    without = planned("v5e-8", sizes=WIDE, mesh=(8,), method="zero3").predictions.peak_memory_bytes
    assert 0 < without - there <= FILLED * ON_CHIP_BYTES["TPU-v5e"]


def test_what_stays_on_a_tpus_chip_takes_no_time_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what is larger than it takes, and for state."""

    def step(x: Any, w: Any) -> tuple[Any, Any]:
        y = jnp.cumsum(jnp.cumsum(x @ w, axis=0), axis=0)  # which fuses with nothing
        return y.sum(), jnp.cumsum(w, axis=0)

    def compute_s(rows: int) -> float:
        args = jax.ShapeDtypeStruct((rows, 1024), jnp.float32), jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
        return autopar.parallelize(step, cluster="v5e-1").plan(*args).data.predictions.compute_s

    small, large = 8192, 32768  # 34 and 134 MB
    there = compute_s(small), compute_s(large)
    monkeypatch.setattr(strategy_graph, "ON_CHIP_BYTES", {})
    without = compute_s(small), compute_s(large)
    moved = 5 * small * 4096  # of the product read, of both sums written and read
    assert without[0] - there[0] == pytest.approx(moved / (0.83 * 819e9), rel=0.02)
    assert without[1] == pytest.approx(there[1], rel=1e-4)


def test_only_gathers_run_beside_products_on_tpus() -> None:
    for cluster, reduces in (("v5e-8", False), ("dgx-h100", True)):
        rows = planned(cluster, gpt, sizes=GPT, mesh=(8,), method="zero3").sharding.collectives
        large = [c for c in rows if c.operand_bytes > 1 << 12]
        assert any(c.beside for c in large if c.kind == "all-gather")
        assert any(c.beside for c in large if c.kind in ("all-reduce", "reduce-scatter")) == reduces


def test_tiles_pad_what_is_stored() -> None:
    assert padded((16, 16, 197, 197)) == pytest.approx(256 / 197), "197 lanes, 16 rows"
    assert padded((1 << 20, 8)) == padded((8, 1 << 20)) == padded((4, 3, 4, 1 << 20)) == padded(()) == padded((1,)) == 1
    assert padded((64,)) == padded((1, 64, 1)) == padded((64, 64)) == 2 and padded((3, 128)) == pytest.approx(4 / 3)
    assert scattered((1 << 18, 8)) == 16 and scattered((1 << 18, 2, 8)) == scattered((1 << 19, 8)) == 1
    assert scattered((1 << 19, 200)) == pytest.approx(256 / 200) and scattered((64,)) == 2


def test_scatters_on_tpus_are_laid_out_by_rows() -> None:
    """262,144 rows of 8 as of 128; more are not. A sum that is all-reduced is there three times."""

    def step(table: Any, ids: Any, rows: Any) -> Any:
        return table - jnp.zeros_like(table).at[ids].add(rows)

    def temporaries(cluster: str, rows: int, **options: Any) -> tuple[float, float]:
        args = [
            jax.ShapeDtypeStruct(shape, dtype)
            for shape, dtype in (((rows, 8), jnp.float32), ((4096,), jnp.int32), ((4096, 8), jnp.float32))
        ]
        options = {"donate_argnums": 0, **options}
        found = autopar.parallelize(step, cluster=cluster, **options).plan(*args).data.predictions
        return found.peak_memory_bytes - (found.argument_bytes or 0), found.compute_s

    few, more = temporaries("v5e-1", 1 << 18), temporaries("v5e-1", (1 << 18) + 128)
    assert few[0] >= (1 << 18) * 128 * 4 > 10 * more[0]
    assert few[1] > 3 * more[1]
    assert temporaries("dgx-h100:1", 1 << 18)[0] < (1 << 18) * 3 * 8 * 4
    rows = 1 << 22  # more than the chip holds
    alone, reduced = temporaries("v5e-1", rows)[0], temporaries("v5e-8", rows, mesh=(8,), method="data_parallel")[0]
    assert reduced - alone == pytest.approx(2 * rows * 8 * 4, rel=0.01)


def test_elements_are_picked_from_rows_as_they_lie() -> None:
    """Along the last dimension nothing is laid out by rows: 6 of 16 elements of each of 65,536 examples, which by rows
    would take 268 MB, more than stays on the chip."""
    rows, columns = np.triu_indices(4, 1)
    x = jax.ShapeDtypeStruct((65536, 4, 4), jnp.float32)
    plan = autopar.parallelize(lambda x: x[:, rows, columns], cluster="v5e-1").plan(x).data
    assert plan.predictions.peak_memory_bytes < 2 * 65536 * (16 + 8) * 4
    assert plan.predictions.compute_s < 5e-5


def test_convolutions_on_tpus_hold_batch_and_features_as_rows_and_lanes() -> None:
    """Images of 3 channels, 16 at a time, in tiles of 4 rows and 128 lanes: as a copy that is read twice, and rounded
    to bfloat16, of an argument as of what is made for it."""

    def step(w: Any, x: Any, made: bool) -> Any:
        def loss(w: Any) -> Any:
            images = jnp.cumsum(x, axis=1) if made else x
            y = jax.lax.conv_general_dilated(images, w, (8, 8), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return jnp.sum(jnp.tanh(y))

        return w - autopar.value_and_grad(loss)(w)[1]

    def temporaries(cluster: str, channels: int, made: bool) -> float:
        shapes = (3, 3, channels, 128), (16, 512, 512, channels)
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        options: dict[str, Any] = {"cluster": cluster, "donate_argnums": 0, "static_argnums": 2}
        found = autopar.parallelize(step, **options).plan(*args, made).data.predictions
        return found.peak_memory_bytes - (found.argument_bytes or 0)

    stored = 512 * 512 * 4 * 128 * 2  # products read bfloat16 there
    for made in (False, True):
        found = {c: temporaries(c, 3, made) for c in ("v5e-1", "dgx-h100:1")}
        assert 0.9 * stored < found["v5e-1"] < 1.5 * stored and found["dgx-h100:1"] < 0.5 * stored
    assert temporaries("v5e-1", 128, False) < 512 * 512 * 16 * 128 * 4, "no copy where nothing pads"


def test_a_convolutions_copy_of_an_argument_is_there_from_its_first_use_to_its_last() -> None:
    """A gigabyte that is needed between a convolution and its gradient is beside the copy, one needed later is not."""

    def large(x: Any) -> Any:
        return jnp.max(jnp.cumsum(jnp.full(1 << 28, x)))

    def step(w: Any, x: Any, between: bool) -> Any:
        def loss(w: Any) -> Any:
            y = jax.lax.conv_general_dilated(x, w, (8, 8), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return jnp.sum(jnp.tanh(y)) * (large(jax.lax.stop_gradient(jnp.sum(y))) if between else 1.0)

        value, gradient = autopar.value_and_grad(loss)(w)
        return w - gradient * (1.0 if between else large(value + jnp.sum(gradient)))

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, 3, 3, 128), (16, 512, 512, 3))]
    options: dict[str, Any] = {"cluster": "v5e-1", "donate_argnums": 0, "static_argnums": 2}
    peaks = [
        autopar.parallelize(step, **options).plan(*args, between).data.predictions.peak_memory_bytes
        for between in (True, False)
    ]
    copy = 512 * 512 * 4 * 128 * 2
    assert peaks[0] - peaks[1] == pytest.approx(copy, rel=0.2)


def test_what_the_first_product_reads_is_gathered_before_it() -> None:
    for cluster in ("v5e-8", "dgx-h100"):
        rows = planned(cluster, sizes={"width": 2048, "batch": 4096}, mesh=(8,), method="zero3").sharding.collectives
        gathers = [c for c in rows if c.kind == "all-gather" and c.operand_bytes > 1 << 16]
        assert len(gathers) > 1 and [c.beside for c in gathers].count(False) == 1


def test_reductions_are_not_hidden_beside_the_update() -> None:
    """A table's gradient, all-reduced before much of an optimizer: what hides is bound by the little in between."""

    def step(state: Any, ids: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            table, w = params
            return jnp.sum(jnp.tanh(table[ids] + x @ w) @ w)

        grads = autopar.value_and_grad(loss)(state[0])[1]
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state[1], grads)
        return jax.tree.map(lambda p, m: p - m, state[0], moments), moments

    params = tuple(jax.ShapeDtypeStruct((n, 64), jnp.float32) for n in (1 << 20, 64))
    args = (params, params), jax.ShapeDtypeStruct((4096,), jnp.int32), jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    options: dict[str, Any] = {"cluster": "dgx-h100", "mesh": (8,), "method": "data_parallel", "donate_argnums": 0}
    plan = autopar.parallelize(step, **options).plan(*args).data
    predicted = plan.predictions
    assert any(c.beside and c.operand_bytes == 4 << 26 for c in plan.sharding.collectives)
    assert 0 < predicted.hidden_s < 0.3 * predicted.compute_s


def test_all_reduces_are_in_place_on_gpus() -> None:
    """Of gradients as large as weights, each is there once while it is reduced."""
    width = 1024
    peaks = {c: planned(c, sizes=WIDE, mesh=(8,), method="data_parallel").predictions for c in ("cpu:8", "dgx-h100")}
    weight = 4 * width**2
    temporaries = {c: p.peak_memory_bytes - (p.argument_bytes or 0) for c, p in peaks.items()}
    assert temporaries["dgx-h100"] < 3 * weight <= temporaries["cpu:8"] + weight


def test_sums_of_gradients_are_reduced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the last microbatch's backward pass: they may hide there. New state is gathered together."""
    sums: list[bool] = []
    states: list[bool] = []

    def spy(flat: Flat, platform: Platform) -> tuple[Any, Any]:
        combined, hideable = aside(flat, platform)
        makers = [flat.kind[flat.maker[v]] if v >= 0 else "" for v in flat.source]
        sums.extend(bool(hidden) for kind, hidden in zip(makers, hideable, strict=True) if kind == "loop_out")
        users = [flat.kind[n] for n in flat.columns().user.tolist()]
        states.extend(
            bool(c) for kind, maker, c in zip(users, makers, combined, strict=True) if kind == "arg" and maker
        )
        return combined, hideable

    monkeypatch.setattr(strategy_graph, "aside", spy)
    sizes = {"layers": 2, "hidden": 1024, "heads": 4, "seq": 256, "vocab": 512, "batch": 64}
    plan = planned("dgx-h100:2", gpt, sizes=sizes, num_microbatches=4, stages=2, zero=1, tensor=1)
    rows = [c for s in plan.pipelined.shardings for c in s.collectives]
    large = [c for c in rows if c.kind in ("all-reduce", "reduce-scatter") and c.operand_bytes > 1 << 20]
    often = [c for c in large if c.trips > 1 and "convert_element_type" not in c.where]  # what is rounded is whole
    assert large and not often
    assert any(sums) and states and all(states)


def test_a_plan_has_what_programs_can_have() -> None:
    """Of a TPU what its compiler says, of a GPU nine tenths of what drivers report; a profile's memory was measured."""
    limits = {c: planned(c, sizes=WIDE, stages=1).predictions.workers[0].limit_bytes for c in ("v5e-8", "dgx-h100")}
    assert limits == {"v5e-8": 15.75 * 2**30, "dgx-h100": pytest.approx(0.9 * 85.2e9)}
    plan = planned("dgx-h100", sizes=WIDE, stages=1)
    (worker,) = plan.predictions.workers
    for part, said in ((0.5, None), (0.8, "XLA_PYTHON_CLIENT_MEM_FRACTION=0.80 (0.75 by default)")):
        fuller = replace(worker, peak_bytes=part * 85.2e9 - 1.0)
        text = plan_text(replace(plan, predictions=replace(plan.predictions, workers=(fuller,))))
        assert said in text if said else "MEM_FRACTION" not in text
    with pytest.raises(ClusterError, match="reserved_bytes is 80000000000 of 80000000000"):
        replace(plan.meshes[0].device, reserved_bytes=80_000_000_000).verify()


def test_compilers_are_told_of_a_memory_limit() -> None:
    free = planned("dgx-h100", sizes=WIDE, mesh=(8,))
    limited = planned("dgx-h100", sizes=WIDE, mesh=(8,), memory_bytes=40e9)
    assert isinstance(limited.config.memory_bytes, int)
    name = "xla_gpu_memory_limit_slop_factor"
    assert name not in compiler_options(free, "gpu", {}) and name not in compiler_options(limited, "cpu", {})
    assert compiler_options(limited, "gpu", {})[name] == 48
    assert compiler_options(limited, "gpu", {name: 90})[name] == 90


def test_compilers_combine_as_plans_are_priced() -> None:
    name = "xla_gpu_reduce_scatter_combine_threshold_bytes"
    eight, sixteen = (planned(c, sizes=WIDE, stages=1) for c in ("dgx-h100", "dgx-h100:2"))
    assert name not in compiler_options(eight, "gpu", {}) and name not in compiler_options(sixteen, "tpu", {})
    assert compiler_options(sixteen, "gpu", {})[name] == combined_bytes("gpu", 16) == 2 * combined_bytes("gpu", 8)


# --- error bands -----------------------------------------------------------------------------------------------------


def test_plans_say_how_far_such_predictions_were_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_bands, "BANDS", {"H100": ErrorBand(low=0.8, high=1.25, runs=70)})
    text = plan_text(planned("dgx-h100", sizes=WIDE, mesh=(8,)))
    assert "0.80 to 1.25 times what is predicted of them on H100-SXM5-80GB" in text
    assert "steps took" not in plan_text(planned("cpu:8", sizes=WIDE, mesh=(8,)))


def test_bands_hold_their_runs() -> None:
    for name, band in error_bands.BANDS.items():
        assert band.low < 1 < band.high and band.runs >= error_bands.FEWEST, name
        assert error_bands.error_band(name if name.startswith("TPU") else f"{name}-SXM") is band
    assert error_bands.error_band("cpu") is None and error_bands.error_band("H200-SXM5-141GB") is None


# --- resharding ------------------------------------------------------------------------------------------------------


def test_what_widens_is_resharded_before_it_does() -> None:
    sizes = {"layers": 1, "hidden": 1024, "heads": 16, "seq": 512, "vocab": 16384, "batch": 64}
    rows = planned("dgx-h100", gpt, sizes=sizes, mesh=(8,)).sharding.collectives
    exchanged = [c.dtype for c in rows if c.kind == "all-to-all"]
    assert exchanged and set(exchanged) == {"bfloat16"}
