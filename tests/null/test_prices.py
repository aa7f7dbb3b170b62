"""Prices by shape and fabric: what holds of them whatever their constants are."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.collectives import FABRICS, collective_s, wire_bytes
from autopar.cost.kernels import attention_s
from autopar.cost.logical_meshes import logical_mesh
from autopar.cost.products import family, matrix_units, product_s
from autopar.intra_op.overlap import SHARES, exposed_s
from autopar.intra_op.specs import Mesh
from autopar.ir.cluster import DeviceSpec, LinkSpec
from autopar.ir.graph import TensorType
from autopar.ir.presets import PRESETS, cluster_from_text
from autopar.ir.slices import GENERATIONS
from autopar.primitives.attention import Attended

DEVICES = {name: c.groups[0].device for name, c in PRESETS.items()} | {n: g.device for n, g in GENERATIONS.items()}
SIZES = st.sampled_from([1, 7, 64, 128, 200, 512, 1000, 4096])
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@pytest.mark.parametrize("name", DEVICES)
def test_presets_have_constants_and_reach_no_more_than_the_data_sheet(name: str) -> None:
    device = DEVICES[name]
    assert (matrix_units(device) is None) == (device.platform == "cpu")
    for dtype, peak in device.flops_per_s:
        n = 16384
        if dtype in ("bfloat16", "float16", "float32"):
            assert 0.5 * peak < 2 * n**3 / float(product_s(device, dtype, 1, n, n, n)) <= peak


def test_measured_devices_reach_what_was_measured() -> None:
    device = DeviceSpec(
        name="NVIDIA H100 80GB HBM3", memory_bytes=80, flops_per_s=(("float32", 1e12),), memory_bytes_per_s=1e15
    )
    assert family(device) == ""
    assert float(product_s(device, "float32", 2, 100, 100, 100)) == pytest.approx(4e6 / 1e12)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(DEVICES)), SIZES, SIZES, SIZES, SIZES)
def test_a_larger_product_takes_no_less(name: str, batch: int, m: int, n: int, k: int) -> None:
    device = DEVICES[name]
    one = float(product_s(device, "bfloat16", batch, m, n, k))
    for more in ((2 * batch, m, n, k), (batch, 2 * m, n, k), (batch, m, 2 * n, k), (batch, m, n, 2 * k)):
        assert float(product_s(device, "bfloat16", *more)) >= one * (1 - 1e-9)
    many = product_s(device, "bfloat16", np.array([batch, 1.0]), m, n, k)
    assert many[0] == one


def test_products_of_a_few_elements_are_no_tiles() -> None:
    """XLA writes those out whose operands have fewer than 100 elements together, batch apart."""
    h100, many = DEVICES["dgx-h100"], 16384
    few, more = (float(product_s(h100, "float32", many, 4, 4, k)) for k in (12, 13))
    moved = many * 4 * (2 * 4 * 12 + 16)
    assert few == pytest.approx(2e-6 + moved / h100.memory_bytes_per_s) and more > 3 * few


@pytest.mark.parametrize("name", ["dgx-h100", "v5e-8", "cpu"])
def test_products_that_move_other_bytes(name: str) -> None:
    """A convolution's windows overlap."""
    device = DEVICES.get(name) or cluster_from_text("cpu:1").groups[0].device
    own = float(product_s(device, "bfloat16", 1, 8, 8, 1 << 24))
    bytes_ = 2 * 8 * 2 * (1 << 24)
    assert float(product_s(device, "bfloat16", 1, 8, 8, 1 << 24, moved_bytes=bytes_ + 2 * 64)) == own
    assert float(product_s(device, "bfloat16", 1, 8, 8, 1 << 24, moved_bytes=10 * bytes_)) > 1.3 * own


def test_a_tail_of_tiles_takes_a_wave() -> None:
    """132 tiles of 256 x 128 are one wave of an H100's, one more column of tiles another."""
    h100 = DEVICES["dgx-h100"]
    full = float(product_s(h100, "bfloat16", 1, 256 * 12, 128 * 11, 8192))
    more = float(product_s(h100, "bfloat16", 1, 256 * 12, 128 * 12, 8192))
    assert more > 1.2 * full


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["", *FABRICS]), st.sampled_from(KINDS), st.sampled_from([2, 4, 8, 64]), st.floats(1, 1e10))
def test_collectives_take_at_least_their_wire(fabric: str, kind: str, size: int, operand_bytes: float) -> None:
    link = LinkSpec(latency_s=1e-6, bytes_per_s=1e11, fabric=fabric)
    seconds = float(collective_s(kind, size, operand_bytes, link))
    growth = FABRICS[fabric][kind].growth if fabric else 0.0  # type: ignore[index]
    rate = 1e11 * (size / 8) ** growth
    assert seconds >= wire_bytes(kind, size, operand_bytes) / rate
    assert float(collective_s(kind, size, 2 * operand_bytes, link)) >= seconds


def test_no_other_kind_of_collective() -> None:
    with pytest.raises(ValueError, match="not a collective: broadcast"):
        collective_s("broadcast", 2, 1.0, LinkSpec(latency_s=1.0, bytes_per_s=1.0))


def test_attention_of_longer_sequences_reaches_more() -> None:
    h100 = DEVICES["dgx-h100"]

    def rate(positions: int, causal: bool = False) -> float:
        of = Attended(positions=positions, head_size=128, causal=causal, backward=False)
        return 1e15 / float(attention_s(h100, "bfloat16", 1e15, of))

    assert rate(512) < rate(16384) < h100.peak_flops_per_s("bfloat16")
    assert rate(2048, causal=True) < rate(2048)


def test_what_runs_beside_compute_shows_in_part_and_beyond_it() -> None:
    share = SHARES["gpu"]
    assert exposed_s("gpu", 1.0, 10.0) == pytest.approx(share)
    assert exposed_s("gpu", 10.0, 1.0) == pytest.approx(10 - 1 + 0.0)
    assert exposed_s("cpu", 1.0, 10.0) == 1.0


@pytest.mark.parametrize("cluster", ["dgx-h100:8", "v5p-128"])
def test_combined_collectives_cost_by_their_bytes(cluster: str) -> None:
    """Along the same chains, and no more than they would by themselves; large ones the same."""
    mesh = Mesh(logical_mesh(cluster_from_text(cluster), (8, 8)))
    small = TensorType(shape=(64, 64), dtype="float32")
    large = TensorType(shape=(1 << 16, 1 << 12), dtype="float32")
    for t in (small, large):
        apart, together = mesh.costs(t), mesh.costs(t, True)
        assert (together <= apart * (1 + 1e-9)).all()
        assert math.isclose(together.max(), apart.max(), rel_tol=0.02) == (t is large)
    alone = mesh.collective_s("all-gather", (0,), 1e3, True)
    assert 2 * alone == pytest.approx(mesh.collective_s("all-gather", (0,), 2e3, True))
