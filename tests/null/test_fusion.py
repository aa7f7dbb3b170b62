"""Kernels of small graphs, worked out by hand: what compilers for GPUs and TPUs make one of, read and write.

Values are float32[16, 16], one unit each, and ROW float32[16], as in test_liveness.
"""

from __future__ import annotations

import numpy as np
import pytest

from autopar.intra_op.flatten import flatten
from autopar.intra_op.fusion import FUSIONS, Fusion, fused
from autopar.intra_op.liveness import liveness
from autopar.intra_op.traffic import traffic
from autopar.ir.graph import Constant, Graph
from tests.null.test_liveness import ROW, SCALAR, UNIT, Program

GPU, TPU = FUSIONS["gpu"], FUSIONS["tpu"]


def moved(graph: Graph, fusion: Fusion) -> float:
    """Units that operators but products read and write."""
    flat = flatten(graph)
    written = None if fusion.joins else liveness(flat).written.tolist()
    of = traffic(fused(flat, fusion, None, written))
    total = 0.0
    for n, types in enumerate(flat.operand_types):
        for i, t in enumerate(types):
            total += of.reads[flat.first_edge[n] + i] * t.size_bytes / UNIT.size_bytes
        for r, t in enumerate(flat.result_types[n]):
            total += of.writes[flat.first_value[n] + r] * t.size_bytes / UNIT.size_bytes
    return total


def _chain() -> Graph:
    p = Program(UNIT)
    return p.graph(p.op("tanh", p.op("exp", p.op("sin", 0))))


@pytest.mark.parametrize("fusion", FUSIONS.values(), ids=str)
def test_a_chain_reads_once_and_writes_once(fusion: Fusion) -> None:
    assert moved(_chain(), fusion) == 2


def _softmax() -> Graph:
    """Rows minus their maximum, over their sum."""
    p = Program(UNIT)
    most = p.op("broadcast_in_dim", p.op("reduce_max", 0, to=ROW, axes=(1,)), shape=(16, 16), broadcast_dimensions=(0,))
    e = p.op("exp", p.op("sub", 0, most))
    total = p.op("reduce_sum", e, to=ROW, axes=(1,))
    return p.graph(p.op("div", e, p.op("broadcast_in_dim", total, shape=(16, 16), broadcast_dimensions=(0,))))


@pytest.mark.parametrize("fusion", [GPU, TPU])
def test_a_softmax_of_rows_is_one_kernel(fusion: Fusion) -> None:
    assert moved(_softmax(), fusion) == 2


def test_a_reduction_over_rows_ends_a_kernel_on_a_gpu() -> None:
    p = Program(UNIT)
    total = p.op(
        "broadcast_in_dim", p.op("reduce_sum", 0, to=ROW, axes=(0,)), shape=(16, 16), broadcast_dimensions=(1,)
    )
    assert moved(p.graph(p.op("sub", 0, total)), GPU) == pytest.approx(1 + 1 / 16 + 1 + 1 / 16 + 1)


def test_an_update_reads_each_gradient_once() -> None:
    """Two moments and a weight of one gradient: four are read, three written."""
    p = Program(UNIT, UNIT, UNIT, UNIT)
    weight, first, second, gradient = range(4)
    mean = p.op("add", p.op("mul", first, Constant(type=SCALAR, value=0.9)), gradient)
    square = p.op("add", p.op("mul", second, Constant(type=SCALAR, value=0.9)), p.op("mul", gradient, gradient))
    new = p.op("sub", weight, p.op("mul", mean, p.op("rsqrt", square)))
    graph = p.graph(new, mean, square, donated=((weight, 0), (first, 1), (second, 2)))
    assert moved(graph, GPU) == moved(graph, TPU) == 7


def _around_products() -> Graph:
    """A function between two products."""
    p = Program(UNIT, UNIT, UNIT)
    return p.graph(p.dot(p.op("tanh", p.dot(0, 1)), 2))


def test_a_function_between_products_is_part_of_them_on_a_tpu_alone() -> None:
    assert moved(_around_products(), GPU) == 2
    assert moved(_around_products(), TPU) == 0


def test_a_part_that_is_looked_up_or_written_is_all_that_moves() -> None:
    p = Program(UNIT)
    assert moved(p.graph(p.op("slice", 0, to=ROW, start_indices=(0, 0), limit_indices=(1, 16))), GPU) == 2 / 16


def test_what_is_filled_in_is_written_by_what_reads_it_from_memory() -> None:
    """Zeros before rows are added to them: filled, and a row read and written."""
    p = Program(ROW, ROW)
    zeros = p.op("broadcast_in_dim", Constant(type=SCALAR, value=0.0), shape=(16, 16), broadcast_dimensions=())
    params = {"dimension_numbers": {}, "indices_are_sorted": False, "unique_indices": False, "mode": None}
    node = Program.op(p, "scatter-add", zeros, 0, 1, **params)
    flat = flatten(p.graph(node))
    of = traffic(fused(flat, GPU))
    (scatter,) = (n for n in range(len(flat.kind)) if flat.kind[n] == "op" and flat.node[n].primitive == "scatter-add")  # type: ignore[union-attr]
    first = flat.first_edge[scatter]
    assert of.reads[first] == 1 + 1 / 16
    assert of.writes[flat.first_value[scatter]] == 1 / 16


@pytest.mark.parametrize(("fusion", "held"), [(GPU, [1.0, 1.0, 1.0]), (TPU, [1.0, 1.0, 1.0])], ids=["gpu", "tpu"])
def test_what_a_kernel_makes_for_itself_is_never_held(fusion: Fusion, held: list[float]) -> None:
    flat = flatten(_chain())
    live = liveness(flat, None, fused(flat, fusion))
    sizes = np.zeros(live.horizon)
    for n in (n for n, kind in enumerate(flat.kind) if kind == "op"):
        if (span := live.interval(n)) is not None:
            sizes[span[0] : span[1]] += 1
    assert sizes[1:].max() == max(held)
    assert [live.interval(n) is not None for n, kind in enumerate(flat.kind) if kind == "op"] == [False, False, True]
